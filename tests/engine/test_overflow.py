"""An engine survives any edit: what overflows fails by itself, and no other request ever reads what it left."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from conftest import opened
from safetensors.torch import load_file, save_file
from support.agreement import rows_agree
from support.overflow import overflowing_edits
from support.rows import ALL_SITES, CRAMPED, GREEDY, TINY_ENGINE, random_prompt

from steercap import Add, CaptureSpec, Point, errors
from steercap.steering import DirectionSet, LayerVectors
from steercap.testing import tiny_checkpoint

LAYERS, WIDTH = 4, 128
ONE = {"max_tokens": 1, **GREEDY}
AXIS = DirectionSet({"axis": LayerVectors({layer: torch.ones(WIDTH) for layer in range(LAYERS)}, site="resid_pre")})
TEN = {"max_tokens": 10, **GREEDY}


async def test_float32_survives_overflow(cramped, tiny_reference) -> None:
    """Requests overflow at any point, among clean ones; afterwards rows are still those of transformers."""
    everything = CaptureSpec(sites=ALL_SITES)
    found = await overflowing_edits(
        cramped, random.Random(1), rounds=3, capture=everything, layers=LAYERS, sites=ALL_SITES
    )
    assert min(found.values()) >= 4, found
    await rows_agree(cramped, tiny_reference)


async def test_float16_survives_overflow() -> None:
    """Likewise where a row that was finite after its edit overflows layers later, between taps that were not asked for."""
    async with opened(
        tiny_checkpoint("qwen3"), sites=["mlp_out"], layers=[0, 2], **CRAMPED | {"dtype": "float16"}
    ) as model:
        assert tuple(model.points) == (
            Point(0, "mlp_out"), Point(0, "resid_post"), Point(1, "resid_post"),
            Point(2, "mlp_out"), Point(2, "resid_post"), Point(3, "resid_post"),
            Point(3, "resid_pre"), Point(3, "attn_out"), Point(3, "mlp_out"),
        )  # fmt: skip
        late = Add(torch.ones(WIDTH), 65_472.0, layer=0, site="resid_post", tokens="prompt")
        with pytest.raises(errors.SteeringNotApplied, match=r"overflows at resid_post\[[123]\].* 6\.55e\+04"):
            await model.generate(random_prompt(40, 1), TEN, steering=late)
        found = await overflowing_edits(
            model, random.Random(2), rounds=3, capture=CaptureSpec(), layers=1, sites=("mlp_out", "resid_post")
        )
        assert min(found.values()) >= 4, found


async def test_rows_that_are_not_finite_are_handed_over_when_asked_for(tmp_path) -> None:
    """A model that overflows by itself: CaptureNotFinite names the first position and point."""
    for file in tiny_checkpoint("qwen3").iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = torch.inf
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    prompt = [5, 6, 77, 8, 9]
    async with opened(tmp_path, sites=["resid_pre", "resid_post"], **TINY_ENGINE) as model:
        for asked in ({}, {"tokens": [1, 2]}, {"reduce": "mean"}, {"project": AXIS}):
            spec = CaptureSpec(layers=0, sites="resid_pre", **asked)
            _, (clean, refused) = await model.generate([[5, 6, 7, 8], prompt], ONE, capture=spec)
            with pytest.raises(errors.CaptureNotFinite, match=r"position 2 at resid_pre\[0\] .*allow_nonfinite=True"):
                await model.fetch_captures_batch([clean, refused])
            assert clean.fetched  # whatever its neighbour is
            _, handle = await model.generate(prompt, ONE, capture=replace(spec, allow_nonfinite=True))
            async with handle:
                finite = [rows.isfinite().all(-1).tolist() for rows in handle.captures.values()]
                expected = {"tokens": [True, False]}.get(next(iter(asked), ""), [False])
                assert finite[0] == (expected if asked and "project" not in asked else [True, True, False, True, True])
        async with model.sketch(layers=0, sites="resid_pre") as sketch:
            await model.generate([5, 6, 7, 8], ONE)
            with pytest.raises(errors.CaptureNotFinite, match=r"position 2 at resid_pre\[0\] .*not in the sketch"):
                await model.generate(prompt, ONE)
            assert (sketch.requests, (await sketch.fetch()).rows) == (1, 4)
        _, handle = await model.generate(prompt, ONE, capture=CaptureSpec(layers=0, sites="resid_pre", tokens=[0, 1]))
        await handle.fetch()  # rows before the one that is not finite
        with pytest.raises(errors.SteeringNotApplied, match="position 0 overflows at resid_post"):
            await model.generate(prompt, ONE, steering=Add(torch.ones(WIDTH), layer=1))
