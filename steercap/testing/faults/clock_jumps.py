"""The wall clock jumps."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from steercap.errors import CaptureMemoryFull
from steercap.requests.manifest import Manifest
from steercap.requests.saving import save_run
from steercap.testing.faults.base import LONG, Fault, Outcome, opened, prompts, said

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
_JUMPS = ("+3650d", "-3650d", "+0")
_CLOCK = Path("/tmp/steercap-clock")
_YEAR = 365 * 86400


def missing() -> str:
    """The library that jumps."""
    return "" if LIBRARY.exists() else "libfaketime (Debian's package) is not installed"


async def inject(folder: Path) -> list[Outcome]:
    """Jump ten years ahead and back while requests run, wait, are fetched and are saved."""
    assert LIBRARY.name in os.environ.get("LD_PRELOAD", ""), "run by scripts/faults.py, which preloads libfaketime"
    clock = Path(os.environ["FAKETIME_TIMESTAMP_FILE"])
    clock.write_text("+0")
    async with opened(capture_bytes=2 << 20, overflow_timeout=2.0) as model:
        steady, began = await model.generate(prompts(4), LONG), time.time()
        for jump in _JUMPS:
            asked = asyncio.create_task(model.generate(prompts(4), LONG, capture_layers="all"))
            await asyncio.sleep(0.1)
            clock.write_text(jump)
            await asyncio.sleep(0)
            away = abs(time.time() - began)
            assert (away > _YEAR) == (jump != "+0"), f"the clock is {away:.0f} s away after {jump}"
            texts, handles = await asked
            assert texts == steady
            await model.fetch_captures_batch(handles)
            assert len([*Manifest.load(save_run(folder / f"at{jump}", handles).folder).handles()]) == 4
        waited = await _waiting(model, clock)
    return [
        Outcome("requests, fetches and runs, at +10 years, -10 years and back", "as without a jump"),
        waited,
    ]


async def _waiting(model: object, clock: Path) -> Outcome:
    """A request that waits for memory which nobody frees is refused after its 2 s, whatever the clock says."""
    held = []
    try:
        while True:
            asked = asyncio.create_task(model.read(prompts(1, 200, len(held))[0], capture_layers="all"))  # type: ignore[attr-defined]
            began = time.monotonic()
            await asyncio.sleep(1.0)
            clock.write_text("+3650d" if len(held) % 2 else "-3650d")
            held.append(await asked)
    except CaptureMemoryFull as error:
        took = time.monotonic() - began
        assert 1.9 < took < 6, took
        return Outcome("a request that waits 2 s at most (`overflow_timeout`)", said(error), took)


MEMBER = Fault(
    title="the clock jumps",
    how="libfaketime moves CLOCK_REALTIME of the client and its engine by 10 years, ahead and back, while requests "
    "run, wait, are fetched and saved",
    must="nothing happens: all that waits goes by the monotonic clock",
    inject=inject,
    missing=missing,
    under=(
        "env",
        f"LD_PRELOAD={LIBRARY}",
        f"FAKETIME_TIMESTAMP_FILE={_CLOCK}",
        "FAKETIME_NO_CACHE=1",
        "FAKETIME_DONT_FAKE_MONOTONIC=1",
    ),
)
