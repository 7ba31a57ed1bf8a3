"""Definition of a data set, `definition.json`: model, points, codecs. A run resumes a folder with an equal one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec
import torch

from steercap.core.schema import RAW, Coding, PointSchema
from steercap.core.spec import Point
from steercap.core.values import shown
from steercap.errors import InvalidFile, InvalidRequest, InvalidSetting
from steercap.files.folder import FolderKind, differences
from steercap.kernels.codecs import ENCODINGS, Codec, dtype_of
from steercap.kernels.codecs.coded import CodedRows, Whole, end_of, named_parameters, parts_of

VERSION: Final = 1
FILE: Final = "definition.json"
#: Default of `statistics_every` for one point: one row in 8 is decoded and enters the statistics.
EVERY: Final = 8


class PointFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Storage format of the rows of one point: a site, such as "resid_post", of one layer.

    Args:
        layer, site: layer and site of the point.
        schema: shape and dtype of a row in the model, and its number of tensor-parallel shards.
        coding: codec of the rows; `RAW` stores them unchanged.

    Raises:
        ValueError: the codec, shape or dtype is not valid.
    """

    layer: int
    site: str
    schema: PointSchema
    coding: Coding = RAW

    def __post_init__(self) -> None:  # msgspec's decoder makes a complaint about the file of it
        known = self.coding == RAW or isinstance(ENCODINGS.get(self.coding.encoding), Codec)
        sized = bool(self.schema.shape) and min(self.schema.shape) > 0 and self.schema.shards > 0
        if not known or not sized or not isinstance(getattr(torch, self.schema.dtype, None), torch.dtype):
            raise ValueError(f"{self.point} cannot be kept as {self.coding} of {self.schema}")

    @property
    def point(self) -> Point:
        """Layer and site, as a `Point`."""
        return Point(self.layer, self.site)

    @property
    def end(self) -> str:
        """Suffix of the point's tensors in a shard, after the part's name: ".resid_post.5" in "rows.resid_post.5"."""
        return end_of(self.point)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a decoded row."""
        return _shape(self)

    @property
    def decoded_width(self) -> int:
        """Number of elements of a decoded row; for random projections, of stored numbers."""
        return torch.Size(self.shape).numel()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a decoded row: the model's, or float32 for a codec."""
        return dtype_of(self.schema) if self.coding == RAW else torch.float32

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the codec's constants, float32 [width], stored once in each shard; see `kernels.codecs.Codec`."""
        codec = ENCODINGS[self.coding.encoding]
        return codec.constants if isinstance(codec, Codec) else ()

    @property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each of the point's tensors in a shard, by part name; shapes without the axis of rows."""
        return _tensors(self)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a shard."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.tensors.values())

    @property
    def coded(self) -> tuple[str, Mapping[str, int]]:
        """Name of the codec, and its parameters (such as `k`) by name."""
        return named_parameters(self.coding)

    def whole(self, parts: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]) -> Whole:
        """Return rows from their tensors by part name, still encoded: `CodedRows`, or without a codec the tensor."""
        if self.coding == RAW:
            return parts["rows"]
        return CodedRows(self.coding, self.schema, parts, constants=constants)

    def rows_of(
        self, parts: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Decode tensors by part name to rows [rows, *shape]; `constants` default to 0. Attention: see `numbers_of`."""
        given = constants or {name: torch.zeros(self.schema.width) for name in self.constants}
        found = self.whole(parts, given)
        return found.numbers() if isinstance(found, CodedRows) else found

    def check(self, piece: Whole) -> None:
        """Check that rows have this codec, shape and dtype.

        Raises:
            InvalidRequest: codec, shape or dtype differ, or the parts have different lengths.
        """
        parts = parts_of(piece)
        coding = piece.coding if isinstance(piece, CodedRows) else RAW
        found = {name: (tuple(part.shape[1:]), part.dtype) for name, part in parts.items()}
        if coding != self.coding or found != self.tensors or len({len(part) for part in parts.values()}) != 1:
            raise InvalidRequest(
                f"{self.point} came as {coding}, {found}; the definition of the data set says {self.coding}, "
                f"{self.tensors}"
            )

    def nothing(self) -> dict[str, torch.Tensor]:
        """Return tensors of 0 rows by part name, with the shapes and dtypes that a shard stores."""
        if self.coding == RAW:
            return {"rows": torch.empty((0, *self.schema.shape), dtype=dtype_of(self.schema))}
        codec = ENCODINGS[self.coding.encoding]
        assert isinstance(codec, Codec)
        stored = torch.empty((0, codec.row_bytes(self.schema, self.coding)), dtype=torch.uint8)
        parts = codec.parts(stored, self.schema, self.coding)
        if self.schema.shards == 1:
            return parts
        return {name: torch.stack([part] * self.schema.shards, dim=1) for name, part in parts.items()}


@lru_cache(maxsize=1024)
def _shape(point: PointFormat) -> tuple[int, ...]:
    return tuple(point.rows_of(point.nothing()).shape[1:])


@lru_cache(maxsize=1024)
def _tensors(point: PointFormat) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    return MappingProxyType({name: (tuple(part.shape[1:]), part.dtype) for name, part in point.nothing().items()})


class DatasetDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that determine a data set's rows, all but its documents: the file `definition.json`.

    Args:
        version: version of the format.
        kind: kind of the folder.
        model: identity of the model, see `files.fingerprint`; "name" at least.
        points: formats of the points kept of each token, in order.
        documents_per_shard: number D of documents in a shard: shard k has documents [k D, (k + 1) D).
        asked: other settings that determine the rows, by name, JSON-compatible: token sample, context, windows,
            generation.
        statistics_every: sampling interval of statistics, one row in so many; 0 for none.
        num_layers: decoder layers of the model; 0 if unknown, and then negative layers are refused.

    Raises:
        ValueError: no points, a point twice, or a number out of range.
    """

    version: int
    kind: Literal["activations"]
    model: dict[str, str]
    points: tuple[PointFormat, ...]
    documents_per_shard: int
    asked: dict[str, Any] = {}
    statistics_every: int = EVERY
    num_layers: int = 0

    def __post_init__(self) -> None:  # msgspec's decoder makes a complaint about the file of it
        names = [point.point for point in self.points]
        if not names or len(set(names)) < len(names):
            raise ValueError("it must have at least one point, and each once")
        if self.documents_per_shard < 1 or self.statistics_every < 0:
            raise ValueError("documents_per_shard is at least 1, and statistics_every at least 0")

    @property
    def digest(self) -> str:
        """SHA-256 of the definition in hexadecimal; shards refer to it."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows at all points."""
        return sum(point.row_bytes for point in self.points)

    def format_of(self, point: Point) -> PointFormat:
        """Return the format of a point's rows.

        Raises:
            KeyError: the definition has no such point.
        """
        return {known.point: known for known in self.points}[point]


def define(
    model: Mapping[str, str],
    points: Mapping[Point, PointSchema],
    *,
    coding: Coding = RAW,
    documents_per_shard: int,
    asked: Mapping[str, Any] | None = None,
    statistics_every: int = EVERY,
    num_layers: int = 0,
) -> DatasetDefinition:
    """Return a definition of the current version, with all points in one codec.

    Args:
        model: identity of the model, as `SteerModel.identity` returns it.
        points: points with their schemas, in order.
        coding: codec of all points.
        documents_per_shard: number of documents in a shard, at least 1.
        asked: other settings that determine the rows.
        statistics_every: sampling interval of statistics, one row in so many; 0 for none.
        num_layers: decoder layers of the model; 0 if unknown.

    Raises:
        InvalidSetting: an argument is not valid.
    """
    try:
        formats = tuple(PointFormat(*point, schema, coding) for point, schema in points.items())
        return DatasetDefinition(
            VERSION,
            "activations",
            dict(model),
            formats,
            documents_per_shard,
            dict(asked or {}),
            statistics_every,
            num_layers,
        )
    except ValueError as error:
        raise InvalidSetting(f"these settings do not make a data set: {error}") from error


def decode(content: bytes, path: str) -> DatasetDefinition:
    """Decode a data set's definition from the bytes of its JSON file; `path` is the file's name in errors.

    Raises:
        InvalidFile: the file cannot be read, or is of another version.
    """
    try:
        said = msgspec.json.decode(content)
        if not isinstance(said, dict) or said.get("kind") != "activations":
            raise InvalidFile(f"{path} is not the definition of a data set of activations; choose another folder")
        if said.get("version") != VERSION:
            raise InvalidFile(
                f"{path} is of format version {shown(said.get('version'))}; this steercap reads version {VERSION}: "
                "upgrade steercap to read newer data sets"
            )
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{path} cannot be read: {error}; choose another folder") from error
    return DATASET.decode(content, path)


def _differing(stored: DatasetDefinition, expected: DatasetDefinition) -> list[str]:
    """Describe each setting in which two definitions differ; of `model`, only names in `expected` are compared."""
    was, now = (
        {
            "model": {name: one.model[name] for name in expected.model if name in one.model},
            "points": ", ".join(f"{point.point} of {point.schema} as {point.coding}" for point in one.points),
            "documents_per_shard": one.documents_per_shard,
            "statistics_every": one.statistics_every,
        }
        for one in (stored, expected)
    )
    asked = differences(stored.asked, expected.asked, none_is_unset=True)
    return differences(was, now) + asked


#: Kind of folder that holds a data set of activations: its definition's file and type, and the comparison of two.
DATASET: Final = FolderKind(FILE, DatasetDefinition, "data set of activations", _differing)
