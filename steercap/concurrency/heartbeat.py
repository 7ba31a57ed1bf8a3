"""Progress lines for consoles that are not terminals, where bars cannot be drawn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task

#: Seconds between two progress lines: few enough for a log, and enough to see that nothing hangs.
SECONDS: Final = 15.0


@contextmanager
def heartbeat(bar: Progress, console: Console, *, seconds: float = SECONDS) -> Iterator[None]:
    """Print a line on the progress of `bar` every few seconds if the console is not a terminal.

    The lines come from a thread, because the event loop and this thread may be busy. Work shorter than `seconds` prints
    nothing.

    Args:
        bar: progress bar with the tasks to report; it need not be drawn.
        console: console to print to.
        seconds: time between two lines.
    """
    if console.is_terminal:
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
    """Return the progress line of the last unfinished task: name, seconds elapsed, steps done; "" if there is none."""
    # Finished tasks are skipped; a task without a total never counts as finished.
    for task in reversed(tasks):
        if not task.finished:
            done = "" if task.total is None else f", {task.completed:,.0f} of {task.total:,.0f}"
            return f"{task.description}: {task.elapsed or 0:.0f} s{done}"
    return ""
