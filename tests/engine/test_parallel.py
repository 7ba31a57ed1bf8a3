"""Several workers, on CPU with gloo: every row once, from the worker that has it, and right."""

from __future__ import annotations

import os
from itertools import product

import pytest
from conftest import ALL_SITES, TINY_ENGINE, opened
from rows import GREEDY, hold, points, random_prompt, settled
from specs import OPERATIONS, spec

from steercap import CaptureSpec
from steercap.testing import tiny_checkpoint

SEVEN = {"max_tokens": 7, **GREEDY}


@pytest.fixture(autouse=True)
def one_core_each(monkeypatch) -> None:
    """vLLM's CPU workers want cores of their own; without as many NUMA nodes they must be told which."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two workers need two cores")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
async def test_two_workers_give_the_rows_of_transformers(layout, tiny_reference) -> None:
    """Tensor parallel: one rank captures the full rows, both edit. Pipeline parallel: each stage captures and edits its
    layers, the client merges rows and receipts.
    """
    prompts = [random_prompt(length, length) for length in (1, 20, 90)]
    async with opened(tiny_checkpoint("qwen3"), sites=ALL_SITES, **TINY_ENGINE, **{layout: 2}) as model:
        _, handles = await model.generate(prompts, SEVEN, capture=CaptureSpec(sites=ALL_SITES))
        _, last = await model.generate(prompts[1], SEVEN, capture=CaptureSpec(layers=-1, reduce="mean"))
        specs = [spec(name, 128, seed=7, layers="all", site=site) for name, site in product(OPERATIONS, ALL_SITES)]
        steered_prompts = [random_prompt(10, seed) for seed in range(len(specs))]
        _, steered = await model.generate(steered_prompts, SEVEN, capture=CaptureSpec(sites=ALL_SITES), steering=specs)
        cached = await model.generate(steered_prompts[0], SEVEN, steering=specs[0], raw_output=True)
        await model.fetch_captures_batch([*handles, last, steered])
        assert await settled(model) == (0, 0, 0)
        assert len(model._engine._ranks) == (1 if layout.startswith("tensor") else 2)
    assert set(handles[0].captures) == set(points(range(4), *ALL_SITES))
    hold(handles, tiny_reference)
    hold(steered, tiny_reference, specs)
    assert steered[0].receipt.steering.rows == cached.steering[0].rows == (4 * 16,)
    full = handles[1].captures[3, "resid_post"]
    assert (last.captures[-1][0] - full.mean(0)).abs().max() < 1e-4
