"""Admission of capturing requests: arena memory is reserved before a request reaches the engine.

Pure bookkeeping: it returns the admitted requests with their engines, and the caller wakes them. Units are arena pages.

With data parallelism every engine has its own arena, and a request's rows are in one of them. So admission, not vLLM's
load balancer, chooses the engine of a capturing request: among those with room, the one that runs the fewest such
requests, then the one with most free pages. Otherwise each request would need pages on every engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["waiting", "running", "finished"]


@dataclass(eq=False)
class Reservation:
    """Arena pages that one request, or one handle of finished rows, has reserved or waits for.

    Args:
        pages: number of pages.
        call: identity of the `generate` call; handles of a call reach the user only when the call ends.
        phase: "waiting" in the queue, "running" in the engine, or "finished" with rows in the arena.
        engine: index of the engine whose arena it is in or must be in; None until admission chooses one.
        reductions: number of reductions of the request that are updated in each pass.
        disk: reservation of disk space for rows that leave memory while the request runs, or None.
    """

    pages: int
    call: object
    phase: Phase = "waiting"
    engine: int | None = None
    reductions: int = 0
    disk: object = None


class Budget:
    """Bookkeeping of arena pages, reserved for requests in order of arrival.

    Args:
        pages: number of pages of each engine's arena, the minimum where they differ.
        engines: number of engines.
        reductions: maximum number of reductions that each engine can update in passes at once.
    """

    def __init__(self, pages: int, engines: int = 1, reductions: int = 0) -> None:
        self.pages = pages
        self.reductions = reductions
        self._reducing = [0] * engines
        self._reserved = [0] * engines  # pages of running and finished requests
        self._running = [0] * engines  # requests that run, and whose end may make room
        self._held: dict[Reservation, None] = {}
        self._queue: deque[Reservation] = deque()

    @property
    def reserved(self) -> int:
        """Number of pages reserved for running and finished requests, on the fullest engine."""
        return max(self._reserved)

    @property
    def reducing(self) -> int:
        """Number of reductions of running requests, on the engine with most of them."""
        return max(self._reducing)

    @property
    def running(self) -> int:
        """Number of running requests, whose end may make room."""
        return sum(self._running)

    def free(self, engine: int | None = None) -> int:
        """Return the number of free pages of an engine; None for the engine with most."""
        return self.pages - (min(self._reserved) if engine is None else self._reserved[engine])

    def holds(self, reservation: Reservation) -> bool:
        """Check if a reservation was admitted and has its pages, rather than waiting or released."""
        return reservation in self._held

    @property
    def wanted(self) -> int:
        """Number of pages that all waiting requests need."""
        return sum(reservation.pages for reservation in self._queue)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for pages."""
        return len(self._queue)

    @property
    def head(self) -> Reservation | None:
        """First reservation in the queue; None if nothing waits."""
        return self._queue[0] if self._queue else None

    def claim(self, reservation: Reservation) -> list[Reservation]:
        """Queue a request's reservation, and return all reservations that are admitted now."""
        self._queue.append(reservation)
        return self.admit()

    def finish(self, reservation: Reservation, parts: Sequence[int]) -> tuple[list[Reservation], list[Reservation]]:
        """Replace the reservation of a request that ended by one for each handle, of `parts[i]` pages.

        Returns:
            The handles' reservations, in the order of `parts`; and the waiting reservations that are admitted now.
        """
        self._drop(reservation)
        handles = [
            Reservation(pages, reservation.call, "finished", reservation.engine, disk=reservation.disk)
            for pages in parts
        ]
        reservation.disk = None
        for handle in handles:
            self._hold(handle)
        return handles, self.admit()

    def release(self, reservation: Reservation) -> list[Reservation]:
        """Free a reservation's pages or remove it from the queue; return the waiting reservations admitted now."""
        self._drop(reservation)
        reservation.disk = None
        return self.admit()

    def _hold(self, reservation: Reservation) -> None:
        assert reservation.engine is not None
        self._held[reservation] = None
        self._reserved[reservation.engine] += reservation.pages
        if reservation.phase == "running":
            self._running[reservation.engine] += 1
            self._reducing[reservation.engine] += reservation.reductions

    def _drop(self, reservation: Reservation) -> None:
        if reservation in self._held:
            assert reservation.engine is not None
            del self._held[reservation]
            self._reserved[reservation.engine] -= reservation.pages
            if reservation.phase == "running":
                self._running[reservation.engine] -= 1
                self._reducing[reservation.engine] -= reservation.reductions
        elif reservation in self._queue:
            self._queue.remove(reservation)

    def admit(self) -> list[Reservation]:
        """Admit and return reservations from the head of the queue, in order, as long as each has room."""
        admitted: list[Reservation] = []
        while self._queue and (possible := self._possible(self._queue[0])):
            reservation = self._queue.popleft()
            reservation.phase = "running"
            reservation.engine = min(possible, key=lambda one: (self._running[one], self._reserved[one]))
            self._hold(reservation)
            admitted.append(reservation)
        return admitted

    def _possible(self, reservation: Reservation) -> list[int]:
        """Return the indices of the engines that have room for a reservation."""
        wanted = range(len(self._reserved)) if reservation.engine is None else (reservation.engine,)
        return [
            engine
            for engine in wanted
            if reservation.pages <= self.free(engine)
            and reservation.reductions <= self.reductions - self._reducing[engine]
        ]

    def movable(self, may: Callable[[Reservation], bool], most: int) -> list[Reservation]:
        """Return finished reservations whose rows to move to disk so that the queue advances, the oldest first.

        They are all of one engine: one where moving them makes room for the head of the queue, and of several the one
        where least has to move. If none can make enough room, some are returned all the same, since running requests
        may free the rest.

        Args:
            may: predicate that says if the rows of a reservation can be moved now.
            most: maximum number of pages to move at once, unless the head of the queue needs more.
        """
        head = self.head
        if head is None:
            return []
        engines = range(len(self._reserved)) if head.engine is None else (head.engine,)
        found: list[tuple[bool, int, list[Reservation]]] = []
        for engine in engines:
            lacking = head.pages - self.free(engine)
            if lacking > 0 and (reservations := self._oldest(engine, max(lacking, min(self.wanted, most)), may)):
                found.append((sum(reservation.pages for reservation in reservations) < lacking, lacking, reservations))
        return min(found, key=lambda one: one[:2])[2] if found else []

    def _oldest(self, engine: int, pages: int, may: Callable[[Reservation], bool]) -> list[Reservation]:
        """Return an engine's oldest finished reservations that `may` allows, until they have `pages` pages together."""
        reservations: list[Reservation] = []
        for reservation in self._held:
            if pages <= 0:
                break
            if (
                reservation.engine == engine
                and reservation.phase == "finished"
                and reservation.pages
                and may(reservation)
            ):
                reservations.append(reservation)
                pages -= reservation.pages
        return reservations

    def hopeless(self) -> Reservation | None:
        """Return the head of the queue if handles of waiting calls take so many pages that it can never be admitted.

        The user gets a call's handles when the call ends, so nobody can release those of a waiting call; and no waiting
        call ends before the head is admitted. None if the head can be admitted.
        """
        if not self.stalled:
            return None
        head, calls = self._queue[0], {id(waiting.call) for waiting in self._queue}
        stuck = [0] * len(self._reserved)
        for held in self._held:
            if id(held.call) in calls and held.engine is not None:
                stuck[held.engine] += held.pages
        in_the_way = min(stuck) if head.engine is None else stuck[head.engine]
        return head if head.pages > self.pages - in_the_way else None

    def pass_head(self) -> list[Reservation]:
        """Admit one waiting request, whose call has handles in the arena, before the head, so that the call may end."""
        calls = {id(held.call) for held in self._held}
        for reservation in self._queue:
            if id(reservation.call) in calls and self._possible(reservation):
                self._queue.remove(reservation)
                self._queue.appendleft(reservation)
                return self.admit()
        return []

    def waiting_of(self, call: object) -> list[Reservation]:
        """Return the waiting reservations of a call, in queue order."""
        return [reservation for reservation in self._queue if reservation.call is call]

    @property
    def stalled(self) -> bool:
        """True if requests wait and none runs, so that only a release of handles can make room."""
        return bool(self._queue) and self.running == 0
