"""Records as Parquet tables: what pipelines and experiments write down, and what anybody can open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from steercap.errors import InvalidFile
from steercap.formats.base import write_whole

Record = TypeVar("Record", bound=msgspec.Struct)


def write_table(path: str | Path, records: Sequence[msgspec.Struct]) -> Path:
    """Write records of one kind, a row each; the file appears whole or not at all.

    Args:
        path: the file.
        records: msgspec Structs of one type, of text, numbers, and lists or mappings of these.
    """
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.Table.from_pylist([msgspec.to_builtins(record) for record in records])
    with write_whole(Path(path)) as scratch:
        parquet.write_table(table, scratch)
    return Path(path)


def read_table(path: str | Path, kind: type[Record]) -> list[Record]:
    """Read what `write_table` wrote.

    Args:
        path: the file.
        kind: the type of the records.

    Raises:
        InvalidFile: no such file, no Parquet, or a table of something else.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        rows = parquet.read_table(Path(path)).to_pylist()
        return msgspec.convert(rows, list[kind])  # type: ignore[valid-type]
    except (OSError, pa.ArrowException, msgspec.ValidationError) as error:
        raise InvalidFile(f"{path} is no table of {kind.__name__}: {error}") from error
