"""Captures on disk: one safetensors file per handle, its labels as tensors, its texts in a JSON header.

The header is the metadata entry `steercap`: format version, model, request id, text, points in order, messages,
reduction; of projections the directions' names and marks; how layers weigh keys whose queries and keys it holds; of
rows in a lossy codec the codec with its parameters, and the schema of each point. Tensors are named
`rows.<site>.<layer>`, and in a codec `<part>.<site>.<layer>`: `q`, `scale`, `zero`, `indices`, see `encodings`; further
`positions`, `token_ids`, `prompt_token_ids`, `output_token_ids`.
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
from steercap.encodings.coded import CodedRows
from steercap.errors import InvalidFile
from steercap.files.base import read_tensors, write_tensors
from steercap.requests.captures import Whole

VERSION: Final = 1


class Header(msgspec.Struct, frozen=True):
    """The JSON header of a capture file."""

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


class Saved(NamedTuple):
    """A handle as a file holds it.

    Args:
        header: its texts and names.
        rows: by point, as they are kept.
        positions, token_ids: of the rows, int64 [rows].
        prompt_token_ids, output_token_ids: of the request.
    """

    header: Header
    rows: Mapping[Point, Whole]
    positions: torch.Tensor
    token_ids: torch.Tensor
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


def write(saved: Saved, path: Path) -> Path:
    """Write a handle; the file appears whole or not at all.

    Raises:
        InvalidFile: the name ends in something other than .safetensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    for point, rows in saved.rows.items():
        parts = rows.parts if isinstance(rows, CodedRows) else {"rows": rows}
        tensors |= {_name(point, part): tensor.contiguous() for part, tensor in parts.items()}
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
    return Saved(
        header,
        dict(zip(header.points, _rows(header, tensors), strict=True)),
        tensors["positions"],
        tensors["token_ids"],
        tensors["prompt_token_ids"].tolist(),
        tensors["output_token_ids"].tolist(),
    )


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


def _rows(header: Header, tensors: Mapping[str, torch.Tensor]) -> Iterator[Whole]:
    """The rows of each point."""
    if header.coding == RAW:
        yield from (tensors[_name(point)] for point in header.points)
        return
    for point, schema in zip(header.points, header.schemas, strict=True):
        end = _name(point, "")
        parts = {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
        yield CodedRows(header.coding, schema, parts)


def _name(point: Point, part: str = "rows") -> str:
    return f"{part}.{point.site}.{point.layer}"
