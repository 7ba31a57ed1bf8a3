"""The queue before the slots: order, cancellation, closing, and workers that need a moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

import pytest
from support.specs import spec
from workers import known_schemas

from steercap.config import Settings
from steercap.core.messages import Configure, Configured
from steercap.core.spec import CaptureSpec, Point
from steercap.engine.configurations import Configurations
from steercap.engine.sketching import SketchRecord
from steercap.engine.workers import Batcher
from steercap.errors import ModelClosed, SteeringSlotsFull, TooManyEdits, WorkerFailure
from steercap.requests.context import (
    FROM_CONTEXT,
    effective_steering,
    in_force,
    joining,
    sketches_in_force,
    steered,
)
from steercap.requests.sketching import RunningSketch
from steercap.steering.lowering import lower
from steercap.steering.spec import SteeringSpec

WIDTH = 8
ARMED = {Point(0, "resid_post"): 0}


def lowered(seed: int, name: str = "add"):
    return lower(
        spec(name, WIDTH, seed=seed, layer=0),
        armed=ARMED,
        schemas=known_schemas(ARMED, WIDTH, 1),
        num_layers=1,
        edits_per_point=16,
    )


class Workers:
    """Answers every question, refusing each configuration so many times."""

    def __init__(self, refusals: int = 0) -> None:
        self.asked: list[Configure] = []
        self.refusals = refusals
        self.times: dict[bytes, int] = {}

    async def __call__(self, question: Configure) -> list[Configured]:
        self.asked.append(question)
        await asyncio.sleep(0)
        refused = []
        for placed in question.configurations:
            digest = placed.configuration.digest
            self.times[digest] = self.times.get(digest, 0) + 1
            if self.times[digest] <= self.refusals:
                refused.append(digest)
        return [Configured(tuple(refused))]


def configurations(
    slots: int = 2, rows: int = 4, overflow: str = "wait", refusals: int = 0
) -> tuple[Configurations, Workers]:
    workers = Workers(refusals)
    return Configurations(slots, rows, Settings(overflow=overflow), workers), workers


async def hold(owner: Configurations, ready, done: list[int], number: int) -> None:
    async with owner.holding(ready):
        done.append(number)
        await asyncio.sleep(0.01)


async def test_requests_wait_in_order_and_all_finish() -> None:
    """More configurations than slots: first come, first served, and nothing is held afterwards."""
    owner, _ = configurations()
    done: list[int] = []
    await asyncio.gather(*(hold(owner, lowered(number), done, number) for number in range(9)))
    assert done == list(range(9))
    assert (owner.slots.slots_in_use, owner.slots.rows_in_use, owner.waiting) == (0, 0, 0)


async def test_whoever_gives_up_leaves_the_queue_to_the_others() -> None:
    """Cancelled waiters, equal ones among them, vanish; those behind go on."""
    owner, _ = configurations(slots=1)
    done: list[int] = []
    async with owner.holding(lowered(0)):
        # Equal in content, not the same object: an edit given to two calls.
        waiters = [asyncio.create_task(hold(owner, lowered(1), done, number)) for number in range(4)]
        await asyncio.sleep(0)
        waiters[1].cancel()
        waiters[3].cancel()
        ended = await asyncio.gather(waiters[1], waiters[3], return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        assert owner.waiting == 2
    await asyncio.gather(waiters[0], waiters[2])
    assert done == [0, 2]
    assert owner.slots.slots_in_use == 0


async def test_who_needs_nothing_waits_for_nobody() -> None:
    """Beside requests that wait for the only slot, and after closing."""
    owner, _ = configurations(slots=1)
    done: list[int] = []
    tasks = [asyncio.create_task(hold(owner, lowered(seed), done, seed)) for seed in (1, 2, 3)]
    while not owner.waiting:
        await asyncio.sleep(0)
    async with asyncio.timeout(1), owner.holding() as grants:
        assert (grants, owner.waiting) == ([], 2)
    await asyncio.gather(*tasks)
    await owner.aclose()
    async with owner.holding() as grants:
        assert grants == []


async def test_closing_fails_those_who_wait_and_those_who_come() -> None:
    """ModelClosed for both; nobody hangs."""
    owner, _ = configurations(slots=1)
    async with AsyncExitStack() as held:
        await held.enter_async_context(owner.holding(lowered(0)))
        waiting = asyncio.create_task(hold(owner, lowered(1), [], 0))
        await asyncio.sleep(0)
        await owner.aclose()
        with pytest.raises(ModelClosed):
            await waiting
    with pytest.raises(ModelClosed):
        await hold(owner, lowered(2), [], 0)


async def test_what_can_never_fit_and_what_must_not_wait_is_said() -> None:
    """A spec larger than the bank, and overflow='error' with everything in use."""
    owner, _ = configurations(slots=1, rows=2, overflow="error")
    with pytest.raises(TooManyEdits, match="vector_bytes"):
        await hold(owner, lowered(0, "low_rank"), [], 0)
    async with owner.holding(lowered(0)):
        with pytest.raises(SteeringSlotsFull, match="steering_slots"):
            await hold(owner, lowered(1), [], 0)
        await hold(owner, lowered(0), [], 0)  # an equal one shares the slot


async def test_requests_of_one_tick_are_equipped_by_one_call() -> None:
    """64 new configurations: their vectors in one frame, and they in another; used again, nothing is sent."""
    owner, workers = configurations(slots=64, rows=64)
    ready = [lowered(seed) for seed in range(64)]
    await asyncio.gather(*(hold(owner, one, [], 0) for one in ready))
    assert [(len(call.vectors), len(call.configurations)) for call in workers.asked] == [(64, 0), (0, 64)]
    await asyncio.gather(*(hold(owner, one, [], 0) for one in ready))
    assert len(workers.asked) == 2
    assert owner.bytes_sent == 64 * WIDTH * 4


async def test_patience_is_measured_by_the_clock(monkeypatch) -> None:
    """A slot that never becomes free fails its request in the time the message names, however long a question takes."""
    monkeypatch.setattr("steercap.engine.configurations.PATIENCE_SECONDS", 0.1)
    owner, workers = configurations(refusals=10**6)
    answer = Workers.__call__

    async def slowly(self: Workers, question: Configure) -> list[Configured]:
        await asyncio.sleep(0.05)
        return await answer(self, question)

    monkeypatch.setattr(Workers, "__call__", slowly)
    with pytest.raises(WorkerFailure, match=r"were not freed within 0\.1 s"):
        await hold(owner, lowered(0), [], 0)
    assert sum(bool(question.configurations) for question in workers.asked) < 10
    assert (owner.slots.slots_in_use, owner.waiting) == (0, 0)


async def test_a_busy_worker_is_asked_again() -> None:
    """A configuration that is refused for a while holds up nobody but itself, and gets there."""
    owner, workers = configurations(refusals=5)
    done: list[int] = []
    await hold(owner, lowered(0), done, 0)
    assert done == [0]
    assert max(workers.times.values()) == 6


async def test_a_call_that_fails_fails_those_who_need_it_and_is_made_again() -> None:
    """Nobody is told that a configuration is in place when it is not."""
    owner, workers = configurations()
    fail = True

    async def ask(question: Configure) -> list[Configured]:
        if fail:
            raise WorkerFailure("out of cheese")
        return await workers(question)

    owner._ask = ask
    ended = await asyncio.gather(*(hold(owner, lowered(0), [], 0) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(end, WorkerFailure) for end in ended)
    fail = False
    done: list[int] = []
    await hold(owner, lowered(0), done, 1)
    assert done == [1]
    assert owner.slots.slots_in_use == 0


async def test_one_vector_at_many_scales_leaves_no_trace() -> None:
    """Configurations come and go; what is kept is bounded by the slots and the bank."""
    owner, _ = configurations(slots=4, rows=4)
    for seed in range(300):
        await hold(owner, lowered(seed), [], 0)
    assert len(owner.slots._slots.contents) <= 4
    assert len(owner.slots._bank.contents) <= 4
    assert not owner._loading


async def test_a_batch_with_too_few_answers_fails_loudly() -> None:
    """Everyone who asked hears of it."""

    async def send(items):
        return items[1:]

    batcher: Batcher[int, int] = Batcher(send)
    ended = await asyncio.gather(*(batcher.ask(number) for number in range(3)), return_exceptions=True)
    assert all(isinstance(end, ValueError) for end in ended)


async def test_what_is_in_force_is_that_of_the_model_and_the_place() -> None:
    """Contexts are a model's own, nest by appending, and a call's own word goes before them."""
    one, other, a, b = object(), object(), spec("add", WIDTH, layer=0), spec("cap", WIDTH, layer=0)
    assert effective_steering(one, FROM_CONTEXT) is None
    with steered(one, a):
        assert in_force(one) is a
        assert in_force(other) is None
        with steered(one, b) as both:
            assert both.flat() == a.flat() + b.flat()
            assert effective_steering(one, FROM_CONTEXT) is both
            assert effective_steering(one, None) is None
        assert in_force(one) is a
    assert in_force(one) is None


class Opened:
    """Blocks that asynchronous generators hold open between two values, and the values in force there."""

    def __init__(self, enter: Callable[[object], AbstractContextManager[Any]]) -> None:
        self.enter = enter

    async def values(self, value: object) -> AsyncGenerator[None, None]:
        with self.enter(value):
            yield
            yield


@pytest.mark.parametrize("kind", ["steering", "sketch"])
async def test_a_generator_that_is_left_takes_its_block_with_it(kind) -> None:
    """The event loop closes it in a task of its own, whose context is not that of the block."""
    model, caught = object(), []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: caught.append(context))
    opened, now, values = blocks(kind, model)
    for _ in range(3):
        async for _ in opened.values(values[0]):
            assert now() == [values[0]]
            break
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert now() == []
    with opened.enter(values[1]):
        assert now() == [values[1]]
    assert now() == []
    assert caught == []


@pytest.mark.parametrize("kind", ["steering", "sketch"])
async def test_blocks_that_overlap_end_by_themselves(kind) -> None:
    """Whichever ends first: what began meanwhile stays."""
    model = object()
    opened, now, values = blocks(kind, model)
    first, second = opened.values(values[0]), opened.values(values[1])
    await anext(first)
    await anext(second)
    assert now() == values
    await first.aclose()
    assert now() == [values[1]]
    await second.aclose()
    assert now() == []


async def test_a_task_keeps_the_steering_of_the_block_that_it_was_made_in() -> None:
    """As any context variable, after the block as well."""
    model, a, b = object(), spec("add", WIDTH, layer=0), spec("cap", WIDTH, layer=0)
    ended = asyncio.Event()

    async def later() -> tuple[SteeringSpec | None, SteeringSpec | None]:
        await ended.wait()
        return in_force(model), in_force(model)

    with steered(model, a), steered(model, b) as both:
        task = asyncio.create_task(later())
    ended.set()
    assert await task == (both, both)  # one object, which is compiled once


def blocks(kind: str, model: object) -> tuple[Opened, Callable[[], list[Any]], list[Any]]:
    """Return blocks of a kind, a function that returns the values in force, and two values."""
    if kind == "steering":
        specs = [spec("add", WIDTH, layer=0), spec("cap", WIDTH, layer=0)]
        edits = {spec.flat()[0]: spec for spec in specs}

        def now() -> list[Any]:
            found = in_force(model)
            return [] if found is None else [edits[edit] for edit in found.flat()]

        return Opened(lambda value: steered(model, value)), now, specs
    kept: Any = [RunningSketch(SketchRecord(name, "moments", 0, {}), CaptureSpec(), Any) for name in "ab"]
    return Opened(lambda value: joining(model, value)), lambda: [*sketches_in_force(model)], kept
