"""Progress lines: printed at intervals where bars cannot be drawn, and one rewritten line while a model starts."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task

#: Seconds between two progress lines in a log.
SECONDS: Final = 15.0
#: Seconds between two polls of a start's stage.
LOOK_SECONDS: Final = 0.25


@contextmanager
def heartbeat(bar: Progress, console: Console, *, seconds: float = SECONDS) -> Iterator[None]:
    """Print a line on the progress of `bar` every `seconds` in the block if the console cannot draw bars.

    The lines come from a thread, because the event loop and this thread may be busy. Work shorter than `seconds` prints
    nothing.

    Args:
        bar: progress bar with the tasks to report; it need not be drawn.
        console: console to print to.
        seconds: time between two lines.
    """
    if console.is_interactive:
        yield
        return
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(seconds):
            if line := line_of(bar.tasks):
                console.print(line, soft_wrap=True, markup=False, emoji=False, highlight=False)

    teller = threading.Thread(target=tell, name="steercap-heartbeat", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def line_of(tasks: list[Task]) -> str:
    """Return a line on the last unfinished task: name, elapsed seconds, steps done; "" if all are finished."""
    # Finished tasks are skipped; a task without a total never counts as finished.
    for task in reversed(tasks):
        if not task.finished:
            done = f", {task.completed:,.0f} so far" if task.completed else ""
            done = done if task.total is None else f", {task.completed:,.0f} of {task.total:,.0f}"
            return f"{task.description}: {task.elapsed or 0:.0f} s{done}"
    return ""


@asynccontextmanager
async def watching(stage: Callable[[], str], tell: Callable[[str, float], object]) -> AsyncIterator[dict[str, float]]:
    """Call `tell` with the running stage every `LOOK_SECONDS` in the block; yield a live dict of seconds by stage.

    Args:
        stage: function that returns the name of the running stage, "" if none runs.
        tell: function called with the stage and its seconds so far.
    """
    seconds = dict[str, float]()

    async def look() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now, running = time.monotonic(), stage()
            if running:
                seconds[running] = seconds.get(running, 0.0) + now - last
                tell(running, seconds[running])
            last = now

    looking = asyncio.create_task(look())
    try:
        yield seconds
    finally:
        looking.cancel()


@asynccontextmanager
async def progress_line(name: str, stage: Callable[[], str]) -> AsyncIterator[None]:
    """Show the running stage of a start on stderr in one rewritten line, while the block runs.

    The last line has the seconds of each stage. Nothing is shown where `wants_line` is False, or if no stage runs in
    the block.

    Args:
        name: name of the model or server that starts, which begins the line.
        stage: as for `watching`.
    """
    if not wants_line():
        yield
        return
    ended, shown = "did not start", ""

    def tell(running: str, spent: float) -> None:
        nonlocal shown
        if (line := f"{name}: {running}, {spent:.0f} s"[: _width()]) != shown:  # a notebook stores every rewrite
            shown = line
            _rewrite(line)

    async with watching(stage, tell) as took:
        try:
            yield
            ended = "is ready"
        finally:
            if took:
                each = ", ".join(f"{one} {spent:.0f} s" for one, spent in took.items())
                _rewrite(f"{name} {ended} after {sum(took.values()):.0f} s: {each}", end="\n")


@contextmanager
def rewritten_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text on stderr over the previous one, at most every `LOOK_SECONDS`.

    The last text stays. Nothing is shown where `wants_line` is False.
    """
    wanted, last, told = wants_line(), "", 0.0

    def tell(text: str) -> None:
        nonlocal last, told
        last = text
        if wanted and (now := time.monotonic()) - told >= LOOK_SECONDS:
            told = now
            _rewrite(text[: _width()])

    try:
        yield tell
    finally:
        if wanted and last:
            _rewrite(last[: _width()], end="\n")


def wants_line() -> bool:
    """Check if stderr is a terminal or a notebook, progress is not switched off, and vLLM's log is not verbose."""
    notebook = type(sys.stderr).__module__.startswith("ipykernel.")
    if not (notebook or sys.stderr.isatty()) or os.environ.get("STEERCAP_PROGRESS") == "0":
        return False
    return os.environ.get("VLLM_LOGGING_LEVEL", "").upper() not in {"INFO", "DEBUG"}


def _rewrite(line: str, end: str = "") -> None:
    """Write a line over the previous one on stderr.

    It is padded with spaces, since notebooks ignore the escape code that clears a line.
    """
    with suppress(OSError, ValueError):  # nobody reads it any more
        sys.stderr.write(f"\r{line.ljust(_width())}{end}")
        sys.stderr.flush()


def _width() -> int:
    return shutil.get_terminal_size().columns - 1
