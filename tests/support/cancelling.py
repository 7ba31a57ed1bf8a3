"""Cancels what a user awaits at each place where it, or anything that it started, waits: one place after another."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from steercap.model import SteerModel
    from steercap.requests.stats import Stats

#: Seconds in which nothing of what was cancelled may be held any more, on a busy machine.
PATIENCE: Final = 30.0
#: What a model may hold at rest: none of these.
HELD: Final = (
    "handles_held",
    "capture_bytes_claimed",
    "capture_bytes_in_use",
    "reductions_running",
    "requests_waiting",
    "steering_slots_in_use",
    "sketches",
)


@dataclass
class Count:
    """How often something waited.

    Args:
        at: at which time it is cancelled.
        whole: what is cancelled.
        waits: how often it has waited so far.
    """

    at: int
    whole: asyncio.Task[Any] | None = None
    waits: int = 0

    def wait(self) -> None:
        """It waits once more."""
        if self.waits == self.at and self.whole is not None:
            self.whole.cancel()
        self.waits += 1


_COUNTED: Final[ContextVar[Count | None]] = ContextVar("steercap cancelling", default=None)


class _Stepped(Coroutine[Any, Any, Any]):
    """A coroutine whose waits are counted."""

    def __init__(self, work: Coroutine[Any, Any, Any], count: Count) -> None:
        self._work, self._count = work, count

    def send(self, value: Any) -> Any:
        return self._counted(self._work.send(value))

    def throw(self, *error: Any) -> Any:
        return self._counted(self._work.throw(*error))

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()

    def _counted(self, waited_for: Any) -> Any:
        self._count.wait()
        return waited_for


def _factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    count = _COUNTED.get()
    return asyncio.Task(work if count is None else _Stepped(work, count), loop=loop, **options)


async def cancelled_everywhere(
    model: SteerModel, work: Callable[[], Coroutine[Any, Any, Any]], check: Callable[[], Awaitable[Any]]
) -> int:
    """Do something again and again, cancelled at its first wait, at its second, and so on, until it is done before.

    After each, nothing of it may be held, and what is asked next is right.

    Args:
        model: that it is done with.
        work: what is done.
        check: asks something else, and fails if the answer is wrong.

    Returns:
        At how many places it was cancelled.

    Raises:
        AssertionError: something is held, or a cancelled task ended in another way.
    """
    loop = asyncio.get_running_loop()
    before, places = loop.get_task_factory(), 0
    loop.set_task_factory(_factory)
    try:
        while await _cancelled(work, Count(places)):
            places += 1
            await at_rest(model, f"{work.__name__}, cancelled at wait {places}")
            if places % 8 == 1:
                await check()
    finally:
        loop.set_task_factory(before)
    await at_rest(model)
    await check()
    return places


async def _cancelled(work: Callable[[], Coroutine[Any, Any, Any]], count: Count) -> bool:
    """Do it once, cancelled at one place; False if it was done before."""
    token = _COUNTED.set(count)
    try:
        count.whole = asyncio.create_task(work())
    finally:
        _COUNTED.reset(token)
    whole = count.whole
    await asyncio.wait([whole])
    reached = count.waits > count.at
    assert whole.cancelled() or not whole.exception(), repr(whole.exception())
    count.whole = None  # tasks that live longer know the count, and this task what it held
    return reached


async def at_rest(model: SteerModel, after: str = "") -> Stats:
    """Wait until a model holds nothing.

    Args:
        model: the model.
        after: what was done, for the message.

    Raises:
        AssertionError: it goes on holding something.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + PATIENCE
    while held := {name: found for name in HELD if (found := getattr(stats := await model.stats(), name))}:
        assert clock() < until, f"{after}: still held: {held}"
        gc.collect()  # handles that died in a cycle, such as that of an error and its traceback
        await asyncio.sleep(0.005)
    return stats
