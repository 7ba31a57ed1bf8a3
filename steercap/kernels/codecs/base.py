"""What an encoding is: how a row becomes bytes of a record on the worker, and a row again on the client.

Rows are one rank's: of a point that is split, its shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from steercap.core.coding import Coding
from steercap.core.records import LINE_BYTES, RecordShape, record_shape

if TYPE_CHECKING:
    import torch

    from steercap.core.schema import PointSchema


class Reading(Protocol):
    """What rows are read by before they are stored: the encoder of an SAE."""

    @property
    def d_sae(self) -> int:
        """Numbers that it makes of a row."""

    def activations(self, rows: torch.Tensor) -> torch.Tensor:
        """What it makes of rows, [rows, width] of any floating dtype: float32 [rows, d_sae]."""


@dataclass(frozen=True)
class Alike:
    """Points of one layout whose rows are alike, on a device.

    Args:
        schema: of all of them.
        coding: how their rows are stored.
        points: line of each one's row in a record as it is computed, and its byte in what is stored: int64 [points, 2].
        directions: rows of the bank of the vectors of each, int64 [points, vectors]; None where there are none.
        reads: what their rows are read by first, or None.
    """

    schema: PointSchema
    coding: Coding
    points: torch.Tensor
    directions: torch.Tensor | None = None
    reads: Reading | None = None


class Encoding(ABC):
    """A form of rows between worker and client."""

    #: The offset of each row in its record is a multiple of this, in bytes.
    align: ClassVar[int] = LINE_BYTES
    #: Whether `CaptureSpec(codec=)` may name it; the others follow from `reduce=`, `project=` and `calibration=`.
    is_codec: ClassVar[bool] = False
    #: How many numbers stand for a row if `CaptureSpec(k=)` does not say; 0 where that is not open.
    default_k: ClassVar[int] = 0
    #: Whether elements are named by 16-bit indices.
    indexed: ClassVar[bool] = False
    #: Whether rows are projected with a matrix that follows from a seed.
    seeded: ClassVar[bool] = False

    @abstractmethod
    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        """Bytes of one encoded row."""

    @abstractmethod
    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        """Rows as they are stored, on the device they are on: the host's step, and what kernels are tested against.

        Args:
            rows: [rows, shard width], in the dtype that the model computes them in.
            schema: the point's.
            coding: the encoding's parameters.
            vectors: float32 [vectors, shard width] of this point, for encodings that need some; None for the others.

        Returns:
            uint8 [rows, row bytes].
        """

    @abstractmethod
    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        """What was stored, as the client hands it over.

        Args:
            stored: uint8 [rows, row bytes], contiguous; may be kept.
            schema: the point's.
            coding: the encoding's parameters.

        Returns:
            [rows, *shard shape], or [rows, k].
        """

    def takes(self, coding: Coding) -> bool:
        """Whether rows can be stored with these parameters."""
        return bool(coding.k) == bool(self.default_k)

    def vectors(self, coding: Coding) -> int:
        """How many vectors of each point it needs of the client; see `Configuration.reads`."""
        del coding
        return 0

    def matrix(self, width: int, coding: Coding) -> torch.Tensor | None:
        """The vectors that the encoding makes by itself, for whole rows of so many elements: float32 [k, width]."""
        del width, coding
        return None

    def launch(self, ring: torch.Tensor, records: torch.Tensor, alike: Alike, vectors: torch.Tensor) -> None:
        """Rows that wait in a ring on the device, stored in other lines of it: the device's step, after the pass.

        What is stored as it is computed has none.

        Args:
            ring: uint8 [lines, LINE_BYTES].
            records: first line of each record as it is computed, and as it is stored: int64 [records, 2].
            alike: which rows of them.
            vectors: the rank's part of the encoding's own `matrix`, [k, shard width] in the dtype of the rows; for
                encodings without one the bank, float32 [vectors, shard width], whose rows `alike.directions` names.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step on the device")

    def joined(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The shards of a point's rows, decoded and in the order of the ranks, as whole rows."""
        import torch

        return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=1)

    def record(self, schemas: Sequence[PointSchema], coding: Coding) -> RecordShape:
        """How a record of these points is laid out."""
        return record_shape([self.row_bytes(schema, coding) for schema in schemas], self.align)


class Codec(Encoding):
    """A lossy form of rows, whose parts the client keeps: codes, and what gives them their size."""

    align: ClassVar[int] = 8
    is_codec: ClassVar[bool] = True
    #: Names of the vectors of a point that rows are coded by, in the order of `encode`: float32 [width] each. They are
    #: not in what is stored; the client has them already, and puts them beside the parts.
    constants: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        """What was stored, by name: `q` are codes, `scale` their step, `zero` what the code 0 stands for.

        Args:
            stored: uint8 [rows, row bytes]; each row's bytes lie together.
            schema: the point's.
            coding: the codec's parameters.

        Returns:
            Tensors [rows, ...] in memory of their own.
        """

    @abstractmethod
    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        """Rows of such parts, and of the shard's part of `constants`: float32 [rows, *shard shape], or [rows, k]."""

    @abstractmethod
    def bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        """How far each element of `decoded` is off at most, but for its own rounding: float64, of its shape.

        Of codecs that project, from what a whole product is.
        """

    def damage(self, parts: Mapping[str, torch.Tensor], schema: PointSchema) -> str:
        """Why parts of the right shapes and dtypes cannot be the codec's, as files may be damaged; "" if they can."""
        del parts, schema
        return ""

    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        return self.decoded(self.parts(stored, schema, coding), schema, coding)


def packed(rows: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of bytes, made in this thread.

    torch would share it among all cores, with every thread that copies: on 16 cores the threads of a client then wait
    for each other far longer than they copy.
    """
    import numpy as np
    import torch

    if rows.device.type != "cpu" or not rows.numel():  # NumPy's empty arrays have no strides
        return rows.clone(memory_format=torch.contiguous_format)
    return torch.from_numpy(np.array(rows.numpy(), order="C", copy=True))


def added(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """What shards of products add up to."""
    return sum(shards[1:], start=shards[0])


def dtype_of(schema: PointSchema) -> torch.dtype:
    """The dtype of a point's rows, which a schema has by name."""
    import torch

    dtype: torch.dtype = getattr(torch, schema.dtype)
    return dtype
