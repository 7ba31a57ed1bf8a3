"""Capture files: one safetensors file per handle, with labels as tensors and texts in a JSON header.

The header is the metadata entry `steercap`: format version, model, request id, text, points in order, messages,
pictures, reduction; the name of a LoRA adapter; for projections the directions' names and marks; the attention rules of
layers whose queries and keys are in the file; for rows in a lossy codec the codec with its parameters, and the schema
of each point. Tensors are named `rows.<site>.<layer>`, and in a codec `<part>.<site>.<layer>`: `q`, `scale`, `zero`,
`indices`, see `steercap.kernels.codecs`. Each name ends in `.shard<number>` where rows were not gathered, except for
`centre` and `reach`, which all rows of a point share. Recorded attention is `attention.<part>.<layer>`. Further tensors
are `positions`, `token_ids`, `prompt_token_ids` and `output_token_ids`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
import torch

from steercap.captures.rows import Rows
from steercap.core.attention import AttentionRule
from steercap.core.chat import MediaSpan, MessageSpan
from steercap.core.receipt import SteeringReceipt
from steercap.core.schema import RAW, Coding, PointSchema
from steercap.core.spec import MOST_NUMBERS, MOST_SEED, Point, Reduction
from steercap.core.values import FAR
from steercap.errors import InvalidFile
from steercap.files.base import blame, encode_tensors, read_tensors, write_tensors
from steercap.files.native import READERS
from steercap.kernels.attention import RecordedAttention
from steercap.kernels.codecs import ENCODINGS, Codec
from steercap.kernels.codecs.coded import CodedRows, Whole, end_of, parts_of

VERSION: Final = 1
#: Names of the tensors of a layer's recorded attention.
ATTENTION: Final = ("indices", "shares", "entropies")
_RECORDED: Final = f"attention.{ATTENTION[0]}."
#: Names of the tensors that belong to no point: labels of the rows, and tokens of the request.
LABELS: Final = ("positions", "token_ids", "prompt_token_ids", "output_token_ids")


class Header(msgspec.Struct, frozen=True):
    """JSON header of a capture file; `shards` is the number of shards of each point, 0 for whole rows."""

    version: int
    model: str
    request_id: str
    text: str
    num_layers: int
    points: tuple[Point, ...]
    messages: tuple[MessageSpan, ...]
    reduce: Reduction | None
    writes: int
    steering: SteeringReceipt | None = None
    verified: bool | None = None
    directions: tuple[str, ...] = ()
    marks: dict[int, tuple[tuple[float, ...], ...]] = {}
    coding: Coding = RAW
    schemas: tuple[PointSchema, ...] = ()
    attention_rules: dict[int, AttentionRule] = {}
    shards: tuple[int, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    recomputed: bool = False
    adapter: str | msgspec.UnsetType = msgspec.UNSET  # files of requests without one are those of before

    def __post_init__(self) -> None:  # msgspec's decoder makes a complaint about the file of it
        known = {point for point in self.points if 0 <= point.layer < self.num_layers}
        if not known or len(known) < len(self.points):
            raise ValueError(f"its points must be of layers below {self.num_layers}, at least one and each once")
        if not all(map(_can_be, self.schemas)) or min(self.shards, default=0) < 0:
            raise ValueError(
                "a point has rows without elements, or of a size that its number of shards does not divide"
            )
        codec = ENCODINGS.get(self.coding.encoding)
        least, most = (1, MOST_NUMBERS) if codec and codec.default_k else (0, 0)
        if not (least <= self.coding.k <= most and 0 <= self.coding.seed <= MOST_SEED):
            raise ValueError(f"rows cannot be kept as {self.coding}")


class Saved(NamedTuple):
    """Content of a capture file.

    Args:
        header: the file's JSON header.
        rows: rows by point: tensors, codes of a lossy codec, or tuples of shards.
        positions, token_ids: labels of the rows, int64 [rows].
        prompt_token_ids, output_token_ids: token ids of the request.
        attention: recorded attention by layer.
    """

    header: Header
    rows: Mapping[Point, Rows]
    positions: torch.Tensor
    token_ids: torch.Tensor
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    attention: Mapping[int, RecordedAttention] = MappingProxyType({})


def write(saved: Saved, path: Path, mode: int | None = None) -> Path:
    """Write a capture file and return its path; it appears whole or not at all, with the permissions `mode` if given.

    Raises:
        InvalidFile: the name ends in something other than .safetensors.
    """
    return write_tensors(path, saved.header, _tensors(saved), mode)


def encode(saved: Saved) -> bytes:
    """Return the bytes of the capture file that `write` would write."""
    return encode_tensors(saved.header, _tensors(saved))


def _tensors(saved: Saved) -> dict[str, torch.Tensor]:
    """Return all tensors of a capture file, by their names in the file."""
    tensors = {name: tensor.contiguous() for point, rows in saved.rows.items() for name, tensor in named(point, rows)}
    tensors |= _attention(saved)
    tensors["positions"] = saved.positions
    tensors["token_ids"] = saved.token_ids
    tensors["prompt_token_ids"] = torch.tensor(saved.prompt_token_ids, dtype=torch.int64)
    tensors["output_token_ids"] = torch.tensor(saved.output_token_ids, dtype=torch.int64)
    return tensors


def _attention(saved: Saved) -> dict[str, torch.Tensor]:
    return {
        f"attention.{name}.{layer}": tensor
        for layer, recorded in saved.attention.items()
        for name, tensor in recorded.parts.items()
    }


def read(path: Path) -> Saved:
    """Read a capture file that `write` wrote.

    Raises:
        InvalidFile: the file is of another kind, truncated or of a newer version, or its rows, labels and tokens
            contradict each other.
    """
    text, tensors = read_tensors(path)
    header = _header(path, text)
    try:
        with blame(path):
            positions, token_ids, prompt, output = _labels(tensors)
            if not all(0 <= span.start < span.stop <= len(prompt) for span in header.media):
                raise ValueError("it has an image at positions outside its prompt")
            rows = {point: _rows(header, tensors, number) for number, point in enumerate(header.points)}
            recorded = {
                layer: RecordedAttention(positions, *(tensors[f"attention.{part}.{layer}"] for part in ATTENTION))
                for layer in sorted(int(name.removeprefix(_RECORDED)) for name in tensors if name.startswith(_RECORDED))
            }
    except LookupError as error:
        raise InvalidFile(f"{path} lacks an entry that its header names: {error}; copy or save it again") from error
    return Saved(header, rows, positions, token_ids, prompt.tolist(), output.tolist(), recorded)


def read_header(path: Path) -> Header:
    """Read the header of a capture file, without its tensors.

    Raises:
        InvalidFile: the file is of another kind, truncated, or of a newer version.
    """
    return _header(path, read_tensors(path, tensors=False)[0])


def is_of(path: Path, model: str) -> bool:
    """Return whether a file is a sound capture file of a model; its rows are not read."""
    try:
        return read_header(path).model == model
    except InvalidFile:
        return False


def _header(path: Path, text: str) -> Header:
    try:
        said = msgspec.json.decode(text)
        if (kind := said.get("kind")) in READERS:
            raise InvalidFile(f"{path} holds {kind}, not captures; read it with {READERS[kind]}")
        version = said["version"]
        if version != VERSION:
            raise InvalidFile(f"{path} has format version {version}; this steercap reads version {VERSION}")
        return msgspec.json.decode(text, type=Header)
    except (msgspec.MsgspecError, AttributeError, KeyError, TypeError) as error:
        raise InvalidFile(f"{path} has a steercap header that cannot be read: {error}") from error


def named(point: Point, rows: Rows) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the stored tensors of one point's rows, as (name in a file, tensor): each shard's, then constants."""
    for shard, whole in enumerate(rows if isinstance(rows, tuple) else (rows,)):
        end = end_of(point, shard if isinstance(rows, tuple) else None)
        for part, tensor in parts_of(whole).items():
            yield f"{part}{end}", tensor
    for name, constant in constants_of(rows).items():
        yield f"{name}{end_of(point, None)}", constant


def size_of(saved: Saved) -> int:
    """Return the size in bytes of a capture's rows and recorded attention, without labels and header."""
    rows = sum(tensor.nbytes for point, rows in saved.rows.items() for _, tensor in named(point, rows))
    return rows + sum(tensor.nbytes for tensor in _attention(saved).values())


def bytes_of(saved: Saved) -> int:
    """Return an upper bound, off by 1 % or some hundred bytes per tensor, of the size in bytes of a capture's file."""
    tensors = _tensors(saved)
    header = len(msgspec.json.encode(msgspec.json.encode(saved.header).decode()))
    return header + 64 + sum(tensor.nbytes + len(name) + 20 * tensor.ndim + 100 for name, tensor in tensors.items())


def constants_of(rows: Rows) -> Mapping[str, torch.Tensor]:
    """Return the tensors of the codec that all rows and shards of a point share, by name; {} if it has none."""
    first = rows[0] if isinstance(rows, tuple) else rows
    return first.constants if isinstance(first, CodedRows) else {}


class Shape(NamedTuple):
    """Shape of one point's rows as stored.

    Args:
        first: rows of the point, or their first shard.
        shards: number of shards; 0 for whole rows.
        row: shape of a row, on all ranks together.
        ranks: length of the axis of tensor-parallel ranks, behind that of the rows, in joined codes; 1 without it.
    """

    first: Whole
    shards: int
    row: tuple[int, ...]
    ranks: int


def shape_of(rows: Rows) -> Shape:
    """Return the shape of one point's rows as stored."""
    first, shards = (rows[0], len(rows)) if isinstance(rows, tuple) else (rows, 0)
    if isinstance(first, CodedRows):
        return Shape(first, shards, first.schema.shape, first.schema.shards if first.shard is None else 1)
    part = tuple(first.shape[1:])
    return Shape(first, shards, (part[0] * max(shards, 1), *part[1:]) if part else (), 1)


def _labels(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors named in `LABELS`, in that order, checked.

    Raises:
        LookupError: one is missing.
        ValueError: a tensor is not int64 [n], positions do not ascend, or token ids contradict prompt and output.
    """
    found = [tensors[name] for name in LABELS]
    for name, tensor in zip(LABELS, found, strict=True):
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise ValueError(f"{name!r} is {tuple(tensor.shape)} of {tensor.dtype}, and must be one-dimensional int64")
    positions, token_ids, prompt, output = found
    inputs = torch.cat([prompt, output[:-1]])  # the last token was never read
    known = (positions >= 0) & (positions < len(inputs))
    if not known.all() or (positions.diff() < 1).any() or not torch.equal(inputs[positions], token_ids):
        raise ValueError("the positions or token ids of its rows do not match its prompt and output")
    return found


def _rows(header: Header, tensors: Mapping[str, torch.Tensor], number: int) -> Rows:
    """Return the rows of the header's point with this index: whole, or a tuple of shards."""
    shards = header.shards[number] if header.shards else 0
    if shards:
        return tuple(_whole(header, tensors, number, shard) for shard in range(shards))
    return _whole(header, tensors, number, None)


def _whole(header: Header, tensors: Mapping[str, torch.Tensor], number: int, shard: int | None) -> Whole:
    end, count = end_of(header.points[number], shard), len(tensors["positions"])
    if header.reduce:
        count = min(count, 1)
    if header.coding == RAW:
        rows = tensors[name := f"rows{end}"]
        wanted = (count, len(header.directions)) if header.directions else (count, *rows.shape[1:])
        if rows.dim() < 2 or rows.shape != wanted or not rows.is_floating_point():
            raise ValueError(f"{name!r} is {tuple(rows.shape)} of {rows.dtype}, and must be {count} rows of floats")
        return rows
    codec, common = ENCODINGS.get(header.coding.encoding), end_of(header.points[number], None)
    names = codec.constants if isinstance(codec, Codec) else ()
    parts = {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
    kept = {name: part for name, part in parts.items() if name not in names}
    constants = {name: tensors[f"{name}{common}"] for name in names}
    found = CodedRows(header.coding, header.schemas[number], kept, shard, constants)
    if reason := found.invalid_reason(count):
        raise LookupError(f"{header.points[number]}: {reason}")
    return found


def _can_be(schema: PointSchema) -> bool:
    """Return whether rows can have this schema: no empty axis, and a first axis that its shards divide."""
    shape, shards = schema.shape, schema.shards
    return bool(shape) and min(*shape, shards) > 0 and max(shape) < FAR and not shape[0] % shards
