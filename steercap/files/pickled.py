"""Reader of pickled files that runs no code: tensors, arrays, plain values, and inert stand-ins for everything else.

`torch.load(weights_only=True)` refuses pickled scikit-learn objects, and without that option a file can run any code.
Here the opcodes of a pickle act on plain values: no name in it is imported, nothing in it is called. Files of
`torch.save` are read, both zip archives and the format before 2020; memory stays in proportion to the file's size.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from steercap.core.values import shown
from steercap.errors import InvalidFile
from steercap.files.base import blame, require_file

_MAGIC: Final = 0x1950A86A20F9469CFC6C  # the first value of a file before 2020
_DTYPE: Final = re.compile(r"[<>|=]?(?:[fiub]\d{1,2}|[US]\d{1,6}|\?)", re.ASCII)
#: Storage types that are read, each named after a dtype of torch in another case.
_STORAGES: Final = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Bool")
_DAMAGED: Final = (zipfile.BadZipFile, struct.error, AttributeError, EOFError, LookupError, MemoryError, OSError)
#: Pattern of the opcodes that push their argument.
_PUSHED: Final = re.compile(r"(BIN)?INT[12]?|LONG[14]?|(BIN)?FLOAT|((SHORT_)?BIN)?(STRING|UNICODE|BYTES)8?|BYTEARRAY8")
#: Function from dtype, key and number of elements to a storage's elements; None on a pass that only reads sizes.
_Find: TypeAlias = Callable[[torch.dtype, str, int], torch.Tensor | None]


@dataclass(eq=False, repr=False)
class StandIn:
    """Object of a class that is not imported, or result of a function that is not called.

    Args:
        name, args, state: name of the class or function with its module; call arguments; pickled state of the object.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def __repr__(self) -> str:
        return f"<stand-in for {self.name}>"


class PickledArray(StandIn):
    """Pickled NumPy array; its state is (version, shape, dtype, True for Fortran order, bytes)."""

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy as a NumPy array of the pickled shape and dtype, in this machine's byte order.

        Raises:
            ValueError: the array holds objects or records, or its bytes do not fit its shape.
        """
        match self.state:
            case (_, tuple(shape), StandIn("numpy.dtype", (str(text), *_), end), axes, bytes() | bytearray() as data):
                swapped = isinstance(end, tuple) and end[1:2] == (">",)
                kind = np.dtype((">" if swapped else "") + text.lstrip("<>|=")) if _DTYPE.fullmatch(text) else None
                if kind is None or not _sizes(shape) or math.prod(shape) * kind.itemsize != len(data):
                    raise ValueError(
                        f"{len(data)} bytes do not fit an array of shape {shown(shape)} and dtype {shown(text)}"
                    )
                rows = np.frombuffer(data, dtype=kind).astype(kind.newbyteorder("="))
                return rows.reshape(shape, order="F" if axes else "C")
        raise ValueError("an array holds something other than numbers or text")


def read_pickled(path: Path) -> Any:
    """Read a file of `torch.save` that holds more than tensors; no code in it is run.

    Returns:
        Tensors on the CPU, numbers, text, containers, `PickledArray`s and `StandIn`s.

    Raises:
        InvalidFile: the file is missing, damaged, not of `torch.save`, or would take much more memory than its size.
    """
    require_file(path)
    try:
        with blame(path):
            budget = _Budget(path.stat().st_size * 4 + (1 << 20))  # copies, and views of one storage
            return _read_zip(path, budget) if zipfile.is_zipfile(path) else _read_legacy(path, budget)
    except (*_DAMAGED, RuntimeError, ArithmeticError) as error:
        (told, *_) = (str(error).strip() or type(error).__name__).splitlines()
        raise InvalidFile(f"{path} cannot be read as a file of torch.save: {told}") from error


class _Budget:
    """Bytes of memory that reading a file may still allocate."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ValueError("it would become much larger in memory than it is")


class _Global(NamedTuple):
    """Class, function or constant that a pickle names; the name is not imported."""

    module: str
    name: str


def _read_zip(path: Path, budget: _Budget) -> Any:
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        (folder,) = (name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl"))
        known: dict[tuple[torch.dtype, str, int], torch.Tensor] = {}

        def read(name: str) -> bytes:
            entry = entries[folder + name]
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ValueError(f"{name} is compressed, which torch.save does not do")
            budget.take(entry.file_size)
            return archive.read(entry)

        def find(dtype: torch.dtype, key: str, numel: int) -> torch.Tensor:
            if (dtype, key, numel) not in known:
                known[dtype, key, numel] = _elements(read(f"data/{key}"), dtype, numel)
            return known[dtype, key, numel]

        if f"{folder}byteorder" in entries and read("byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        return _Machine(io.BytesIO(read("data.pkl")), find, budget).run()


def _read_legacy(path: Path, budget: _Budget) -> Any:
    budget.take(path.stat().st_size)
    file, declared = io.BytesIO(path.read_bytes()), dict[str, tuple[torch.dtype, int]]()

    def declare(dtype: torch.dtype, key: str, numel: int) -> None:
        if declared.setdefault(key, (dtype, numel)) != (dtype, numel):
            raise ValueError(f"storage {key} is declared twice")

    head = [_Machine(file, declare, budget).run() for _ in range(3)]
    if head[0] != _MAGIC or not isinstance(head[2], dict) or head[2].get("little_endian") is not True:
        raise ValueError("it does not begin as a little-endian file of torch.save does")
    start, known = file.tell(), dict[str, torch.Tensor]()
    _Machine(file, declare, budget).run()  # the elements come after what is made of them
    for key in _Machine(file, declare, budget).run():
        dtype, numel = declared[_key(key)]
        (there,) = struct.unpack("<q", file.read(8))
        budget.take(numel * dtype.itemsize)
        known[key] = _elements(file.read(numel * dtype.itemsize), dtype, numel, there)
    file.seek(start)
    return _Machine(file, lambda _dtype, key, _numel: known[key], budget).run()


def _elements(data: bytes, dtype: torch.dtype, numel: int, there: int | None = None) -> torch.Tensor:
    if len(data) != numel * dtype.itemsize or there not in {None, numel}:
        raise ValueError(f"a storage of {numel} {dtype} has only {len(data)} bytes")
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _sizes(values: Any) -> bool:
    few = isinstance(values, tuple) and len(values) <= 8
    return few and all(type(one) is int and 0 <= one < 1 << 48 for one in values)


class _Machine:
    """Interpreter of one pickle; opcodes act on plain values, tensors and stand-ins.

    Args:
        file: the pickle; it is read up to its end, and not beyond.
        find, budget: function that returns the elements of a storage; memory that may be allocated.
    """

    def __init__(self, file: io.BytesIO, find: _Find, budget: _Budget) -> None:
        self._file, self._find, self._budget = file, find, budget
        self._stack, self._marks, self._memo = list[Any](), list[int](), dict[int, Any]()

    def run(self) -> Any:
        """Execute the opcodes, and return the value of the pickle."""
        for code, arg, _ in pickletools.genops(self._file):
            if _PUSHED.fullmatch(code.name):
                self._stack.append(arg)
            elif code.name not in {"PROTO", "FRAME", "STOP"}:
                self._act(code.name, arg)
        (value,) = self._stack
        return value

    def _act(self, opcode: str, arg: Any) -> None:  # noqa: C901, PLR0912 -- a branch for each kind of opcode
        match opcode:
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                self._stack.append(None if opcode == "NONE" else opcode == "NEWTRUE")
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_SET":
                self._stack.append({"LIST": list, "DICT": dict, "SET": set}[opcode[6:]]())
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" | "TUPLE":
                self._stack.append(tuple(self._popped(_COUNTS.get(opcode))))
            case "APPEND" | "APPENDS" | "SETITEM" | "SETITEMS" | "ADDITEMS":
                self._add(self._popped(_COUNTS.get(opcode)))
            case "MARK":
                self._marks.append(len(self._stack))
            case "POP" | "POP_MARK":
                self._popped(_COUNTS.get(opcode))
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self._memo[len(self._memo) if arg is None else arg] = self._stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                self._stack.append(self._memo[arg])
            case "GLOBAL" | "STACK_GLOBAL":
                module, name = arg.split(" ", 1) if arg else self._popped(2)
                self._stack.append(_Global(_text(module).replace("numpy._core", "numpy.core"), _text(name)))
            case "REDUCE" | "NEWOBJ" | "NEWOBJ_EX":
                self._stack.append(self._call(*self._popped(3 if opcode == "NEWOBJ_EX" else 2)))
            case "BUILD" if isinstance(self._stack[-2], StandIn):
                (self._stack[-1].state,) = self._popped(1)
            case "BINPERSID":
                self._stack.append(self._storage(*self._popped(1)[0]))
            case _:
                raise ValueError(f"the pickle opcode {opcode} is not supported on {shown(self._stack[-2:])}")

    def _popped(self, count: int | None) -> list[Any]:
        """Remove and return the last `count` values of the stack, or, for None, those since the last mark."""
        start = self._marks.pop() if count is None else len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise ValueError("the pickle takes more values from its stack than there are")
        found, self._stack[start:] = self._stack[start:], []
        return found

    def _add(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, (dict, set)):
            target.update(_dict(items) if isinstance(target, dict) else map(_key, items))
        else:
            raise TypeError(f"the pickle adds items to {shown(target)}, which is not a list, dict or set")

    def _call(self, what: Any, args: Any, _: Any = None) -> Any:
        """Return the result of a call of a function in `_KNOWN`, and a stand-in for any other call."""
        if not isinstance(what, _Global) or not isinstance(args, tuple):
            raise TypeError(f"the pickle calls {shown(what)}, which is not allowed")
        name = ".".join(what)
        return _KNOWN[name](self, *args) if name in _KNOWN else StandIn(name, args)

    def _storage(self, kind: Any, storage: Any, key: Any, _location: Any, numel: Any, *view: Any) -> Any:
        module, name = _text(storage[0]), _text(storage[1]).removesuffix("Storage")
        if (kind, module) != ("storage", "torch") or name not in _STORAGES or not _sizes((numel,)) or any(view):
            raise ValueError(f"storages of {shown(name)} are not supported")
        return self._find(getattr(torch, name.lower()), _text(key), numel)

    def tensor(self, elements: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor | None:
        """Return a tensor that views a storage, like `torch._utils._rebuild_tensor_v2`; None without elements."""
        if elements is None:
            return None
        if not isinstance(elements, torch.Tensor) or not all(map(_sizes, [(offset,), size, stride])):
            raise ValueError("a tensor is built from arguments that torch never writes")
        self._budget.take(math.prod(size) * elements.itemsize)
        return elements.as_strided(size, stride, offset)  # which refuses what is beyond the end

    def encode(self, text: str, encoding: str) -> bytes:
        """Return the bytes that protocol 2 stores as latin1 text."""
        if encoding != "latin1":
            raise ValueError(f"text in encoding {shown(encoding)}, where only latin1 is read")
        self._budget.take(len(text))
        return text.encode("latin1")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {shown(value)}")
    return value


def _key(value: Any) -> Any:
    if not isinstance(value, (str, bytes, int, float, type(None))):  # the hash of nested tuples can take for ever
        raise TypeError(f"{shown(value)} cannot be a key")
    return value


def _dict(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(map(_key, items[::2]), items[1::2], strict=True))


#: Number of values that an opcode pops; opcodes that are missing here pop those since the last mark.
_COUNTS: Final = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2, "POP": 1}
#: Replacements for the functions and classes whose results are read as values; all others become stand-ins.
_KNOWN: Final[Mapping[str, Callable[..., Any]]] = {
    "torch._utils._rebuild_tensor_v2": _Machine.tensor,
    "torch._utils._rebuild_parameter": lambda _, data, *_rest: data,
    "numpy.core.multiarray._reconstruct": lambda _, *_args: PickledArray("numpy.ndarray"),
    "numpy.core.multiarray.scalar": lambda _, kind, data: PickledArray("", (), (1, (), kind, 0, data)).numpy().item(),
    "numpy.core.numeric._frombuffer": lambda _, data, *how: PickledArray("", (), (1, *how[1::-1], how[2] == "F", data)),
    "_codecs.encode": _Machine.encode,
    **dict.fromkeys(("__builtin__.bytes", "builtins.bytes"), lambda _: b""),  # of protocol 2, without arguments
    **dict.fromkeys(("__builtin__.set", "builtins.set"), lambda _, items: set(map(_key, items))),
    "collections.OrderedDict": lambda _, *pairs: _dict([one for pair in pairs[0] for one in pair] if pairs else []),
}
