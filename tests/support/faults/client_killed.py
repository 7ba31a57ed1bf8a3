"""The client is killed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from support.faults.base import Fault, Outcome
from support.kills import Kill, Report, end_one

#: Seconds in which nothing of a client may be left, on a busy machine.
PATIENCE = 60.0


async def inject(_folder: Path) -> list[Outcome]:
    """Kill a client while it starts, generates, fetches and saves."""
    found = []
    for phase, delay in (("starts", 8.0), ("generates", 0.3), ("fetches", 0.0), ("saves", 0.0)):
        report = Report()
        kill = Kill(command=False, phase=phase, delay=delay, signals=(signal.SIGKILL,), everybody=False)
        await asyncio.to_thread(end_one, kill, report, bound=PATIENCE)
        found.append(Outcome(f"a client that {phase}", "no process, no memory, no file is left", report.slowest))
    return found


MEMBER = Fault(
    title="the client killed",
    how="SIGKILL to the client alone, at four stages",
    must="its engine ends with it: no process, no file in /dev/shm or among temporary ones, so no memory",
    inject=inject,
)
