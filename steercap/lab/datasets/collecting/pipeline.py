"""From windows to rows: many requests at once, their rows fetched together, handed over in the order of the documents.

`blocks(model, reading, batches)` is an async generator of `Block`; `batches` is `feeding.feed(source, cutting, ...)`:

    reading = Reading(engine, CaptureSpec(layers=[8]), sample_of("all"), Cutting(model.tokenizer, context=512))
    async with aclosing(blocks(model, reading, feed(open_source(corpus), reading))) as found:
        async for block in found:
            block.index, block.rows[point]  # rows in pieces, one after another

Nothing is read ahead further than `Reading.under_way` says: who takes blocks slowly, slows the model down.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from steercap.captures.fetching import fetch_all
from steercap.core.spec import Point
from steercap.core.tokens import TokenSelection
from steercap.errors import InvalidRequest
from steercap.kernels.codecs.coded import Whole
from steercap.lab.datasets.collecting.feeding import Fed, cancelled_elsewhere
from steercap.lab.datasets.collecting.reading import CollectingModel, Reading
from steercap.lab.datasets.collecting.windows import Window
from steercap.lab.datasets.tables import Index

#: Handles that are fetched together, and such fetches at once: some gather while another is asked for.
TOGETHER, FETCHES = 64, 3
#: Of the tokens that are under way, the part that a fetch takes at most: while one is on its way, the model has work.
SHARE: Final = 8
#: Documents and windows that are known and not handed over, whatever they hold.
MOST_PLACES: Final = 4096


class Ended(NamedTuple):
    """A document of which every row was handed over.

    Args:
        number: its place in the corpus.
        digest: SHA-256 of it.
        read: tokens that the model read of it, generated ones included.
        bytes: of the corpus that were read up to its end, None where nobody knows.
    """

    number: int
    digest: bytes
    read: int
    bytes: int | None


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of windows that follow each other.

    Args:
        index: which tokens they are of.
        rows: of each point, in pieces one after another; [rows, ...] in the point's dtype, or in a codec.
        ended: the documents of which the last window is among these, and those without any; in their order.
    """

    index: Index
    rows: Mapping[Point, Sequence[Whole]]
    ended: Sequence[Ended]


class _Rows(NamedTuple):
    """What one window gave; columns as in `Index`."""

    position: Any
    token: Any
    rows: Mapping[Point, Whole]
    read: int


@dataclass(eq=False)
class _Place:
    """One window in the order of all, or a document without any.

    Args:
        fed: its document.
        window: None of a document without any.
        last: whether it is the document's last.
        tokens: that it may come to, 0 of none.
        found: its rows, None while they are on their way, and of a document without windows.
        done: whether there is nothing more to wait for.
    """

    fed: Fed
    window: Window | None
    last: bool
    tokens: int = 0
    found: _Rows | None = None
    done: bool = False


async def blocks(
    model: CollectingModel, reading: Reading, batches: AsyncGenerator[list[Fed], None]
) -> AsyncGenerator[Block, None]:
    """The rows of documents, in their order; close it to end what runs.

    Args:
        model: an open model.
        reading: what is asked of it.
        batches: documents, see `feed`.

    Yields:
        What there is of the next windows, at least a window or the end of a document.

    Raises:
        The errors of `feed`, `SteerModel.read` and `SteerModel.generate`, and those of handles.
    """
    run = _Run(model, reading)
    starting = asyncio.ensure_future(run.start(batches))
    fetching = [asyncio.ensure_future(run.fetch()) for _ in range(FETCHES)]
    try:
        while (block := await run.next()) is not None:
            yield block
    finally:
        await run.end([starting, *fetching])


class _Run:
    """One corpus on its way."""

    def __init__(self, model: CollectingModel, reading: Reading) -> None:
        self._model, self._reading = model, reading
        self._places: deque[_Place] = deque()
        self._arrived: deque[tuple[_Place, Any]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._tokens = self._windows = 0  # under way
        self._most_tokens = reading.under_way
        self._room, self._work, self._news = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._document = 0  # tokens read of the one that is not handed over to its end
        self._all_there = self._over = False
        self._error: BaseException | None = None

    async def start(self, batches: AsyncGenerator[list[Fed], None]) -> None:
        """Begin with every window, once there is room."""
        try:
            async with aclosing(batches) as found:
                async for batch in found:
                    for fed in batch:
                        await self._begin(fed)
            self._all_there = True
            self._news.set()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- it is theirs who wait for blocks
            self._fail(error)

    async def _begin(self, fed: Fed) -> None:
        windows = [(window, tokens) for window, tokens in fed.windows or () if tokens is not None]
        if not windows:
            await self._enter(_Place(fed, None, last=True, done=True))
            self._news.set()
        for number, (window, tokens) in enumerate(windows, 1):
            place = _Place(fed, window, number == len(windows), self._reading.limit(len(window.token_ids)))
            await self._enter(place)
            task = asyncio.ensure_future(self._read(place, window, tokens))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _enter(self, place: _Place) -> None:
        """Take a place in the order, when there is room for it."""
        while len(self._places) >= MOST_PLACES or (place.window and self._full(place.tokens)):
            self._room.clear()
            await self._room.wait()
        self._places.append(place)
        self._count(place, 1)

    def _full(self, more: int) -> bool:
        """Whether a window of so many tokens must wait; one by itself need not."""
        most = self._reading.concurrency
        full = self._tokens + more > self._most_tokens if most is None else self._windows >= most
        return full and self._windows > 0

    def _count(self, place: _Place, sign: int) -> None:
        self._tokens += sign * place.tokens
        self._windows += sign * (place.window is not None)

    async def _read(self, place: _Place, window: Window, tokens: TokenSelection) -> None:
        try:
            handle = await self._reading.run(self._model, window, tokens)
        except InvalidRequest as error:
            self._fail(type(error)(f"{window.where}: {error}"))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- as above
            self._fail(error)
        else:
            if self._over:
                handle.release()
                return
            self._arrived.append((place, handle))
            self._work.set()

    async def fetch(self) -> None:
        """Fetch what has arrived, as much at once as there is."""
        try:
            while True:
                while not self._arrived:
                    self._work.clear()
                    await self._work.wait()
                await self._fetch(self._group())
                self._news.set()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- as above
            self._fail(error)

    def _group(self) -> list[tuple[_Place, Any]]:
        """What is fetched next: of what has arrived, what is not too much."""
        group: list[tuple[_Place, Any]] = []
        tokens = 0
        while self._arrived and len(group) < TOGETHER and (not group or tokens < self._most_tokens // SHARE):
            group.append(self._arrived.popleft())
            tokens += group[-1][0].tokens
        return group

    async def _fetch(self, group: Sequence[tuple[_Place, Any]]) -> None:
        try:
            await fetch_all([handle.lifecycle for _, handle in group])
            for place, handle in group:
                assert place.window is not None
                place.found, place.done = self._taken(place.window, place.tokens, handle), True
        finally:  # however it ends: the traceback of an error may keep them for long
            for _, handle in group:
                handle.release()

    def _taken(self, window: Window, limit: int, handle: Any) -> _Rows:
        """The rows of a handle that are kept."""
        receipt, captures = handle.receipt, handle.captures
        positions, tokens = receipt.positions, receipt.token_ids
        rows = captures.all_kept()
        ids = np.concatenate((window.token_ids, np.array(handle.output_token_ids[:-1], dtype=np.int64)))
        read = len(ids)
        kept = self._reading.sample.kept(window, limit, positions, ids, captures)
        if kept is None or kept.all():
            return _Rows(positions, tokens, rows, read)
        chosen = torch.from_numpy(np.flatnonzero(kept))
        return _Rows(positions[kept], tokens[kept], {point: one[chosen] for point, one in rows.items()}, read)

    async def next(self) -> Block | None:
        """What there is of the next windows; None behind the last."""
        while True:
            if self._error is not None:
                raise self._error
            if found := self._ready():
                self._room.set()
                return self._block(found)
            if self._all_there and not self._places:
                return None
            self._news.clear()
            await self._news.wait()

    def _ready(self) -> list[_Place]:
        found = []
        while self._places and self._places[0].done:
            place = self._places.popleft()
            found.append(place)
            self._count(place, -1)
        return found

    def _block(self, places: Sequence[_Place]) -> Block:
        ended = self._ended(places)
        found = [(place.window, place.found) for place in places if place.window and place.found]
        counts = [len(rows.position) for _, rows in found]
        documents = np.array([window.document for window, _ in found], dtype=np.int64)
        windows = np.array([window.number for window, _ in found], dtype=np.int32)
        index = Index(
            np.repeat(documents, counts),
            np.repeat(windows, counts),
            _joined([rows.position for _, rows in found]),
            _joined([rows.token for _, rows in found]),
        )
        full = [rows.rows for (_, rows), count in zip(found, counts, strict=True) if count]
        rows = {point: [one[point] for one in full] for point in self._reading.points}
        return Block(index, rows, ended)

    def _ended(self, places: Sequence[_Place]) -> list[Ended]:
        ended = []
        for place in places:
            self._document += place.found.read if place.found else 0
            if place.last:
                ended.append(Ended(place.fed.number, place.fed.digest, self._document, place.fed.bytes))
                self._document = 0
        return ended

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = cancelled_elsewhere(error)  # or this run ends
        self._error = self._error or error
        self._news.set()

    async def end(self, others: Sequence[asyncio.Task[None]]) -> None:
        """End what runs, and give back what nobody will take; at once if this is cancelled once more."""
        self._over = True
        tasks = [*others, *self._running]
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for _, handle in self._arrived:
                handle.release()
            self._arrived.clear()
            self._places.clear()


def _joined(columns: Sequence[Any]) -> Any:
    return np.concatenate([np.empty(0, dtype=np.int64), *columns]).astype(np.int32)
