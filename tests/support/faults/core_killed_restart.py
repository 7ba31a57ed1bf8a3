"""The engine core is killed, and the engine is started again."""

from __future__ import annotations

from pathlib import Path

from steercap.testing import tiny_checkpoint
from steercap.testing.reference import Reference
from support.faults.base import Fault, Outcome, opened
from support.faults.deaths import SURVIVED, survived


async def inject(_folder: Path) -> list[Outcome]:
    """Kill vLLM's engine core."""
    async with opened(restart=True) as model:
        return await survived(model, "EngineCore", Reference(tiny_checkpoint("qwen3")))


MEMBER = Fault(
    title="the engine core killed, with `restart=True`",
    how="SIGKILL to vLLM's engine core while 16 requests run, 8 handles wait, two streams and a sketch are open",
    must=SURVIVED,
    inject=inject,
)
