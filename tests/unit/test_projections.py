"""Projections in the worker: those of the rows themselves, whatever the scheduler does, beside requests of every kind."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from workers import CUDA, DEVICE, KINDS, batch, device_of, known_schemas, rows_of, some_runtime, tap

from steercap import Add, CaptureSpec, SteeringSpec
from steercap.config import Settings
from steercap.core.messages import (
    Attach,
    Call,
    CapturedRows,
    Collect,
    Configure,
    Configured,
    GetStats,
    Owner,
    Placed,
    Vectors,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, InSlot, Plan
from steercap.core.program import Blob, Configuration, SteeringPlan, blob_digest
from steercap.core.rows import rows_selected
from steercap.core.schema import LINE_BYTES, RAW, Coding
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.engine.configurations import Configurations
from steercap.errors import InvalidSpec, InvalidVector
from steercap.kernels.triton_rp import LARGE, launch_project
from steercap.steering import DirectionSet, LayerVectors
from steercap.steering.edits.inputs import alike
from steercap.steering.lowering import Lowered, compile_projection, lower, points_of, scopes_of

POINTS, LIMIT = 3, 40
ARMED = {Point(layer, "resid_post"): layer for layer in range(POINTS)}
SCHEMAS = known_schemas(ARMED, 8, POINTS)


class Worker:
    """A runtime that holds two sets of directions and one edit."""

    def __init__(self, kind: str, width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.kind, self.width, self.dtype = kind, width, dtype
        self.rng = np.random.default_rng(seed)
        lines = POINTS * -(-width * dtype.itemsize // LINE_BYTES) + 1  # of whole rows, and of what is stored of them
        self.runtime = some_runtime(kind, POINTS, width, dtype, tokens=256, device_ring_bytes=256 * lines * LINE_BYTES)
        self.ask(Attach(20 << 20))
        self.edit = torch.arange(width).float() % 7 - 3
        self.steered = lower(
            SteeringSpec([Add(self.edit, layer=0)]), armed=ARMED, schemas=known_schemas(ARMED, width, POINTS), num_layers=POINTS,
            edits_per_point=8,
        )  # fmt: skip
        self.sets = [((0, 1, 2), self._vectors(3, 2)), ((1,), self._vectors(1, 5))]
        self.configurations = [self._configuration(*one) for one in self.sets]
        place = 1
        self.put(self.steered.configuration, self.steered.vectors, 0, 0)
        for slot, (configuration, (_, vectors)) in enumerate(zip(self.configurations, self.sets, strict=True), 1):
            data = vectors.numpy().tobytes()
            self.put(configuration, {configuration.blobs[0].digest: data}, slot, place)
            place += configuration.rows

    def put(self, configuration: Configuration, data, slot: int, place: int) -> None:
        (blob,) = configuration.blobs
        places = tuple(range(place, place + blob.rows))
        frame = Configure((Vectors(blob.digest, places, data[blob.digest]),), (Placed(slot, configuration, (places,)),))
        assert self.ask(frame) == Configured(())

    def _vectors(self, points: int, directions: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal((points, directions, self.width))).float()

    def _configuration(self, points: tuple[int, ...], vectors: torch.Tensor) -> Configuration:
        digest = blob_digest(vectors.numpy().tobytes(), vectors.shape[0] * vectors.shape[1])
        return Configuration((), (Blob(digest, vectors.shape[0] * vectors.shape[1]),), 0, 0, points)

    def ask(self, question, released: tuple[Owner, ...] = ()):
        return decode_answer(self.runtime.answer(encode(Call(released, question))))

    def step(self, parts: list[tuple[Request, int, int]]) -> None:
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in parts])
        names = [request.key for request, *_ in parts]
        starts, counts = [start for _, start, _ in parts], [count for *_, count in parts]
        self.runtime.begin_step(batch(self.kind, names, starts, counts, positions + 7, positions))
        for point in range(POINTS):
            rows = torch.cat([request.rows[point, start : start + count] for request, start, count in parts])
            tap(self.runtime, rows.clone().to(device_of(self.kind)), None, point)
        self.runtime.end_step()

    def collected(self, request: Request) -> tuple[CapturedRows, torch.Tensor | None]:
        (captured_rows,) = self.ask(Collect((Wanted(Owner(request.key, 0), request.total),))).shares
        if captured_rows.failure:
            return captured_rows, None
        return captured_rows, torch.stack(rows_of(self.runtime, captured_rows))


class Request:
    """One request as the scheduler sees it: whole rows of it (set None), or what they are along directions."""

    def __init__(self, worker: Worker, number: int, given: int | None) -> None:
        rng = worker.rng
        self.key, self.set = f"r{number}", given
        self.prompt = int(rng.integers(1, 12))
        self.total = int(rng.integers(self.prompt, LIMIT))
        self.ranges = [(Range(0, None),), (Range(self.total // 2, None),), (Range(0, None, 3),)][int(rng.integers(3))]
        self.before = bool(rng.random() < 0.4)
        self.steered = bool(rng.random() < 0.5)
        self.done = 0
        # Whole numbers, which every dtype holds.
        self.rows = torch.from_numpy(rng.integers(-20, 20, (POINTS, LIMIT, worker.width))).to(worker.dtype)
        points = (0, 2) if given is None else worker.sets[given][0]
        vectors, coding = None, RAW
        if given is not None:
            configuration = worker.configurations[given]
            directions = configuration.rows // len(points)
            vectors, coding = InSlot(given + 1, configuration.digest), Coding("projected", directions)
        capture = CapturePlan(points, self.ranges, None, coding, before_edits=self.before, vectors=vectors)
        steering = None
        if self.steered:
            scopes, replaced = scopes_of(worker.steered, self.prompt, LIMIT)
            steering = SteeringPlan(0, worker.steered.configuration.digest, b"", scopes, replaced)
        plan = Plan(self.key, self.prompt, LIMIT, capture=capture, steering=steering)
        worker.runtime.register(self.key, plan.encode(), 0)

    def expected(self, worker: Worker) -> torch.Tensor:
        rows = self.rows.clone()
        if self.steered and not self.before:
            rows[0] = (rows[0].float() + worker.edit).to(worker.dtype)
        rows = rows[:, rows_selected(self.ranges, LIMIT, self.total)]
        if self.set is None:
            return rows[[0, 2]]
        points, vectors = worker.sets[self.set]
        return torch.einsum("prw,pkw->prk", rows[list(points)].double(), vectors.double()).float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("width", "dtype"), [(8, torch.float32), pytest.param(48, torch.bfloat16, marks=pytest.mark.extended)]
)
@pytest.mark.slow
def test_projections_are_those_of_the_rows(kind, width, dtype) -> None:
    """Chunks, preemption, edits before and after, several sets of directions and whole rows in the same passes."""
    worker = Worker(kind, width, dtype)
    rng, running, finished = worker.rng, [], {None: 0, 0: 0, 1: 0}
    number = 0
    for _ in range(160 if kind == "host" or CUDA else 24):
        while len(running) < 5:
            running.append(Request(worker, number, [None, 0, 1][number % 3]))
            number += 1
        parts = []
        for request in running:
            if rng.random() < 0.05:
                request.done = 0  # preempted: all is computed again
            count = int(rng.integers(1, request.total - request.done + 1))
            parts.append((request, request.done, count))
            request.done += count
        worker.step(parts)
        for request in [one for one in running if one.done == one.total]:
            running.remove(request)
            captured_rows, rows = worker.collected(request)
            assert captured_rows.failure is None
            selected = rows_selected(request.ranges, LIMIT, request.total)
            assert np.frombuffer(captured_rows.positions, dtype=np.int64).tolist() == selected.tolist()
            assert rows.dtype == (dtype if request.set is None else torch.float32)
            # Up to 48 products of 20 or so, summed in float32.
            torch.testing.assert_close(rows, request.expected(worker), rtol=1e-5, atol=1e-4)
            worker.runtime.end_requests([request.key])
            worker.ask(GetStats(), released=(Owner(request.key, 0),))
            finished[request.set] += 1
    assert min(finished.values()) > (3 if kind == "host" or CUDA else 1)
    worker.runtime.end_requests([request.key for request in running])
    worker.ask(GetStats(), released=tuple(Owner(request.key, 0) for request in running))
    assert worker.ask(GetStats()).pages_in_use == 0


@pytest.mark.parametrize("records", [3, LARGE + 3])
def test_a_large_pass_takes_several_records_a_program(records) -> None:
    """The last program's records end before its last place; every result is where its line is, and nothing beside it."""
    points, directions, width, line = 2, 3, 24, LINE_BYTES // 4
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randn(records * (2 * points + 1), line, generator=drawn)  # a row takes two lines, its numbers one
    bank = torch.randn(9, width + 5, generator=drawn)[:, 5:]  # a view of wider rows
    places = torch.tensor([[1, 8, 3], [4, 0, 2]])
    order = torch.randperm(records, generator=drawn)
    table = torch.stack([2 * order * points, 2 * records * points + order.flip(0)], dim=1)
    at = torch.tensor([[0, 4], [2, 4 + 4 * directions]])  # the first number of a record stays what it is
    expected = rows.clone()
    for source, target in table.tolist():
        own = rows[source : source + 2 * points].view(points, -1)[:, :width]
        along = torch.einsum("pw,pkw->pk", own, bank[places])
        expected[target, 1 : 1 + points * directions] = along.flatten()
    found = rows.to(DEVICE)
    launch_project(
        found, found, table.to(DEVICE), at.to(DEVICE), width, bank.to(DEVICE), places.to(DEVICE)
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_directions_in_use_are_not_displaced(kind) -> None:
    """A slot, and bank rows, of a request that runs stay what they are; afterwards they may go."""
    worker = Worker(kind)
    request = Request(worker, 0, 0)
    worker.step([(request, 0, 1)])
    data = torch.ones(5, worker.width).numpy().tobytes()
    blob = Blob(blob_digest(data, 5), 5)
    taken = Configuration((), (blob,), 0, 0, (1,))
    frame = Configure((Vectors(blob.digest, (20, 21, 22, 23, 24), data),), (Placed(1, taken, ((20, 21, 22, 23, 24),)),))
    assert worker.ask(frame) == Configured((taken.digest,))
    overwritten = Configure((Vectors(blob.digest, (1, 2, 3, 4, 5), data),), (Placed(3, taken, ((1, 2, 3, 4, 5),)),))
    assert worker.ask(overwritten) == Configured((taken.digest,))
    worker.step([(request, 1, request.total - 1)])
    _, rows = worker.collected(request)
    torch.testing.assert_close(rows, request.expected(worker), rtol=1e-5, atol=1e-4)
    worker.runtime.end_requests([request.key])
    assert worker.ask(frame) == Configured(())


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_without_the_directions_is_an_error(kind) -> None:
    """A request whose directions are not there gets no numbers of others."""
    worker = Worker(kind)
    request = Request(worker, 0, 0)
    worker.runtime.end_requests([request.key])
    worker.ask(GetStats(), released=(Owner(request.key, 0),))
    worker.configurations[0] = worker._configuration((0, 1, 2), torch.ones(3, 2, worker.width))
    request = Request(worker, 1, 0)
    worker.step([(request, 0, request.total)])
    captured_rows, rows = worker.collected(request)
    assert rows is None
    assert "does not hold the vectors" in captured_rows.failure


def directions(layers: tuple[int, ...] = (0, 2), width: int = 8, names: tuple[str, ...] = ("a", "b")) -> DirectionSet:
    return DirectionSet(
        {
            name: LayerVectors(
                {layer: torch.randn(width, generator=torch.Generator().manual_seed(at)) for layer in layers}
            )
            for at, name in enumerate(names)
        }
    )


def test_a_projection_is_checked_before_anything_runs() -> None:
    """Reductions, other sites, layers without directions, other widths and things that are no directions."""
    with pytest.raises(InvalidSpec, match="project= gives"):
        CaptureSpec(project=directions(), reduce="mean")
    spec = CaptureSpec(project=directions())
    assert points_of(spec, 3) == (Point(0, "resid_post"), Point(2, "resid_post"))
    with pytest.raises(InvalidSpec, match=r"layers \[1\].*\[0, 2\]"):
        points_of(CaptureSpec(project=directions(), layers=[0, 1]), 3)
    with pytest.raises(InvalidSpec, match="leave sites= out"):
        points_of(CaptureSpec(project=directions(), sites="mlp_out"), 3)
    with pytest.raises(InvalidSpec, match="give a DirectionSet"):
        points_of(CaptureSpec(project=torch.ones(8)), 3)
    with pytest.raises(InvalidVector, match="width 6"):
        compile_projection(CaptureSpec(project=directions(width=6)), ARMED, SCHEMAS, num_layers=3)


def test_equal_directions_share_a_slot_and_their_length_does_not_count() -> None:
    """What is projected on are unit vectors: twice a direction is the same configuration, another layer is not."""

    def digest(given: DirectionSet, **asked) -> bytes:
        return compile_projection(CaptureSpec(project=given, **asked), ARMED, SCHEMAS, num_layers=3).lowered.digest

    one = directions()
    assert digest(one) == digest(DirectionSet({name: 4 * vectors for name, vectors in one.items()}))
    assert digest(one) != digest(one, layers=[0])
    assert digest(one) != digest(one.select(["b", "a"]))


async def test_two_slots_are_taken_together_or_not_at_all() -> None:
    """Requests that need two each, of an engine with two: who held one and waited for another would wait for ever."""

    async def ask(_question: Configure) -> list[Configured]:
        await asyncio.sleep(0)
        return [Configured(())]

    owner = Configurations(2, 16, Settings(), ask)
    done = []

    def lowered(seed: int) -> Lowered:
        return compile_projection(
            CaptureSpec(project=directions(names=(f"{seed}",)) if seed else directions()), ARMED, SCHEMAS, num_layers=3
        ).lowered

    edits = [
        lower(
            SteeringSpec([Add(torch.ones(8) * seed, layer=0)]),
            armed=ARMED,
            schemas=SCHEMAS,
            num_layers=3,
            edits_per_point=8,
        )
        for seed in range(1, 9)
    ]

    async def hold(number: int) -> None:
        async with owner.holding(edits[number], lowered(0)) as grants:
            assert len({grant.slot for grant in grants}) == 2
            done.append(number)
            await asyncio.sleep(0)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(hold(number))
    assert done == list(range(8))
    assert owner.slots.slots_in_use == 0


def test_a_compiled_projection_knows_its_directions_layer_by_layer() -> None:
    """What a handle will be known by is what the set says of itself, whatever of its layers is asked."""
    given = directions()
    found = compile_projection(CaptureSpec(project=given), ARMED, SCHEMAS, num_layers=3)
    assert set(found.marks) == {point.layer for point in found.points}
    assert found.names == tuple(given)
    for layer, marks in found.marks.items():
        assert all(alike(mine, theirs) for mine, theirs in zip(marks, given.marks(layer), strict=True))
        assert len(marks) == len(given)
