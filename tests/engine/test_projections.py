"""Projections in the worker, on whole engines: those of the rows, at a fraction of the bytes."""

from __future__ import annotations

import pytest
import torch
from support.agreement import projections_agree
from support.rows import ALL_SITES, GREEDY, random_prompt, settled

from steercap import Ablate, CaptureHandle, CaptureSpec, SteeringSpec
from steercap.errors import InvalidSpec
from steercap.steering import DirectionSet, LayerVectors
from steercap.steering.edits.inputs import alike


@pytest.mark.parametrize("site", ALL_SITES)
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
    with pytest.raises(InvalidSpec, match="use fewer directions"):
        await smol.generate(prompt, params, capture=CaptureSpec(project=many))


async def test_directions_that_were_handed_over_stay_what_they_were(tiny) -> None:
    """Whoever reaches into them, or into an edit, after their first use changes neither that nor the next."""
    mine = torch.randn(tiny.hidden_size, generator=torch.Generator().manual_seed(3))
    found, edit = DirectionSet({"x": LayerVectors({1: mine})}), Ablate(mine, layer=0)
    prompt, params = random_prompt(7, 50), {"max_tokens": 3, **GREEDY}
    seen = []
    for _ in range(2):
        _, handle = await tiny.generate(prompt, params, capture=CaptureSpec(project=found), steering=edit)
        async with handle:
            seen.append(handle.captures[1].clone())
        for reached in (mine, found["x"][1], found["x"].vectors[1], edit.vector):
            reached.zero_().add_(1)
    assert torch.equal(*seen)
    _, rows = await tiny.generate(prompt, params, capture=CaptureSpec(layers=1), steering=edit)
    async with rows:
        torch.testing.assert_close(seen[0], found.project(rows.captures[1], 1), rtol=1e-4, atol=1e-4)
