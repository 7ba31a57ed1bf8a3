"""Queue of capturing requests, which wait until the arena, the memory of captured rows, has room for theirs.

This module awaits; `core.budget` decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from steercap.core.budget import Budget, Reservation
from steercap.errors import CaptureMemoryFull, EngineFailure, ModelClosed

if TYPE_CHECKING:
    from steercap.config import Settings
    from steercap.engine.spilling import Spilling

_REMEDY: Final = (
    "fetch or release handles as they come, capture fewer layers or tokens, lower max_tokens, use reduce=, "
    "or raise SteerModel(..., capture_bytes=)"
)
_SPILL: Final = "; with overflow='spill', rows of finished requests go to disk"
_MORE: Final = ", or spill_bytes="
_ENDED: Final = (
    "; with overflow='spill' rows that are not reduced leave memory while their request runs, where those of one "
    "forward pass fit: lower max_num_batched_tokens="
)


class Admission:
    """Queue of capturing requests before the arenas, the memory of captured rows.

    Args:
        pages: number of pages of each engine's arena, the smallest where they differ.
        page_bytes: bytes of a page.
        settings: settings with `overflow`, the policy for a full arena, and `overflow_timeout`, in seconds.
        engines: number of engines, each with its own arena.
        reductions: number of reductions (samples of requests with `reduce=`) that can run at once in each engine.
    """

    def __init__(self, pages: int, page_bytes: int, settings: Settings, engines: int = 1, reductions: int = 0) -> None:
        self.budget = Budget(pages, engines, reductions)
        self.page_bytes = page_bytes
        self._settings = settings
        self._waiting: dict[Reservation, asyncio.Future[None]] = {}
        self._watch: asyncio.TimerHandle | None = None
        #: Mover of rows to disk with overflow="spill", else None.
        self.spilling: Spilling | None = None

    async def claim(self, pages: int, call: object, engine: int | None = None, reductions: int = 0) -> Reservation:
        """Reserve arena pages for a request, in order of arrival; the returned reservation names the engine to run it.

        Args:
            pages: number of pages of the arena.
            call: the `generate` call that the request belongs to.
            engine: index of the engine that must run the request, or None for any.
            reductions: number of reductions (`reduce=`) that run in the request, one per sample.

        Raises:
            CaptureMemoryFull: the arena is too small, or held by calls that wait themselves; it is full and
                overflow="error"; or nothing was freed in time.
            ModelClosed: the model was closed meanwhile.
        """
        reservation = Reservation(pages, call, engine=engine, reductions=reductions)
        if pages > self.budget.pages:
            raise CaptureMemoryFull(
                f"{self._situation(reservation)}; {_REMEDY}{_ENDED if self.spilling is not None else ''}"
            )
        # Requests that still wait need only an accumulator, which running requests give back.
        if self._settings.overflow == "error" and pages + self.budget.wanted > self.budget.free(engine):
            raise CaptureMemoryFull(f"{self._situation(reservation)} and overflow='error'; {_REMEDY}")
        admitted = self._waiting[reservation] = asyncio.get_running_loop().create_future()
        try:
            self._update_queue(self.budget.claim(reservation))
            await admitted
        except BaseException:
            self.release(reservation)
            raise
        finally:
            self._waiting.pop(reservation, None)
        return reservation

    def finish(self, reservation: Reservation, parts: Sequence[int]) -> list[Reservation]:
        """Replace an ended request's reservation by one for each sample, of `parts` pages, and return these."""
        handles, admitted = self.budget.finish(reservation, parts)
        self._update_queue(admitted)
        return handles

    def release(self, reservation: Reservation) -> None:
        """Free a reservation's pages, or remove it from the queue; restart the timeout of those that wait."""
        if self._watch:
            self._watch.cancel()
            self._watch = None
        self._update_queue(self.budget.release(reservation))

    def admit_waiting(self) -> None:
        """Admit waiting requests that fit now, and begin to move rows to disk for the others; called by `Spilling`."""
        self._update_queue(self.budget.admit())

    def close(self) -> None:
        """Fail all waiting requests, since the model is closed."""
        self.fail(ModelClosed("the model was closed while this request waited for capture memory"))

    def fail(self, error: EngineFailure) -> None:
        """Fail all waiting requests, each with a new error of the type and message of `error`."""
        if self._watch:
            self._watch.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(type(error)(str(error)))

    def _update_queue(self, admitted: Iterable[Reservation]) -> None:
        """Wake `admitted` requests, refuse those that can never be admitted, and start or stop the timeout."""
        self._wake(admitted)
        if self.spilling is not None:
            self.spilling.begin()
        while self.spilling is None and (head := self.budget.hopeless()) is not None:
            if passed := self.budget.pass_head():
                self._wake(passed)
                break
            own = self.budget.waiting_of(head.call)
            holders = "the same call" if len(own) == self.budget.waiting else "this call and others that wait"
            # The call ends and gives back its handles. The head is refused last: until then nothing is admitted.
            for reservation in reversed(own):
                self._refuse(
                    reservation,
                    f"the memory is held by handles of {holders}, which cannot be released before a call ends",
                )
        if not self.budget.stalled and self._watch:
            self._watch.cancel()
            self._watch = None
        elif self.budget.stalled and self._watch is None:
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(self._settings.overflow_timeout, self._refuse_all)

    def _wake(self, admitted: Iterable[Reservation]) -> None:
        for reservation in admitted:
            future = self._waiting.get(reservation)
            if future is not None and not future.done():
                future.set_result(None)

    def _refuse_all(self) -> None:
        self._watch = None
        why = f"no handle was released for {self._settings.overflow_timeout} s"
        while self.budget.stalled and (reservation := self.budget.head) is not None:
            self._refuse(reservation, why if self.spilling is None else f"{why}, {self.spilling.situation}")

    def _refuse(self, reservation: Reservation, why: str) -> None:
        remedy = _REMEDY + (_SPILL if self.spilling is None else _MORE)
        error = CaptureMemoryFull(f"{self._situation(reservation)}: {why}; {remedy}")
        self._wake(self.budget.release(reservation))
        future = self._waiting.get(reservation)
        if future is not None and not future.done():
            future.set_exception(error)

    def _situation(self, reservation: Reservation) -> str:
        pages, free = self.budget.pages, self.budget.free(reservation.engine)
        asked, exist, used = (n * self.page_bytes for n in (reservation.pages, pages, pages - free))
        return (
            f"this request may need {asked:,} bytes of capture memory, of which {exist:,} exist and {used:,} are in use"
        )
