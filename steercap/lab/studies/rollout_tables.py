"""Tables of a rollout: scores of each variant, a method at a dose, by question and over all; a judge's replies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from steercap.files.base import write_whole
from steercap.files.tables import read_table, write_table
from steercap.lab.measures.statistics import cluster_means, clusters_of, estimate
from steercap.lab.studies import JudgeRow
from steercap.lab.studies.evaluation.results import EvaluationResults
from steercap.steering.edits.add import Add
from steercap.steering.spec import SteeringSpec

#: Name of each variant, by name of the method and dose.
Names = Mapping[tuple[str, float], str]


class Verdict(NamedTuple):
    """Score of an answer, None if it has none; `refused` is True if the answer refuses."""

    score: float | None
    refused: bool


class JudgeScore(msgspec.Struct, frozen=True, kw_only=True):
    """Answer with its judgement, a row of `judge_scores.parquet`.

    Args:
        dataset: name of the data set.
        variant: name of the method at a dose.
        question_index, rollout_index, turn: index of the question, of the conversation about it, and of the answer.
        steering_scale: scale of the edits, the length that was learned for `..._scale_learned`; None for no steering,
            and for edits of several scales.
        question, response: text of the prompt, and of the model's answer.
        judge_score: judge's score, 0 to 100; None if the answer refuses or the reply has no score.
        judge_refusal: True if the judge says that the answer refuses.
        judge_response: text of the judge's reply.
    """

    dataset: str
    variant: str
    question_index: int
    rollout_index: int
    turn: int
    steering_scale: float | None
    question: str
    response: str
    judge_score: float | None
    judge_refusal: bool
    judge_response: str


class QuestionScore(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of the answers to one question under one variant, a row of `..._per_question.parquet`.

    Args:
        dataset: name of the data set.
        variant: name of the method at a dose.
        question_index: index of the question.
        question: text of the question, one line for each turn.
        count: number of answers with a score.
        mean, std, min, max: statistics of these scores, None without any; `std` is that of a population.
        refusals, missing: number of answers that refuse, and of answers that do not refuse but have no score.
    """

    dataset: str
    variant: str
    question_index: int
    question: str
    count: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    refusals: int
    missing: int


class VariantScore(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of all answers under one variant, an entry of `variant_summary` in `..._summary.json`.

    Args:
        count, mean, std, min, max, refusals, missing: as for `QuestionScore`, of all answers.
        question_mean: mean of the questions' means, which differs from `mean` where questions have unequal numbers of
            scores; None in files of before it was known.
        low, high: ends of the 95 % interval of `question_mean`, None for fewer than two questions; see
            `steercap.lab.measures.statistics.estimate`.
        norms: L2 norm of the vector added at each layer, by layer; empty unless there is one fixed `Add` per layer.
    """

    count: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    refusals: int
    missing: int
    question_mean: float | None = None
    low: float | None
    high: float | None
    norms: dict[str, float]


class RolloutSummary(msgspec.Struct, frozen=True):
    """Scores of every variant of a data set.

    Args:
        name: name of the data set.
        minilm: scores of the data set's classifier, 0 to 1, by variant; refusals are found by phrases, as by the
            measure "refusal".
        judge: scores and refusals by the judge, 0 to 100, by variant; None without a judge.
    """

    name: str
    minilm: dict[str, VariantScore]
    judge: dict[str, VariantScore] | None


class SummaryFile(msgspec.Struct, frozen=True):
    """Content of `minilm_summary.json` or `judge_summary.json`: scores of a data set by name of the variant."""

    dataset: str
    variant_summary: dict[str, VariantScore]


def save_tables(
    folder: Path, scorer: str, results: EvaluationResults, names: Names, verdicts: Sequence[Verdict]
) -> dict[str, VariantScore]:
    """Write `SCORER_per_question.parquet` and `SCORER_summary.json`; return the scores by name of the variant.

    Args:
        folder: folder of the data set; its name is the data set's.
        scorer: "minilm" or "judge".
        results: results with all answers.
        names: names of the variants.
        verdicts: score and refusal of each answer, in the order of the answers.
    """
    groups: dict[str, dict[int, list[Verdict]]] = {}
    for answer, verdict in zip(results.answers, verdicts, strict=True):
        group = groups.setdefault(names[answer.method, answer.dose], {})
        group.setdefault(answer.question, []).append(verdict)
    specs, clusters = specs_of(results, names), clusters_of(results.evaluation.questions)
    found = {variant: _variant(group, clusters, specs[variant]) for variant, group in groups.items()}
    questions = ["\n".join(turns) for turns in results.evaluation.questions]
    rows = [
        QuestionScore(dataset=folder.name, variant=variant, question_index=at, question=questions[at], **_stats(own))
        for variant, group in groups.items()
        for at, own in group.items()
    ]
    write_table(folder / f"{scorer}_per_question.parquet", rows)
    with write_whole(folder / f"{scorer}_summary.json") as scratch:
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(SummaryFile(folder.name, found)), indent=2) + b"\n")
    return found


def save_judge_scores(folder: Path, results: EvaluationResults, names: Names, rows: Sequence[JudgeRow]) -> Path:
    """Write `judge_scores.parquet`, every answer with its row of `rows`, in order, and return the file's path."""
    scales = {variant: _scale(spec) for variant, spec in specs_of(results, names).items()}
    found = [
        JudgeScore(
            dataset=folder.name,
            variant=(variant := names[answer.method, answer.dose]),
            question_index=answer.question,
            rollout_index=answer.sample,
            turn=answer.turn,
            steering_scale=scales[variant],
            question=answer.prompt,
            response=answer.text,
            judge_score=row.score,
            judge_refusal=row.refused,
            judge_response=row.reply,
        )
        for answer, row in zip(results.answers, rows, strict=True)
    ]
    return write_table(folder / "judge_scores.parquet", found)


def remove_stale(folder: Path, results: EvaluationResults, names: Names) -> None:
    """Remove `judge_*` files of a folder unless they are of the same answers, by `names` of conditions and by text."""
    file = folder / "judge_scores.parquet"
    known = read_table(file, JudgeScore) if file.exists() else []
    judged = [(one.variant, one.question_index, one.rollout_index, one.turn, one.response) for one in known]
    now = [(names[one.method, one.dose], one.question, one.sample, one.turn, one.text) for one in results.answers]
    if sorted(judged) != sorted(now):
        for name in (file.name, "judge_per_question.parquet", "judge_summary.json"):
            (folder / name).unlink(missing_ok=True)


def specs_of(results: EvaluationResults, names: Names) -> dict[str, SteeringSpec | None]:
    """Return the edits of each variant, by its name; None without steering."""
    return {names[one.method, one.dose]: results.evaluation.spec(one) for one in results.evaluation.conditions()}


def _variant(
    questions: Mapping[int, Sequence[Verdict]], clusters: Sequence[int], spec: SteeringSpec | None
) -> VariantScore:
    each: list[list[float]] = [[] for _ in clusters]
    for at, own in questions.items():
        each[clusters[at]] += _known(own)
    found = estimate(cluster_means(each))
    stats = _stats([verdict for own in questions.values() for verdict in own])
    mean, low, high = map(_number, (found.value, found.low, found.high))
    return VariantScore(question_mean=mean, low=low, high=high, norms=_norms(spec), **stats)


def _scale(spec: SteeringSpec | None) -> float | None:
    """Return the scale that all edits share, None if they differ, have none, or there are no edits."""
    scales = {getattr(edit, "scale", None) for edit in (() if spec is None else spec.flat())}
    return scales.pop() if len(scales) == 1 else None


def _norms(spec: SteeringSpec | None) -> dict[str, float]:
    """Return the L2 norm of the vector added at each layer; empty unless all edits are fixed `Add`s, one per layer."""
    added: dict[int, torch.Tensor] = {}
    for edit in () if spec is None else spec.flat():
        if not isinstance(edit, Add) or edit.relative or edit.layer is None or edit.layer in added:
            return {}
        assert isinstance(edit.vector, torch.Tensor)
        added[edit.layer] = edit.scale * edit.vector.double()
    return {str(layer): float(vector.norm()) for layer, vector in added.items()}


def _known(verdicts: Sequence[Verdict]) -> list[float]:
    return [verdict.score for verdict in verdicts if verdict.score is not None]


def _stats(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    scores = np.array(_known(verdicts), dtype=np.float64)
    measures: dict[str, Any] = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    return {
        **{name: float(measure(scores)) if len(scores) else None for name, measure in measures.items()},
        "count": len(scores),
        "refusals": sum(verdict.refused for verdict in verdicts),
        "missing": sum(verdict.score is None and not verdict.refused for verdict in verdicts),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
