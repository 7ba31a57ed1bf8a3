"""A ring of places on the device: each pass takes the next ones until what it put there was copied away."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Holder = TypeVar("Holder")


class Ring(Generic[Holder]):
    """Places 0 to `size`.

    Args:
        size: how many places there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._next = 0
        self._taken: deque[tuple[int, int, Holder]] = deque()  # first, stop, and who holds it

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return sum(stop - first for first, stop, _ in self._taken)

    def reserve(self, count: int) -> tuple[int, list[Holder]]:
        """Places for one pass, consecutive.

        Returns:
            The first of them, and the holders of any of them, which are to be waited for.

        Raises:
            ValueError: more than there are.
        """
        if count > self.size:
            raise ValueError(f"{count} places in a ring of {self.size}")
        first = self._next if self._next + count <= self.size else 0
        waiting = []
        while self._taken and self._overlaps(first, first + count):
            waiting.append(self._taken.popleft()[2])
        self._next = first + count
        return first, waiting

    def hold(self, first: int, count: int, holder: Holder) -> None:
        """These places are taken until `holder` gives them back."""
        if count:
            self._taken.append((first, first + count, holder))

    def _overlaps(self, first: int, stop: int) -> bool:
        """Whether any pass holds places in between; the oldest ones are the next in line."""
        return any(start < stop and first < end for start, end, _ in self._taken)

    def free(self, holder: Holder) -> None:
        """Take back the places of the oldest holder, if it is this one."""
        while self._taken and self._taken[0][2] is holder:
            self._taken.popleft()
