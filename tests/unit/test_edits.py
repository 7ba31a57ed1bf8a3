"""The operations as formulas: the one kernel against plain float64, and what each operation promises."""

from __future__ import annotations

import ast
import dataclasses
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.specs import OPERATIONS, VARIANTS, spec, vector
from workers import CUDA, KINDS, batch, device_of, known_schemas, some_runtime, tap

from steercap import Ablate, Add, AddIf, Cap, LowRank, Monitor, Replace, SAEFeature, SetProjection, SteeringSpec
from steercap.core.messages import (
    Call,
    Configure,
    Configured,
    GetSteeringRecord,
    Owner,
    Placed,
    SteeringRecords,
    Vectors,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import Plan
from steercap.core.program import HOLE, SteeringPlan, blob_digest, rows_touched
from steercap.core.schema import PointSchema
from steercap.core.slots import Slots
from steercap.core.spec import Point
from steercap.core.tokens import TokenSelection
from steercap.errors import (
    InvalidEdit,
    InvalidSelection,
    InvalidSpec,
    InvalidVector,
    SteercapError,
    TooManyEdits,
    UnknownName,
)
from steercap.kernels.bits import EDITED_MOST
from steercap.steering import DirectionSet, LayerVectors
from steercap.steering.edits import EDITS
from steercap.steering.lowering import lower, scopes_of
from steercap.steering.spec import spec_of
from steercap.testing.edits import edited

WIDTH, LAYERS = 24, 3
ARMED = {Point(layer, "resid_post"): layer for layer in range(LAYERS)}
SCHEMAS = known_schemas(ARMED, WIDTH, LAYERS)
PROMPT = 5


def lowered(steering: SteeringSpec, edits_per_point: int = 32):
    return lower(steering, armed=ARMED, schemas=SCHEMAS, num_layers=LAYERS, edits_per_point=edits_per_point)


def run(
    specs: list[SteeringSpec],
    rows: list[torch.Tensor],
    layer: int,
    residual: torch.Tensor | None = None,
    kind: str = "host",
    *,
    cuts: tuple[int, ...] = (),
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Each spec on its own sequence, all in one pass through the tap's kernel, or in several, cut at these positions.

    Returns:
        The edited rows of each sequence, and what hidden and residual became.
    """
    runtime = some_runtime(
        kind, LAYERS, WIDTH, captures=False, slots=len(specs), bank_rows=256, entries=32, tokens=4096
    )
    slots = Slots(len(specs), 256)
    names = [str(number) for number in range(len(specs))]
    for name, one in zip(names, specs, strict=True):
        ready = lowered(one)
        grant = slots.claim(ready.configuration, ready.digest)
        assert grant is not None
        blobs = zip(ready.configuration.blobs, grant.bank_rows, strict=True)
        vectors = tuple(Vectors(b.digest, p, ready.vectors[b.digest]) for b, p in blobs)
        placed = (Placed(grant.slot, grant.configuration, grant.bank_rows),)
        assert decode_answer(runtime.answer(encode(Call((), Configure(vectors, placed))))) == Configured(())
        scopes, replaced = scopes_of(ready, PROMPT, 99)
        plan = SteeringPlan(grant.slot, grant.digest, b"", scopes, replaced)
        runtime.register(name, Plan(name, PROMPT, 99, steering=plan).encode(), 0)
    counts = [len(sequence) for sequence in rows]
    device = device_of(kind)
    hidden = torch.cat(rows).clone().to(device)
    deferred = None if residual is None else residual.to(device)
    numbers = np.concatenate([np.arange(count) for count in counts])
    for start, stop in pairwise([0, *cuts, max(counts)]):
        of_pass = torch.from_numpy(np.flatnonzero((numbers >= start) & (numbers < stop))).to(device)
        positions = numbers[of_pass.cpu().numpy()]
        some = [max(min(count, stop) - start, 0) for count in counts]
        runtime.begin_step(batch(kind, names, [start] * len(names), some, positions, positions))
        part = hidden[of_pass], None if deferred is None else deferred[of_pass]
        for point in range(LAYERS):
            tap(runtime, *(part if point == layer else (torch.ones_like(part[0]), None)), point)
        runtime.end_step()
        hidden[of_pass] = part[0]
        if deferred is not None:
            deferred[of_pass] = part[1]
    wanted = tuple(Wanted(Owner(name, 0), count) for name, count in zip(names, counts, strict=True))
    settled = decode_answer(runtime.answer(encode(Call((), GetSteeringRecord(wanted, (True,) * len(wanted))))))
    assert isinstance(settled, SteeringRecords)
    failures = [record.failure for record in settled.records if record.failure]
    assert not failures, failures
    hidden = hidden.cpu()
    if residual is not None:
        residual.copy_(deferred)
    total = hidden if residual is None else hidden + residual
    return list(total.split(counts)), hidden, residual


def one(steering: SteeringSpec, rows: torch.Tensor, layer: int = 1, kind: str = "host") -> torch.Tensor:
    return run([steering], [rows], layer, kind=kind)[0][0]


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    scale = right.double().norm(dim=-1, keepdim=True).clamp(min=1e-6)
    assert ((left.double() - right.double()).abs() / scale).max() < 2e-5


names = st.sampled_from((*OPERATIONS, *VARIANTS))
tokens = st.sampled_from(["all", "prompt", "generated", "last_prompt", slice(2, 8, 3), [0, -1, 6]])
seeds = st.integers(0, 10_000)
passes = st.sampled_from([(), (1,), (5,), (8,), (2, 6), (1, 2, 3, 4, 5, 6, 7, 8)])  # how 9 tokens are cut


@st.composite
def specs(draw) -> SteeringSpec:
    parts = draw(st.lists(st.tuples(names, tokens, seeds, st.booleans()), min_size=1, max_size=4))
    built = [
        spec(name, WIDTH, seed=seed, layers="all" if everywhere else [1], tokens=chosen)
        for name, chosen, seed, everywhere in parts
    ]
    if draw(st.booleans()):
        return SteeringSpec(built)
    return SteeringSpec([edit for part in built for edit in part.flat()], preserve_norm=draw(st.booleans()))


# The same examples each time: where a gate opens, a last bit decides, and one run in many would meet one.
@given(st.lists(specs(), min_size=1, max_size=5), seeds, st.booleans(), passes)
@settings(max_examples=150, deadline=None, derandomize=True)
@pytest.mark.slow
def test_one_kernel_does_what_each_formula_says(many, seed, deferred, cuts) -> None:
    """Any edits in any order, several specs in one pass: the kernel equals the float64 formulas, row by row."""
    hold_to_formulas("host", many, seed, deferred, cuts)


@given(st.lists(specs(), min_size=1, max_size=4), seeds, st.booleans(), passes)
@settings(max_examples=150 if CUDA else 16, deadline=None, derandomize=True)
@pytest.mark.slow
def test_the_kernel_of_a_device_does_too(many, seed, deferred, cuts) -> None:
    """The same for the kernel in Triton, on the device or interpreted."""
    hold_to_formulas("cuda", many, seed, deferred, cuts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("repeated", [*OPERATIONS, "jumprelu"])
def test_several_of_one_operation_reach_every_pass(kind, repeated) -> None:
    """Three of each operation and one of another, also in passes none of whose tokens is replaced."""
    edits = [edit for seed in (1, 2, 3) for edit in spec(repeated, WIDTH, seed=seed, layers=[1]).flat()]
    steering = SteeringSpec([*edits, Add(vector(WIDTH, seed=4), layer=1)])
    hold_to_formulas(kind, [steering], 5, True, (3, 6))


def hold_to_formulas(kind: str, many: list[SteeringSpec], seed: int, deferred: bool, cuts: tuple[int, ...]) -> None:
    rows = [vector(9, WIDTH, seed=seed + number) for number in range(len(many))]
    residual = vector(9 * len(many), WIDTH, seed=seed + 77) if deferred else None
    kept = None if residual is None else residual.clone()
    found, _, _ = run(many, rows, 1, residual, kind, cuts=cuts)
    streams = rows if kept is None else [row + part for row, part in zip(rows, kept.split(9), strict=True)]
    for steering, stream, got in zip(many, streams, found, strict=True):
        close(got, edited(steering, Point(1, "resid_post"), stream, PROMPT, LAYERS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_feature_with_a_threshold_is_off_below_it(kind) -> None:
    """Just above it the activation is taken away, at it and below only the value is added."""
    axis, written = torch.eye(WIDTH)[0], torch.eye(WIDTH)[1] * 2
    rows = torch.zeros(5, WIDTH)
    rows[:, 0] = torch.tensor([-3.0, 0.25, 0.5, 0.5001, 4.0])
    edit = SAEFeature(axis, written, 1.5, threshold=0.5, layer=1)
    found = one(SteeringSpec([edit]), rows, kind=kind)[:, 1]
    torch.testing.assert_close(found, torch.tensor([3.0, 3.0, 3.0, 2 * (1.5 - 0.5001), 2 * (1.5 - 4.0)]))


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds)
@settings(max_examples=4, deadline=None)
@pytest.mark.slow
def test_what_changes_nothing_changes_no_bit(kind, seed) -> None:
    """Scale zero, keep one, bounds not reached, a closed gate: rows are left bit for bit, hidden and residual apart."""
    v, rows = vector(WIDTH, seed=seed), vector(9, WIDTH, seed=seed + 1)
    residual = vector(9, WIDTH, seed=seed + 2)
    for edit in (
        Add(v, 0.0, layer=1),
        Add(v, 0.0, relative=True, layer=1),
        Ablate(v, keep=1.0, layer=1),
        Cap(v, low=-1e6, high=1e6, layer=1),
        AddIf(v, v, threshold=1e6, layer=1),
        LowRank(v[None], v[None], scale=0.0, layer=1),
    ):
        _, hidden, left = run([SteeringSpec([edit])], [rows], 1, residual.clone(), kind)
        assert torch.equal(hidden, rows), edit
        assert torch.equal(left, residual), edit


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_a_changed_row_leaves_no_residual(kind, seed) -> None:
    """An edited row is whole in hidden, its residual is zero; its neighbours keep theirs."""
    rows, residual = vector(9, WIDTH, seed=seed), vector(9, WIDTH, seed=seed + 1)
    steering = SteeringSpec([Add(vector(WIDTH, seed=seed + 2), layer=1, tokens=[3])])
    _, hidden, left = run([steering], [rows], 1, residual.clone(), kind)
    touched = torch.arange(9) == 3
    assert not left[touched].any()
    assert torch.equal(left[~touched], residual[~touched])
    assert torch.equal(hidden[~touched], rows[~touched])


@given(seeds, st.floats(-2, 2), st.floats(0, 2))
def test_cap_and_set_projection_are_idempotent(seed, low, span) -> None:
    """A second time changes nothing, and the projection lies where it must."""
    v, rows = vector(WIDTH, seed=seed), vector(9, WIDTH, seed=seed + 1)
    for edit in (Cap(v, low=low, high=low + span, layer=1), SetProjection(v, low, layer=1)):
        once = one(SteeringSpec([edit]), rows)
        close(one(SteeringSpec([edit, edit]), rows), once)
        along = once @ (v / v.norm())
        top = low if isinstance(edit, SetProjection) else low + span
        assert ((along > low - 1e-4) & (along < top + 1e-4)).all()


@given(seeds)
def test_ablate_twice_is_ablate(seed) -> None:
    """And nothing of the direction is left."""
    v, rows = vector(WIDTH, seed=seed), vector(9, WIDTH, seed=seed + 1)
    edit = Ablate(v, layer=1)
    once = one(SteeringSpec([edit]), rows)
    close(one(SteeringSpec([edit, edit]), rows), once)
    assert (once @ (v / v.norm())).abs().max() < 1e-5


@given(seeds)
@pytest.mark.slow
def test_order_matters_exactly_where_it_should(seed) -> None:
    """Additions commute, edits along orthogonal directions commute; an addition and a cap along one direction do not."""
    v, rows = vector(WIDTH, seed=seed), vector(9, WIDTH, seed=seed + 1)
    other = vector(WIDTH, seed=seed + 2)
    orthogonal = other - (other @ v) / (v @ v) * v

    def both(first, second) -> tuple[torch.Tensor, torch.Tensor]:
        return one(SteeringSpec([first, second]), rows), one(SteeringSpec([second, first]), rows)

    close(*both(Add(v, layer=1), Add(other, layer=1)))
    close(*both(Ablate(v, layer=1), Cap(orthogonal, high=0.1, layer=1)))
    left, right = both(Add(v, 2.0, layer=1), Cap(v, high=0.1, layer=1))
    assert (left - right).abs().max() > 0.1
    left, right = both(Replace(other, 3, layer=1), Add(v, layer=1))
    assert torch.allclose((left - right)[3], v, atol=1e-4)
    close(left[:3], right[:3])


@given(seeds)
def test_preserve_norm_keeps_norms_and_turns_rows(seed) -> None:
    """Each row has its norm, and another direction; edits of a spec beside it are not rescaled."""
    rows = vector(9, WIDTH, seed=seed)
    turn = SteeringSpec([Add(vector(WIDTH, seed=seed + 1), 3.0, layer=1)], preserve_norm=True)
    turned = one(turn, rows)
    close(turned.norm(dim=-1), rows.norm(dim=-1))
    assert torch.cosine_similarity(turned, rows).max() < 0.999
    beside = one(turn + SteeringSpec([Add(rows[0], layer=1)]), rows)
    close(beside, turned + rows[0])


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bit_rows_are_edited_in_float32_and_rounded_once(kind) -> None:
    """The edited row is the float32 result rounded, however large what cancels in the residual is."""
    dtype = torch.bfloat16 if CUDA or kind == "host" else torch.float16  # Triton's interpreter cuts bfloat16 off
    rows, residual = vector(9, WIDTH, seed=1).to(dtype), (1000 * vector(9, WIDTH, seed=2)).to(dtype)
    direction = vector(WIDTH, seed=3)
    _, hidden, left = run([SteeringSpec([Ablate(direction, layer=1)])], [rows], 1, residual.clone(), kind)
    whole = rows.float() + residual.float()
    unit = direction / direction.norm()
    expected = whole - (whole @ unit)[:, None] * unit
    assert torch.equal(left, torch.zeros_like(left))
    close(hidden.float(), expected.to(dtype).float())


def test_every_operation_is_tested_here() -> None:
    """A new file in edits/ must be added to tests/support/specs.py."""
    assert set(EDITS) == set(OPERATIONS)


V = torch.ones(WIDTH)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            lambda: Add(torch.ones(WIDTH + 1), layer=1),
            InvalidVector,
            "the vector has width 25, the rows at resid_post[1] are 24 of float32",
        ),
        (lambda: Add(torch.full((WIDTH,), float("nan")), layer=1), InvalidVector, "24 values of 24 that are NaN"),
        (lambda: Add(torch.full((WIDTH,), float("inf")), layer=1), InvalidVector, "NaN or inf"),
        (lambda: Add([[1.0]], layer=1), InvalidVector, "expected [width]"),
        (lambda: Add("evil", layer=1), InvalidVector, "real numbers"),
        (lambda: Add(V, float("nan"), layer=1), InvalidEdit, "scale=nan"),
        (lambda: Add(V, 1e39, layer=1), InvalidEdit, "float32"),
        (lambda: Replace(torch.ones(2, WIDTH), {11, 2}, layer=1), InvalidEdit, "in the order of the rows"),
        (lambda: Replace([[1.0], [1.0, 2.0]], [0, 1], layer=1), InvalidVector, "real numbers"),
        (lambda: Add(0 * V, relative=True, layer=1), InvalidVector, "zero"),
        (lambda: Ablate(0 * V, layer=1), InvalidVector, "no direction"),
        (lambda: SetProjection(0 * V, 1.0, layer=1), InvalidVector, "no direction"),
        (lambda: Cap(V, layer=1), InvalidEdit, "neither low= nor high="),
        (lambda: Cap(V, low=2, high=1, layer=1), InvalidEdit, "low=2.0 is above high=1.0"),
        (lambda: AddIf(V, torch.ones(3), layer=1), InvalidVector, "probe has width 3"),
        (lambda: AddIf(V, 0 * V, layer=1), InvalidVector, "probe is zero"),
        (lambda: SAEFeature(V, torch.ones(3), 1.0, layer=1), InvalidVector, "must agree"),
        (lambda: SAEFeature(V, V, 1.0, threshold=-0.1, layer=1), InvalidEdit, "give 0 or more"),
        (lambda: LowRank(torch.ones(17, WIDTH), torch.ones(17, WIDTH), layer=1), InvalidEdit, "above 16"),
        (lambda: LowRank(torch.ones(2, WIDTH), torch.ones(3, WIDTH), layer=1), InvalidVector, "must agree"),
        (lambda: Replace(V, [0, 1], layer=1), InvalidVector, "1 rows for 2 positions"),
        (lambda: Replace(torch.ones(2, WIDTH), [1, 1], layer=1), InvalidEdit, "twice"),
        (lambda: Replace(V, 0, elements=[WIDTH], layer=1), InvalidEdit, f"rows of {WIDTH} elements"),
        (lambda: Replace(V, 0, elements=slice(9, 9), layer=1), InvalidEdit, "one element at least"),
        (lambda: Replace(V, 0, elements=[True], layer=1), InvalidEdit, "mask of 1 truth values"),
        (lambda: Replace(V, 0, elements="z", layer=1), InvalidEdit, "elements='z'"),
        (
            lambda: Replace(torch.full((WIDTH,), HOLE), 0, layer=1),
            InvalidVector,
            "a value that steercap reserves; check how the rows",
        ),
        (lambda: Replace(torch.ones(2, WIDTH), [4, -1], layer=1), InvalidSelection, "twice"),
        (lambda: Add(V), InvalidEdit, "layer="),
        (lambda: Add(V, layer=1, layers=[2]), InvalidEdit, "not both"),
        (lambda: Add(V, layer=7), SteercapError, "3 layers"),
        (lambda: Add(V, layer=1, site="resid"), SteercapError, "unknown site 'resid'"),
        (lambda: Add(V, layer=1, site="mlp_out"), SteercapError, "has no tap"),
        (lambda: Add(V, layer=1, tokens="assistant"), InvalidSelection, "unknown tokens"),
        (lambda: Add(V, layer=1, tokens=[]), InvalidSelection, "selects no token"),
        (lambda: Add(V, layer=1, tokens=[200]), InvalidSelection, "outside the sequence"),
        (lambda: SteeringSpec([]), InvalidSpec, "changes nothing"),
        (lambda: SteeringSpec([V]), InvalidSpec, "not an edit"),
        (lambda: SteeringSpec([Add(V, layer=1)] * 40), TooManyEdits, "edits_per_point"),
        (
            lambda: SteeringSpec([Add(V, layer=1, tokens=[n]) for n in range(32)], preserve_norm=True),
            TooManyEdits,
            "different tokens=",
        ),
    ],
)
def test_bad_input_is_named_and_so_is_the_remedy(make, error, says) -> None:
    """Whatever is wrong with an edit is an error that names the value, before anything runs."""

    def ask() -> None:
        made = make()
        scopes_of(lowered(made if isinstance(made, SteeringSpec) else SteeringSpec([made])), PROMPT, 99)

    with pytest.raises(error) as raised:
        ask()
    assert says in str(raised.value)


@pytest.mark.parametrize("operation", [*OPERATIONS, *VARIANTS[:3]])
@pytest.mark.parametrize("kind", [LayerVectors, dict])
def test_of_vectors_by_layer_an_edit_takes_its_own(operation, kind) -> None:
    """Every vector of every edit may be LayerVectors: it is as if the one of the edit's layer were given."""
    (one,) = spec(operation, LAYERS, layer=1).flat()  # as wide as there are layers, so that keys could pass for numbers
    given = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    by_layer = {
        name: kind({0: value + 1, 1: value, 2: value + 2})
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.shape == (LAYERS,)
    }
    if "positions" in given:
        given.pop("tokens")
        by_layer, given["rows"], given["positions"] = {"rows": kind({1: given["rows"][0]})}, given["rows"][:1], 0
    assert SteeringSpec([type(one)(**given | by_layer)]).sha256 == SteeringSpec([type(one)(**given)]).sha256


BY_LAYER = LayerVectors({layer: [1.0, 2.0] for layer in (3, 5, 30)}, site="attn_out")


@pytest.mark.parametrize(
    ("scope", "given", "says"),
    [
        (
            {"layer": 28},
            BY_LAYER,
            "has no vector for layer=28; it has them for layers [3, 5, 30]; the nearest is 30",
        ),
        ({"layer": -1}, BY_LAYER, "no vector for layer=-1; it has them for layers [3, 5, 30]; count from 0"),
        ({"layers": "all"}, BY_LAYER, "has a vector for each of layers [3, 5, 30]; give layer="),
        ({"layer": 5, "site": "resid_post"}, BY_LAYER, "is for site 'attn_out', not for site='resid_post'"),
        (
            {"layer": 5},
            DirectionSet({"joy": BY_LAYER}),
            "keys ['joy']; give a vector, or vectors by layer, as in directions['joy']",
        ),
        ({"layer": 5}, {}, "keys []"),
        ({"layer": 5}, {5: BY_LAYER}, "is a mapping with keys [3, 5, 30]; give one of its values"),
    ],
)
def test_vectors_by_layer_that_lack_the_layer_say_what_they_have(scope, given, says) -> None:
    """No vector of another layer, site or meaning is taken, and no number of a layer for a number of a vector."""
    scope = {"site": "attn_out"} | scope
    one_layer = [lambda: Monitor(given, threshold=0.5, **scope)] if "layer" in scope else []
    for make in (lambda: Add(given, **scope), *one_layer):
        with pytest.raises(InvalidVector) as raised:
            make()
        assert says in str(raised.value)


def test_what_is_read_once_reaches_each_layer() -> None:
    """Positions of an iterator are those of all layers, not of the first alone."""
    vectors = LayerVectors({layer: [1.0, 2.0] for layer in (3, 4)})
    for tokens in (iter([1, 2]), [iter([1, 2]), "generated"], (at for at in (1, 2))):
        first, second = SteeringSpec.by_layer(Add, vectors, tokens=tokens).flat()
        assert first.selection == second.selection
        assert first.selection.ranges(3, 9)[:1] == TokenSelection.parse([1, 2]).ranges(3, 9)[:1]
    rows = SteeringSpec.by_layer(Replace, {3: torch.ones(2, 4), 4: torch.ones(2, 4)}, positions=iter([5, 6])).flat()
    assert [edit.positions for edit in rows] == [(5, 6), (5, 6)]


def test_layers_counted_from_an_end_with_gaps_are_refused() -> None:
    """Of vectors for every second layer the last four are others than the model's."""
    vectors = LayerVectors({layer: [1.0, 2.0] for layer in range(4, 21, 2)})
    for ask in (lambda **how: SteeringSpec.by_layer(Add, vectors, **how), vectors.at_layers):
        with pytest.raises(InvalidSpec, match=r"counts from the last layer, and there are gaps; give some of \[4, 6"):
            ask(layers=slice(-4, None))
    whole = LayerVectors({layer: [1.0, 2.0] for layer in range(6)})
    assert [edit.layer for edit in SteeringSpec.by_layer(Add, whole, layers=slice(-2, None)).flat()] == [4, 5]


def test_masked_numbers_in_lists_are_refused() -> None:
    """As of one array: what is masked is no number."""
    rows = [np.ma.array([1.0, 99.0], mask=[0, 1]), np.ma.array([1.0, 2.0])]
    with pytest.raises(InvalidVector, match="some are masked"):
        LowRank(rows, torch.ones(2, 2), layer=0)


def test_an_edit_for_each_layer_takes_the_vector_of_each() -> None:
    """By default at all layers that each of its vectors has, at their site; as over HTTP."""
    twice = LayerVectors({5: [2.0, 0.0], 30: [0.0, 2.0], 31: [1.0, 1.0]}, site="attn_out")

    def alone(**scope: Any) -> list[Add]:
        return [Add(BY_LAYER[layer], 2.0, layer=layer, site="attn_out", **scope) for layer in (3, 5, 30)]

    assert SteeringSpec.by_layer(Add, BY_LAYER, 2.0).sha256 == SteeringSpec(alone()).sha256
    assert SteeringSpec.by_layer(Add, vector=BY_LAYER, scale=2.0, layers=slice(4, None), tokens="generated").sha256 == (
        SteeringSpec(alone(tokens="generated")[1:]).sha256
    )
    assert [edit.layer for edit in SteeringSpec.by_layer(Add, BY_LAYER, layers=[30, 3, 30]).flat()] == [30, 3]
    both = SteeringSpec.by_layer(AddIf, BY_LAYER, twice, threshold=1.0).flat()
    assert [(edit.layer, edit.probe.tolist()) for edit in both] == [(5, [2.0, 0.0]), (30, [0.0, 2.0])]
    assert spec_of(BY_LAYER).sha256 == SteeringSpec.by_layer(Add, BY_LAYER).sha256


@pytest.mark.parametrize(
    ("given", "scope", "says"),
    [
        ([1.0, 2.0], {}, "Add: no vectors by layer"),
        (DirectionSet({"joy": BY_LAYER}), {}, "directions['name']"),
        (BY_LAYER, {"layers": []}, "Add: layers=[]; give some of [3, 5, 30]"),
        (BY_LAYER, {"layers": slice(6, 9)}, "give some of [3, 5, 30]"),
        (BY_LAYER, {"layers": [True, False, True]}, "Add: layers=[True, False, True]; give some of [3, 5, 30]"),
        (BY_LAYER, {"layer": 4}, "no vector for layer=4"),
        (BY_LAYER, {"layer": 3, "layers": [5]}, "not both"),
        (BY_LAYER, {"site": "resid_post"}, "not for site='resid_post'"),
    ],
)
def test_an_edit_for_each_layer_needs_vectors_there(given, scope, says) -> None:
    with pytest.raises(InvalidEdit) as raised:
        SteeringSpec.by_layer(Add, given, **scope)
    assert says in str(raised.value)


@pytest.mark.parametrize("scope", [{}, {"layers": "all"}])
def test_an_edit_of_vectors_without_a_layer_names_the_way(scope) -> None:
    with pytest.raises(InvalidEdit, match=r"SteeringSpec\.by_layer\(Ablate"):
        Ablate(BY_LAYER, site="attn_out", **scope)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([Add([1.0], layer=0)], "of type list; .*SteeringSpec\\(\\[...\\]\\)"),
        ("calm", "of type str; .*SteeringSpec.load"),
        (DirectionSet({"joy": BY_LAYER}), "of type DirectionSet; .*directions\\['name'\\]"),
        (torch.ones(2), "of type Tensor; give a SteeringSpec"),
    ],
)
def test_steering_of_another_type_is_refused_by_argument_and_type(given, says) -> None:
    """A list is one for each prompt in a call, so that it means several edits nowhere."""
    with pytest.raises(InvalidSpec, match=f"Monitor: steering=.* {says}"):
        Monitor([1.0], threshold=0.0, layer=1, do="steer", steering=given)


def test_steering_is_annotated_alike_everywhere() -> None:
    """Every public function and field `steering` of the calls and the lab takes what `spec_of` takes."""
    root = Path(spec_of.__code__.co_filename).parents[1]
    files = [
        *(root / "lab").rglob("*.py"),
        *(root / "testing").rglob("*.py"),
        root / "model.py",
        root / "client/model.py",
    ]
    files += [root / "requests/calls.py", root / "requests/call_types.py", root / "steering/monitor.py"]
    given = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            own = (
                [*node.args.args, *node.args.kwonlyargs]
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                else []
            )
            named = [one for one in own if one.arg == "steering" and not node.name.startswith("_")]
            if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "steering":
                named = [node]
            given |= {f"{file.relative_to(root)}:{one.lineno}": ast.unparse(one.annotation) for one in named}
    wrong = {place: kind for place, kind in given.items() if not re.search(r"\b(Prompt|Call)?Steering\b", kind)}
    receipts = {place for place, kind in wrong.items() if "SteeringReceipt" in kind}
    assert len(given) > 15
    assert wrong.keys() == receipts


@pytest.mark.parametrize(
    "make",
    [
        lambda: Add(V, 2.0, True, layer=1),
        lambda: AddIf(V, V, 2.0, layer=1),
        lambda: Cap(V, 2.5, layer=1),
        lambda: SAEFeature(V, V, 1.0, 0.5, layer=1),
        lambda: LowRank([V], [V], [1.0], layer=1),
        lambda: Monitor(V, 1.0, layer=1),
    ],
    ids=["Add", "AddIf", "Cap", "SAEFeature", "LowRank", "Monitor"],
)
def test_numbers_of_unclear_meaning_are_given_by_name(make) -> None:
    """`Cap(v, 2.5)` once set the lower bound, and `AddIf(v, probe, 2.0)` the threshold."""
    with pytest.raises(TypeError, match="positional arguments"):
        make()


def test_an_unknown_site_is_refused_where_it_is_named() -> None:
    """When the edit is made, not first by an engine; names of other tools and paths of modules are sites."""
    with pytest.raises(UnknownName, match="unknown site 'resid'; did you mean"):
        Add(V, layer=1, site="resid")
    for name in ("attn.hook_z", "model.layers.*.mlp.down_proj.input", "router"):
        Add(V, layer=1, site=name)


def test_layers_are_numbers_of_any_library() -> None:
    """Of a dict by layer, as `LayerVectors` takes them; a truth value is no layer, and one layer is named once."""
    for key in (5, np.int64(5), torch.tensor(5)):
        assert torch.equal(Add({key: BY_LAYER[5], 3: BY_LAYER[3]}, layer=np.int64(5)).vector, BY_LAYER[5])
    for wrong in ({True: BY_LAYER[5]}, {"5": BY_LAYER[5]}, {5: BY_LAYER[5], torch.tensor(5): BY_LAYER[3]}):
        with pytest.raises(InvalidVector, match="is a mapping with keys"):
            Add(wrong, layer=5)


def test_a_spec_keeps_its_own_copies() -> None:
    """Changing a tensor afterwards does not change the edit."""
    mine, layers = torch.ones(WIDTH), [1]
    edit = Add(mine, layers=layers)
    mine.zero_()
    layers.append(2)
    assert edit.vector.sum() == WIDTH
    assert len(edit.points(LAYERS)) == 1


def test_what_was_hashed_is_what_is_sent() -> None:
    """A tensor reached into after a spec was compiled changes nothing under the digest of what it was."""
    steering = SteeringSpec([Add(torch.ones(WIDTH), layer=1)])
    ready = lowered(steering)
    steering.edits[0].vector.mul_(7)
    (blob,) = ready.configuration.blobs
    assert blob_digest(ready.vectors[blob.digest], blob.rows) == blob.digest


def test_rows_to_replace_come_in_any_form() -> None:
    """One row for one position, as a tensor, an array or numbers; several as a list, a range or an array of positions."""
    for rows in (V, V.numpy(), V.tolist()):
        assert Replace(rows, -1, layer=1).rows.shape == (1, WIDTH)
    for positions in ([0, 1], range(2), np.arange(2), torch.arange(2)):
        assert Replace(torch.ones(2, WIDTH), positions, layer=1).replaced == (0, 1)


def test_elements_to_replace_come_in_any_form() -> None:
    """A slice, a range, indices and a mask of the same elements are the same edit; the others keep the row's own."""
    mask = [8 <= place < 16 for place in range(WIDTH)]
    rows = vector(9, WIDTH, seed=1)
    forms = (
        slice(8, 16),
        range(8, 16),
        list(range(8, 16)),
        np.arange(8, 16),
        [*range(-16, -8)],
        mask,
        torch.tensor(mask),
    )
    edits = [Replace(V, 2, elements=form, layer=1) for form in forms]
    assert {edit.elements for edit in edits} == {tuple(range(8, 16))}
    assert len({lowered(SteeringSpec([edit])).digest for edit in edits}) == 1
    expected = rows.clone()
    expected[2, 8:16] = V[8:16]
    for kind in KINDS:
        assert torch.equal(one(SteeringSpec([edits[0]]), rows, kind=kind), expected)


def test_parts_of_a_row_are_replaced_one_after_the_other() -> None:
    """Two heads of one row, by two edits: both are there, in float32 to the bit."""
    rows, other = vector(9, WIDTH, seed=1), vector(9, WIDTH, seed=2)
    heads = [Replace(other[3], 3, elements=slice(8 * head, 8 * head + 8), layer=1) for head in (0, 2)]
    expected = rows.clone()
    expected[3, :8], expected[3, 16:] = other[3, :8], other[3, 16:]
    for kind in KINDS:
        assert torch.equal(one(SteeringSpec(heads), rows, kind=kind), expected)


def test_an_edit_shows_itself_in_one_line() -> None:
    """Vectors by their shape, the scope last."""
    shown = repr(Add(torch.ones(WIDTH), 2.0, layers=[1, 2], tokens="generated"))
    assert (
        shown
        == f"Add(vector=<{WIDTH}>, scale=2.0, relative=False, layers=(1, 2), site='resid_post', tokens='generated')"
    )
    assert "<2 × 24>" in repr(Replace(torch.ones(2, WIDTH), [0, -1], layer=1))


def test_equal_specs_share_a_configuration() -> None:
    """What a slot holds is known by content, vectors included; any difference is another configuration."""
    same = [lowered(spec("cap", WIDTH, seed=3, layers=[0, 1])).configuration.digest for _ in range(2)]
    other = lowered(spec("cap", WIDTH, seed=4, layers=[0, 1])).configuration.digest
    moved = lowered(spec("cap", WIDTH, seed=3, layers=[0, 2])).configuration.digest
    assert same[0] == same[1]
    assert len({same[0], other, moved}) == 3


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e10, 1e20, 1e35])
def test_norms_are_right_where_squares_are_out_of_range(kind, size) -> None:
    """A norm that is kept, or is a measure: rows of any size that float32 holds."""
    rows = vector(9, WIDTH, seed=1)
    large = vector(WIDTH, seed=2).clamp(-2.5, 2.5) * size
    put = Replace(large[None], [2], layer=1)
    specs = [SteeringSpec([put], preserve_norm=True), SteeringSpec([Add(large, layer=1)], preserve_norm=True)]
    if size < EDITED_MOST:
        specs.append(SteeringSpec([put, Add(V, -0.5, relative=True, layer=1, tokens=2)]))
    for steering in specs:
        close(one(steering, rows, kind=kind), edited(steering, Point(1, "resid_post"), rows, PROMPT, LAYERS))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_that_cannot_be_read_is_not_closed(kind) -> None:
    """A projection of infinity less infinity says nothing: the row is an overflow, not one that needs no edit."""
    probe = vector(WIDTH, seed=3).sign() * 3e38
    with pytest.raises(AssertionError, match="overflows at"):
        one(SteeringSpec([AddIf(V, probe, layer=1)]), vector(9, WIDTH, seed=4) * 10, kind=kind)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_projection_of_minus_infinity_is_below_any_threshold_but_none(kind) -> None:
    """A gate stays closed, a feature without a threshold gets its value, whatever else is in the pass."""
    probe, row = torch.full((WIDTH,), 3e38), -vector(1, WIDTH, seed=4).abs() * 100
    feature = SteeringSpec([SAEFeature(probe, V, 2.0, layer=1)])
    closed = SteeringSpec([AddIf(V, probe, layer=1)])
    for many in ([feature], [feature, closed]):
        (found, *others), _, _ = run(many, [row.clone() for _ in many], 1, kind=kind)
        close(found, row + 2 * V)
        assert all(torch.equal(other, row) for other in others)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_norm_leaves_unchanged_rows_bit_for_bit(kind) -> None:
    """Bounds that no row meets: the factor is one exactly, so that both addends of the stream stay."""
    rows, residual = vector(9, WIDTH, seed=1), vector(9, WIDTH, seed=2) * 7
    steering = SteeringSpec([Cap(V, low=-1e6, high=1e6, layer=1)], preserve_norm=True)
    _, hidden, kept = run([steering], [rows], 1, residual.clone(), kind)
    assert torch.equal(hidden, rows)
    assert torch.equal(kept, residual)


# Parts of rows

PARTS, PART = 4, WIDTH // 4


def schemas(*shape: int, shards: int = 1) -> dict[Point, PointSchema]:
    """Rows of one shape at all layers."""
    return {Point(layer, "resid_post"): PointSchema(shape, "float32", shards) for layer in range(LAYERS)}


@pytest.fixture
def parted(monkeypatch) -> None:
    """Rows in these tests have four parts."""
    monkeypatch.setitem(globals(), "SCHEMAS", schemas(PARTS, PART))


@pytest.mark.usefixtures("parted")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0, 2, -1, "each"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_edit_of_a_part_is_the_edit_of_that_part_alone(kind, part, operation) -> None:
    """By each operation's own formula, over the part; in the kernel of each device."""
    steering = spec(operation, PART, seed=3, layers=[1], part=part)
    hold_to_formulas(kind, [steering], 5, True, (4,))


@pytest.mark.usefixtures("parted")
@pytest.mark.parametrize("kind", KINDS)
def test_other_parts_are_left_bit_for_bit(kind) -> None:
    """Whatever the edit reads and writes."""
    rows, added = vector(9, WIDTH, seed=1), vector(PART, seed=2)
    found = one(SteeringSpec([Add(added, layer=1, part=2), Ablate(added, layer=1, part=2)]), rows.clone(), kind=kind)
    others = [place for place in range(WIDTH) if place // PART != 2]
    assert torch.equal(found[:, others], rows[:, others])
    assert not torch.equal(found, rows)


@pytest.mark.usefixtures("parted")
@pytest.mark.parametrize(("width", "part"), [(WIDTH, None), (PART, "each")])
@pytest.mark.parametrize("operation", [*OPERATIONS, "jumprelu"])
def test_an_edit_touches_a_row_once(operation, width, part) -> None:
    """Whatever it is compiled to: two entries for a feature with a threshold, one for each rank, and for each part."""
    edits = spec(operation, width, seed=3, layers=[1, 2], part=part)
    masks = np.array([1, 0, 1, 1, 0], dtype=np.int32)
    assert rows_touched(lowered(edits).configuration, [0, 1, 2], masks) == (6,)
    assert rows_touched(lowered(edits).configuration, [0, 2], masks) == (3,)


def test_an_edit_that_reads_one_head_runs_on_the_rank_that_has_it() -> None:
    """Where heads are split over ranks, a vector of the whole row that reads is refused, and one of a head is not."""
    armed = {point: point.layer for point in schemas(PARTS, PART)}
    options: Any = {
        "armed": armed,
        "schemas": schemas(PARTS, PART, shards=2),
        "num_layers": LAYERS,
        "edits_per_point": 8,
    }
    lower(SteeringSpec([Ablate(vector(PART, seed=1), layer=1, part=3)]), **options)
    with pytest.raises(InvalidSpec, match="no rank has all of one"):
        lower(SteeringSpec([Ablate(vector(WIDTH, seed=1), layer=1)]), **options)


@pytest.mark.usefixtures("parted")
@pytest.mark.parametrize(
    ("edits", "error", "says"),
    [
        ([Add(vector(PART, seed=1), layer=1)], InvalidVector, "give part=, one of 4 or 'each'"),
        ([Add(vector(WIDTH, seed=1), layer=1, part=0)], InvalidVector, f"a part of the rows at .* has {PART}"),
        ([Add(vector(PART, seed=1), layer=1, part=4)], InvalidSpec, "have 4 parts, 0 to 3, or 'each'"),
        ([Add(vector(PART, seed=1), layer=1, part=-5)], InvalidSpec, "have 4 parts"),
        (
            [Add(vector(PART, seed=1), layer=1, part=0, relative=True)],
            InvalidSpec,
            "edits one part, while relative= and preserve_norm= need the",
        ),
        ([Replace(vector(1, WIDTH, seed=1), [0], layer=1, part=0)], InvalidVector, f"at .* has {PART}"),
    ],
)
def test_what_a_part_cannot_take_is_refused(edits, error, says) -> None:
    """With what is expected; nothing is broadcast in silence."""
    with pytest.raises(error, match=says):
        lowered(SteeringSpec(edits))


@pytest.mark.usefixtures("parted")
def test_a_norm_of_whole_rows_is_not_kept_around_a_part() -> None:
    """It would change the others."""
    spec = SteeringSpec(
        [LowRank(vector(1, PART, seed=1), vector(1, PART, seed=2), layer=1, part=0)], preserve_norm=True
    )
    with pytest.raises(InvalidSpec, match="preserve_norm="):
        lowered(spec)


def test_rows_of_one_axis_have_no_parts() -> None:
    """Nor have points whose rows differ."""
    with pytest.raises(InvalidSpec, match=f"rows with several axes, .* are {WIDTH}"):
        lowered(SteeringSpec([Add(vector(WIDTH, seed=1), layer=1, part=0)]))
    mixed = schemas(PARTS, PART) | {Point(0, "resid_post"): PointSchema((2, WIDTH // 2), "float32")}
    armed = {point: point.layer for point in mixed}
    with pytest.raises(InvalidSpec, match="of one shape at all points"):
        lower(
            SteeringSpec([Add(vector(PART, seed=1), layers=[0, 1], part=0)]),
            armed=armed, schemas=mixed, num_layers=LAYERS, edits_per_point=8,
        )  # fmt: skip


@pytest.mark.parametrize("part", [True, "all", 1.5, [0]])
def test_a_part_is_an_index_or_each(part) -> None:
    """Something else is refused when the edit is made."""
    with pytest.raises(InvalidEdit, match="give the index of a part, or 'each'"):
        Add([1.0, 2.0], layer=0, part=part)


def test_a_file_keeps_the_part(tmp_path: Path) -> None:
    """And an edit without one has none when it is read."""
    spec = SteeringSpec([Add([1.0, 2.0], layer=0, part=3), Add([1.0], layer=0, part="each"), Add([1.0], layer=0)])
    read = SteeringSpec.load(spec.save(tmp_path / "spec.safetensors"))
    assert [found.part for found in read.flat()] == [3, "each", None]


def test_an_edit_knows_the_model_of_its_vectors(tmp_path: Path) -> None:
    """Of LayerVectors it is theirs, and stays in copies and files, whose digest does not depend on it."""
    made = LayerVectors({1: [1.0, 2.0]}, model="gpt2")
    edit = Add(made, layer=1)
    assert (edit.model, Add([1.0, 2.0], layer=1).model, Add([1.0, 2.0], layer=1, model="other").model) == (
        "gpt2",
        "",
        "other",
    )
    assert dataclasses.replace(edit, scale=3.0).model == "gpt2"
    assert dataclasses.replace(edit, vector=LayerVectors({1: [1.0, 2.0]}, model="mistral")).model == "mistral"
    assert "model='gpt2'" in repr(edit)
    spec = SteeringSpec([edit, SteeringSpec([Ablate(made, layer=1)])])
    assert spec.sha256 == SteeringSpec([Add([1.0, 2.0], layer=1), SteeringSpec([Ablate([1.0, 2.0], layer=1)])]).sha256
    read = SteeringSpec.load(spec.save(tmp_path / "spec.safetensors"))
    assert [one.model for one in read.of_rows()] == ["gpt2", "gpt2"]
    assert Monitor(made, threshold=0.5, layer=1).model == "gpt2"
    again = Add(LayerVectors({1: [1.0, 2.0]}, model="openai/GPT2"), layer=1)
    mixed = SteeringSpec([edit, Add([1.0, 2.0], layer=1), again])
    read = SteeringSpec.load(mixed.save(tmp_path / "mixed.safetensors"))
    assert [one.model for one in read.of_rows()] == ["gpt2"] * 3
    with pytest.warns(UserWarning, match=r"names no model: its edits are of \['gpt2', 'mistral'\]"):
        SteeringSpec([edit, dataclasses.replace(edit, model="mistral")]).save(tmp_path / "both.safetensors")
    assert AddIf(made, LayerVectors({1: [1.0, 2.0]}, model="openai/gpt2"), threshold=0.0, layer=1).model == "gpt2"
    with pytest.raises(InvalidVector, match=r"of models \['gpt2', 'mistral'\]"):
        AddIf(made, LayerVectors({1: [1.0, 2.0]}, model="mistral"), threshold=0.0, layer=1)
    with pytest.raises(InvalidEdit, match="model=3; give the name"):
        Add(made, layer=1, model=3)
