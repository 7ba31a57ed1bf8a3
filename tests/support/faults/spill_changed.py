"""Rows that wait on disk are changed there by another program, or cut off."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from steercap.captures.handle import CaptureHandle
from steercap.captures.lifecycle import Stage
from steercap.errors import CaptureIncomplete
from support.faults.base import SHORT, Fault, Outcome, opened, prompts, told
from support.folders import flip


async def inject(folder: Path) -> list[Outcome]:
    """Change one bit of one handle's rows in the real file, then cut the file off in the middle of it."""
    async with opened(capture_bytes=1 << 20, overflow="spill", spill_folder=folder) as model:
        path = _spill_file(model)
        handles, spilled = await _spilled(model)
        flip(path, _offset(spilled[0]) + 1000)
        found = [await _told(model, handles, "a bit changed", 1)]
        handles, spilled = await _spilled(model)
        last = sorted(map(_offset, spilled))[-3]
        os.truncate(path, last + 1000)
        found.append(await _told(model, handles, "the file cut off in the third handle from its end", 3))
        handles, spilled = await _spilled(model)
        await model.fetch_captures_batch(handles)
    return [
        *found,
        Outcome("requests afterwards", f"come, {len(spilled)} of {len(handles)} by way of the disk"),
    ]


def _spill_file(model: Any) -> Path:
    """Where another program of this user finds it."""
    return Path(f"/proc/{os.getpid()}/fd/{model.serving.opened().spilling.file._fd}")


async def _spilled(model: Any) -> tuple[list[CaptureHandle], list[CaptureHandle]]:
    """Handles of requests that there was no memory for, and those of them that are on disk."""
    _, handles = await model.generate(prompts(16, 110), SHORT, capture_layers="all")
    spilled = [handle for handle in handles if handle.lifecycle.stage is Stage.SPILLED]
    assert len(spilled) > 4, f"{len(spilled)} are on disk"
    return handles, spilled


def _offset(handle: CaptureHandle) -> int:
    """Where its rows begin."""
    stored: Any = handle.lifecycle.spilled
    return int(stored.stored.chunks[0].offset)


async def _told(model: Any, handles: list[CaptureHandle], who: str, damaged: int) -> Outcome:
    fetching = model.fetch_captures_batch(handles)
    outcome = await told(who, fetching, time.monotonic(), CaptureIncomplete, "spill file", "what was written")
    came = sum(handle.fetched for handle in handles)
    assert came == len(handles) - damaged, f"{who}: {came} of {len(handles)} came"
    for handle in handles:
        handle.release()
    return Outcome(outcome.who, f"{outcome.told}; the other {came} handles come", outcome.seconds)


MEMBER = Fault(
    title="rows that were spilled to disk changed or cut off",
    how="`overflow='spill'`; one bit of the nameless file changed through /proc, then the file cut off",
    must="`CaptureIncomplete` that names the file, of those handles alone; the others come, and so do later requests",
    inject=inject,
)
