"""Attention out of captured queries and keys against what transformers says with `output_attentions=True`."""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np
import torch

from steercap.captures.handle import CaptureHandle
from steercap.captures.stacking import flat
from steercap.core.spec import CaptureSpec, Point
from steercap.kernels.attention import AttentionSummary
from steercap.model import SteerModel
from steercap.steering.spec import SteeringSpec
from steercap.testing.reference import Reference
from support.rows import GREEDY, inputs_of, random_prompt
from support.specs import spec

#: Of a weight, at most 1, in float32, where rows may differ by 1e-4 of their norm. On CPU the worst of eleven families
#: differs by 1e-5.
MAX_ERROR: Final = 1e-4
QUERIES_AND_KEYS: Final = CaptureSpec(sites=("q", "k"))
TOP: Final = 5


async def attention_agrees(model: SteerModel, reference: Reference, lengths: tuple[int, ...] = (1, 20, 70)) -> float:
    """Whole patterns and summaries of every layer, of clean requests and of some that are steered before the layer and
    at its queries and keys. Returns the greatest difference of a weight.
    """
    steered = [
        None,
        spec("add", model.hidden_size, seed=3, layers=[0], site="resid_post"),
        *(
            spec(
                "add", model.points[Point(0, site)].width, seed=4, layers=[0, 2], site=site, tokens=slice(None, None, 2)
            )
            for site in ("q", "k")
        ),
    ]
    asked = [(length, one) for length in lengths for one in steered if length > 1 or one is None]
    prompts = [random_prompt(length, seed) for seed, (length, _) in enumerate(asked)]
    parameters = {"max_tokens": 6, **GREEDY}
    specs = [one for _, one in asked]
    _, handles = await model.generate(prompts, parameters, capture=QUERIES_AND_KEYS, steering=specs)
    await model.fetch_captures_batch(handles)
    return await asyncio.to_thread(
        lambda: max(_worst(handle, reference, one) for handle, one in zip(flat(handles), specs, strict=True))
    )


def _worst(handle: CaptureHandle, reference: Reference, steering: SteeringSpec | None) -> float:
    known = reference.attention(inputs_of(handle), steering=steering, prompt_len=len(handle.prompt_token_ids))
    worst = 0.0
    for layer, weights in enumerate(known):
        found = handle.attention_pattern(layer)
        assert found.shape == weights.shape, (layer, found.shape, weights.shape)
        worst = np.maximum(worst, float((found - weights).abs().max()))
        _check_summary(handle, layer, found)
    assert worst < MAX_ERROR, f"weights differ by {worst:.1e}"
    return worst


def _check_summary(handle: CaptureHandle, layer: int, pattern: torch.Tensor) -> None:
    """A summary is what NumPy makes of the whole pattern, in float64."""
    summary = handle.attention(layer, top=TOP)
    weights = pattern.double().numpy()
    strongest = -np.sort(-weights, axis=-1)[..., :TOP]
    wide = np.zeros(summary.weights.shape)
    wide[..., : strongest.shape[-1]] = strongest
    np.testing.assert_allclose(summary.weights, wide, atol=1e-6)
    targets = summary.targets.numpy()
    seen = targets >= 0
    assert not summary.weights.numpy()[~seen].any()
    heads, queries, _ = np.nonzero(seen)
    np.testing.assert_allclose(weights[heads, queries, targets[seen]], summary.weights.numpy()[seen], atol=1e-6)
    logarithms = np.log(weights, where=weights > 0, out=np.zeros_like(weights))
    np.testing.assert_allclose(summary.entropy, -(weights * logarithms).sum(-1), atol=1e-5)
    np.testing.assert_allclose(summary.first, weights[..., 0], atol=1e-6)


def hold_targets(found: AttentionSummary, weights: torch.Tensor) -> None:
    """Kept targets are the strongest of a whole pattern [heads, tokens, tokens], as they are stored: weights in steps of
    1/255, entropies in 16 bits.
    """
    error, tokens = 0.5 / 255 + MAX_ERROR, weights.shape[-1]
    assert found.positions.tolist() == list(range(tokens))
    seen, top = found.targets >= 0, found.targets.shape[-1]
    assert torch.equal(seen.sum(-1), (weights > 0).sum(-1).clamp(max=top))
    own = weights.gather(-1, found.targets.clamp(min=0))
    assert (own - found.weights)[seen].abs().max() <= error
    strongest = weights.topk(min(top, tokens), dim=-1).values
    assert (strongest - found.weights[..., : strongest.shape[-1]]).abs().max() <= error
    torch.testing.assert_close(found.first, weights[..., 0], atol=error, rtol=0)
    torch.testing.assert_close(found.entropy, torch.special.entr(weights).sum(-1), atol=1e-3, rtol=2**-10)
