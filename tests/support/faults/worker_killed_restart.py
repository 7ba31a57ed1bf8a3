"""A worker of two is killed, and the engine is started again."""

from __future__ import annotations

from pathlib import Path

from steercap.testing import tiny_checkpoint
from steercap.testing.reference import Reference
from support.faults.base import Fault, Outcome, for_two_workers, opened
from support.faults.deaths import SURVIVED, survived


async def inject(_folder: Path) -> list[Outcome]:
    """Kill one of two tensor-parallel workers."""
    async with opened(tensor_parallel_size=2, restart=True) as model:
        return await survived(model, "Worker", Reference(tiny_checkpoint("qwen3")))


MEMBER = Fault(
    title="a worker killed, with `restart=True`",
    how="SIGKILL to one of two workers while 16 requests run, 8 handles wait, two streams and a sketch are open",
    must=SURVIVED,
    inject=inject,
    missing=for_two_workers,
)
