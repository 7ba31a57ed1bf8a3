"""Projections in the worker, on whole engines: those of the rows, at a fraction of the bytes."""

from __future__ import annotations

import pytest
import torch

from steercap import Ablate, CaptureHandle, CaptureSpec, SteeringSpec
from steercap.errors import InvalidSpec
from steercap.sites import SITES
from steercap.testing.agreement import projections_agree
from steercap.testing.rows import GREEDY, random_prompt, settled
from steercap.vectors import DirectionSet, LayerVectors
from steercap.vectors.directions import alike


@pytest.mark.parametrize("site", list(SITES))
async def test_projections_are_those_of_the_rows(site, tiny) -> None:
    """Every site, selections, edits and two sets of directions in one batch."""
    await projections_agree(tiny, site)
    assert await settled(tiny) == (0, 0, 0)


async def test_projections_survive_chunks_and_preemption(cramped) -> None:
    """Where prompts come in chunks and there is room for a few requests, the numbers are the same."""
    await projections_agree(cramped)


async def test_an_ablated_direction_projects_to_nothing(smol, tmp_path) -> None:
    """What the edit takes away is gone from the numbers, and there before it; they stream, and go through a file."""
    layers = (7, 20)
    drawn = torch.Generator().manual_seed(0)
    vectors = LayerVectors({layer: torch.randn(smol.hidden_size, generator=drawn) for layer in layers}, name="x")
    prompt, params = random_prompt(20, 0), {"max_tokens": 8, **GREEDY}
    edits = [Ablate(vectors[layer], layer=layer) for layer in layers]
    asked = [CaptureSpec(project=vectors), CaptureSpec(project=vectors, before_edits=True)]
    steering = SteeringSpec(edits)
    _, (after, before) = await smol.generate([prompt] * 2, params, capture=asked, steering=steering)
    await smol.fetch_captures_batch([after, before])
    for layer in layers:
        scale = before.captures[layer].abs().max()
        assert scale > 1
        assert after.captures[layer].abs().max() < 1e-4 * scale
        assert after.captures[layer].shape == (27, 1)
    chunks = [chunk async for chunk in smol.stream(prompt, params, capture=asked[1], steering=steering)]
    streamed = torch.cat([chunk.captures[20] for chunk in chunks])
    torch.testing.assert_close(streamed, before.captures[20], rtol=1e-4, atol=1e-3)
    back = CaptureHandle.load(before.save(tmp_path / "projected.safetensors"))
    assert back.directions == ("x",)
    known = DirectionSet({"x": vectors})
    for handle in (before, back):
        assert all(alike(handle.marks[layer][0], known.marks(layer)[0]) for layer in layers)
    assert torch.equal(back.captures[7], before.captures[7])
    many = DirectionSet({f"{number}": vectors for number in range(40_000)})
    with pytest.raises(InvalidSpec, match="take fewer directions"):
        await smol.generate(prompt, params, capture=CaptureSpec(project=many))
