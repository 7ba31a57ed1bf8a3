"""Conversion of indices, numbers and bools of any library to immutable plain values; texts for error messages; hashes.

Tensors and arrays are converted by `tolist()`, so their libraries need not be imported here. A bool is never taken for
an index, although `operator.index(torch.tensor(True))` is 1.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from steercap.errors import InvalidRequest, InvalidSpec

#: Maximum number of values of one selection; and a bound on positions and layers, beyond any context length.
MOST_VALUES: Final = 1 << 20
FAR: Final = 1 << 31
#: Maximum number of names that an error lists, and of characters of a wrong name that are compared with them.
MOST_NAMES: Final = 40
MOST_LETTERS: Final = 120


@runtime_checkable
class _Listing(Protocol):
    """A tensor, array, series or NumPy scalar: a value with `tolist`."""

    def tolist(self) -> Any: ...


@dataclass(frozen=True)
class Mask:
    """Bools by index, in a type of its own, so that they are never taken for indices 0 and 1.

    Args:
        bits: one byte for each index, 0 or 1.
    """

    bits: bytes

    def __len__(self) -> int:
        return len(self.bits)

    def tolist(self) -> list[bool]:
        """Return the bools as a list."""
        return [bit == 1 for bit in self.bits]

    @property
    def places(self) -> tuple[int, ...]:
        """Indices that are True, ascending."""
        return tuple(np.flatnonzero(np.frombuffer(self.bits, dtype=np.uint8)).tolist())

    @property
    def runs(self) -> Iterator[tuple[int, int]]:
        """Runs [start, stop) of True indices, ascending."""
        steps = np.diff(np.frombuffer(b"\0" + self.bits + b"\0", dtype=np.uint8).astype(np.int8))
        starts, stops = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
        return zip(starts.tolist(), stops.tolist(), strict=True)

    def __repr__(self) -> str:
        """Return all true runs in a short text; sweeps are identified by it."""
        return f"mask({len(self)}: {', '.join(f'{start}:{stop}' for start, stop in self.runs) or 'none'})"


@dataclass(frozen=True)
class Unreadable:
    """Placeholder for a tensor or array that has several axes or cannot be read; no index, number or bool.

    Args:
        shown: short text for error messages.
    """

    shown: str

    def __repr__(self) -> str:
        return self.shown


def plain(value: Any) -> Any:
    """Convert a scalar of any library to Python's type, and a tensor or array to a list; return others unchanged.

    Axes of length 1 are dropped. A value with two or more longer axes, or one that cannot be read, becomes
    `Unreadable`.
    """
    if type(value) in _OURS or isinstance(value, type) or not isinstance(value, _Listing):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in "biufcUO":
        return Unreadable(shown(value))
    try:
        found = value.tolist()
    except (RuntimeError, TypeError, ValueError):  # such as for a tensor on the meta device
        return Unreadable(shown(value))
    return _line(found) if isinstance(found, list) else found


def parts_of(value: Any, what: str, wrong: type[InvalidRequest] = InvalidSpec) -> list[Any] | None:
    """Return an iterable's items as plain values; None for text, bytes, mappings, non-iterables, and sets with bools.

    Args:
        value: the user's value of an argument.
        what: name of the argument, for error messages, such as "layers".
        wrong: class of the error to raise.

    Raises:
        InvalidRequest: of the class `wrong`: there are more than `MOST_VALUES` items.
    """
    given, value = value, plain(value)
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, Mapping)):
        return None
    too_many = isinstance(value, range) and bool(value[MOST_VALUES:])
    found = [] if too_many else [plain(part) for part in islice(value, MOST_VALUES + 1)]
    if too_many or len(found) > MOST_VALUES:
        raise wrong(f"{what}={shown(given)} holds more than {MOST_VALUES:,} values; give fewer")
    unordered = isinstance(value, AbstractSet) and any(isinstance(part, bool) for part in found)
    return None if unordered else found


def mask_of(parts: list[Any]) -> Mask | None:
    """Return a list of bools as a mask; None if it is empty or has other values."""
    if not parts or not all(isinstance(part, bool) for part in parts):
        return None
    return Mask(bytes(parts))


def index_of(value: Any) -> int | None:
    """Convert an integer of any library to int; None for anything else, including bools."""
    value = plain(value)
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def count_of(
    value: Any, name: str, least: int = 1, most: int | None = None, *, wrong: type[Exception] = InvalidSpec
) -> int:
    """Convert an integer of any library to int, and check its bounds.

    Args:
        value: the user's value of an argument.
        name: name of the argument, for error messages.
        least: minimum.
        most: maximum; None for no bound.
        wrong: type of the error.

    Raises:
        wrong: the value is no integer, or out of bounds.
    """
    found = index_of(value)
    if found is None or found < least or (most is not None and found > most):
        bounds = f", {least} or more" if most is None else f" from {least} to {most:,}"
        raise wrong(f"{name}={shown(value)}; give a whole number{bounds}")
    return found


def flag_of(value: Any) -> bool | None:
    """Convert a bool of any library to Python's; None for anything else."""
    value = plain(value)
    return value if isinstance(value, bool) else None


def truth_of(value: Any, name: str, *, wrong: type[Exception] = InvalidSpec) -> bool:
    """Convert a bool of any library to Python's.

    Args:
        value: the user's value of an argument.
        name: name of the argument, for error messages.
        wrong: type of the error.

    Raises:
        wrong: the value is no bool.
    """
    found = flag_of(value)
    if found is None:
        raise wrong(f"{name}={shown(value)}; give True or False")
    return found


def number_of(value: Any) -> float | None:
    """Convert a real number of any library to float; None for anything else, including bools and text.

    Numbers beyond float64 become infinite.
    """
    given, value = value, plain(value)
    if value is not given and isinstance(value, list) and len(value) == 1:  # a tensor of one element
        (value,) = value
    if isinstance(value, (bool, str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        return None


def warn(message: str) -> None:
    """Issue a UserWarning that is attributed to the innermost calling line outside of steercap."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "steercap":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)


def shown(value: Any) -> str:
    """Return a `repr` of a value, shortened for error messages."""
    text = " ".join(_short.repr(value).split())
    return text if len(text) <= _short.maxother else f"{text[: _short.maxother - 3]}..."


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name most similar to a wrong one, ignoring case; None if none is similar."""
    folded = {one.casefold(): one for one in reversed([*known])}
    near = difflib.get_close_matches(str(name).strip().casefold()[:MOST_LETTERS], folded, n=1)
    return folded[near[0]] if near else None


def choices(name: object, known: Iterable[object]) -> str:
    """Return a hint on a wrong name, the nearest name first: "did you mean 'z'? known: 'q', 'z'".

    Args:
        name: the wrong name.
        known: valid names, of which the first `MOST_NAMES` are listed.
    """
    names = [str(one) for one in known]
    near = nearest(name, names)
    meant = "" if near is None else f"did you mean {near!r}? "
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{meant}known: {', '.join(map(repr, names[:MOST_NAMES])) or 'none'}{more}"


def _line(items: list[Any]) -> Any:
    """Flatten a nested list in which at most one axis is longer than 1."""
    while any(isinstance(part, list) for part in items):
        if len(items) == 1:
            items = items[0]
        elif all(isinstance(part, list) and len(part) == 1 for part in items):
            items = [part[0] for part in items]
        else:
            return Unreadable(f"{shown(items)} (of several axes)")
    return items


#: Types of values that are plain already.
_OURS: Final = frozenset({bool, int, float, str, slice, range, list, tuple, dict, Mask, type(None)})
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 8


def check_seed(seed: int | None, samples: int) -> None:
    """Check a sampling seed: sample i uses `seed + i`, which must fit int64 and not be -1, vLLM's value for no seed.

    Raises:
        InvalidRequest: the seed of one of the `samples` samples would be invalid.
    """
    low, high = -(1 << 63), (1 << 63) - samples
    if seed is not None and not low <= seed <= high:
        raise InvalidRequest(f"seed={seed}; give a whole number of 64 bits, from {low} to {high}")
    if seed is not None and -samples <= seed < -1:
        raise InvalidRequest(
            f"seed={seed} of {samples} samples: sample {-1 - seed} would have the seed -1, which vLLM takes for none; "
            f"give 0 or more, or at most {-samples - 1}"
        )


_MOST: Final = (1 << 64) - 1


def mixed(number: int) -> int:
    """Hash an integer to 64 pseudo-random bits: the finaliser of SplitMix64 (Steele, Lea and Flood 2014).

    Args:
        number: integer, of which the lowest 64 bits are used.
    """
    number = ((number & _MOST) + 0x9E3779B97F4A7C15) & _MOST
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MOST
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MOST
    return number ^ (number >> 31)


def mixed_all(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each uint64 number as `mixed` does."""
    found = numbers + np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))
