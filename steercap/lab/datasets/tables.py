"""Parquet tables of a data set: the index that labels rows, and the table of points and their tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steercap.core.display import brief
from steercap.core.extras import extra
from steercap.errors import InvalidFile, InvalidRequest
from steercap.lab.datasets.definition import PointFormat

#: Columns of an index, with their dtypes. Each row is a token whose rows were kept; `offset` is their index in
#: the shard's tensors.
COLUMNS: Final[Mapping[str, np.dtype[Any]]] = {
    "document": np.dtype(np.int64),
    "window": np.dtype(np.int32),
    "position": np.dtype(np.int32),
    "token": np.dtype(np.int32),
}
OFFSET: Final = "offset"
#: Arrow's writer name in a file's metadata.
_ARROW: Final = re.compile(r"parquet-cpp-arrow version \d+\.\d+\.\d+(-\w+)?")


@dataclass(frozen=True, eq=False)
class Index:
    """Labels of rows: document, window, position and token of each.

    Args:
        document: number of the document in its source: int64 [rows].
        window: number of the window in the document, a sequence of its own to the model: int32 [rows].
        position: position in the window, as the model read it: int32 [rows].
        token: token ids: int32 [rows].

    Raises:
        InvalidRequest: the columns have different lengths.
    """

    document: NDArray[np.int64]
    window: NDArray[np.int32]
    position: NDArray[np.int32]
    token: NDArray[np.int32]

    __repr__ = brief

    def __post_init__(self) -> None:
        for name, dtype in COLUMNS.items():
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=dtype))
        if len({getattr(self, name).shape for name in COLUMNS}) != 1 or self.document.ndim != 1:
            raise InvalidRequest("an index must have a document, a window, a position and a token for each row")

    def __len__(self) -> int:
        return len(self.document)

    def __getitem__(self, rows: Any) -> Index:
        """Return some of the rows, by a slice, a mask or indices."""
        return Index(*(getattr(self, name)[rows] for name in COLUMNS))


def encoded_index(index: Index) -> memoryview:
    """Return the bytes of a Parquet file with the columns of an index, and `offset`, the numbers from 0."""
    with extra("datasets"):
        import pyarrow as pa

    columns = {name: pa.array(getattr(index, name)) for name in COLUMNS}
    return _encoded(pa.table({**columns, OFFSET: pa.array(np.arange(len(index), dtype=np.int64))}))


def decoded_index(content: bytes, path: str) -> Index:
    """Decode an index from the bytes of a Parquet file; `path` is the file's name in errors.

    Raises:
        InvalidFile: the file is not Parquet, has other columns, or its offsets do not count from 0.
    """
    with extra("datasets"):
        import pyarrow as pa
        from pyarrow import parquet

    try:
        table = parquet.read_table(pa.BufferReader(content))
        index = Index(*(table[name].to_numpy() for name in COLUMNS))
        if not np.array_equal(table[OFFSET].to_numpy(), np.arange(len(index))):
            raise InvalidFile(f"{path} lists rows in another order than that of the shard; collect the data set again")
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        if isinstance(error, InvalidFile):
            raise
        raise InvalidFile(f"{path} is not the index of a shard: {error}; copy it again, or collect it again") from error
    return index


def encoded_points(points: Sequence[PointFormat]) -> memoryview:
    """Return the bytes of `points.parquet`, a table for other tools with a row per tensor of a shard."""
    with extra("datasets"):
        import pyarrow as pa

    # Not compressed: with one release of Arrow it has the same bytes everywhere, whatever zstd that was built with.
    return _encoded(pa.Table.from_pylist(points_table(points)), "none")


def points_table(points: Sequence[PointFormat]) -> list[dict[str, Any]]:
    """Return the rows of `points.parquet`: a dict per tensor of each point, with its name, codec, dtype and shape."""
    return [_tensor_row(point, part) for point in points for part in point.tensors]


def holds_points(content: bytes, points: Sequence[PointFormat]) -> bool:
    """Return whether `content` is the `points.parquet` of these points, perhaps written by another release of Arrow."""
    with extra("datasets"):
        import pyarrow as pa
        from pyarrow import parquet

    wanted = bytes(encoded_points(points))
    if content == wanted:
        return True
    try:
        found, ours = (parquet.ParquetFile(pa.BufferReader(one)) for one in (content, wanted))
        writer = found.metadata.created_by or ""
        if writer == ours.metadata.created_by or not _ARROW.fullmatch(writer):  # damaged, though Arrow may not notice
            return False
        return bool(found.read().to_pylist() == points_table(points))
    except (OSError, ValueError, pa.ArrowException):
        return False


def _tensor_row(point: PointFormat, part: str) -> dict[str, Any]:
    codec, parameters = point.coded
    shape, dtype = point.tensors[part]
    return {
        "point": str(point.point),
        "layer": point.layer,
        "site": point.site,
        "part": part,
        "tensor": f"{part}{point.end}",
        "codec": codec,
        "parameters": json.dumps(dict(parameters)),
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "row_shape": list(point.schema.shape),
        "row_bytes": point.row_bytes,
    }


def _encoded(table: Any, compression: str = "zstd") -> memoryview:
    with extra("datasets"):
        import pyarrow as pa
        from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression=compression)
    return memoryview(sink.getvalue())
