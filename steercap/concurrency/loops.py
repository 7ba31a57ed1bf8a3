"""Event loop that owns an object, calls on daemon threads, tasks that end with an owner, and a concurrency limit.

An engine belongs to the event loop in which it was started, with its sockets, tasks and futures. In another loop an
await on them would never end, so such calls are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from itertools import chain, islice
from typing import Any, Final, TypeVar

from steercap.core.extras import extra
from steercap.errors import InvalidSetting, WrongEventLoop, first_error

Value = TypeVar("Value")

_ADVICE: Final = (
    "use a model in one event loop from start to end: one asyncio.run(main()) around all that it does; "
    "in threads, or without an event loop, use steercap.sync.SteerModel"
)
#: Seconds between two polls of a call that another loop runs for this one.
LOOK_SECONDS: Final = 0.01


class OwnerLoop:
    """The event loop that an object belongs to: the one that runs when this is constructed.

    Args:
        subject: name of the object, for error messages.
    """

    def __init__(self, subject: str) -> None:
        self.loop: Final = asyncio.get_running_loop()
        self._subject: Final = subject
        self._process: Final = os.getpid()

    def require(self) -> None:
        """Check that the caller runs in the owner's event loop.

        Raises:
            WrongEventLoop: the caller runs in another event loop, in none, or in another process.
        """
        if os.getpid() != self._process:
            raise WrongEventLoop(
                f"{self._subject} was started in process {self._process}, and this is process {os.getpid()}, a fork of "
                "it; start one in each process that needs one"
            )
        if not self.is_here:
            state = "which has been closed since" if self.loop.is_closed() else "not in this one"
            raise WrongEventLoop(f"{self._subject} was started in another event loop, {state}; {_ADVICE}")

    @property
    def is_here(self) -> bool:
        """True if the owner's event loop is the one that runs in this thread."""
        return running_loop() is self.loop

    @property
    def lives(self) -> bool:
        """True if the owner's event loop is running, in any thread of this process."""
        return self.loop.is_running() and os.getpid() == self._process

    def call(self, work: Callable[[], object]) -> None:
        """Schedule a function call in the owner's event loop, from any thread; do nothing if the loop is closed."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(work)

    async def run(self, work: Callable[[], Coroutine[Any, Any, object]], *, patience: float) -> None:
        """Run a coroutine in the owner's event loop, from any loop, and wait at most `patience` seconds for its end.

        If that loop is stopped or blocked, the caller still returns in time; called in it, the wait is unlimited.
        """
        if self.is_here:
            await work()
        elif self.lives:
            began = asyncio.run_coroutine_threadsafe(work(), self.loop)
            deadline = time.monotonic() + patience
            # Polled rather than called back: a callback would go to a loop that may be closed by then.
            while not began.done() and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def on_thread(work: Callable[[], Value], name: str, future: Future[Value] | None = None) -> Future[Value]:
    """Call `work` on a new daemon thread; neither `asyncio.run` nor the interpreter waits for it at exit.

    Args:
        work: function to call.
        name: name of the thread.
        future: future that receives the result or the error; a new one by default.

    Returns:
        The future.
    """
    became: Future[Value] = Future() if future is None else future
    became.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it

    def call() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 -- it is theirs who wait
            became.set_exception(error)
        else:
            became.set_result(value)

    threading.Thread(target=call, name=name, daemon=True).start()
    return became


async def within(
    life: set[asyncio.Task[Any]], work: Callable[[], Awaitable[Value]], ended: Callable[[], Exception | None]
) -> Value:
    """Await `work` as a task that ends with its owner; if the owner's end cancels it, raise the owner's error.

    Args:
        life: running tasks of the owner, which cancels them at its end; the task is added while it runs.
        work: function that returns the awaitable.
        ended: function that returns the error to raise once the owner has ended, and None until then.
    """

    async def step() -> Value:
        return await work()

    task = asyncio.ensure_future(step())
    life.add(task)
    try:
        return await task
    except asyncio.CancelledError:
        if error := ended():
            raise error from None
        raise
    finally:
        life.discard(task)


async def finished(future: Future[Value]) -> Value:
    """Wait until a call on a thread ends, and return its result; a cancellation is raised only after that."""
    waiting = asyncio.wrap_future(future)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        waiting.exception()  # or asyncio would report that it was never retrieved
        raise cancelled
    return waiting.result()


async def scoped(work: Callable[[], Awaitable[Value]]) -> Value:
    """Await `work` in its own task, cancelled through an anyio scope; a cancellation is raised after its end.

    httpx shields its clean-up with anyio scopes, which `Task.cancel` ignores: it would leave connections open that the
    pool has dropped, and unusable ones in the pool.

    Args:
        work: function that returns the awaitable. If the caller is cancelled, its result is dropped, not closed.
    """
    with extra("client", "personas"):
        import anyio

    scope, cancelled = anyio.CancelScope(), None

    async def step() -> Value:
        with scope:
            return await work()
        raise asyncio.CancelledError

    task = asyncio.ensure_future(step())
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            scope.cancel()
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # or asyncio would report that it was never retrieved
    raise cancelled


async def scoped_steps(steps: AsyncGenerator[Value, None]) -> AsyncGenerator[Value, None]:
    """Yield the values of an async generator; each of its steps, and its closing, runs in `scoped`."""
    try:
        while True:
            try:
                value = await scoped(steps.__anext__)
            except StopAsyncIteration:
                return
            yield value
    finally:
        await scoped(steps.aclose)


async def end_within(future: Future[Any], *, patience: float) -> None:
    """Wait at most `patience` seconds for a call on a thread; a longer one runs on. Its result or error is dropped."""
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.wait([waiting], timeout=patience)
    finally:
        if waiting.done() and not waiting.cancelled():
            waiting.exception()
        waiting.cancel()


Item = TypeVar("Item")
Result = TypeVar("Result")


async def each_of(items: Iterable[Item], work: Callable[[Item], Awaitable[Result]], limit: int) -> list[Result]:
    """Await `work(item)` for each item, at most `limit` at a time, and return the results in the items' order.

    Items are started in order. When this returns or raises, no task is still running.

    Args:
        items: items to work on; each is taken from the iterable only when its work starts.
        work: coroutine function called with each item.
        limit: maximum number of items in progress at once, 1 or more.

    Returns:
        The result for each item, in the order of `items`.

    Raises:
        InvalidSetting: `limit` is below 1.
        The first error of `work`, unwrapped from its group; the other calls are cancelled.
    """
    if limit < 1:
        raise InvalidSetting(f"{limit} items at once; give a limit of 1 or more")
    left, results = enumerate(items), dict[int, Result]()

    async def work_off(first: tuple[int, Item]) -> None:
        for index, item in chain([first], left):
            results[index] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for first in islice(left, limit):
                group.create_task(work_off(first))
    except BaseExceptionGroup as failed:
        error = first_error(failed)
        raise error from error.__cause__  # it keeps its own cause, which the group is not
    return [results[index] for index in range(len(results))]
