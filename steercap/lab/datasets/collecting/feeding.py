"""Feeder that reads documents, hashes them and cuts them into windows, on a thread, slightly ahead of the consumer."""

from __future__ import annotations

import asyncio
import hashlib
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from steercap.concurrency.loops import on_thread
from steercap.core.tokens import TokenSelection
from steercap.lab.datasets.collecting.documents import CorpusDocument, Window
from steercap.lab.datasets.collecting.sources import DocumentSource

if TYPE_CHECKING:
    from steercap.lab.datasets.collecting.reading import Reading

#: Maximum documents of a batch, and number of characters or tokens at which it ends: tokenizers process many at once.
BATCH, BATCH_SIZE = 64, 1 << 18
#: Maximum number of batches queued ahead of the consumer.
AHEAD: Final = 2
#: Seconds between checks whether the consumer has stopped, while the queue is full.
LOOK_SECONDS: Final = 0.1


class Fed(NamedTuple):
    """Document cut into windows, ready to be run.

    Args:
        number: number in the corpus.
        digest: SHA-256 of the document.
        windows: windows of the document, each with the selection of tokens whose rows are requested, or None for no
            rows; None for an unwanted document.
        bytes: bytes of the corpus up to the document's end, None if unknown.
    """

    number: int
    digest: bytes
    windows: list[tuple[Window, TokenSelection | None]] | None
    bytes: int | None


@dataclass
class _End:
    """Marker of the end in the queue of batches, with the error that ended the source, None if there was none."""

    error: BaseException | None = None


async def feed(
    source: DocumentSource, reading: Reading, wanted: Callable[[int], bool] = lambda _: True
) -> AsyncGenerator[list[Fed], None]:
    """Yield a source's documents in batches, in order; a document whose number is not `wanted` is hashed, not cut.

    Raises:
        The errors of `DocumentSource` and of `Cutting.windows`, when the consumer reaches the document.
    """
    items = source.begin()
    if isinstance(items, AsyncIterator):
        async for batch in _batched_async(source, items):
            yield await asyncio.to_thread(_feed_batch, batch, reading, wanted)
        return
    feeder = _Feeder(source, items, reading, wanted)
    on_thread(feeder.run, "steercap feeder")
    try:
        while (ready := await feeder.next()) is not None:
            yield ready
    finally:
        feeder.ended.set()


def cancelled_elsewhere(error: asyncio.CancelledError) -> RuntimeError:
    """Return the error to raise in place of `error`, for an awaited task that was cancelled by other code.

    Raises:
        asyncio.CancelledError: the current task itself is being cancelled.
    """
    if (task := asyncio.current_task()) is None or task.cancelling():
        raise error
    found = RuntimeError("what this collection waited for, a task of its source's, was cancelled")
    found.__cause__ = error
    return found


class _Feeder:
    """Work of the thread that fills a queue with batches; created in the event loop of the consumer.

    Args:
        source, reading, wanted: arguments as for `feed`.
        items: items of the source.

    Attributes:
        ended: event that the consumer sets when it stops.
    """

    def __init__(
        self, source: DocumentSource, items: Iterator[Any], reading: Reading, wanted: Callable[[int], bool]
    ) -> None:
        self._source, self._items, self._reading, self._wanted = source, items, reading, wanted
        self._ready: queue.Queue[list[Fed] | _End] = queue.Queue(AHEAD)
        self._loop, self._came = asyncio.get_running_loop(), asyncio.Event()
        self.ended = threading.Event()

    async def next(self) -> list[Fed] | None:
        """Wait for the next batch and return it; None at the end of the source.

        Raises:
            The errors of `feed`.
        """
        while self._ready.empty():
            await self._came.wait()
            self._came.clear()
        batch = self._ready.get_nowait()
        if not isinstance(batch, _End):
            return batch
        if batch.error is not None:
            raise batch.error
        return None

    def run(self) -> None:
        """Fill the queue until the source ends or the consumer stops; then close the source's iterator."""
        end = _End()
        try:
            for documents in _batched(self._source, self._items):
                if not self._put(_feed_batch(documents, self._reading, self._wanted)):
                    break
        except BaseException as error:  # noqa: BLE001 -- it is theirs who wait
            end = _End(error)
        finally:
            with suppress(AttributeError):  # files are closed by this, iterators of others have nothing to close
                self._items.close()  # type: ignore[attr-defined]
        self._put(end)

    def _put(self, batch: list[Fed] | _End) -> bool:
        while not self.ended.is_set():
            with suppress(queue.Full):
                self._ready.put(batch, timeout=LOOK_SECONDS)
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._came.set)
                return True
        return False


def _batched(source: DocumentSource, items: Iterator[Any]) -> Iterator[list[CorpusDocument]]:
    batch: list[CorpusDocument] = []
    size = 0
    for document in source.documents(items):
        batch.append(document)
        size += len(document.content)
        if len(batch) == BATCH or size >= BATCH_SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


async def _batched_async(source: DocumentSource, items: AsyncIterator[Any]) -> AsyncIterator[list[CorpusDocument]]:
    """Yield batches of one document each: waiting to fill a batch from an async source could take forever."""
    async for found in items:
        if (document := source.document(*found)) is not None:
            yield [document]


def _feed_batch(documents: list[CorpusDocument], reading: Reading, wanted: Callable[[int], bool]) -> list[Fed]:
    chosen = [document for document in documents if wanted(document.number)]
    cut = zip(chosen, reading.cutting.windows(chosen), strict=True)
    windows = {one.number: [(window, reading.asked(window)) for window in found] for one, found in cut}
    return [Fed(one.number, _digest(one), windows.get(one.number), one.bytes) for one in documents]


def _digest(document: CorpusDocument) -> bytes:
    found = hashlib.sha256()
    document.enter(found)
    return found.digest()
