"""Ring buffer of places on the device: a pass holds consecutive places until its rows were copied away."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Holder = TypeVar("Holder")


class Ring(Generic[Holder]):
    """Ring buffer of the places 0 to `size`.

    Args:
        size: number of places.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._next = 0
        self._taken: deque[tuple[int, int, Holder]] = deque()  # first place, stop, and holder

    @property
    def taken(self) -> int:
        """Number of places that are taken."""
        return sum(stop - first for first, stop, _ in self._taken)

    def reserve(self, count: int) -> tuple[int, list[Holder]]:
        """Choose consecutive places for one pass, and drop their old holders from the ring.

        Returns:
            The first place, and the old holders, which must be waited for.

        Raises:
            ValueError: `count` exceeds the size of the ring.
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
        """Mark places as taken until `holder` frees them."""
        if count:
            self._taken.append((first, first + count, holder))

    def _overlaps(self, first: int, stop: int) -> bool:
        """Return whether any holder has places from `first` up to `stop`."""
        return any(start < stop and first < end for start, end, _ in self._taken)

    def free(self, holder: Holder) -> None:
        """Free the places of the oldest holder, if it is this one."""
        while self._taken and self._taken[0][2] is holder:
            self._taken.popleft()
