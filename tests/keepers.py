"""The end of an engine whose rows handles own, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from steercap.captures.checks import Expected
from steercap.captures.lifecycle import Lifecycle, Source
from steercap.core.messages import CapturedRows, Owner
from steercap.core.plan import CapturePlan, Plan
from steercap.core.schema import RAW
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.engine.fetching import Delivery

POINT = Point(0, "resid_post")
PLAN = Plan("r", 2, 3, capture=CapturePlan((0,), (Range(0, None),), None, RAW))
TOKENS = (5, 6, 7)


class Keeper:
    """The end of an engine that rows are given back to."""

    def __init__(self, *, here: bool = True) -> None:
        self.freed: list[tuple[str, Owner]] = []
        self.home = SimpleNamespace(is_here=here)
        self.vllm = SimpleNamespace(points=(POINT,), num_layers=1)

    def give_back(self, owner: Owner, _reservation: Any) -> None:
        self.freed.append(("here", owner))

    def give_back_from_any_thread(self, owner: Owner, _reservation: Any) -> None:
        self.freed.append(("elsewhere", owner))


def kept(keeper: Keeper, reservation: Any = None) -> Lifecycle:
    return Lifecycle("r", source=Source(keeper, Owner("r", 0), reservation, Expected("r", PLAN, (POINT,), TOKENS)))


def delivery(token_ids=TOKENS[:2]) -> Delivery:
    captured_rows = CapturedRows(
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
    return Delivery((captured_rows,), {0: (torch.ones(2, 4),)}, None)
