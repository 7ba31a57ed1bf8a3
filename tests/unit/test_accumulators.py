"""Reductions that run along with their requests: the same as over all rows, whatever the scheduler does in between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from workers import CUDA, KINDS, batch, device_of, known_schemas, rows_of, some_runtime, tap

from steercap import Add, SteeringSpec
from steercap.core.messages import (
    Attach,
    Call,
    CapturedRows,
    Collect,
    Configure,
    Configured,
    Failed,
    GetStats,
    Owner,
    Placed,
    Vectors,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import SteeringPlan
from steercap.core.rows import rows_selected
from steercap.core.schema import LINE_BYTES, RAW
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.kernels.bits import SUM
from steercap.kernels.codecs.floats import Reduced
from steercap.kernels.triton_accumulate import launch_accumulate
from steercap.steering.lowering import lower, scopes_of
from steercap.worker.reduce import Accumulator
from steercap.worker.taps import cuda

POINTS, ACCUMULATORS, LIMIT = 3, 4, 40
#: Elements of a row of which a page holds thousands, and of which it holds two records of all points.
NARROW, WIDE = 8, 16_384
REDUCTIONS = ("mean", "sum", "max", "last")


class Request:
    """One request as vLLM's scheduler sees it, and the rows of its sequence."""

    def __init__(self, rng: np.random.Generator, number: int, width: int = NARROW) -> None:
        self.key = f"r{number}"
        self.prompt = int(rng.integers(1, 20))
        self.total = int(rng.integers(self.prompt, LIMIT - 4))  # inputs of the finished sequence
        self.points = tuple(np.flatnonzero(rng.random(POINTS) < 0.7).tolist()) or (1,)
        start = int(rng.integers(0, self.total))
        self.ranges = [
            (Range(0, None),), (Range(start, None),), (Range(0, self.prompt),), (Range(self.prompt, None),),
            (Range(start, None, 3),), (Range(0, 2), Range(start, start + 4)),
        ][int(rng.integers(6))]  # fmt: skip
        self.reduce = REDUCTIONS[int(rng.integers(4))]
        self.before_edits = bool(rng.random() < 0.3)
        self.done = 0  # positions computed, drafts that were refused not counted
        self.known = self.prompt  # tokens that are known
        self.rows = torch.from_numpy(rng.integers(-50, 50, (POINTS, LIMIT, width))).float()
        self.steered = bool(rng.random() < 0.5)

    def expected(self, vector: torch.Tensor) -> torch.Tensor:
        rows = self.rows.clone()
        if self.steered and not self.before_edits:
            rows[0] += vector
        rows = rows[list(self.points)][:, rows_selected(self.ranges, LIMIT, self.total)]
        accumulator = Accumulator(self.reduce)
        accumulator.add(rows.transpose(0, 1))
        return accumulator.result()


class Engine:
    """A worker that is driven at random: chunks, drafts, preemption, passes beyond the end."""

    def __init__(self, kind: str, seed: int, drafts: int, late: int, width: int = NARROW) -> None:
        self.kind, self.drafts, self.late, self.width = kind, drafts, late, width
        self.rng = np.random.default_rng(seed)
        self.runtime = some_runtime(
            kind, POINTS, width, tokens=256, device_ring_bytes=256 * POINTS * max(width * 4, LINE_BYTES),
            accumulators=ACCUMULATORS, lag=late + drafts, held=max(late + drafts, 1),
        )  # fmt: skip
        self.ask(Attach(20 << 20))
        self.number = 0
        self.vector = torch.arange(width).float() % 7 - 3
        armed = {Point(layer, "resid_post"): layer for layer in range(POINTS)}
        spec = SteeringSpec([Add(self.vector, layer=0)])
        self.ready = lower(
            spec, armed=armed, schemas=known_schemas(armed, width, POINTS), num_layers=POINTS, edits_per_point=8
        )
        (blob,) = self.ready.configuration.blobs
        vectors = (Vectors(blob.digest, (0,), self.ready.vectors[blob.digest]),)
        assert self.ask(Configure(vectors, (Placed(0, self.ready.configuration, ((0,),)),))) == Configured(())

    def ask(self, question, released: tuple[Owner, ...] = ()):
        return decode_answer(self.runtime.answer(encode(Call(released, question))))

    def new(self) -> Request:
        request = Request(self.rng, self.number, self.width)
        self.number += 1
        steering = None
        if request.steered:  # more tokens than are reduced
            scopes, replaced = scopes_of(self.ready, request.prompt, LIMIT)
            steering = SteeringPlan(0, self.ready.configuration.digest, b"", scopes, replaced)
        capture = CapturePlan(
            request.points, request.ranges, request.reduce, RAW, before_edits=request.before_edits, accumulates=True
        )
        plan = Plan(request.key, request.prompt, LIMIT, capture=capture, steering=steering)
        self.runtime.register(request.key, plan.encode(), 0)
        return request

    def step(self, parts: list[tuple[Request, int, int]]) -> None:
        starts, counts = [start for _, start, _ in parts], [count for _, _, count in parts]
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in parts])
        names = [request.key for request, _, _ in parts]
        self.runtime.begin_step(batch(self.kind, names, starts, counts, positions + 7, positions))
        for point in range(POINTS):
            rows = torch.full((len(positions), self.width), 1e6)  # of what turns out not to be of the sequence
            at = 0
            for request, start, count in parts:
                right = min(request.done, request.total) - start
                if right > 0:
                    rows[at : at + min(right, count)] = request.rows[point, start : start + min(right, count)]
                at += count
            tap(self.runtime, rows.clone().to(device_of(self.kind)), None, point)
        self.runtime.end_step()

    def next_part(self, request: Request) -> tuple[Request, int, int]:
        """What is scheduled of a request that runs."""
        if self.rng.random() < 0.05:
            request.done = 0  # preempted
        start, known = request.done, request.known
        if start < known - 1 or known == request.prompt:  # a prompt, or all that was known before a preemption
            count = right = int(self.rng.integers(1, known - start + 1))
        else:
            count = 1 + int(self.rng.integers(0, self.drafts + 1))
            right = int(self.rng.integers(1, count + 1))  # how many of the drafts are
        request.done += right
        request.known = max(known, request.done + 1) if request.done >= request.prompt else known
        return request, start, count

    def check(self, request: Request) -> None:
        (captured_rows,) = self.ask(Collect((Wanted(Owner(request.key, 0), request.total),))).shares
        assert isinstance(captured_rows, CapturedRows)
        assert captured_rows.failure is None
        selected = rows_selected(request.ranges, LIMIT, request.total)
        assert np.frombuffer(captured_rows.positions, dtype=np.int64).tolist() == selected.tolist()
        assert (np.frombuffer(captured_rows.token_ids, dtype=np.int64) == selected + 7).all()
        assert captured_rows.stored_rows == min(len(selected), 1)
        if len(selected):
            found = torch.cat(rows_of(self.runtime, captured_rows))
            torch.testing.assert_close(found, request.expected(self.vector), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("drafts", "late"), [(0, 0), (0, 1), (3, 0)])
@pytest.mark.parametrize(
    ("seed", "width"), [(0, NARROW), (1, NARROW), pytest.param(2, WIDE, marks=pytest.mark.extended)]
)
@pytest.mark.slow
def test_an_accumulator_is_the_reduction_of_the_rows_of_its_sequence(kind, drafts, late, seed, width) -> None:
    """Random requests in random passes; some end a pass before the scheduler knows, some lose their drafts."""
    engine = Engine(kind, seed, drafts, late, width)
    running: list[Request] = []
    ended: list[Request] = []
    finished = spilled = 0
    interpreted = kind == "cuda" and not CUDA
    for _ in range(24 if interpreted else 250):
        while len(running) < ACCUMULATORS and engine.rng.random() < 0.7:
            running.append(engine.new())
        parts = [engine.next_part(request) for request in running if engine.rng.random() < 0.9]
        if parts:
            engine.step(parts)
        for request in [one for one in running if one.done >= one.total]:
            if late and engine.rng.random() < 0.5:  # what was launched before the end was known
                engine.step([(request, request.done, 1)])
            running.remove(request)
            if engine.rng.random() < 0.7:
                engine.runtime.end_requests([request.key])
                if engine.rng.random() < 0.5:  # whose end the client has not heard of yet
                    ended.append(request)
                    continue
            engine.check(request)
            engine.check(request)
            engine.runtime.end_requests([request.key])
            engine.ask(GetStats(), released=(Owner(request.key, 0),))
            finished += 1
        while len(ended) > 3:
            request = ended.pop(0)
            spilled += engine.runtime._kept[Owner(request.key, 0)].capture_buffer._spilled is not None
            engine.check(request)
            engine.check(request)
            engine.ask(GetStats(), released=(Owner(request.key, 0),))
            finished += 1
    assert interpreted or spilled > 0
    assert finished > (1 if interpreted else 15)
    running += ended
    for request in running:
        engine.runtime.end_requests([request.key])
    engine.ask(GetStats(), released=tuple(Owner(request.key, 0) for request in running))
    stats = engine.ask(GetStats())
    assert (stats.pages_in_use, stats.requests, engine.runtime.taps.accumulators.in_use) == (0, 0, 0)


def add_up(sums: torch.Tensor, rows: torch.Tensor, *, fresh: bool) -> None:
    """Add rows of 16 elements, a line each, to the one accumulator of the one point."""
    # place, kind, whether it begins, layout, lines of a record, first line, rows, divisor; none is added, none holds
    update = torch.tensor([[0, SUM, fresh, 0, 1, 0, len(rows), 1, -1, -1]], dtype=torch.int32, device=rows.device)
    nothing = torch.zeros((1, 3), dtype=torch.int32, device=rows.device)
    launch_accumulate(update, nothing, 16, nothing[:, :1].contiguous(), sums, sums.new_zeros(1, 1, 16), rows)


@pytest.mark.slow
def test_a_long_sum_keeps_its_digits() -> None:
    """Four passes of 6,000 rows of one sign: added one by one in float32, 2e-5 of the sum would be wrong."""
    rows = (torch.arange(24_000, dtype=torch.float32) + 1000).view(4, -1, 1).expand(-1, -1, 16).contiguous()
    sums = torch.full((1, 16), 7.0)
    device = torch.device("cuda" if CUDA else "cpu")
    found = sums.to(device)
    for number, part in enumerate(rows):
        add_up(found, part.to(device), fresh=number == 0)
    torch.testing.assert_close(found[0, 0].cpu().double(), rows[..., 0].double().sum(), rtol=2e-7, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by numpy, in the interpreter
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_what_it_is(value) -> None:
    """A row that overflowed makes its element of a sum infinite, and no other."""
    rows = torch.ones(40, 16)
    rows[3, 5] = value
    device = torch.device("cuda" if CUDA else "cpu")
    found = torch.zeros(1, 16, device=device)
    add_up(found, rows.to(device), fresh=True)
    torch.testing.assert_close(found[0].cpu(), rows.sum(0), equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_one_owner_twice_is_finished_once(kind) -> None:
    """A mean is divided once, however often one call asks for it; another end than the first is not answered."""
    engine = Engine(kind, 0, 0, 0)
    request = Request(engine.rng, 0)
    request.key, request.done, request.total = "r", 4, 4
    capture = CapturePlan((0,), (Range(0, None),), "mean", RAW, accumulates=True)
    engine.runtime.register("r", Plan("r", 4, LIMIT, capture=capture).encode(), 0)
    engine.step([(request, 0, 4)])
    wanted = Wanted(Owner("r", 0), 4)
    for captured_rows in engine.ask(Collect((wanted, wanted))).shares:
        (rows,) = rows_of(engine.runtime, captured_rows)
        torch.testing.assert_close(rows[0], request.rows[0, :4].mean(0))
    engine.step([(request, 4, 1)])
    (captured_rows,) = engine.ask(Collect((Wanted(Owner("r", 0), 5),))).shares
    assert len(np.frombuffer(captured_rows.positions, dtype=np.int64)) == 4  # which the client compares with 5


@pytest.mark.parametrize("kind", KINDS)
def test_reductions_that_are_interrupted_are_not_finished_twice(kind, monkeypatch) -> None:
    """Their held rows may be in the sums by then; all that one call finishes fail, and a reduction after them is right."""
    engine = Engine(kind, 0, 0, 1)
    requests = {name: Request(engine.rng, 0) for name in "abc"}
    for name, request in requests.items():
        request.key, request.done, request.total = name, 6, 6
        capture = CapturePlan((0,), (Range(0, None),), "sum", RAW, accumulates=True)
        engine.runtime.register(name, Plan(name, 4, LIMIT, capture=capture).encode(), 0)
    for start, count in ((0, 4), (4, 1), (5, 1)):
        engine.step([(request, start, count) for request in requests.values()])
    wanted = {name: Wanted(Owner(name, 0), 6) for name in requests}

    def interrupted(_event) -> None:
        raise MemoryError("none for a moment")

    with monkeypatch.context() as once:
        once.setattr(engine.runtime.taps, "wait_for", interrupted)
        assert isinstance(engine.ask(Collect((wanted["a"], wanted["b"]))), Failed)
    a, b, c = engine.ask(Collect(tuple(wanted.values()))).shares
    assert a.failure == b.failure == "its reduction was interrupted: MemoryError('none for a moment')"
    (rows,) = rows_of(engine.runtime, c)
    torch.testing.assert_close(rows[0], requests["c"].rows[0, :6].sum(0))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("spilled", [False, True])
def test_reductions_that_are_not_written_leave_what_they_were_computed_from(spilled, reduce, monkeypatch) -> None:
    """The second point's fails once, for lack of memory: asked for again, all points are reduced of the rows."""
    engine = Engine("host", 0, 0, 1)
    request = Request(engine.rng, 0)
    request.key, request.done, request.total = "r", 6, 6
    capture = CapturePlan((0, 1), (Range(0, None),), reduce, RAW, accumulates=spilled)
    engine.runtime.register("r", Plan("r", 4, LIMIT, capture=capture).encode(), 0)
    for start, count in ((0, 4), (4, 1), (5, 1)):
        engine.step([(request, start, count)])
    engine.runtime.end_requests(["r"])
    if spilled:
        engine.runtime._kept[Owner("r", 0)].capture_buffer._spill()
    encode, calls = Reduced.encode, []

    def interrupted(*given) -> torch.Tensor:
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError("none for a moment")
        return encode(*given)

    monkeypatch.setattr(Reduced, "encode", interrupted)
    assert isinstance(engine.ask(Collect((Wanted(Owner("r", 0), 6),))), Failed)
    (captured_rows,) = engine.ask(Collect((Wanted(Owner("r", 0), 6),))).shares
    rows = torch.cat(rows_of(engine.runtime, captured_rows))
    torch.testing.assert_close(rows, getattr(request.rows[:2, :6], reduce)(1))


@pytest.mark.parametrize("kind", KINDS)
def test_late_rows_of_a_cancelled_request_do_not_land_on_a_spilled_accumulator(kind, monkeypatch) -> None:
    """A's rows are still on the device when it is cancelled; B gets its pages, ends, and must make room for C."""
    monkeypatch.setattr(cuda, "BESIDE_BYTES", 0)
    monkeypatch.setattr(cuda, "BESIDE_SHARE", 0.0)
    engine = Engine(kind, 0, 0, 0)
    requests = {name: Request(engine.rng, 0) for name in "abc"}
    for name, request in requests.items():
        request.key, request.done, request.total = name, 12, 12
    for name, request in requests.items():
        reduce = None if name == "a" else "sum"
        capture = CapturePlan((0, 1), (Range(0, None),), reduce, RAW, accumulates=name != "a")
        engine.runtime.taps.accumulators._free[1:] = []  # as if there were one
        engine.runtime.register(name, Plan(name, 12, LIMIT, capture=capture).encode(), 0)
        if name != "c":
            engine.step([(request, 0, 12)])
            engine.runtime.end_requests([name])
            engine.ask(GetStats(), released=(Owner("a", 0),))
    assert engine.runtime._kept[Owner("b", 0)].capture_buffer._spilled is not None
    (captured_rows,) = engine.ask(Collect((Wanted(Owner("b", 0), 12),))).shares
    rows = torch.cat(rows_of(engine.runtime, captured_rows))
    torch.testing.assert_close(rows, requests["b"].rows[:2, :12].sum(1))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_added_past_the_end_are_an_error(kind) -> None:
    """A client that names an end further back than vLLM can run ahead gets no plausible mean."""
    engine = Engine(kind, 0, 0, 1)
    capture = CapturePlan((0,), (Range(0, None),), "mean", RAW, accumulates=True)
    engine.runtime.register("r", Plan("r", 4, LIMIT, capture=capture).encode(), 0)
    request = Request(engine.rng, 0)
    request.key = "r"
    engine.step([(request, 0, 4)])
    for position in range(4, 10):
        engine.step([(request, position, 1)])
    (captured_rows,) = engine.ask(Collect((Wanted(Owner("r", 0), 6),))).shares
    assert captured_rows.failure == "9 rows were reduced, but 6 are selected"
    (captured_rows,) = engine.ask(Collect((Wanted(Owner("r", 0), 6),))).shares
    assert captured_rows.failure == "9 rows were reduced, but 6 are selected"


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_held_is_an_error(kind) -> None:
    """More of the newest rows than there is room for: which of them stay cannot be known, and all are refused."""
    engine = Engine(kind, 0, 0, 1)
    engine.runtime.taps.accumulators.lag = 3
    capture = CapturePlan((0,), (Range(0, None),), "sum", RAW, accumulates=True)
    engine.runtime.register("r", Plan("r", 4, LIMIT, capture=capture).encode(), 0)
    request = Request(engine.rng, 0)
    request.key = "r"
    engine.step([(request, 0, 4)])
    engine.step([(request, 4, 5)])
    (captured_rows,) = engine.ask(Collect((Wanted(Owner("r", 0), 9),))).shares
    assert "too many of its newest rows" in captured_rows.failure
