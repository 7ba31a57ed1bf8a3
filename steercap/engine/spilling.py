"""Spilling: while requests wait for the arena, unfetched rows of finished requests are moved to disk.

`core.budget` chooses them. They are moved in batches, one after the other: read out of the arenas like any rows,
checked, written by one thread, and only then freed in the arena. Rows that cannot be written stay in the arena.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from steercap.concurrency.loops import OwnerLoop
from steercap.config import Settings
from steercap.core.budget import Budget, Reservation
from steercap.core.messages import Wanted
from steercap.engine.fetching import Delivery
from steercap.errors import CaptureMemoryFull, ModelClosed
from steercap.files.spill import SpillFile, default_folder

Value = TypeVar("Value")

#: Maximum bytes of a batch, unless one request has more; it is in this process's memory until it is written.
BATCH_BYTES: Final = 64 << 20
#: Seconds to wait after a failed write before the next try.
RETRY_SECONDS: Final = 1.0
#: Number of threads that read rows back; a disk serves concurrent reads faster than successive ones.
READERS: Final = 4

_CLOSED: Final = "the model was closed while rows were moved to or from disk"


class Spillable(Protocol):
    """Rows of one sample of a finished request that may be moved to disk."""

    @property
    def movable(self) -> bool:
        """True if the rows can be moved now."""

    @property
    def wanted(self) -> Wanted:
        """Owner and number of the rows, as the workers are asked for them."""

    def spill(self) -> None:
        """Mark the rows as being moved."""

    def write(self, delivery: Any, file: SpillFile, dropped: Callable[[], object]) -> Any:
        """Check the delivered rows and write them to the file; called on a thread.

        Args:
            delivery: rows, as `Engine.collect` returns them.
            file: file to write to.
            dropped: function that is called when nothing refers to the written rows any more.

        Returns:
            Argument for `stored`: the location of the rows in the file, or the error of a failed check.

        Raises:
            CaptureMemoryFull, ModelClosed, OSError: see `SpillFile.put`.
        """

    def stored(self, spilled: Any) -> None:
        """Keep what `write` returned in place of the rows, unless they were released, and free them in the arena."""

    def end_spill(self) -> None:
        """Mark the move as ended, with or without success. Idempotent."""


class Spilling:
    """Mover of rows from the arenas to disk while requests wait for room.

    Args:
        settings: settings with `spill_folder` and the quota `spill_bytes`.
        budget: reservations of arena pages, and the queue of requests.
        page_bytes: bytes of an arena page.
        collect: coroutine function that reads rows out of the arenas.
        flush: coroutine function that makes the workers free released rows.
        admit_waiting: function that admits requests that fit now.

    Raises:
        InvalidSetting: no file can be made in the folder.
    """

    def __init__(  # noqa: PLR0917 -- what it stands between
        self,
        settings: Settings,
        budget: Budget,
        page_bytes: int,
        collect: Callable[[Sequence[Wanted]], Awaitable[list[Delivery]]],
        flush: Callable[[], Awaitable[object]],
        admit_waiting: Callable[[], None],
    ) -> None:
        self.file: Final = SpillFile(folder_of(settings), settings.spill_bytes)
        self._budget, self._collect, self._flush, self._admit_waiting = budget, collect, flush, admit_waiting
        self._batch = max(1, min(BATCH_BYTES // page_bytes, budget.pages // 4))
        self._home: Final = OwnerLoop("this model")
        self._known: weakref.WeakValueDictionary[Reservation, Spillable] = weakref.WeakValueDictionary()
        self._too_large: weakref.WeakKeyDictionary[Reservation, int] = weakref.WeakKeyDictionary()  # and its bytes
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="steercap spiller")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="steercap spill reader")
        self._task: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.Future[None] | None = None
        self._failure: str | None = None
        self._closed = False

    def offer(self, reservation: Reservation, rows: Spillable) -> None:
        """Allow a reservation's rows to be moved while their handle lives; requests that wait may get their room."""
        self._known[reservation] = rows
        self._admit_waiting()

    def reserve(self, size: int) -> object:
        """Reserve `size` bytes of the quota for files that workers write; freed when the returned object is collected.

        Raises:
            CaptureMemoryFull: the quota has no room for them.
        """
        try:
            return self.file.reserve(size, partial(self._home.call, self._dropped))
        except CaptureMemoryFull as error:
            raise CaptureMemoryFull(
                f"rows of this request do not fit in capture_bytes, so they leave memory while it runs: {error}; lower "
                "max_tokens, capture fewer layers or tokens, release handles, or raise SteerModel(..., spill_bytes=)"
            ) from error

    def begin(self) -> None:
        """Start moving rows if that makes room for the queue; do nothing while a move runs or a retry is due."""
        if self._task is None and not self._closed and self._retry is None and self._next():
            self._task = self._home.loop.create_task(self._run(), name="steercap spilling")
            self._task.add_done_callback(self._ended)

    @property
    def situation(self) -> str:
        """Reason why there is no room yet, as a clause for error messages."""
        file = self.file
        if self._failure is not None:
            return f"and rows cannot be moved to {file.folder}: {self._failure}"
        if self._task is not None:
            return f"and moving rows to {file.folder} takes longer than that"
        return (
            f"and {file.bytes_in_use:,} of spill_bytes={file.most_bytes:,} in {file.folder} are in use, by "
            f"{file.stored} handles"
        )

    async def read(self, work: Callable[[], Value]) -> Value:
        """Run `work`, which reads rows back from disk, on a thread; return its result.

        Raises:
            ModelClosed: the model was closed meanwhile.
        """
        return await self._on(self._readers, work)

    async def aclose(self) -> None:
        """Stop moving rows; rows whose move has not ended stay in the arena."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def end(self) -> None:
        """Close the spill file; blocks until no thread uses it. Idempotent."""
        self._closed = True
        self.file.stop()
        for pool in (self._writer, self._readers):
            pool.shutdown(cancel_futures=True)
        self.file.close()

    def _next(self) -> list[Reservation]:
        """Return the reservations whose rows to move in the next batch, [] if moving makes no room."""
        free = self.file.free_bytes

        def may(reservation: Reservation) -> bool:
            rows = self._known.get(reservation)
            return rows is not None and rows.movable and self._too_large.get(reservation, 0) <= free

        return self._budget.movable(may, self._batch)

    def _held(self, reservations: Sequence[Reservation]) -> list[tuple[Reservation, Spillable]]:
        """Return the reservations whose rows are still alive, each with its rows."""
        found = ((reservation, self._known.get(reservation)) for reservation in reservations)
        return [(reservation, rows) for reservation, rows in found if rows is not None]

    async def _run(self) -> None:
        while reservations := self._next():
            moved = await self._move(self._held(reservations))  # the batch has no name here, or dropped rows stay alive
            while any(self._budget.holds(reservation) for reservation in moved):
                await self._flush()

    async def _move(self, batch: Sequence[tuple[Reservation, Spillable]]) -> list[Reservation]:
        """Move the rows of a batch to disk; return the reservations of those that were written."""
        for _, rows in batch:
            rows.spill()
        try:
            deliveries = deque(await self._collect([rows.wanted for _, rows in batch]))
            return [
                reservation for reservation, rows in batch if await self._write(reservation, rows, deliveries.popleft())
            ]
        finally:
            for _, rows in batch:
                rows.end_spill()

    async def _write(self, reservation: Reservation, rows: Spillable, delivery: Delivery) -> bool:
        """Move `delivery`, the data of `rows`, from the arena to the spill file; False if the quota has no room.

        The memory of `reservation` is free after the next call of the workers. Raises the errors of the file system.
        """
        try:
            work = partial(rows.write, delivery, self.file, partial(self._home.call, self._dropped))
            rows.stored(await self._on(self._writer, work))
        except CaptureMemoryFull:
            self._too_large[reservation] = self.file.free_bytes + 1
            return False
        self._failure = None
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of the moving task: admit requests that fit now; after a failure, schedule another try."""
        self._task = None
        if self._closed or task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._failure = str(error) or type(error).__name__
            self._retry = self._home.loop.call_later(RETRY_SECONDS, self._admit_again)
        self._admit_waiting()

    def _admit_again(self) -> None:
        self._retry = None
        self._admit_waiting()

    def _dropped(self) -> None:
        """Start freeing the disk space of rows that nothing refers to any more, on the writing thread."""
        if self._closed or self._sweeping is not None:
            return
        with contextlib.suppress(RuntimeError):  # the pool has ended
            self._sweeping = self._home.loop.run_in_executor(self._writer, self.file.sweep)
            self._sweeping.add_done_callback(self._swept)

    def _swept(self, sweeping: asyncio.Future[None]) -> None:
        self._sweeping = None
        if not self._closed and not sweeping.cancelled():
            sweeping.result()
            self._admit_waiting()
            if self.file.has_dropped:  # it was dropped meanwhile
                self._dropped()

    async def _on(self, pool: ThreadPoolExecutor, work: Callable[[], Value]) -> Value:
        """Run `work` on a thread of the pool and return its result; drop it if the caller is cancelled first."""
        try:
            if self._closed:
                raise ModelClosed(_CLOSED)
            future = pool.submit(work)
        except RuntimeError as error:  # the pool has ended
            raise ModelClosed(_CLOSED) from error
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise ModelClosed(_CLOSED) from None  # it was the pool that ended
            raise
        finally:
            future.cancel()


def folder_of(settings: Settings) -> Path:
    """Return the folder for an engine's spill file: `spill_folder`, or the default."""
    return default_folder() if settings.spill_folder is None else Path(settings.spill_folder)


def require_place(settings: Settings) -> None:
    """Check before an engine is started that a spill file can be made, if overflow="spill".

    Raises:
        InvalidSetting: no file can be made in the folder.
    """
    if settings.overflow == "spill":
        SpillFile(folder_of(settings), 0).close()
