"""Fetch of the rows of requests that still run."""

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
    """New rows of a running request.

    Args:
        captures: rows by point.
        positions: position of each row, int64 [rows].
    """

    captures: Captures
    positions: Ints


async def arrived(engine: Engine, wanted: Sequence[tuple[Owner, Expected]]) -> list[Arrived]:
    """Fetch and check the rows of samples so far, with one RPC, shared with requests that ask at the same time.

    Args:
        engine: the engine that runs them.
        wanted: owner of each sample, and what must have come: tokens up to one that has no row yet, and the number of
            rows that came before.

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
