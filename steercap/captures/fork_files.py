"""Activations that RhizoNymph's fork of vLLM has written: raw bytes in `.bin` files, each with a `.json` beside it.

    TAG/REQUEST/LAYER_HOOK.bin     rows of one hook at one layer
    TAG/REQUEST/packed*.bin        all rows of a request, in chunks: entries of offset, nbytes, shape, dtype
    TAG/shard-*.bin                chunks of many requests: entries that name the request too

Bytes are little-endian, bfloat16 as uint16. The chunks of a layer and hook follow one another by shard and offset. Of
rows of one position, which drafts and preempted tokens leave behind, the last counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from jaxtyping import Int

from steercap.core.display import brief
from steercap.core.names import FORK_HOOKS
from steercap.core.rows import latest_per_position
from steercap.core.spec import Point
from steercap.core.values import choices, shown
from steercap.errors import InvalidFile, UnknownName
from steercap.files.base import blame

#: Bytes on disk of each dtype, as NumPy reads them; it has no bfloat16.
STORED: Final[Mapping[str, str]] = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "<i1",
    "uint16": "<u2",
    "uint8": "<u1",
}
#: Hooks whose names stand for other tensors in models of several streams; no site has those.
_ONE_STREAM: Final = ("pre_attn", "post_attn", "mlp_in")
_INDEX: Final = re.compile(r"(packed|shard-).*\.json|(\d+)_.+\.json", re.ASCII)


#: Whole number in a description, from 0.
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _ForkEntry(msgspec.Struct, frozen=True):
    """Description of one chunk of rows: an entry of an index, or the whole `.json` of a file of one layer and hook."""

    layer: _Count
    hook: str
    shape: tuple[_Count, _Count]
    offset: _Count = 0
    nbytes: _Count | None = None
    dtype: str | None = None
    row_shape: tuple[_Count, ...] | None = None
    positions: tuple[_Count, ...] | None = None
    request_id: str | None = None


class _Index(msgspec.Struct, frozen=True):
    """Content of the `.json` of a file of several chunks."""

    entries: tuple[_ForkEntry, ...]
    dtype: str | None = None
    request_id: str | None = None
    seq: _Count = 0


class _Chunk(NamedTuple):
    """Checked chunk: its file, the file's sort key, its description, and the size in bytes and dtype of its rows."""

    path: Path
    order: tuple[int, list[str | int]]
    entry: _ForkEntry
    size: int
    dtype: str


@dataclass(frozen=True, eq=False)
class ForkRows:
    """Rows of one hook at one layer.

    Args:
        rows: [rows, width], or [rows, *row_shape] where the file says so, in the dtype of the file.
        positions: positions of the rows, ascending, int64 [rows]; None if a row has no label: then all rows are
            returned, in the order of writing, repeated ones included.
        repeated: number of rows that are left out, because a later row has the same position.
        point: steercap's name of the point; None for a hook that corresponds to no site.
    """

    rows: torch.Tensor
    positions: Int[torch.Tensor, " rows"] | None
    repeated: int
    point: Point | None

    __repr__ = brief


class ForkCaptures:
    """Captures that the fork wrote to a folder, of one request, one tag, or several; made by `load`.

    Only the `.json` files are in memory; `read` reads the rows of one request.

    Attributes:
        requests: ids of the requests, in the order of their files.
        without_index: `.bin` files without a `.json`, left by unsealed shards or a killed engine.
    """

    def __init__(self, chunks: Mapping[str, list[_Chunk]], without_index: tuple[Path, ...]) -> None:
        self._chunks = chunks
        self.requests, self.without_index = tuple(chunks), without_index

    def __repr__(self) -> str:
        return f"ForkCaptures({len(self.requests):,} requests, {len(self.without_index)} files without index)"

    @staticmethod
    def load(path: str | Path, *, dtype: str | None = None) -> ForkCaptures:
        """Read the `.json` files of a folder and the folders in it, or of one file.

        Args:
            path: a folder, or a `.bin` or `.json` file.
            dtype: dtype of files that name none, such as "bfloat16".

        Raises:
            InvalidFile: there are no such files, a `.json` is malformed, a `.bin` is shorter than its `.json` says, or
                a request is in two places.
            UnknownName: an unknown dtype.
        """
        path = Path(path)
        if dtype is not None and dtype not in STORED:
            raise UnknownName(f"dtype={shown(dtype)}; {choices(dtype, STORED)}")
        there = sorted(path.rglob("*")) if path.is_dir() else [path.with_suffix(".json")]
        indices = [one for one in there if _INDEX.fullmatch(one.name) and one.is_file()]
        if not indices:
            raise InvalidFile(f"{path} has no LAYER_HOOK.json, packed*.json or shard-*.json; give a folder that has")
        found, labels = dict[str, list[_Chunk]](), dict[Any, Any]()
        for index in indices:
            for request, chunk in _chunks_of(index, dtype, labels):
                found.setdefault(request, []).append(chunk)
        for request, chunks in found.items():
            _check_place(request, chunks)
        known = {index.with_suffix(".bin") for index in indices}
        lost = (one for one in there if one.name.endswith((".bin", ".bin.tmp")) and one not in known)
        return ForkCaptures(found, tuple(lost))

    def read(self, request: str) -> dict[tuple[int, str], ForkRows]:
        """Read the rows of a request, by (layer, hook), ascending.

        Raises:
            UnknownName: the folder has no such request.
            InvalidFile: chunks differ in width or dtype, or a file has become shorter.
        """
        if request not in self._chunks:
            raise UnknownName(f"request={shown(request)}; {choices(request, self.requests)}")
        parts = dict[tuple[int, str], list[_Chunk]]()
        for chunk in sorted(self._chunks[request], key=lambda one: (one.order, one.entry.offset)):
            parts.setdefault((chunk.entry.layer, chunk.entry.hook), []).append(chunk)
        streams = any(hook.startswith("mhc_") for _, hook in parts)
        return {key: _joined(chunks, streams=streams) for key, chunks in sorted(parts.items())}


def _chunks_of(index: Path, default: str | None, labels: dict[Any, Any]) -> Iterator[tuple[str, _Chunk]]:
    """Yield (request id, chunk) for each chunk of a `.json`; `default` is the dtype, `labels` a cache of positions."""
    path, kind = index.with_suffix(".bin"), _INDEX.fullmatch(index.name)
    try:
        size = path.stat().st_size
        with blame(index):
            if kind is not None and kind[2]:
                entry = msgspec.json.decode(index.read_bytes(), type=_ForkEntry)
                document = _Index((entry,), request_id=entry.request_id)
            else:
                document = msgspec.json.decode(index.read_bytes(), type=_Index)
    except FileNotFoundError as error:
        raise InvalidFile(f"{error.filename} is missing, of {path} and {index.name}; copy both") from error
    for listed in document.entries:
        entry = msgspec.structs.replace(listed, positions=labels.setdefault(listed.positions, listed.positions))
        with blame(index):
            chunk = _checked(path, entry, size, entry.dtype or document.dtype or default)
        shared = index.name.startswith("shard-")
        request = entry.request_id if shared else document.request_id or index.parent.name
        if not request:
            raise InvalidFile(f"{index} has an entry of layer {entry.layer} without request_id; copy it again")
        yield request, chunk._replace(order=(document.seq, _natural(path.name)))


def _checked(path: Path, entry: _ForkEntry, size: int, dtype: str | None) -> _Chunk:
    """Return the chunk that an entry describes, checked against its dtype, its shape and the file's `size` in bytes.

    Raises:
        ValueError: the entry contradicts itself or the file.
    """
    what = f"layer {entry.layer}, {entry.hook}"
    if dtype is None:
        raise ValueError(f"{what} names no dtype; give dtype=")
    if dtype not in STORED:
        raise ValueError(f"{what} has dtype {shown(dtype)}; {choices(dtype, STORED)}")
    needed = math.prod(entry.shape) * np.dtype(STORED[dtype]).itemsize
    held = (size if entry.nbytes is None else entry.nbytes), entry.offset
    if held[0] != needed:
        raise ValueError(f"{what} has {held[0]:,} bytes, and {list(entry.shape)} of {dtype} takes {needed:,}")
    if sum(held) > size:
        raise ValueError(f"{what} ends at byte {sum(held):,}, and {path.name} has {size:,}; it is cut off")
    if entry.row_shape and math.prod(entry.row_shape) != entry.shape[1]:
        raise ValueError(f"{what} has row_shape {list(entry.row_shape)}, and rows of {entry.shape[1]} numbers")
    if entry.positions is not None and len(entry.positions) != entry.shape[0]:
        raise ValueError(f"{what} has {len(entry.positions)} positions for {entry.shape[0]} rows")
    return _Chunk(path, (0, []), entry, needed, dtype)


def _natural(name: str) -> list[str | int]:
    """Return the sort key of a name whose digits compare as numbers: shard-2 comes before shard-10."""
    return [int(part) if number else part for number, part in zip(cycle((False, True)), re.split(r"(\d+)", name))]


def _check_place(request: str, chunks: list[_Chunk]) -> None:
    """Check that a request's rows of one layer and hook are in one file or one folder's shards, else InvalidFile."""
    homes = dict[tuple[int, str], Path]()
    for path, _, entry, *_ in chunks:
        home = path.parent / "shard-*.bin" if path.name.startswith("shard-") else path
        other = homes.setdefault((entry.layer, entry.hook), home)
        if home != other or home.parent != next(iter(homes.values())).parent:
            raise InvalidFile(f"request {shown(request)} is in {other} and in {home}; give the folder of one of them")


def _joined(chunks: list[_Chunk], *, streams: bool) -> ForkRows:
    """Read the chunks of one layer and hook; of rows with one position, keep the last."""
    first = chunks[0]
    layer, hook, shape = first.entry.layer, first.entry.hook, first.entry.row_shape or first.entry.shape[1:]
    if len({(one.entry.shape[1], one.entry.row_shape or None, one.dtype) for one in chunks}) > 1:
        raise InvalidFile(f"{first.path}: rows of layer {layer}, {hook} differ in width or dtype from chunk to chunk")
    stored = np.frombuffer(b"".join(map(_bytes, chunks)), STORED[first.dtype])
    rows = torch.from_numpy(stored.astype(stored.dtype.newbyteorder("=")))
    rows = rows.view(torch.bfloat16) if first.dtype == "bfloat16" else rows
    rows = rows.reshape(sum(chunk.entry.shape[0] for chunk in chunks), *shape)
    site = None if streams and hook in _ONE_STREAM else FORK_HOOKS.get(hook)
    point = None if site is None else Point(layer, site)
    if any(chunk.entry.positions is None for chunk in chunks):
        return ForkRows(rows, None, 0, point)
    labels = np.array([one for chunk in chunks for one in chunk.entry.positions or ()], dtype=np.int64)
    kept = latest_per_position(labels)
    return ForkRows(rows[kept], torch.from_numpy(labels[kept]), len(labels) - len(kept), point)


def _bytes(chunk: _Chunk) -> bytes:
    with chunk.path.open("rb") as file:
        file.seek(chunk.entry.offset)
        found = file.read(chunk.size)
    if len(found) < chunk.size:
        raise InvalidFile(f"{chunk.path} has become shorter since it was opened; load it again")
    return found
