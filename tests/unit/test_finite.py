"""No row that an edit made overflow goes on, and none that is not finite is handed over unsaid: on every kind of taps."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows import within, worst
from workers import KINDS, batch, device_of, some_runtime, tap

from steercap.core.messages import (
    Attach,
    Call,
    Collect,
    Configure,
    Configured,
    GetSteeringRecord,
    Owner,
    Placed,
    Vectors,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import Blob, Configuration, Entry, Response, SteeringPlan, blob_digest
from steercap.core.schema import RAW, PointSchema
from steercap.core.tokens import Range
from steercap.kernels.bits import EDITED_MOST, NOT_FINITE, edited_most, split_checksum, stray_rows, weight
from steercap.testing.reference import PERFECT, compare_rows

WIDTH, POINTS, TOKENS = 24, 3, 5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Bench:
    """One rank; requests `r0`, `r1`, ... of TOKENS tokens each, all in one pass."""

    def __init__(self, kind: str, dtype: torch.dtype, schemas: list[PointSchema] | None = None) -> None:
        self.kind = kind
        self.runtime = some_runtime(kind, POINTS, WIDTH, dtype, schemas=schemas)
        self.ask(Attach(1 << 20))

    def ask(self, question: Any) -> Any:
        return decode_answer(self.runtime.answer(encode(Call((), question))))

    def register(self, key: str, capture: CapturePlan | None = None, steering: SteeringPlan | None = None) -> None:
        self.runtime.register(key, Plan(key, TOKENS, 99, capture=capture, steering=steering).encode(), 0)

    def adding(self, slot: int, vector: torch.Tensor, points: tuple[int, ...]) -> SteeringPlan:
        """Steering that adds a vector to the tokens from the second on."""
        data = vector.float().numpy().tobytes()
        digest = blob_digest(data, 1)
        entry = Entry(0, points, 0, 0, response=Response(offset=1.0))
        configuration = Configuration((entry,), (Blob(digest, 1),), 1, 0)
        placed = (Placed(slot, configuration, ((slot,),)),)
        assert self.ask(Configure((Vectors(digest, (slot,), data),), placed)) == Configured(())
        return SteeringPlan(slot, configuration.digest, bytes([slot]), ((Range(1, None),),), ())

    def run(self, requests: int, points: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """One pass over all tokens of all requests; hidden and residual of each point are changed in place."""
        positions = np.tile(np.arange(TOKENS), requests)
        names = [f"r{number}" for number in range(requests)]
        self.runtime.begin_step(batch(self.kind, names, [0] * requests, [TOKENS] * requests, positions + 7, positions))
        for point, (hidden, residual) in enumerate(points):
            there = hidden.to(device_of(self.kind)), None if residual is None else residual.to(device_of(self.kind))
            tap(self.runtime, *there, point)
            hidden.copy_(there[0])
            if residual is not None:
                residual.copy_(there[1])
        self.runtime.end_step()

    def settle(self, key: str) -> Any:
        (record,) = self.ask(GetSteeringRecord((Wanted(Owner(key, 0), TOKENS),), (True,))).records
        return record

    def collect(self, key: str, total: int = TOKENS) -> Any:
        (captured_rows,) = self.ask(Collect((Wanted(Owner(key, 0), total),))).shares
        return captured_rows


def rows_of(
    dtype: torch.dtype, requests: int, *, deferred: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(requests * TOKENS, WIDTH, generator=generator).to(dtype) for _ in range(1 + deferred)]
    return parts[0], parts[1] if deferred else None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deferred", [False, True])
def test_a_row_that_overflows_becomes_zero_and_fails_its_request_alone(kind, dtype, deferred) -> None:
    """At the bound nothing happens; beyond it, whether by much or by little, the row is zero where it was edited."""
    bench = Bench(kind, dtype)
    most = edited_most(dtype)
    for slot, size in enumerate((most * 0.99, most * 2, 3e38)):
        one = torch.zeros(WIDTH)
        one[7] = size  # one element of a row is enough
        bench.register(f"r{slot}", steering=bench.adding(slot, one, (1,)))
    points = [rows_of(dtype, 4, deferred=deferred, seed=point) for point in range(POINTS)]
    before = [[part if part is None else part.clone() for part in pair] for pair in points]
    bench.run(4, points)
    hidden, residual = points[1]
    total = hidden if residual is None else hidden + residual
    edited = torch.zeros(4, TOKENS, dtype=torch.bool)
    edited[1:3, 1:] = True
    assert (total[edited.flatten()] == 0).all()
    assert total.isfinite().all()
    assert (total.view(4, TOKENS, WIDTH)[0, 1:, 7] > most * 0.9).all()
    untouched = ~edited
    untouched[0, 1:] = False
    for now, then in zip(points[1], before[1], strict=True):
        if now is not None:
            assert torch.equal(now[untouched.flatten()], then[untouched.flatten()])
    for point in (0, 2):
        assert all(
            now is None or torch.equal(now, then) for now, then in zip(points[point], before[point], strict=True)
        )
    assert bench.settle("r0").failure is None
    for key in ("r1", "r2"):
        assert "the edited row of position 1 overflows at resid_post[1]" in bench.settle(key).failure


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_that_of_the_point(kind) -> None:
    """A point of float32 in a model of float16, such as a router, has the bound of float32, and the message says so."""
    dtypes = (torch.float16, torch.float32, torch.float16)
    bench = Bench(kind, torch.float16, [PointSchema((WIDTH,), str(one).removeprefix("torch.")) for one in dtypes])
    for slot, size in enumerate((1e6, EDITED_MOST * 2)):  # float16 holds neither
        bench.register(f"r{slot}", steering=bench.adding(slot, torch.full((WIDTH,), size), (1,)))
    bench.run(2, [rows_of(dtype, 2, deferred=False, seed=point) for point, dtype in enumerate(dtypes)])
    assert bench.settle("r0").failure is None
    assert "beyond 1.1e+12, the most that an edit may leave in float32" in bench.settle("r1").failure


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_float16_rows_are_looked_at_again_at_every_point(kind, dtype) -> None:
    """Where a row within the bound can overflow later, the points behind its edit look, at edited tokens alone."""
    bench = Bench(kind, dtype)
    bench.register("r0", steering=bench.adding(0, torch.ones(WIDTH), (0,)))
    points = [rows_of(dtype, 2, deferred=True, seed=point) for point in range(POINTS)]
    points[2][0][[0, 3, TOKENS + 3], 5] = torch.inf  # an unedited token, an edited one, and one of another request
    points[2][1][4, 6] = torch.nan
    bench.run(2, points)
    hidden, residual = points[2]
    rows = hidden + residual
    finite = rows.isfinite().all(-1).tolist()
    if dtype == torch.float16:
        assert finite == [False, True, True, True, True, True, True, True, False, True]
        assert (rows[3:5] == 0).all()
        assert "position 3 overflows at resid_post[2]" in bench.settle("r0").failure
    else:
        assert finite == [False, True, True, False, False, True, True, True, False, True]
        assert bench.settle("r0").failure is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("reduce", "accumulates"), [(None, False), ("mean", False), ("max", True)])
def test_a_kept_row_that_is_not_finite_is_named(kind, dtype, before, reduce, accumulates) -> None:
    """The first position with such a row, and its first point; of another request, and past the end, nothing is said."""
    bench = Bench(kind, dtype)
    plan = CapturePlan((0, 1, 2), (Range(0, None),), reduce, RAW, before, accumulates)
    for key in ("r0", "r1"):
        bench.register(key, plan)
    points = [rows_of(dtype, 2, deferred=True, seed=point) for point in range(POINTS)]
    points[1][1][3, 0] = -torch.inf
    points[2][0][3, 1] = torch.nan
    points[0][0][4, 2] = torch.nan
    bench.run(2, points)
    if not accumulates:
        assert bench.collect("r0", 3).nonfinite is None
    assert bench.collect("r0").nonfinite == (3, 1)
    assert bench.collect("r1").nonfinite is None


def test_what_is_made_elsewhere_does_not_make_up_for_what_is_missing() -> None:
    """No two sums of up to two weights of 512 points are alike, and none of up to three of 64."""
    weights = [0, *map(weight, range(512))]
    pairs = [sum(pair) for pair in combinations_with_replacement(weights, 2)]
    assert len(set(pairs)) == len(pairs)
    triples = [sum(triple) for triple in combinations_with_replacement(weights[:65], 3)]
    assert len(set(triples)) == len(triples)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400), st.booleans()), max_size=40))
def test_evidence_and_the_first_stray_point_are_told_apart(marks) -> None:
    """However many points count, their sum and the first stray one come out again."""
    total, first = 0, -1
    for point, entries, stray in marks:
        total += entries * weight(point)
        first = point if stray and first < 0 else first
    checksums, found = split_checksum(np.array([total + (first + 1) * NOT_FINITE]))
    assert (checksums[0], found[0]) == (total, first)


@given(st.lists(st.sampled_from([0.0, 1.5, -2e4, torch.inf, -torch.inf, torch.nan, 7e4]), min_size=1, max_size=12))
@settings(max_examples=300)
def test_stray_rows_are_those_beyond_the_bound(values) -> None:
    """Row by row against NumPy, with and without a bound, in every dtype."""
    for dtype in DTYPES:
        rows = torch.tensor(values).to(dtype)[:, None].repeat(1, 3)
        rows[:, 0] = 1.0
        for most in (np.inf, 65_504.0, EDITED_MOST):
            with np.errstate(invalid="ignore"):
                known = ~((np.abs(rows.float().numpy()) <= most) & np.isfinite(rows.float().numpy())).all(1)
            found = stray_rows(rows, most)
            assert (found is None and not known.any()) or found.tolist() == known.tolist()


def test_a_row_that_is_no_number_stays_the_worst() -> None:
    """In whichever order parities are accumulated: min and max of Python keep what comes first."""
    near, far, none = (compare_rows(torch.ones(1, 4), torch.ones(1, 4) + by) for by in (0.0, 0.5, math.nan))
    for order in permutations([near, far, none]):
        total = PERFECT
        for one in order:
            total = total.worse(one)
        assert math.isnan(total.cosine)
        assert math.isnan(total.error)
        with pytest.raises(AssertionError, match="nan"):
            within(worst({"resid_post prompt": one} for one in order))
    assert near.worse(far) == far.worse(near) == far
