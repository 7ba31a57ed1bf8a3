"""Bases of the blocking twins of objects that an open model gives: handles, sketches, streams of activations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from torch.utils.data import IterableDataset

from steercap.captures.handle import CHUNK_ROWS, CaptureHandle
from steercap.core.protocols import BLOCKING
from steercap.errors import ModelClosed

if TYPE_CHECKING:
    from steercap.lab.datasets.collecting.streaming import ActivationStream
    from steercap.lab.datasets.rows import Labelled, Rows

Value = TypeVar("Value")
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
        """Make the twin of an object that waits for nothing."""
        return cls(awaited)

    def __repr__(self) -> str:
        return repr(self.awaited)


class HandleTwin(Twin[CaptureHandle]):
    """Blocking handle: a context manager that fetches its rows and frees them."""

    def __init__(self, awaited: CaptureHandle, run: Run | None = None) -> None:
        awaited.lifecycle.idiom = BLOCKING
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
            self._run(chunks.aclose())

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
            The errors of `SteerModel.read` and of the corpus.
        """
        try:
            while (batch := self._run(_after(self.awaited))) is not None:
                yield batch
        finally:
            self.close()

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
