"""A sweep's folder: its definition, answers and values as they come, in Parquet parts that appear whole or not at all.

sweep.json                            what the answers depend on
answers/00007-3f2a9c.parquet          answers, some hundreds a part; one part when all are there
values/repetition-5d41/...            numbers of one measure, by the number of the answer
results.parquet                       both in one table, when all is there
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from steercap.errors import InvalidFile, RunDiffers
from steercap.experiments.grid import Condition, Definition, Request
from steercap.experiments.measures.base import Answered, Measure
from steercap.formats.base import write_whole
from steercap.tables import read_table, write_table

#: Seconds between parts: what a killed process loses at most. A part takes some milliseconds to write.
FLUSH_SECONDS: Final = 2.0


class Record(Answered, frozen=True, kw_only=True):
    """One answer of a sweep, and how it was had; see `Condition` and `Answered`.

    Args:
        number: its place in the sweep.
        prompt_index, sample: which prompt, and which answer to it.
        finish_reason: why it ended, as vLLM says it: "stop" or "length".
    """

    number: int
    vector: str
    operation: str
    layers: tuple[int, ...]
    scale: float
    control: str
    prompt_index: int
    sample: int
    finish_reason: str

    @property
    def condition(self) -> Condition:
        """How it was steered."""
        return Condition(
            vector=self.vector,
            operation=self.operation,
            layers=self.layers,
            scale=self.scale,
            control=self.control,
        )

    def answers(self, request: Request) -> bool:
        """Whether it is the answer to a request."""
        asked = (request.number, request.condition, request.prompt, request.sample)
        return (self.number, self.condition, self.prompt_index, self.sample) == asked


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """What a measure said of one answer.

    Args:
        number: place of the answer in the sweep.
        value: what was measured, NaN where there was nothing.
    """

    number: int
    value: float


Row = TypeVar("Row", Record, Value)


class Parts(Generic[Row]):
    """Rows of one kind in a folder of parts; a row that is there twice is there once.

    Args:
        folder: where.
        kind: type of the rows.

    Raises:
        InvalidFile: a part that is something else.
    """

    def __init__(self, folder: Path, kind: type[Row]) -> None:
        self._folder = folder
        self._waiting: list[Row] = []
        self._flushed = time.monotonic()
        self.rows: dict[int, Row] = {}
        for path in self._paths():
            self.rows |= {row.number: row for row in read_table(path, kind)}

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows, and write a part if the last one is some time ago."""
        new = list(rows)
        self.rows |= {row.number: row for row in new}
        self._waiting += new
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was not written yet."""
        if self._waiting:
            self._write(self._waiting)
            self._waiting = []
        self._flushed = time.monotonic()

    def join(self) -> None:
        """Make one part of all."""
        self.flush()
        before = self._paths()
        if len(before) > 1:
            self._write([self.rows[number] for number in sorted(self.rows)])
            for path in before:
                path.unlink()

    def _write(self, rows: list[Row]) -> None:
        # A name of its own: two processes that were started on one folder by mistake lose nothing.
        write_table(self._folder / f"{len(self._paths()):05}-{uuid.uuid4().hex[:6]}.parquet", rows)

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("*.parquet"))


class Folder:
    """The folder of one sweep.

    Args:
        path: the folder, made if it is not there.
        definition: of the sweep.

    Raises:
        RunDiffers: a sweep of another definition is in it.
        InvalidFile: its sweep.json cannot be read.
    """

    def __init__(self, path: str | Path, definition: Definition) -> None:
        self.path = Path(path)
        file = self.path / "sweep.json"
        if file.exists():
            _compare(file, definition)
        else:
            with write_whole(file) as scratch:
                scratch.write_bytes(msgspec.json.format(msgspec.json.encode(definition)))
        self.answers: Parts[Record] = Parts(self.path / "answers", Record)

    def values(self, measure: Measure) -> Parts[Value]:
        """What is kept of one measure; made otherwise, it is another."""
        digest = hashlib.sha256(repr(measure).encode()).hexdigest()[:8]
        name = "".join(letter if letter.isalnum() else "-" for letter in measure.label)
        return Parts(self.path / "values" / f"{name}-{digest}", Value)


def _compare(file: Path, definition: Definition) -> None:
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=Definition)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidFile(f"{file} cannot be read as the definition of a sweep: {error}") from error
    differ = [name for name in Definition.__struct_fields__ if getattr(kept, name) != getattr(definition, name)]
    if differ:
        said = "; ".join(
            f"{name} was {_short(getattr(kept, name))}, is {_short(getattr(definition, name))}" for name in differ
        )
        raise RunDiffers(
            f"{file.parent} holds another sweep: {said}; give another folder, or the sweep it was begun with"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
