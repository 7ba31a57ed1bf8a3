"""Patching without an engine: grids and their cells, metrics, and what is made of values."""

from __future__ import annotations

import contextlib
import math
from itertools import permutations
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pyarrow import csv, parquet
from transformers import AutoTokenizer

from steercap.core.prompts import tokens_of
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.core.tokens import TokenSelection
from steercap.errors import EngineFailure, InvalidFile, InvalidSelection, InvalidSpec, UnknownName
from steercap.lab.mechanism.patching import (
    Effects,
    Grid,
    LogitDifference,
    LogProbability,
    Measured,
    PatchEffect,
    Receiver,
    path_patch,
)
from steercap.lab.mechanism.patching.plots import Scale
from steercap.lab.mechanism.patching.points import PatchedPlace, ResolvedGrid, elements_of, positions_of
from steercap.lab.mechanism.patching.results import effect_of
from steercap.lab.mechanism.patching.running import Pair, pairs_of
from steercap.testing import tiny_checkpoint

HEADS = PointSchema((3, 8), "float32")


#: That of tiny checkpoints: a letter is a token.
TOKENIZER = AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3"))
A, B, C = (TOKENIZER.encode(letter)[0] for letter in "abc")


def places(grid: Grid, *points: Point) -> ResolvedGrid:
    return ResolvedGrid(grid, points, {point: grid.heads_of(point, HEADS) for point in points})


def effect(value: float, *, source: float | None = 4.0, **columns: Any) -> PatchEffect:
    """A run of a pair whose own value is 2."""
    known = {"pair": 0, "layer": 0, "site": "z", "head": None, "position": 0, "token": "a"} | columns
    return PatchEffect(**known, value=value, base=2.0, source=source)


# Grids


def test_a_grid_has_a_run_for_each_site_layer_head_and_position() -> None:
    """Site by site, layer by layer, head by head; together, all positions are one run."""
    points = [Point(layer, site) for layer in (0, 5) for site in ("z", "q")]
    grid = Grid(sites=["q", "z"], heads=[2, 0], tokens=[0, -1])
    positions = positions_of(grid.selection, 4)
    assert positions == [0, 3]
    cells = list(places(grid, *points).cells(positions))
    assert cells[:3] == [
        PatchedPlace((0, "q"), 2, (0,)),
        PatchedPlace((0, "q"), 2, (3,)),
        PatchedPlace((0, "q"), 0, (0,)),
    ]
    assert [cell.point for cell in cells[::4]] == [(0, "q"), (5, "q"), (0, "z"), (5, "z")]
    assert len(cells) == places(grid, *points).count(2) == 16
    together = places(Grid(sites="z", heads="all", tokens=[0, -1], together=True), points[0])
    assert list(together.cells(positions)) == [PatchedPlace((0, "z"), head, (0, 3)) for head in range(3)]
    assert together.count(2) == 3


def test_elements_of_a_head_are_its_part_of_the_row() -> None:
    """Whole rows have no part; a negative head counts from the last."""
    assert elements_of(None, HEADS) is None
    assert elements_of(2, HEADS) == slice(16, 24)
    assert places(Grid(sites="z", heads=-1), Point(0, "z")).heads == {(0, "z"): [2]}


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Grid(sites=["z", "resid"]), UnknownName, "unknown site 'resid'; did you mean"),
        (lambda: Grid(heads="some"), InvalidSpec, "heads='some'"),
        (lambda: Grid(heads=[1, 1]), InvalidSpec, "several that differ"),
        (lambda: Grid(heads=[True]), InvalidSpec, "heads="),
        (lambda: Grid(together="yes"), InvalidSpec, "together='yes'"),
        (lambda: Grid(tokens="last"), InvalidSelection, "unknown tokens"),
        (lambda: places(Grid(heads=3), Point(0, "z")), InvalidSpec, "3 heads, 0 to 2"),
        (lambda: places(Grid(heads=[0, -3]), Point(0, "z")), InvalidSpec, r"are \[0, 0\] of 3 heads"),
        (lambda: Grid(heads=0).heads_of(Point(0, "mlp_out"), PointSchema((24,), "float32")), InvalidSpec, "no heads"),
        (lambda: positions_of(TokenSelection.parse("generated"), 4), InvalidSelection, "selects none"),
        (lambda: Receiver("z", [(0, 1)]), InvalidSpec, "site='z'"),
        (lambda: Receiver("q", [(0, 1, 2)]), InvalidSpec, "(layer, head)"),
        (lambda: Receiver("q", []), InvalidSpec, "(layer, head)"),
        (lambda: Receiver("q", [(0, 1), (0, 1)]), InvalidSpec, "a head twice"),
    ],
)
def test_what_makes_no_sense_is_refused(make, error, says) -> None:
    """The message names the value."""
    with pytest.raises(error, match=says.replace("(", r"\(").replace(")", r"\)")):
        make()


async def test_the_direction_says_which_prompt_is_changed() -> None:
    """The tokens shown are those of that prompt; prompts of token ids are prompts, and not lists of them."""

    async def tokenize(text: Any, **_special: Any) -> list[int]:
        return tokens_of(TOKENIZER, text, special=True)

    model: Any = SimpleNamespace(tokenizer=TOKENIZER, tokenize=tokenize)
    (clean,) = await pairs_of(model, "abc", "axc", direction="noise", align=None)
    (corrupted,) = await pairs_of(model, [A, B, C], "axc", direction="denoise", align=None)
    assert (clean.tokens, corrupted.tokens) == (("a", "b", "c"), ("a", "x", "c"))
    assert (corrupted.base, corrupted.source) == (clean.source, clean.base)
    assert (await pairs_of(model, "abcd", "cd", direction="denoise", align="end"))[0].shift == 2


# Metrics


def said(**logprobs: float) -> Any:
    """vLLM's output, as far as a metric reads it."""
    first = {TOKENIZER.encode(letter)[0]: SimpleNamespace(logprob=value) for letter, value in logprobs.items()}
    return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[first])])


def test_a_logit_difference_asks_for_both_tokens_of_each_pair() -> None:
    """One answer for all pairs or one each, as text or id; log probabilities are subtracted."""
    first, second = LogitDifference([("a", "b"), (C, "a")]).asked(TOKENIZER, 2)
    assert [one.sampling_params["logprob_token_ids"] for one in (first, second)] == [[A, B], [C, A]]
    assert first.read(said(a=-1.0, b=-3.5)) == 2.5
    assert len(LogitDifference(("a", "b")).asked(TOKENIZER, 3)) == 3
    (one,) = LogProbability("a").asked(TOKENIZER, 1)
    assert one.read(said(a=-1.0)) == -1.0
    assert [one.read(said()) for one in Measured(lambda _output, pair: pair, {}).asked(TOKENIZER, 2)] == [0.0, 1.0]
    with pytest.raises(InvalidSpec, match="a run has one sample"):
        Measured(lambda _output, pair: pair, {"n": 2}).asked(TOKENIZER, 2)


@pytest.mark.parametrize("logprobs", [{}, {"a": -1.0}, {"a": -1.0, "b": -math.inf}, {"a": math.nan, "b": -1.0}])
def test_a_log_probability_that_is_not_there_is_an_error(logprobs) -> None:
    """What another request in the batch can displace is never read as a number."""
    (asked,) = LogitDifference(("a", "b")).asked(TOKENIZER, 1)
    with pytest.raises(EngineFailure, match="log probability of token"):
        asked.read(said(**logprobs))


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (LogitDifference(("ab", "c")), "'ab' is 2 tokens"),
        (LogitDifference(("a", "a")), "the same token"),
        (LogitDifference(("a", 259)), "259 is not a token"),
        (LogitDifference([("a", "b"), ("a",)]), "a token each"),
        (LogitDifference([("a", "b")]), "for 2 pairs"),
        (LogitDifference("a"), r"give one \(right, wrong\) for all, or a list of 2"),
        (LogProbability(["a"]), "for 2 pairs; give one token for all"),
        (LogProbability(-1), "-1 is not a token"),
    ],
)
def test_answers_are_tokens(metric, says) -> None:
    """A text of several tokens would be scored by its first."""
    with pytest.raises(InvalidSpec, match=says):
        metric.asked(TOKENIZER, 2)


# Paths


class Fake:
    """Model of two layers of two heads; the output of a run names the sites that were replaced in it."""

    tokenizer, num_layers, settings = TOKENIZER, 2, SimpleNamespace(steering_slots=4)
    points: ClassVar = {Point(layer, site): PointSchema((2, 8), "float32") for layer in range(2) for site in "zq"}

    async def tokenize(self, text: Any, **_special: Any) -> list[int]:
        return tokens_of(TOKENIZER, text, special=True)

    async def run(self, prompt, _sampling, *, capture=None, steering=None) -> Any:
        length = len(prompt["prompt_token_ids"])
        rows = {point: torch.zeros(length, 2, 8) for point in self.points} if capture else {}
        handle = contextlib.AsyncExitStack()
        handle.captures, handle.positions = rows, torch.arange(length)
        replaced = {edit.site for edit in steering.edits} if steering else set()
        return SimpleNamespace(output=replaced, handle=handle)


@pytest.mark.parametrize("receivers", list(permutations(["logits", "one", "other"])))
async def test_the_effect_on_the_logits_is_that_of_the_first_run(receivers) -> None:
    """Wherever it is listed: in the first run heads' outputs are replaced, in a second the queries of a receiver."""
    metric = Measured(lambda output, _pair: {"": 0.0, "z": 1.0, "q": 2.0}["".join(output)], {})
    given = [one if one == "logits" else Receiver("q", [(1, 0)], name=one) for one in receivers]
    found = await path_patch(Fake(), "ab", "ac", metric=metric, senders=[(0, 1)], receivers=given)
    assert {one.receiver: one.value for one in found.records} == {"logits": 1.0, "one": 2.0, "other": 2.0}


# Results


def test_an_effect_is_zero_unchanged_and_one_as_good_as_the_other() -> None:
    """NaN where there is no other run, or none that differs."""
    assert [effect(value).effect for value in (2.0, 3.0, 4.0)] == [0.0, 0.5, 1.0]
    assert math.isnan(effect(3.0, source=None).effect)
    assert math.isnan(effect(3.0, source=2.0).effect)
    assert effect(3.0).difference == 1.0


def test_a_heat_map_is_the_mean_over_pairs() -> None:
    """Of effects, the mean difference over the mean distance of both runs; a place that was not run is NaN."""
    records = [
        effect(3.0, layer=2, position=0),
        effect(3.0, layer=2, position=0, pair=1, source=8.0),
        effect(2.5, layer=5, position=1),
    ]
    effects = Effects(records, [["a", "b"], ["a", "c"]])
    np.testing.assert_allclose(effects.array(), [[2 / 8, math.nan], [math.nan, 0.25]])
    np.testing.assert_allclose(effects.array("difference"), [[1.0, math.nan], [math.nan, 0.5]])
    np.testing.assert_allclose(effects.array("value"), [[3.0, math.nan], [math.nan, 2.5]])
    assert (effects.layers, effects.columns, effects.axis) == ([2, 5], [0, 1], "position")
    assert effects.labels() == ["a 0", "1"], "a token is shown where all pairs have it"
    assert effects.where(pair=0).labels() == ["a 0", "b 1"]


def test_columns_are_heads_where_positions_are_not() -> None:
    """Heads at one position, or at several at once; an ablation shows differences."""
    records = [effect(2.0 + head, head=head, position=None, source=None) for head in range(3)]
    effects = Effects(records, [["a"]])
    assert (effects.axis, effects.labels()) == ("head", ["0", "1", "2"])
    np.testing.assert_allclose(effects.array(), [[0.0, 1.0, 2.0]])
    with pytest.raises(InvalidSpec, match="an ablation has no 'effect'"):
        effects.array("effect")
    whole = Effects([effect(3.0, position=None)], [["a"]])
    assert (whole.columns, whole.labels()) == ([None], ["several"])


def test_tokens_changed_together_are_at_no_position_even_if_there_is_one() -> None:
    """Pairs whose selections have one token and two: one column, as of groups of one length."""
    pairs = [Pair(0, (1, 2), (1, 3), ("a", "b")), Pair(1, (1, 2, 4), (1, 3, 4), ("a", "b", "c"))]
    cells = [PatchedPlace(Point(0, "z"), None, (1,)), PatchedPlace(Point(0, "z"), None, (1, 2))]
    records = [
        effect_of(pair, cell, value=value, base=0.0, source=4.0, together=True)
        for pair, cell, value in zip(pairs, cells, (1.0, 3.0), strict=True)
    ]
    effects = Effects(records, [pair.tokens for pair in pairs])
    assert effects.columns == [None]
    np.testing.assert_allclose(effects.array("difference"), [[2.0]])


def test_groups_of_tokens_that_were_changed_together_are_not_averaged() -> None:
    """Two grids of `together=True` are told apart by no column, in one layer of one pair; in others they are places."""
    records = [effect(value, position=None, pair=pair) for pair in (0, 1) for value in (3.0, 4.0)]
    with pytest.raises(InvalidSpec, match="different groups of tokens that were changed together"):
        Effects(records, [["a"], ["a"]]).array()
    np.testing.assert_allclose(Effects(records[::2], [["a"], ["a"]]).array(), [[0.5]])


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([effect(1.0), effect(1.0, site="q")], r"several of site"),
        ([effect(1.0), effect(1.0, receiver="logits")], r"several of receiver"),
        ([effect(1.0, head=0), effect(1.0, head=1, position=1)], r"heads, \[0, 1\], and positions, \[0, 1\]"),
        ([effect(1.0), effect(1.0, pair=1, position=1)], r"have \[1, 2\] tokens"),
    ],
)
def test_what_is_no_one_heat_map_is_refused(records, says) -> None:
    """Means over sites, over positions of prompts of different lengths, or of heads and positions, would mean nothing."""
    with pytest.raises(InvalidSpec, match=says):
        Effects(records, [["a"], ["a", "b"]]).array()


def test_runs_are_chosen_by_columns() -> None:
    """None is a value; a column or a run that is not there is an error which says what is."""
    effects = Effects([effect(1.0), effect(2.0, head=1)], [["a"]])
    assert [one.value for one in effects.where(head=None).records] == [1.0]
    assert len(effects.where(site="z", pair=0)) == 2
    with pytest.raises(InvalidSpec, match=r"no run has head=2; head is one of \[1, None\]"):
        effects.where(head=2)
    layers = Effects([effect(1.0, layer=12), effect(1.0, layer=6)], [["a"]])
    with pytest.raises(
        InvalidSpec, match=r"no run has layer=7, site='z'; layer is one of \[6, 12\]; site is one of \['z'\]"
    ):
        layers.where(layer=7, site="z")
    with pytest.raises(InvalidSpec, match="is not a column to choose by"):
        effects.where(effect=1)


def test_the_table_is_the_same_in_a_file(tmp_path) -> None:
    """Every column of every run, with difference and effect; what is not known is null."""
    effects = Effects([effect(3.0), effect(1.0, head=1, position=None, token="", source=None)], [["a"]])
    table = effects.table
    assert table.column_names[-2:] == ["difference", "effect"]
    assert table["head"].to_pylist() == [None, 1]
    assert table["source"].to_pylist() == [4.0, None]
    assert parquet.read_table(effects.save(tmp_path / "x.parquet")).schema == table.schema
    again = csv.read_csv(effects.save(tmp_path / "x.csv"))
    assert again["value"].to_pylist() == [3.0, 1.0]
    assert again.column_names == table.column_names
    with pytest.raises(InvalidFile, match=r"\.parquet, \.csv"):
        effects.save(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["x.png", "x.svg"])
def test_a_plot_has_a_panel_for_each_site_and_receiver(name, tmp_path) -> None:
    """Dollars and line ends in tokens do not spoil it, nor does a panel of runs that all changed nothing."""
    records = [effect(2.0, site=site, layer=layer) for site in ("z", "q") for layer in range(40)]
    path = Effects(records, [["$x_\n"]]).plot(tmp_path / name)
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("values", "limit", "extend"),
    [
        ([1.0, -2.0, 0.5], 2.0, "neither"),
        ([*np.linspace(-1, 1, 99), -400.0], 1.0, "both"),  # one of a hundred, over ten times all others
        ([*np.linspace(-1, 1, 99), 9.0], 9.0, "neither"),  # large, and not ten times as large
        ([*np.linspace(-1, 1, 98), 300.0, -4000.0], 1.0, "both"),  # two of a hundred
        ([*np.linspace(-1, 1, 90), *[50.0] * 10], 50.0, "neither"),  # too many to be outliers
        ([0.0] * 99 + [3.0], 3.0, "neither"),  # a grid of zeros and its one effect
        ([math.nan, math.inf, -5.0], 5.0, "neither"),
        ([math.nan], 1.0, "neither"),
        ([0.0, 0.0], 1.0, "neither"),
        ([], 1.0, "neither"),
        ([7.0], 7.0, "neither"),
    ],
)
def test_an_outlier_does_not_flatten_a_heat_map(values, limit, extend) -> None:
    """The scale is that of the others, and the colour bar says how far the values reach."""
    scale = Scale.of(np.array(values[: len(values) // 2]), values[len(values) // 2 :])
    assert (scale.limit, scale.extend) == (pytest.approx(limit), extend)
    reach = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    assert scale.label("effect") == (f"effect; up to {reach:.3g}" if extend == "both" else "effect")
    assert scale.style["origin"] == "lower", "layer 0 is at the bottom"
