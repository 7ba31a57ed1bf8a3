"""What moves requests about while rows must stay right: chunks, cache hits, preemption, cancellation, all at once.

Each scenario runs on an engine like `rows.CRAMPED` that serves the tiny qwen3 with all sites armed, on whatever device,
asserts what must hold everywhere, and says what happened on the way, which depends on the machine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from steercap.captures.handle import CaptureHandle
from steercap.captures.stacking import flat
from steercap.core.spec import REDUCTIONS, CaptureSpec
from steercap.model import SteerModel
from steercap.steering.spec import SteeringSpec
from steercap.testing.reference import Parity, Reference
from support.rows import ALL_SITES, GREEDY, counter, flattened, hold, random_prompt, settled
from support.specs import random_spec, spec

EVERYTHING: Final = CaptureSpec(sites=ALL_SITES)
#: Rows that are computed whatever the prefix cache holds, so that it is read.
LATE: Final = CaptureSpec(sites=ALL_SITES, tokens=["last_prompt", "generated"])
LAYERS, WIDTH = 4, 128
#: Of the 72 requests of `steered_requests_at_once`, the last 8 are cancelled.
STEERED, DOOMED, SPECS = 64, 8, 40


@dataclass(frozen=True)
class Shown:
    """What a scenario showed.

    Args:
        worst: the worst row of each site, prompt and generated rows apart.
        facts: what happened on the way: counts by their names.
    """

    worst: dict[str, Parity]
    facts: dict[str, int]


Scenario = Callable[[SteerModel, Reference], Awaitable[Shown]]


async def held(
    handles: Any, reference: Reference, specs: Sequence[SteeringSpec | None] | None = None
) -> dict[str, Parity]:
    """`rows.hold` in a thread, so that engines beside go on."""
    return await asyncio.to_thread(hold, handles, reference, specs)


class Counts:
    """Preemptions and cached tokens of an engine since this was made."""

    def __init__(self, model: SteerModel) -> None:
        self.model = model
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        return {
            "preemptions": counter(self.model, "counter_num_preempted_reqs"),
            "cached tokens": counter(self.model, "counter_prefix_cache_hits"),
        }

    def since(self) -> dict[str, int]:
        """What has come since."""
        return {name: int(now - self._before[name]) for name, now in self._now().items()}


async def a_prompt_longer_than_a_step(model: SteerModel, reference: Reference) -> Shown:
    """A prompt computed in chunks gives the rows of the whole."""
    steps = (await model.stats()).steps
    _, found = await model.generate(random_prompt(230, 1), {"max_tokens": 10, **GREEDY}, capture=EVERYTHING)
    steps = (await model.stats()).steps - steps
    (handle,) = flat(found)
    await handle.fetch()
    return Shown(await held(handle, reference), {"steps": steps})


async def prefix_cache_hits(model: SteerModel, reference: Reference) -> Shown:
    """The same prompt with and without capture, in any order: captured rows are all there; others use the cache."""
    prompt, params = random_prompt(200, 2), {"max_tokens": 6, **GREEDY}
    first = await model.run(prompt, params)
    again = await model.run(prompt, params)
    assert again.output.num_cached_tokens == 192  # whole blocks of 32 below 200
    captured = await model.run(prompt, params, capture=EVERYTHING)
    assert captured.output.num_cached_tokens == 0
    late = await model.run(prompt, params, capture=LATE)
    assert late.output.num_cached_tokens == 192  # what it keeps is computed anyway
    handle, tail = captured.handle, late.handle
    said = {tuple(raw.output.outputs[0].token_ids) for raw in (first, again, captured, late)}
    assert said == {handle.output_token_ids}
    await model.fetch_captures_batch([handle, tail])
    assert tail.positions.tolist() == list(range(199, 205))
    return Shown(await held([handle, tail], reference), {"cached tokens": late.output.num_cached_tokens})


async def preemption(model: SteerModel, reference: Reference) -> Shown:
    """Requests that are thrown out and recomputed have each row once, and right."""
    counts = Counts(model)
    prompts = [random_prompt(100 + seed, seed) for seed in range(16)]
    _, found = await model.generate(prompts, {"max_tokens": 60, **GREEDY}, capture=EVERYTHING)
    await model.fetch_captures_batch(handles := flat(found))
    assert all(handle.receipt.rows == len(handle.prompt_token_ids) + 59 for handle in handles)
    return Shown(await held(handles, reference), counts.since() | {"rows written again": _again(handles)})


async def steered_preemption(model: SteerModel, reference: Reference) -> Shown:
    """Requests that are thrown out and recomputed are steered each time, and each row counts once."""
    counts = Counts(model)
    prompts = [random_prompt(100 + seed, 200 + seed) for seed in range(16)]
    specs = [spec("cap" if seed % 2 else "relative", WIDTH, seed=seed, layers="all") for seed in range(16)]
    _, found = await model.generate(prompts, {"max_tokens": 60, **GREEDY}, capture=EVERYTHING, steering=specs)
    await model.fetch_captures_batch(handles := flat(found))
    for handle in handles:
        assert handle.receipt.steering is not None
        assert handle.receipt.steering.rows == (LAYERS * handle.receipt.rows,)
    return Shown(await held(handles, reference, specs), counts.since() | {"rows written again": _again(handles)})


async def reductions_along(model: SteerModel, reference: Reference) -> Shown:
    """Rows that are reduced as they come: chunks, preemption, and ends that the scheduler learns of a pass late."""
    prompts = [random_prompt(100 + seed, 400 + seed) for seed in range(16)]
    params = [{"max_tokens": 60, **GREEDY} for _ in prompts]
    outputs = await model.run(prompts, params)
    for number, (one, raw) in enumerate(zip(params, outputs, strict=True)):
        one["stop_token_ids"] = [raw.output.outputs[0].token_ids[40 + number]]  # which may have come before
    chosen: list[Any] = ["all", "generated", "prompt", [7, -1, "generated"], slice(3, None, 5)]
    specs = [
        CaptureSpec(sites=ALL_SITES, tokens=chosen[number % len(chosen)], reduce=REDUCTIONS[number % len(REDUCTIONS)])
        for number in range(len(prompts))
    ]
    counts = Counts(model)
    _, found = await model.generate(prompts, params, capture=specs)
    await model.fetch_captures_batch(handles := flat(found))
    lengths = [len(handle.output_token_ids) for handle in handles]
    assert all(length <= 41 + number for number, length in enumerate(lengths))
    return Shown(
        await held(handles, reference),
        counts.since() | {"rows written again": _again(handles), "tokens generated": sum(lengths)},
    )


def _again(handles: Sequence[CaptureHandle]) -> int:
    return sum(handle.receipt.writes - handle.receipt.rows for handle in handles)


async def one_token_prompts(model: SteerModel, reference: Reference) -> Shown:
    """The shortest prompt there is, many at once."""
    _, handles = await model.generate(
        [[seed] for seed in range(3, 23)], {"max_tokens": 3, **GREEDY}, capture=EVERYTHING
    )
    await model.fetch_captures_batch(handles)
    return Shown(await held(handles, reference), {"requests": len(handles)})


async def passes_of_no_request(model: SteerModel, reference: Reference) -> Shown:
    """Passes that vLLM makes of no request, as a rank does while others work, between those of captured, steered ones."""
    specs = [spec("add", WIDTH, seed=seed, layers="all") if seed % 2 else None for seed in range(4)]
    task = asyncio.create_task(
        model.generate(
            [random_prompt(20 + seed, seed) for seed in range(4)],
            {"max_tokens": 180, **GREEDY},
            capture=EVERYTHING,
            steering=specs,
        )
    )
    passes = 0
    while not task.done():
        await model.engine.collective_rpc("execute_dummy_batch")
        passes += 1
    _, handles = await task
    await model.fetch_captures_batch(handles)
    return Shown(await held(handles, reference, specs), {"passes": passes})


async def cancelled_neighbours(model: SteerModel, reference: Reference) -> Shown:
    """Requests cancelled in any phase leave their neighbours' rows right, and nothing of their own."""
    params = {"max_tokens": 40, **GREEDY}
    kept = asyncio.create_task(
        model.generate([random_prompt(70, seed) for seed in range(8)], params, capture=EVERYTHING)
    )
    longer = params | {"max_tokens": 150}  # so that a quick machine has not ended them all before they are cancelled
    doomed = [
        asyncio.create_task(model.generate(random_prompt(90, 50 + seed), longer, capture=EVERYTHING))
        for seed in range(12)
    ]
    steps = (await model.stats()).steps
    for number, task in enumerate(doomed):  # one in each phase: queued, in prefill, in decode
        while not task.done() and (await model.stats()).steps < steps + 2 * number:
            pass
        task.cancel()
    ended = await asyncio.gather(*doomed, return_exceptions=True)
    cancelled = sum(isinstance(end, asyncio.CancelledError) for end in ended)
    _, handles = await kept
    await model.fetch_captures_batch(handles)
    found = await held(handles, reference)
    del ended, doomed, task
    assert await settled(model) == (0, 0, 0)
    return Shown(found, {"cancelled": cancelled})


async def everything_at_once(model: SteerModel, reference: Reference, seconds: float = 1.0, seed: int = 11) -> Shown:
    """64 requests at random moments, each with its own layers, sites, tokens, length and samples; repeated prompts,
    cancelled neighbours, chunks and preemption.

    Args:
        model: a cramped engine.
        reference: transformers on the same checkpoint.
        seconds: within which the requests arrive; in four times as many some are cancelled.
        seed: what is asked follows from it.
    """
    rng = random.Random(seed)

    async def request(number: int) -> Any:
        await asyncio.sleep(rng.random() * seconds)  # the moment of its arrival
        prompt = random_prompt(rng.choice((1, 2, 31, 64, 65, 120)), rng.randrange(12))
        capture = CaptureSpec(
            layers=sorted(rng.sample(range(LAYERS), rng.randint(1, LAYERS))),
            sites=rng.sample(ALL_SITES, rng.randint(1, len(ALL_SITES))),
            tokens=rng.choice(("all", "prompt", "last_prompt", slice(0, None, 3), [0, -1], "generated")),
        )
        seed = number if number % 3 else None
        samples = {"n": 4, "temperature": 1.0, "seed": seed, "ignore_eos": True} if number % 8 == 0 else GREEDY
        params = {**samples, "max_tokens": rng.randint(2, 90)}
        if number % 5 == 1:
            await model.generate(prompt, params)
            return []
        _, handles = await model.generate(prompt, params, capture=capture)
        return [(handle, None) for handle in flattened([handles])]

    tasks = [asyncio.create_task(request(number)) for number in range(64)]
    doomed = [task for number, task in enumerate(tasks) if number % 9 == 4]
    return await _at_once(model, reference, tasks, doomed, rng, seconds)


async def steered_requests_at_once(
    model: SteerModel, reference: Reference, seconds: float = 1.0, seed: int = 12
) -> Shown:
    """64 requests at random moments with 40 different specs, and some with none; repeated prompts, samples, cancelled
    neighbours, chunks, preemption and cache hits: every row of each is that of its own spec alone.

    Args:
        model, reference, seconds, seed: as for `everything_at_once`.
    """
    rng = random.Random(seed)
    lengths = (2, 3, 31, 64, 65, 120)
    known = [random_spec(rng, WIDTH, LAYERS, ALL_SITES, min(lengths)) for _ in range(SPECS)]

    async def request(number: int) -> Any:
        await asyncio.sleep(rng.random() * seconds)
        prompt = random_prompt(rng.choice(lengths), rng.randrange(8))
        steering = None if number % 8 == 3 else known[(number - (number + 4) // 8) % SPECS]
        seed = number if number % 3 else None
        samples = {"n": 2, "temperature": 1.0, "seed": seed, "ignore_eos": True} if number % 8 == 0 else GREEDY
        params = {**samples, "max_tokens": rng.randint(8, 60)}
        capture = EVERYTHING if number % 3 else LATE
        _, handles = await model.generate(prompt, params, capture=capture, steering=steering)
        return [(handle, steering) for handle in flattened([handles])]

    tasks = [asyncio.create_task(request(number)) for number in range(STEERED + DOOMED)]
    shown = await _at_once(model, reference, tasks, tasks[STEERED:], rng, seconds)
    stats = await model.stats()
    assert (stats.steering_slots_in_use, stats.vector_bytes_in_use) == (0, 0)
    assert shown.facts["specs"] == SPECS
    return shown


async def _at_once(
    model: SteerModel,
    reference: Reference,
    tasks: list[asyncio.Task[Any]],
    doomed: list[asyncio.Task[Any]],
    rng: random.Random,
    seconds: float,
) -> Shown:
    """Let tasks that give (handle, spec) end, cancelling some, and compare every row of the others."""
    counts = Counts(model)
    for task in doomed:
        asyncio.get_running_loop().call_later(rng.random() * 4 * seconds, task.cancel)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [end for end in ended if isinstance(end, Exception)]
    assert not failed, failed[:3]
    done = [pair for end in ended if not isinstance(end, BaseException) for pair in end]
    handles, specs = [handle for handle, _ in done], [steering for _, steering in done]
    await model.fetch_captures_batch(handles)
    kept = [place for place, handle in enumerate(handles) if handle.receipt.rows]
    found = await held([handles[place] for place in kept], reference, [specs[place] for place in kept])
    facts = counts.since() | {
        "cancelled": sum(isinstance(end, asyncio.CancelledError) for end in ended),
        "captures": len(handles),
        "specs": len({steering for steering in specs if steering}),
        "steered from the cache": sum(bool(h.receipt.steering and h.receipt.steering.cached) for h in handles),
        "rows written again": _again(handles),
    }
    doomed.clear()
    tasks.clear()
    del ended, done, handles
    assert await settled(model) == (0, 0, 0)
    return Shown(found, facts)
