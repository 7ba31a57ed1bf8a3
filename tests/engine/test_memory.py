"""Capture memory is bounded, waits are in order, and nothing leaks: dropped, cancelled, closed, or 2,000 in a row."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Leftovers, opened
from support.faults.base import processes
from support.rows import ALL_SITES, GREEDY, TINY_ENGINE, hold, random_prompt, settled

from steercap import CaptureSpec, SteerModel, errors
from steercap.testing import tiny_checkpoint

SIX = {"max_tokens": 6, **GREEDY}
#: Room for 4 requests of 4 layers × about 120 tokens × 512 bytes.
LITTLE = 1 << 20
#: Room for 3 reductions that run along: of 4 layers, a float32 row each and a row held apart.
THREE = 3 * 4 * 128 * (4 + 4)


@pytest.fixture(scope="module")
async def little() -> AsyncIterator[SteerModel]:
    """An engine with a megabyte of capture memory, whose rows travel as bytes."""
    settings = {"capture_bytes": LITTLE, "reduce_bytes": THREE, "overflow_timeout": 3.0, "transport": "wire"}
    async with opened(tiny_checkpoint("qwen3"), spawned=True, **settings, **TINY_ENGINE) as model:
        yield model


async def test_requests_wait_for_room_and_all_finish(little) -> None:
    """Sixteen tasks that need four times the memory there is: each waits its turn, fetches, and is right."""

    async def one(seed: int) -> torch.Tensor:
        _, handle = await little.generate(random_prompt(110, seed), SIX, capture_layers="all")
        async with handle:
            return handle.captures[2]

    rows = await asyncio.gather(*(one(seed % 4) for seed in range(16)))
    for seed in range(4):
        for again in rows[seed::4]:
            torch.testing.assert_close(again, rows[seed], rtol=1e-4, atol=1e-4)
    stats = await little.stats()
    assert stats.capture_bytes <= LITTLE
    assert await settled(little) == (0, 0, 0)


async def test_reductions_claim_no_rows(little, tiny_reference) -> None:
    """What cannot be kept as rows can be reduced as they come; requests beyond the reductions there is room for wait."""
    params = {"max_tokens": 140, "temperature": 1.0, "ignore_eos": True, "n": 3}
    with pytest.raises(errors.CaptureMemoryFull):
        await little.generate(random_prompt(110, 1), params, capture_layers="all")
    mean = CaptureSpec(reduce="mean")
    _, samples = await little.generate(random_prompt(110, 1), params, capture=mean)
    await little.fetch_captures_batch(samples)
    hold(samples, tiny_reference)
    for handle in samples:
        handle.release()

    async def one(seed: int) -> None:
        _, handle = await little.generate(random_prompt(60, seed), {"max_tokens": 20, **GREEDY}, capture=mean)
        async with handle:
            hold(handle, tiny_reference)

    await asyncio.gather(*(one(seed) for seed in range(12)))
    assert await settled(little) == (0, 0, 0)
    stats = await little.stats()
    assert (stats.reductions, stats.reductions_running) == (3, 0)


async def test_a_call_that_can_never_fit_fails_at_once(little) -> None:
    """Handles of one call reach nobody before it ends: when they fill the memory, waiting would be for ever."""
    with pytest.raises(errors.CaptureMemoryFull, match=r"handles of the same call.*capture_bytes="):
        await little.generate([random_prompt(110, seed) for seed in range(16)], SIX, capture_layers="all")
    assert await settled(little) == (0, 0, 0)


async def test_a_request_larger_than_the_memory_fails_at_once(little) -> None:
    """A request that may need more than exists is refused with both figures."""
    with pytest.raises(
        errors.CaptureMemoryFull, match=r"may need [\d,]+ bytes of capture memory, of which [\d,]+ exist"
    ):
        await little.generate(
            random_prompt(100, 1), {"max_tokens": 150, "temperature": 1.0, "n": 9}, capture_layers="all"
        )


async def test_waiting_ends_when_nobody_gives_anything_back(little) -> None:
    """With handles held and none released, a waiting request fails after `overflow_timeout`, and not before."""
    loop = asyncio.get_running_loop()
    held = [(await little.generate(random_prompt(110, seed), SIX, capture_layers="all"))[1] for seed in range(3)]
    before = loop.time()
    with pytest.raises(errors.CaptureMemoryFull, match=r"no handle was released for 3\.0 s"):
        await asyncio.gather(
            *(little.generate(random_prompt(110, seed), SIX, capture_layers="all") for seed in range(3, 6))
        )
    assert loop.time() - before > 3.0
    for handle in held:
        handle.release()
    assert await settled(little) == (0, 0, 0)


async def test_patience_that_ends_for_one_lets_the_next_run(little) -> None:
    """The first in the queue is too large for what is left and gives up; the second, which fits, runs and is counted."""
    held = [(await little.generate(random_prompt(110, seed), SIX, capture_layers="all"))[1] for seed in range(3)]
    large = asyncio.create_task(
        little.generate(random_prompt(200, 4), {"max_tokens": 20, **GREEDY}, capture_layers="all")
    )
    small = asyncio.create_task(little.generate(random_prompt(20, 5), SIX, capture_layers=[0]))
    with pytest.raises(errors.CaptureMemoryFull, match="no handle was released"):
        await large
    _, handle = await small
    budget = little.serving.engine.admission.budget
    assert budget.reserved == sum(reservation.pages for reservation in budget._held)
    assert len(budget._held) == 4
    await little.fetch_captures_batch([*held, handle])
    assert await settled(little) == (0, 0, 0)


async def test_a_stream_held_while_the_model_closes_ends() -> None:
    """Closing between two chunks: the next one is ModelClosed, not a wait for ever. Start and close may race too."""
    model = SteerModel(tiny_checkpoint("qwen3"), **TINY_ENGINE)
    starting = asyncio.create_task(model.start())
    await asyncio.sleep(0)
    assert await model.start() is await starting
    stream = model.stream(random_prompt(10, 3), {"max_tokens": 240, **GREEDY}, capture_layers="all")
    await anext(stream)
    _, handle = await model.generate(random_prompt(30, 3), SIX, capture_layers="all")
    asking = asyncio.create_task(handle.fetch())
    await asyncio.sleep(0)
    await model.aclose()
    with pytest.raises(errors.ModelClosed):
        await anext(stream)
    await asyncio.wait([asking], timeout=5)
    assert asking.done()
    assert asking.exception() is None or isinstance(asking.exception(), errors.ModelClosed)


async def test_a_release_during_a_fetch_ends_released(tiny) -> None:
    """The rows are freed when the fetch is done with them, and the fetch says that they are gone."""
    _, handle = await tiny.generate(random_prompt(100, 3), SIX, capture_layers="all")
    fetching = asyncio.create_task(handle.fetch())
    await asyncio.sleep(0)
    handle.release()
    with pytest.raises(errors.CaptureReleased):
        await fetching
    assert not handle.fetched
    assert await settled(tiny) == (0, 0, 0)


async def test_a_handle_dropped_unread_frees_its_memory(tiny) -> None:
    """No release, no fetch, no reference: the rows go."""
    _, handles = await tiny.generate([random_prompt(30, seed) for seed in range(5)], SIX, capture_layers="all")
    stats = await tiny.stats()
    assert stats.handles_held == 5
    assert 0 < stats.capture_bytes_in_use <= stats.capture_bytes_claimed
    del handles
    gc.collect()
    assert await settled(tiny) == (0, 0, 0)


async def test_fetching_frees_the_worker_and_leaving_frees_the_rest(tiny) -> None:
    """After `fetch` the worker holds nothing; after `async with handle` the client neither."""
    _, handle = await tiny.generate(random_prompt(30, 1), SIX, capture_layers="all")
    async with handle:
        assert await settled(tiny) == (0, 0, 0)
        assert handle.captures[0].shape == (35, 128)
    with pytest.raises(errors.CaptureReleased):
        _ = handle.captures


async def test_a_fetch_cancelled_on_the_way_can_be_repeated(tiny) -> None:
    """Cancelling `fetch` loses no row and leaves no lock."""
    _, handle = await tiny.generate(random_prompt(200, 1), SIX, capture_layers="all")
    for _ in range(3):
        task = asyncio.create_task(handle.fetch())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await handle.fetch()
    assert handle.captures[3].shape == (205, 128)
    assert await settled(tiny) == (0, 0, 0)


async def test_closing_ends_what_runs_and_leaves_nothing() -> None:
    """Requests in flight get ModelClosed; processes, segments and files are gone; old handles say so."""
    before = Leftovers()
    model = await SteerModel(tiny_checkpoint("qwen3"), **TINY_ENGINE).start()
    _, unread = await model.generate(random_prompt(30, 1), SIX, capture_layers="all")
    _, read = await model.generate(random_prompt(30, 1), SIX, capture_layers="all")
    await read.fetch()
    running = asyncio.create_task(
        model.generate(random_prompt(10, 2), {"max_tokens": 240, **GREEDY}, capture_layers="all")
    )
    streaming = asyncio.create_task(_drain(model.stream(random_prompt(10, 3), {"max_tokens": 240, **GREEDY})))
    steps = (await model.stats()).steps
    while (await model.stats()).steps < steps + 3:
        assert not running.done()
    await model.aclose()
    with pytest.raises(errors.ModelClosed, match="closed while this request ran"):
        await streaming
    with pytest.raises(errors.ModelClosed, match="closed while this request ran"):
        await running
    with pytest.raises(errors.ModelClosed):
        await unread.fetch()
    assert read.captures[0].shape == (35, 128)
    unread.release()
    assert not before.new()


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest.mark.spawned
async def test_a_worker_that_dies_fails_its_requests_and_leaves_nothing() -> None:
    """A killed worker is an EngineFailure for who waits and who comes, and closing removes what it had mapped."""
    before = Leftovers()
    async with SteerModel(tiny_checkpoint("qwen3"), **TINY_ENGINE) as model:
        (worker,) = map(psutil.Process, processes(model, "Worker"))  # of this engine: others may be open
        assert shared(worker)
        running = asyncio.create_task(
            model.generate(random_prompt(10, 2), {"max_tokens": 240, **GREEDY}, capture_layers="all")
        )
        while (await model.stats()).handles_held == 0:
            assert not running.done()
        worker.kill()
        with pytest.raises(errors.EngineFailure, match="died"):
            await running
        with pytest.raises(errors.EngineFailure, match="died"):
            await model.generate(random_prompt(30, 2), SIX)
    assert not before.new()


@pytest.mark.spawned
async def test_cancelling_the_start_leaves_nothing() -> None:
    """A start that is cancelled half-way stops what it had started."""
    before = Leftovers()
    starting = asyncio.create_task(SteerModel(tiny_checkpoint("qwen3"), **TINY_ENGINE).start())
    while not before.new().get("processes"):
        assert not starting.done()
        await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not before.new()


def resident(process: psutil.Process) -> int:
    """Bytes of a process's own memory, resident: neither files that it has mapped nor what it shares."""
    (kib,) = re.findall(r"^RssAnon:\s*(\d+) kB$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    return int(kib) * 1024


def shared(process: psutil.Process) -> int:
    """Bytes of steercap's segments that are resident in a process."""
    total, inside = 0, False
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            inside = "memfd:steercap" in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


async def test_two_thousand_requests_leave_memory_where_two_hundred_did(monkeypatch, record_property) -> None:
    """Client, worker and shared memory at the end are no higher than after the first 200 short captured requests.

    vLLM's own worker grows too, capture or none: its KV cache is touched bit by bit, and its kernels keep what was
    compiled for each of up to 1,024 sizes of a batch, which are others on a busy machine (54 MiB were seen). 2,000
    requests without capture fill a small KV cache beforehand, and the kernels keep nothing. What else grows in jumps, and
    not with requests, does not do so in each of three parts.
    """
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # or glibc keeps an arena for each thread, at its own pace
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
    arguments = {**TINY_ENGINE, "kv_cache_memory_bytes": 4 << 20}
    client = psutil.Process()
    others = set(client.children(recursive=True))
    async with opened(tiny_checkpoint("qwen3"), spawned=True, sites=ALL_SITES, **arguments) as model:
        (worker,) = [child for child in set(client.children(recursive=True)) - others if shared(child)]

        async def run(requests: int, capture: CaptureSpec | None) -> list[int]:
            for batch in range(requests // 50):
                prompts = [random_prompt(12, batch * 50 + seed) for seed in range(50)]
                found = await model.generate(prompts, {"max_tokens": 2, **GREEDY}, capture=capture)
                if capture is not None:
                    await model.fetch_captures_batch(found[1])
                del found
            assert await settled(model) == (0, 0, 0)
            gc.collect()
            return [resident(client), resident(worker), shared(client), shared(worker)]

        await run(2000, None)
        marks = [await run(requests, CaptureSpec(sites=ALL_SITES)) for requests in (200, 600, 600, 600)]
    shown = [[round(count / 2**20, 1) for count in mark] for mark in marks]
    record_property(
        "own memory of client and worker, shared in client, in worker, MiB: after 200, 800, 1,400 and 2,000", shown
    )
    # A leak of what 600 requests captured would be 61 MiB; 0.2 MiB were seen.
    for own in (0, 1):
        assert min(after[own] - before[own] for before, after in pairwise(marks)) <= 4 << 20, shown
    # Rows of one batch are freed while the next begins, so its pages may or may not be reused: one batch more at most.
    for common in (2, 3):
        assert marks[-1][common] <= marks[0][common] + 50 * 13 * 16 * 512, shown
