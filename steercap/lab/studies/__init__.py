"""Studies of steering on many prompts, dose sweeps and comparisons of methods: their shared settings, and their folder.

The folder holds answers by number, and values, in Parquet parts.

sweep.json, evaluation.json           inputs of the answers
answers/00007-3f2a9c.parquet          answers, some hundreds a part; one part when all are there
values/repetition-5d41/...            numbers of one measure, by the number of the answer
tasks/choices-77ab/...                numbers of one task, by the number of condition and item
results.parquet                       answers and values in one table, when the study is complete
methods.parquet, .md, .png            methods of an evaluation beside each other
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from steercap.core.values import flag_of, index_of, shown
from steercap.errors import InvalidSpec
from steercap.files.tables import TableWriter
from steercap.lab.measures import Measure

#: Seconds between parts, the most that a killed process loses. A part takes some milliseconds to write.
FLUSH_SECONDS: Final = 2.0
#: Rows of a part at most.
PART_RECORDS: Final = 1024


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a measure for one answer, or of a task for one item under one condition.

    Args:
        number: number of the answer, or of condition and item.
        value: measured value, NaN if nothing could be measured.
    """

    number: int
    value: float


Row = TypeVar("Row", bound=msgspec.Struct)


Definition = TypeVar("Definition", bound=msgspec.Struct)


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
        """Add rows; they are written to the folder later, or by `flush`."""
        for row in rows:
            self.rows[NUMBER(row)] = row
            self._parts.add(row)

    def flush(self) -> None:
        """Write rows still in memory to a new file in the folder."""
        self._parts.flush()

    def join(self) -> None:
        """Flush, and rewrite all files in the folder as one, in the order of the rows' numbers."""
        self.flush()
        self._parts.replace([self.rows[number] for number in sorted(self.rows)])


class StudyFolder(Generic[Row]):
    """Answers and values in the folder of a study.

    Args:
        path: folder that was opened for the study; see `FolderKind.open`.
        kind: type of its answers, with a field `number`.

    Raises:
        InvalidFile: a part of the answers holds something else.
    """

    def __init__(self, path: str | Path, kind: type[Row]) -> None:
        self.path = Path(path)
        self.answers: Table[Row] = Table(self.path / "answers", kind)

    def values(self, measure: Measure) -> Table[Value]:
        """Return the table of values of a measure; one with another key has another table."""
        name, before = folder_of(measure.label, measure), _hashed(measure.label, repr(measure))  # as it once was called
        known = (self.path / "values" / before).exists() and not (self.path / "values" / name).exists()
        return Table(self.path / "values" / (before if known else name), Value)


def folder_of(label: str, made: object) -> str:
    """Return the name of the folder for the values of a measure or task.

    Args:
        label: label of the measure or task.
        made: the measure or task; its `key`, or `repr`, distinguishes it from others of the same label.
    """
    return _hashed(label, made.key if isinstance(made, Measure) else repr(made))


def _hashed(label: str, said: str) -> str:
    digest = hashlib.sha256(said.encode()).hexdigest()[:8]
    return f"{''.join(letter if letter.isalnum() else '-' for letter in label)}-{digest}"


def settle(study: Any, *, whole: Sequence[str], flags: Sequence[str]) -> None:
    """Check a study's numbers, truth values and sampling, and convert them to plain ones, in place.

    Args:
        study: frozen data class with fields `sampling` and `samples`; messages begin with the name of its class.
        whole, flags: names of its fields that are whole numbers, and of those that are truth values.

    Raises:
        InvalidSpec: a field is of another type, `samples` is below 1, the sampling sets `n` or `seed`, or all samples
            would be the same text.
    """
    said = type(study).__name__
    kinds: list[tuple[Sequence[str], Callable[[Any], Any], str]] = [
        (flags, flag_of, "True or False"),
        (whole, index_of, "a whole number"),
    ]
    for names, read, what in kinds:
        for name in names:
            value = read(getattr(study, name))
            if value is None:
                raise InvalidSpec(f"{said}: {name}={shown(getattr(study, name))}; give {what}")
            object.__setattr__(study, name, value)
    if not isinstance(study.sampling, Mapping):
        raise InvalidSpec(f"{said}: sampling={shown(study.sampling)}; give a dict of vLLM's sampling parameters")
    if taken := {"n", "seed"} & set(study.sampling):
        raise InvalidSpec(f"{said}: sampling has {sorted(taken)}, which are set by samples= and seed=; leave them out")
    object.__setattr__(study, "sampling", dict(study.sampling))
    if study.samples < 1:
        raise InvalidSpec(f"{said}: samples={study.samples}; give 1 or more")
    if study.samples > 1 and study.sampling.get("temperature") == 0:
        raise InvalidSpec(
            f"{said}: samples={study.samples} at temperature 0 would all be the same text; raise it, or set samples=1"
        )


def as_stored(study: Any, definition: Definition) -> Definition:
    """Return the definition of a study as it is read from its folder.

    Raises:
        InvalidSpec: a prompt or sampling parameter is not JSON-compatible.
    """
    try:
        return msgspec.json.decode(msgspec.json.encode(definition), type=type(definition))
    except (TypeError, msgspec.MsgspecError) as error:
        raise InvalidSpec(
            f"{type(study).__name__}: prompts or sampling hold a value that JSON cannot represent: {error}"
        ) from error
