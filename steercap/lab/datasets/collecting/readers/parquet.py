"""Reader of Parquet: a document a row, read row group by row group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steercap.core.extras import extra
from steercap.errors import InvalidFile
from steercap.lab.datasets.collecting.readers import KEYS, RECORDS, FileItem, Reader, ReaderSettings, values_of


class Parquet(Reader):
    """Reader of Parquet files; only the needed column is read."""

    suffixes = (".parquet",)

    def items(self, path: Path, asked: ReaderSettings) -> Iterator[FileItem]:
        with extra("datasets"):
            import pyarrow as pa
            from pyarrow import parquet
        number, size = 0, path.stat().st_size
        try:
            with parquet.ParquetFile(path, memory_map=True) as file:
                column, rows = column_in(file.schema_arrow.names, asked, path), file.metadata.num_rows
                for batch in file.iter_batches(RECORDS, columns=[column]):
                    for value in values_of(batch.column(0)):
                        number += 1
                        yield FileItem(f"row {number}", value, size * number // rows)
        except (OSError, UnicodeEncodeError, pa.ArrowException) as error:
            raise InvalidFile(f"{path} cannot be read as Parquet, behind row {number}: {error}") from error

    def count(self, path: Path) -> int | None:
        with extra("datasets"):
            import pyarrow as pa
            from pyarrow import parquet
        try:
            return int(parquet.read_metadata(path).num_rows)
        except (OSError, UnicodeEncodeError, pa.ArrowException) as error:
            raise InvalidFile(f"{path} cannot be read as Parquet: {error}") from error


def column_in(names: Any, asked: ReaderSettings, path: Path) -> str:
    """Return the name of the column that holds documents.

    Raises:
        InvalidFile: there is no such column.
    """
    wanted = KEYS if asked.column is None else (asked.column,)
    for name in wanted:
        if name in names:
            return name
    raise InvalidFile(
        f"{path} has columns {', '.join(map(repr, names))}, and none is {' or '.join(map(repr, wanted))}; "
        "name the one that holds documents by column="
    )


MEMBER = Parquet()
