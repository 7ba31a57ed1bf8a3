"""Memory runs out while rows are captured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from steercap.errors import EngineDied
from support.faults.base import Fault, Outcome, for_root, opened, processes, prompts, text_and_rows, told

_GROUPS = Path("/sys/fs/cgroup/memory")
_MIB = 1 << 20


def missing() -> str:
    """Memory of one process is limited by a group of version 1."""
    if reason := for_root():
        return reason
    return "" if (_GROUPS / "cgroup.procs").exists() else "no memory cgroup of version 1"


@contextmanager
def limited(pid: int, mib: int) -> Iterator[None]:
    """Let a process take so much more memory; beyond it the kernel kills it."""
    group = _GROUPS / f"steercap-fault-{pid}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(mib * _MIB))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for _ in range(100):
            with suppress(OSError):  # the process still ends
                group.rmdir()
                break
            time.sleep(0.05)


async def inject(_folder: Path) -> list[Outcome]:
    """Capture more than there is memory for, in a worker that may take 24 MiB more."""
    async with opened(capture_bytes=1 << 40) as model:
        await text_and_rows(model)
        with limited(processes(model, "Worker")[0], 24):
            reading = model.read(prompts(128, 200), capture_layers="all")
            return [
                await told("128 captures of 200 tokens", reading, time.monotonic(), EngineDied, "SIGKILL", "memory")
            ]


MEMBER = Fault(
    title="memory full while rows are captured",
    how="`capture_bytes` of 1 TiB, and a memory cgroup that lets the worker take 24 MiB more: the kernel kills it",
    must="`EngineDied` that says SIGKILL and memory; nothing is left",
    inject=inject,
    missing=missing,
)
