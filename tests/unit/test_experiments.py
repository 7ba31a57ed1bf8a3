"""Sweeps without an engine: the grid and its controls, measures' formulas, what a folder keeps, pictures, heat maps."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console

from steercap import Ablate, Add, Cap, CaptureHandle, Point, SetProjection, SteeringSpec
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.rows import Captures, Found
from steercap.cli.sweep import drawn
from steercap.core.receipt import Receipt
from steercap.errors import InvalidFile, InvalidRequest, InvalidSpec, RunDiffers, UnknownName, WorkerFailure
from steercap.lab.directions import random_like
from steercap.lab.measures import Measure
from steercap.lab.measures.texts import Length, Perplexity, Repetition, _perplexity, prompt_logprobs_of
from steercap.lab.mechanism.views import TokenHeatmap, heatmap_of, heatmap_of_layers
from steercap.lab.mechanism.views.heatmap import colour, contrast, ink
from steercap.lab.studies import StudyFolder, Table, Value, check_same
from steercap.lab.studies.running import measures_of
from steercap.lab.studies.sweeps import MEASURES, OPERATIONS, Answered, Sweep, SweepCondition, SweepResults
from steercap.lab.studies.sweeps.grid import SWEEP
from steercap.lab.studies.sweeps.running import _answer, mean_of, open_folder, run_sweep
from steercap.lab.studies.sweeps.summaries import Mean, Record, _figure
from steercap.steering import DirectionSet, LayerVectors
from steercap.steering.edits.inputs import alike, marks_of

WIDTH = 16
COLUMNS = Record.__struct_fields__
MODEL = {"name": "final", "dtype": "float32", "weights": "one"}


def vectors(*layers: int, seed: int = 0) -> LayerVectors:
    generator = torch.Generator().manual_seed(seed)
    return LayerVectors({layer: (layer + 1) * torch.randn(WIDTH, generator=generator) for layer in layers})


def sweep(**changed) -> Sweep:
    given = {
        "vectors": {"warm": vectors(1, 2, 3)},
        "layers": (1, 3),
        "scales": (0, 1, 2),
        "prompts": ["one", [{"role": "user", "content": "two"}]],
        "random": 3,
        "sampling_params": {},
    }
    return Sweep(**{**given, **changed})


def test_every_sweep_has_its_controls() -> None:
    """No steering once; for each vector, place and scale: as many random vectors as asked, and the other sign."""
    found = sweep().conditions()
    assert found[0] == SweepCondition(control="none")
    assert len(set(found)) == len(found) == 1 + 2 * (2 + 2 + 3 * 2)
    for layer in (1, 3):
        here = {(one.control, one.scale) for one in found if one.layers == (layer,)}
        assert here == {
            *(("", scale) for scale in (1, 2)),
            *(("negated", scale) for scale in (-1, -2)),
            *((f"random-0{at}", scale) for at in range(3) for scale in (1, 2)),
        }


def test_a_scale_of_the_other_sign_that_is_swept_is_no_second_control() -> None:
    """The same edit is not run twice under two names."""
    found = sweep(scales=(-1, 1, 2)).conditions()
    assert {one.scale for one in found if one.control == "negated"} == {-2}


def test_a_scale_that_changes_nothing_is_no_steering() -> None:
    """0 of "add" is the one clean run; 0 of "cap" bounds the projection at 0, and is run."""
    assert not [one for one in sweep().conditions() if one.control != "none" and one.scale == 0]
    assert [one for one in sweep(operations=("cap",)).conditions() if one.scale == 0 and one.control == ""]
    assert sweep().spec(SweepCondition(control="none")) is None


@pytest.mark.parametrize("at", [0, 7])
def test_random_controls_are_as_long_as_their_vector(at) -> None:
    """Layer by layer, to float32 rounding; and they point elsewhere: |cos| of random vectors in 16 dimensions."""
    own = vectors(1, 2, 3).named("warm")
    drawn = random_like(own, at, seed=0)
    for layer, norm in own.norms().items():
        assert drawn.norms()[layer] == pytest.approx(norm, rel=1e-6)
    assert all(abs(cosine) < 0.9 for cosine in drawn.named("").cosine(own.named("")).values())


def test_random_controls_are_drawn_by_the_seed_alone() -> None:
    """Equal for equal seeds, whatever layers are swept; different for another seed, index, layer or name."""
    own = vectors(1, 2, 3).named("warm")
    first = random_like(own, 0, seed=0)
    for one in ([2], 2, range(2, 3), slice(1, 3), "all"):
        assert torch.equal(first[2], random_like(own, 0, seed=0, layers=one)[2])
    same = first.unit()
    others = [random_like(own, 0, seed=1), random_like(own, 1, seed=0), random_like(own.named("cold"), 0, seed=0)]
    assert all(not torch.allclose(same[2], other.unit()[2], atol=1e-2) for other in others)
    assert not torch.allclose(same[1], same[2], atol=1e-2)


def test_the_spec_of_a_condition_is_its_edit_at_its_layers() -> None:
    """One edit a layer with that layer's vector, scale and tokens; a random control has a vector of the same norm."""
    one = sweep(layers=[(1, 3)], tokens="all")
    found = {(each.control, each.scale): one.spec(each) for each in one.conditions()}
    edits = found["", 2.0].flat()
    assert [(type(edit), edit.layer, edit.scale, str(edit.selection)) for edit in edits] == [
        (Add, 1, 2.0, "'all'"),
        (Add, 3, 2.0, "'all'"),
    ]
    assert torch.equal(edits[1].vector, one.vectors["warm"][3])
    assert [edit.scale for edit in found["negated", -2.0].flat()] == [-2.0, -2.0]
    noise = found["random-01", 2.0].flat()
    assert [float(edit.vector.norm()) for edit in noise] == pytest.approx(
        [float(edit.vector.norm()) for edit in edits], rel=1e-6
    )
    assert not torch.allclose(noise[0].vector, edits[0].vector, atol=1e-2)


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_an_operation_leaves_rows_alone_at_its_neutral_scale_only(name) -> None:
    """`neutral` is what the sweep drops, so it must be the scale that does nothing, by the formulas of `testing.edits`."""
    from steercap.testing.edits import edited

    own = vectors(1)
    rows = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(9)).double()
    how = OPERATIONS[name]
    for scale in (0.0, 0.5):
        edit = how.edit(own[1], scale, layer=1, tokens="all")
        assert isinstance(edit, {"add": Add, "ablate": Ablate, "cap": Cap, "set_projection": SetProjection}[name])
        same = torch.allclose(edited(SteeringSpec([edit]), Point(1, "resid_post"), rows, 1, 2), rows, atol=1e-9)
        assert same == (scale == how.neutral)


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_an_operation_is_signed_if_the_other_sign_is_the_reverse(name) -> None:
    """By the formulas of `testing.edits`; and a sweep has negated controls of no other operation."""
    from steercap.testing.edits import edited

    own, how = vectors(1), OPERATIONS[name]
    rows = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(9)).double()
    specs = [SteeringSpec([how.edit(own[1], scale, layer=1, tokens="all")]) for scale in (0.5, -0.5)]
    one, other = (edited(spec, Point(1, "resid_post"), rows, 1, 2) - rows for spec in specs)
    assert torch.allclose(one, -other, atol=1e-9) == how.signed
    controls = {one.control for one in sweep(operations=(name,), scales=(0.5, 1)).conditions()}
    assert ("negated" in controls) == how.signed
    assert "random-00" in controls


def test_scales_are_real_numbers_of_any_kind() -> None:
    """NumPy's scalars are what np.linspace gives; a bool, text or what is not finite is refused."""
    given = (np.float32(0.5), np.float64(1.5), np.int64(2), 3)
    assert sweep(scales=given).scales == (0.5, 1.5, 2.0, 3.0)
    assert all(type(scale) is float for scale in sweep(scales=given).scales)
    for wrong in (True, np.bool_(1), "1", np.float32("nan"), None):
        with pytest.raises(InvalidSpec, match="finite numbers"):
            sweep(scales=[wrong])


@dataclass(frozen=True)
class Named(Measure):
    """A measure of any label."""

    name: str

    @property
    def label(self) -> str:
        return self.name

    async def measure(self, model, records) -> list[float]:  # noqa: ARG002 -- not asked
        return [0.0] * len(records)


class Nameless(Measure):
    """A measure with a setting, and no repr that holds it."""

    label = "nameless"

    def __init__(self, least: int) -> None:
        self.least = least

    async def measure(self, model, records) -> list[float]:  # noqa: ARG002 -- not asked
        return [float(len(record.text) >= self.least) for record in records]


@dataclass(frozen=True)
class Weighed(Named):
    """A measure with a setting that has no repr of its own."""

    weigh: object = None


@pytest.mark.parametrize("measure", [Nameless(1), Weighed("x", Nameless(1)), Weighed("x", lambda: None)])
def test_a_measure_without_a_repr_of_its_own_is_refused(measure) -> None:
    """The address in it is another measure's later, whose stored values would be taken for those of this one."""
    with pytest.raises(InvalidSpec, match="told apart by an address"):
        measures_of([measure], COLUMNS)
    assert measures_of([Weighed("x", 3)], COLUMNS)


@pytest.mark.parametrize("column", Record.__struct_fields__)
def test_a_measure_is_no_column_that_every_table_has(column) -> None:
    """Its numbers would overwrite the answers' text or their scale, so it is refused before anything is asked."""
    with pytest.raises(InvalidSpec, match=f"column '{column}'"):
        measures_of([Named(column)], COLUMNS)
    assert measures_of([Named("warmth"), "length"], COLUMNS)[0].label == "warmth"


def test_requests_of_one_condition_are_together_and_their_seeds_agree() -> None:
    """So slots are used one after the other; and a prompt's samples differ among themselves, not between conditions."""
    one = sweep(samples=2)
    asked = list(one.requests())
    assert [request.number for request in asked] == list(range(len(one.conditions()) * 2 * 2))
    runs = [request.condition for request in asked]
    assert sum(a != b for a, b in itertools.pairwise(runs)) == len(one.conditions()) - 1
    seeds = {}
    for request in asked:
        seeds.setdefault((request.prompt, request.sample), set()).add(one.sampling_of(request)["seed"])
    assert all(len(found) == 1 for found in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds) == 4


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": "one"}, "give several in a list"),
        ({"prompts": [3]}, "prompts hold 3"),
        ({"vectors": {"warm": torch.ones(3)}}, "LayerVectors"),
        ({"vectors": vectors(1)}, "by|give a list or mapping"),
        ({"layers": (4,)}, r"no vectors for layers \[4\]"),
        ({"layers": (1, 1)}, "twice"),
        ({"layers": (-1,)}, "count from 0"),
        ({"layers": ("1",)}, "indices|index"),
        ({"layers": ()}, r"layers=\(\) is empty"),
        ({"layers": slice(9, 12)}, r"layers=\(\) is empty"),
        ({"layers": "one"}, r"layers='one'; give 'all', an index"),
        ({"scales": (1, 1.0)}, "twice"),
        ({"scales": (math.inf,)}, "finite"),
        ({"scales": ("1",)}, "finite"),
        ({"relative": True, "operations": ("cap",)}, "relative"),
        ({"sampling_params": {"n": 2}}, "samples="),
        ({"samples": 0}, "samples=0"),
        ({"samples": 2, "sampling_params": {"temperature": 0.0}}, "temperature 0"),
    ],
)
def test_a_sweep_that_means_nothing_is_refused(changed, says) -> None:
    """Before anything runs, with what is wrong."""
    with pytest.raises(InvalidSpec, match=says):
        sweep(**changed)


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        (2, ((2,),)),
        ("all", ((1,), (2,), (3,))),
        (range(2, 4), ((2,), (3,))),
        (slice(-2, None), ((2,), (3,))),
        ([(1,), (2, 3)], ((1,), (2, 3))),
    ],
)
def test_a_sweep_takes_layers_as_all_else_does(layers, groups) -> None:
    """An index, "all" of the vectors' layers, a range or a slice; each layer by itself, unless grouped."""
    assert sweep(layers=layers, vectors={"warm": vectors(1, 2, 3), "cold": vectors(0, 1, 2, 3)}).groups == groups


def test_an_unknown_operation_or_measure_is_named() -> None:
    """With those that exist."""
    with pytest.raises(UnknownName, match=r"known: .*'add'"):
        sweep(operations=("subtract",)).conditions()
    with pytest.raises(UnknownName, match=r"known: .*'perplexity'"):
        measures_of(["surprise"], COLUMNS)
    with pytest.raises(InvalidSpec, match="have the label 'repetition'"):
        measures_of([Repetition(2), "repetition"], COLUMNS)
    with pytest.raises(InvalidSpec, match="not a measure"):
        measures_of([3], COLUMNS)
    for alone in ("length", Repetition(2)):
        with pytest.raises(InvalidSpec, match=r"measures=.*; give a list of names from .*'length'"):
            measures_of(alone, COLUMNS)


def answered(*tokens: int, text: str = "") -> Answered:
    return Answered(prompt="p", prompt_token_ids=(7, 8), text=text, output_token_ids=tokens)


async def test_repetition_is_the_share_of_repeated_n_grams() -> None:
    """1 - different n-grams / n-grams; what is shorter than n repeats nothing."""
    records = [answered(1, 2, 3, 4), answered(1, 2, 3, 1, 2, 3), answered(5, 5, 5, 5, 5), answered(1, 2), answered()]
    assert await Repetition().measure(None, records) == pytest.approx([0, 1 - 3 / 4, 1 - 1 / 3, 0, 0])
    assert await Repetition(1).measure(None, records) == pytest.approx([0, 1 / 2, 4 / 5, 0, 0])
    with pytest.raises(InvalidSpec, match="n=0"):
        Repetition(0)


async def test_length_counts_generated_tokens() -> None:
    """The prompt's do not count."""
    assert await Length().measure(None, [answered(1, 2, 3), answered()]) == [3, 0]


class Logprob(msgspec.Struct):
    """As vLLM's, of which the attribute `logprob` is read."""

    logprob: float


@pytest.mark.parametrize("served", [False, True])
def test_perplexity_counts_the_answer_alone_and_the_token_itself(served) -> None:
    """exp of the mean over the answer; a likelier token in the entry, or an unlikely prompt, changes nothing. As vLLM gives
    log probabilities here, and as its server does, which writes -9999 for a token that is impossible.
    """
    given = [None, {8: Logprob(-50.0)}, {1: Logprob(-1.0), 4: Logprob(-0.1)}, {2: Logprob(-3.0)}]
    output = SimpleNamespace(prompt_logprobs=given)
    if served:
        said = [
            one and {str(token): {"logprob": word.logprob, "rank": 1} for token, word in one.items()} for one in given
        ]
        output = SimpleNamespace(choices=[SimpleNamespace(prompt_logprobs=said)])
    entries = prompt_logprobs_of(output)
    assert _perplexity([7, 8, 1, 2], 2, entries) == pytest.approx(math.exp(2.0))
    assert math.isnan(_perplexity([7, 8], 2, entries[:2]))
    given[3] = {2: Logprob(-9999.0 if served else -math.inf)}
    if served:
        output.choices[0].prompt_logprobs[3] = {"2": {"logprob": -9999.0}}
    assert _perplexity([7, 8, 1, 2], 2, prompt_logprobs_of(output)) == math.inf
    with pytest.raises(WorkerFailure, match="3 log probabilities for a prompt of 4"):
        _perplexity([7, 8, 1, 2], 2, entries[:3])


def record(one: Sweep, number: int) -> Record:
    request = list(one.requests())[number]
    condition = msgspec.structs.asdict(request.condition)
    return Record(
        number=number,
        **condition,
        prompt_index=request.prompt,
        sample=request.sample,
        prompt="p",
        prompt_token_ids=(7,),
        text=f"answer {number}",
        output_token_ids=(1, 2),
        finish_reason="length",
    )


async def test_a_prompt_that_holds_more_than_text_is_answered(tmp_path) -> None:
    """A model that takes it answers; the record has its texts."""

    async def run(*_: object, **__: object) -> SimpleNamespace:
        output = SimpleNamespace(prompt_token_ids=[7])
        sample = SimpleNamespace(text="a", token_ids=[1], finish_reason="stop")
        return SimpleNamespace(samples=[sample], output=output)

    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "What is it?"}, "Say so."]
    one = sweep(prompts=[[{"role": "user", "content": parts}]], layers=(1,), scales=(1,), random=0)
    kept = open_folder(tmp_path, one.definition(MODEL))
    await _answer(SimpleNamespace(run=run), one, kept, 1, None)
    assert [found.prompt for found in kept.answers.rows.values()] == ["What is it?\nSay so."] * len(
        list(one.requests())
    )


def test_a_folder_gives_back_what_was_written(tmp_path) -> None:
    """Parts written one after the other are one; what is there twice is there once; joining loses nothing."""
    one = sweep()
    folder = open_folder(tmp_path, one.definition(MODEL))
    rows = [record(one, number) for number in range(4)]
    for part in (rows[:2], rows[1:3], rows[3:]):
        folder.answers.add(part)
        folder.answers.flush()
    assert len(list((tmp_path / "answers").glob("*.parquet"))) == 3
    again = open_folder(tmp_path, one.definition(MODEL))
    assert list(again.answers.rows.values()) == rows
    again.answers.join()
    assert len(list((tmp_path / "answers").glob("*.parquet"))) == 1
    assert list(open_folder(tmp_path, one.definition(MODEL)).answers.rows.values()) == rows
    assert all(row.answers(request, "p") for row, request in zip(rows, one.requests(), strict=False))
    assert not rows[0].answers(list(one.requests())[1], "p")
    assert not rows[0].answers(next(one.requests()), "another prompt")


def test_a_row_replaces_one_that_was_joined(tmp_path) -> None:
    """Part after part, also where joining left a part with a large number, and whatever the number of digits."""
    kept = Table(tmp_path, Value)
    for number in range(3):
        kept.add([Value(number=number, value=1.0)])
        kept.flush()
    kept.join()
    (joined,) = tmp_path.glob("*.parquet")
    for value in (2.0, 3.0):
        kept = Table(tmp_path, Value)
        kept.add([Value(number=0, value=value)])
        kept.flush()
        assert [one.value for one in Table(tmp_path, Value).rows.values()] == [value, 1.0, 1.0]
        joined.rename(joined := tmp_path / f"99999-{joined.name[6:]}")


async def test_answers_to_another_prompt_are_asked_again_and_measured_again(tmp_path) -> None:
    """A part of another sweep of the same grid: its texts are replaced, and no value is kept of a text that is gone."""

    async def run(prompt: str, *_: object, **__: object) -> SimpleNamespace:
        sample = SimpleNamespace(text=f"to {prompt}", token_ids=[1], finish_reason="stop")
        return SimpleNamespace(samples=[sample], output=SimpleNamespace(prompt_token_ids=[7]))

    async def answered(one: Sweep, path: Path) -> StudyFolder[Record]:
        folder = open_folder(path, one.definition(MODEL))
        await _answer(SimpleNamespace(run=run), one, folder, 1, None)
        return folder

    first, other = (sweep(prompts=[one], layers=(1,), scales=(1,), random=0) for one in ("first", "other"))
    numbers = [one.number for one in first.requests()]
    kept = (await answered(first, tmp_path / "a")).values(Repetition(2))
    kept.add(Value(number=number, value=1.0) for number in numbers)
    kept.flush()
    await answered(other, tmp_path / "b")
    for part in (tmp_path / "b" / "answers").iterdir():
        shutil.copy(part, tmp_path / "a" / "answers" / f"00009-{part.name[6:]}")
    for turn in range(2):  # and then no more
        again = await answered(first, tmp_path / "a")
        assert {one.text for one in again.answers.rows.values()} == {"to first"}
        kept = again.values(Repetition(2))
        assert kept.rows.keys() & set(numbers) == (set(numbers) if turn else set())
        kept.add(Value(number=number, value=2.0) for number in numbers if number not in kept.rows)
        kept.flush()


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"scales": (0, 1, 3)}, "scales was"),
        ({"seed": 5}, "seed was 0, is 5"),
        ({"negated": False}, "negated was True, is False"),
        ({"vectors": {"warm": vectors(1, 2, 3, seed=4)}}, "vectors.warm was"),
        ({"prompts": ["another"]}, "prompts was"),
        ({"sampling_params": {"max_tokens": 3}}, "sampling.max_tokens was not set"),
        ({"tokens": "all", "samples": 2}, "tokens was .*; samples was"),
    ],
)
def test_another_sweep_in_the_folder_is_refused(changed, names, tmp_path) -> None:
    """Its answers are not those asked for; the message says what differs, and nothing else."""
    open_folder(tmp_path, sweep().definition(MODEL))
    open_folder(tmp_path, sweep().definition(MODEL))
    with pytest.raises(RunDiffers, match=names) as raised:
        open_folder(tmp_path, sweep(**changed).definition(MODEL))
    assert len(re.findall(r"\bwas\b", str(raised.value))) == len(changed) + 1  # and "the sweep it was begun with"
    with pytest.raises(RunDiffers, match=r"model\.weights was 'one', is 'other'; give"):
        open_folder(tmp_path, sweep().definition(MODEL | {"weights": "other"}))


async def test_samples_that_would_be_equal_are_not_begun(tmp_path) -> None:
    """A new folder has none that count as several; one of before is resumed."""
    one = sweep(samples=2, sampling_params={"top_k": 1})
    points = {Point(layer, "resid_post"): SimpleNamespace(width=vectors(layer).width) for layer in (1, 3)}
    model = SimpleNamespace(points=points, identity=lambda: MODEL)
    with pytest.raises(InvalidSpec, match="samples=2 at top_k 1 would all be the same text"):
        await run_sweep(model, one, out=tmp_path)
    open_folder(tmp_path, one.definition(MODEL))
    check_same(SWEEP, tmp_path, one)


def test_vectors_in_another_order_are_another_sweep(tmp_path) -> None:
    """Answers and values are numbered by it, so one vector's values would be told as another's."""
    both = {"warm": vectors(1, 3), "cold": vectors(1, 3, seed=1)}
    open_folder(tmp_path, sweep(vectors=both).definition(MODEL))
    open_folder(tmp_path, sweep(vectors=both).definition(MODEL))
    turned = sweep(vectors=dict(reversed(both.items()))).definition(MODEL)
    with pytest.raises(RunDiffers, match=r"order of vectors was \['warm', 'cold'\], is \['cold', 'warm'\]; give"):
        open_folder(tmp_path, turned)


def test_a_broken_definition_is_a_bad_file(tmp_path) -> None:
    """It is not taken for a new sweep's folder."""
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(InvalidFile, match=r"sweep\.json"):
        open_folder(tmp_path, sweep().definition(MODEL))


def test_a_measure_made_otherwise_has_values_of_its_own(tmp_path) -> None:
    """Values of 2-grams are not taken for those of 3-grams; NaN is kept as such."""
    folder = open_folder(tmp_path, sweep().definition(MODEL))
    kept = folder.values(Repetition(2))
    kept.add([Value(number=0, value=0.5), Value(number=1, value=math.nan)])
    kept.flush()
    assert folder.values(Repetition(3)).rows == {}
    again = folder.values(Repetition(2)).rows
    assert again[0].value == 0.5
    assert math.isnan(again[1].value)


def test_means_count_prompts() -> None:
    """Answers to one prompt are averaged first; a factor has the geometric mean; NaN is left out and not counted."""
    found = mean_of([[1, 3], [4], [math.nan]])
    assert (found.value, found.count) == (3, 3)
    assert found.error == pytest.approx(math.sqrt(2) / math.sqrt(2))  # of 2 and 4: deviation √2, over √2 prompts
    assert mean_of([[1.0], [100.0]], log=True).value == pytest.approx(10)
    assert math.isnan(mean_of([[math.nan]]).value)
    assert math.isnan(mean_of([[1.0]]).error)


def results(**changed) -> SweepResults:
    """Answers whose number grows with the dose of the vector, and of no control."""
    one = sweep(**changed)
    records = [record(one, request.number) for request in one.requests()]
    dose = [10 * row.scale if row.control in {"", "negated"} else row.prompt_index for row in records]
    noisy = [value + row.number % 3 for value, row in zip(dose, records, strict=True)]
    return SweepResults(
        one,
        records,
        {"length": noisy, "perplexity": [math.exp(abs(value) / 10) for value in noisy]},
        {"length": Length(), "perplexity": Perplexity()},
    )


def test_equal_prompts_are_one_prompt() -> None:
    """Four copies of a prompt are no four prompts: the standard error is that over different prompts, by NumPy."""
    one = sweep(prompts=["a", "b", "c"] * 4, random=0)
    records = [record(one, request.number) for request in one.requests()]
    values = [[2.0, 3, 7][row.prompt_index % 3] for row in records]
    for line in SweepResults(one, records, {"length": values}, {"length": Length()}).summary():
        found = line.means["length"]
        assert (found.value, found.count) == (pytest.approx(4), 12)
        assert found.error == pytest.approx(np.std([2.0, 3, 7], ddof=1) / math.sqrt(3))


def test_vectors_whose_names_differ_in_marks_alone_have_pictures_of_their_own(tmp_path) -> None:
    """As names of files all three are a_b, which is the first's; the last has a name that the second was given."""
    found = results(vectors={name: vectors(1, 3) for name in ("a-b", "a b", "a_b_2")}, scales=(1,), random=0)
    assert [path.name for path in drawn(found, tmp_path)] == ["a_b.png", "a_b_2.png", "a_b_2_2.png"]
    assert len(list(tmp_path.iterdir())) == 3


def test_an_effect_stands_beside_its_controls() -> None:
    """Those of its own place and scale; how far outside their range it lies is a number."""
    found = {(one.condition.layers, one.condition.scale): one for one in results().effects("length")}
    assert set(found) == {((layer,), scale) for layer in (1, 3) for scale in (1, 2)}
    one = found[(3,), 2.0]
    assert one.steered.value == pytest.approx(21, abs=1)
    assert one.negated.value == pytest.approx(-19, abs=1)
    assert len(one.random) == 3
    assert one.outside == pytest.approx((one.steered.value - max(one.random)) / (max(one.random) - min(one.random)))
    assert one.outside > 5
    for unknown in ((math.nan, 1.0, 2.0), (1.0, math.nan, 2.0)):
        assert math.isnan(msgspec.structs.replace(one, random=unknown).outside)
        assert math.isnan(msgspec.structs.replace(one, random=unknown).deviations)
    assert math.isnan(msgspec.structs.replace(one, random=(1.0, 1.0, math.nan)).deviations)
    assert one.deviations == pytest.approx((one.steered.value - np.mean(one.random)) / np.std(one.random, ddof=1))
    with pytest.raises(InvalidSpec, match="was not measured"):
        results().effects("score")


@pytest.mark.parametrize("value", [0.1, 0.2, 0.7])
@pytest.mark.parametrize("count", [3, 6, 20])
def test_random_vectors_that_agree_have_no_deviation(value, count) -> None:
    """Whatever rounding makes of their mean: one that equals them is at 0, another infinitely far."""
    one = msgspec.structs.replace(results().effects("length")[0], random=(value,) * count)
    for steered, away in ((value, 0.0), (value + 0.5, math.inf), (value - 0.5, -math.inf), (math.nan, math.nan)):
        at = msgspec.structs.replace(one, steered=Mean(steered, 0.0, 3)).deviations
        assert at == away or (math.isnan(at) and math.isnan(away))


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_an_effect_has_another_sign_where_that_is_the_reverse(name) -> None:
    """A bound at minus the scale, or at minus 0, is another bound."""
    for effect in results(operations=(name,), scales=(-2, 0, 2)).effects("length"):
        assert (effect.negated is not None) == OPERATIONS[name].signed


def test_a_notebook_shows_both_signs_of_each_effect() -> None:
    """A line for each measure, layer and scale, with the numbers of `effects`; the repr counts the answers."""
    one = results()
    shown = re.findall(r"<tr>(.*?)</tr>", one._repr_html_())[1:]
    lines = [re.findall(r"<td>(.*?)</td>", row) for row in shown]
    effects = [effect for measure in one.values for effect in one.effects(measure)]
    assert len(lines) == len(effects) == 8
    for line, effect in zip(lines, effects, strict=True):
        numbers = [effect.condition.scale, effect.plain.value, effect.steered.value, effect.negated.value]
        assert [float(cell) for cell in line[4:8]] == pytest.approx(numbers, rel=1e-3)
    assert f"records=<{len(one.records)} × Record>" in repr(one)
    assert len(repr(one)) < 1000


def test_the_table_has_a_row_an_answer(tmp_path) -> None:
    """With the condition and the numbers in columns, as Parquet too."""
    from pyarrow import parquet

    one = results()
    assert one.table.num_rows == len(one.records)
    assert {"vector", "scale", "control", "text", "length", "perplexity"} <= set(one.table.column_names)
    assert parquet.read_table(one.save(tmp_path / "all.parquet")).equals(one.table)
    with pytest.raises(InvalidFile, match=r"writes \.parquet"):
        one.save(tmp_path / "all.csv")
    assert not (tmp_path / "all.csv").exists()


@pytest.mark.parametrize("operations", [("add",), ("cap", "add")])
def test_doses_are_drawn(operations, tmp_path) -> None:
    """A picture of some kB, a column an operation and its layers; all controls are in the legend."""
    from matplotlib import image

    path = results(operations=operations).plot(tmp_path / "dose.png")
    height, width, _ = image.imread(path).shape
    assert width > height * len(operations)
    assert 10_000 < path.stat().st_size < 400_000
    text = results(operations=operations).plot(tmp_path / "dose.svg", measures=["perplexity"]).read_text()
    for said in ("random vectors", "negated", "no steering", "standard error", "perplexity"):
        assert said in text


def test_a_picture_needs_one_vector_and_a_measure(tmp_path) -> None:
    """The message names what there is."""
    with pytest.raises(InvalidSpec, match="warm"):
        results().plot(tmp_path / "x.png", vector="cold")
    with pytest.raises(InvalidSpec, match="was not measured"):
        results().plot(tmp_path / "x.png", measures=["score"])
    with pytest.raises(InvalidSpec, match="change nothing"):
        results(scales=(0,)).plot(tmp_path / "x.png")
    two = results(vectors={"warm": vectors(1, 3), "cold": vectors(1, 3, seed=1)})
    with pytest.raises(InvalidSpec, match="cold"):
        two.plot(tmp_path / "x.png")


@pytest.mark.parametrize("operations", [("add",), ("add", "ablate")])
def test_the_legend_of_doses_is_within_the_picture(operations) -> None:
    """Of one column of panels, which is narrower than all entries beside each other, as of several."""
    figure = _figure(results(operations=operations, layers=[(1,)]), "warm", ["perplexity"])
    figure.canvas.draw()
    (legend,) = figure.legends
    said, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= said.x0
    assert said.x1 <= whole.x1


@pytest.mark.parametrize("registry", [OPERATIONS, MEASURES])
def test_a_registry_of_experiments_names_what_it_knows(registry) -> None:
    """An unknown name is an error that lists the known ones."""
    with pytest.raises(UnknownName, match=f"known: .*'{next(iter(registry))}'"):
        registry["nothing"]


# Heat maps


HOSTILE = ["<b>", " \"x\" & 'y'", "\n", "a\tb", "", "\x1b[31m"]


def test_a_heat_map_shows_every_token_and_runs_none() -> None:
    """Markup, quotes and control characters of tokens are text, also where the mouse rests; spaces are seen."""
    html = TokenHeatmap(HOSTILE, [0.0, 1.5, -2.0, 0.5, 0.0, 1.0], title="<script>")._repr_html_()
    assert "<b>" not in html
    assert "<script>" not in html
    assert "\x1b" not in html
    assert html.count("<span title=") == len(HOSTILE)
    assert "&lt;b&gt;" in html
    assert "↵<br>" in html
    assert "·" in html
    assert "∅" in html
    assert re.search(r'title="2: [^"]*-2"', html)
    for attribute in re.findall(r'title="([^"]*)"', html):
        assert not set("<>\"'") & set(attribute)


def test_a_heat_map_in_a_terminal_is_coloured_text() -> None:
    """Every name is a line with its own colours; control characters of tokens do not reach the terminal."""
    console = Console(width=200, color_system="truecolor", force_terminal=True, file=io.StringIO())
    console.print(TokenHeatmap(["a", "\x1b[2J"], [[1.0, -1.0], [0.0, 2.0]], ("up", "down"), "title"))
    text = console.file.getvalue()
    assert "\x1b[2J" not in text
    for said in ("title", "up", "down", "orange"):
        assert said in text
    red, green, blue = (int(colour(1.0, 0.0, 2.0)[at : at + 2], 16) for at in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}" in text


def test_colours_are_even_about_the_centre_and_text_is_readable() -> None:
    """The centre is white, equal distances are equally far from it; contrast is at least 4.5, WCAG's for small text."""
    assert colour(3.0, 3.0, 1.0) == colour(5.0, 5.0, 0.0) == "#f7f7f7"
    assert colour(9.0, 3.0, 1.0) == colour(4.0, 3.0, 1.0) != colour(2.0, 3.0, 1.0)
    assert colour(math.nan, 0.0, 1.0) == "#c8c8c8"
    for step in range(-20, 21):
        background = colour(step / 20, 0.0, 1.0)
        assert contrast(ink(background), background) >= 4.5


def test_the_legend_says_the_range() -> None:
    """Where colours end, where they are white, and what there is."""
    one = TokenHeatmap(["a", "b", "c"], [1.0, 2.0, 40.0], centre=1.0, limit=3.0, unit="nats")
    assert one.legend == "≤ -2 blue · 1 white · ≥ 4 orange nats; values 1 to 40"
    assert TokenHeatmap(["a"], [math.nan]).legend.endswith("no finite values")


def test_one_token_far_off_leaves_the_others_their_colours() -> None:
    """The first token of a prompt is one, in texts of any length; where most values are the centre, all count."""
    for others in (2, 50):
        assert TokenHeatmap(["x"] * (others + 1), [1000.0, *([1.0, -2.0] * (others // 2))]).limit == 2
    assert TokenHeatmap(["x"] * 4, [0.0, 0.0, 0.0, 7.0]).limit == 7
    assert TokenHeatmap(["x"] * 2, [0.0, 0.0]).limit == 0


def test_a_heat_map_is_drawn(tmp_path) -> None:
    """Tokens by names, with letters that no font has, and a dollar that is not a formula."""
    path = TokenHeatmap(["$x$", "日本", "\n"], torch.randn(3, 4), tuple("abcd"), "title").plot(tmp_path / "x.png")
    assert path.stat().st_size > 5_000


def test_values_may_be_a_tensor_of_any_dtype() -> None:
    """Bfloat16, and what belongs to a graph of gradients, come as rows do."""
    for values in (torch.tensor([1.5, 2.0], dtype=torch.bfloat16), torch.tensor([1.5, 2.0], requires_grad=True)):
        assert TokenHeatmap(["a", "b"], values).values.tolist() == [[1.5], [2.0]]


@pytest.mark.parametrize(
    ("tokens", "values", "names"), [([], [], ()), (["a"], [1.0, 2.0], ()), (["a"], [[1.0, 2.0]], ("up",))]
)
def test_values_of_another_shape_are_refused(tokens, values, names) -> None:
    """They would colour the wrong tokens."""
    with pytest.raises(InvalidRequest, match="at least one token"):
        TokenHeatmap(tokens, values, names)


class Words:
    """Of a tokenizer, what is asked of it."""

    def decode(self, ids, **_) -> str:
        return f"w{ids[0]}"


def handle_of(rows, directions=(), marks=None) -> CaptureHandle:
    """A handle with rows of every other token, of five, by layer, as one that was read from a file."""
    points = tuple(Point(layer, "resid_post") for layer in rows)
    receipt = Receipt(points, np.arange(0, 6, 2), np.array([4, 5, 6]), 0, None, None)
    captures = Captures(dict(zip(points, rows.values(), strict=True)), 2)
    return CaptureHandle(
        request_id="",
        model="",
        text="",
        prompt_token_ids=(4, 8, 5, 8),
        output_token_ids=(6, 7),
        points=points,
        num_layers=2,
        lifecycle=Lifecycle("", found=Found(captures, receipt)),
        directions=directions,
        marks=marks or {},
    )


def test_a_heat_map_of_a_handle_projects_rows_or_takes_projections() -> None:
    """Full rows and rows that the workers have projected give the same picture, by layer and by name."""
    own = DirectionSet({"warm": vectors(0, 1), "cold": vectors(0, 1, seed=3)})
    rows = {layer: torch.randn(3, WIDTH) for layer in (0, 1)}
    projected = {layer: own.project(rows[layer], layer) for layer in (0, 1)}
    full, done = handle_of(rows), handle_of(projected, ("warm", "cold"))
    for layer in (1, -1):
        one = heatmap_of(full, own, layer, Words())
        assert (one.tokens, one.names) == (("w4", "w5", "w6"), ("warm", "cold"))
        assert one.positions == (0, 2, 4)
        assert np.array_equal(one.values, projected[1].double().numpy())
        assert np.array_equal(one.values, heatmap_of(done, own, layer, Words()).values)
    turned = heatmap_of(done, own.select(["cold", "warm"]), 1, Words())
    assert np.array_equal(turned.values[:, ::-1], projected[1].double().numpy())
    for handle in (full, done):
        layers = heatmap_of_layers(handle, own["cold"], Words())
        assert layers.positions == (0, 2, 4)
        assert layers.names == ("1", "0"), "layer 0 is at the bottom"
        # a product with one vector and with two at once may round otherwise
        assert np.allclose(layers.values, torch.stack([projected[at][:, 1] for at in (1, 0)], 1).numpy(), atol=1e-5)


def test_a_heat_map_is_told_in_few_words() -> None:
    """However many tokens it has: notebooks and logs keep the text."""
    told = repr(TokenHeatmap(["word"] * 5000, torch.linspace(-1, 3, 5000), ("warm",), "title"))
    assert len(told) < 200
    for said in ("'title'", "5000 tokens", "warm", "-1 to 3"):
        assert said in told


def test_heat_maps_of_several_handles_can_have_one_scale() -> None:
    """With one centre and limit a value has one colour whatever else was read, so that answers can be compared."""
    own = vectors(0)
    near, far = (handle_of({0: torch.full((3, 1), size)}, ("warm",)) for size in (1.0, 50.0))
    same = {"centre": 1.0, "limit": 4.0}
    for view, of in ((heatmap_of, (DirectionSet({"warm": own}), 0)), (heatmap_of_layers, (own.named("warm"),))):
        maps = [view(handle, *of, Words(), **same) for handle in (near, far)]
        assert {(one.centre, one.limit) for one in maps} == {(1.0, 4.0)}
        assert view(far, *of, Words()).limit == 50.0


def test_a_heat_map_of_other_directions_is_refused() -> None:
    """Projections are known by name, rows by their width, layers by their number."""
    own = DirectionSet({"warm": vectors(0, 1)})
    rows = {layer: torch.randn(3, WIDTH) for layer in (0, 1)}
    with pytest.raises(InvalidRequest, match=r"none on \['warm'\]"):
        heatmap_of(handle_of({0: torch.randn(3, 1)}, ("cold",)), own, 0, Words())
    with pytest.raises(InvalidRequest, match="width 16"):
        heatmap_of(handle_of({0: torch.randn(3, 5)}), own, 0, Words())
    with pytest.raises(InvalidSpec, match="layers"):
        heatmap_of(handle_of(rows), own.at_layers([0]), 1, Words())
    with pytest.raises(InvalidRequest, match="in common"):
        heatmap_of_layers(handle_of({0: rows[0]}), vectors(1), Words())


def test_directions_of_another_model_than_the_rows_are_warned_of() -> None:
    """Rows of the handle's model; an unknown one is compared with nothing."""
    own = DirectionSet({"warm": dataclasses.replace(vectors(0), model="mistralai/Mistral-7B")})
    for model, count in (("meta-llama/Llama-3.1-8B", 1), ("other/mistral-7b", 0), ("", 0)):
        handle = handle_of({0: torch.randn(3, WIDTH)})
        handle.model = model
        for how, given in ((heatmap_of, (own, 0)), (heatmap_of_layers, (own["warm"],))):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                how(handle, *given, Words())
            assert len(seen) == count


def test_projections_on_other_directions_of_the_same_names_are_refused(tmp_path) -> None:
    """A handle knows what its rows were projected on, in a file too: by direction and layer, at any length."""
    own = DirectionSet({"warm": vectors(0, 1), "cold": vectors(0, 1, seed=3)})
    other = DirectionSet({"warm": vectors(0, 1), "cold": vectors(0, 1, seed=4)})
    projected = {layer: own.project(torch.randn(3, WIDTH), layer) for layer in (0, 1)}
    made = handle_of(projected, ("warm", "cold"), {layer: own.marks(layer) for layer in (0, 1)})
    for handle in (made, CaptureHandle.load(made.save(tmp_path / "one.safetensors"))):
        with pytest.raises(InvalidRequest, match=r"other directions of the names \['cold'\]"):
            heatmap_of(handle, other, 1, Words())
        with pytest.raises(InvalidRequest, match=r"other directions of the names \['cold'\]"):
            heatmap_of_layers(handle, other["cold"], Words())
        for same in (
            own,
            own.unit(),
            own.unit().unit(),
            own.select(["cold"]),
            own.at_layers([1]),
            other.select("warm"),
        ):
            assert heatmap_of(handle, same, 1, Words()).names == tuple(same)
        assert heatmap_of_layers(handle, (own["cold"] * 3.7).named("cold"), Words()).names == ("1", "0")
    nameless = handle_of(projected, ("warm", "cold"))  # as older files are
    assert heatmap_of(nameless, other, 1, Words()).names == ("warm", "cold")


@pytest.mark.parametrize("width", [8, 576, 8192])
def test_marks_tell_directions_apart_and_not_their_rounding(width) -> None:
    """A direction turned by half a degree is another; one that is scaled, or whose last bits differ, is the same."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        vector, aside = torch.randn(2, width, generator=generator, dtype=torch.float64)
        vector, aside = vector / vector.norm(), aside - aside @ vector * vector / vector.norm() ** 2
        turned = vector + 0.009 * aside / aside.norm()
        first, scaled, rounded, other = (
            marks_of((one / one.norm()).float()[None])[0]
            for one in (vector, vector * 3.3, vector.float().double() * (1 + 1e-7), turned)
        )
        assert alike(first, scaled)
        assert alike(first, rounded)
        assert not alike(first, other)
