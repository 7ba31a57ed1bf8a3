"""Safetensors encoder for tensors in pieces, which are not concatenated; digest of the tensors of a model's files.

Format: https://huggingface.co/docs/safetensors; tensors are in the order of the library's own files: largest elements
first, then by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

Buffer: TypeAlias = "bytes | memoryview"
#: Names of dtypes in the header of a safetensors file.
DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: Integer dtypes of equal size, as which dtypes that NumPy lacks are viewed.
BITS: Final[Mapping[torch.dtype, torch.dtype]] = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
#: Alignment of the data in bytes.
ALIGN: Final = 8
#: Bytes read at each end of a tensor, and of each block of a file of another format.
BLOCK: Final = 4 << 10
#: Number of blocks, evenly spaced, read of a file of another format.
BLOCKS: Final = 1024
#: Maximum bytes of a safetensors header.
MOST_HEADER: Final = 100_000_000


def encoded(tensors: Mapping[str, Sequence[torch.Tensor]], metadata: Mapping[str, str]) -> Iterator[Buffer]:
    """Yield the bytes of a safetensors file, buffer by buffer.

    Args:
        tensors: tensors by name, each in one or more pieces along its first axis, on the CPU, of one dtype and row
            shape; a scalar in one piece.
        metadata: texts by name, for the header.

    Yields:
        The header, then each piece; contiguous pieces are not copied.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name][0].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in ordered:
        start, end = end, end + sum(piece.nbytes for piece in tensors[name])
        header[name] = {
            "dtype": DTYPES[tensors[name][0].dtype],
            "shape": _shape(tensors[name]),
            "data_offsets": [start, end],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % ALIGN)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        yield from (_bytes_of(piece) for piece in tensors[name] if piece.numel())


def metadata_of(content: bytes) -> dict[str, str]:
    """Return the texts of the header of a sound safetensors file, by name."""
    length = int.from_bytes(content[:8], "little")
    header = msgspec.json.decode(content[8 : 8 + length], type=dict[str, Any])
    return dict(header.get("__metadata__", {}))


def _shape(pieces: Sequence[torch.Tensor]) -> list[int]:
    first = pieces[0]
    if not first.dim():
        return []
    return [sum(len(piece) for piece in pieces), *first.shape[1:]]


def as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return an array that views a tensor's memory; dtypes that NumPy lacks become integers of equal size."""
    seen = tensor.view(BITS[tensor.dtype]) if tensor.dtype in BITS else tensor
    found: NDArray[Any] = seen.numpy(force=seen.requires_grad)
    return found


def _bytes_of(piece: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, by NumPy: each torch operation would release the interpreter lock and wait for it."""
    array = np.ascontiguousarray(as_numpy(piece))
    if array.size == 1:  # counts as contiguous whatever its stride, and is then not viewed as bytes
        return memoryview(array.tobytes())
    return array.reshape(-1).view(np.uint8).data


def tensors_digest(path: str | Path, names: Sequence[str]) -> str:
    """Return a SHA-256, in hexadecimal, of the first and last 4 KiB of each tensor in the files of weights of a model.

    Of files of other formats than safetensors it covers blocks of 4 KiB, evenly spaced. So it tells apart weights of
    which any whole tensor was changed, as by merging a LoRA, wherever in the files it lies.

    Args:
        path: the folder of the files, or one file.
        names: patterns of the files' names in the folder.
    """
    where, found = Path(path), hashlib.sha256()
    for file in [where] if where.is_file() else sorted(file for name in names for file in where.glob(name)):
        with file.open("rb", buffering=0) as content:
            for place in _places(content, file.stat().st_size):
                content.seek(place)
                found.update(content.read(BLOCK))
    return found.hexdigest()


def _places(content: BinaryIO, size: int) -> list[int]:
    """Return where to read blocks of a file of weights, in order."""
    length = int.from_bytes(content.read(8), "little")  # of the header of safetensors
    try:
        header = msgspec.json.decode(
            content.read(length if length < min(size, MOST_HEADER) else 0), type=dict[str, Any]
        )
        ends = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
        return sorted({8 + length + at for start, end in ends for at in (start, max(start, end - BLOCK))})
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, ValueError, LookupError):
        return [*range(0, size, max(BLOCK, size // BLOCKS))]
