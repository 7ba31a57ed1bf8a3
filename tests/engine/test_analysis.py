"""Sweeps of vectors over layers and tokens on a whole engine: every effect is that of transformers with hooks."""

from __future__ import annotations

import pyarrow.compute as pc
import pytest
import torch
from support.patching import Hooked
from support.rows import random_prompt, settled

from steercap import sync
from steercap.errors import InvalidSpec, PointNotArmed
from steercap.lab.directions import random_like
from steercap.lab.mechanism import analysis
from steercap.lab.mechanism.patching import LogitDifference
from steercap.steering import DirectionSet, LayerVectors
from steercap.testing import tiny_checkpoint

LAYERS, TOKENS, WIDTH = 4, 7, 128
RIGHT, WRONG = 17, 99
METRIC = LogitDifference((RIGHT, WRONG))
PROMPTS = [random_prompt(TOKENS, 1), random_prompt(TOKENS + 3, 2)]
#: Of the logits, which are of the size of 1: float32, as rows are (docs/mechanisms/proof.md), through all layers.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def hooked() -> Hooked:
    """transformers on the checkpoint of `tiny`."""
    return Hooked(tiny_checkpoint("qwen3"))


def vectors(site: str = "resid_post") -> DirectionSet:
    generator = torch.Generator().manual_seed(0)
    return DirectionSet(
        {
            name: LayerVectors({layer: torch.randn(WIDTH, generator=generator) for layer in range(LAYERS)}, site=site)
            for name in ("one", "other")
        }
    )


def steered(hooked, ids, place, vector, positions, *, share: float | None = None) -> float:
    """The metric of a run with a vector added to some positions by a hook: as it is, or at a share of each row's norm."""

    def add(rows: torch.Tensor) -> None:
        own = rows[:, positions]
        rows[:, positions] += (
            vector if share is None else share * own.norm(dim=-1, keepdim=True) * vector / vector.norm()
        )

    return hooked.run(ids, {place: add}).difference(RIGHT, WRONG)[0]


@pytest.mark.parametrize("relative", [False, True])
async def test_a_layer_sweep_is_that_of_hooks(tiny, hooked, relative) -> None:
    """2 vectors and their 2 random ones × 4 layers × 2 prompts, to all tokens but the first; nothing is left behind."""
    given, seen = vectors(), []
    table = await analysis.layer_sweep(
        tiny, given, PROMPTS, metric=METRIC, scale=0.5 if relative else 1.0, relative=relative, tokens=slice(1, None),
        random=2, seed=3, progress=seen.append,
    )  # fmt: skip
    assert table.num_rows == len(seen) == 2 * 3 * LAYERS * len(PROMPTS)
    assert {(at.done, at.total) for at in seen} == {(done, 48) for done in range(1, 49)}
    for row in table.to_pylist():
        ids, source = PROMPTS[row["prompt"]], given[row["name"]]
        if row["control"]:
            source = random_like(source, int(row["control"].removeprefix("random-")), 3)
        place, share = (row["layer"], "resid_post"), 0.5 if relative else None
        known = steered(hooked, ids, place, source[row["layer"]], list(range(1, len(ids))), share=share)
        assert abs(row["value"] - known) < TOLERANCE
        assert abs(row["base"] - hooked.run(ids).difference(RIGHT, WRONG)[0]) < TOLERANCE
        assert row["difference"] == row["value"] - row["base"]
        assert (row["position"], row["token"]) == (None, "")
    assert max(abs(one) for one in table["difference"].to_pylist()) > 100 * TOLERANCE
    assert await settled(tiny) == (0, 0, 0)


async def test_a_position_sweep_is_that_of_hooks(tiny, hooked, tmp_path) -> None:
    """Each token of both prompts alone, at two layers, by vectors of what the feed-forward block adds; and a picture."""
    given = vectors("mlp_out").select("one")
    table = await analysis.position_sweep(tiny, given, PROMPTS, metric=METRIC, layers=[1, -1])
    assert table.num_rows == 2 * (TOKENS + TOKENS + 3)
    for row in table.to_pylist():
        place, vector = (row["layer"], "mlp_out"), given["one"][row["layer"]]
        known = steered(hooked, PROMPTS[row["prompt"]], place, vector, [row["position"]])
        assert abs(row["value"] - known) < TOLERANCE
        assert row["token"] == tiny.tokenizer.decode([PROMPTS[row["prompt"]][row["position"]]])
    late = table.filter(pc.and_(pc.equal(table["layer"], 3), pc.equal(table["position"], 2)))
    assert late["difference"].to_pylist() == pytest.approx([0, 0], abs=1e-5)  # no later token reads the last layer
    assert analysis.plot_position_sweep(table, tmp_path / "places.png", prompt=1).exists()
    with pytest.raises(InvalidSpec, match="this picture is of one"):
        analysis.plot_position_sweep(table, tmp_path / "none.png", prompt=7)


async def test_what_cannot_be_swept_is_refused(tiny) -> None:
    """A site without a tap, and a metric that is none."""
    with pytest.raises(PointNotArmed):
        await analysis.layer_sweep(tiny, vectors("resid_mid"), PROMPTS, metric=METRIC, random=0)
    with pytest.raises(InvalidSpec, match="give a Metric"):
        await analysis.layer_sweep(tiny, vectors(), PROMPTS, metric="logits")
    assert sync.layer_sweep.__doc__
