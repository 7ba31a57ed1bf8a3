"""Encodings of rows: interface and registry. To add one, add a file with a `MEMBER`, or an entry of its `MEMBERS`.

The worker encodes rows to bytes of a record, the client decodes them. Rows are one rank's: for a point that is split
over ranks, its shard.
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

#: Maximum number of elements that 16-bit indices can address.
MOST_INDEXED: Final = 1 << 16


class Reading(Protocol):
    """Encoder of an SAE, which reads rows before they are stored."""

    @property
    def d_sae(self) -> int:
        """Number of features."""

    def activations(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the features of rows, [rows, width] of any floating dtype: float32 [rows, d_sae]."""


@dataclass(frozen=True)
class Alike:
    """Points of one layout with equal schemas, on a device.

    Args:
        schema: schema of all these points.
        coding: encoding of their rows.
        points: line of each point's row in a raw record, and its byte in the stored record: int64 [points, 2].
        directions: bank rows of the vectors of each point, int64 [points, vectors]; None if there are none.
        reads: SAE encoder that reads the rows first, or None.
    """

    schema: PointSchema
    coding: Coding
    points: torch.Tensor
    directions: torch.Tensor | None = None
    reads: Reading | None = None


class Encoding(ABC):
    """Encoding of rows between worker and client."""

    #: Alignment of each row's offset in its record, in bytes.
    align: ClassVar[int] = LINE_BYTES
    #: True if `CaptureSpec(codec=)` may name it; the others follow from `reduce=`, `project=` and `calibration=`.
    is_codec: ClassVar[bool] = False
    #: Numbers stored per row if `CaptureSpec(k=)` is not given; 0 if the encoding has no `k`.
    default_k: ClassVar[int] = 0
    #: True if elements are named by 16-bit indices.
    indexed: ClassVar[bool] = False
    #: True if rows are projected with a matrix that is generated from a seed.
    seeded: ClassVar[bool] = False

    @abstractmethod
    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        """Return the bytes of one encoded row."""

    @abstractmethod
    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        """Encode rows on the device they are on; the host uses this, and kernels are tested against it.

        Args:
            rows: [rows, shard width], in the model's dtype.
            schema: schema of the point.
            coding: parameters of the encoding.
            vectors: float32 [vectors, shard width] of this point, for encodings that need vectors; None for the others.

        Returns:
            uint8 [rows, row bytes].
        """

    @abstractmethod
    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        """Decode stored rows to the form that the client returns.

        Args:
            stored: uint8 [rows, row bytes], contiguous; may be kept.
            schema: schema of the point.
            coding: parameters of the encoding.

        Returns:
            [rows, *shard shape], or [rows, k].
        """

    def takes(self, coding: Coding) -> bool:
        """Return whether the encoding accepts these parameters."""
        return bool(coding.k) == bool(self.default_k)

    def vectors(self, coding: Coding) -> int:
        """Return the number of vectors per point that the client must send; see `Configuration.reads`."""
        del coding
        return 0

    def matrix(self, width: int, coding: Coding) -> torch.Tensor | None:
        """Return the encoding's own vectors for rows of `width` elements, float32 [k, width]; None if it has none."""
        del width, coding
        return None

    def launch(self, ring: torch.Tensor, records: torch.Tensor, alike: Alike, vectors: torch.Tensor) -> None:
        """Encode rows in the device's ring, after the pass, into other lines of the ring.

        Not called for encodings that store rows as they are computed.

        Args:
            ring: uint8 [lines, LINE_BYTES].
            records: first line of each raw record, and of its stored record: int64 [records, 2].
            alike: points to encode.
            vectors: the rank's part of the encoding's own `matrix`, [k, shard width] in the dtype of the rows; for
                encodings without one the bank, float32 [vectors, shard width], of which `alike.directions` names rows.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step on the device")

    def joined(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the decoded shards of a point's rows, in the order of the ranks, to whole rows."""
        import torch

        return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=1)

    def record(self, schemas: Sequence[PointSchema], coding: Coding) -> RecordShape:
        """Return the layout of a record of these points."""
        return record_shape([self.row_bytes(schema, coding) for schema in schemas], self.align)


class Codec(Encoding):
    """Lossy codec, whose codes, scales and other parts the client keeps."""

    align: ClassVar[int] = 8
    is_codec: ClassVar[bool] = True
    #: Names of a point's vectors that `encode` takes, in order: float32 [width] each. They are not
    #: stored with the rows; the client has them already, and adds them to the parts.
    constants: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        """Split stored rows into named parts: `q` are codes, `scale` their step, `zero` the value of code 0.

        Args:
            stored: uint8 [rows, row bytes]; each row's bytes lie together.
            schema: schema of the point.
            coding: parameters of the codec.

        Returns:
            Tensors [rows, ...] that own their memory.
        """

    @abstractmethod
    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        """Decode parts, and the shard's part of `constants`: float32 [rows, *shard shape], or [rows, k]."""

    @abstractmethod
    def bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        """Return an upper bound of each element's error in `decoded`, its own rounding aside: float64, of its shape.

        For codecs that project, the error is that of the projection.
        """

    def damage(self, parts: Mapping[str, torch.Tensor], schema: PointSchema) -> str:
        """Return why parts of the right shapes and dtypes, as from a damaged file, are invalid; "" if valid."""
        del parts, schema
        return ""

    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        return self.decoded(self.parts(stored, schema, coding), schema, coding)


def packed(rows: torch.Tensor) -> torch.Tensor:
    """Make a contiguous copy of bytes, on this thread.

    torch would split the copy over all cores, as would every other thread that copies: on 16 cores the threads of a
    client then wait for each other far longer than they copy.
    """
    import numpy as np
    import torch

    if rows.device.type != "cpu" or not rows.numel():  # NumPy's empty arrays have no strides
        return rows.clone(memory_format=torch.contiguous_format)
    return torch.from_numpy(np.array(rows.numpy(), order="C", copy=True))


def added(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elementwise sum of the shards, each of which holds partial sums over its own elements of a row."""
    return sum(shards[1:], start=shards[0])


def dtype_of(schema: PointSchema) -> torch.dtype:
    """Return the dtype of a point's rows, which a schema stores as a name."""
    import torch

    dtype: torch.dtype = getattr(torch, schema.dtype)
    return dtype


ENCODINGS: Registry[Encoding] = Registry("encoding", sys.modules[__name__], Encoding)


def record_of(schemas: Sequence[PointSchema], coding: Coding = RAW) -> RecordShape:
    """Return the layout of a token's record of these points."""
    return ENCODINGS[coding.encoding].record(schemas, coding)


def codec_of(name: str, k: int | None = None, seed: int | None = None) -> Coding:
    """Return a codec by its public name, with its parameters.

    Args:
        name: name of the codec.
        k: numbers stored per row; None for the codec's default.
        seed: seed of its matrix; None for 0.

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
                f"{parameter}={value} with codec={name!r}, which has no such parameter; {', '.join(having)} have it"
            )
    return Coding(name, codecs[name].default_k if k is None else k, seed or 0)
