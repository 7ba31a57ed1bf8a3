"""Rows of requests that still run, as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steercap.captures.checks import Expected, received
from steercap.captures.rows import Captures
from steercap.core.messages import Owner, Wanted
from steercap.core.rows import Ints

if TYPE_CHECKING:
    from steercap.engine.engine import Engine


@dataclass(frozen=True)
class Arrived:
    """Rows that came.

    Args:
        captures: by point.
        positions: of each row, int64 [rows].
    """

    captures: Captures
    positions: Ints


async def arrived(engine: Engine, wanted: Sequence[tuple[Owner, Expected]]) -> list[Arrived]:
    """The rows of samples so far, each checked; with one RPC, which other requests share that ask at the same time.

    Args:
        engine: that runs them.
        wanted: whose, and what must have come: tokens up to one that has no row yet, and rows that came before.

    Raises:
        CaptureIncomplete, CaptureNotFinite: see `received`.
        EngineFailure: the engine has died, or a worker cannot answer.
    """
    asked = [Wanted(owner, len(expected.tokens) - 1, expected.first) for owner, expected in wanted]
    deliveries = await engine.collect(asked, growing=True)
    found = []
    for (_, expected), delivery in zip(wanted, deliveries, strict=True):
        rows, receipt = received(expected, delivery, engine.vllm.points)
        found.append(Arrived(Captures(rows, engine.vllm.num_layers), receipt.positions))
    return found
