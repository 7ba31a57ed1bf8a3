"""Studies of steering on many prompts, dose sweeps and comparisons of methods: shared settings and folder.

The folder has answers by number, and values of measures and tasks, in Parquet parts.

sweep.json, evaluation.json           definition, the inputs of the answers
answers/00007-3f2a9c.parquet          answers, hundreds in a part; one part when complete
values/repetition-5d41/...            values of one measure, by number of the answer
tasks/choices-77ab/...                values of one task, by number of condition and item
results.parquet                       answers and values in one table, when the study is complete
methods.parquet, .md, .png            summary of the methods of an evaluation
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from steercap.core.extras import lazy_names
from steercap.core.values import flag_of, index_of, shown
from steercap.errors import InvalidSpec
from steercap.files.folder import FolderKind
from steercap.files.tables import TableWriter
from steercap.lab.measures import Measure

if TYPE_CHECKING:
    from steercap.lab.studies.rollouts import RolloutSet, rollout_methods, run_rollouts
    from steercap.lab.studies.trying import try_layers

__all__ = ["RolloutSet", "rollout_methods", "run_rollouts", "try_layers"]
_HOMES: Final = dict.fromkeys(__all__, "rollouts") | {"try_layers": "trying"}
__getattr__, __dir__ = lazy_names(__name__, _HOMES, ("evaluation", "sweeps"))

#: Default sampling of a study: long enough for measures, and greedy, so that answers differ only by their edits.
SAMPLING: Final[Mapping[str, Any]] = {"max_tokens": 64, "temperature": 0.0}
#: Seconds between parts, the most work that a killed process loses. A part takes some milliseconds to write.
FLUSH_SECONDS: Final = 2.0
#: Maximum rows of a part.
PART_RECORDS: Final = 1024


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a measure for one answer, or of a task for one item under one condition.

    Args:
        number: number of the answer, or of the condition and item.
        value: measured value, NaN if nothing could be measured.
    """

    number: int
    value: float


class JudgeRow(msgspec.Struct, frozen=True):
    """Judgement of the answer of a number; other fields as in `steercap.lab.measures.scores.judge.Judgement`."""

    number: int
    score: float | None
    refused: bool
    reply: str


Row = TypeVar("Row", bound=msgspec.Struct)


Definition = TypeVar("Definition", bound=msgspec.Struct)


#: Function that returns the number of a row, its key.
NUMBER: Final[Callable[[Any], int]] = attrgetter("number")


class Table(Generic[Row]):
    """Table of rows by number, stored in the Parquet parts of a folder; the attribute `rows` maps numbers to rows.

    Args:
        folder: folder of the parts.
        kind: type of the rows, with a field `number`.

    Raises:
        InvalidFile: a part does not contain such rows.
    """

    def __init__(self, folder: Path, kind: type[Row]) -> None:
        self._parts: TableWriter[Row] = TableWriter(folder, kind, records=PART_RECORDS, seconds=FLUSH_SECONDS)
        self.rows: dict[int, Row] = {NUMBER(row): row for row in self._parts.read()}

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, in place of those of equal number; they are written to the folder later, or by `flush`."""
        for row in rows:
            self.rows[NUMBER(row)] = row
            self._parts.add(row)

    def flush(self) -> None:
        """Write rows still in memory to a new file in the folder."""
        self._parts.flush()

    def join(self) -> None:
        """Flush, and rewrite all files in the folder as one, with rows by ascending number."""
        self.flush()
        if len(self._parts.paths()) > 1:
            self._rewrite()

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove the rows of these numbers, in the folder too."""
        self.flush()
        if gone := self.rows.keys() & set(numbers):
            for number in gone:
                del self.rows[number]
            self._rewrite()

    def _rewrite(self) -> None:
        self._parts.replace([self.rows[number] for number in sorted(self.rows)])


class StudyFolder(Generic[Row]):
    """Answers and values in the folder of a study.

    Args:
        path: folder that was opened for the study; see `FolderKind.open`.
        kind: type of the study's answers, with a field `number`.

    Raises:
        InvalidFile: a part of the answers does not contain such answers.
    """

    def __init__(self, path: str | Path, kind: type[Row]) -> None:
        self.path = Path(path)
        self.answers: Table[Row] = Table(self.path / "answers", kind)

    def values(self, measure: Measure) -> Table[Value]:
        """Return the table of values of a measure; one with another key has another table."""
        name, before = (folder_of(measure.label, key) for key in (measure.key, repr(measure)))  # as it once was called
        known = (self.path / "values" / before).exists() and not (self.path / "values" / name).exists()
        return Table(self.path / "values" / (before if known else name), Value)

    def forget_values(self, numbers: Iterable[int]) -> None:
        """Remove all values and judgements of answers that are generated now: they are of other texts."""
        kinds: dict[str, type[Value | JudgeRow]] = {"values": Value, "judgements": JudgeRow}
        missing = set(numbers)
        for name, kind in kinds.items() if missing else ():
            for folder in (self.path / name).glob("*"):
                Table(folder, kind).remove(missing)


def folder_of(label: str, key: str) -> str:
    """Return the name of the subfolder for the values of a measure or task.

    Args:
        label: label of the measure or task.
        key: text that distinguishes it from others of the same label: a measure's `key`, a task's `repr`.
    """
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    return f"{''.join(letter if letter.isalnum() else '-' for letter in label)}-{digest}"


def settle(study: Any, *, whole: Sequence[str], flags: Sequence[str]) -> None:
    """Check a study's integers, booleans and sampling parameters, and convert them to plain types, in place.

    Args:
        study: frozen data class with fields `sampling_params` and `samples`; errors begin with the name of its class.
        whole, flags: names of the fields that are integers, and of those that are booleans.

    Raises:
        InvalidSpec: a field is of another type, `samples` is below 1, the sampling sets `n` or `seed`, or all samples
            would be the same text, at temperature 0.
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
    if not isinstance(study.sampling_params, Mapping):
        raise InvalidSpec(
            f"{said}: sampling_params={shown(study.sampling_params)}; give a dict of vLLM's sampling parameters"
        )
    if taken := {"n", "seed"} & set(study.sampling_params):
        raise InvalidSpec(
            f"{said}: sampling_params have {sorted(taken)}, which are set by samples= and seed=; leave them out"
        )
    object.__setattr__(study, "sampling_params", dict(study.sampling_params))
    if study.samples < 1:
        raise InvalidSpec(f"{said}: samples={study.samples}; give 1 or more")
    check_samples(study, "temperature", 0)


def check_samples(study: Any, parameter: str = "top_k", greedy: int = 1) -> None:
    """Check that samples of a study can differ; by default that `top_k` is not 1, only for a folder that is begun.

    Raises:
        InvalidSpec: there are several, and a sampling parameter has the value at which all are the same text.
    """
    if study.samples > 1 and study.sampling_params.get(parameter) == greedy:
        raise InvalidSpec(
            f"{type(study).__name__}: samples={study.samples} at {parameter} {study.sampling_params[parameter]} would "
            "all be the same text; raise it, or set samples=1"
        )


def as_stored(study: Any, definition: Definition) -> Definition:
    """Return the definition of a study as it is when written to its folder and read again.

    Raises:
        InvalidSpec: a prompt or sampling parameter is not JSON-compatible.
    """
    try:
        return msgspec.json.decode(msgspec.json.encode(definition), type=type(definition))
    except (TypeError, msgspec.MsgspecError) as error:
        raise InvalidSpec(
            f"{type(study).__name__}: prompts or sampling_params hold a value that JSON cannot represent: {error}"
        ) from error


def check_same(kind: FolderKind[Any], path: str | Path, study: Any) -> None:
    """Check that a folder of a kind, which need not exist, has no other study; the model is not compared.

    Raises:
        RunDiffers, InvalidFile: as for `FolderKind.check_same`.
        InvalidSpec: the folder has no study yet, and all samples would be the same text; see `check_samples`.
    """
    if kind.check_same(path, lambda found: study.definition(found.model)) is None:
        check_samples(study)  # folders of before are resumed
