"""What an encoding is: how a row becomes bytes of a record on the worker, and a row again on the client.

Rows are one rank's: of a point that is split, its shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from steercap.core.records import LINE_BYTES, RecordShape, record_shape

if TYPE_CHECKING:
    import torch

    from steercap.core.schema import PointSchema


@dataclass(frozen=True)
class Alike:
    """Points of one layout whose rows are alike, on a device.

    Args:
        schema: of all of them.
        points: line of each one's row in a record as it is computed, and its byte in what is stored: int64 [points, 2].
        directions: rows of the bank of the directions of each, int64 [points, numbers]; None where there are none.
    """

    schema: PointSchema
    points: torch.Tensor
    directions: torch.Tensor | None


class Encoding(ABC):
    """A form of rows between worker and client."""

    #: The offset of each row in its record is a multiple of this, in bytes.
    align: ClassVar[int] = LINE_BYTES
    #: Whether `CaptureSpec(codec=)` may name it; the others follow from `reduce=` and `project=`.
    is_codec: ClassVar[bool] = False

    @abstractmethod
    def row_bytes(self, schema: PointSchema, numbers: int) -> int:
        """Bytes of one encoded row.

        Args:
            schema: the point's.
            numbers: how many numbers stand for a row, where the encoding leaves that open; 0 elsewhere.
        """

    @abstractmethod
    def encode(self, rows: torch.Tensor, schema: PointSchema, directions: torch.Tensor | None) -> torch.Tensor:
        """Rows as they are stored, on the device they are on: the host's step, and what kernels are tested against.

        Args:
            rows: [rows, shard width], in the dtype that the model computes them in.
            schema: the point's.
            directions: float32 [numbers, shard width] of this point, for encodings that project; None for the others.

        Returns:
            uint8 [rows, row bytes].
        """

    @abstractmethod
    def decode(self, stored: torch.Tensor, schema: PointSchema, numbers: int) -> torch.Tensor:
        """What was stored, as the client hands it over.

        Args:
            stored: uint8 [rows, row bytes], contiguous; may be kept.
            schema, numbers: as for `row_bytes`.

        Returns:
            [rows, *shard shape], or [rows, numbers].
        """

    def launch(self, ring: torch.Tensor, records: torch.Tensor, alike: Alike, bank: torch.Tensor) -> None:
        """Rows that wait in a ring on the device, stored in other lines of it: the device's step, after the pass.

        What is stored as it is computed has none.

        Args:
            ring: uint8 [lines, LINE_BYTES].
            records: first line of each record as it is computed, and as it is stored: int64 [records, 2].
            alike: which rows of them.
            bank: float32 [vectors, shard width], what directions are rows of.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step on the device")

    def joined(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The shards of a point's rows, in the order of the ranks, as whole rows."""
        import torch

        return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=1)

    def record(self, schemas: Sequence[PointSchema], numbers: int = 0) -> RecordShape:
        """How a record of these points is laid out."""
        return record_shape([self.row_bytes(schema, numbers) for schema in schemas], self.align)


def dtype_of(schema: PointSchema) -> torch.dtype:
    """The dtype of a point's rows, which a schema has by name."""
    import torch

    dtype: torch.dtype = getattr(torch, schema.dtype)
    return dtype
