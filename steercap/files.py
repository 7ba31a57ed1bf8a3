"""Captures on disk: one safetensors file a handle, its labels as tensors, its words as a JSON header.

The header is the metadata entry `steercap`: format version, model, request id, text, points in order, messages,
reduction; of projections the directions' names and marks. Tensors are named `rows.<site>.<layer>`, `positions`,
`token_ids`, `prompt_token_ids`, `output_token_ids`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from steercap.core.chat import MessageSpan
from steercap.core.receipt import Receipt, SteeringReceipt
from steercap.core.spec import Point
from steercap.errors import InvalidFile
from steercap.formats.base import read_tensors, write_tensors

if TYPE_CHECKING:
    from steercap.handle import CaptureHandle

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


def save_handle(handle: CaptureHandle, path: Path) -> Path:
    """Write a fetched handle; the file appears whole or not at all."""
    receipt = handle.receipt
    header = Header(
        version=VERSION,
        model=handle.model,
        request_id=handle.request_id,
        text=handle.text,
        num_layers=handle.num_layers,
        points=handle.points,
        messages=handle.messages,
        reduce=receipt.reduce,
        writes=receipt.writes,
        steering=receipt.steering,
        directions=handle.directions,
        marks=handle.marks,
    )
    tensors = {_name(point): rows.contiguous() for point, rows in handle.captures.items()}
    tensors["positions"] = handle.positions
    tensors["token_ids"] = handle.token_ids
    tensors["prompt_token_ids"] = torch.tensor(handle.prompt_token_ids, dtype=torch.int64)
    tensors["output_token_ids"] = torch.tensor(handle.output_token_ids, dtype=torch.int64)
    return write_tensors(path, header, tensors)


def load_handle(path: Path) -> CaptureHandle:
    """Read what `save_handle` wrote.

    Raises:
        InvalidFile: not such a file, truncated, or of a newer version.
    """
    from steercap.captures import Captures
    from steercap.handle import CaptureHandle

    text, tensors = read_tensors(path)
    header = _header(path, text)
    handle = CaptureHandle(
        request_id=header.request_id,
        model=header.model,
        text=header.text,
        prompt_token_ids=tensors["prompt_token_ids"].tolist(),
        output_token_ids=tensors["output_token_ids"].tolist(),
        points=header.points,
        num_layers=header.num_layers,
        messages=header.messages,
        directions=header.directions,
        marks=header.marks,
    )
    labels = tensors["positions"].numpy(), tensors["token_ids"].numpy()
    handle._receipt = Receipt(header.points, *labels, header.writes, header.reduce, header.steering)
    handle._captures = Captures({point: tensors[_name(point)] for point in header.points}, header.num_layers)
    return handle


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


def _name(point: Point) -> str:
    return f"rows.{point.site}.{point.layer}"
