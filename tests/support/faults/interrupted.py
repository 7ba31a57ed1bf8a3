"""The client is interrupted."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from support.faults.base import Fault, Outcome
from support.faults.client_killed import PATIENCE
from support.kills import PHASES, Kill, Report, end_one


async def inject(_folder: Path) -> list[Outcome]:
    """Interrupt a client at each stage, as a terminal does."""
    found = []
    for phase, seconds in PHASES.items():
        report, delay = Report(), min(seconds / 4, 5.0)
        kill = Kill(command=False, phase=phase, delay=delay, signals=(signal.SIGINT,), everybody=True)
        await asyncio.to_thread(end_one, kill, report, bound=PATIENCE)
        found.append(Outcome(f"a client, stage {phase!r}", "KeyboardInterrupt, and nothing is left", report.slowest))
    return found


MEMBER = Fault(
    title="Ctrl+C at every stage",
    how="SIGINT to the client's process group while it imports, starts, generates, fetches, saves and closes",
    must="it ends with KeyboardInterrupt (by the signal, as a shell expects), without a storm of tracebacks; nothing "
    "is left",
    inject=inject,
)
