"""Sketches on engines: what the workers added up is what the rows themselves give, whoever asks at once and however it ends."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from steercap import CaptureSpec, Sketch, errors
from steercap.testing.rows import GREEDY, counter, random_prompt, settled

SIX = {"max_tokens": 6, **GREEDY}
LAYERS = [0, 3]


async def rows_of(model, prompts, params, **capture) -> dict[int, torch.Tensor]:
    """The rows of the same prompts, raw, of another run: float64 [rows, width] by layer."""
    _, handles = await model.generate(prompts, params, capture=CaptureSpec(**capture))
    await model.fetch_captures_batch(handles)
    return {
        point: torch.cat([one.captures[point].flatten(1) for one in handles]).double() for point in handles[0].points
    }


def agrees(found: Sketch, known: dict) -> None:
    """Mean and covariance are NumPy's of these rows in float64, up to the rounding of float32 in the rows."""
    for point, rows in known.items():
        assert found.rows == len(rows)
        covariance = np.cov(rows.numpy().T)
        spread = covariance.diagonal().max()
        torch.testing.assert_close(found.mean(*point), rows.mean(0), rtol=0, atol=1e-6 * spread**0.5)
        assert np.abs(found.covariance(*point).numpy() - covariance).max() < 1e-6 * spread


async def test_mean_and_covariance_of_requests_that_join(tiny, tmp_path) -> None:
    """Those of the rows themselves; nothing is left when the context has ended."""
    prompts = [random_prompt(10 + seed, seed) for seed in range(6)]
    async with tiny.sketch("moments", layers=LAYERS) as sketch:
        texts = await tiny.generate(prompts, SIX)
        assert all(isinstance(text, str) for text in texts)
        assert (sketch.requests, sketch.rows) == (6, sum(15 + seed for seed in range(6)))
        stats = await tiny.stats()
        assert (stats.sketches, stats.sketch_bytes_in_use) == (1, 2 * (2 * 4 * 128 * 128 + 8 * 128))
        found = await sketch.fetch()
        mean, covariance = await sketch.mean(3), await sketch.covariance(-1)
    agrees(found, await rows_of(tiny, prompts, SIX, layers=LAYERS))
    assert torch.equal(mean, found.mean(3)) and torch.equal(covariance, found.covariance(3))
    assert await settled(tiny) == (0, 0, 0)
    stats = await tiny.stats()
    assert (stats.sketches, stats.sketch_bytes_in_use) == (0, 0)
