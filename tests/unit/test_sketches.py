"""Sketches: what is added up of rows is what NumPy finds in the rows themselves, in float64; and the worker's side of it."""

from __future__ import annotations

import asyncio
import copy
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sketching import ROUNDING
from workers import CUDA, KINDS, batch, device_of, some_runtime, tap

from steercap.captures.sketch import Sketch, versions
from steercap.client import rows as of_client
from steercap.client.rows import ServerSketch, count, entering
from steercap.core.messages import (
    Attach,
    Call,
    CloseSketch,
    Collected,
    CommitSketch,
    Failed,
    GetStats,
    Joining,
    OpenSketch,
    Owner,
    PrepareSketch,
    ReadSketch,
    SketchCommitted,
    SketchOpened,
    SketchPart,
    Unknown,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import NONE
from steercap.core.schema import RAW, PointSchema
from steercap.core.spec import CaptureSpec, Point
from steercap.core.tokens import Range, TokenSelection
from steercap.engine import sketching
from steercap.engine.sketching import Sketching, SketchRecord
from steercap.errors import (
    CaptureMemoryFull,
    InvalidFile,
    InvalidRequest,
    InvalidSpec,
    LayerOutOfRange,
    ModelClosed,
    ServerFailure,
    SketchIncomplete,
    SketchMemoryFull,
    UnknownName,
)
from steercap.kernels.bits import exact_products
from steercap.kernels.codecs import dtype_of
from steercap.kernels.sketches import BLOCK, SKETCHES, SketchState
from steercap.kernels.sketches.moments import add_compensated, shrink
from steercap.requests.context import joining, sketches_in_force
from steercap.requests.sketching import EngineSketches, RunningSketch
from steercap.server.call import entered

WIDTH = 12
SPLITS = st.lists(st.integers(0, BLOCK + 3), min_size=1, max_size=6)
few = settings(max_examples=30)


def some_rows(count: int, width: int = WIDTH, seed: int = 0, mean: float = 0.0) -> torch.Tensor:
    """Rows whose elements depend on each other, and differ in size by thousands."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(width, width, generator=generator) * torch.logspace(-2, 1, width)
    return torch.randn(count, width, generator=generator) @ mixed + mean * torch.randn(width, generator=generator)


def state_of(name: str, rows: torch.Tensor, *sizes: int, size: int | None = None) -> SketchState:
    """A state that took rows in parts of these sizes, then the rest."""
    kind = SKETCHES[name]
    state = kind.empty(rows.shape[1], kind.checked_size(size))
    cut = np.clip(np.cumsum(sizes), 0, len(rows)).tolist()
    for part in np.split(np.arange(len(rows)), cut):
        kind.update(state, rows[part])
    return state


def moments_agree(state: SketchState, rows: torch.Tensor) -> None:
    """Mean and covariance are those of the rows, in float64, up to the rounding of one block's products."""
    known = rows.double().numpy()
    assert state.rows == len(rows)
    spread = known.std(0, ddof=1)
    covariance = SKETCHES["moments"].covariance(state).numpy()
    assert (np.abs(state.tensors["mean"].numpy() - known.mean(0)) <= 1e-12 * np.abs(known).max() + 1e-300).all()
    assert (np.abs(covariance - np.cov(known.T)) <= ROUNDING * np.outer(spread, spread)).all()
    assert np.array_equal(covariance, covariance.T)


@few
@given(sizes=SPLITS, seed=st.integers(0, 9))
def test_moments_are_numpys_whatever_the_parts(sizes, seed) -> None:
    """Any parts, in any order; the variances too."""
    rows = some_rows(max(sum(sizes), 2), seed=seed)
    state = state_of("moments", rows, *sizes)
    moments_agree(state, rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    moments_agree(state_of("moments", rows[order], *reversed(sizes)), rows)
    alone = state_of("variances", rows, *sizes)
    variance = rows.double().var(0)
    torch.testing.assert_close(SKETCHES["variances"].variance(alone), variance, rtol=1e-12, atol=0)
    torch.testing.assert_close(SKETCHES["moments"].variance(state), variance, rtol=ROUNDING, atol=0)


@few
@given(first=st.integers(0, 600), second=st.integers(0, 600), mean=st.sampled_from([0.0, 1.0, 1e4]))
def test_merged_moments_are_those_of_all_rows(first, second, mean) -> None:
    """Of parts that have other means, and of empty ones: one row, none."""
    rows = torch.cat([some_rows(first, seed=1), some_rows(second + 2, seed=2, mean=mean)])
    state, other = state_of("moments", rows[:first]), state_of("moments", rows[first:])
    SKETCHES["moments"].merge(state, other)
    moments_agree(state, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, 1e3, 3e4])
def test_a_large_mean_loses_nothing(mean, dtype) -> None:
    """The covariance is that of the rows as they are in their dtype, however far from zero."""
    rows = (some_rows(4000, seed=3) + mean).to(dtype)
    moments_agree(state_of("moments", rows, 100, 1, 2000), rows)


def test_a_float32_sum_without_compensation_would_not_do() -> None:
    """Many blocks: what rounding takes from the sum is kept, and brought back."""
    terms = torch.rand(20_000, 4, generator=torch.Generator().manual_seed(1))
    given = terms.clone()
    total, lost, plain = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    for term in terms:
        add_compensated(total, lost, term)
        plain += term
    assert torch.equal(terms, given)
    exact = terms.double().sum(0)
    assert ((total.double() + lost - exact).abs() < 1e-9 * exact).all()
    assert ((plain.double() - exact).abs() > 1e-7 * exact).any()


def test_constant_rows_have_no_variance() -> None:
    """Exactly none, at any size, in parts of any size."""
    rows = torch.full((1000, 3), 12345.678)
    for name in ("moments", "variances"):
        state = state_of(name, rows, 1, 7, 300)
        assert not SKETCHES[name].variance(state).any()
        assert torch.equal(state.tensors["mean"], rows[0].double())


def test_products_are_of_float32_whatever_the_process_has_set() -> None:
    """TF32 or bfloat16, where the model runs in them, are put aside and come back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    rows = some_rows(40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with exact_products():
            assert (rows @ rows.T).dtype == torch.float32
        moments_agree(state_of("moments", rows, 7), rows)
        assert (rows @ rows.T).dtype == torch.bfloat16


def test_full_precision_lasts_as_long_as_any_block_of_any_thread() -> None:
    """One that ends does not take it from the others, and the last one gives back what the process had."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    first, second = exact_products(), exact_products()
    try:
        first.__enter__()
        with ThreadPoolExecutor(1) as other:
            other.submit(second.__enter__).result()
            first.__exit__(None, None, None)
            assert torch.get_float32_matmul_precision() == "highest"
            other.submit(second.__exit__, None, None, None).result()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_process_that_sets_its_products_by_kind_is_no_error() -> None:
    """torch then refuses to say one precision for all."""
    code = """
import torch
from steercap.kernels.bits import exact_products
kinds = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
kinds[0].fp32_precision, kinds[1].fp32_precision = "tf32", "bf16"
with exact_products():
    assert [kind.fp32_precision for kind in kinds] == ["ieee", "ieee"]
assert [kind.fp32_precision for kind in kinds] == ["tf32", "bf16"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_precision_that_is_set_later_reaches_the_products() -> None:
    """A block leaves each kind of product as it was, inheriting from the process."""
    code = """
import torch
from steercap.kernels.bits import exact_products
kinds = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
before = [kind.fp32_precision for kind in kinds]
with exact_products():
    assert [kind.fp32_precision for kind in kinds] == ["ieee", "ieee"]
assert [kind.fp32_precision for kind in kinds] == before
torch.backends.fp32_precision = "bf16"
assert kinds[1].fp32_precision == "bf16"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_rows_too_small_for_their_products_are_refused() -> None:
    """Their variances are not none: NumPy's, which "variances" has. Rows that do not differ have none, however small."""
    rows = some_rows(20) * 1e-25
    for take in (SKETCHES["moments"].variance, SKETCHES["moments"].covariance, SKETCHES["moments"].spectrum):
        with pytest.raises(InvalidRequest, match="use the kind 'variances'"):
            take(state_of("moments", rows))
        take(state_of("moments", rows * 1e10))
        take(state_of("moments", rows[:1].repeat(20, 1), 3))
        take(state_of("moments", rows * 0))
    known = rows.double().numpy().var(0, ddof=1)
    assert SKETCHES["variances"].variance(state_of("variances", rows)).numpy() == pytest.approx(known, rel=1e-9)


@pytest.mark.parametrize("name", SKETCHES)
def test_rows_that_do_not_fit_are_refused_whole(name) -> None:
    """NaN and infinity; of moments also what would overflow. The state is as it was."""
    kind, state = SKETCHES[name], state_of(name, some_rows(30))
    before = copy.deepcopy(state)
    bad = [torch.tensor([[math.nan] + [0.0] * (WIDTH - 1)]), torch.full((2, WIDTH), math.inf)]
    for rows in bad if name != "moments" else [*bad, torch.full((1, WIDTH), 1e19)]:
        with pytest.raises(InvalidRequest, match="cannot be taken into a sketch"):
            kind.update(state, rows)
    assert (state.rows, state.squares) == (before.rows, before.squares)
    assert all(torch.equal(tensor, before.tensors[key]) for key, tensor in state.tensors.items())
    largest = torch.full((2, WIDTH), 1e18)
    kind.update(state, largest)
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())


def keeps_its_bound(state: SketchState, rows: torch.Tensor, size: int) -> None:
    """‖AᵀA - BᵀB‖₂ ≤ what was shrunk away ≤ ‖A‖²/size, and nothing is added: AᵀA - BᵀB has no negative eigenvalue."""
    short, bound = SKETCHES["frequent_directions"].matrix(state)
    known = rows.double()
    squares = float(known.square().sum())
    assert len(short) <= size
    assert state.squares == pytest.approx(squares, rel=1e-12)
    eigenvalues = torch.linalg.eigvalsh(known.T @ known - short.T @ short)
    rounding = 1e-12 * squares
    assert float(eigenvalues[-1]) <= bound + rounding
    assert bound <= squares / size + rounding
    assert float(eigenvalues[0]) >= -rounding


@settings(max_examples=12)
@given(sizes=SPLITS, seed=st.integers(0, 5), size=st.sampled_from([1, 2, 5, 40]), flat=st.booleans())
def test_frequent_directions_keep_their_bound(sizes, seed, size, flat) -> None:
    """Of rows with a few long directions, and of rows that are alike in all."""
    rows = torch.randn(sum(sizes), WIDTH) if flat else some_rows(sum(sizes), seed=seed, mean=3.0)
    keeps_its_bound(state_of("frequent_directions", rows, *sizes, size=size), rows, size)


@settings(max_examples=12)
@given(sizes=st.lists(st.integers(0, 700), min_size=2, max_size=4), size=st.sampled_from([2, 6]))
def test_merged_frequent_directions_keep_the_bound_of_all_rows(sizes, size) -> None:
    """In any order, some of them empty."""
    kind, parts = SKETCHES["frequent_directions"], [some_rows(count, seed=n) for n, count in enumerate(sizes)]
    total = kind.empty(WIDTH, size)
    for rows in reversed(parts):
        kind.merge(total, state_of("frequent_directions", rows, 50, size=size))
    keeps_its_bound(total, torch.cat(parts), size)
    if sum(sizes):
        torch.testing.assert_close(total.tensors["mean"], torch.cat(parts).double().mean(0))


def test_rows_of_few_directions_are_kept_exactly() -> None:
    """Of rank up to the size nothing is shrunk away, and principal directions are those of the rows."""
    rows = torch.randn(3000, 3, generator=torch.Generator().manual_seed(0)) @ torch.randn(3, 40) + 100 * torch.randn(40)
    state = state_of("frequent_directions", rows.float(), 11, size=8)
    _, bound = SKETCHES["frequent_directions"].matrix(state)
    assert bound <= 1e-9 * state.squares
    values, directions = SKETCHES["frequent_directions"].spectrum(state)
    known = np.linalg.eigh(np.cov(rows.double().numpy().T))
    assert values[:3].numpy() == pytest.approx(known[0][::-1][:3], rel=1e-6)
    cosines = (directions[:3].numpy() * known[1].T[::-1][:3]).sum(1)
    assert np.abs(cosines) == pytest.approx(1, abs=1e-6)


def test_shrinking_takes_the_same_from_every_direction() -> None:
    """The definition: squares less that of the first that is left out."""
    squares = torch.tensor([9.0, 4.0, 1.0]).double()
    short, lost = shrink(torch.diag(squares.sqrt()), 2)
    assert float(lost) == pytest.approx(1)
    assert (short**2).sum(1).numpy() == pytest.approx([8, 3])


# What is here


def a_sketch(name: str = "moments", count: int = 300, seed: int = 0, **fields) -> Sketch:
    points = {Point(layer, "resid_post"): state_of(name, some_rows(count, seed=seed + layer)) for layer in (1, 3)}
    size = SKETCHES[name].checked_size(None)
    known = {"model": "m", "dtype": "float32", "tokens": TokenSelection.parse("all"), "before_edits": False}
    return Sketch(name, size, points, **{**known, "num_layers": 4, "requests": 2, "versions": versions(), **fields})


@pytest.mark.parametrize("name", SKETCHES)
def test_a_sketch_is_read_back_bit_for_bit(name, tmp_path) -> None:
    """Every tensor and all that is known of their origin; a changed file is refused."""
    sketch = a_sketch(name)
    loaded = Sketch.load(sketch.save(tmp_path / "rows.safetensors"))
    assert repr(loaded) == repr(sketch)
    assert (loaded.tokens, loaded.versions, loaded.points) == (sketch.tokens, sketch.versions, sketch.points)
    for point, state in sketch.states.items():
        other = loaded.states[point]
        assert (other.rows, other.squares, other.filled) == (state.rows, state.squares, state.filled)
        assert all(torch.equal(tensor, other.tensors[key]) for key, tensor in state.tensors.items())
    path = tmp_path / "rows.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + b"\1" * 8)
    with pytest.raises(InvalidFile, match="was changed"):
        Sketch.load(path)


@pytest.mark.parametrize("name", SKETCHES)
def test_sketches_are_merged_and_neither_changes(name) -> None:
    """Rows, requests and versions of all; its statistics are those of the rows of all, and its parts stay as they are."""
    one, other = a_sketch(name, 300), a_sketch(name, 500, seed=7, versions=("torch 0",))
    before = copy.deepcopy((one, other))
    both = one.merge(other, other)
    assert (both.rows, both.requests) == (1300, 6)
    assert set(both.versions) == {*one.versions, "torch 0"}
    for layer in (1, 3):
        rows = torch.cat([some_rows(300, seed=layer), *[some_rows(500, seed=7 + layer)] * 2]).double()
        torch.testing.assert_close(both.mean(layer), rows.mean(0))
        if name != "frequent_directions":
            torch.testing.assert_close(both.variance(layer), rows.var(0), rtol=ROUNDING, atol=0)
        if name == "moments":
            moments_agree(both.states[Point(layer, "resid_post")], rows.float())
    for kept, now in zip(before, (one, other), strict=True):
        for point, state in kept.states.items():
            assert (state.rows, state.squares, state.filled) == (
                now.states[point].rows,
                now.states[point].squares,
                now.states[point].filled,
            )
            assert all(torch.equal(tensor, now.states[point].tensors[key]) for key, tensor in state.tensors.items())


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "n"), ("tokens", TokenSelection.parse("prompt")), ("before_edits", True), ("dtype", "x")],
)
def test_sketches_of_different_rows_are_not_merged(field, value) -> None:
    """The error names what differs."""
    with pytest.raises(InvalidSpec, match=f"differ in {field}"):
        a_sketch().merge(a_sketch(**{field: value}))


def test_what_a_sketch_cannot_say_is_an_error() -> None:
    """Points that are not in it, too few rows, numbers of directions, and what another kind would know."""
    moments, variances, short = a_sketch(), a_sketch("variances"), a_sketch("frequent_directions")
    assert moments.mean(-1).equal(moments.mean(3, "resid_post"))
    for layer, site in ((0, None), (1, "z")):
        with pytest.raises(LayerOutOfRange, match=r"it has resid_post\[1\], resid_post\[3\]"):
            moments.mean(layer, site)
    with pytest.raises(InvalidRequest, match="needs at least 2 rows, and the sketch has 1;"):
        a_sketch(count=1).covariance(1)
    with pytest.raises(InvalidRequest, match="needs at least 1 row, and the sketch has 0;"):
        a_sketch(count=0).mean(1)
    for k in (0, WIDTH + 1, 1.5):
        with pytest.raises(InvalidSpec, match=f"from 1 to {WIDTH}"):
            moments.principal_directions(1, k)
    with pytest.raises(InvalidSpec, match="use the kind 'moments'"):
        short.covariance(1)
    with pytest.raises(InvalidSpec, match="a variances sketch holds no directions"):
        variances.principal_directions(1, 1)
    with pytest.raises(InvalidSpec, match="use the kind 'frequent_directions'"):
        moments.frequent_directions(1)
    with pytest.raises(UnknownName, match="known: 'frequent_directions', 'moments', 'variances'"):
        Sketch("medians", 0, dict(moments.states), "m", "", moments.tokens, False, 4, 1)
    with pytest.raises(InvalidSpec, match="a sketch of this kind keeps"):
        Sketch("moments", 0, dict(variances.states), "m", "", moments.tokens, False, 4, 1)


@pytest.mark.parametrize("name", ["moments", "frequent_directions"])
def test_few_rows_have_fewer_directions(name) -> None:
    """About their mean, three rows vary in a plane: any third direction would be made of rounding."""
    sketch = a_sketch(name, count=3)
    assert sketch.variances_along(1, 2).numpy() == pytest.approx(
        np.linalg.eigvalsh(np.cov(some_rows(3, seed=1).double().numpy().T))[::-1][:2], rel=1e-5
    )
    for ask in (sketch.variances_along, sketch.principal_directions):
        with pytest.raises(InvalidSpec, match="from 1 to 2"):
            ask(1, 3)


@pytest.mark.parametrize("name", ["moments", "frequent_directions"])
def test_principal_directions_are_a_direction_set(name) -> None:
    """By layer, of length 1, in the order of their variances, with where they come from; the sign is settled."""
    sketch = a_sketch(name)
    found = sketch.principal_directions([1, -1], 2)
    assert list(found) == ["pc1", "pc2"]
    assert (found.layers, found.model, found.site) == ((1, 3), "m", "resid_post")
    assert found.provenance.method == f"principal directions of {name}"
    values, vectors = np.linalg.eigh(np.cov(some_rows(300, seed=1).double().numpy().T))
    assert sketch.variances_along(1, 2).numpy() == pytest.approx(values[::-1][:2], rel=1e-6)
    assert np.abs(vectors.T[::-1][:2] @ found.at(1).double().numpy().T) == pytest.approx(np.eye(2), abs=1e-4)
    assert all(float(vector[vector.abs().argmax()]) > 0 for vector in found.at(3))


async def test_sketches_inside_each_other_are_of_the_same_tokens() -> None:
    """A request keeps its rows once."""
    model = object()
    one, other = (
        SimpleNamespace(spec=CaptureSpec(tokens=t), tokens=TokenSelection.parse(t)) for t in ("all", "prompt")
    )
    with joining(model, one), joining(object(), other):
        assert sketches_in_force(model) == (one,)
        with pytest.raises(InvalidRequest, match="must read the same tokens"), joining(model, other):
            pass


# The worker


class Bench:
    """A runtime with random rows, which are known here too."""

    def __init__(self, kind: str, schemas: list[PointSchema] | None = None, shard: int = 0) -> None:
        self.kind = kind
        self.schemas = schemas or [PointSchema((8,), "float32"), PointSchema((2, 3), "bfloat16")]
        self.runtime = some_runtime(kind, len(self.schemas), schemas=self.schemas, shard=shard)
        self.ask(Attach(8 << 20))
        self.rows: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.generator = torch.Generator().manual_seed(0)

    def ask(self, question, released: tuple[Owner, ...] = ()):
        return decode_answer(self.runtime.answer(encode(Call(released, question))))

    def begin(self, *names: str, limit: int = 100) -> None:
        for name in names:
            capture = CapturePlan(tuple(range(len(self.schemas))), (Range(0, None),), None, RAW)
            self.runtime.register(name, Plan(name, 4, limit, capture=capture).encode(), 0)

    def step(self, *parts: tuple[str, int, int], skip: int = -1, scale: float = 1.0) -> None:
        """A pass over (request, first position, tokens) parts; the point `skip` has no tap in it."""
        counts = [count for _, _, count in parts]
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in parts])
        starts = [start for _, start, _ in parts]
        self.runtime.begin_step(
            batch(self.kind, [name for name, _, _ in parts], starts, counts, positions + 7, positions)
        )
        for point, schema in enumerate(self.schemas):
            made = torch.randn(sum(counts), schema.shard_width, generator=self.generator) * 3 + 50
            made = (made * scale).to(dtype_of(schema))
            if point != skip:
                tap(self.runtime, made.to(device_of(self.kind)), None, point)
            for (name, start, _), rows in zip(parts, made.split(counts), strict=True):
                known = self.rows.setdefault((name, point), [])
                known[:] = [*known[:start], *rows]
        self.runtime.end_step()

    def open(self, name: str = "s", kind: str = "moments", size: int = 0, most: int = 1 << 20) -> str:
        answer = self.ask(OpenSketch(name, kind, size, tuple(range(len(self.schemas))), most))
        assert isinstance(answer, SketchOpened)
        return answer.refused

    def prepare(self, name: str, total: int, *sketches: str) -> str | None:
        answer = self.ask(PrepareSketch((Joining(Wanted(Owner(name, 0), total), sketches or ("s",)),)))
        assert isinstance(answer, Collected)
        (captured_rows,) = answer.shares
        return "unknown" if isinstance(captured_rows, Unknown) else captured_rows.failure

    def commit(self, name: str, total: int, *sketches: str) -> int:
        answer = self.ask(CommitSketch((Joining(Wanted(Owner(name, 0), total), sketches or ("s",)),)))
        assert isinstance(answer, SketchCommitted)
        return answer.rows[0]

    def state(self, point: int, kind: str = "moments", size: int = 0, name: str = "s") -> SketchState:
        answer = self.ask(ReadSketch(name, point, 0, 1 << 30))
        assert isinstance(answer, SketchPart)
        return sketching._restored(SKETCHES[kind], self.schemas[point].shard_width, size, [answer])

    def known(self, point: int, **totals: int) -> torch.Tensor:
        return torch.cat([torch.stack(self.rows[name, point][:total]) for name, total in totals.items()])


@pytest.fixture(params=KINDS)
def bench(request) -> Bench:
    return Bench(request.param)


def test_rows_are_folded_where_they_lie(bench) -> None:
    """Of several requests, with what was computed twice, and beyond their ends; each once however often it is asked."""
    assert bench.open() == ""
    assert bench.open() == ""
    assert bench.open("short", "frequent_directions", 4) == ""
    bench.begin("r1", "r2", "r3")
    bench.step(("r1", 0, 20), ("r2", 0, 3))
    bench.step(("r1", 15, 30), ("r3", 0, 50))  # preempted, or drafts that were rejected
    for name, total in (("r1", 41), ("r2", 3), ("r1", 41)):
        assert bench.prepare(name, total, "s", "short") is None
        assert [bench.commit(name, total, "s", "short") for _ in range(2)] == [total] * 2
    assert bench.prepare("r3", 50, "s") is None
    for point in range(2):
        rows = bench.known(point, r1=41, r2=3)
        moments_agree(bench.state(point), rows)
        keeps_its_bound(bench.state(point, "frequent_directions", 4, "short"), rows, 4)
    counted = bench.ask(GetStats())
    assert counted.sketches == 2
    assert counted.sketch_bytes == sum(
        SKETCHES[kind].nbytes(width, size)
        for kind, size in (("moments", 0), ("frequent_directions", 4))
        for width in (8, 6)
    )
    bench.ask(CloseSketch("s"))
    bench.ask(CloseSketch("s"))
    assert bench.ask(GetStats()).sketches == 1
    assert isinstance(bench.ask(ReadSketch("s", 0, 0, 8)), Failed)
    assert bench.prepare("r3", 50, "s") == "there is no sketch s here"


def test_what_may_not_enter_does_not(bench) -> None:
    """Rows that are missing, wrong or not finite, requests nobody knows, or that were given back or never prepared."""
    bench.open()
    bench.begin("r1", "r2", "r3", "r4", "r5", "r6")
    bench.step(("r1", 0, 5))
    bench.step(("r2", 0, 5), skip=1)
    bench.step(("r3", 0, 5), scale=1e20)
    bench.step(("r4", 0, 5), ("r5", 0, 5))
    bench.step(("r6", 0, 5), scale=math.inf)
    assert "never computed" in bench.prepare("r1", 7)
    assert "once" in bench.prepare("r2", 5)
    assert "would add up to" in bench.prepare("r3", 5)
    assert bench.prepare("r9", 5) == "unknown"
    assert bench.prepare("r6", 5) is None  # it says where, beside, and is not prepared
    assert [bench.commit(name, 5) for name in ("r1", "r2", "r3", "r4", "r6", "r9")] == [NONE] * 6
    assert bench.prepare("r4", 5) is None
    bench.ask(GetStats(), (Owner("r4", 0),))
    assert bench.commit("r4", 5) == NONE
    assert bench.state(0).rows == 0
    assert bench.prepare("r5", 5) is None
    assert bench.commit("r5", 5) == 5
    bench.ask(GetStats(), (Owner("r5", 0),))
    assert bench.commit("r5", 5) == NONE
    moments_agree(bench.state(1), bench.known(1, r5=5))


def test_what_was_weighed_together_fits_together(bench) -> None:
    """Each alone would have room for its squares, all together not: the later one is refused, unless the first goes."""
    bench.open()
    bench.begin("r1", "r2")
    bench.step(("r1", 0, 2), ("r2", 0, 2), scale=4e16)
    assert bench.prepare("r1", 2) is None
    assert "would add up to" in bench.prepare("r2", 2)
    bench.ask(GetStats(), (Owner("r1", 0),))
    assert bench.prepare("r2", 2) is None


def test_room_for_sketches_is_bounded(bench) -> None:
    """All sketches of a rank together; one more byte is refused, with what it would have needed."""
    needed = sum(SKETCHES["moments"].nbytes(width, 0) for width in (8, 6))
    assert f"it needs {needed:,} bytes" in bench.open(most=needed - 1)
    assert bench.open(most=needed) == ""
    assert f"{needed:,} of them in use" in bench.open("t", most=2 * needed - 1)
    assert bench.ask(GetStats()).sketches == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_the_points_takes_part(kind) -> None:
    """What is whole on every rank is kept by the first: the second says so, and answers as many rows."""
    bench = Bench(kind, [PointSchema((8,), "float32"), PointSchema((8,), "float32", shards=2)], shard=1)
    bench.open(kind="variances")
    bench.begin("r1")
    bench.step(("r1", 0, 9))
    assert bench.prepare("r1", 9) is None
    assert bench.commit("r1", 9) == 9
    assert not bench.ask(ReadSketch("s", 0, 0, 1 << 20)).kept
    state = bench.state(1, "variances")
    torch.testing.assert_close(state.tensors["mean"], bench.known(1, r1=9).double().mean(0))


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_wide_covariance_on_a_device() -> None:
    """4,096 elements, rows of several blocks: float32 products, not TF32."""
    torch.set_float32_matmul_precision("high")
    try:
        kind, rows = SKETCHES["moments"], some_rows(1500, 4096, seed=1, mean=100.0).cuda()
        state = kind.empty(4096, 0, "cuda")
        kind.update(state, rows)
        known = rows.double()
        exact = (known - known.mean(0)).T @ (known - known.mean(0)) / (len(rows) - 1)
        spread = exact.diagonal().sqrt()
        assert float(((kind.covariance(state) - exact).abs() / torch.outer(spread, spread)).max()) < 1e-6
    finally:
        torch.set_float32_matmul_precision("highest")


# The client


class Backend:
    """Workers that answer what a test says; the last answer again."""

    closed = False

    def __init__(self, *answers) -> None:
        self.answers, self.asked = list(answers), []

    async def ask(self, question, _kind):
        self.asked.append(question)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def a_book(**fields) -> SketchRecord:
    return SketchRecord("s", "variances", 0, {Point(0, "z"): 0}, **fields)


JOINING = Joining(Wanted(Owner("r", 0), 5), ("s",))


@pytest.mark.parametrize(
    ("answers", "rows", "broken"),
    [
        ([[SketchCommitted((5,)), SketchCommitted((5,))]], 5, False),
        ([[SketchCommitted((-1,))], [SketchCommitted((5,))]], 5, False),
        ([[SketchCommitted((-1,))], [SketchCommitted((-1,))]], -1, False),
        ([[SketchCommitted((5,)), SketchCommitted((-1,))]], None, True),
        ([[SketchCommitted((5,))], [SketchCommitted((5,))]], None, True),
    ],
)
async def test_a_request_enters_on_all_workers_of_one_engine_or_breaks_the_sketch(answers, rows, broken) -> None:
    """What nobody can vouch for is never handed out."""
    made, record = Sketching(Backend(answers), (), 1 << 20), a_book()
    found = await made.commit([JOINING], [record])
    assert bool(record.broken) == broken
    if not broken:
        assert found == rows
        assert (record.requests, record.rows) == ((1, 5) if rows > 0 else (0, 0))
    else:
        with pytest.raises(SketchIncomplete, match="begin another"):
            await made.states(record, [Point(0, "z")])


SAMPLES = [Joining(Wanted(Owner("r", index), 5), ("s",)) for index in range(4)]


async def test_all_samples_of_a_request_enter_by_one_message_or_the_sketch_breaks() -> None:
    """A reader never sees some of them; those of requests that wait go with it, and are told apart."""
    backend = Backend([[SketchCommitted((5, 5, 5, 5, 7))] * 2], [[SketchCommitted((5, -1, 5, 5))]])
    made, record = Sketching(backend, (), 1 << 20), a_book()
    assert await asyncio.gather(made.commit(SAMPLES, [record]), made.commit([JOINING], [record])) == [20, 7]
    assert (record.requests, record.rows, len(backend.asked), record.broken) == (5, 27, 1, None)
    await made.commit(SAMPLES, [record])
    with pytest.raises(SketchIncomplete, match="begin another"):
        record.require()


async def test_a_request_cancelled_while_its_rows_enter_breaks_the_sketch() -> None:
    """They enter all the same, and whoever repeats the request would count them twice."""
    made, record = Sketching(Backend([[SketchCommitted((5,) * 4)]]), (), 1 << 20), a_book()
    entering = asyncio.create_task(made.commit(SAMPLES, [record]))
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    async with asyncio.timeout(10):
        while record.requests < 4:
            await asyncio.sleep(0)
    with pytest.raises(SketchIncomplete, match="cancelled while its rows entered"):
        record.require()


async def test_an_answer_that_never_came_breaks_the_sketch() -> None:
    """Whether rows entered is not known, so nothing that was added up is either."""
    made, record = Sketching(Backend(SketchIncomplete("lost")), (), 1 << 20), a_book()
    with pytest.raises(SketchIncomplete, match="lost"):
        await made.commit([JOINING], [record])
    with pytest.raises(SketchIncomplete, match="it is unknown whether rows"):
        record.require()


async def test_a_refused_sketch_is_freed_where_there_was_room() -> None:
    """One rank of two has none: both are told to forget it."""
    asked = Backend([[SketchOpened(""), SketchOpened("it needs more")]], [[SketchOpened("")] * 2])
    with pytest.raises(SketchMemoryFull, match=r"it needs more.*sketch_bytes="):
        await Sketching(asked, (), 1 << 20).open(a_book())
    assert [type(question) for question in asked.asked] == [OpenSketch, CloseSketch]


def test_a_sketch_at_a_server_knows_what_failed_on_its_way() -> None:
    """An answer of the server says what it did; a request that had none may have entered or not."""
    running = RunningSketch(SketchRecord("s", "moments", 0, {}), CaptureSpec(layers=[0]), cast("Any", None))
    for error in (asyncio.CancelledError(), TimeoutError(), ServerFailure("gone"), ModelClosed("closed")):
        with pytest.raises(type(error)), entering([running]):
            raise error
    assert running.record.unsure == 4
    with pytest.raises(InvalidRequest), entering([running]):
        raise InvalidRequest("refused")
    count([running], [{"sketches": {"s": {"requests": 9, "rows": 7}}}], "url")
    assert (running.record.unsure, running.requests, running.rows) == (4, 1, 7)


async def test_a_sketch_says_in_which_dtype_the_model_computed() -> None:
    """Also where its first point is a router, whose rows are of another."""
    states = {Point(0, site): state_of("moments", some_rows(3)) for site in ("router", "resid_post")}

    async def states_of(*_: Any) -> Any:
        return states, 1

    engine: Any = SimpleNamespace(
        require_open=lambda: None,
        sketching=SimpleNamespace(states=states_of),
        model_label="m",
        schemas={point: PointSchema((WIDTH,), "float32") for point in states},
        vllm=SimpleNamespace(num_layers=1, llm=SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))),
    )
    running = RunningSketch(
        SketchRecord("s", "moments", 0, dict.fromkeys(states, 0)), CaptureSpec(layers=[0]), EngineSketches(engine)
    )
    assert (await running.fetch()).dtype == "bfloat16"


async def test_a_sketch_at_a_server_with_rows_of_a_failed_request_is_refused(monkeypatch) -> None:
    connection: Any = SimpleNamespace(url="http://there", run=lambda work: work())
    running = RunningSketch(
        SketchRecord("s", "moments", 0, {}), CaptureSpec(layers=[0]), ServerSketch(connection, "/s")
    )
    sent = SimpleNamespace(kind="moments", size=0, points=(), tokens=running.tokens, before_edits=False, rows=9)

    async def written(*_: Any) -> int:
        return 0

    monkeypatch.setattr(of_client, "downloaded", written)
    monkeypatch.setattr(of_client.Sketch, "load", lambda _path: sent)
    running.record.requests, running.record.rows, sent.requests = 2, 9, 3
    assert await running.fetch() is sent  # requests of others that end meanwhile
    running.record.unsure = 1
    with pytest.raises(SketchIncomplete, match="of 3 requests, and 2 ended here: rows of 1 that failed"):
        await running.fetch()


def test_an_answer_that_fails_after_its_rows_entered_breaks_the_sketch() -> None:
    running = RunningSketch(SketchRecord("s", "moments", 0, {}), CaptureSpec(layers=[0]), cast("Any", None))
    with pytest.raises(CaptureMemoryFull), entered([running]):
        raise CaptureMemoryFull("no room for its file")
    with pytest.raises(SketchIncomplete, match="after its rows had entered it: CaptureMemoryFull"):
        running.record.require()
