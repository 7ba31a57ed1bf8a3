"""Cancels what a user awaits at each place where it, or anything that it started, waits: one place after another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from steercap.engine.stats import Stats
    from steercap.model import SteerModel

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


class _Stepped:
    """A coroutine whose waits are counted."""

    def __init__(self, work: Coroutine[Any, Any, Any], count: Count) -> None:
        self._work, self._count = work, count

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        step: Callable[[], Any] = lambda: next(steps)  # noqa: E731
        while True:
            try:
                waited_for = step()
            except StopIteration as end:
                return end.value
            self._count.wait()
            try:
                yield waited_for
            except BaseException as error:  # noqa: BLE001 -- thrown into it, as asyncio does
                step = lambda error=error: steps.throw(error)  # type: ignore[misc]  # noqa: E731
            else:
                step = lambda: next(steps)  # noqa: E731


async def _stepped(work: Coroutine[Any, Any, Any], count: Count) -> Any:
    return await _Stepped(work, count)


def _factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    count = _COUNTED.get()
    return asyncio.Task(work if count is None else _stepped(work, count), loop=loop, **options)


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
            await at_rest(model)
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
    await asyncio.wait([count.whole])
    reached = count.waits > count.at
    assert count.whole.cancelled() or not count.whole.exception(), repr(count.whole.exception())
    return reached


async def at_rest(model: SteerModel) -> Stats:
    """Wait until a model holds nothing, and the tasks that were its own have ended.

    Raises:
        AssertionError: it goes on holding something.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + PATIENCE
    while held := {name: found for name in HELD if (found := getattr(stats := await model.stats(), name))}:
        assert clock() < until, f"still held: {held}"
        await asyncio.sleep(0.002)
    return stats
