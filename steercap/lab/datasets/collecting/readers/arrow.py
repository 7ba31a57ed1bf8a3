"""Reader of Arrow files, as written by Hugging Face's `datasets.save_to_disk`: a document a row, memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from steercap.core.extras import extra
from steercap.errors import InvalidFile
from steercap.lab.datasets.collecting.readers import RECORDS, FileItem, Reader, ReaderSettings, values_of
from steercap.lab.datasets.collecting.readers.parquet import column_in

#: First bytes of files in the IPC file format, with batches listed at the end; others are streams.
_LISTED: Final = b"ARROW1"
#: Last bytes of a complete stream (https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format). A reader
#: also accepts the end of the file, wherever between two batches that is.
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"


class Arrow(Reader):
    """Reader of Arrow IPC files, in stream or file format."""

    suffixes = (".arrow",)

    def items(self, path: Path, asked: ReaderSettings) -> Iterator[FileItem]:
        with extra("datasets"):
            import pyarrow as pa
        number, size = 0, path.stat().st_size
        try:
            with pa.memory_map(str(path)) as mapped, _opened(path, mapped) as (schema, batches):
                place = schema.names.index(column_in(schema.names, asked, path))
                for batch, at in batches:
                    column = batch.column(place)
                    for first in range(0, len(column), RECORDS):
                        for value in values_of(column[first : first + RECORDS]):
                            number += 1
                            yield FileItem(f"row {number}", value, min(at, size))
        except (OSError, UnicodeEncodeError, pa.ArrowException) as error:
            raise InvalidFile(f"{path} cannot be read as Arrow, behind row {number}: {error}") from error


@contextmanager
def _opened(path: Path, mapped: Any) -> Iterator[tuple[Any, Iterator[tuple[Any, int]]]]:
    """Yield the schema, and an iterator of batches, each with the bytes of the file up to its end.

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


MEMBER = Arrow()
