"""The start-up probe: short requests that read and change every point, before the first user does.

It runs once, when the engine starts. A compiled artifact without taps, a layer that is never called, a model that skips
its modules, an edit that a compiler takes for dead: all would give plausible texts, and no rows or no steering.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import torch

from steercap.core.coding import RAW
from steercap.core.messages import Owner, Wanted
from steercap.core.plan import CapturePlan, Plan
from steercap.core.tokens import Range, Tokens
from steercap.edits.add import Add
from steercap.errors import SteeringNotApplied, TapsNotInstalled
from steercap.requests.job import Job, prepare, run_all
from steercap.sites import SITES
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from steercap.adapters.types import RequestOutput
    from steercap.core.spec import Point
    from steercap.engine.engine import Engine
    from steercap.engine.fetching import Delivery

#: Prompt tokens and generated tokens: a prefill pass, then a decode pass.
_PROMPT, _GENERATED = 3, 2


async def probe(engine: Engine) -> None:
    """Check that every armed tap fires, in prefill and in decode, and that what it changes reaches the model's output.

    Raises:
        TapsNotInstalled: a tap did not fire, what it read cannot be a row, or its change had no effect.
    """
    for number in range(engine.engines):  # each is a process, a compiled artifact and taps of its own
        delivery = await _probe_reading(engine, number)
        strange = min((parcel.nonfinite for parcel in delivery.parcels if parcel.nonfinite), default=None)
        if strange is None:
            await _probe_editing(engine, number, delivery)
        else:
            warnings.warn(
                f"the row of position {strange[0]} of the start-up probe at {engine.vllm.points[strange[1]]} holds NaN "
                "or infinity, so what edits do could not be proved; look at it with CaptureSpec(allow_nonfinite=True)",
                stacklevel=2,
            )


async def _probe_reading(engine: Engine, number: int) -> Delivery:
    """One request that captures everything; gives its rows."""
    prompt = await engine.vllm.render(list(range(1, _PROMPT + 1)))
    rows = _PROMPT + _GENERATED - 1
    capture = CapturePlan(tuple(engine.armed.values()), (Range(0, None),), reduce=None, coding=RAW)
    plan = Plan(engine.new_key(), _PROMPT, limit=rows, capture=capture)
    ticket = await engine.admit(engine.pages_needed(capture, rows), call=probe, engine=number)
    params = engine.vllm.sampling({"max_tokens": _GENERATED, "min_tokens": _GENERATED, "temperature": 0.0})
    try:
        async for _ in engine.generate(prompt, params, plan, ticket=ticket):
            pass
        (delivery,) = await engine.collect([Wanted(Owner(plan.key, 0), rows)])
    finally:
        engine.abandon(plan, ticket)
    _check(engine, delivery)
    return delivery


def _check(engine: Engine, delivery: Delivery) -> None:
    if delivery.failure:
        raise TapsNotInstalled(f"the start-up probe failed: {delivery.failure}; this engine would capture wrong rows")
    armed = engine.vllm.points
    seen: set[int] = set()
    for point, shards in delivery.shards.items():
        if not all(isinstance(values, torch.Tensor) and values.any() for values in shards):
            raise TapsNotInstalled(f"the start-up probe read nothing but zeros at {armed[point]}")
        seen.add(point)
    missing = [str(armed[point]) for point in engine.armed.values() if point not in seen]
    if missing:
        raise TapsNotInstalled(f"the start-up probe got no rows of {', '.join(missing)}")


async def _probe_editing(engine: Engine, number: int, delivery: Delivery) -> None:
    """One request per point that adds a random vector at that point alone: the next token's probability must change.

    The vector's elements are as large as the rows' are. Rows of random weights can be so small that nothing of them
    reaches the stream: where nothing changed, they are 1.
    """
    generator = torch.Generator().manual_seed(0)
    vectors, sizes = {}, {}
    for point, schema in engine.schemas.items():
        if schema.writable:
            # Of whole rows, which a rank that has a part of each cannot know.
            rows = delivery.joined(delivery.shards[engine.armed[point]])
            assert isinstance(rows, torch.Tensor), "the probe keeps rows bit for bit"
            sizes[point] = float(rows.flatten(1).norm(dim=1).mean()) / schema.width**0.5
            vectors[point] = torch.randn(schema.width, generator=generator)

    def add(point: Point, scale: float) -> Add:
        # What is added to every key alike leaves the softmax over them what it is.
        tokens: Tokens = 0 if SITES[point.site].per_key_head else "all"
        return Add(vectors[point], scale, layer=point.layer, site=point.site, tokens=tokens)

    silent = await _without_effect(engine, number, {point: add(point, sizes[point]) for point in vectors})
    loud = {point: add(point, 1.0) for point in silent if sizes[point] < 1}
    if loud:
        silent = [point for point in silent if point not in loud] + await _without_effect(engine, number, loud)
    if silent:
        raise TapsNotInstalled(
            f"the start-up probe changed the rows at {', '.join(map(str, silent))}, and the model's output did not "
            "change; the tap there reads, but what it writes is lost"
        )


async def _without_effect(engine: Engine, number: int, edits: Mapping[Point, Add]) -> list[Point]:
    """The points whose edit, each made in a request of its own, leaves the model's output what it is without any."""
    specs = [None, *(SteeringSpec([edit]) for edit in edits.values())]
    params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0}  # the sampled token's own
    prompt = {"prompt_token_ids": list(range(1, _PROMPT + 1))}
    options = {"data_parallel_rank": number} if engine.engines > 1 else {}

    async def jobs(some: Sequence[SteeringSpec | None]) -> AsyncIterator[Job]:
        for spec in some:
            yield await prepare(engine, prompt, params, None, spec, options=options)

    slots = engine.settings.steering_slots
    try:
        done = [
            one
            for first in range(0, len(specs), slots)
            for one in await run_all(jobs(specs[first : first + slots]), set())
        ]
    except SteeringNotApplied as error:
        raise TapsNotInstalled(f"the start-up probe failed: {error}; this engine would not steer correctly") from error
    clean, *edited = [_likelihood(one.output) for one in done]
    return [point for point, found in zip(edits, edited, strict=True) if found == clean]


def _likelihood(output: RequestOutput) -> dict[int, float]:
    """Logarithm of the probability of the next token, by its id."""
    logprobs = output.outputs[0].logprobs or [{}]
    return {token: value.logprob for token, value in logprobs[0].items()}
