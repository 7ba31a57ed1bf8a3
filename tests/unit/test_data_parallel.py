"""Several engines without a model: real workers, the client's own engine between them, and no vLLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from workers import batch, some_runtime, tap

from steercap import CaptureSpec, Generation, SteerModel
from steercap.config import Settings
from steercap.core.messages import Listen, Listening, Owner, Read, Wanted, decode_call, encode
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import SteeringPlan, identity
from steercap.core.prompts import tokens_of
from steercap.core.receipt import check_edits
from steercap.core.schema import RAW
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.engine.engine import Engine
from steercap.errors import InvalidRequest, ModelClosed, SteeringNotApplied, WorkerFailure
from steercap.requests.call_types import copied
from steercap.requests.job import run_all, run_job
from steercap.requests.preparing import prepare
from steercap.requests.stats import stats_of
from steercap.steering.edits.add import Add
from steercap.steering.lowering import scopes_of
from steercap.steering.spec import SteeringSpec
from steercap.testing import tiny_checkpoint

ENGINES, STAGES, POINTS, WIDTH = 2, 2, 4, 16
TOKENIZER = AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3"))
TOKENIZER.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
ALL = CapturePlan(tuple(range(POINTS)), (Range(0, None),), None, RAW)
SPEC = SteeringSpec([Add(torch.ones(WIDTH), layers="all")])


class Cluster:
    """Behind the verbs of `VllmEngine`: two engines of two pipeline stages each, with two points a stage.

    Args:
        channels: True if the workers can be asked beside RPCs.
    """

    hidden_size, num_layers, vocabulary, model_name, overshoot = WIDTH, POINTS, 1000, "none", 0
    aborted = 0
    pools, max_model_len, commit = False, 1000, ""
    model_types = (model_name, model_name)
    points = tuple(Point(layer, "resid_post") for layer in range(POINTS))

    def exists(self, point: Point) -> bool:
        """Whether the model has a point."""
        return point in self.points

    def follow(self, before: Any) -> None:
        """Take over what the engine before knew of adapters: none are used here."""

    def __init__(self, *, channels: bool = False) -> None:
        self.channels = channels
        self.workers = [
            [some_runtime(points=POINTS, width=WIDTH, local=(2 * stage, 2 * stage + 1)) for stage in range(STAGES)]
            for _ in range(ENGINES)
        ]
        self.asked: list[tuple[Any, int | None]] = []
        self.ran: list[Any] = []
        self.rendered: list[tuple[int, ...]] = []
        self.asked_params: list[dict[str, Any]] = []
        self.ended = False

    async def rpc(self, frame: bytes, engine: int | None = None) -> list[list[bytes]]:
        self.asked.append((decode_call(frame).question, engine))
        chosen = self.workers if engine is None else [self.workers[engine]]
        if isinstance(self.asked[-1][0], Listen) and not self.channels:
            return [[encode(Listening("")) for _ in workers] for workers in chosen]
        return [[worker.answer(frame) for worker in workers] for workers in chosen]

    died = False

    async def watch(self, _told: Any) -> None:
        pass

    def waiting(self) -> Any:
        return nullcontext()

    async def quiesce(self) -> None:
        pass

    def end(self) -> None:
        self.ended = True

    @property
    def tokenizer(self) -> Any:
        if self.ended:
            raise ModelClosed("the engine was shut down")
        return TOKENIZER

    def text_ids(self, text: str, special: bool | None) -> list[int]:
        return tokens_of(self.tokenizer, text, special=special is not False)

    def sampling(self, params: Any) -> Any:
        self.asked_params.append({**(params or {})})
        return SimpleNamespace(n=1, stop=None, max_tokens=1)

    async def render(self, prompt: Any) -> Any:
        ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        self.rendered.append(tuple(ids))
        return SimpleNamespace(token_ids=tuple(ids), media=())

    async def checked(self, _prompt: Any, _params: Any, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def limit(self, prompt_len: int, _params: Any) -> int:
        return prompt_len + 1

    async def generate(self, _prompt: Any, _params: Any, _key: str, plan: Plan | None, **options: Any) -> Any:
        self.ran.append(options.get("data_parallel_rank"))
        if plan:
            self.run(plan, options.get("data_parallel_rank", 1))
        yield SimpleNamespace(outputs=[SimpleNamespace(index=0, token_ids=[9, 9], text="")])

    def run(self, plan: Plan, engine: int, stages: tuple[int, ...] = (0, 1)) -> None:
        """One pass over all tokens of a request, on these workers."""
        count = plan.limit
        for stage in stages:
            worker = self.workers[engine][stage]
            worker.register(plan.key, plan.encode(), 0)
            positions = np.arange(count)
            tokens = np.where(positions < plan.prompt_len, positions, 9)
            worker.begin_step(batch("host", [plan.key], [0], [count], tokens, positions))
            for point in range(len(worker.taps.points)):
                tap(worker, torch.full((count, WIDTH), 100.0 * engine + 10 * stage + point), None, point)
            worker.end_step()


def steered(engine: Engine, grant: Any, lowered: Any) -> Plan:
    """Plan of a request of three tokens and two more, with all its tokens steered."""
    scopes, replaced = scopes_of(lowered, 3, 5)
    name = identity(grant.digest, scopes, replaced, engine.configurations.epoch)
    return Plan(engine.new_key(), 3, 5, steering=SteeringPlan(grant.slot, grant.digest, name, scopes, replaced))


def one_on_each(cluster: Cluster, engine: Engine) -> list[Plan]:
    """Plans of two requests that capture all points, each run on an engine; what was asked before is forgotten."""
    plans = [Plan(engine.new_key(), 3, 5, capture=ALL) for _ in range(2)]
    for number, plan in enumerate(plans):
        cluster.run(plan, number)
    cluster.asked.clear()
    return plans


@asynccontextmanager
async def engine_of(cluster: Cluster, **settings: Any) -> AsyncIterator[Engine]:
    chosen = Settings(**{"capture_bytes": 1 << 20, "vector_bytes": 1 << 16, **settings})
    engine = await Engine.attach(cluster, chosen)
    try:
        yield engine
    finally:
        await engine.aclose()


def values(delivery: Any) -> list[float]:
    """The one value of each point, in the order of the points."""
    return [float(torch.cat(delivery.shards[point]).unique()) for point in sorted(delivery.shards)]


@pytest.mark.parametrize("transport", ["shared", "wire"])
async def test_rows_come_from_the_engine_that_ran_the_request(transport) -> None:
    """One question to all, the rows of both stages of one; over the wire its engine alone is asked for bytes."""
    cluster = Cluster()
    async with engine_of(cluster, transport=transport) as engine:
        plans = one_on_each(cluster, engine)
        deliveries = await engine.collect([Wanted(Owner(plan.key, 0), 5) for plan in plans])
        assert [values(one) for one in deliveries] == [[0, 1, 10, 11], [100, 101, 110, 111]]
        reads = [number for question, number in cluster.asked if isinstance(question, Read)]
        assert len(cluster.asked) - len(reads) == 1
        assert sorted(reads) == ([0, 0, 1, 1] if transport == "wire" else [])
        located = await engine.workers.locate([Wanted(Owner(plans[1].key, 0), 5)])
        assert [[type(one).__name__ for one in workers] for workers in located[0]] == [
            ["Unknown"] * 2,
            ["CapturedRows"] * 2,
        ]


async def test_rows_of_half_an_engine_of_none_or_of_two_are_none() -> None:
    """A stage that never saw the request, no engine that did, two that did: each is said, and no tensor is made."""
    cluster = Cluster()
    async with engine_of(cluster) as engine:
        half, never, twice = (Plan(engine.new_key(), 3, 5, capture=ALL) for _ in range(3))
        cluster.run(half, 1, stages=(0,))
        cluster.run(twice, 0)
        cluster.run(twice, 1)
        found = await engine.collect([Wanted(Owner(plan.key, 0), 5) for plan in (half, never, twice)])
    assert [one.failure for one in found] == [
        "worker 1 of engine 1 has no rows of this request",
        "no worker has rows of this request",
        "engines 0, 1 all have rows of this request",
    ]
    assert not any(one.shards for one in found)


async def test_edits_are_those_of_the_engine_that_ran_the_request() -> None:
    """Every stage of one engine must have made its edits; the other engine's ignorance is not a failure."""
    cluster = Cluster()
    async with engine_of(cluster) as engine:
        lowered = engine.compiler.lowered(SPEC)
        scopes, replaced = scopes_of(lowered, 3, 5)
        async with engine.configurations.holding(lowered) as (grant,):
            name = identity(grant.digest, scopes, replaced, 0)
            steering = SteeringPlan(grant.slot, grant.digest, name, scopes, replaced)
            good, half, never, twice = (Plan(engine.new_key(), 3, 5, steering=steering) for _ in range(4))
            cluster.run(good, 1)
            cluster.run(half, 0, stages=(1,))
            cluster.run(twice, 0)
            cluster.run(twice, 1)
            plans = (good, half, never, twice)
            found = await engine.workers.settle(
                [Wanted(Owner(plan.key, 0), 5) for plan in plans], ended=True, biased=False
            )
        receipt = check_edits("r", good, lowered.configuration, 5, found[0])
        assert receipt.rows == (POINTS * 5,)
        for plan, said, message in (
            (half, found[1], "worker 0 never saw"),
            (never, found[2], "worker 0 never saw"),
            (twice, found[3], "engines 0, 1 all ran"),
        ):
            with pytest.raises(SteeringNotApplied, match=message):
                check_edits("r", plan, lowered.configuration, 5, said)


async def test_a_request_runs_where_its_rows_have_room() -> None:
    """Claims decide the engine, the user before them; who captures nothing is left to vLLM's balance."""
    cluster = Cluster()
    async with engine_of(cluster) as engine:
        spec = CaptureSpec(layers="all")

        call = object()

        async def jobs() -> AsyncIterator[Coroutine[Any, Any, Generation]]:
            for _ in range(4):
                yield run_job(await prepare(engine, range(3), None, spec, None, options={}), call)
            yield run_job(await prepare(engine, range(3), None, spec, None, options={"data_parallel_rank": 0}), call)
            yield run_job(await prepare(engine, range(3), None, None, SPEC, options={}), call)
            yield run_job(await prepare(engine, range(3), None, None, None, options={}), call)

        done = await run_all(jobs(), set())
        assert sorted(cluster.ran, key=str) == [0, 0, 0, 1, 1, None, None]
        assert [count[0].requests for count in await engine.workers.get_stats()] == [3, 2]
        stats = await stats_of(engine)
        assert stats.handles_held == 5
        assert stats.capture_bytes_claimed == 3 * engine.admission.page_bytes
        for one in done[:5]:
            await one.handles[0].fetch()
        assert (await stats_of(engine)).capture_bytes_claimed == 0


async def test_an_error_of_one_request_comes_with_its_cause() -> None:
    """What made a request fail is shown with it, and no group around it."""
    cluster = Cluster()
    cause = ValueError("no such token")

    async def refused(*_: Any, **__: Any) -> Any:
        raise InvalidRequest("refused") from cause
        yield

    cluster.generate = refused
    async with engine_of(cluster) as engine:
        call = object()
        asked = engine, range(3), None, CaptureSpec(), None
        jobs = (run_job(await prepare(*asked, options={}), call) for _ in range(2))
        with pytest.raises(InvalidRequest) as failed:
            await run_all(jobs, set())
        assert failed.value.__cause__ is cause
        assert engine.admission.budget.reserved > 0  # until the workers have heard of it
        await engine.workers.get_stats()
        assert engine.admission.budget.reserved == 0


async def test_an_engine_that_comes_or_goes_is_not_overlooked() -> None:
    """Answers of fewer or more engines than were started are an error, not a shorter list."""
    cluster = Cluster()
    async with engine_of(cluster) as engine:
        cluster.workers.append(cluster.workers.pop(0))
        cluster.workers.append([])
        with pytest.raises(WorkerFailure, match="3 engines answered where 2 were started"):
            await engine.workers.get_stats()


@pytest.mark.parametrize("channels", [True, False])
async def test_rows_and_records_are_the_same_by_rpc_and_by_channel(channels) -> None:
    """Two engines of two stages: every question in the order of the workers, and none of these by RPC."""
    cluster = Cluster(channels=channels)
    async with engine_of(cluster) as engine:
        plans = one_on_each(cluster, engine)
        deliveries = await engine.collect([Wanted(Owner(plan.key, 0), 5) for plan in plans])
        assert [values(one) for one in deliveries] == [[0, 1, 10, 11], [100, 101, 110, 111]]
        assert [[one.requests for one in workers] for workers in await engine.workers.get_stats()] == [[1, 1], [1, 1]]
        assert len(cluster.asked) == (0 if channels else 2)
        for number, plan in enumerate(plans):
            engine.give_back(Owner(plan.key, 0), None)
            left = [[one.requests for one in workers] for workers in await engine.workers.get_stats()]
            assert left == [[0, 0], [0, 0] if number else [1, 1]]


async def test_questions_and_passes_at_once() -> None:
    """A thread runs passes while two hundred requests are collected and freed: every row is its own request's."""
    cluster = Cluster(channels=True)
    async with engine_of(cluster, capture_bytes=1 << 22) as engine:
        plans = [Plan(engine.new_key(), 3, 5, capture=ALL) for _ in range(200)]
        ran, errors, room = [], [], threading.Semaphore(8)  # requests that the arena holds

        def passes() -> None:
            try:
                for number, plan in enumerate(plans):
                    room.acquire()
                    with cluster.workers[number % 2][0].turn, cluster.workers[number % 2][1].turn:
                        cluster.run(plan, number % 2)
                    ran.append(number)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=passes)
        thread.start()
        for number, plan in enumerate(plans):
            while len(ran) <= number and thread.is_alive():
                await asyncio.sleep(0)
            (delivery,) = await engine.collect([Wanted(Owner(plan.key, 0), 5)])
            assert values(delivery) == ([100, 101, 110, 111] if number % 2 else [0, 1, 10, 11])
            engine.give_back(Owner(plan.key, 0), None)
            room.release()
        thread.join()
        assert not errors
        assert {one.requests for workers in await engine.workers.get_stats() for one in workers} == {0}


@pytest.mark.parametrize("asked", [False, True])
async def test_a_channel_that_breaks(asked, monkeypatch) -> None:
    """All goes by RPC then. What was being asked is not asked again: a worker may have answered, and forgotten it."""
    cluster = Cluster(channels=True)
    async with engine_of(cluster) as engine:
        lowered = engine.compiler.lowered(SPEC)
        async with engine.configurations.holding(lowered) as (grant,):
            plans = [steered(engine, grant, lowered) for _ in range(2)]
            for plan in plans:
                cluster.run(plan, 0)
            broken = engine.workers._channels[1][0]
            if asked:
                ask = broken.ask
                monkeypatch.setattr(broken, "ask", lambda frame: (ask(frame), broken.close())[0])
                with pytest.raises(WorkerFailure, match="a worker closed its channel during a call"):
                    await engine.workers.settle([Wanted(Owner(plans[0].key, 0), 5)], ended=True, biased=False)
            else:
                broken.close()
            (found,) = await engine.workers.settle([Wanted(Owner(plans[1].key, 0), 5)], ended=True, biased=False)
            check_edits("r", plans[1], lowered.configuration, 5, found)


async def test_a_request_that_was_aborted_is_not_overtaken() -> None:
    """Its first pass may come later: until an RPC has gone behind the abort, nothing is asked on channels."""
    cluster = Cluster(channels=True)
    async with engine_of(cluster) as engine:
        cluster.asked.clear()
        plan = Plan(engine.new_key(), 3, 5, capture=ALL)
        cluster.aborted += 1
        engine.give_back(Owner(plan.key, 0), None)
        await engine.workers.get_stats()
        assert len(cluster.asked) == 1
        await engine.workers.get_stats()
        assert len(cluster.asked) == 1


@asynccontextmanager
async def opened(engine: Engine, **settings: Any) -> AsyncIterator[SteerModel]:
    """A model that has this engine."""
    model = SteerModel("none", **settings)
    model.serving.engine = engine
    try:
        yield model
    finally:
        await model.aclose()


async def test_prompts_run_while_others_are_prepared() -> None:
    """A call of many prompts of token ids has nothing to wait for, and lets the first of them run all the same."""
    cluster = Cluster()
    prepared: list[int] = []

    async def noted(*asked: Any, **options: Any) -> Any:
        prepared.append(len(cluster.rendered))
        async for output in Cluster.generate(cluster, *asked, **options):
            yield output

    cluster.generate = noted
    async with engine_of(cluster) as engine, opened(engine) as model:
        await model.generate([[1, 2, number] for number in range(200)], {"max_tokens": 2})
    assert len(prepared) == 200
    assert prepared[0] < 40


async def test_what_a_caller_changes_after_a_call_does_not_reach_it() -> None:
    """Whenever the call is awaited: its arguments are those of the moment in which it was made."""
    cluster = Cluster()
    params, stop, prompt, waiting = {}, [], [1], []
    async with engine_of(cluster) as engine, opened(engine) as model:
        for seed in range(3):
            params["seed"], params["stop"] = seed, stop
            stop.append(str(seed))
            prompt.append(seed)
            waiting.append(asyncio.create_task(model.generate(prompt, params)))
            each = asyncio.create_task(model.generate([[7]], [params]))
            waiting.append(each)
        stop.clear()
        await asyncio.gather(*waiting)
    wanted = [{"seed": seed, "stop": [str(one) for one in range(seed + 1)]} for seed in range(3) for _ in range(2)]
    assert cluster.asked_params == wanted
    assert [one for one in cluster.rendered if one != (7,)] == [(1, 0), (1, 0, 1), (1, 0, 1, 2)]


def test_lists_within_lists_are_copied_too() -> None:
    """Conversations of a call, and layers to capture."""
    conversations, layers, ids = [[{"role": "user", "content": "a"}]], [3, 4], [1, 2]
    given = copied(conversations), copied(layers), copied(ids)
    conversations[0].append({"role": "assistant", "content": "b"})
    conversations[0][0]["content"] = "c"
    layers.append(7)
    assert given == ([[{"role": "user", "content": "a"}]], [3, 4], [1, 2])


async def test_calls_that_are_made_during_a_restart_wait_for_it(monkeypatch) -> None:
    """Their texts are tokenised by the engine that comes, not by the one that is gone."""
    cluster, release = Cluster(), asyncio.Event()
    async with (
        engine_of(Cluster()) as dead,
        engine_of(cluster) as next_one,
        opened(dead, restart=True) as model,
    ):

        async def start() -> Engine:
            await release.wait()
            return next_one

        monkeypatch.setattr(model.serving, "_start", start)
        dead._death = "it died"
        params = {"max_tokens": 2}
        first = asyncio.create_task(model.generate([1, 2], params))
        async with asyncio.timeout(10):
            while not dead.vllm.ended:
                await asyncio.sleep(0)
        chat = asyncio.create_task(model.chat([{"role": "user", "content": "hello"}], params))
        text = asyncio.create_task(model.generate("hello", params, add_special_tokens=False))
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(first, chat, text)
    assert len(cluster.rendered) == 3
    assert dead.vllm.rendered == []


async def test_a_stream_that_is_not_read_keeps_its_last_state_alone() -> None:
    """What was said before is in it; the next chunk brings all that is new."""
    cluster, ended = Cluster(), asyncio.Event()

    async def growing(*_: Any, **__: Any) -> Any:
        for length in range(1, 101):
            sample = SimpleNamespace(index=0, token_ids=[*range(length)], text="x" * length, finish_reason=None)
            yield SimpleNamespace(outputs=[sample], finished=length == 100)
            await asyncio.sleep(0)
        ended.set()

    cluster.generate = growing
    async with engine_of(cluster) as engine, opened(engine) as model:
        chunks = []
        async for chunk in model.stream([1, 2], {"max_tokens": 100}):
            chunks.append(chunk)
            async with asyncio.timeout(10):
                await ended.wait()
    assert len(chunks) == 2
    assert [token for chunk in chunks for token in chunk.token_ids] == [*range(100)]
    assert "".join(chunk.text for chunk in chunks) == "x" * 100
    assert [chunk.finished for chunk in chunks] == [False, True]
