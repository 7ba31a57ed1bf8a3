"""The native file format: a SteeringSpec, LayerVectors, a DirectionSet, ... as one safetensors file with a JSON header.

The header is the metadata entry `steercap`: format version, kind, model, layer convention, SHA-256 of the whole, and
the content: the dataclass as `{"type": ..., "fields": ...}`, down to tensors by name. Values that JSON lacks are
objects with one key that names their type: `{"tensor": name}`, `{"slice": [...]}`, `{"tokens": [...]}`. Every field is
written, even if it has its default, so that a later default changes no file. The module that writes a kind of file
declares the types that may occur in it: a `FileKind`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, SupportsIndex, TypeVar

import msgspec
import numpy as np
import torch

from steercap.core.tokens import TokenSelection
from steercap.core.values import Mask, choices
from steercap.errors import InvalidFile, InvalidSpec
from steercap.files.base import blame, read_tensors, write_tensors

Value = TypeVar("Value")

VERSION: Final = 1
#: Meaning of layer numbers in every file.
CONVENTION: Final = "layers count from 0; resid_post of layer i is hidden_states[i + 1] of transformers"
#: Function that reads each kind of file that steercap writes, for messages.
READERS: Final = {
    "steering": "SteeringSpec.load",
    "vectors": "LayerVectors.load",
    "directions": "DirectionSet.load",
    "captures": "CaptureHandle.load",
    "sketch": "Sketch.load",
    "calibration": "Calibration.load",
    "quantiser": "Quantiser.load",
    "codes": "Codes.load",
    "training": "steercap.lab.training.train, which resumes from it",
    "axis": "AssistantAxis.load",
}


@dataclasses.dataclass(frozen=True)
class FileKind:
    """Kind of native file: its name, and the types that may occur in it.

    Args:
        name: name of the kind in the header; one of `READERS`.
        types: dataclasses that may occur in it, by their names in the file.
        left_out: function that returns the fields of an object that are not written, as they follow from others.
        noun: name of its parts, for messages.
    """

    name: str
    types: Mapping[str, type]
    left_out: Callable[[object], Collection[str]] = lambda _: ()
    noun: str = "type"


class _Preface(msgspec.Struct, frozen=True):
    """Fields in the header of every version and kind; files of captures have no `kind`."""

    version: int
    kind: str = "captures"


class NativeHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """JSON header of a native file.

    Args:
        version: version of the format.
        kind: one of `READERS`, "captures" aside.
        model: name of the model that the content was made for, "" if unknown.
        convention: meaning of layer numbers.
        sha256: SHA-256, in hexadecimal, of the tensors and of all other fields.
        content: the dataclass as JSON data, with tensors by name; see the module.
        provenance: origin of the content, text and numbers by name; informational.
    """

    version: int
    kind: str
    model: str
    convention: str
    sha256: str
    content: Any
    provenance: dict[str, Any] = {}


def save(
    value: object, path: str | Path, kind: FileKind, *, model: str = "", provenance: Mapping[str, Any] | None = None
) -> Path:
    """Write an object of one of the kind's types to a file, whole or not at all, and return the path.

    `model` (a name) and `provenance` (JSON data on the origin) are informational.

    Raises:
        InvalidSpec: the object or a part of it has another type, or a field cannot be written.
        InvalidFile: the name ends in something other than .safetensors.
    """
    store = _Store(kind)
    content = _pack(value, "", store)
    said = dict(provenance or {})
    header = _signed(NativeHeader(VERSION, kind.name, model, CONVENTION, "", content, said), store.tensors)
    return write_tensors(Path(path), header, store.tensors)


def sha256_of(value: object, kind: FileKind) -> str:
    """Return the SHA-256, in hexadecimal, of an object with all its fields.

    Args:
        value: object of a type that files of this kind hold.
        kind: kind of file.

    Raises:
        InvalidSpec: a part has another type, or a field cannot be written.
    """
    store = _Store(kind)
    content = _pack(value, "", store)
    return _signed(NativeHeader(VERSION, kind.name, "", CONVENTION, "", content), store.tensors).sha256


def load(path: str | Path, kind: FileKind, expected: type[Value]) -> Value:
    """Read an object of the expected type that `save` wrote; its SHA-256 is checked.

    Raises:
        InvalidFile: the file is truncated, changed, of another kind or version, or has an unknown type or field.
    """
    path = Path(path)
    header, tensors = _read(path)
    if header.kind != kind.name:
        raise InvalidFile(f"{path} holds {header.kind}, not {kind.name}; read it with {READERS[header.kind]}")
    found = _signed(header, tensors).sha256
    if found != header.sha256:
        raise InvalidFile(
            f"{path} was changed after it was saved: it has SHA-256 {found}, its header says "
            f"{header.sha256}; copy or save it again"
        )
    with blame(path):
        value = _unpack(header.content, tensors, kind)
    if not isinstance(value, expected):
        raise InvalidFile(f"{path} says that it holds {kind.name}, but holds a {type(value).__name__}; save it again")
    return value


def read_header(path: str | Path) -> NativeHeader:
    """Read the header of a native file of any kind but captures; tensors are neither read nor checked.

    Raises:
        InvalidFile: the file is missing, truncated, of captures, or of a newer version.
    """
    return _read(Path(path), tensors=False)[0]


def _read(path: Path, *, tensors: bool = True) -> tuple[NativeHeader, dict[str, torch.Tensor]]:
    text, found = read_tensors(path, tensors=tensors)
    return _header(path, text), found


def _header(path: Path, text: str) -> NativeHeader:
    try:
        preface = msgspec.json.decode(text, type=_Preface)
        _check_preface(path, preface)
        header = msgspec.json.decode(text, type=NativeHeader)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidFile(f"{path} has a steercap header that cannot be read: {error}; save it again") from error
    if header.convention != CONVENTION:
        raise InvalidFile(f"{path} counts layers in another way, {header.convention!r}; steercap reads {CONVENTION!r}")
    return header


def _check_preface(path: Path, preface: _Preface) -> None:
    if preface.kind == "captures":
        raise InvalidFile(
            f"{path} holds captures, not steering, vectors or directions; read it with {READERS['captures']}"
        )
    if preface.version != VERSION or preface.kind not in READERS:
        raise InvalidFile(
            f"{path} holds {preface.kind!r} in format version {preface.version}; this steercap reads version "
            f"{VERSION} of {', '.join(map(repr, READERS))}; upgrade steercap to read newer files"
        )


class _Store:
    """Tensors to be written to a file, by name; equal tensors are stored once."""

    def __init__(self, kind: FileKind) -> None:
        self.kind = kind
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[str, str] = {}

    def put(self, tensor: torch.Tensor, at: str) -> str:
        """Add a tensor and return its name in the file: `at`, or the name of an equal tensor."""
        tensor = tensor.detach().cpu().contiguous()
        name = self._names.setdefault(_digest({"": tensor}), at)
        self.tensors.setdefault(name, tensor)
        return name


def _signed(header: NativeHeader, tensors: Mapping[str, torch.Tensor]) -> NativeHeader:
    """Return the header with the SHA-256 over the tensors and the other fields."""
    said = msgspec.json.encode(msgspec.structs.replace(header, sha256=_digest(tensors)))
    return msgspec.structs.replace(header, sha256=hashlib.sha256(said).hexdigest())


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256, in hexadecimal, over names, dtypes, shapes and bytes of tensors, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _pack(value: object, at: str, store: _Store) -> Any:  # noqa: C901 -- one case a type
    """Convert an object or a field to JSON data; tensors go to `store`, named by the path `at`: "edits.0.vector".

    Raises:
        InvalidSpec: a value of another type.
    """
    packed: Any
    match value:
        case None | bool() | str():
            packed = value
        case torch.Tensor():
            packed = {"tensor": store.put(value, at)}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, (TokenSelection, Mask)):
            packed = {"type": _type_name(value, store.kind), "fields": _pack_fields(value, at, store)}
        case TokenSelection(terms):
            packed = {"tokens": [_pack(slice(*t) if isinstance(t, tuple) else t, at, store) for t in terms]}
        case slice() | range():
            packed = {type(value).__name__: _pack([value.start, value.stop, value.step], at, store)}
        case Mask():
            packed = value.tolist()
        case float():
            packed = float(value) if math.isfinite(value) else {"float": str(value)}
        case np.generic() | np.ndarray():
            packed = _pack(value.tolist(), at, store)
        case Mapping():
            packed = {"map": [[_pack(k, at, store), _pack(v, _join(at, k), store)] for k, v in value.items()]}
        case list() | tuple() | set() | frozenset():
            packed = [_pack(part, _join(at, number), store) for number, part in enumerate(value)]
        case SupportsIndex():
            packed = operator.index(value)
        case _:
            raise InvalidSpec(f"{at}={value!r} cannot be written to a file; give numbers, slices, lists or tensors")
    return packed


def _pack_fields(value: Any, at: str, store: _Store) -> dict[str, Any]:
    names = _fields(type(value)).keys() - set(store.kind.left_out(value))
    return {name: _pack(getattr(value, name), _join(at, name), store) for name in _fields(type(value)) if name in names}


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor], kind: FileKind) -> Any:
    """Convert JSON data from `_pack` back to the value; sequences become tuples.

    Raises:
        InvalidSpec: the data has another form than `_pack` writes, or names an unknown type, field or tensor.
        TypeError, ValueError: the dataclass refuses a field.
    """
    found: Any
    match value:
        case list():
            found = tuple(_unpack(part, tensors, kind) for part in value)
        case {"type": str(name), "fields": dict(fields)}:
            found = _make(kind, name, {field: _unpack(part, tensors, kind) for field, part in fields.items()})
        case {"tensor": str(name)} if name in tensors:
            found = tensors[name]
        case {"tokens": terms}:
            found = TokenSelection.parse(_unpack(terms, tensors, kind))
        case {"slice": [start, stop, step]}:
            found = slice(start, stop, step)
        case {"range": [start, stop, step]}:
            found = range(start, stop, step)
        case {"float": str(text)}:
            found = float(text)
        case {"map": pairs}:
            found = dict(_unpack(pairs, tensors, kind))
        case dict():
            raise InvalidSpec(f"this version of steercap does not know {value!r}; upgrade it, or save the file again")
        case _:
            found = value
    return found


def _make(kind: FileKind, name: str, values: dict[str, Any]) -> object:
    """Construct a dataclass, by its name in the kind, from its fields; raise InvalidSpec if names do not match."""
    if name not in kind.types:
        names = sorted(kind.types, key=str.swapcase)  # lower-case names (edits) first
        hint = choices(name, names)
        raise InvalidSpec(f"unknown {kind.noun} {name!r}; {hint}; upgrade steercap if the file is of a newer one")
    made = kind.types[name]
    required = _fields(made)
    unknown = values.keys() - required.keys()
    if unknown:
        raise InvalidSpec(f"{name} has fields {sorted(unknown)} that this steercap does not know; upgrade it")
    missing = [field for field, needed in required.items() if needed and field not in values]
    if missing:
        raise InvalidSpec(f"{name} lacks {missing}; save the file again")
    return made(**values)


def _fields(kind: type) -> dict[str, bool]:
    """Return a dataclass's init fields by name: True for those without a default."""
    missing = dataclasses.MISSING
    return {
        field.name: field.default is missing and field.default_factory is missing
        for field in dataclasses.fields(kind)
        if field.init
    }


def _type_name(value: object, kind: FileKind) -> str:
    for name, known in kind.types.items():
        if type(value) is known:
            return name
    raise InvalidSpec(
        f"{value} is not one of steercap's {kind.noun}s, so a file cannot describe it; save its parts instead"
    )


def _join(at: str, part: object) -> str:
    return f"{at}.{part}" if at else str(part)
