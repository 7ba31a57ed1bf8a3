"""Points of many schemas on one rank: rows of other widths and dtypes, shards, a router; copied, edited, reduced, stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from workers import CUDA, KINDS, batch, device_of, kept_of, rows_of, some_runtime, tap

from steercap.core.messages import (
    Attach,
    Attached,
    Call,
    CapturedRows,
    Collect,
    Configure,
    Configured,
    GetStats,
    GetSteeringRecord,
    Owner,
    Placed,
    Vectors,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, InSlot, Plan
from steercap.core.program import Blob, Configuration, Entry, Response, SteeringPlan, blob_digest
from steercap.core.schema import RAW, Coding, PointSchema
from steercap.core.tokens import Range
from steercap.kernels.codecs import ENCODINGS, Codec
from steercap.kernels.codecs.coded import CodedRows

#: Triton's interpreter cuts bfloat16 off where a device rounds.
HALF = {"host": "bfloat16", "cuda": "bfloat16" if CUDA else "float16"}
PROMPT, TOKENS = 6, 9
ALL = (Range(0, None),)


def schemas(kind: str) -> list[PointSchema]:
    """A narrow one, heads in two shards, a router that can only be read, and float32 rows as wide as the first."""
    half = HALF[kind]
    return [
        PointSchema((8,), half),
        PointSchema((6, 8), half, shards=2),
        PointSchema((5,), "float32", writable=False),
        PointSchema((8,), "float32"),
        PointSchema((24,), half),
    ]


class Bench:
    """One rank of two; every request sees rows of its own at each point, whole numbers that every dtype holds."""

    def __init__(self, kind: str, shard: int, **sizes: int) -> None:
        self.kind, self.shard = kind, shard
        self.schemas = schemas(kind)
        self.runtime = some_runtime(
            kind, len(self.schemas), dtype=getattr(torch, HALF[kind]), schemas=self.schemas, shard=shard, **sizes
        )
        attached = self.ask(Attach(1 << 20))
        assert isinstance(attached, Attached)
        self.points = attached.points
        assert attached.points == ((0, 1, 2, 3, 4) if shard == 0 else (1,))
        assert attached.schemas == tuple(self.schemas[point] for point in attached.points)
        assert (attached.shard, attached.bank_width) == (shard, 48)

    def ask(self, question: Any, released: tuple[Owner, ...] = ()) -> Any:
        return decode_answer(self.runtime.answer(encode(Call(released, question))))

    def rows(self, number: int, point: int) -> torch.Tensor:
        """The rank's part of the rows of a request, before any edit: [TOKENS, shard width]."""
        drawn = np.random.default_rng([number, point]).integers(-40, 40, (TOKENS, self.schemas[point].width))
        rows = torch.from_numpy(drawn).to(getattr(torch, self.schemas[point].dtype))
        return self.part(rows, point)

    def part(self, whole: torch.Tensor, point: int) -> torch.Tensor:
        """This rank's part of something as wide as the rows of a point."""
        schema = self.schemas[point]
        return whole.chunk(schema.shards, dim=-1)[self.shard] if schema.shards > 1 else whole

    def plan(self, number: int, capture: CapturePlan | None, steering: SteeringPlan | None = None) -> None:
        plan = Plan(f"r{number}", PROMPT, TOKENS, capture=capture, steering=steering)
        self.runtime.register(plan.key, plan.encode(), 0)

    def place(self, vectors: torch.Tensor, points: tuple[int, ...]) -> InSlot:
        """Vectors by which the rows of points are stored, [points, vectors, width], in slot 1."""
        data, count = vectors.numpy().tobytes(), vectors.shape[0] * vectors.shape[1]
        blob = Blob(blob_digest(data, count), count)
        configuration = Configuration((), (blob,), 0, 0, points)
        places = tuple(range(10, 10 + count))
        frame = Configure((Vectors(blob.digest, places, data),), (Placed(1, configuration, (places,)),))
        assert self.ask(frame) == Configured(())
        return InSlot(1, configuration.digest)

    def run(self, numbers: list[int], *, deferred: bool = False) -> list[list[torch.Tensor]]:
        """The prompts in one pass, then token by token; what each point's rows became, request by request."""
        became = [[torch.empty(0)] * len(self.schemas) for _ in numbers]
        for start, stop in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, TOKENS))]:
            positions = np.tile(np.arange(start, stop), len(numbers))
            names, count = [f"r{number}" for number in numbers], stop - start
            self.runtime.begin_step(
                batch(self.kind, names, [start] * len(names), [count] * len(names), positions + 7, positions)
            )
            for point in range(len(self.schemas)):
                rows = torch.cat([self.rows(number, point)[start:stop] for number in numbers])
                # At odd points as queries lie beside keys and values: columns of wider rows.
                wide = torch.full((len(rows), (3 if point % 2 else 1) * rows.shape[1]), 5, dtype=rows.dtype)
                wide = wide.to(device_of(self.kind))
                hidden = wide.chunk(3, dim=1)[1] if point % 2 else wide
                hidden.copy_(rows)
                residual = torch.ones_like(hidden) if deferred else None
                if residual is not None:
                    hidden -= 1
                tap(self.runtime, hidden, residual, point)
                total = (hidden if residual is None else hidden + residual).cpu().clone()
                hidden.fill_(5)
                assert (wide == 5).all(), "a tap wrote beside its rows"
                for place, own in enumerate(total.split(count)):
                    became[place][point] = torch.cat([became[place][point].to(own.dtype), own])
            self.runtime.end_step()
        return became

    def collect(self, number: int) -> CapturedRows:
        (captured_rows,) = self.ask(Collect((Wanted(Owner(f"r{number}", 0), TOKENS),))).shares
        assert isinstance(captured_rows, CapturedRows)
        assert captured_rows.failure is None
        return captured_rows

    def shaped(self, rows: torch.Tensor, point: int) -> torch.Tensor:
        return rows.view(-1, *self.schemas[point].shard_shape)


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(params=[0, 1])
def shard(request) -> int:
    return request.param


@pytest.mark.parametrize("deferred", [False, True])
def test_rows_of_every_schema_are_copied_bit_for_bit(kind, shard, deferred) -> None:
    """Each point's rows in their own shape and dtype, of requests that keep all points, some, or one."""
    bench = Bench(kind, shard)
    wanted = [(0, 1, 2, 3, 4), (1, 2, 4), (1,)]
    for number, points in enumerate(wanted):
        bench.plan(number, CapturePlan(points, ALL, None, RAW))
    bench.run([0, 1, 2], deferred=deferred)
    for number, points in enumerate(wanted):
        captured_rows = bench.collect(number)
        assert captured_rows.points == tuple(point for point in points if point in bench.points)
        for point, rows in zip(captured_rows.points, rows_of(bench.runtime, captured_rows), strict=True):
            assert rows.dtype == getattr(torch, bench.schemas[point].dtype)
            assert torch.equal(rows, bench.shaped(bench.rows(number, point), point))


def steering(bench: Bench) -> tuple[SteeringPlan, dict[int, torch.Tensor]]:
    """A vector of its own for each point that can be written, added to the tokens from the third on."""
    drawn = torch.Generator().manual_seed(5)
    vectors = {
        point: torch.randint(-9, 9, (schema.width,), generator=drawn).float()
        for point, schema in enumerate(bench.schemas)
        if schema.writable
    }
    blobs = {point: vector.numpy().tobytes() for point, vector in vectors.items()}
    sent = tuple(Vectors(blob_digest(data, 1), (place,), data) for place, data in enumerate(blobs.values()))
    entries = tuple(
        Entry(place, (point,), 0, place, response=Response(offset=1.0)) for place, point in enumerate(vectors)
    )
    configuration = Configuration(entries, tuple(Blob(one.digest, 1) for one in sent), 1, 0)
    placed = Placed(0, configuration, tuple(one.bank_rows for one in sent))
    assert bench.ask(Configure(sent, (placed,))) == Configured(())
    return SteeringPlan(0, configuration.digest, b"id", ((Range(2, None),),), ()), vectors


@pytest.mark.parametrize("before", [False, True])
def test_each_point_is_edited_by_its_own_part_of_its_vector(kind, shard, before) -> None:
    """The stream, and what is kept of it before the edits or after; the bank's rows are read from the shard's begin on."""
    bench = Bench(kind, shard)
    plan, vectors = steering(bench)
    bench.plan(0, CapturePlan((0, 1, 2, 3, 4), ALL, None, RAW, before), plan)
    bench.plan(1, CapturePlan((0, 1, 2, 3, 4), ALL, None, RAW))
    became = bench.run([0, 1])
    expected = [bench.rows(0, point).clone() for point in range(len(bench.schemas))]
    for point, vector in vectors.items():
        expected[point][2:] += bench.part(vector, point).to(expected[point].dtype)
    for point in range(len(bench.schemas)):
        assert torch.equal(became[0][point], expected[point]), point
        assert torch.equal(became[1][point], bench.rows(1, point)), point
    captured_rows = bench.collect(0)
    for point, rows in zip(captured_rows.points, rows_of(bench.runtime, captured_rows), strict=True):
        assert torch.equal(rows, bench.shaped(bench.rows(0, point) if before else expected[point], point))
    (record,) = bench.ask(GetSteeringRecord((Wanted(Owner("r0", 0), TOKENS),), (True,))).records
    assert (record.failure, record.rows, record.primary) == (None, (TOKENS - 2,) * len(vectors), shard == 0)


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "last"])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.slow
def test_reductions_are_those_of_each_point(kind, shard, reduce, accumulates) -> None:
    """Over kept rows, and along with them: finished together, and spilled because others need the accumulator."""
    bench = Bench(kind, shard, accumulators=2, lag=2, held=2)
    wanted = [(0, 1, 2, 3, 4), (1, 4), (1, 2)]
    for number, points in enumerate(wanted):
        bench.plan(number, CapturePlan(points, ALL, reduce, RAW, accumulates=accumulates))
        bench.run([number])
        bench.runtime.end_requests([f"r{number}"])
    if accumulates:  # the third took the accumulator of the first
        spilled = [
            bench.runtime._kept[Owner(f"r{number}", 0)].capture_buffer._spilled is not None for number in range(3)
        ]
        assert spilled == [True, False, False]
    for number, points in enumerate(wanted):
        for _ in range(2):
            captured_rows = bench.collect(number)
            assert captured_rows.stored_rows == 1
            for point, rows in zip(captured_rows.points, rows_of(bench.runtime, captured_rows), strict=True):
                own = bench.rows(number, point).float()
                by_hand = {"mean": own.mean(0), "sum": own.sum(0), "max": own.amax(0), "last": own[-1]}[reduce]
                assert rows.dtype == torch.float32
                torch.testing.assert_close(rows, bench.shaped(by_hand, point), rtol=1e-6, atol=1e-6)
        assert captured_rows.points == tuple(point for point in points if point in bench.points)
    bench.ask(GetStats(), released=tuple(Owner(f"r{number}", 0) for number in range(3)))
    assert bench.ask(GetStats()).pages_in_use == 0


@pytest.mark.parametrize("points", [(0, 3), (1,), (4,), (2,)])
def test_rows_are_projected_on_the_shards_part_of_directions(kind, shard, points) -> None:
    """Points of one width and two dtypes together; a router; a shard, whose products are a part of the whole one."""
    bench = Bench(kind, shard)
    width, number = bench.schemas[points[0]].width, 3
    vectors = torch.randn(len(points), number, width, generator=torch.Generator().manual_seed(6))
    placed = bench.place(vectors, points)
    bench.plan(0, CapturePlan(points, ALL, None, Coding("projected", number), vectors=placed))
    bench.plan(1, CapturePlan((0, 1, 2), ALL, None, RAW))  # whole rows beside them
    bench.run([0, 1])
    captured_rows = bench.collect(0)
    assert captured_rows.points == tuple(point for point in points if point in bench.points)
    for point, rows in zip(captured_rows.points, rows_of(bench.runtime, captured_rows), strict=True):
        own = bench.part(vectors[points.index(point)], point)
        torch.testing.assert_close(rows, bench.rows(0, point).float() @ own.T, rtol=1e-5, atol=1e-4)
    captured_rows = bench.collect(1)
    for point, rows in zip(captured_rows.points, rows_of(bench.runtime, captured_rows), strict=True):
        assert torch.equal(rows, bench.shaped(bench.rows(1, point), point))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")  # interpreter
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    "name", [name for name, encoding in ENCODINGS.items() if isinstance(encoding, Codec) and name != "attention"]
)
@pytest.mark.slow
def test_a_codec_stores_rows_of_every_schema(kind, shard, before, name) -> None:
    """Within its bound of them, edited rows among them; whole rows beside them stay whole, and other codecs do too."""
    bench = Bench(kind, shard)
    plan, vectors = steering(bench)
    codec = ENCODINGS[name]
    assert isinstance(codec, Codec)
    coding = Coding(name, 3 if codec.default_k else 0, 8 if codec.seeded else 0)
    other = Coding("rp8", 4, 2) if name != "rp8" else Coding("full8")
    widest, everywhere = max(schema.width for schema in bench.schemas), (0, 1, 2, 3, 4)
    drawn = torch.randint(1, 9, (len(everywhere), 2, widest), generator=torch.Generator().manual_seed(7)).float()
    placed = bench.place(drawn, everywhere) if codec.constants else None
    bench.plan(0, CapturePlan(everywhere, ALL, None, coding, before, vectors=placed), plan)
    bench.plan(1, CapturePlan((1, 2), ALL, None, coding, vectors=placed))
    bench.plan(2, CapturePlan((0, 1, 2, 3, 4), ALL, None, RAW))
    bench.plan(3, CapturePlan((0, 4), ALL, None, other))
    became = bench.run([0, 1, 2, 3])
    for number, stored in enumerate((coding, coding, RAW, other)):
        captured_rows = bench.collect(number)
        assert captured_rows.coding == stored
        for point, rows in zip(captured_rows.points, kept_of(bench.runtime, captured_rows), strict=True):
            exact = bench.rows(number, point) if before and number == 0 else became[number][point]
            if stored == RAW:
                assert isinstance(rows, torch.Tensor)
                assert torch.equal(rows, bench.shaped(exact, point))
                continue
            assert isinstance(rows, CodedRows)
            own = drawn[point, :, : bench.schemas[point].width]
            found = replace(rows, constants=dict(zip(codec.constants, own, strict=False)) if stored == coding else {})
            wanted, summed = exact.double(), 0.0
            matrix = ENCODINGS[stored.encoding].matrix(bench.schemas[point].width, stored)
            if matrix is not None:
                wanted = wanted @ bench.part(matrix, point).double().T * stored.k**-0.5
                summed = 1e-5 * float(exact.abs().max())
            error = (found.decoded().flatten(1).double() - wanted).abs()
            assert (error <= found.error_bound().flatten(1) * 1.001 + summed + 1e-5).all()
            size = exact.double().flatten(1).norm(dim=1)[:, None]
            assert (found.error_bound().flatten(1) <= size).all()
    assert set(vectors) == {0, 1, 3, 4}
