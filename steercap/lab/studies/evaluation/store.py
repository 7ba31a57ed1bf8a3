"""An evaluation's folder: answers and numbers as they come, whatever methods come later.

evaluation.json                       what the answers depend on, and which condition has which place among them
answers/00007-3f2a9c.parquet          every answer, by its number
values/repetition-5d41/...            numbers of one measure, by the number of the answer
tasks/choices-77ab/...                numbers of one task, by the number of condition and item
results.parquet, methods.parquet, methods.md, methods.png     what came of it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from steercap.core.values import shown
from steercap.errors import InvalidFile
from steercap.files.folder import FolderKind
from steercap.lab.measures.base import Answered, Measure
from steercap.lab.studies.evaluation.definition import Condition, Definition, Evaluation
from steercap.lab.studies.evaluation.tasks.base import Task
from steercap.lab.studies.sweeps.store import Row, Table, Value, folder_of


class Answer(Answered, frozen=True, kw_only=True):
    """One answer of an evaluation; see `Answered`.

    Args:
        number: its place in the folder.
        method, dose: how it was brought about; the method as it was called then.
        question, sample, turn: which question, which conversation about it, and which answer in that.
        finish_reason: why it ended, as vLLM says it: "stop" or "length".
    """

    number: int
    method: str
    dose: float
    question: int
    sample: int
    turn: int
    finish_reason: str


class Folder:
    """The folder of one evaluation, to which methods and doses may be added.

    Args:
        path: the folder, made if it is not there.
        evaluation: whose it is.
        model: what the model is; see `steercap.files.fingerprint`.

    Raises:
        RunDiffers: it holds answers to other questions, of another model or sampled otherwise.
        InvalidFile: its evaluation.json cannot be read.
    """

    def __init__(self, path: str | Path, evaluation: Evaluation, model: dict[str, str]) -> None:
        self.path = Path(path)
        wanted = evaluation.definition(model)
        found = FOLDER.open(self.path, wanted)
        known = list(found.conditions) if found else []
        digests = [one.digest for one in known]
        for one in wanted.conditions:
            if one.digest not in digests:
                known.append(one)
                digests.append(one.digest)
        if found is None or len(known) > len(found.conditions):
            FOLDER.write(self.path, msgspec.structs.replace(wanted, conditions=known))
        #: The place of each condition of this evaluation.
        self.places: dict[Condition, int] = {
            one: digests.index(digest.digest)
            for one, digest in zip(evaluation.conditions(), wanted.conditions, strict=True)
        }
        self.answers: Table[Answer] = Table(self.path / "answers", Answer)

    def values(self, measure: Measure) -> Table[Value]:
        """What is kept of one measure; made otherwise, it is another."""
        return Table(self.path / "values" / folder_of(measure.label, measure), Value)

    def readings(self, task: Task) -> Table[Value]:
        """What is kept of one task; made otherwise, it is another."""
        return Table(self.path / "tasks" / folder_of(task.label, task), Value)

    def numbers(self, condition: Condition, task: Task) -> range:
        """The numbers of the items of a task under a condition."""
        place, count = self.places[condition], len(task.items)
        return range(place * count, (place + 1) * count)

    def answers_of(self, evaluation: Evaluation) -> list[Answer]:
        """All answers of an evaluation in its order, under the names that its methods have now.

        Raises:
            InvalidFile: some are missing.
        """
        found = []
        for one in evaluation.conversations(self.places):
            for turn in range(len(evaluation.questions[one.question])):
                answer = self._there(self.answers, one.number + turn, one.condition)
                found.append(msgspec.structs.replace(answer, method=one.condition.method, dose=one.condition.dose))
        return found

    def values_of(self, measure: Measure, answers: Sequence[Answer]) -> list[float]:
        """The number of each answer by a measure.

        Raises:
            InvalidFile: some are missing.
        """
        kept = self.values(measure)
        return [self._there(kept, one.number, measure).value for one in answers]

    def readings_of(self, task: Task, evaluation: Evaluation) -> dict[Condition, list[float]]:
        """The number of each item of a task under each condition.

        Raises:
            InvalidFile: some are missing.
        """
        kept = self.readings(task)
        return {
            condition: [self._there(kept, number, condition).value for number in self.numbers(condition, task)]
            for condition in evaluation.conditions()
        }

    def _there(self, kept: Table[Row], number: int, what: object) -> Row:
        if number not in kept.rows:
            raise InvalidFile(f"{self.path} has not all that belongs to {shown(what)}; `evaluate` does what is missing")
        return kept.rows[number]


def check_same(path: str | Path, evaluation: Evaluation) -> None:
    """Check that a folder holds no other evaluation; of which model is not asked.

    Args:
        path: the folder, which need not be there.
        evaluation: that is to be run.

    Raises:
        RunDiffers, InvalidFile: as for `Folder`.
    """
    FOLDER.check_same(path, lambda found: evaluation.definition(found.model))


def _differing(found: Definition, wanted: Definition) -> list[str]:
    was, now = _fields(found), _fields(wanted)
    differ = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return [f"{name} was {shown(was.get(name))}, is {shown(now.get(name))}" for name in differ]


def _fields(definition: Definition) -> dict[str, object]:
    """What a definition says by name, of the model each thing by itself; which conditions there are does not count."""
    said = msgspec.structs.asdict(definition)
    model = said.pop("model")
    del said["conditions"]
    return {**{f"model.{name}": value for name, value in model.items()}, **said}


#: Folders of evaluations.
FOLDER: Final = FolderKind("evaluation.json", Definition, "evaluation", _differing)
