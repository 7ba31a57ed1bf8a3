"""Recorder of a server: captures requests that do not use steercap, and writes their rows in the background.

A request never waits, nor fails, for its recording: rows for which there is no room are dropped, counted by reason, and
logged. Rows of ended requests wait in a bounded queue, which one daemon thread writes; a stalled disk stops only it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from steercap.captures.fetching import fetch_all
from steercap.captures.files import size_of
from steercap.captures.handle import CaptureHandle
from steercap.captures.lifecycle import Source
from steercap.captures.recordings import RecordingFolder
from steercap.concurrency.loops import end_within, on_thread
from steercap.errors import CaptureMemoryFull, EmptySelection, SteercapError
from steercap.server.call import OPTED_OUT
from steercap.server.record_settings import RecordSettings

if TYPE_CHECKING:
    from concurrent.futures import Future

    from steercap.model import SteerModel
    from steercap.requests.job import Job

#: Divisor of `queue_bytes`: a request with more bytes than the quotient is fetched and written in chunks.
LARGE: Final = 8
#: Maximum bytes of rows fetched by one call, unless one request has more: workers answer between two forward passes.
FETCH_BYTES: Final = 16 << 20
#: Seconds between two removals of old segments; and maximum seconds that a server's end waits for the queue.
TIDY_SECONDS, END_SECONDS = 60.0, 10.0
#: Reasons for dropping: workers' memory, full queue, folder's quota, failing disk, wrong rows, ended server, and so on.
DROPPED: Final = ("memory", "queue", "quota", "disk", "rows", "cancelled", "unsupported", "own_capture", "ended")
SKIPPED: Final = ("opted_out", "not_sampled", "no_rows")
_LOG: Final = logging.getLogger(__name__)


class _Ended(NamedTuple):
    """Queued handles of a request that ended at `time`, its bytes in the queue, each handle's `rows` if in chunks."""

    handles: Sequence[CaptureHandle]
    answer_id: str
    size: int
    rows: Sequence[int] = ()
    time: float | None = None


class Recorder:
    """Recorder of one server; an async context manager, within which the model is open.

    A request here is one of the engine: a prompt with all its samples, or a beam.

    Args:
        settings: settings of the recorder.
        folder: open folder to write to, which the recorder closes, unless the disk stalls.

    Attributes:
        recorded: numbers of "requests", "rows" and "bytes" written.
        dropped: number of requests that could not be recorded, by reason: see `DROPPED`.
        skipped: number of requests that were not to be recorded, by reason: see `SKIPPED`.
        pending: bytes of rows in the queue.
    """

    def __init__(self, settings: RecordSettings, folder: RecordingFolder) -> None:
        self.settings, self.folder = settings, folder
        self.recorded: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.pending = 0
        self._lock = threading.Lock()
        self._coming: deque[_Ended] = deque()
        self._fetching: asyncio.Task[None] | None = None
        self._queue: SimpleQueue[_Ended | None] = SimpleQueue()
        self._draw = random.Random()  # noqa: S311 -- a sample, not a secret
        self._thread: Future[None] | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @staticmethod
    def of(settings: RecordSettings, model: str) -> Recorder:
        """Make a recorder for a model, given by name, and open its folder.

        Raises:
            The errors of `RecordingFolder`.
        """
        return Recorder(settings, RecordingFolder(settings.folder, model=model, limits=settings.limits))

    def check(self, model: SteerModel) -> None:
        """Check that an open model can capture what the settings record.

        Raises:
            LayerOutOfRange, PointNotArmed, UnknownName: a layer or site is not there.
            InvalidSpec, InvalidRequest: a codec would not make rows smaller, or a layer's attention is not supported.
        """
        engine = model.serving.here()
        points, _ = engine.compiler.captured(self.settings.capture)
        for spec in (self.settings.capture, *self.settings.codecs.specs(layers=self.settings.layers)):
            engine.compiler.coding(spec)
        for layer in {point.layer for point in points if point.site == "q"} if self.settings.codecs.attention else ():
            engine.attention[layer].understood(layer)

    def wants(self) -> bool:
        """Return True if the next request is to be recorded; else count it by reason. Called before it is read."""
        if OPTED_OUT.get():
            return self._skip("opted_out")
        if self.settings.fraction < 1 and self._draw.random() >= self.settings.fraction:
            return self._skip("not_sampled")
        if self._closed or self.folder.full:
            return self.drop("ended" if self._closed else "quota")
        return self.pending < self.settings.queue_bytes or self.drop("queue")

    def fits(self, job: Job, pages: int) -> bool:
        """Return True if a request's rows, of `pages` arena pages, have room; else count it as dropped.

        Rows that leave memory while it runs need room on disk, and half of the workers' memory must stay free.
        """
        budget, spilling, plan = job.engine.admission.budget, job.engine.spilling, job.plan
        if plan is not None and spilling is not None and job.engine.room_for(plan)[1] > spilling.file.free_bytes:
            return self.drop("memory")
        if budget.waiting or 2 * (budget.free(job.options.get("data_parallel_rank")) - pages) < budget.pages:
            return self.drop("memory")
        return True

    def drop(self, reason: str, error: Exception | None = None) -> bool:
        """Count a request as dropped for a reason of `DROPPED`, with the error that caused it; return False."""
        with self._lock:
            self.dropped[reason] += 1
            count = self.dropped[reason]
        if str(count).strip("0") == "1":  # 1, 10, 100, ...
            _LOG.warning("%d requests were not recorded so far; reason: %r", count, reason, exc_info=error)
        return False

    def refused(self, error: Exception) -> None:
        """Count a request whose capture was refused: skipped if it has no rows to record, else "unsupported"."""
        _ = self._skip("no_rows") if isinstance(error, EmptySelection) else self.drop("unsupported", error)

    def _skip(self, reason: str) -> bool:
        self.skipped[reason] += 1
        return False

    def take(self, handles: Sequence[CaptureHandle], answer_id: str) -> None:
        """Queue the handles of an ended request for writing and release them then, or drop them; never waits."""
        size, rows = sum(map(_memory_held, handles)), [_source(handle).expected.rows for handle in handles]
        chunked = size > self.settings.queue_bytes // LARGE or any(map(_leaves, handles))
        size = min(size, self.settings.queue_bytes // LARGE)
        with self._lock:
            room = self.pending + size <= self.settings.queue_bytes
            self.pending += size if room and not self._closed else 0
        if not room or self._closed:
            self._done(_Ended(handles, answer_id, 0), "ended" if self._closed else "queue")
            return
        self._coming.append(_Ended(handles, answer_id, size, rows if chunked else (), time.time()))
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._fetch())

    async def _fetch(self) -> None:
        """Fetch the rows of ended requests, several at once, and pass them to the writing thread."""
        while self._coming:
            together, failed = self._next(), None
            try:
                await fetch_all([handle.lifecycle for ended in together if not ended.rows for handle in ended.handles])
            except Exception as error:  # noqa: BLE001 -- other rows are here, and later requests are still fetched
                failed = error
            for ended in together:
                self._coming.popleft()
                try:
                    self._queue.put(ended if ended.rows else self._weighed(ended))
                except Exception as error:  # noqa: BLE001 -- likewise
                    self._done(ended, "rows", failed or error)

    def _next(self) -> list[_Ended]:
        """Return the next ended requests to fetch by one call, `FETCH_BYTES` or one request; they stay in `_coming`."""
        places = enumerate(zip(self._coming, accumulate(ended.size for ended in self._coming), strict=True))
        return [ended for place, (ended, size) in places if not place or size <= FETCH_BYTES]

    def _weighed(self, ended: _Ended) -> _Ended:
        """Return a fetched request with its actual bytes as `size`; it may have reserved far more in the workers."""
        size = sum(size_of(handle.as_saved()) for handle in ended.handles)
        with self._lock:
            self.pending += size - ended.size
        return ended._replace(size=size)

    def _write(self) -> None:
        """Write queued requests until None comes, then close the folder; runs on its own thread."""
        while True:
            try:
                ended = self._queue.get(timeout=TIDY_SECONDS)
            except Empty:
                self._tidy()
                continue
            if ended is None:
                self.folder.close()
                return
            self._done(ended, *self._write_request(ended))

    def _tidy(self) -> None:
        try:
            self.folder.tidy()
        except (OSError, SteercapError):
            _LOG.exception("old recordings cannot be removed from %s", self.folder.path)

    def _write_request(self, ended: _Ended) -> tuple[str, Exception | None]:
        """Write a request to the folder; return ("", None), or a reason of `DROPPED` and the error why it cannot be."""
        rows = sum(ended.rows or [len(handle.receipt.positions) for handle in ended.handles])
        codecs, prompts = self.settings.codecs, self.settings.prompts
        try:
            if ended.rows:
                found = [
                    codecs.parted_chunks(self._chunks(handle), count, self.folder.path, prompts=prompts)
                    for handle, count in zip(ended.handles, ended.rows, strict=True)
                ]
            else:
                found = [codecs.parted(handle, prompts=prompts) for handle in ended.handles]
            size = self.folder.add([part for parts in found for part in parts], ended.answer_id, ended.time)
        except CaptureMemoryFull:
            return "quota", None
        except OSError as error:
            return "disk", error
        except Exception as error:  # noqa: BLE001 -- the thread must live on, or all later requests would be dropped
            return "rows", error
        with self._lock:
            self.recorded += Counter(requests=1, rows=rows, bytes=size)
        return "", None

    def _chunks(self, handle: CaptureHandle) -> Iterator[CaptureHandle]:
        """Yield a handle's rows in chunks, on the writing thread; the event loop fetches each when it is needed."""
        chunks = handle.chunks()

        async def following() -> CaptureHandle | None:
            return await anext(chunks, None)

        assert self._loop is not None
        while (chunk := asyncio.run_coroutine_threadsafe(following(), self._loop).result()) is not None:
            yield chunk

    def _done(self, ended: _Ended, reason: str, error: Exception | None = None) -> None:
        """Release a request's handles, and count it as dropped if `reason` is not ""."""
        for handle in ended.handles:
            handle.release()
        with self._lock:
            self.pending -= ended.size
        if reason:
            self.drop(reason, error)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread = on_thread(self._write, "steercap recorder")
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Wait at most `END_SECONDS` each until queued requests are fetched and written; drop and log the others."""
        self._closed = True
        if self._fetching is not None:
            await asyncio.wait([self._fetching], timeout=END_SECONDS)
            self._fetching.cancel()
        while self._coming:
            self._done(self._coming.popleft(), "ended")
        self._queue.put(None)
        assert self._thread is not None
        await end_within(self._thread, patience=END_SECONDS)
        if not self._thread.done():
            self._give_up()
        _LOG.info("recorded %s, dropped %s, skipped %s", *map(dict, (self.recorded, self.dropped, self.skipped)))

    def _give_up(self) -> None:
        """Drop the queued requests, since the write before them does not end."""
        with suppress(Empty):
            while (ended := self._queue.get_nowait()) is not None:
                self._done(ended, "ended")
        self._queue.put(None)  # for when it takes them after all
        _LOG.warning("writing to %s does not end; %d bytes of rows may not be recorded", self.folder.path, self.pending)


def _source(handle: CaptureHandle) -> Source:
    source: Any = handle.lifecycle.source
    assert isinstance(source, Source)
    return source


def _memory_held(handle: CaptureHandle) -> int:
    """Return the bytes of capture memory that an ended request's rows occupy."""
    source = _source(handle)
    return source.reservation.pages * source.engine.admission.page_bytes


def _leaves(handle: CaptureHandle) -> bool:
    """Return True if rows of the handle moved to disk while the request ran."""
    capture = _source(handle).expected.plan.capture
    return capture is not None and capture.window > 0
