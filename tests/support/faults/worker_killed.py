"""A worker of two is killed."""

from __future__ import annotations

from pathlib import Path

from support.faults.base import Fault, Outcome, for_two_workers, opened
from support.faults.deaths import CROWDED, TOLD, deaths


async def inject(_folder: Path) -> list[Outcome]:
    """Kill one of two tensor-parallel workers."""
    async with opened(tensor_parallel_size=2, **CROWDED) as model:
        return await deaths(model, "Worker")


MEMBER = Fault(
    title="a worker killed (tensor parallel, 2)",
    how="SIGKILL to one of two workers while 16 requests run or wait, a stream runs and a handle waits",
    must=TOLD,
    inject=inject,
    missing=for_two_workers,
)
