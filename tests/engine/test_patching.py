"""Patching on a whole engine: every effect is that of transformers with hooks, and nothing is left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import product

import pytest
import torch
from conftest import opened
from support.patching import Hooked
from support.rows import ALL_SITES, TINY_ENGINE, random_prompt, settled

from steercap import SteerModel
from steercap.errors import EmptySelection, InvalidPrompt, InvalidSpec, PointNotArmed
from steercap.lab.mechanism.patching import (
    Effects,
    Grid,
    LogitDifference,
    LogProbability,
    Measured,
    Receiver,
    ablate,
    patch,
    path_patch,
)
from steercap.testing import tiny_checkpoint

SITES = (*ALL_SITES, "z", "q", "k", "v")
LAYERS, TOKENS = 4, 7
RIGHT, WRONG = 17, 99
METRIC = LogitDifference((RIGHT, WRONG))
CLEAN = [random_prompt(TOKENS, seed) for seed in (1, 2)]
CORRUPTED = [[*CLEAN[0][:3], 40, *CLEAN[0][4:]], [*CLEAN[1][:2], 41, 42, *CLEAN[1][4:]]]
#: Of the logits, which are of the size of 1: float32, as rows are (docs/mechanisms/proof.md), through all layers.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
async def model() -> AsyncIterator[SteerModel]:
    """Tiny qwen3 with all sites of heads, and few slots: more runs than slots must wait their turn."""
    async with opened(tiny_checkpoint("qwen3"), sites=SITES, steering_slots=8, **TINY_ENGINE) as opened_model:
        yield opened_model


@pytest.fixture(scope="module")
def hooked() -> Hooked:
    """transformers on the same checkpoint."""
    return Hooked(tiny_checkpoint("qwen3"))


def spread(effects: Effects) -> float:
    """How far values are apart, so that a test that compares them compares something."""
    return max(abs(one.difference) for one in effects.records)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
async def test_every_site_and_position_is_patched_as_with_hooks(model, hooked, direction) -> None:
    """4 layers × 8 sites × 7 tokens × 2 pairs: the value of every run, of both unchanged ones, and their ratio."""
    effects = await patch(model, CLEAN, CORRUPTED, Grid(sites=SITES), metric=METRIC, direction=direction)
    assert len(effects) == LAYERS * len(SITES) * TOKENS * len(CLEAN)
    bases, sources = (CORRUPTED, CLEAN) if direction == "denoise" else (CLEAN, CORRUPTED)
    for pair, (base, source) in enumerate(zip(bases, sources, strict=True)):
        seen = hooked.run(source, keep=list(product(range(LAYERS), SITES)))
        (unchanged,), (other,) = hooked.run(base).difference(RIGHT, WRONG), seen.difference(RIGHT, WRONG)
        for place, rows in seen.rows.items():
            each = [(None, [position]) for position in range(TOKENS)]
            expected = hooked.patched(base, place, rows[0], each).difference(RIGHT, WRONG)
            found = effects.where(pair=pair, layer=place[0], site=place[1])
            assert [one.position for one in found.records] == list(range(TOKENS))
            for one, value in zip(found.records, expected, strict=True):
                assert abs(one.value - value) < TOLERANCE
                assert abs(one.base - unchanged) < TOLERANCE
                assert one.source == pytest.approx(other, abs=TOLERANCE)
                assert one.effect == (one.value - one.base) / (one.source - one.base)
    assert spread(effects) > 100 * TOLERANCE
    assert await settled(model) == (0, 0, 0)


@pytest.mark.parametrize("together", [False, True])
async def test_heads_are_patched_one_by_one(model, hooked, together) -> None:
    """One head of z, q, k or v, at one token or at several at once; the other heads stay as they are in that run."""
    grid = Grid(sites=("z", "q", "k", "v"), heads="all", tokens=[2, 3, -1], together=together)
    effects = await patch(model, CLEAN[1], CORRUPTED[1], grid, metric=METRIC)
    groups = [[2, 3, TOKENS - 1]] if together else [[2], [3], [TOKENS - 1]]
    for place in product(range(LAYERS), ("z", "q", "k", "v")):
        rows = hooked.run(CLEAN[1], keep=[place]).rows[place][0]
        each = list(product(range(rows.shape[1] // hooked.head_dim), groups))
        expected = hooked.patched(CORRUPTED[1], place, rows, each).difference(RIGHT, WRONG)
        found = effects.where(layer=place[0], site=place[1]).records
        assert [one.head for one in found] == [head for head, _ in each]
        assert [one.value for one in found] == pytest.approx(expected, abs=TOLERANCE)
    assert spread(effects) > 100 * TOLERANCE


async def test_rows_of_the_run_itself_change_nothing(model) -> None:
    """Clean rows put into the clean run: all values are the clean one, and no effect can be told."""
    effects = await patch(model, CLEAN[0], CLEAN[0], Grid(sites=SITES), metric=METRIC)
    assert spread(effects) < TOLERANCE
    assert all(one.effect != one.effect for one in effects.records if one.source == one.base)


async def test_prompts_are_laid_beside_each_other_by_their_ends(model, hooked) -> None:
    """A longer clean prompt: row p of the corrupted run comes from p + 2, and the effect is that of hooks."""
    longer = [50, 51, *CLEAN[0]]
    with pytest.raises(InvalidPrompt, match=r"pair 0: the clean prompt has 9 tokens and the corrupted one 7"):
        await patch(model, longer, CORRUPTED[0], Grid(), metric=METRIC)
    effects = await patch(model, longer, CORRUPTED[0], Grid(sites="resid_pre"), metric=METRIC, align="end")
    for layer in range(LAYERS):
        rows = hooked.run(longer, keep=[(layer, "resid_pre")]).rows[layer, "resid_pre"][0, 2:]
        each = [(None, [position]) for position in range(TOKENS)]
        expected = hooked.patched(CORRUPTED[0], (layer, "resid_pre"), rows, each).difference(RIGHT, WRONG)
        assert [one.value for one in effects.where(layer=layer).records] == pytest.approx(expected, abs=TOLERANCE)
    reverse = await patch(model, longer, CORRUPTED[0], Grid(layers=1), metric=METRIC, direction="noise", align="end")
    assert [one.position for one in reverse.records] == list(range(2, 9)), "the first two have none beside them"
    with pytest.raises(InvalidSpec, match="hold the position"):
        await patch(model, longer, CORRUPTED[0], Grid(sites=["q", "v"]), metric=METRIC, align="end")
    with pytest.raises(EmptySelection, match="beside it"):
        await patch(model, longer, CORRUPTED[0], Grid(tokens=0), metric=METRIC, direction="noise", align="end")


@pytest.mark.parametrize("to", ["zero", "position_mean", "mean"])
async def test_ablated_rows_are_zeros_or_means(model, hooked, to) -> None:
    """Whole rows of mlp_out by position, and heads of z at all tokens at once."""
    reference = [random_prompt(TOKENS, seed) for seed in range(5, 9)]
    grids = [Grid(sites="mlp_out"), Grid(sites="z", heads="all", together=True)]
    asked = {} if to == "zero" else {"reference": reference}
    effects = await ablate(model, CLEAN, grids, metric=METRIC, to=to, **asked)
    for layer, name in product(range(LAYERS), ("mlp_out", "z")):
        read = torch.cat([hooked.run(ids, keep=[(layer, name)]).rows[layer, name] for ids in reference])
        rows = {"zero": 0 * read[0], "position_mean": read.mean(0)}
        rows["mean"] = read[:, 1:].mean((0, 1)).expand_as(read[0])
        each = [(None, [position]) for position in range(TOKENS)]
        if name == "z":
            each = [(head, range(TOKENS)) for head in range(read.shape[-1] // hooked.head_dim)]
        for pair, prompt in enumerate(CLEAN):
            expected = hooked.patched(prompt, (layer, name), rows[to], each).difference(RIGHT, WRONG)
            found = effects.where(pair=pair, layer=layer, site=name).records
            assert [one.value for one in found] == pytest.approx(expected, abs=TOLERANCE)
            assert {one.source for one in found} == {None}
    assert spread(effects) > 100 * TOLERANCE


@pytest.mark.parametrize("through_mlps", [True, False])
async def test_paths_of_heads_are_those_of_hooks(model, hooked, through_mlps) -> None:
    """Every head to the logits, and to queries, keys and values of heads in two layers together."""
    received = {name: [(2, 1), (3, 0)] for name in ("q", "k", "v")}
    effects = await path_patch(
        model,
        CLEAN,
        CORRUPTED,
        metric=METRIC,
        receivers=[*(Receiver(name, heads, name=name) for name, heads in received.items()), "logits"],
        through_mlps=through_mlps,
    )
    for pair, (base, source) in enumerate(zip(CLEAN, CORRUPTED, strict=True)):
        for sender in product(range(LAYERS), range(4)):
            for name in ("logits", *received):
                if name != "logits" and sender[0] == LAYERS - 1:
                    continue
                receivers = None if name == "logits" else (name, received[name])
                seen = hooked.path_patched(base, source, sender, receivers, through_mlps=through_mlps)
                (one,) = effects.where(pair=pair, layer=sender[0], head=sender[1], receiver=name).records
                assert one.value == pytest.approx(seen.difference(RIGHT, WRONG)[0], abs=TOLERANCE)
    for name in ("logits", *received):
        assert spread(effects.where(receiver=name)) > 10 * TOLERANCE
    assert len(effects) == 2 * (16 + 3 * 12)


async def test_paths_can_be_of_some_tokens(model, hooked) -> None:
    """A sender at one token alone: that of hooks where the other tokens' rows are alike in both prompts."""
    late = [*CLEAN[0][:-1], 40]  # which differs at its last token alone, and so do all rows
    paths = {
        tokens: await path_patch(model, CLEAN[0], late, metric=METRIC, senders=[(0, 1)], tokens=tokens)
        for tokens in ("prompt", "last_prompt", 0)
    }
    (expected,) = hooked.path_patched(CLEAN[0], late, (0, 1), None).difference(RIGHT, WRONG)
    for tokens in ("prompt", "last_prompt"):
        assert paths[tokens].records[0].value == pytest.approx(expected, abs=TOLERANCE)
    assert abs(paths[0].records[0].difference) < TOLERANCE < abs(paths["prompt"].records[0].difference)


async def test_metrics_are_what_the_engine_says(model, hooked) -> None:
    """A log probability, and a function of vLLM's output, for the same runs."""
    probability = await patch(model, CLEAN[0], CORRUPTED[0], Grid(layers=1), metric=LogProbability(RIGHT))
    logits = hooked.run(CLEAN[0]).logits[0]
    assert probability.records[0].source == pytest.approx(float(logits.log_softmax(-1)[RIGHT]), abs=TOLERANCE)
    counted = Measured(
        lambda output, pair: len(output.outputs[0].token_ids) + pair, {"max_tokens": 3, "ignore_eos": True}
    )
    found = await patch(model, CLEAN, CORRUPTED, Grid(layers=1), metric=counted)
    assert {(one.pair, one.value) for one in found.records} == {(0, 3.0), (1, 4.0)}


async def test_what_does_not_fit_is_refused_before_anything_runs(model) -> None:
    """Each is an error that names the remedy, and no run has been made."""
    before = (await model.stats()).steps
    grid = Grid()
    for call, error, says in (
        (
            lambda: patch(model, CLEAN[0], CORRUPTED, grid, metric=METRIC),
            InvalidSpec,
            "1 clean prompts and 2 corrupted",
        ),
        (lambda: patch(model, CLEAN, CORRUPTED, [], metric=METRIC), InvalidSpec, "patching.Grid"),
        (lambda: patch(model, CLEAN, CORRUPTED, Grid(sites="neurons"), metric=METRIC), PointNotArmed, "has no tap"),
        (lambda: patch(model, CLEAN, CORRUPTED, Grid(heads=0), metric=METRIC), InvalidSpec, "have no heads"),
        (
            lambda: patch(model, CLEAN, CORRUPTED, Grid(sites="z", heads=[4]), metric=METRIC),
            InvalidSpec,
            "have 4 heads",
        ),
        (lambda: patch(model, CLEAN, CORRUPTED, grid, metric=LogitDifference((3, 3))), InvalidSpec, "the same token"),
        (lambda: patch(model, CLEAN, CORRUPTED, grid, metric=LogitDifference([(3, 4)])), InvalidSpec, "for 2 pairs"),
        (
            lambda: patch(model, CLEAN, CORRUPTED, grid, metric=METRIC, direction="both"),
            InvalidSpec,
            "direction='both'",
        ),
        (lambda: ablate(model, CLEAN, grid, metric=METRIC, to="noise"), InvalidSpec, "to='noise'"),
        (
            lambda: ablate(model, [*CLEAN, [1]], grid, metric=METRIC, to="position_mean"),
            InvalidPrompt,
            "not the same place",
        ),
        (lambda: path_patch(model, CLEAN, CORRUPTED, metric=METRIC, senders=[(4, 0)]), InvalidSpec, "layers 0 to 3"),
        (
            lambda: path_patch(model, CLEAN, CORRUPTED, metric=METRIC, receivers=Receiver("q", [(0, 0)])),
            InvalidSpec,
            "no layer is before",
        ),
        (
            lambda: path_patch(
                model, CLEAN, CORRUPTED, metric=METRIC, senders=[(2, 0)], receivers=Receiver("q", [(1, 0)])
            ),
            InvalidSpec,
            "it cannot affect any",
        ),
    ):
        with pytest.raises(error, match=says):
            await call()
    assert (await model.stats()).steps == before
