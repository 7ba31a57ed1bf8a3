"""Runner of an evaluation in one engine: every missing answer, value and reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from steercap.concurrency.bounded import each_of
from steercap.core.extras import require
from steercap.core.values import shown
from steercap.errors import InvalidSpec
from steercap.lab.measures.base import Measure
from steercap.lab.studies.evaluation.definition import Conversation, Evaluation
from steercap.lab.studies.evaluation.reading import PromptAndText, logprobs_of, parts_of
from steercap.lab.studies.evaluation.results import EvaluationResults
from steercap.lab.studies.evaluation.store import FOLDER, Answer, Folder
from steercap.lab.studies.evaluation.tasks import TASKS
from steercap.lab.studies.evaluation.tasks.base import Task
from steercap.lab.studies.sweeps.running import CONCURRENT, measured, measures_of
from steercap.lab.studies.sweeps.store import Value
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
    concurrent: int = CONCURRENT,
    progress: Callable[[str, int, int], None] | None = None,
) -> EvaluationResults:
    """Have every question answered under every method at every dose, and measure answers and fixed texts.

    All requests run in one engine, each with its own steering, and share its batches. An interrupted evaluation
    resumes: run it again and only missing requests are made, also after methods, doses, measures or tasks were added.

    Args:
        model: an open model.
        evaluation: methods to compare, and questions.
        out: folder of answers and values, created if needed.
        measures: measures of the answers: names in `steercap.lab.studies.sweeps.MEASURES`, or measure objects.
        tasks: tasks of fixed texts: names in `TASKS`, or task objects; they measure the cost of a method.
        concurrent: maximum concurrent requests.
        progress: function called with the kind of work ("answers", or the label of a task), the number finished, and
            the number in all.

    Raises:
        MissingExtra: the extra "evaluation" is not installed.
        RunDiffers: the folder holds answers to other questions, of another model, or sampled otherwise.
        InvalidSpec: two measures or tasks have one label, or an edit cannot apply to a text that is read.
        The errors of `SteerModel.generate`, before anything is answered where an edit does not fit the engine.
    """
    require("evaluation")
    chosen, read = measures_of(measures, COLUMNS), tasks_of(tasks)
    if both := {measure.label for measure in chosen} & {task.label for task in read}:
        raise InvalidSpec(f"{sorted(both)} are labels of a measure and of a task; leave one out")
    run = _Run(model, evaluation, Folder(out, evaluation, model.identity()), concurrent, progress or _silent)
    for task in read:  # first, as this is quick, and finds edits that do not fit the engine
        await run.read(task)
    await run.answer()
    for measure in chosen:
        await measured(model, measure, run.folder.answers_of(evaluation), run.folder.values(measure))
    results = _results(evaluation, run.folder, chosen, read)
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
        measures, tasks: all or some of those that were taken.

    Raises:
        MissingExtra: the extra "evaluation" is not installed.
        RunDiffers: the folder holds another evaluation.
        InvalidFile: the folder holds no evaluation, or lacks a part of this one.
    """
    require("evaluation")
    folder = Folder(out, evaluation, FOLDER.read(out).model)
    return _results(evaluation, folder, measures_of(measures, COLUMNS), tasks_of(tasks))


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


def tasks_of(given: Sequence[str | Task]) -> tuple[Task, ...]:
    """Resolve tasks given by name or as objects.

    Raises:
        UnknownName: no task has a name.
        InvalidSpec: an entry is not a task, or two have one label.
    """
    found: dict[str, Task] = {}
    for one in given:
        task = TASKS[one]() if isinstance(one, str) else one
        if not isinstance(task, Task):
            raise InvalidSpec(f"{shown(one)} is not a task; give a name from {list(TASKS)}, or a Task")
        if task.label in found:
            raise InvalidSpec(f"two tasks have the label {task.label!r}; leave one out")
        found[task.label] = task
    return tuple(found.values())


def _silent(_what: str, _done: int, _all: int) -> None:
    """Ignore progress."""


class _Reading(NamedTuple):
    """Item to read.

    Args:
        number: number of the reading in the folder.
        item: index of the item.
        parts: tokens of each of its texts.
        spec: edits; None for none.
    """

    number: int
    item: int
    parts: list[PromptAndText]
    spec: SteeringSpec | None


@dataclass(frozen=True)
class _Run:
    """Running evaluation; see `evaluate`."""

    model: SteerModel
    evaluation: Evaluation
    folder: Folder
    concurrent: int
    tell: Callable[[str, int, int], None]

    async def answer(self) -> None:
        """Run all missing conversations, each from where it stopped."""
        kept, questions = self.folder.answers, self.evaluation.questions
        wanted = {one.number: one for one in self.evaluation.conversations(self.folder.places)}
        turns = {number: len(questions[one.question]) for number, one in wanted.items()}
        numbers = {number + turn for number, count in turns.items() for turn in range(count)}
        done = len(numbers & kept.rows.keys())

        async def talk(steered: tuple[Conversation, SteeringSpec | None]) -> None:
            nonlocal done
            said: list[str] = []
            for turn, question in enumerate(questions[steered[0].question]):
                said.append(question)
                number = steered[0].number + turn
                if number not in kept.rows:
                    kept.add([await self._asked(*steered, said)])
                    done += 1
                    self.tell("answers", done, len(numbers))
                said.append(kept.rows[number].text)

        missing = [one for one in wanted.values() if one.number + turns[one.number] - 1 not in kept.rows]
        try:
            await each_of(self._steered(missing), talk, self.concurrent)
        finally:
            kept.flush()
        kept.join()

    async def read(self, task: Task) -> None:
        """Read the items of a task under every condition that is missing."""
        kept = self.folder.readings(task)
        wanted = {number for one in self.evaluation.conditions() for number in self.folder.numbers(one, task)}
        done = len(wanted & kept.rows.keys())

        async def read(one: _Reading) -> None:
            nonlocal done
            value = task.value(one.item, await logprobs_of(self.model, one.parts, one.spec))
            kept.add([Value(number=one.number, value=value)])
            done += 1
            self.tell(task.label, done, len(wanted))

        try:
            await each_of(self._unread(task, set(kept.rows)), read, self.concurrent)
        finally:
            kept.flush()
        kept.join()

    def _steered(self, conversations: Sequence[Conversation]) -> Iterator[tuple[Conversation, SteeringSpec | None]]:
        """Yield conversations with their steering, which those of one condition share."""
        for condition, alike in groupby(conversations, lambda one: one.condition):
            spec = self.evaluation.spec(condition)
            for conversation in alike:
                yield conversation, spec

    async def _asked(self, at: Conversation, spec: SteeringSpec | None, said: Sequence[str]) -> Answer:
        """Generate the answer to the last entry of `said`.

        Args:
            at: the conversation.
            spec: steering of its condition, None for none.
            said: questions and answers so far, alternating; the new question is last.
        """
        prompt, turn = self.evaluation.prompt(at.condition, said), len(said) // 2
        params = self.evaluation.sampling_of(at.question, at.sample, turn)
        found = await self.model.run(prompt, params, steering=spec)
        output = found.output
        (sample,) = output.outputs
        return Answer(
            number=at.number + turn,
            method=at.condition.method,
            dose=at.condition.dose,
            question=at.question,
            sample=at.sample,
            turn=turn,
            prompt=said[-1],
            prompt_token_ids=tuple(output.prompt_token_ids),
            text=sample.text,
            output_token_ids=tuple(sample.token_ids),
            finish_reason=sample.finish_reason or "",
        )

    def _unread(self, task: Task, begun: set[int]) -> Iterator[_Reading]:
        """Yield items to read, grouped by condition."""
        for condition in self.evaluation.conditions():
            spec = self.evaluation.spec(condition)
            for item, number in enumerate(self.folder.numbers(condition, task)):
                if number not in begun:
                    begun.add(number)  # two methods may be the same
                    prompt = self.evaluation.prompt(condition, [task.items[item].prompt])
                    yield _Reading(number, item, parts_of(self.model.tokenizer, prompt, task.items[item]), spec)
