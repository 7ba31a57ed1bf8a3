"""Numbers that look drawn and follow from others: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MOST: Final = (1 << 64) - 1


def mixed(number: int) -> int:
    """A number of 64 bits that looks like another.

    Args:
        number: of which the lowest 64 bits count.
    """
    number = ((number & _MOST) + 0x9E3779B97F4A7C15) & _MOST
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MOST
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MOST
    return number ^ (number >> 31)


def mixed_all(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same of many."""
    found = numbers + np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))
