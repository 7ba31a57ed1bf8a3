"""A handle's rows are freed in the worker once, when nobody can want them there any more, whatever happens in which order."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from steercap.core.coding import RAW
from steercap.core.messages import Owner, Parcel
from steercap.core.plan import CapturePlan, Plan
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.engine.fetching import Delivery
from steercap.errors import CaptureIncomplete, CaptureReleased
from steercap.requests.checks import Expected
from steercap.requests.lifecycle import NEXT, Event, Lifecycle, Source, Stage

POINT = Point(0, "resid_post")
PLAN = Plan("r", 2, 3, capture=CapturePlan((0,), (Range(0, None),), None, RAW))
TOKENS = (5, 6, 7)


class Keeper:
    """The end of an engine that rows are given back to."""

    def __init__(self, *, here: bool = True) -> None:
        self.freed: list[tuple[str, Owner]] = []
        self.home = SimpleNamespace(is_here=here)
        self.vllm = SimpleNamespace(points=(POINT,), num_layers=1)

    def give_back(self, owner: Owner, _ticket: Any) -> None:
        self.freed.append(("here", owner))

    def give_back_from_any_thread(self, owner: Owner, _ticket: Any) -> None:
        self.freed.append(("elsewhere", owner))


def kept(keeper: Keeper) -> Lifecycle:
    return Lifecycle("r", source=Source(keeper, Owner("r", 0), None, Expected("r", PLAN, (POINT,), TOKENS)))


def delivery(token_ids=TOKENS[:2]) -> Delivery:
    parcel = Parcel(
        owner=Owner("r", 0),
        coding=RAW,
        points=(0,),
        lines=(),
        stored_rows=2,
        positions=np.arange(2).tobytes(),
        token_ids=np.array(token_ids).tobytes(),
        writes=2,
        failure=None,
    )
    return Delivery((parcel,), {0: (torch.ones(2, 4),)}, None)


def test_released_rows_stay_released() -> None:
    """From every stage a release leads to the end, at once or when the fetch under way is done; nothing leads out of it."""
    for stage in Stage:
        after = NEXT[stage, Event.RELEASE]
        assert after is Stage.GONE or NEXT[after, Event.FAIL] is Stage.GONE
    assert {event for stage, event in NEXT if stage is Stage.GONE} == {Event.RELEASE}
    assert {stage for stage, _ in NEXT} == set(Stage)


@pytest.mark.parametrize("events", itertools.product(["come", "fail", "release"], repeat=3))
def test_rows_are_freed_once_and_when_they_are_not_needed(events) -> None:
    """A fetch, and a release, a right and a wrong delivery in any order: freed once exactly when they are here or gone."""
    keeper = Keeper()
    life = kept(keeper)
    life.fetch()
    for event in events:
        if event == "release":
            life.release()
        elif event == "come":
            life.arrive(delivery())
        elif life.stage is Stage.COMING:
            with pytest.raises(CaptureIncomplete):
                life.arrive(delivery((5, 9)))
        assert len(keeper.freed) == (life.stage in {Stage.HERE, Stage.GONE})
    life.end_fetch()
    assert keeper.freed == ([] if life.stage is Stage.KEPT else [("here", Owner("r", 0))])
    assert life.stage in {Stage.KEPT, Stage.HERE, Stage.GONE}
    if "release" in events:
        with pytest.raises(CaptureReleased):
            life.require_here()


@pytest.mark.parametrize("here", [True, False])
def test_rows_are_given_back_on_the_loop_of_the_engine(here) -> None:
    """Where another loop runs, the engine's own is called; what is dropped unread is freed from wherever that happens."""
    keeper = Keeper(here=here)
    life = kept(keeper)
    life.release()
    dropped = kept(keeper)
    del life, dropped
    assert keeper.freed == [("here" if here else "elsewhere", Owner("r", 0)), ("elsewhere", Owner("r", 0))]
