"""Any order of events, without a model: the real queue before the slots, two real worker ranks, and between them an engine
that takes its messages in order, as vLLM's does. Every value of every token on both ranks is compared with what its own
spec demands.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from workers import CUDA, batch, device_of, known_schemas, some_runtime, tap

from steercap import Add, Replace, SteeringSpec
from steercap.config import Settings
from steercap.core.messages import (
    Attach,
    Call,
    Configure,
    Failed,
    GetStats,
    GetSteeringRecord,
    Owner,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import Plan
from steercap.core.program import SteeringPlan, identity
from steercap.core.receipt import check_edits
from steercap.core.spec import Point
from steercap.core.tokens import selected
from steercap.engine.configurations import Configurations
from steercap.engine.workers import Batcher
from steercap.steering.lowering import lower, scopes_of

WIDTH, POINTS, SLOTS, ROWS, AT_ONCE = 4, 3, 3, 6, 4
ARMED = {Point(layer, "resid_post"): layer for layer in range(POINTS)}
SCHEMAS = known_schemas(ARMED, WIDTH, POINTS)
CLEAN = (0.0,) * POINTS


def some_spec(seed: int) -> SteeringSpec:
    """Edits whose effects on rows of zeros are small whole numbers; few seeds share few vectors."""
    rng = random.Random(seed)
    edits: list[Any] = [
        Add(
            torch.full((WIDTH,), float(2 ** rng.randrange(9))),
            float(rng.choice([1, 3])),
            layers=rng.sample(range(POINTS), rng.randint(1, POINTS)),
            tokens=rng.choice(["all", "prompt", "generated", slice(2, None)]),
        )
        for _ in range(rng.randint(1, 3))
    ]
    if rng.random() < 0.3:
        edits.append(Replace(torch.full((2, WIDTH), 1000.0 * seed), [1, 3], layer=0))
    return SteeringSpec(edits)


class Request:
    """A sequence of `total` inputs that the client ends after `kept`."""

    def __init__(self, key: str, prompt_len: int, total: int, kept: int, spec: SteeringSpec | None) -> None:
        self.key, self.prompt_len, self.total, self.kept, self.spec = key, prompt_len, total, kept, spec
        self.plan = Plan(key, prompt_len, total)
        self.salt: bytes | None = None
        self.at = 0
        self.registered = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def demanded(self, position: int) -> tuple[float, ...]:
        """What the row of a position must be at each point."""
        rows = list(CLEAN)
        for edit in self.spec.edits if self.spec else ():
            if selected(edit.selection.ranges(self.prompt_len, self.total), self.total)[position]:
                for point in edit.points(POINTS):
                    replaced = isinstance(edit, Replace)
                    change = float(edit.rows[0, 0]) if replaced else edit.scale * float(edit.vector[0])
                    rows[ARMED[point]] = change if replaced else rows[ARMED[point]] + change
        return tuple(rows)


class FifoEngine:
    """Takes messages in order between passes; chunks, preempts, reads its prefix cache, and runs on past a client's end."""

    def __init__(self, rng: random.Random, kind: str) -> None:
        self.rng = rng
        self.kind = kind
        self.ranks = [
            some_runtime(kind, POINTS, WIDTH, captures=rank == 0, shard=rank, slots=SLOTS, bank_rows=ROWS)
            for rank in range(2)
        ]
        for rank in self.ranks:
            rank.answer(encode(Call((), Attach(1 << 20))))
        self.inbox: deque[tuple[Any, ...]] = deque()
        self.wake = asyncio.Event()
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.finished: set[str] = set()
        self.cache: dict[tuple[bytes, int], tuple[float, ...]] = {}
        self.compared = self.cached = self.preempted = self.passes = 0
        self.later: list[tuple[int, tuple[Any, ...]]] = []

    def post(self, *message: Any) -> None:
        self.inbox.append(message)
        self.wake.set()

    def post_later(self, passes: int, *message: Any) -> None:
        """A message that arrives some passes later, however long these take."""
        self.later.append((self.passes + passes, message))
        self.wake.set()

    async def rpc(self, call: Call) -> list[Any]:
        answer: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self.post("rpc", encode(call), answer)
        answers = [decode_answer(frame) for frame in await answer]
        assert not any(isinstance(one, Failed) for one in answers), answers
        return answers

    async def run(self) -> None:
        while True:
            self.passes += 1
            self.inbox += [message for due, message in self.later if due <= self.passes]
            self.later = [(due, message) for due, message in self.later if due > self.passes]
            if not (self.inbox or self.waiting or self.running or self.finished or self.later):
                self.wake.clear()
                await self.wake.wait()
            await asyncio.sleep(0)
            while self.inbox:
                self.take(*self.inbox.popleft())
            for rank in self.ranks:
                rank.end_requests(list(self.finished))
            self.finished.clear()
            self.schedule()
            if self.running:
                self.forward([(request, self.chunk(request)) for request in self.running.values()])

    def take(self, kind: str, subject: Any, answer: Any = None) -> None:
        if kind == "add":
            self.waiting[subject.key] = subject
        elif kind == "abort":
            if self.waiting.pop(subject, None) or self.running.pop(subject, None):
                self.finished.add(subject)
        elif not answer.done():
            answer.set_result([rank.answer(subject) for rank in self.ranks])

    def schedule(self) -> None:
        if len(self.running) > 1 and self.rng.random() < 0.1:
            victim = self.running.pop(self.rng.choice(list(self.running)))
            victim.at = 0
            self.waiting[victim.key] = victim
            self.preempted += 1
        for key in list(self.waiting)[: AT_ONCE - len(self.running)]:
            request = self.running[key] = self.waiting.pop(key)
            while request.salt and request.at < request.prompt_len - 1 and (request.salt, request.at) in self.cache:
                request.at += 1
                self.cached += 1
            if request.plan.steering and not request.registered:
                request.registered = True
                for rank in self.ranks:
                    rank.register(key, request.plan.encode(), 0)

    def chunk(self, request: Request) -> int:
        left = request.total - request.at
        return min(left, self.rng.randint(1, 5)) if request.at < request.prompt_len else 1

    def forward(self, parts: Sequence[tuple[Request, int]]) -> None:
        positions = np.concatenate([np.arange(request.at, request.at + count) for request, count in parts])
        starts, counts = np.array([request.at for request, _ in parts]), np.array([count for _, count in parts])
        passes = []
        for rank in self.ranks:
            names = [request.key for request, _ in parts]
            rank.begin_step(batch(self.kind, names, starts, counts, positions, positions))
            hidden = [torch.zeros(len(positions), WIDTH, device=device_of(self.kind)) for _ in range(POINTS)]
            for point in range(POINTS):
                tap(rank, hidden[point], None, point)
            rank.end_step()
            passes.append(torch.stack(hidden)[:, :, 0].T.tolist())
        owners = [request for request, count in parts for _ in range(count)]
        for place, (request, position) in enumerate(zip(owners, positions.tolist(), strict=True)):
            demanded = request.demanded(position)
            assert all(tuple(one[place]) == demanded for one in passes), (request.key, position)
            if request.salt:
                assert self.cache.setdefault((request.salt, position), demanded) == demanded
            self.compared += 1
        for request, count in parts:
            request.at += count
            if request.at >= request.kept and not request.done.done():
                request.done.set_result(None)
            if request.at >= request.total:
                self.finished.add(self.running.pop(request.key).key)


class Client:
    """What `job` does around a request, over the real queue and the real comparison of receipts."""

    def __init__(self, engine: FifoEngine) -> None:
        self.engine = engine
        self.configurations = Configurations(SLOTS, ROWS, Settings(), self.configure)
        self.settling: Batcher[Wanted, list[Any]] = Batcher(self.settle)
        self.released: list[Owner] = []
        self.refused = self.settled = 0

    async def configure(self, question: Configure) -> list[Any]:
        released, self.released = self.released, []
        answers = await self.engine.rpc(Call(tuple(released), question))
        self.refused += any(answer.refused for answer in answers)
        return answers

    async def settle(self, wanted: Sequence[Wanted]) -> list[list[Any]]:
        answers = await self.engine.rpc(Call((), GetSteeringRecord(tuple(wanted), (True,) * len(wanted))))
        return [[answer.records[place] for answer in answers] for place in range(len(wanted))]

    @asynccontextmanager
    async def added(self, request: Request) -> Any:
        """The request is in the engine; it is aborted when the client leaves, at once or, past its end, a little later."""
        self.engine.post("add", request)
        try:
            await request.done
        except BaseException:
            self.engine.post("abort", request.key)
            raise
        yield
        self.engine.post_later(self.engine.rng.randrange(40), "abort", request.key)

    async def ask(self, request: Request) -> None:
        if request.spec is None:
            async with self.added(request):
                return
        ready = lower(request.spec, armed=ARMED, schemas=SCHEMAS, num_layers=POINTS, edits_per_point=8)
        scopes, replaced = scopes_of(ready, request.prompt_len, request.total)
        settled = False
        try:
            async with self.configurations.holding(ready) as (grant,):
                name = identity(grant.digest, scopes, replaced, self.configurations.epoch)
                request.salt = name if ready.changes_kv else None
                steering = SteeringPlan(grant.slot, grant.digest, name, scopes, replaced)
                request.plan = Plan(request.key, request.prompt_len, request.total, steering=steering)
                async with self.added(request):
                    records = await self.settling.ask(Wanted(Owner(request.key, 0), request.kept))
                    check_edits(request.key, request.plan, ready.configuration, request.kept, [records])
            settled = True
            self.settled += 1
        finally:
            if not settled:
                self.released.append(Owner(request.key, 0))


@pytest.mark.parametrize(
    ("kind", "seed", "requests"),
    [
        ("host", 0, 150),
        *(pytest.param("host", seed, 150, marks=pytest.mark.extended) for seed in range(1, 4)),
        *(("cuda", seed, 150 if CUDA else 12) for seed in range(4 if CUDA else 1)),
    ],
)
@pytest.mark.slow
async def test_every_row_is_that_of_its_own_spec_whatever_happens(kind, seed, requests) -> None:
    """Requests of 14 specs for 3 slots and 6 vectors, arriving, cancelled, preempted, cached and aborted late at random:
    no row of another spec, no receipt refused, and nothing left behind.
    """
    rng = random.Random(seed)
    engine = FifoEngine(rng, kind)
    client = Client(engine)
    running = asyncio.create_task(engine.run())
    tasks = []
    for number in range(requests):
        prompt_len = rng.randint(4, 10)
        total = prompt_len + rng.randint(1, 40)  # the client leaves long before, the engine goes on
        spec = None if rng.random() < 0.15 else some_spec(rng.randrange(14))
        kept = rng.randint(prompt_len, min(total, prompt_len + 8))
        request = Request(f"r{number}", prompt_len, total, kept, spec)
        tasks.append(asyncio.create_task(client.ask(request)))
        if rng.random() < 0.3:
            asyncio.get_running_loop().call_later(rng.random() * 0.01, tasks[-1].cancel)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.004)
    async with asyncio.timeout(300):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    if running.done():
        running.result()
    assert not [end for end in ended if isinstance(end, Exception)]
    assert client.settled > 0.4 * requests
    assert min(engine.compared, engine.cached, engine.preempted) > 0
    assert client.refused or requests < 150
    while engine.later or engine.running or engine.waiting:  # the last late aborts
        await asyncio.sleep(0)
    await engine.rpc(Call(tuple(client.released), GetStats()))
    assert all(rank._steering.held == 0 and not list(rank._request_table) for rank in engine.ranks)
    slots = client.configurations.slots
    assert (slots.slots_in_use, slots.rows_in_use, client.configurations.waiting) == (0, 0, 0)
    running.cancel()
