"""Admission of capturing requests: arena memory is reserved before a request reaches the engine.

This is pure bookkeeping: it decides and returns the requests admitted and their engines; the caller wakes them. Units
are pages of the arena.

With data parallelism every engine has an arena of its own, and a request lives in one. So the claim decides which
engine runs a request that captures, rather than vLLM's load balancer, which knows nothing of arenas: among those with
room the one that runs fewest of them, then the one with most room. Otherwise each claim would have to be made on every
engine, and N arenas would hold no more than one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["waiting", "running", "finished"]


@dataclass(eq=False)
class Reservation:
    """Arena pages of one request, reserved or waited for.

    Args:
        pages: number of pages reserved.
        call: the `generate` call it belongs to; handles of a call reach the user only when it ends.
        phase: state of the request.
        engine: index of the engine whose arena it is, or None for the first one with room.
        reductions: number of reductions that run along with the request.
        disk: reservation of disk space for rows that leave memory while the request runs, or None.
    """

    pages: int
    call: object
    phase: Phase = "waiting"
    engine: int | None = None
    reductions: int = 0
    disk: object = None


class Budget:
    """Pages of the arenas, reserved in order of arrival.

    Args:
        pages: pages of the arena of each engine, the smallest where they differ.
        engines: number of engines.
        reductions: number of reductions that can run along at once in each engine.
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
        """Pages reserved for running and finished requests, on the fullest engine."""
        return max(self._reserved)

    @property
    def reducing(self) -> int:
        """Reductions that run along, in the engine with most of them."""
        return max(self._reducing)

    @property
    def running(self) -> int:
        """Number of running requests, whose end may make room."""
        return sum(self._running)

    def free(self, engine: int | None = None) -> int:
        """Return the free pages of one engine, or of the emptiest."""
        return self.pages - (min(self._reserved) if engine is None else self._reserved[engine])

    def holds(self, reservation: Reservation) -> bool:
        """Check if a reservation has its pages."""
        return reservation in self._held

    @property
    def wanted(self) -> int:
        """Pages that the waiting requests need."""
        return sum(reservation.pages for reservation in self._queue)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for room."""
        return len(self._queue)

    @property
    def head(self) -> Reservation | None:
        """First reservation in the queue, or None."""
        return self._queue[0] if self._queue else None

    def claim(self, reservation: Reservation) -> list[Reservation]:
        """Queue a request, and return the reservations admitted."""
        self._queue.append(reservation)
        return self.admit()

    def finish(self, reservation: Reservation, parts: Sequence[int]) -> tuple[list[Reservation], list[Reservation]]:
        """Replace the reservation of a request that ended by one for each handle, with `parts` pages each.

        Returns:
            The reservations of the handles, and the reservations admitted into the freed pages.
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
        """Free a reservation's pages, or remove it from the queue, and return the reservations admitted."""
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
        """Admit reservations from the head of the queue while there is room."""
        admitted: list[Reservation] = []
        while self._queue and (possible := self._possible(self._queue[0])):
            reservation = self._queue.popleft()
            reservation.phase = "running"
            reservation.engine = min(possible, key=lambda one: (self._running[one], self._reserved[one]))
            self._hold(reservation)
            admitted.append(reservation)
        return admitted

    def _possible(self, reservation: Reservation) -> list[int]:
        """Return the engines that may run the reservation's request and have room for it."""
        wanted = range(len(self._reserved)) if reservation.engine is None else (reservation.engine,)
        return [
            engine
            for engine in wanted
            if reservation.pages <= self.free(engine)
            and reservation.reductions <= self.reductions - self._reducing[engine]
        ]

    def movable(self, may: Callable[[Reservation], bool], most: int) -> list[Reservation]:
        """Return finished reservations whose rows should leave the arena so that the queue advances, the oldest first.

        They are all of one engine: of those that may run the head of the queue, one where that makes room for it, and
        of several such the one where least has to move. Where nothing makes enough room, moving some still helps the
        running requests to make it.

        Args:
            may: predicate that says if the rows of a reservation can be moved now.
            most: maximum pages to move at once, unless the head needs more.
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
        """Return the oldest finished reservations of an engine that `may` allows, until they have at least `pages`
        pages. They have fewer if no more are allowed.
        """
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
        """Return the head of the queue if it can never be admitted, because handles of waiting calls take the room.

        Handles of a call that still runs have not reached the user, so nobody can release them; and no call that waits
        in the queue ends before its head is admitted.
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
        """Admit, before the head of the queue, a request whose call has handles that take room, and may then end."""
        calls = {id(held.call) for held in self._held}
        for reservation in self._queue:
            if id(reservation.call) in calls and self._possible(reservation):
                self._queue.remove(reservation)
                self._queue.appendleft(reservation)
                return self.admit()
        return []

    def waiting_of(self, call: object) -> list[Reservation]:
        """Return the reservations of a call that wait for room."""
        return [reservation for reservation in self._queue if reservation.call is call]

    @property
    def stalled(self) -> bool:
        """True if requests wait although none is running, so that only releasing handles can help."""
        return bool(self._queue) and self.running == 0
