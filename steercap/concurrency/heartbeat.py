"""Off a terminal bars cannot be drawn: what is under way is said in a line on stderr now and then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from steercap.core.extras import extra

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task

#: Seconds between two lines: seldom enough for a log, often enough to see that nothing hangs.
SECONDS: Final = 15.0


@contextmanager
def heartbeat(bar: Progress, console: Console, *, seconds: float = SECONDS) -> Iterator[None]:
    """Say every few seconds what the tasks of `bar` have come to, where the console is not a terminal.

    A thread says it, because the event loop and this thread may be busy. Nothing is said of work that takes less.

    Args:
        bar: whose tasks are told; need not be drawn.
        console: where.
        seconds: between two lines.
    """
    with extra("cli"):
        from rich.text import Text
    if console.is_terminal:
        yield
        return
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(seconds):
            if line := line_of(bar.tasks):
                console.print(Text(line), soft_wrap=True)

    teller = threading.Thread(target=tell, name="steercap-heartbeat", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def line_of(tasks: list[Task]) -> str:
    """What is under way, the seconds that it has taken, and how far it is; "" if nothing is."""
    # What is over is not told; of a task without a total nobody knows whether it is.
    for task in reversed(tasks):
        if not task.finished:
            done = "" if task.total is None else f", {task.completed:,.0f} of {task.total:,.0f}"
            return f"{task.description}: {task.elapsed or 0:.0f} s{done}"
    return ""
