"""Who may capture now: memory reserved before a request reaches the engine.

Number 3 in the life of a request. Pure bookkeeping: it decides and returns who is admitted; the
engine wakes them. Units are pages of the arena.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["waiting", "running", "finished"]


@dataclass(eq=False)
class Ticket:
    """One request's claim on the arena.

    Args:
        pages: pages reserved.
        call: the `generate` call it belongs to; handles of a call reach the user only when it ends.
    """

    pages: int
    call: object
    phase: Phase = "waiting"


class Budget:
    """Pages of the arena, claimed in order of arrival."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.reserved = 0  # pages claimed by running and finished requests
        self.running = 0  # requests that run, and whose end may make room
        self._held: dict[Ticket, None] = {}
        self._queue: deque[Ticket] = deque()

    @property
    def free(self) -> int:
        """Pages that nobody claims."""
        return self.pages - self.reserved

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._queue)

    @property
    def head(self) -> Ticket | None:
        """Who waits first."""
        return self._queue[0] if self._queue else None

    def claim(self, ticket: Ticket) -> list[Ticket]:
        """Queue a claim; returns the tickets admitted by it."""
        self._queue.append(ticket)
        return self.admit()

    def finish(self, ticket: Ticket, parts: Sequence[int]) -> tuple[list[Ticket], list[Ticket]]:
        """The request ended: its claim becomes one ticket a handle, holding `parts` pages each.

        Returns:
            The tickets of the handles, and the tickets admitted by what was given back.
        """
        self._drop(ticket)
        handles = [Ticket(pages, ticket.call, "finished") for pages in parts]
        for handle in handles:
            self._held[handle] = None
            self.reserved += handle.pages
        return handles, self.admit()

    def release(self, ticket: Ticket) -> list[Ticket]:
        """The ticket's pages are free, or it no longer waits; returns the tickets admitted by it."""
        self._drop(ticket)
        return self.admit()

    def _drop(self, ticket: Ticket) -> None:
        if ticket in self._held:
            del self._held[ticket]
            self.reserved -= ticket.pages
            self.running -= ticket.phase == "running"
        elif ticket in self._queue:
            self._queue.remove(ticket)

    def admit(self) -> list[Ticket]:
        """Admit from the head of the queue while there is room."""
        admitted: list[Ticket] = []
        while self._queue and self._queue[0].pages <= self.free:
            ticket = self._queue.popleft()
            ticket.phase = "running"
            self._held[ticket] = None
            self.reserved += ticket.pages
            self.running += 1
            admitted.append(ticket)
        return admitted

    def hopeless(self) -> Ticket | None:
        """The head of the queue, if nothing can help it: what its own call holds is in the way and will not move.

        Handles of a call that still runs are in nobody's hands, so nobody can give them back.
        """
        if not self.stalled:
            return None
        head = self._queue[0]
        own = sum(held.pages for held in self._held if held.call is head.call)
        return head if head.pages > self.pages - own else None

    @property
    def stalled(self) -> bool:
        """Whether requests wait although none is running: only giving back handles can help."""
        return bool(self._queue) and self.running == 0
