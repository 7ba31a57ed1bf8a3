"""Encodings of captured rows: interface and registry.

The worker encodes rows to bytes of a record, the client decodes them. An encoding is a file with a `MEMBER` or an entry
of `MEMBERS`. Rows are those of one rank: at a point that is split over ranks, a shard of each row.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from steercap.core.registry import Registry
from steercap.core.schema import LINE_BYTES, RAW, Coding, PointSchema, RecordShape, record_shape
from steercap.core.values import choices
from steercap.errors import InvalidSpec, UnknownName

if TYPE_CHECKING:
    import torch

#: Maximum number of a row's elements that 16-bit indices can address.
MOST_INDEXED: Final = 1 << 16


class RowEncoder(Protocol):
    """SAE encoder that is applied to rows before they are stored."""

    @property
    def d_sae(self) -> int:
        """Number of features."""

    def activations(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the feature activations, float32 [rows, d_sae], of rows [rows, width] of any floating dtype."""


@dataclass(frozen=True)
class PointTables:
    """Captured points with equal schemas, as tables on a device.

    Args:
        schema: the points' schema.
        coding: encoding of their rows.
        points: line offset of each row in a raw record, and byte offset in the encoded record: int64 [points, 2].
        directions: bank rows of the vectors that each point's encoding needs, int64 [points, vectors]; None for none.
        encoder: SAE encoder that is applied to the rows first, or None.
    """

    schema: PointSchema
    coding: Coding
    points: torch.Tensor
    directions: torch.Tensor | None = None
    encoder: RowEncoder | None = None


class Encoding(ABC):
    """Encoding of captured rows from worker to client."""

    #: Alignment of each row's offset in its record, in bytes.
    align: ClassVar[int] = LINE_BYTES
    #: True if `CaptureSpec(codec=)` accepts it; the others follow from `reduce=`, `project=` and `calibration=`.
    is_codec: ClassVar[bool] = False
    #: Numbers stored per row if `CaptureSpec(codec_k=)` is not given; 0 if the encoding has no `k`.
    default_k: ClassVar[int] = 0
    #: True if rows store 16-bit indices of elements.
    indexed: ClassVar[bool] = False
    #: True if rows are projected with a matrix that is generated from a seed.
    seeded: ClassVar[bool] = False

    @abstractmethod
    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        """Return the number of bytes of one encoded row."""

    @abstractmethod
    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        """Encode rows on their device; the host and the tests of kernels use it.

        Args:
            rows: [rows, shard width], of the model's dtype.
            schema: schema of the point.
            coding: parameters of the encoding.
            vectors: the point's vectors, float32 [vectors, shard width], for encodings that need some; None for others.

        Returns:
            uint8 [rows, row bytes].
        """

    @abstractmethod
    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        """Decode stored rows to the tensor that the client returns.

        Args:
            stored: uint8 [rows, row bytes], contiguous; the result may share its memory.
            schema: schema of the point.
            coding: parameters of the encoding.

        Returns:
            [rows, *shard shape]; [rows, k] for projections.
        """

    def takes(self, coding: Coding) -> bool:
        """Check if the encoding accepts these parameters."""
        return bool(coding.k) == bool(self.default_k)

    def vectors(self, coding: Coding) -> int:
        """Return the number of vectors per point that the client must send to workers; see `Configuration.reads`."""
        del coding
        return 0

    def matrix(self, width: int, coding: Coding) -> torch.Tensor | None:
        """Return the encoding's own projection matrix for rows of `width` elements, float32 [k, width], or None."""
        del width, coding
        return None

    def launch(self, ring: torch.Tensor, records: torch.Tensor, tables: PointTables, vectors: torch.Tensor) -> None:
        """Encode rows of the CUDA ring buffer, after the pass, into other lines of the ring.

        Not called for encodings that store rows unchanged.

        Args:
            ring: the ring buffer, uint8 [lines, LINE_BYTES].
            records: first line of each token's raw record, and of its encoded record: int64 [records, 2].
            tables: tables of the points whose rows to encode.
            vectors: this rank's columns of the encoding's `matrix`, [k, shard width] in the rows' dtype; without a
                matrix, the vector bank, float32 [vectors, shard width], into which `tables.directions` are indices.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step on the device")

    def joined(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Combine the decoded shards of a point's rows, by rank, to whole rows."""
        import torch

        return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=1)

    def record(self, schemas: Sequence[PointSchema], coding: Coding) -> RecordShape:
        """Return the byte layout of a record of points with these schemas."""
        return record_shape([self.row_bytes(schema, coding) for schema in schemas], self.align)


class Codec(Encoding):
    """Lossy codec; the client can keep its codes and scales without decoding them."""

    align: ClassVar[int] = 8
    is_codec: ClassVar[bool] = True
    #: Names of the vectors of a point that `encode` needs, in order: float32 [width] each. They are not
    #: stored with the rows; the client, which has sent them, adds them to the parts.
    constants: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        """Split stored rows into named tensors: `q` are codes, `scale` their step, `zero` the value of code 0.

        Args:
            stored: uint8 [rows, row bytes], contiguous within each row.
            schema: schema of the point.
            coding: parameters of the codec.

        Returns:
            Tensors [rows, ...] that own their memory.
        """

    @abstractmethod
    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        """Decode `parts`, with the shard's `constants` among them: float32 [rows, *shard shape], or [rows, k]."""

    @abstractmethod
    def error_bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        """Return an upper bound of the error of each element of `decoded`, apart from float32 rounding: float64.

        It has the shape of `decoded`. For codecs that project, it bounds the error of the projections.
        """

    def invalid_reason(self, parts: Mapping[str, torch.Tensor], schema: PointSchema) -> str:
        """Return the reason why parts of valid shapes and dtypes, as read from a file, are invalid; "" if valid."""
        del parts, schema
        return ""

    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        return self.decoded(self.parts(stored, schema, coding), schema, coding)


def packed(rows: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a uint8 tensor, copied on this thread alone.

    torch would split the copy over all cores; where several threads copy, they then wait for each other far longer than
    they copy.
    """
    import numpy as np
    import torch

    if rows.device.type != "cpu" or not rows.numel():  # NumPy's empty arrays have no strides
        return rows.clone(memory_format=torch.contiguous_format)
    return torch.from_numpy(np.array(rows.numpy(), order="C", copy=True))


def added(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elementwise sum of the shards, each of which has partial sums over its own elements of a row."""
    return sum(shards[1:], start=shards[0])


def dtype_of(schema: PointSchema) -> torch.dtype:
    """Return the torch dtype of a point's rows."""
    import torch

    dtype: torch.dtype = getattr(torch, schema.dtype)
    return dtype


ENCODINGS: Registry[Encoding] = Registry("encoding", sys.modules[__name__], Encoding)


def record_of(schemas: Sequence[PointSchema], coding: Coding = RAW) -> RecordShape:
    """Return the byte layout of a token's record of points with these schemas."""
    return ENCODINGS[coding.encoding].record(schemas, coding)


def codec_of(name: str, k: int | None = None, seed: int | None = None) -> Coding:
    """Return the encoding of a codec by its public name, with parameters.

    Args:
        name: name of the codec, such as "raw" or "topk8".
        k: number of values stored per row; None for the codec's default.
        seed: seed of the codec's matrix; None for 0.

    Raises:
        UnknownName: there is no such codec; the message lists the known ones.
        InvalidSpec: the codec has no such parameter.
    """
    codecs = {known: encoding for known, encoding in ENCODINGS.items() if encoding.is_codec}
    if name not in codecs:
        raise UnknownName(f"unknown codec {name!r}; {choices(name, codecs)}")
    parameters = (
        ("k", k, [known for known, codec in codecs.items() if codec.default_k]),
        ("seed", seed, [known for known, codec in codecs.items() if codec.seeded]),
    )
    for parameter, value, having in parameters:
        if value is not None and name not in having:
            raise InvalidSpec(
                f"codec_{parameter}={value} with codec={name!r}, which has no such parameter; "
                f"{', '.join(having)} have it"
            )
    return Coding(name, codecs[name].default_k if k is None else k, seed or 0)
