"""A sweep's folder: its definition, answers and values as they come, in Parquet parts that appear whole or not at all.

sweep.json                            what the answers depend on
answers/00007-3f2a9c.parquet          answers, some hundreds a part; one part when all are there
values/repetition-5d41/...            numbers of one measure, by the number of the answer
results.parquet                       both in one table, when all is there
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from steercap.core.values import shown
from steercap.files.folder import FolderKind
from steercap.files.tables import Parts
from steercap.lab.measures.base import Answered, Measure
from steercap.lab.studies.sweeps.grid import Condition, Definition, Request, Sweep

#: Seconds between parts: what a killed process loses at most. A part takes some milliseconds to write.
FLUSH_SECONDS: Final = 2.0
#: Rows of a part at most.
PART_RECORDS: Final = 1024


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


Row = TypeVar("Row", bound=msgspec.Struct)
#: What rows are known by.
NUMBER: Final[Callable[[Any], int]] = attrgetter("number")


class Table(Generic[Row]):
    """Rows of one kind by their numbers, those that a folder holds and those that come; what is there twice is once.

    Args:
        folder: where their parts are.
        kind: type of the rows, which have a field `number`.

    Raises:
        InvalidFile: a part that is something else.
    """

    def __init__(self, folder: Path, kind: type[Row]) -> None:
        self._parts: Parts[Row] = Parts(folder, kind, records=PART_RECORDS, seconds=FLUSH_SECONDS)
        self.rows: dict[int, Row] = {NUMBER(row): row for row in self._parts.read()}

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows; they are written before long."""
        for row in rows:
            self.rows[NUMBER(row)] = row
            self._parts.add(row)

    def flush(self) -> None:
        """Write what was not written yet."""
        self._parts.flush()

    def join(self) -> None:
        """Make one part of all."""
        self.flush()
        self._parts.replace([self.rows[number] for number in sorted(self.rows)])


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
        if SWEEP.open(self.path, definition) is None:
            SWEEP.write(self.path, definition)
        self.answers: Table[Record] = Table(self.path / "answers", Record)

    def values(self, measure: Measure) -> Table[Value]:
        """What is kept of one measure; made otherwise, it is another."""
        return Table(self.path / "values" / folder_of(measure.label, measure), Value)


def folder_of(label: str, made: object) -> str:
    """The name of the folder of what a measure says.

    Args:
        label: what it is called.
        made: what it is, which its `repr` says in full.
    """
    digest = hashlib.sha256(repr(made).encode()).hexdigest()[:8]
    return f"{''.join(letter if letter.isalnum() else '-' for letter in label)}-{digest}"


def check_same(path: str | Path, sweep: Sweep) -> None:
    """Check that a folder holds no other sweep; of which model is not asked.

    Args:
        path: the folder, which need not be there.
        sweep: that is to be run.

    Raises:
        RunDiffers, InvalidFile: as for `Folder`.
    """
    SWEEP.check_same(path, lambda found: sweep.definition(found.model))


def _differing(found: Definition, wanted: Definition) -> list[str]:
    was, now = _fields(found), _fields(wanted)
    differ = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return [f"{name} was {shown(was.get(name))}, is {shown(now.get(name))}" for name in differ]


def _fields(definition: Definition) -> dict[str, object]:
    """What a definition says by name, of the model each thing by itself."""
    said = msgspec.structs.asdict(definition)
    model = said.pop("model")
    return {**{f"model.{name}": value for name, value in model.items()}, **said}


#: Folders of sweeps: all of the definition counts.
SWEEP: Final = FolderKind("sweep.json", Definition, "sweep", _differing)
