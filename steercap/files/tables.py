"""Parquet tables of records (msgspec Structs), written by pipelines and experiments; reader of YAML files."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from steercap.core.extras import extra
from steercap.errors import InvalidFile
from steercap.files.base import check_extension, require_file, write_whole

if TYPE_CHECKING:
    import pyarrow as pa

AnyRecord = TypeVar("AnyRecord", bound=msgspec.Struct)

#: Records of a full part, and seconds until a smaller part is written: a kill loses no more than these.
PART_RECORDS, PART_SECONDS = 32, 5.0


def write_table(path: str | Path, records: Sequence[msgspec.Struct]) -> Path:
    """Write records of one type to a Parquet file, one row each, whole or not at all; return its path.

    Records are msgspec Structs of text, numbers, and lists of these. Mappings must have the same keys in all records.

    Raises:
        InvalidFile: the name has another extension than .parquet.
    """
    return save_table(path, table_of(records))


def table_of(records: Sequence[msgspec.Struct], columns: Mapping[str, Sequence[float]] | None = None) -> pa.Table:
    """Return records of one type as a pyarrow Table, one row each; `columns` are further columns, by name."""
    with extra("experiments", "evaluation", "personas"):
        import pyarrow as pa

    rows = [msgspec.to_builtins(record) for record in records]
    for name, values in (columns or {}).items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    found = pa.Table.from_pylist(rows)
    for field in msgspec.structs.fields(records[0]) if records else ():
        # A column of nothing but None has no type, and cannot be joined with that of another file.
        if field.type == float | None and pa.types.is_null(found.schema.field(field.encode_name).type):
            at = found.column_names.index(field.encode_name)
            found = found.set_column(at, field.encode_name, pa.nulls(len(found), pa.float64()))
    return found


def save_table(path: str | Path, table: pa.Table) -> Path:
    """Write a pyarrow Table to a Parquet file, whole or not at all; return its path.

    Raises:
        InvalidFile: the name has another extension than .parquet.
    """
    with extra("experiments", "evaluation", "personas"):
        from pyarrow import parquet

    check_extension(Path(path), ".parquet")
    with write_whole(Path(path)) as scratch:
        parquet.write_table(table, scratch)
    return Path(path)


def export_table(path: str | Path, table: pa.Table) -> Path:
    """Write a pyarrow Table to a `.parquet` or `.csv` file, whole or not at all; return its path.

    Raises:
        InvalidFile: the name has another extension.
    """
    with extra("analysis", "experiments"):
        from pyarrow import csv, parquet

    writers = {".parquet": parquet.write_table, ".csv": csv.write_csv}
    if Path(path).suffix not in writers:
        raise InvalidFile(f"{path} must end in one of {', '.join(writers)}, which says the format")
    with write_whole(Path(path)) as scratch:
        writers[Path(path).suffix](table, scratch)
    return Path(path)


def read_table(path: str | Path, kind: type[AnyRecord]) -> list[AnyRecord]:
    """Read a table that `write_table` wrote, as records of a type.

    Raises:
        InvalidFile: the file is missing, no Parquet, or a table of another type.
    """
    with extra("experiments", "evaluation", "personas"):
        import pyarrow as pa
        from pyarrow import parquet

    require_file(Path(path))
    try:
        rows = parquet.read_table(Path(path)).to_pylist()
        return msgspec.convert(rows, list[kind])  # type: ignore[valid-type]
    except (OSError, pa.ArrowException, msgspec.ValidationError) as error:
        raise InvalidFile(f"{path} is not a table of {kind.__name__}: {error}") from error


def read_yaml(path: Path) -> Any:
    """Read the value of a YAML file, in plain types; None if it holds none.

    Raises:
        InvalidFile: the file is missing or not YAML, or has a key twice in one mapping.
    """
    with extra("experiments", "evaluation", "personas"):
        import yaml
    if not path.is_file():  # an empty one holds no value
        require_file(path)
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(path.read_bytes())
        root = loader.get_single_node()
        twice = _key_twice(root)
        found = None if root is None else loader.construct_document(root)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidFile(f"{path} cannot be read as YAML: {error}") from error
    if twice:
        raise InvalidFile(f"{path} has {twice} twice in one mapping, of which YAML would read the last; leave one out")
    return found


def _key_twice(root: Any) -> str:
    """Return a key that a mapping within a YAML node has twice, with its line, or "" if there is none."""
    nodes, seen = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen or isinstance(getattr(node, "value", None), str | None):  # an alias, or no collection
            continue
        seen.add(id(node))
        pairs = [one if isinstance(one, tuple) else (None, one) for one in node.value]
        nodes += [value for _, value in pairs]
        keys = set[tuple[str, str]]()
        for key in [key for key, _ in pairs if key is not None and isinstance(key.value, str)]:
            if (key.tag, key.value) in keys:
                return f"{key.value!r} (line {key.start_mark.line + 1})"
            keys.add((key.tag, key.value))
    return ""


class TableWriter(Generic[AnyRecord]):
    """Append-only table in a folder, written in parts as records are added; leaving the context writes the last part.

    Args:
        folder: folder of the parts.
        kind: type of the records.
        records: number of records of a full part.
        seconds: seconds until a part is written with fewer records.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        kind: type[AnyRecord],
        *,
        records: int = PART_RECORDS,
        seconds: float = PART_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self._kind = folder, kind
        self._records, self._seconds, self._clock = records, seconds, clock
        self._waiting: list[AnyRecord] = []
        self._due: asyncio.TimerHandle | None = None
        self._written = clock()

    def read(self) -> list[AnyRecord]:
        """Read all written records, the parts in the order in which they were written."""
        return [record for path in self.paths() for record in read_table(path, self._kind)]

    def add(self, record: AnyRecord) -> None:
        """Add a record; write a part if it is full, or some seconds after the last part was written."""
        self._waiting.append(record)
        if len(self._waiting) >= self._records or self._clock() - self._written >= self._seconds:
            self.flush()
        elif self._due is None:
            self._due = _later(self._seconds, self.flush)

    def flush(self) -> None:
        """Write the records that were added since the last part as a part."""
        if self._due is not None:
            self._due.cancel()
        self._due, self._written = None, self._clock()
        if self._waiting:
            self._write(self._waiting)
            self._waiting = []

    def replace(self, records: Sequence[AnyRecord]) -> None:
        """Replace all parts by one with the given records, or by none if there are none."""
        before = self.paths()
        if records:
            self._write(records)
        for path in before:
            path.unlink()

    def __enter__(self) -> TableWriter[AnyRecord]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    def _write(self, records: Sequence[AnyRecord]) -> None:
        # A unique name: two processes that were started on one folder by mistake lose nothing.
        number = max(map(_number_of, self.paths()), default=-1) + 1
        write_table(self.folder / f"{number:05}-{uuid.uuid4().hex[:8]}.parquet", records)

    def paths(self) -> list[Path]:
        """Return the paths of the parts, in the order in which they were written."""
        return sorted(self.folder.glob("*.parquet"), key=lambda path: (_number_of(path), path.name))


def _number_of(part: Path) -> int:
    """Return the number of a part: 7 for "00007-3f2a9c4e.parquet", -1 for a file of another name."""
    number = part.name.partition("-")[0]
    return int(number) if number.isdecimal() else -1


def _later(seconds: float, work: Callable[[], None]) -> asyncio.TimerHandle | None:
    """Schedule a call in `seconds` in the running event loop; return None if no loop runs."""
    try:
        return asyncio.get_running_loop().call_later(seconds, work)
    except RuntimeError:
        return None
