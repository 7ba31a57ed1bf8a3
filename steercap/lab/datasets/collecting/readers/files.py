"""Readers of Parquet, of Arrow files as `datasets.save_to_disk` writes them, of texts, and of JSON lines."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap.core.extras import extra
from steercap.errors import InvalidFile
from steercap.lab.datasets.collecting.readers import (
    KEYS,
    MOST_BYTES,
    RECORDS,
    Bad,
    FileItem,
    Reader,
    ReaderSettings,
    half_of_pair,
    lines,
    unpacked,
    utf8,
    values_of,
)


class Parquet(Reader):
    """Reader of Parquet files; only the needed column is read."""

    suffixes = (".parquet",)

    def items(self, path: Path, settings: ReaderSettings) -> Iterator[FileItem]:
        with extra("datasets"):
            import pyarrow as pa
            from pyarrow import parquet
        number, size = 0, path.stat().st_size
        try:
            with parquet.ParquetFile(path, memory_map=True) as file:
                column, rows = column_in(file.schema_arrow.names, settings, path), file.metadata.num_rows
                for batch in file.iter_batches(RECORDS, columns=[column]):
                    for value in values_of(batch.column(0)):
                        number += 1
                        yield FileItem(f"row {number}", value, size * number // rows)
        except (OSError, UnicodeEncodeError, pa.ArrowException) as error:
            raise InvalidFile(f"{path} cannot be read as Parquet after row {number}: {error}") from error

    def count(self, path: Path) -> int | None:
        with extra("datasets"):
            import pyarrow as pa
            from pyarrow import parquet
        try:
            return int(parquet.read_metadata(path).num_rows)
        except (OSError, UnicodeEncodeError, pa.ArrowException) as error:
            raise InvalidFile(f"{path} cannot be read as Parquet: {error}") from error


def column_in(names: Any, settings: ReaderSettings, path: Path) -> str:
    """Return `settings.column`, or if that is None the first of `KEYS` that is among a file's column `names`.

    Raises:
        InvalidFile: there is no such column.
    """
    wanted = KEYS if settings.column is None else (settings.column,)
    for name in wanted:
        if name in names:
            return name
    raise InvalidFile(
        f"{path} has columns {', '.join(map(repr, names))}, and none is {' or '.join(map(repr, wanted))}; give "
        "column=, the name of the one that holds documents"
    )


#: First bytes of files in the IPC file format, with batches listed at the end; others are streams.
_LISTED: Final = b"ARROW1"
#: Last bytes of a complete stream (https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format). A reader
#: also accepts the end of the file, wherever between two batches that is.
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"


class Arrow(Reader):
    """Reader of Arrow IPC files, in stream or file format."""

    suffixes = (".arrow",)

    def items(self, path: Path, settings: ReaderSettings) -> Iterator[FileItem]:
        with extra("datasets"):
            import pyarrow as pa
        number, size = 0, path.stat().st_size
        try:
            with pa.memory_map(str(path)) as mapped, _opened(path, mapped) as (schema, batches):
                place = schema.names.index(column_in(schema.names, settings, path))
                for batch, at in batches:
                    column = batch.column(place)
                    for first in range(0, len(column), RECORDS):
                        for value in values_of(column[first : first + RECORDS]):
                            number += 1
                            yield FileItem(f"row {number}", value, min(at, size))
        except (OSError, UnicodeEncodeError, pa.ArrowException) as error:
            raise InvalidFile(f"{path} cannot be read as Arrow after row {number}: {error}") from error


@contextmanager
def _opened(path: Path, mapped: Any) -> Iterator[tuple[Any, Iterator[tuple[Any, int]]]]:
    """Yield the schema, and an iterator of pairs: a record batch, and the bytes of the file up to its end.

    Raises:
        OSError: a stream is truncated.
    """
    with extra("datasets"):
        import pyarrow as pa
    if _is_listed(path):
        with pa.ipc.open_file(mapped) as found:
            count, size = found.num_record_batches, path.stat().st_size
            yield found.schema, ((found.get_batch(one), size * (one + 1) // count) for one in range(count))
    else:
        with pa.ipc.open_stream(mapped) as stream:
            yield stream.schema, ((batch, mapped.tell()) for batch in stream)


def _is_listed(path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(len(_LISTED)) == _LISTED:
            return True
        file.seek(max(0, path.stat().st_size - len(_END)))
        if file.read() != _END:
            raise OSError("it does not end as a stream of Arrow does: it is truncated")
        return False


class Texts(Reader):
    """Reader of UTF-8 text files; `.gz` and `.zst` too. Lines end with a newline, paragraphs with blank lines."""

    suffixes = (".txt", ".text")

    def items(self, path: Path, settings: ReaderSettings) -> Iterator[FileItem]:
        if settings.unit == "line":
            for number, line, read in lines(path):
                yield FileItem(f"line {number}", utf8(line), read)
        elif settings.unit == "paragraph":
            yield from _paragraphs(path)
        else:
            yield _whole(path)


def _whole(path: Path) -> FileItem:
    with unpacked(path) as (content, at):
        data = content.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InvalidFile(f"{path} is longer than {MOST_BYTES:,} bytes; read it by unit='line' or 'paragraph'")
        return FileItem("its text", utf8(data.removeprefix(BOM_UTF8)), at())


def _paragraphs(path: Path) -> Iterator[FileItem]:
    held: list[bytes] = []
    number, began, size, read = 0, 1, 0, 0
    with unpacked(path) as (content, at):
        while line := content.readline(MOST_BYTES):
            number += 1
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if line.strip():
                began = began if held else number
                held.append(line)
                size += len(line)
                if size >= MOST_BYTES:
                    raise InvalidFile(f"{path}, line {began} begins a paragraph of more than {MOST_BYTES:,} bytes")
            elif held:
                yield FileItem(f"line {began}", utf8(b"".join(held).rstrip(b"\r\n")), at())
                held, size = [], 0
        read = at()
    if held:
        yield FileItem(f"line {began}", utf8(b"".join(held).rstrip(b"\r\n")), read)


class JsonLines(Reader):
    """Reader of files with a JSON value per line; `.gz` and `.zst` too."""

    suffixes = (".jsonl", ".ndjson", ".json.lines")

    def items(self, path: Path, settings: ReaderSettings) -> Iterator[FileItem]:  # noqa: ARG002 -- what any of them needs
        decode = msgspec.json.Decoder().decode
        for number, line, read in lines(path):
            yield FileItem(f"line {number}", _value(decode, line), read)


def _value(decode: Any, line: bytes) -> Any:
    try:
        return decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Bad(_half_in(line) or f"no JSON: {error}")


def _half_in(line: bytes) -> str:
    """Return the message if an unpaired surrogate is all that is wrong with a line, else "".

    Python's own JSON decoder accepts such a line.
    """
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return half_of_pair(error)
    except (ValueError, RecursionError):
        pass
    return ""


MEMBERS: Final[Mapping[str, Reader]] = {
    "arrow": Arrow(),
    "jsonl": JsonLines(),
    "parquet": Parquet(),
    "text": Texts(),
}
