"""Deterministic pseudo-random 64-bit hashes: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MOST: Final = (1 << 64) - 1


def mixed(number: int) -> int:
    """Hash an integer to 64 pseudo-random bits.

    Args:
        number: integer, of which the lowest 64 bits are used.
    """
    number = ((number & _MOST) + 0x9E3779B97F4A7C15) & _MOST
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MOST
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MOST
    return number ^ (number >> 31)


def mixed_all(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each number as `mixed` does."""
    found = numbers + np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))
