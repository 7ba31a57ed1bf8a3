"""Folder of an evaluation: a folder of a study to which methods, doses, measures and tasks may be added later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from steercap.core.values import shown
from steercap.errors import InvalidFile
from steercap.lab.measures import Answered, Measure
from steercap.lab.studies import Row, StudyFolder, Table, Value, check_samples, folder_of
from steercap.lab.studies.evaluation.definition import FOLDER, Evaluation, EvaluationCondition
from steercap.lab.studies.evaluation.tasks import Task


class Answer(Answered, frozen=True, kw_only=True):
    """Answer of an evaluation; see `Answered`.

    Args:
        number: number of the answer in the folder.
        method, dose: condition of the answer, with the method's name at that time.
        question, sample, turn: index of the question, of the conversation about it, and of the turn.
        finish_reason: vLLM's finish reason: "stop" or "length".
    """

    number: int
    method: str
    dose: float
    question: int
    sample: int
    turn: int
    finish_reason: str


class Folder(StudyFolder[Answer]):
    """Folder of one evaluation, to which methods and doses may be added.

    Args:
        path: the folder, created if needed.
        evaluation: evaluation of the folder.
        model: identity of the model; see `steercap.files.fingerprint`.
        write: False to leave the folder as it is.

    Raises:
        RunDiffers: it holds answers to other questions, of another model or sampled otherwise.
        InvalidFile: its evaluation.json cannot be read, or lacks a method or dose that may not be written.
        InvalidSpec: as for `studies.check_same`.
    """

    def __init__(self, path: str | Path, evaluation: Evaluation, model: dict[str, str], *, write: bool = True) -> None:
        wanted = evaluation.definition(model)
        found = FOLDER.open(path, wanted) if write else FOLDER.check_same(path, lambda _: wanted)
        if found is None:
            check_samples(evaluation)
        known = list(found.conditions) if found else []
        digests = [one.digest for one in known]
        for condition, one in zip(evaluation.conditions(), wanted.conditions, strict=True):
            if one.digest not in digests:
                if not write:
                    raise self._lacking(path, condition)
                known.append(one)
                digests.append(one.digest)
        if found is None or len(known) > len(found.conditions):
            FOLDER.write(path, msgspec.structs.replace(found or wanted, conditions=known))
        #: The place of each condition of this evaluation.
        self.places: dict[EvaluationCondition, int] = {
            one: digests.index(digest.digest)
            for one, digest in zip(evaluation.conditions(), wanted.conditions, strict=True)
        }
        self._chat = evaluation.chat
        super().__init__(path, Answer)

    def readings(self, task: Task) -> Table[Value]:
        """Return the table of values of a task; one with other arguments, or read on a new line, has another table."""
        made = task if self._chat else (task, "on a new line")
        return Table(self.path / "tasks" / folder_of(task.label, repr(made)), Value)

    def numbers(self, condition: EvaluationCondition, task: Task) -> range:
        """Return the numbers, in the table of the task, of its items under a condition."""
        place, count = self.places[condition], len(task.items)
        return range(place * count, (place + 1) * count)

    def answers_of(self, evaluation: Evaluation) -> list[Answer]:
        """Return all answers of an evaluation in order, under its methods' current names.

        Raises:
            InvalidFile: an answer is missing.
        """
        found = []
        for one in evaluation.conversations(self.places):
            for turn in range(len(evaluation.questions[one.question])):
                answer = self._stored_row(self.answers, one.number + turn, one.condition)
                found.append(msgspec.structs.replace(answer, method=one.condition.method, dose=one.condition.dose))
        return found

    def values_of(self, measure: Measure, answers: Sequence[Answer]) -> list[float]:
        """Return a measure's stored value of each answer, in the order of the answers.

        Raises:
            InvalidFile: a value is missing.
        """
        kept = self.values(measure)
        return [self._stored_row(kept, one.number, measure).value for one in answers]

    def readings_of(self, task: Task, evaluation: Evaluation) -> dict[EvaluationCondition, list[float]]:
        """Return the stored value of each item of a task, in order, under each condition of an evaluation.

        Raises:
            InvalidFile: a value is missing.
        """
        kept = self.readings(task)
        return {
            condition: [self._stored_row(kept, number, condition).value for number in self.numbers(condition, task)]
            for condition in evaluation.conditions()
        }

    def _stored_row(self, kept: Table[Row], number: int, what: object) -> Row:
        if number not in kept.rows:
            raise self._lacking(self.path, what)
        return kept.rows[number]

    @staticmethod
    def _lacking(path: str | Path, what: object) -> InvalidFile:
        return InvalidFile(f"{path} lacks a part of {shown(what)}; call `evaluate` again to compute it")
