"""Rollouts of many data sets in one engine: vectors at named doses, scored by a classifier of each set and by a judge.

OUT/NAME/evaluation.json, answers/, values/, results.parquet   files of the set's evaluation
OUT/NAME/judgements/5d41c0f2/...                                replies of a judge, by number of the answer
OUT/NAME/minilm_per_question.parquet, minilm_summary.json       scores of the set's classifier
OUT/NAME/judge_scores.parquet                                   each answer with the judge's reply
OUT/NAME/judge_per_question.parquet, judge_summary.json         scores of the judge
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from steercap.concurrency.loops import each_of
from steercap.core.protocols import Count, Progress, ProgressCallback
from steercap.core.values import count_of, shown
from steercap.errors import InvalidSpec
from steercap.files.folder import locked
from steercap.lab.measures.score import Classifier
from steercap.lab.measures.scores import PLACES, Scored
from steercap.lab.measures.scores.judge import Judge
from steercap.lab.measures.scores.minilm import encoder_folder
from steercap.lab.studies import JudgeRow, Table, folder_of
from steercap.lab.studies.evaluation import Evaluation, evaluate
from steercap.lab.studies.evaluation.methods import rollout_methods, scaled_name
from steercap.lab.studies.evaluation.results import EvaluationResults
from steercap.lab.studies.rollout_tables import (
    RolloutSummary,
    VariantScore,
    Verdict,
    remove_stale,
    save_judge_scores,
    save_tables,
)

if TYPE_CHECKING:
    from steercap.model import SteerModel

__all__ = ["RolloutSet", "rollout_methods", "run_rollouts"]

#: Default maximum of data sets in progress.
SETS: Final = 4
#: Default concurrent requests of each data set: for all four, as many as one evaluation has.
REQUESTS: Final = 128
#: Number of answers that are judged, and whose judgements are then stored, at a time.
JUDGED: Final = 64
#: Pattern of valid names of data sets, which are names of folders too.
NAME: Final = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutSet:
    """Data set of a rollout: methods, questions, and the texts and rubric by which answers are scored.

    Args:
        name: name of the data set and of its folder: letters, digits, _, - and ., such as "qwen-3-32b__trait__evil".
        evaluation: methods, questions and sampling; see `rollout_methods`.
        positive, negative: texts of each kind, two at least, to which the classifier is fitted: a logistic regression
            on embeddings of all-MiniLM-L6-v2, see `steercap.lab.measures.score.Classifier`.
        rubric: prompt for a judge with the placeholders {question} and {answer}, which may ask for the reply REFUSAL
            if the answer refuses; "" for no judge.

    Raises:
        InvalidSpec: a field is of another type, the name is not valid, there are too few texts, a placeholder is
            missing, or two methods and doses have one name.
    """

    name: str
    evaluation: Evaluation
    positive: Sequence[str]
    negative: Sequence[str]
    rubric: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise InvalidSpec(f"RolloutSet: name={shown(self.name)}; give one word of letters, digits, _, - and .")
        if not isinstance(self.evaluation, Evaluation):
            raise InvalidSpec(f"RolloutSet {self.name!r}: evaluation={shown(self.evaluation)}; give an Evaluation")
        try:
            classifier = self.classifier
        except InvalidSpec as error:
            raise InvalidSpec(f"RolloutSet {self.name!r}: {error}") from error
        object.__setattr__(self, "positive", classifier.positive)
        object.__setattr__(self, "negative", classifier.negative)
        missing = [place for place in PLACES if not isinstance(self.rubric, str) or place not in self.rubric]
        if missing and self.rubric != "":
            raise InvalidSpec(f"RolloutSet {self.name!r}: rubric={shown(self.rubric)} lacks {' and '.join(missing)}")
        names = list(self.conditions.values())
        if twice := [name for name in names if names.count(name) > 1]:
            raise InvalidSpec(f"RolloutSet {self.name!r}: two doses are called {twice[0]!r}; name the methods apart")

    @property
    def classifier(self) -> Classifier:
        """Measure "minilm", a classifier fitted to the positive and negative texts."""
        return Classifier("minilm", self.positive, self.negative)

    @property
    def conditions(self) -> dict[tuple[str, float], str]:
        """Name of each variant by (method, dose): the method's name if it has one dose, else `METHOD_scale_DOSE`."""
        several = {method.name for method in self.evaluation.methods if len(method.doses) > 1}
        return {
            (one.method, one.dose): scaled_name(one.method, one.dose) if one.method in several else one.method
            for one in self.evaluation.conditions()
        }


async def run_rollouts(
    model: SteerModel,
    sets: Iterable[RolloutSet],
    *,
    out: str | Path,
    judge: Judge | None = None,
    sets_at_once: int = SETS,
    concurrency: int = REQUESTS,
    progress: ProgressCallback | None = None,
) -> list[RolloutSummary]:
    """Generate answers to the questions of all data sets in one engine, score them, and write tables for each set.

    Requests of several data sets share the engine's batches, each with its own steering. A data set is taken from
    `sets` when another is finished, so that no more than `sets_at_once` of them are in memory if `sets` is a generator.
    An interrupted call is resumed by another, which makes only missing answers and judgements, also if methods, a judge
    or other texts of the classifier were added. Processes may share `out`, each with other data sets.

    Args:
        model: an open model.
        sets: data sets, in any number, each of another name.
        out: folder of the data sets' folders, created if needed.
        judge: judge of all answers, for which every data set needs a rubric; None for no judge.
        sets_at_once: maximum number of data sets in progress.
        concurrency: maximum number of concurrent requests of each data set.
        progress: function called with a `Progress` whenever the work advances.

    Returns:
        Summaries, in the order of the data sets, as written to `minilm_summary.json` and `judge_summary.json`.

    Raises:
        MissingExtra, ModelNotLoaded: the extra "evaluation" or the sentence encoder is not installed.
        InvalidSpec: there is no data set, or one is of another type, has the name of another, or lacks a rubric that a
            judge needs.
        InvalidRequest: another call writes to a data set's folder.
        RunDiffers: a folder has answers to other questions, of another model, or with other sampling.
        JudgeFailed: the judge cannot be reached; judgements until then stay in the folder.
        The errors of `SteerModel.generate`; answers until then stay in the folder.
    """
    if judge is not None and not isinstance(judge, Judge):
        raise InvalidSpec(f"run_rollouts: judge={shown(judge)}; give a Judge, or None for none")
    for name, count in (("sets_at_once", sets_at_once), ("concurrency", concurrency)):
        count_of(count, f"run_rollouts: {name}")
    encoder_folder()  # before answers are generated that nothing could score
    checked: Iterable[RolloutSet] = checked_sets(sets, judge)
    checked = list(checked) if isinstance(sets, Sequence) else checked  # a list is checked before it is begun
    run = _Rollouts(model, Path(out), judge, concurrency, progress, asyncio.Lock())
    found = await each_of(checked, run.roll, sets_at_once)
    if not found:
        raise InvalidSpec("run_rollouts: sets hold no data set; give one at least")
    return found


@dataclass(frozen=True)
class _Rollouts:
    """State of a `run_rollouts` call, with its arguments; `judging` lets one data set be judged at a time."""

    model: SteerModel
    out: Path
    judge: Judge | None
    concurrency: int
    progress: ProgressCallback | None
    judging: asyncio.Lock

    async def roll(self, rollouts: RolloutSet) -> RolloutSummary:
        """Generate, score and judge the answers of a data set, write its tables, and return its summary."""
        folder = self.out / rollouts.name

        def tell(at: Progress) -> None:
            if self.progress is not None:
                self.progress(replace(at, stage=f"{rollouts.name}: {at.stage}"))

        results = await evaluate(
            self.model,
            rollouts.evaluation,
            out=folder,
            measures=[rollouts.classifier, "refusal"],
            tasks=[],
            concurrency=self.concurrency,
            progress=tell,
        )
        values = zip(results.values["minilm"], results.values["refusal"], strict=True)
        verdicts = [Verdict(None if math.isnan(score) else score / 100, bool(refused)) for score, refused in values]
        with locked(folder):
            minilm = save_tables(folder, "minilm", results, rollouts.conditions, verdicts)
            remove_stale(folder, results, rollouts.conditions)
            judged = None if self.judge is None else await self._judge(self.judge, rollouts, results)
        return RolloutSummary(rollouts.name, minilm, judged)

    async def _judge(self, judge: Judge, rollouts: RolloutSet, results: EvaluationResults) -> dict[str, VariantScore]:
        """Judge the answers of a data set, write the judge's tables, and return the scores by name of the variant."""
        rows = await self._judged(judge, rollouts, results)
        save_judge_scores(self.out / rollouts.name, results, rollouts.conditions, rows)
        verdicts = [Verdict(row.score, row.refused) for row in rows]
        return save_tables(self.out / rollouts.name, "judge", results, rollouts.conditions, verdicts)

    async def _judged(self, judge: Judge, rollouts: RolloutSet, results: EvaluationResults) -> list[JudgeRow]:
        """Return the judgement of each answer in order; the judge is asked for missing ones, which are stored."""
        known = (judge.base_url, judge.model, judge.logprobs, rollouts.rubric)
        kept = Table(self.out / rollouts.name / "judgements" / folder_of("judge", repr(known)), JudgeRow)
        # These are of the answers' own texts: `evaluate` removes those of answers that it generates again.
        missing = [answer for answer in results.answers if answer.number not in kept.rows]
        done = len(results.answers) - len(missing)
        count = Count(f"{rollouts.name}: judge", len(results.answers), done, self.progress)
        try:
            for first in range(0, len(missing), JUDGED):
                part = missing[first : first + JUDGED]
                async with self.judging:
                    found = await judge.judge(rollouts.rubric, [Scored(answer.prompt, answer.text) for answer in part])
                pairs = zip(part, found, strict=True)
                kept.add(JudgeRow(answer.number, got.score, got.refused, got.reply) for answer, got in pairs)
                count.add(len(part))
        finally:
            kept.flush()
        kept.join()
        return [kept.rows[answer.number] for answer in results.answers]


def checked_sets(sets: Iterable[RolloutSet], judge: Judge | None) -> Iterator[RolloutSet]:
    """Yield data sets in order, each checked just before: its type, unique name, and its rubric if there is a judge.

    Raises:
        InvalidSpec: as for `run_rollouts`.
    """
    if not isinstance(sets, Iterable):
        raise InvalidSpec(f"run_rollouts: sets={shown(sets)}; give a list or a generator of RolloutSets")
    known = set[str]()
    for one in sets:
        if not isinstance(one, RolloutSet):
            raise InvalidSpec(f"run_rollouts: sets hold {shown(one)}; give RolloutSets")
        if one.name in known:
            raise InvalidSpec(f"run_rollouts: two data sets are called {one.name!r}; name them apart")
        if judge is not None and not one.rubric:
            raise InvalidSpec(f"run_rollouts: data set {one.name!r} has no rubric, which the judge needs; give rubric=")
        known.add(one.name)
        yield one
