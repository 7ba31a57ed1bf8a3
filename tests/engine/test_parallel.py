"""Several workers, on CPU with gloo: every row once, from the worker that has it, and right."""

from __future__ import annotations

import os

import pytest
from conftest import opened

from steercap.testing import tiny_checkpoint
from steercap.testing.agreement import workers_agree
from steercap.testing.rows import ALL_SITES, GREEDY, TINY_ENGINE, points, settled

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
    async with opened(tiny_checkpoint("qwen3"), sites=ALL_SITES, **TINY_ENGINE, **{layout: 2}) as model:
        _, handles = await workers_agree(model, tiny_reference)
        assert await settled(model) == (0, 0, 0)
        assert len(model._engine._ranks) == (1 if layout.startswith("tensor") else 2)
    assert set(handles[0].captures) == set(points(range(4), *ALL_SITES))
