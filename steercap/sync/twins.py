"""Event loop in a thread, for blocking callers; bases of the twins of handles, sketches and streams of activations."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar

from torch.utils.data import IterableDataset

from steercap.captures.handle import CHUNK_ROWS, CaptureHandle
from steercap.core.protocols import BLOCKING
from steercap.errors import ModelClosed, WrongEventLoop

if TYPE_CHECKING:
    from steercap.lab.datasets.collecting.streaming import ActivationStream
    from steercap.lab.datasets.rows import Labelled, Rows


Value = TypeVar("Value")

#: Seconds that `stop` waits for running tasks to clean up.
STOP_SECONDS: Final = 3.0
#: Name of a loop's thread.
NAME: Final = "steercap-sync"


class LoopThread:
    """Event loop in a daemon thread, running until it is stopped or the interpreter ends."""

    def __init__(self) -> None:
        self.loop: Final = asyncio.new_event_loop()
        self._open = True
        self._entering: Final = threading.RLock()  # the garbage collector may end a generator in it, which calls `run`
        self._process: Final = os.getpid()
        #: Of each call that runs: where its ended task goes, or None if the loop ended before it.
        self._waiting: Final = set[SimpleQueue[asyncio.Task[Any] | None]]()
        self._thread: Final = threading.Thread(target=self._serve, name=NAME, daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # or it would still run during the interpreter's shutdown

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine to its end, from any other thread; an interrupt cancels it.

        Raises:
            ModelClosed: the loop was stopped, before or during the call.
            WrongEventLoop: called from within the loop, or in a fork of the process.
        """
        tasks: list[asyncio.Task[Value]] = []
        # A wait that holds no lock of the loop's, as the garbage collector may end a generator meanwhile, by `run`.
        ended = SimpleQueue[asyncio.Task[Value] | None]()

        def begin() -> None:
            tasks.append(self.loop.create_task(work))
            tasks[0].add_done_callback(ended.put)

        def cancel() -> None:
            tasks[0].cancel()

        try:
            self._require_elsewhere()
            with self._entering:  # so that `stop` sees everything that was begun
                self._require_open()
                self._waiting.add(ended)
                self.loop.call_soon_threadsafe(begin)
        except BaseException:
            work.close()
            raise
        try:
            task = ended.get()
        except BaseException:
            with suppress(RuntimeError):  # the loop was closed
                self.loop.call_soon_threadsafe(cancel)
            raise
        finally:
            self._waiting.discard(ended)
        with suppress(asyncio.CancelledError):
            if task is not None:
                return task.result()
        raise ModelClosed("the model was closed while this call ran")

    def stop(self) -> None:
        """Cancel running tasks, end the loop and its thread; from any other thread. Idempotent."""
        with self._entering:
            first, self._open = self._open, False
        atexit.unregister(self.stop)
        if os.getpid() != self._process:
            return
        if first:  # a second stop would interrupt the clean-up
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2 * STOP_SECONDS)

    def _serve(self) -> None:
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(_cancel_others())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()
            with suppress(KeyError):
                while True:  # tasks that went on when they were cancelled; a finaliser may take one meanwhile
                    self._waiting.pop().put(None)

    def _require_open(self) -> None:
        if not self._open:
            raise ModelClosed("the model was closed; rows that were not fetched are gone")

    def _require_elsewhere(self) -> None:
        if threading.current_thread() is self._thread:
            raise WrongEventLoop(
                "a call of steercap.sync from within its own event loop would wait for itself; "
                "call it from another thread, or use steercap.SteerModel, which belongs in an event loop"
            )
        if os.getpid() != self._process:
            raise WrongEventLoop(
                f"the model was started in process {self._process}, and this is process {os.getpid()}, a fork of it; "
                "start one in each process that needs one"
            )


async def _cancel_others() -> None:
    """Cancel all running tasks, such as an interrupted start, and wait for their clean-up."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=STOP_SECONDS)


Awaited = TypeVar("Awaited")


class Run(Protocol):
    """Function that runs a coroutine to its end."""

    def __call__(self, work: Coroutine[Any, Any, Value], /) -> Value:
        """Return the coroutine's result."""


def at_once(work: Coroutine[Any, Any, Value]) -> Value:
    """Run a coroutine that waits for nothing, such as those of a handle that was loaded from a file."""
    try:
        work.send(None)
    except StopIteration as done:
        value: Value = done.value
        return value
    finally:
        work.close()
    raise AssertionError


def run_end(run: Run, end: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Run the clean-up of a generator, which the garbage collector may end in any thread.

    In the loop's own thread it is begun and not waited for; in a fork it is left to the first process. If the model was
    closed, that was its end.
    """

    async def ending() -> None:  # closed before it begins, where `end()` itself would begin in Python 3.13
        await end()

    with suppress(ModelClosed):
        try:
            run(ending())
        except WrongEventLoop:
            if threading.current_thread().name == NAME:
                asyncio.get_running_loop().create_task(ending())


class Twin(Generic[Awaited]):
    """Blocking twin of an asynchronous object.

    Args:
        awaited: the asynchronous object.
        run: runs its coroutines, on the model's event loop; by default they wait for nothing.
    """

    def __init__(self, awaited: Awaited, run: Run | None = None) -> None:
        self.awaited: Awaited = awaited
        self._run: Run = run or at_once

    @classmethod
    def around(cls, awaited: Awaited) -> Self:
        """Make the twin of an object of which no method is awaited, so that it needs no event loop."""
        return cls(awaited)

    def __repr__(self) -> str:
        return repr(self.awaited)


class HandleTwin(Twin[CaptureHandle]):
    """Blocking handle: a context manager that fetches its rows and frees them."""

    def __init__(self, awaited: CaptureHandle, run: Run | None = None) -> None:
        awaited.lifecycle.call_style = BLOCKING
        super().__init__(awaited, run)

    def fetch(self) -> Self:
        """Bring the rows to this process, and free them in the worker. A second call does nothing.

        Returns:
            This handle, its `captures`, `positions`, `token_ids`, `token_types` and `receipt` readable.

        Raises:
            The errors of `steercap.CaptureHandle.fetch`.
        """
        if not self.awaited.fetched:
            self._run(self.awaited.fetch())
        return self

    def chunks(self, rows: int = CHUNK_ROWS) -> Iterator[Self]:
        """Yield the rows in order in small handles, for sequences that are larger than memory.

        Args:
            rows: maximum number of rows of a handle.

        Raises:
            The errors of `steercap.CaptureHandle.chunks`.
        """
        chunks = self.awaited.chunks(rows)
        try:
            while (chunk := self._run(_after(chunks))) is not None:
                yield type(self)(chunk, self._run)
        finally:
            run_end(self._run, chunks.aclose)

    def __enter__(self) -> Self:
        return self.fetch()

    def __exit__(self, *_exc: object) -> None:
        self.awaited.release()


class StreamTwin(Twin["ActivationStream"], IterableDataset["Rows | Labelled"]):
    """Blocking stream: an iterable, a data set for torch, and a context manager that closes it."""

    awaited: ActivationStream

    def __iter__(self) -> Iterator[Rows | Labelled]:
        """Iterate over the remaining batches; a loop that ends, however it ends, closes the stream.

        Raises:
            InvalidRequest: the stream has ended or was closed.
            The errors of `SteerModel.read` and of the corpus.
        """
        aiter(self.awaited)
        return self._batches()

    def _batches(self) -> Iterator[Rows | Labelled]:
        try:
            while (batch := self._run(_after(self.awaited))) is not None:
                yield batch
        finally:
            run_end(self._run, self.awaited.aclose)

    def close(self) -> None:
        """Stop reading, and free everything held. Idempotent."""
        with suppress(ModelClosed):  # closing the model has ended it
            self._run(self.awaited.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


async def _after(awaited: AsyncIterator[Value]) -> Value | None:
    return await anext(awaited, None)
