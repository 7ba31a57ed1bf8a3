"""Rows stay right while everything that moves requests about happens, alone and together.

A 4-layer qwen3 in an engine that chunks every long prompt (64 tokens a step), runs 16 requests at once and has so
little KV memory that requests are preempted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from conftest import ALL_SITES, MAX_ERROR, MIN_COSINE, TINY_ENGINE, opened
from prometheus_client import REGISTRY
from rows import GREEDY, flattened, parity, random_prompt, settled, worst

from steercap import CaptureSpec, SteerModel
from steercap.testing import Reference, tiny_checkpoint

CRAMPED: dict[str, Any] = {
    **TINY_ENGINE,
    "block_size": 32,
    "kv_cache_memory_bytes": 2 << 20,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
}
EVERYTHING = CaptureSpec(sites=ALL_SITES)


@pytest.fixture(scope="module")
async def cramped() -> AsyncIterator[SteerModel]:
    """The engine described above."""
    async with opened(tiny_checkpoint("qwen3"), sites=ALL_SITES, **CRAMPED) as model:
        yield model


def counter(name: str) -> float:
    """A counter of vLLM's, summed over engines."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"vllm:{name}_total"
    )


def hold(handles: Any, reference: Reference) -> dict[str, Any]:
    """Assert the float32 bounds for the worst row of all handles."""
    found = worst(parity(handle, reference) for handle in flattened(handles))
    for name, same in found.items():
        assert same.cosine > MIN_COSINE, (name, same)
        assert same.error < MAX_ERROR, (name, same)
    return found


async def test_a_prompt_longer_than_a_step(cramped, tiny_reference) -> None:
    """A prompt computed in chunks gives the rows of the whole."""
    steps = (await cramped.stats()).steps
    _, handle = await cramped.generate(random_prompt(230, 1), {"max_tokens": 10, **GREEDY}, capture=EVERYTHING)
    assert (await cramped.stats()).steps - steps == 4 + 9
    await handle.fetch()
    hold(handle, tiny_reference)


async def test_prefix_cache_hits(cramped, tiny_reference) -> None:
    """The same prompt with and without capture, in any order: captured rows are all there; others use the cache."""
    prompt, params = random_prompt(200, 2), {"max_tokens": 6, **GREEDY}
    first = await cramped.generate(prompt, params, raw_output=True)
    again = await cramped.generate(prompt, params, raw_output=True)
    assert again.num_cached_tokens == 192  # whole blocks of 32 below 200
    captured, handle = await cramped.generate(prompt, params, capture=EVERYTHING, raw_output=True)
    assert captured.num_cached_tokens == 0
    late, tail = await cramped.generate(
        prompt, params, capture=CaptureSpec(sites=ALL_SITES, tokens=["last_prompt", "generated"]), raw_output=True
    )
    assert late.num_cached_tokens == 192  # what it keeps is computed anyway
    assert {tuple(out.outputs[0].token_ids) for out in (first, again, captured, late)} == {handle.output_token_ids}
    await cramped.fetch_captures_batch([handle, tail])
    assert tail.positions.tolist() == list(range(199, 205))
    hold([handle, tail], tiny_reference)


async def test_preemption(cramped, tiny_reference) -> None:
    """Requests that are thrown out and recomputed have each row once, and right."""
    preempted = counter("num_preemptions")
    prompts = [random_prompt(100 + seed, seed) for seed in range(16)]
    _, handles = await cramped.generate(prompts, {"max_tokens": 60, **GREEDY}, capture=EVERYTHING)
    preemptions = counter("num_preemptions") - preempted
    assert preemptions > 0
    await cramped.fetch_captures_batch(handles)
    assert any(handle.receipt.writes > handle.receipt.rows for handle in handles)
    assert all(handle.receipt.rows == len(handle.prompt_token_ids) + 59 for handle in handles)
    hold(handles, tiny_reference)


async def test_one_token_prompts(cramped, tiny_reference) -> None:
    """The shortest prompt there is, many at once."""
    _, handles = await cramped.generate(
        [[seed] for seed in range(3, 23)], {"max_tokens": 3, **GREEDY}, capture=EVERYTHING
    )
    await cramped.fetch_captures_batch(handles)
    hold(handles, tiny_reference)


async def test_cancelled_neighbours(cramped, tiny_reference) -> None:
    """Requests cancelled in any phase leave their neighbours' rows right, and nothing of their own."""
    params = {"max_tokens": 40, **GREEDY}
    kept = asyncio.create_task(
        cramped.generate([random_prompt(70, seed) for seed in range(8)], params, capture=EVERYTHING)
    )
    doomed = [
        asyncio.create_task(cramped.generate(random_prompt(90, 50 + seed), params, capture=EVERYTHING))
        for seed in range(12)
    ]
    steps = (await cramped.stats()).steps
    for number, task in enumerate(doomed):  # one in each phase: queued, in prefill, in decode
        while (await cramped.stats()).steps < steps + 2 * number:
            pass
        task.cancel()
    ended = await asyncio.gather(*doomed, return_exceptions=True)
    assert sum(isinstance(end, asyncio.CancelledError) for end in ended) >= 10
    _, handles = await kept
    await cramped.fetch_captures_batch(handles)
    hold(handles, tiny_reference)
    del ended, doomed
    assert await settled(cramped) == (0, 0, 0)


async def test_everything_at_once(cramped, tiny_reference, record_property) -> None:
    """64 requests at random moments, each with its own layers, sites, tokens, length and samples; repeated prompts,
    cancelled neighbours, chunks and preemption.
    """
    rng = random.Random(11)
    preempted, hits = counter("num_preemptions"), counter("prefix_cache_hits")

    async def request(number: int) -> Any:
        await asyncio.sleep(rng.random())  # the moment of its arrival
        prompt = random_prompt(rng.choice((1, 2, 31, 64, 65, 120)), rng.randrange(12))
        spec = CaptureSpec(
            layers=sorted(rng.sample(range(4), rng.randint(1, 4))),
            sites=rng.sample(ALL_SITES, rng.randint(1, 4)),
            tokens=rng.choice(("all", "prompt", "last_prompt", slice(0, None, 3), [0, -1], "generated")),
        )
        # No seed: vLLM 0.32's CPU runner dies of a seeded request whose prompt is chunked ("CPU Generator does not use
        # offset", gpu_model_runner.py:3502).
        samples = {"n": 4, "temperature": 1.0, "ignore_eos": True} if number % 8 == 0 else GREEDY
        params = {**samples, "max_tokens": rng.randint(2, 90)}
        if number % 5 == 1:
            return await cramped.generate(prompt, params), None
        return await cramped.generate(prompt, params, capture=spec)

    tasks = [asyncio.create_task(request(number)) for number in range(64)]
    doomed = [task for number, task in enumerate(tasks) if number % 9 == 4]
    for task in doomed:
        asyncio.get_running_loop().call_later(rng.random() * 4, task.cancel)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [end for end in ended if isinstance(end, Exception)]
    assert not failed
    assert counter("num_preemptions") > preempted
    assert counter("prefix_cache_hits") > hits
    handles = flattened([end[1] for end in ended if isinstance(end, tuple) and end[1] is not None])
    assert len(handles) > 40
    await cramped.fetch_captures_batch(handles)
    for name, same in hold([handle for handle in handles if handle.receipt.rows], tiny_reference).items():
        record_property(name, f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")
    del ended, tasks, doomed
    assert await settled(cramped) == (0, 0, 0)
