"""Pipeline from windows to rows: many requests at once, rows fetched in groups and yielded in document order.

`blocks(model, reading, batches)` is an async generator of `Block`; `batches` is `feeding.feed(source, reading)`:

    reading = Reading(engine, CaptureSpec(layers=[8]), sample_of("all"), Cutting(model.tokenizer, context=512))
    async with aclosing(blocks(model, reading, feed(open_source(corpus), reading))) as found:
        async for block in found:
            block.index, block.rows[point]  # rows in pieces, one after another

At most `Reading.under_way` tokens are in flight: a slow consumer slows the model down.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from steercap.core.spec import Point
from steercap.core.tokens import TokenSelection
from steercap.errors import InvalidRequest
from steercap.kernels.codecs.coded import Whole
from steercap.lab.datasets.collecting.documents import Window
from steercap.lab.datasets.collecting.feeding import Fed, cancelled_elsewhere
from steercap.lab.datasets.collecting.reading import Block, Ended, Reading
from steercap.lab.datasets.tables import Index

if TYPE_CHECKING:
    from steercap.client import RemoteModel
    from steercap.model import SteerModel

#: Maximum handles of a fetch, and number of concurrent fetches; handles that arrive meanwhile wait for the next.
TOGETHER, FETCHES = 64, 3
#: A fetch is limited to 1/SHARE of the maximum tokens in flight, so that the model has work meanwhile.
SHARE: Final = 8
#: Maximum documents and windows that are queued and not yielded yet, whatever their size.
MOST_PLACES: Final = 4096


class _PipelineRows(NamedTuple):
    """Kept rows of one window, with position and token of each; `read` is the number of tokens that the model read."""

    position: Any
    token: Any
    rows: Mapping[Point, Whole]
    read: int


@dataclass(eq=False)
class _Place:
    """Place of one window in the output order, or of a document without windows.

    Args:
        fed: document of the window.
        window: the window; None for a document without any.
        last: True for the document's last window.
        tokens: maximum number of tokens, generated ones included; 0 without a window.
        found: rows of the window; None until they arrive, and for a document without windows.
        done: True if there is nothing more to wait for.
    """

    fed: Fed
    window: Window | None
    last: bool
    tokens: int = 0
    found: _PipelineRows | None = None
    done: bool = False


async def blocks(
    model: SteerModel | RemoteModel, reading: Reading, batches: AsyncGenerator[list[Fed], None]
) -> AsyncGenerator[Block, None]:
    """Yield blocks of captured rows in document order; closing the generator cancels all requests in flight.

    Args:
        model: an open model.
        reading: compiled settings of the requests.
        batches: batches of documents, see `feed`.

    Yields:
        Rows that are ready of the next windows: at least a window or the end of a document.

    Raises:
        The errors of `feed`, `SteerModel.read` and `SteerModel.generate`, and those of handles.
    """
    run = _PipelineRun(model, reading)
    starting = asyncio.ensure_future(run.start(batches))
    fetching = [asyncio.ensure_future(run.fetch()) for _ in range(FETCHES)]
    try:
        while (block := await run.next()) is not None:
            yield block
    finally:
        await run.end([starting, *fetching])


class _PipelineRun:
    """Run of one corpus through the pipeline: its requests in flight, its fetches, and the order of output."""

    def __init__(self, model: SteerModel | RemoteModel, reading: Reading) -> None:
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
        """Start a request for every window, as room becomes available; an error is kept for `next` to raise."""
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
        """Append a window or document to the output order, once there is room for its tokens."""
        while len(self._places) >= MOST_PLACES or (place.window and self._full(place.tokens)):
            self._room.clear()
            await self._room.wait()
        self._places.append(place)
        self._count(place, 1)

    def _full(self, more: int) -> bool:
        """Return whether a window of `more` tokens must wait for room; it never does if no other is in flight."""
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
        """Fetch the rows of finished requests in groups, until cancelled; an error is kept for `next` to raise."""
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
        """Remove the handles to fetch next, up to the limits of a fetch, from the queue; return them with places."""
        group: list[tuple[_Place, Any]] = []
        tokens = 0
        while self._arrived and len(group) < TOGETHER and (not group or tokens < self._most_tokens // SHARE):
            group.append(self._arrived.popleft())
            tokens += group[-1][0].tokens
        return group

    async def _fetch(self, group: Sequence[tuple[_Place, Any]]) -> None:
        try:
            await self._model.fetch_captures_batch([handle for _, handle in group])
            for place, handle in group:
                assert place.window is not None
                place.found, place.done = self._taken(place.window, place.tokens, handle), True
        finally:  # however it ends: the traceback of an error may keep them for long
            for _, handle in group:
                handle.release()

    def _taken(self, window: Window, limit: int, handle: Any) -> _PipelineRows:
        """Return the rows of a fetched handle that the token sample keeps; for `limit` see `TokenSample.kept`."""
        receipt, captures = handle.receipt, handle.captures
        positions, tokens = receipt.positions, receipt.token_ids
        rows = captures.all_kept()
        ids = np.concatenate((window.token_ids, np.array(handle.output_token_ids[:-1], dtype=np.int64)))
        read = len(ids)
        kept = self._reading.sample.kept(window, limit, positions, ids, captures)
        if kept is None or kept.all():
            return _PipelineRows(positions, tokens, rows, read)
        chosen = torch.from_numpy(np.flatnonzero(kept))
        return _PipelineRows(positions[kept], tokens[kept], {point: one[chosen] for point, one in rows.items()}, read)

    async def next(self) -> Block | None:
        """Wait for the next block and return it, or None at the end; raise the first error of the run."""
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
        """Cancel `others` and all requests, wait until they have ended, and release handles that were not fetched."""
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
