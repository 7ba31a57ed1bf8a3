"""The engine core is killed."""

from __future__ import annotations

from pathlib import Path

from support.faults.base import Fault, Outcome, opened
from support.faults.deaths import CROWDED, TOLD, deaths


async def inject(_folder: Path) -> list[Outcome]:
    """Kill vLLM's engine core."""
    async with opened(**CROWDED) as model:
        return await deaths(model, "EngineCore")


MEMBER = Fault(
    title="the engine core killed",
    how="SIGKILL to vLLM's engine core while 16 requests run or wait, a stream runs and a handle waits",
    must=TOLD,
    inject=inject,
)
