"""Rows stay right while everything that moves requests about happens, alone and together.

A 4-layer qwen3 in the cramped engine of conftest: chunks, preemption, 16 requests at once.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from conftest import ALL_SITES
from rows import GREEDY, counter, flattened, hold, random_prompt, settled
from specs import random_spec, spec

from steercap import CaptureSpec

EVERYTHING = CaptureSpec(sites=ALL_SITES)
#: Rows that are computed whatever the prefix cache holds, so that it is read.
LATE = CaptureSpec(sites=ALL_SITES, tokens=["last_prompt", "generated"])


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
    preempted = counter(cramped, "counter_num_preempted_reqs")
    prompts = [random_prompt(100 + seed, seed) for seed in range(16)]
    _, handles = await cramped.generate(prompts, {"max_tokens": 60, **GREEDY}, capture=EVERYTHING)
    preemptions = counter(cramped, "counter_num_preempted_reqs") - preempted
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
    preempted, hits = counter(cramped, "counter_num_preempted_reqs"), counter(cramped, "counter_prefix_cache_hits")

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
    assert counter(cramped, "counter_num_preempted_reqs") > preempted
    assert counter(cramped, "counter_prefix_cache_hits") > hits
    handles = flattened([end[1] for end in ended if isinstance(end, tuple) and end[1] is not None])
    assert len(handles) > 40
    await cramped.fetch_captures_batch(handles)
    for name, same in hold([handle for handle in handles if handle.receipt.rows], tiny_reference).items():
        record_property(name, f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")
    del ended, tasks, doomed
    assert await settled(cramped) == (0, 0, 0)


async def test_steered_requests_at_once(cramped, tiny_reference, record_property) -> None:
    """64 requests at random moments with 40 different specs, and some with none; repeated prompts, samples, cancelled
    neighbours, chunks, preemption and cache hits: every row of each is that of its own spec alone.
    """
    rng = random.Random(12)
    preempted, hits = counter(cramped, "counter_num_preempted_reqs"), counter(cramped, "counter_prefix_cache_hits")
    lengths = (2, 3, 31, 64, 65, 120)
    known = [random_spec(rng, 128, 4, ALL_SITES, min(lengths)) for _ in range(40)]

    async def request(number: int) -> Any:
        await asyncio.sleep(rng.random())
        prompt = random_prompt(rng.choice(lengths), rng.randrange(8))
        steering = None if number % 8 == 3 else known[(number - (number + 4) // 8) % 40]
        samples = {"n": 2, "temperature": 1.0, "ignore_eos": True} if number % 8 == 0 else GREEDY
        params = {**samples, "max_tokens": rng.randint(8, 60)}
        capture = EVERYTHING if number % 3 else LATE
        _, handles = await cramped.generate(prompt, params, capture=capture, steering=steering)
        return flattened([handles]), steering

    tasks = [asyncio.create_task(request(number)) for number in range(64 + 8)]
    doomed = tasks[64:]
    for task in doomed:
        asyncio.get_running_loop().call_later(rng.random() * 4, task.cancel)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [end for end in ended if isinstance(end, Exception)]
    assert counter(cramped, "counter_num_preempted_reqs") > preempted
    assert counter(cramped, "counter_prefix_cache_hits") > hits
    done = [end for end in ended if not isinstance(end, BaseException)]
    handles = [handle for found, _ in done for handle in found]
    specs = [steering for found, steering in done for _ in found]
    assert len(handles) > 60
    assert len({steering for steering in specs if steering}) == 40
    await cramped.fetch_captures_batch(handles)
    assert any(handle.receipt.steering.cached for handle in handles if handle.receipt.steering)
    for name, same in hold(handles, tiny_reference, specs).items():
        record_property(f"steered {name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")
    del ended, tasks, doomed, done
    assert await settled(cramped) == (0, 0, 0)
    stats = await cramped.stats()
    assert (stats.steering_slots_in_use, stats.vector_bytes_in_use) == (0, 0)


async def test_steered_preemption(cramped, tiny_reference) -> None:
    """Requests that are thrown out and recomputed are steered each time, and each row counts once."""
    preempted = counter(cramped, "counter_num_preempted_reqs")
    prompts = [random_prompt(100 + seed, 200 + seed) for seed in range(16)]
    specs = [spec("cap" if seed % 2 else "relative", 128, seed=seed, layers="all") for seed in range(16)]
    _, handles = await cramped.generate(prompts, {"max_tokens": 60, **GREEDY}, capture=EVERYTHING, steering=specs)
    assert counter(cramped, "counter_num_preempted_reqs") > preempted
    await cramped.fetch_captures_batch(handles)
    assert any(handle.receipt.writes > handle.receipt.rows for handle in handles)
    assert all(handle.receipt.steering.rows == (4 * handle.receipt.rows,) for handle in handles)
    hold(handles, tiny_reference, specs)
