"""Runner of an evaluation in one engine, which computes every missing answer, measure and task value."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from steercap.core.extras import require
from steercap.core.protocols import Count, ProgressCallback
from steercap.errors import InvalidSpec
from steercap.files.folder import locked
from steercap.lab.measures import Measure
from steercap.lab.studies import Row, Table, Value
from steercap.lab.studies.evaluation.definition import FOLDER, Conversation, Evaluation, EvaluationCondition
from steercap.lab.studies.evaluation.results import EvaluationResults
from steercap.lab.studies.evaluation.store import Answer, Folder
from steercap.lab.studies.evaluation.tasks import TASKS, Task, logprobs_of, tokenized
from steercap.lab.studies.running import CONCURRENCY, ask, chosen, fill, measured, measures_of, steered
from steercap.lab.studies.sweeps.operations import check_unbiased
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Columns of the table of answers, which no measure may have as its label.
COLUMNS: Final = Answer.__struct_fields__


async def evaluate(
    model: SteerModel,
    evaluation: Evaluation,
    *,
    out: str | Path,
    measures: Sequence[str | Measure] = (),
    tasks: Sequence[str | Task] = ("passages", "choices"),
    concurrency: int = CONCURRENCY,
    progress: ProgressCallback | None = None,
) -> EvaluationResults:
    """Generate answers to every question under every method at every dose, and measure answers and fixed texts.

    All requests run in one engine, each with its own steering, and share batches. An interrupted evaluation is resumed
    by another call, which makes only missing requests, also after methods, doses, measures or tasks were added.

    Args:
        model: an open model.
        evaluation: methods to compare, and questions.
        out: folder of answers and values, created if needed.
        measures: measures of the answers: names in `steercap.lab.studies.sweeps.MEASURES`, or measure objects.
        tasks: tasks of fixed texts: names in `TASKS`, or task objects; they measure the cost of a method.
        concurrency: maximum concurrent requests.
        progress: function called with a `Progress` whenever the work advances.

    Raises:
        MissingExtra: the extra "evaluation" is not installed.
        RunDiffers: the folder has answers to other questions, of another model, or with other sampling.
        InvalidRequest: another call writes to the folder.
        InvalidSpec: two measures or tasks have one label, one has no repr of its own, an edit cannot apply to a text of
            a task, or several samples at `top_k` 1 would all be the same text, in a new folder.
        The errors of `SteerModel.generate`; with a task, before any answer if an edit does not fit the engine.
    """
    require("evaluation")
    taken, read = measures_of(measures, COLUMNS), _tasks_under(evaluation, tasks)
    if both := {measure.label for measure in taken} & {task.label for task in read}:
        raise InvalidSpec(f"{sorted(both)} are labels of a measure and of a task; leave one out")
    with locked(out):
        run = _Run(model, evaluation, Folder(out, evaluation, model.identity()), concurrency, progress)
        for task in read:  # first, as this is quick, and finds edits that do not fit the engine
            await run.read(task)
        await run.answer()
        for measure in taken:
            await measured(model, measure, run.folder.answers_of(evaluation), run.folder.values(measure), progress)
        results = _results(evaluation, run.folder, taken, read)
        results.save(run.folder.path / "results.parquet")
        return results


def read_results(
    evaluation: Evaluation,
    *,
    out: str | Path,
    measures: Sequence[str | Measure] = (),
    tasks: Sequence[str | Task] = ("passages", "choices"),
) -> EvaluationResults:
    """Load the results of `evaluate` from a folder, without an engine.

    Args:
        evaluation: all or some of the methods and doses that were evaluated, on the same questions.
        out: the folder.
        measures, tasks: all or some of the measures and tasks that were taken.

    Raises:
        MissingExtra: the extra "evaluation" is not installed.
        RunDiffers: the folder has another evaluation.
        InvalidFile: the folder has no evaluation, or lacks a part of this one.
        InvalidSpec: a method has a LogitBias, under which a task cannot be read.
    """
    require("evaluation")
    folder = Folder(out, evaluation, FOLDER.read(out).model, write=False)
    return _results(evaluation, folder, measures_of(measures, COLUMNS), _tasks_under(evaluation, tasks))


def _results(
    evaluation: Evaluation, folder: Folder, measures: Sequence[Measure], tasks: Sequence[Task]
) -> EvaluationResults:
    answers = folder.answers_of(evaluation)
    return EvaluationResults(
        evaluation,
        answers,
        {measure.label: folder.values_of(measure, answers) for measure in measures},
        {task.label: folder.readings_of(task, evaluation) for task in tasks},
        {measure.label: measure for measure in measures},
        {task.label: task for task in tasks},
    )


def _tasks_under(evaluation: Evaluation, given: Sequence[str | Task]) -> tuple[Task, ...]:
    """Return the tasks as `tasks_of` does, after a check that texts can be read under every method."""
    tasks = tasks_of(given)
    for condition in evaluation.conditions() if tasks else ():
        if (spec := evaluation.spec(condition)) is not None:
            check_unbiased(spec)
    return tasks


def tasks_of(given: Sequence[str | Task]) -> tuple[Task, ...]:
    """Return the tasks that are given by name in `TASKS` or as objects, in order.

    Raises:
        UnknownName: no task has a given name.
        InvalidSpec: an entry is not a task, or two have one label.
    """
    return chosen(given, TASKS, Task)


class _Reading(NamedTuple):
    """Item of a task to read under a condition; `number` is the number of its value in the folder."""

    number: int
    condition: EvaluationCondition
    item: int


@dataclass(frozen=True)
class _Run:
    """State of an `evaluate` call, with its arguments and opened folder."""

    model: SteerModel
    evaluation: Evaluation
    folder: Folder
    concurrency: int
    progress: ProgressCallback | None

    async def answer(self) -> None:
        """Generate all missing answers; a conversation continues after its last stored answer."""
        kept, questions = self.folder.answers, self.evaluation.questions
        wanted = {one.number: one for one in self.evaluation.conversations(self.folder.places)}
        turns = {number: len(questions[one.question]) for number, one in wanted.items()}
        numbers = {number + turn for number, count in turns.items() for turn in range(count)}

        async def talk(asked: tuple[Conversation, SteeringSpec | None], keep: Callable[[Answer], None]) -> None:
            at, spec = asked
            said: list[str] = []
            for turn, question in enumerate(questions[at.question]):
                said.append(question)
                if at.number + turn not in kept.rows:
                    keep(await self._answer(at, spec, said))
                said.append(kept.rows[at.number + turn].text)

        self.folder.forget_values(numbers - kept.rows.keys())
        missing = [one for one in wanted.values() if one.number + turns[one.number] - 1 not in kept.rows]
        await self._fill(kept, missing, talk, numbers, "answers")

    async def read(self, task: Task) -> None:
        """Compute the missing values of a task, each of an item under a condition."""
        kept = self.folder.readings(task)
        wanted = {
            number: _Reading(number, condition, item)
            for condition in self.evaluation.conditions()
            for item, number in enumerate(self.folder.numbers(condition, task))
        }

        async def read(asked: tuple[_Reading, SteeringSpec | None], keep: Callable[[Value], None]) -> None:
            (number, condition, at), spec = asked
            item = task.items[at]
            parts = tokenized(self.model.tokenizer, self.evaluation.prompt(condition, [item.prompt]), item)
            keep(Value(number=number, value=task.value(at, await logprobs_of(self.model, parts, spec))))

        missing = [one for number, one in wanted.items() if number not in kept.rows]
        await self._fill(kept, missing, read, wanted, task.label)

    async def _fill(
        self,
        kept: Table[Row],
        missing: Sequence[Any],
        work: Callable[[Any, Callable[[Row], None]], Awaitable[None]],
        numbers: Collection[int],
        stage: str,
    ) -> None:
        await fill(
            kept,
            steered(missing, self.evaluation.spec),
            work,
            concurrency=self.concurrency,
            count=Count(stage, len(numbers), len(kept.rows.keys() & numbers), self.progress),
        )

    async def _answer(self, at: Conversation, spec: SteeringSpec | None, replies: Sequence[str]) -> Answer:
        """Generate the answer to the last entry of `replies`.

        Args:
            at: the conversation.
            spec: edits of the conversation's condition, None for none.
            replies: questions and answers so far, alternating; the new question is last.
        """
        prompt, turn = self.evaluation.prompt(at.condition, replies), len(replies) // 2
        return Answer(
            number=at.number + turn,
            method=at.condition.method,
            dose=at.condition.dose,
            question=at.question,
            sample=at.sample,
            turn=turn,
            prompt=replies[-1],
            **await ask(self.model, prompt, self.evaluation.sampling_of(at.question, at.sample, turn), spec),
        )
