"""Several workers, on CPU with gloo: every row once, from the worker that has it, and right."""

from __future__ import annotations

import os

import pytest
from conftest import ALL_SITES, MAX_ERROR, MIN_COSINE, TINY_ENGINE, opened
from rows import GREEDY, parity, points, random_prompt, settled, worst

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
    """Tensor parallel: one rank captures the full rows. Pipeline parallel: each stage its layers, merged by the client."""
    prompts = [random_prompt(length, length) for length in (1, 20, 90)]
    async with opened(tiny_checkpoint("qwen3"), sites=ALL_SITES, **TINY_ENGINE, **{layout: 2}) as model:
        _, handles = await model.generate(prompts, SEVEN, capture=CaptureSpec(sites=ALL_SITES))
        _, last = await model.generate(prompts[1], SEVEN, capture=CaptureSpec(layers=-1, reduce="mean"))
        await model.fetch_captures_batch([*handles, last])
        assert await settled(model) == (0, 0, 0)
        assert len(model._engine._ranks) == (1 if layout.startswith("tensor") else 2)
    assert set(handles[0].captures) == set(points(range(4), *ALL_SITES))
    for name, same in worst(parity(handle, tiny_reference) for handle in handles).items():
        assert same.cosine > MIN_COSINE, name
        assert same.error < MAX_ERROR, name
    full = handles[1].captures[3, "resid_post"]
    assert (last.captures[-1][0] - full.mean(0)).abs().max() < 1e-4
