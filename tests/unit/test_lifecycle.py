"""A handle's rows are freed in the worker once, when nobody can want them there any more, whatever happens in which order."""

from __future__ import annotations

import itertools

import pytest
from keepers import Keeper, delivery, kept

from steercap.captures.lifecycle import NEXT, Event, Stage
from steercap.core.messages import Owner
from steercap.errors import CaptureIncomplete, CaptureReleased


def test_released_rows_stay_released() -> None:
    """From every stage a release leads to the end, at once or when the fetch under way is done; nothing leads out of it."""
    for stage in Stage:
        after = NEXT[stage, Event.RELEASE]
        assert after is Stage.GONE or NEXT[after, Event.FAIL] is Stage.GONE
    assert {event for stage, event in NEXT if stage is Stage.GONE} == {Event.RELEASE}
    assert {event for stage, event in NEXT if stage is Stage.HERE} == {Event.RELEASE}
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


def test_rows_leave_the_worker_for_disk_once_and_come_back_from_there_alone() -> None:
    """Whatever way leads to disk ends there, or back where it began; from disk a way leads here, or back to disk."""
    assert {stage for (_, event), stage in NEXT.items() if event is Event.STORE} == {Stage.SPILLED}
    assert [stage for stage, event in NEXT if event is Event.SPILL] == [Stage.KEPT]
    assert NEXT[Stage.SPILLING, Event.FAIL] is Stage.KEPT
    assert NEXT[Stage.RETURNING, Event.FAIL] is Stage.SPILLED
    assert (Stage.SPILLING, Event.FETCH) not in NEXT
    before = {stage for (stage, _), after in NEXT.items() if after is Stage.KEPT}
    assert before == {Stage.SPILLING, Stage.COMING}


@pytest.mark.parametrize("events", itertools.product(["stored", "failed", "release"], repeat=3))
def test_rows_on_disk_are_freed_in_the_worker_once_too(events) -> None:
    """A move, and a release, its end and its failure in any order: freed once exactly when they are on disk or gone."""
    keeper = Keeper()
    life = kept(keeper)
    life.spill()
    for event in events:
        if event == "release":
            life.release()
        elif event == "stored":
            life.stored(CaptureIncomplete("what was found"))
        else:
            life.end_spill()
        assert len(keeper.freed) == (life.stage in {Stage.SPILLED, Stage.GONE})
        assert (life.spilled is not None) == (life.stage is Stage.SPILLED)
    life.end_spill()
    first = events[0] if events[0] != "release" else "release"
    wanted = {"stored": Stage.SPILLED, "failed": Stage.KEPT, "release": Stage.GONE}[first]
    assert life.stage is (Stage.GONE if "release" in events else wanted)
