"""Captures on disk: one safetensors file per handle, its labels as tensors, its texts in a JSON header.

The header is the metadata entry `steercap`: format version, model, request id, text, points in order, messages,
reduction; of projections the directions' names and marks; how layers weigh keys whose queries and keys it holds; of
rows in a lossy codec the codec with its parameters, and the schema of each point. Tensors are named
`rows.<site>.<layer>`, and in a codec `<part>.<site>.<layer>`: `q`, `scale`, `zero`, `indices`, see `encodings`, each
with `.shard<number>` behind it where rows were not gathered, but for what all rows of a point have in common, `centre`
and `reach`; further `positions`, `token_ids`, `prompt_token_ids`, `output_token_ids`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import torch

from steercap.core.attention import AttentionRule
from steercap.core.chat import MessageSpan
from steercap.core.coding import RAW, Coding
from steercap.core.receipt import SteeringReceipt
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.encodings import ENCODINGS
from steercap.encodings.base import Codec
from steercap.encodings.coded import CodedRows
from steercap.errors import InvalidFile
from steercap.files.base import read_tensors, write_tensors
from steercap.requests.captures import Rows, Whole

VERSION: Final = 1


class Header(msgspec.Struct, frozen=True):
    """The JSON header of a capture file; `shards` says how many each point has, 0 where its rows are whole."""

    version: int
    model: str
    request_id: str
    text: str
    num_layers: int
    points: tuple[Point, ...]
    messages: tuple[MessageSpan, ...]
    reduce: str | None
    writes: int
    steering: SteeringReceipt | None = None
    directions: tuple[str, ...] = ()
    marks: dict[int, tuple[tuple[float, ...], ...]] = {}
    coding: Coding = RAW
    schemas: tuple[PointSchema, ...] = ()
    attention_rules: dict[int, AttentionRule] = {}
    shards: tuple[int, ...] = ()


class Saved(NamedTuple):
    """A handle as a file holds it.

    Args:
        header: its texts and names.
        rows: by point, as they are kept.
        positions, token_ids: of the rows, int64 [rows].
        prompt_token_ids, output_token_ids: of the request.
    """

    header: Header
    rows: Mapping[Point, Rows]
    positions: torch.Tensor
    token_ids: torch.Tensor
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


def write(saved: Saved, path: Path) -> Path:
    """Write a handle; the file appears whole or not at all.

    Raises:
        InvalidFile: the name ends in something other than .safetensors.
    """
    tensors = {name: tensor.contiguous() for point, rows in saved.rows.items() for name, tensor in named(point, rows)}
    tensors["positions"] = saved.positions
    tensors["token_ids"] = saved.token_ids
    tensors["prompt_token_ids"] = torch.tensor(saved.prompt_token_ids, dtype=torch.int64)
    tensors["output_token_ids"] = torch.tensor(saved.output_token_ids, dtype=torch.int64)
    return write_tensors(path, saved.header, tensors)


def read(path: Path) -> Saved:
    """Read what `write` wrote.

    Raises:
        InvalidFile: not such a file, truncated, or of a newer version.
    """
    text, tensors = read_tensors(path)
    header = _header(path, text)
    try:
        return Saved(
            header,
            {point: _rows(header, tensors, number) for number, point in enumerate(header.points)},
            tensors["positions"],
            tensors["token_ids"],
            tensors["prompt_token_ids"].tolist(),
            tensors["output_token_ids"].tolist(),
        )
    except LookupError as error:
        raise InvalidFile(f"{path} lacks what its header names: {error}; copy or save it again") from error


def read_header(path: Path) -> Header:
    """What a file of captures says of itself; tensors are not read.

    Raises:
        InvalidFile: not such a file, truncated, or of a newer version.
    """
    return _header(path, read_tensors(path, tensors=False)[0])


def _header(path: Path, text: str) -> Header:
    try:
        version = msgspec.json.decode(text)["version"]
        if version != VERSION:
            raise InvalidFile(f"{path} has format version {version}; this steercap reads version {VERSION}")
        return msgspec.json.decode(text, type=Header)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise InvalidFile(f"{path} has a steercap header that cannot be read: {error}") from error


def named(point: Point, rows: Rows) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one point, with their names in a file."""
    for shard, whole in enumerate(rows if isinstance(rows, tuple) else (rows,)):
        end = _end(point, shard if isinstance(rows, tuple) else None)
        for part, tensor in parts_of(whole).items():
            yield f"{part}{end}", tensor
    for name, constant in constants_of(rows).items():
        yield f"{name}{_end(point, None)}", constant


def parts_of(rows: Whole) -> Mapping[str, torch.Tensor]:
    """The tensors that rows, or one shard of them, consist of: `rows` alone where they are in no codec."""
    return rows.parts if isinstance(rows, CodedRows) else {"rows": rows}


def constants_of(rows: Rows) -> Mapping[str, torch.Tensor]:
    """What the codec of a point's rows needs besides them, once for all shards."""
    first = rows[0] if isinstance(rows, tuple) else rows
    return first.constants if isinstance(first, CodedRows) else {}


def coding_of(rows: Whole) -> tuple[str, Mapping[str, int]]:
    """The codec that rows are kept in, and its parameters."""
    if not isinstance(rows, CodedRows):
        return "raw", {}
    codec, coding = ENCODINGS[rows.codec], rows.coding
    parameters = {"k": coding.k} if codec.default_k else {}
    return rows.codec, parameters | ({"seed": coding.seed} if codec.seeded else {})


class Shape(NamedTuple):
    """What the tensors of one point are parts of.

    Args:
        first: its rows, or the first shard of them.
        shards: how many shards there are; 0 where rows are whole.
        row: shape of a row, on all ranks together.
        ranks: ranks that codes of whole rows are of, on an axis of their own behind that of the rows; 1 for no axis.
    """

    first: Whole
    shards: int
    row: tuple[int, ...]
    ranks: int


def shape_of(rows: Rows) -> Shape:
    """What the tensors of one point are parts of."""
    first, shards = (rows[0], len(rows)) if isinstance(rows, tuple) else (rows, 0)
    if isinstance(first, CodedRows):
        return Shape(first, shards, first.schema.shape, first.schema.shards if first.shard is None else 1)
    part = tuple(first.shape[1:])
    return Shape(first, shards, (part[0] * max(shards, 1), *part[1:]) if part else (), 1)


def _rows(header: Header, tensors: Mapping[str, torch.Tensor], number: int) -> Rows:
    """The rows of the point of this number."""
    shards = header.shards[number] if header.shards else 0
    if shards:
        return tuple(_whole(header, tensors, number, shard) for shard in range(shards))
    return _whole(header, tensors, number, None)


def _whole(header: Header, tensors: Mapping[str, torch.Tensor], number: int, shard: int | None) -> Whole:
    end = _end(header.points[number], shard)
    if header.coding == RAW:
        return tensors[f"rows{end}"]
    codec, common = ENCODINGS.get(header.coding.encoding), _end(header.points[number], None)
    names = codec.constants if isinstance(codec, Codec) else ()
    parts = {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
    kept = {name: part for name, part in parts.items() if name not in names}
    constants = {name: tensors[f"{name}{common}"] for name in names}
    found = CodedRows(header.coding, header.schemas[number], kept, shard, constants)
    if reason := found.damage(1 if header.reduce else len(tensors["positions"])):
        raise LookupError(f"{header.points[number]}: {reason}")
    return found


def _end(point: Point, shard: int | None) -> str:
    """How the names of a point's tensors end."""
    return f".{point.site}.{point.layer}" + ("" if shard is None else f".shard{shard}")
