"""Conversion of users' vectors and rows to float32 copies, with checks; and fingerprints of directions.

Copies are independent of the user's tensor, so that changing it later does not change a vector that was checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float

from steercap.core.display import described
from steercap.core.spec import parse_layers
from steercap.core.values import index_of, parts_of, shown
from steercap.errors import InvalidSpec, InvalidVector
from steercap.files.fingerprint import short_name

#: User's value for a vector or rows: a tensor, array or (nested) numbers; kept as a float32 copy. For one layer also
#: vectors by layer, see `at_layer`.
Vector: TypeAlias = (
    "torch.Tensor | np.ndarray[Any, Any] | Sequence[float] | Sequence[Sequence[float]] | Mapping[int, torch.Tensor]"
)

if TYPE_CHECKING:
    import numpy.typing as npt


Key = TypeVar("Key")
Value = TypeVar("Value")


class FrozenMapping(Mapping[Key, Value], Generic[Key, Value]):
    """Mapping that cannot be changed; every access to a tensor in it returns a copy."""

    def __init__(self, items: Mapping[Key, Value]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Key) -> Value:
        found: Any = self._items[key]
        if isinstance(found, torch.Tensor):
            found = found.clone()
        value: Value = found
        return value

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return described(self._items)


def at_layer(value: Any, what: str, layer: int | None, site: str) -> Any:
    """Return the vector of one layer from `LayerVectors` or a dict by layer; any other value is returned unchanged.

    Args:
        value: the user's vector.
        what: name of the value in messages, such as "Add: vector".
        layer: layer of the edit; None if it has several.
        site: site of the edit.

    Raises:
        InvalidVector: there is no vector for this layer, they are of another site, or the mapping is not by layer.
    """
    if not isinstance(value, Mapping):
        return value
    keys = {index_of(key): key for key in value}
    known = [index for index in keys if index is not None]
    if not known or len(known) < len(value):
        hint = f", as in directions[{next(iter(value))!r}]" if value else ""
        raise InvalidVector(
            f"{what} is a mapping with keys {shown(list(value))}; give a vector, or vectors by layer{hint}"
        )
    edit = what.partition(":")[0]
    if label := getattr(value, "name", ""):
        what = f"{what} {label!r}"
    if layer is None:
        raise InvalidVector(
            f"{what} has a vector for each of layers {known}; give layer=, one of these, or make an edit for each: "
            f"SteeringSpec.by_layer({edit}, ...)"
        )
    if layer not in keys:
        near = min(known, key=lambda one: abs(one - layer))
        hint = f"the nearest is {near}" if layer >= 0 else "count from 0 here, as they do"
        raise InvalidVector(f"{what} has no vector for layer={layer}; it has them for layers {known}; {hint}")
    of = getattr(value, "site", site)  # a dict has none
    if of != site:
        raise InvalidVector(f"{what} is for site {of!r}, not for site={site!r}; give site={of!r}")
    return value[keys[layer]]


def model_of(given: Mapping[str, Any], what: str) -> str:
    """Return the model named by the LayerVectors among an edit's arguments, "" if none names one.

    Args:
        given: arguments by name.
        what: name of the edit in messages.

    Raises:
        InvalidVector: they name several models.
    """
    known = models_of(getattr(value, "model", "") for value in given.values() if isinstance(value, Mapping))
    if len(known) > 1:
        raise InvalidVector(f"{what}: its vectors are of models {known}; give those of one model")
    return known[0] if known else ""


def models_of(labels: Iterable[str]) -> list[str]:
    """Return the first name of each model in a list of names with or without owner; "" is skipped."""
    known: dict[str, str] = {}
    for label in filter(None, labels):
        known.setdefault(short_name(label), label)
    return list(known.values())


def several(given: object, what: str) -> list[Any]:
    """Return the items of a list or another finite iterable, as plain values.

    Raises:
        InvalidSpec: `given` is not iterable, is text, or is endless.
    """
    found = parts_of(given, what)
    if found is None:
        raise InvalidSpec(f"{what}={shown(given)}; give several in a list")
    return found


def by_name(given: Any, names: Iterable[str], what: str) -> dict[str, Any]:
    """Return an argument by name: the values of a mapping by `names`, or for each name the one value given.

    Raises:
        InvalidSpec: the mapping lacks a name, or has another one.
    """
    wanted = list(names)
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        return dict.fromkeys(wanted, given)
    if set(given) != set(wanted):
        raise InvalidSpec(
            f"{what} is given for {shown(list(given))}; give one for each of {shown(wanted)}, or one for all"
        )
    return {name: given[name] for name in wanted}


def layers_among(given: Any, known: Iterable[int], what: str = "layers") -> list[Any]:
    """Return layers of vectors or rows: all of `known` for "all", those of a slice that are known, else as given.

    Raises:
        InvalidSpec: `given` is neither an index, several, a slice, nor "all"; or a slice that counts from the last of
            layers with gaps, which are no layers of the model's end.
    """
    there = list(known)
    if isinstance(given, str) and given == "all":
        return there
    if isinstance(given, slice):
        asked = cast("slice", parse_layers(given))
        inside = range(max(there, default=-1) + 1)[asked]
        if min(asked.start or 0, asked.stop or 0) < 0 and not set(inside) <= set(there):
            raise InvalidSpec(f"{what}={given} counts from the last layer, and there are gaps; give some of {there}")
        return [layer for layer in there if layer in inside]
    index = index_of(given)
    found = [index] if index is not None else parts_of(given, what)
    if found is None:
        raise InvalidSpec(f"{what}={shown(given)}; give 'all', an index, a slice, or a list of some of {there}")
    return found


def float32_copy(value: Any, what: str, *shapes: str) -> Float[torch.Tensor, " ..."]:
    """Return a user's numbers as a contiguous float32 copy on the CPU.

    Args:
        value: real numbers: a tensor of any dtype, device, layout or strides, with or without gradient, an array, or
            (nested) lists. Integers are converted; truth values and complex numbers are refused.
        what: name of the value in messages, such as "Add: vector".
        shapes: allowed shapes: "width" for one vector, "rows width" for several.

    Raises:
        InvalidVector: not real numbers, another shape, empty, or NaN or inf in float32.
    """
    if isinstance(value, Mapping):  # NumPy would take the keys of some for the numbers
        raise InvalidVector(f"{what} is a mapping with keys {shown(list(value))}; give one of its values")
    try:
        given = _tensor(value)
        dense = given.detach().to_dense()
        kept = dense.to(device="cpu", dtype=torch.float32, copy=True).contiguous()
        wrong = int((~kept.isfinite()).sum())
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidVector(
            f"{what} is not made of real numbers: {reason}; give a tensor, an array or a list of them, "
            f"not {shown(value)}"
        ) from error
    if kept.dim() not in {len(shape.split()) for shape in shapes} or not kept.numel():
        flat = "; give heads and streams flat, as .flatten(-2) makes them, or one and part=" if kept.dim() > 1 else ""
        raise InvalidVector(f"{what} has shape {tuple(kept.shape)}; expected [{'] or ['.join(shapes)}]{flat}")
    if wrong:
        raise InvalidVector(
            f"{what} holds {wrong} values of {kept.numel()} that are NaN or infinity in float32; check how it was "
            "computed"
        )
    return kept


def _tensor(value: Any) -> torch.Tensor:
    """Return a user's value as a tensor of real numbers.

    Raises:
        TypeError, ValueError, RuntimeError: it contains something other than numbers, or rows of different lengths.
    """
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, torch.Tensor) for part in value):
        value = torch.stack([part.detach() for part in value])
    if isinstance(value, torch.Tensor):
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"its elements are {str(value.dtype).removeprefix('torch.')}")
        return value
    if isinstance(value, (bytes, bytearray, memoryview)) or _holds_truth(value):
        raise TypeError("bytes and truth values are not numbers")
    if any(np.ma.is_masked(part) for part in ([value, *value] if isinstance(value, (list, tuple)) else [value])):
        raise TypeError("some are masked")
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" and not array.dtype.name.startswith(("bfloat16", "float8")):  # of ml_dtypes
        raise TypeError(f"its elements are {array.dtype.name}")
    return torch.from_numpy(_plain(array))


def _plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of an array with a dtype, byte order and strides that torch supports."""
    known = array.dtype.kind == "f" and array.dtype.itemsize in {2, 4, 8}
    with np.errstate(over="ignore"):  # what becomes infinite is refused
        return np.array(array, dtype=array.dtype.newbyteorder("=") if known else np.float64, order="C")


def _holds_truth(value: Any) -> bool:
    """Return True if a (nested) list contains a truth value, which NumPy would convert to a number."""
    if isinstance(value, (list, tuple)):
        return any(_holds_truth(part) for part in value)
    return isinstance(value, (bool, np.bool_))


#: Fingerprint of a direction at one layer: four numbers, see `marks_of`.
Mark: TypeAlias = tuple[float, ...]


#: Squares of the frequencies of the waves in `marks_of`: primes, so that no frequency is a multiple of another.
WAVES: Final = (2.0, 3.0, 5.0, 7.0)


#: Fingerprints nearer than this are equal. Float32 moves one by less than 1e-6 at width 8,192; another direction,
#: at an angle of x, moves its four marks by about 0.7 x each.
MARKED: Final = 1e-4


def marks_of(units: Float[torch.Tensor, "names hidden"]) -> tuple[Mark, ...]:
    """Return fingerprints of directions, in order: scalar products with fixed waves of growing frequency.

    They are numbers and not a digest of the bytes: a vector that was normalised twice, or computed on another machine,
    differs in its last bits and is the same direction.

    Args:
        units: directions of norm 1, float32 [names, hidden].
    """
    places = np.arange(units.shape[1], dtype=np.float64)
    waves = np.cos(np.outer(places**2, np.sqrt(WAVES)))
    return tuple(tuple(mark) for mark in (units.double().numpy() @ waves).tolist())


def alike(first: Mark, second: Mark) -> bool:
    """Return True if two fingerprints are of the same direction, up to rounding."""
    return len(first) == len(second) and all(
        abs(mine - theirs) < MARKED for mine, theirs in zip(first, second, strict=True)
    )
