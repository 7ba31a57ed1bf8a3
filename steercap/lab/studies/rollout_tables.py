"""Tables of a rollout: scores of a condition on each question, means of conditions, and a judge's replies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from steercap.files.base import write_whole
from steercap.files.tables import write_table
from steercap.lab.measures.statistics import cluster_means, estimate
from steercap.lab.studies.evaluation.results import EvaluationResults
from steercap.steering.edits.add import Add
from steercap.steering.spec import SteeringSpec

#: Names of conditions, by method and dose.
Names = Mapping[tuple[str, float], str]


class Verdict(NamedTuple):
    """Score of an answer, 0 to 100, None without one; and whether the answer refuses."""

    score: float | None
    refused: bool


class JudgeRow(msgspec.Struct, frozen=True):
    """Judgement of one answer, by the answer's number; see `steercap.lab.measures.scores.judge.Judgement`."""

    number: int
    score: float | None
    refused: bool
    reply: str


class JudgeScore(msgspec.Struct, frozen=True, kw_only=True):
    """Answer with its judgement, a row of `judge_scores.parquet`.

    Args:
        condition: name of method and dose.
        question_index, sample, turn: index of the question, of the conversation about it, and of the answer in that.
        question, answer: text that was asked, and the model's answer.
        score: judge's score, None if the answer refuses or the reply has no score.
        refused: True if the judge says that the answer refuses.
        reply: text of the judge's reply.
    """

    condition: str
    question_index: int
    sample: int
    turn: int
    question: str
    answer: str
    score: float | None
    refused: bool
    reply: str


class QuestionScore(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to one question under one condition, a row of `..._per_question.parquet`.

    Args:
        condition: name of method and dose.
        question_index: index of the question.
        question: text of the question, several turns one a line.
        score: mean of the scores, None without any.
        answers, scored, refused: number of answers, of those with a score, and of those that refuse.
    """

    condition: str
    question_index: int
    question: str
    score: float | None
    answers: int
    scored: int
    refused: int


class ConditionScore(msgspec.Struct, frozen=True, kw_only=True):
    """Means of one condition, an entry of `..._summary.json`.

    Args:
        score: mean over questions of their means, None if no answer has a score.
        low, high: ends of the 95 % interval over questions, None for fewer than two; see
            `steercap.lab.measures.statistics.estimate`.
        questions: number of questions with a score.
        answers, scored, refused: number of answers, of those with a score, and of those that refuse.
        norms: length of what is added at each layer, in the units of the stream; empty if nothing is only added.
    """

    score: float | None
    low: float | None
    high: float | None
    questions: int
    answers: int
    scored: int
    refused: int
    norms: dict[str, float]


class RolloutSummary(msgspec.Struct, frozen=True):
    """Means of every condition of a data set, by the name of the condition.

    Args:
        name: name of the data set.
        minilm: means by its classifier; refusals are those of the measure "refusal", by phrases.
        judge: means by the judge, refusals as it says; None without a judge.
    """

    name: str
    minilm: dict[str, ConditionScore]
    judge: dict[str, ConditionScore] | None


class SummaryFile(msgspec.Struct, frozen=True):
    """Content of `minilm_summary.json` and `judge_summary.json`."""

    data_set: str
    scorer: str
    conditions: dict[str, ConditionScore]


def save_tables(
    folder: Path, scorer: str, results: EvaluationResults, names: Names, verdicts: Sequence[Verdict]
) -> dict[str, ConditionScore]:
    """Write `SCORER_per_question.parquet` and `SCORER_summary.json`, and return the means of the conditions.

    Args:
        folder: folder of the data set, which has its name.
        scorer: "minilm" or "judge".
        results: answers.
        names: names of their conditions.
        verdicts: score and refusal of each answer.
    """
    groups: dict[str, dict[int, list[Verdict]]] = {}
    for answer, verdict in zip(results.answers, verdicts, strict=True):
        group = groups.setdefault(names[answer.method, answer.dose], {})
        group.setdefault(answer.question, []).append(verdict)
    specs = {names[one.method, one.dose]: results.evaluation.spec(one) for one in results.evaluation.conditions()}
    found = {condition: _condition(list(group.values()), specs[condition]) for condition, group in groups.items()}
    questions = ["\n".join(turns) for turns in results.evaluation.questions]
    rows = [
        QuestionScore(
            condition=condition, question_index=at, question=questions[at], score=_means([own])[0], **_counts(own)
        )
        for condition, group in groups.items()
        for at, own in group.items()
    ]
    write_table(folder / f"{scorer}_per_question.parquet", rows)
    with write_whole(folder / f"{scorer}_summary.json") as scratch:
        content = msgspec.json.encode(SummaryFile(folder.name, scorer, found))
        scratch.write_bytes(msgspec.json.format(content, indent=2) + b"\n")
    return found


def save_judge_scores(folder: Path, results: EvaluationResults, names: Names, rows: Sequence[JudgeRow]) -> Path:
    """Write `judge_scores.parquet`: every answer with its score, whether it refuses, and the judge's reply."""
    found = [
        JudgeScore(
            condition=names[answer.method, answer.dose],
            question_index=answer.question,
            sample=answer.sample,
            turn=answer.turn,
            question=answer.prompt,
            answer=answer.text,
            score=row.score,
            refused=row.refused,
            reply=row.reply,
        )
        for answer, row in zip(results.answers, rows, strict=True)
    ]
    return write_table(folder / "judge_scores.parquet", found)


def _condition(questions: Sequence[Sequence[Verdict]], spec: SteeringSpec | None) -> ConditionScore:
    found = estimate(cluster_means([_known(own) for own in questions]))
    counts = _counts([verdict for own in questions for verdict in own])
    return ConditionScore(
        score=_number(found.value),
        low=_number(found.low),
        high=_number(found.high),
        questions=found.clusters,
        norms=_norms(spec),
        **counts,
    )


def _norms(spec: SteeringSpec | None) -> dict[str, float]:
    """Return the length of what is added at each layer; nothing for other edits than `Add`, each of one layer."""
    edits = [] if spec is None else spec.flat()
    added: dict[int, torch.Tensor] = {}
    for edit in edits:
        if not isinstance(edit, Add) or edit.relative or edit.layer is None or edit.layer in added:
            return {}
        assert isinstance(edit.vector, torch.Tensor)
        added[edit.layer] = edit.scale * edit.vector.double()
    return {str(layer): float(vector.norm()) for layer, vector in added.items()}


def _known(verdicts: Sequence[Verdict]) -> list[float]:
    return [verdict.score for verdict in verdicts if verdict.score is not None]


def _means(questions: Sequence[Sequence[Verdict]]) -> list[float | None]:
    return [_number(mean) for mean in cluster_means([_known(own) for own in questions]).tolist()]


def _counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    refused = sum(verdict.refused for verdict in verdicts)
    return {"answers": len(verdicts), "scored": len(_known(verdicts)), "refused": refused}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
