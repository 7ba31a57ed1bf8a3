"""Folder of a sweep: its definition, answers and values, in Parquet parts that are written atomically.

sweep.json                            inputs of the answers
answers/00007-3f2a9c.parquet          answers, some hundreds a part; one part when all are there
values/repetition-5d41/...            numbers of one measure, by the number of the answer
results.parquet                       both in one table, when the sweep is complete
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from steercap.files.folder import FolderKind
from steercap.files.tables import TableWriter
from steercap.lab.measures.base import Answered, Measure
from steercap.lab.studies.sweeps.grid import Condition, Definition, Request, Sweep

#: Seconds between parts, the most that a killed process loses. A part takes some milliseconds to write.
FLUSH_SECONDS: Final = 2.0
#: Rows of a part at most.
PART_RECORDS: Final = 1024


class Record(Answered, frozen=True, kw_only=True):
    """Answer of a sweep, with its condition; see `Condition` and `Answered`.

    Args:
        number: number in the sweep.
        prompt_index, sample: index of the prompt, and of the answer to it.
        finish_reason: vLLM's finish reason: "stop" or "length".
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
        """Condition by which it was steered."""
        return Condition(
            vector=self.vector,
            operation=self.operation,
            layers=self.layers,
            scale=self.scale,
            control=self.control,
        )

    def answers(self, request: Request) -> bool:
        """Return True if it is the answer to a request."""
        asked = (request.number, request.condition, request.prompt, request.sample)
        return (self.number, self.condition, self.prompt_index, self.sample) == asked


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a measure for one answer.

    Args:
        number: number of the answer in the sweep.
        value: measured value, NaN if nothing could be measured.
    """

    number: int
    value: float


Row = TypeVar("Row", bound=msgspec.Struct)
#: Key of a row.
NUMBER: Final[Callable[[Any], int]] = attrgetter("number")


class Table(Generic[Row]):
    """Table of rows by number: those stored in a folder and those added; a number is kept once.

    Args:
        folder: folder of their parts.
        kind: type of the rows, with a field `number`.

    Raises:
        InvalidFile: a part holds something else.
    """

    def __init__(self, folder: Path, kind: type[Row]) -> None:
        self._parts: TableWriter[Row] = TableWriter(folder, kind, records=PART_RECORDS, seconds=FLUSH_SECONDS)
        self.rows: dict[int, Row] = {NUMBER(row): row for row in self._parts.read()}

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows; they are written soon."""
        for row in rows:
            self.rows[NUMBER(row)] = row
            self._parts.add(row)

    def flush(self) -> None:
        """Write the rows that were not written yet."""
        self._parts.flush()

    def join(self) -> None:
        """Rewrite all parts as one."""
        self.flush()
        self._parts.replace([self.rows[number] for number in sorted(self.rows)])


class Folder:
    """Folder of one sweep.

    Args:
        path: the folder, created if needed.
        definition: definition of the sweep.

    Raises:
        RunDiffers: the folder holds a sweep of another definition.
        InvalidFile: its sweep.json cannot be read.
    """

    def __init__(self, path: str | Path, definition: Definition) -> None:
        self.path = Path(path)
        if SWEEP.open(self.path, definition) is None:
            SWEEP.write(self.path, definition)
        self.answers: Table[Record] = Table(self.path / "answers", Record)

    def values(self, measure: Measure) -> Table[Value]:
        """Return the table of values of a measure; one with other arguments has another table."""
        return Table(self.path / "values" / folder_of(measure.label, measure), Value)


def folder_of(label: str, made: object) -> str:
    """Return the name of the folder of a measure's values.

    Args:
        label: label of the measure.
        made: the measure, whose `repr` identifies it.
    """
    digest = hashlib.sha256(repr(made).encode()).hexdigest()[:8]
    return f"{''.join(letter if letter.isalnum() else '-' for letter in label)}-{digest}"


def check_same(path: str | Path, sweep: Sweep) -> None:
    """Check that a folder holds no other sweep; the model is not compared.

    Args:
        path: the folder, which need not exist.
        sweep: sweep to run.

    Raises:
        RunDiffers, InvalidFile: as for `Folder`.
    """
    SWEEP.check_same(path, lambda found: sweep.definition(found.model))


#: Folders of sweeps: all of the definition counts.
SWEEP: Final = FolderKind("sweep.json", Definition, "sweep")
