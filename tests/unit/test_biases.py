"""Biases of logits without a model: what they add up to, which rows of a pass they reach, and what proves it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import batch, some_runtime

from steercap import Add, LogitBias, SteeringSpec
from steercap.core.biases import bias_masks, combined, entries_put
from steercap.core.messages import (
    Call,
    Configure,
    GetSteeringRecord,
    Owner,
    Placed,
    SteeringRecord,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import Plan
from steercap.core.program import SteeringPlan
from steercap.core.receipt import check_edits
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.core.tokens import selected
from steercap.errors import (
    EmptySelection,
    InvalidEdit,
    InvalidSelection,
    InvalidSpec,
    InvalidVector,
    SteeringNotApplied,
    TooManyEdits,
)
from steercap.requests.job import CompiledSteering
from steercap.steering.lowering import biased_by, lower, scopes_of

VOCABULARY, WIDTH, PROMPT, LIMIT = 40, 8, 5, 12
POINT = Point(0, "resid_post")
SCOPES = ["all", "prompt", "generated", "last_prompt", slice(-2, None, 2), [-1, 7], 6]

numbers = st.floats(-100, 100, width=32)
biases = st.builds(
    LogitBias,
    st.dictionaries(st.integers(0, VOCABULARY - 1), numbers, min_size=1, max_size=6),
    tokens=st.sampled_from(SCOPES),
)
specs = st.lists(biases, min_size=1, max_size=4).map(SteeringSpec)


def lowered(spec: SteeringSpec, vocabulary: int | None = VOCABULARY):
    """A spec compiled for a model of one layer."""
    schema = PointSchema((WIDTH,), "float32", changes_kv=True)
    return lower(
        spec, armed={POINT: 0}, schemas={POINT: schema}, num_layers=1, edits_per_point=4, vocabulary=vocabulary
    )


def expected(spec: SteeringSpec, position: int) -> torch.Tensor:
    """What a spec adds to the logits of a position, token by token."""
    found = torch.zeros(VOCABULARY, dtype=torch.float64)
    for bias in spec.flat():
        if selected(bias.selection.ranges(PROMPT, LIMIT), LIMIT)[position]:
            for token, value in dict(bias.bias).items():
                found[token] += value
    return found


class Bench:
    """A worker, and requests that it is to bias."""

    def __init__(self, spec: SteeringSpec, names: tuple[str, ...] = ("a",)) -> None:
        self.ready = lowered(spec)
        self.runtime = some_runtime(points=1, width=WIDTH)
        configuration = self.ready.configuration
        self.answer(Configure((), (Placed(0, configuration, ()),)))
        change = CompiledSteering(
            self.ready, *scopes_of(self.ready, PROMPT, LIMIT), biased_by(self.ready, PROMPT, LIMIT)
        )
        self.plans = {}
        for name in names:
            steering = change.placed({configuration.digest: 0}, 0)
            self.plans[name] = Plan(name, PROMPT, LIMIT, steering=steering)
            self.runtime.register(name, self.plans[name].encode(), 0)

    def answer(self, question):
        return decode_answer(self.runtime.answer(encode(Call((), question))))

    def lay_out(self, names, starts, counts, positions=None) -> None:
        """Begin a pass over these tokens; `positions` are those that the device says, if others."""
        real = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        said = real if positions is None else np.asarray(positions)
        self.runtime.begin_step(batch("host", names, starts, counts, np.zeros(len(real)), said))
        self.runtime.end_step()

    def sample(self, names, counts, rows, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Put biases to random logits of the last `rows` tokens of each request; what they were, and what they are."""
        stops = np.cumsum(counts)
        indices = np.concatenate([np.arange(stop - many, stop) for stop, many in zip(stops, rows, strict=True)])
        logits = torch.randn(len(indices), VOCABULARY).to(dtype)
        before = logits.clone()
        return before, self.runtime.biasing.put(logits, names, np.asarray(rows), torch.from_numpy(indices))

    def settle(self, name: str, total: int):
        """The receipt of a request."""
        plan = self.plans[name]
        found = self.answer(GetSteeringRecord((Wanted(Owner(name, 0), total),), ended=(False,)))
        return check_edits(name, plan, self.ready.configuration, total, [found.records])


@given(specs)
def test_biases_of_a_token_add_up(spec) -> None:
    """At every position: the sum over the biases whose scope holds it, and nothing before the last prompt token."""
    ready = lowered(spec)
    try:
        scopes = biased_by(ready, PROMPT, LIMIT)
    except EmptySelection:
        return
    masks = bias_masks(scopes, PROMPT, LIMIT)
    assert not masks[: PROMPT - 1].any()
    total = 0
    for position in range(PROMPT - 1, LIMIT):
        ids, values = combined(ready.configuration.biases, int(masks[position]))
        found = torch.zeros(VOCABULARY, dtype=torch.float64)
        found[ids.copy()] = torch.from_numpy(values.astype(np.float64))
        torch.testing.assert_close(found, expected(spec, position), atol=1e-4, rtol=1e-6)
        total += len(ids)
    assert entries_put(ready.configuration.biases, masks[masks != 0]) == total


@settings(deadline=None)
@given(specs, st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_the_rows_of_a_pass_get_what_their_positions_say(spec, others, drafts, half) -> None:
    """Among requests that have no bias, of whatever drafts; the rows of the others are left as they are, bit for bit."""
    names = ("plain", "a", *(f"plain{number}" for number in range(others)))
    try:
        bench = Bench(spec)
    except EmptySelection:
        return
    dtype = torch.bfloat16 if half else torch.float32
    prompts, steps = [2, PROMPT, *[1] * others], [1, *[1 + drafts] * (1 + others)]
    bench.lay_out(names, [0] * len(names), prompts)
    before, after = bench.sample(names, prompts, [1] * len(names), dtype)
    firsts = [PROMPT - 1]
    changes = [(before, after, 1)]
    for start in (PROMPT, PROMPT + 1):  # what was drafted is computed again
        bench.lay_out(names, [start] * len(names), steps)
        changes.append((*bench.sample(names, steps, steps, dtype), 1))
        firsts.append(start)
    for (before, after, first), start in zip(changes, firsts, strict=True):
        rows = range(first, first + (1 if start < PROMPT else 1 + drafts))
        for row in range(len(before)):
            change = expected(spec, start + row - first) if row in rows else torch.zeros(VOCABULARY)
            wanted = before[row].double() + change
            torch.testing.assert_close(after[row].double(), wanted, atol=1e-3, rtol=1e-6)
            if not change.any():
                assert torch.equal(after[row].to(dtype), before[row])
    receipt = bench.settle("a", PROMPT + 2)
    for bias, rows in zip(spec.flat(), receipt.rows, strict=True):
        assert rows == selected(bias.selection.ranges(PROMPT, LIMIT), LIMIT)[PROMPT - 1 : PROMPT + 2].sum()


def test_a_pass_without_biases_costs_nothing() -> None:
    """Neither does a pass of requests none of whose tokens a scope holds: the very tensor comes back."""
    bench = Bench(SteeringSpec([LogitBias({3: 1.0}, tokens="last_prompt")]))
    for names, starts in ((["plain"], [0]), (["a"], [PROMPT]), (["a", "plain"], [2, 0])):
        bench.lay_out(names, starts, [1] * len(names))
        logits = torch.randn(len(names), VOCABULARY, dtype=torch.bfloat16)
        assert (
            bench.runtime.biasing.put(logits, names, np.ones(len(names), dtype=np.int64), torch.arange(len(names)))
            is logits
        )
    bench.runtime.end_requests(["a"])
    assert not bench.runtime.biasing


def test_a_bias_that_did_not_happen_is_noticed() -> None:
    """Logits that no hook saw, those of another pass, and rows of another position."""
    spec = SteeringSpec([LogitBias({3: 1.0, 4: 2.0})])

    bench = Bench(spec)
    bench.lay_out(["a"], [0], [PROMPT])
    with pytest.raises(
        SteeringNotApplied, match="2 logits at 1 positions should have been biased, and a worker biased 0"
    ):
        bench.settle("a", PROMPT)

    bench = Bench(spec)
    bench.lay_out(["a"], [0], [PROMPT])
    bench.sample(["a"], [PROMPT], [1])
    bench.settle("a", PROMPT)
    bench.lay_out(["a"], [PROMPT], [2])  # two drafts, of which one is rejected
    bench.sample(["a"], [2], [2])
    bench.lay_out(["a"], [PROMPT + 1], [1])  # sampled from as it is
    bench.lay_out(["a"], [PROMPT + 2], [1])
    bench.sample(["a"], [1], [1])
    with pytest.raises(SteeringNotApplied, match="tokens were sampled from logits without their biases"):
        bench.settle("a", PROMPT + 3)

    bench = Bench(spec)
    bench.lay_out(["a", "plain"], [0, 0], [PROMPT, 1])
    bench.sample(["plain", "a"], [1, PROMPT], [1, 1])
    with pytest.raises(SteeringNotApplied, match="do not match the pass"):
        bench.settle("a", PROMPT)

    bench = Bench(spec)
    bench.lay_out(["a"], [0], [PROMPT], positions=[0, 1, 2, 3, 7])
    bench.sample(["a"], [PROMPT], [1])
    with pytest.raises(SteeringNotApplied, match="the logits of position 7 were biased as those of 4"):
        bench.settle("a", PROMPT)

    bench = Bench(spec)
    bench.lay_out(["a"], [0], [PROMPT])
    bench.runtime.biasing.refuse("some other rank samples")
    with pytest.raises(SteeringNotApplied, match="some other rank samples"):
        bench.settle("a", PROMPT)


def test_the_failure_of_one_does_not_reach_others_of_the_same_bias() -> None:
    """They share a slot, and no key or value."""
    bench = Bench(SteeringSpec([LogitBias({3: 1.0})]), names=("a", "b"))
    bench.lay_out(["a", "b"], [0, 0], [PROMPT, PROMPT], positions=[0, 1, 2, 3, 9, 0, 1, 2, 3, 4])
    bench.sample(["a", "b"], [PROMPT, PROMPT], [1, 1])
    assert bench.settle("b", PROMPT).rows == (1,)
    with pytest.raises(SteeringNotApplied, match="position 9"):
        bench.settle("a", PROMPT)


def test_large_biases_are_written_out_once(monkeypatch) -> None:
    """One row of many entries for several rows: the same sums."""
    monkeypatch.setattr("steercap.worker.biasing._LARGE", 4)
    small, large = {1: 2.0, 2: 3.0}, dict.fromkeys(range(10), 1.5)
    spec = SteeringSpec([LogitBias(small), LogitBias(large, tokens="generated")])
    bench = Bench(spec, names=("a", "b", "c"))
    names = ["a", "b", "c"]
    bench.lay_out(names, [0, 0, 0], [PROMPT] * 3)
    bench.sample(names, [PROMPT] * 3, [1, 1, 1])
    bench.lay_out(names, [PROMPT] * 3, [1, 2, 1])
    before, after = bench.sample(names, [1, 2, 1], [1, 2, 1])
    change = expected(spec, PROMPT).float()
    torch.testing.assert_close(after, before + change)
    assert bench.settle("b", PROMPT + 1).rows == (2, 1)


def test_workers_that_make_logits_must_all_have_biased_them() -> None:
    """A later stage alone makes logits; both its ranks do, and no rank of another counts."""
    spec = SteeringSpec([LogitBias({3: 1.0}), Add(torch.ones(WIDTH), layer=0, tokens="generated")])
    ready = lowered(spec)
    change = CompiledSteering(ready, *scopes_of(ready, PROMPT, LIMIT), biased_by(ready, PROMPT, LIMIT))
    plan = Plan("a", PROMPT, LIMIT, steering=change.placed({ready.digest: 0}, 0))
    assert isinstance(plan.steering, SteeringPlan)
    bits = np.packbits(np.arange(PROMPT) == PROMPT - 1).tobytes()
    all_computed = np.packbits(np.ones(PROMPT, dtype=np.bool_)).tobytes()

    def record(*, primary: bool, biased: bytes | None, entries: int) -> SteeringRecord:
        return SteeringRecord(Owner("a", 0), all_computed, (0, 0), None, primary, biased, entries)

    first = record(primary=True, biased=None, entries=0)
    last, second = record(primary=True, biased=bits, entries=1), record(primary=False, biased=bits, entries=1)
    assert check_edits("a", plan, ready.configuration, PROMPT, [[first, last, second]]).rows == (1, 0)
    none = record(primary=False, biased=bytes(len(bits)), entries=0)
    for wrong in ([first, last, none], [first]):
        with pytest.raises(SteeringNotApplied, match="logits"):
            check_edits("a", plan, ready.configuration, PROMPT, [wrong])


@pytest.mark.parametrize(
    ("total", "bits", "rows", "said"),
    [
        (PROMPT, PROMPT, (5, 4), r"edit 2 of 2 at resid_post: 0 was to change 5 rows, over .*, and changed 4"),
        (PROMPT, PROMPT, (5,), "the workers differ in which tokens they computed, or in how many edits they know"),
        (PROMPT, 9, (5, 5), r"the model read 5 tokens, and worker 0 reports edits for 16 \(in eights\)"),
        (LIMIT + 1, LIMIT + 1, (5, 5), "the model read 13 tokens, and edits were planned for 12 at most"),
    ],
)
def test_a_difference_names_the_edit_and_its_points(total: int, bits: int, rows: tuple[int, ...], said: str) -> None:
    """Which request, which edit, where, what was to happen and what did; and what to do then."""
    ready = lowered(SteeringSpec([Add(torch.ones(WIDTH), layer=0), Add(torch.ones(WIDTH), layer=0, tokens="all")]))
    change = CompiledSteering(ready, *scopes_of(ready, PROMPT, LIMIT), biased_by(ready, PROMPT, LIMIT))
    plan = Plan("a", PROMPT, LIMIT, steering=change.placed({ready.digest: 0}, 0))
    computed = np.packbits(np.ones(bits, dtype=np.bool_)).tobytes()
    record = SteeringRecord(Owner("a", 0), computed, rows, None, primary=True, biased=None, entries=0)
    with pytest.raises(SteeringNotApplied, match=rf"^a: {said}; its text is withheld\. Repeat the call: .* report it$"):
        check_edits("a", plan, ready.configuration, total, [[record]], points=[POINT])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({}, InvalidEdit, "changes nothing"),
        (torch.zeros(4), InvalidEdit, "changes nothing"),
        ({-1: 1.0}, InvalidEdit, "whole numbers from 0"),
        ({1.5: 1.0}, InvalidEdit, "whole numbers from 0"),
        ({"a": 1.0}, InvalidEdit, "whole numbers from 0"),
        ({True: 1.0}, InvalidEdit, "whole numbers from 0"),
        ({2**31: 1.0}, InvalidEdit, "whole numbers from 0"),
        ({1: float("nan")}, InvalidEdit, "float32"),
        ({1: -float("inf")}, InvalidEdit, "float32"),
        ({1: 1e39}, InvalidEdit, "float32"),
        ({1: "1"}, InvalidEdit, "float32"),
        (torch.tensor([1.0, float("nan")]), InvalidVector, "NaN"),
        (torch.ones(2, 2), InvalidVector, "vocabulary"),
        (None, InvalidVector, "real numbers"),
        ("abc", InvalidVector, "real numbers"),
        (3.0, InvalidVector, "vocabulary"),
    ],
)
def test_what_is_no_bias_is_refused(wrong, error, message) -> None:
    """When it is made, by name."""
    with pytest.raises(error, match=message):
        LogitBias(wrong)


def test_what_does_not_fit_is_refused() -> None:
    """Layers and sites, unknown scopes, tokens that the model lacks, sums beyond float32, too much of it."""
    with pytest.raises(TypeError):
        LogitBias({1: 1.0}, layer=3)
    with pytest.raises(InvalidSelection):
        LogitBias({1: 1.0}, tokens="sometimes")
    for bias in (LogitBias({VOCABULARY: 1.0}), LogitBias([1.0] * (VOCABULARY - 1))):
        with pytest.raises(InvalidSpec, match="vocabulary"):
            lowered(SteeringSpec([bias]))
    with pytest.raises(InvalidSpec, match="add up"):
        lowered(SteeringSpec([LogitBias({1: 3e38}), LogitBias({1: 3e38})]))
    with pytest.raises(TooManyEdits, match="1,048,576"):
        lowered(SteeringSpec([LogitBias(torch.ones(600_000))] * 2), vocabulary=None)
    with pytest.raises(TooManyEdits, match="tokens="):
        lowered(SteeringSpec([LogitBias({1: 1.0}, tokens=[number]) for number in range(32)]))
    with pytest.raises(InvalidSpec, match="preserve_norm"):
        SteeringSpec([LogitBias({1: 1.0})], preserve_norm=True)
    for tokens in (0, slice(0, PROMPT - 1)):
        with pytest.raises(EmptySelection, match="logits are made"):
            biased_by(lowered(SteeringSpec([LogitBias({1: 1.0}, tokens=tokens)])), PROMPT, LIMIT)


def test_a_bias_is_what_it_was_when_it_was_made(tmp_path) -> None:
    """Later changes of what was given, or of what it shows, do not reach it; neither does a file."""
    given, array = {3: 1.0, 1: 2.0}, torch.arange(4.0)
    spec = SteeringSpec([LogitBias(given), LogitBias(array, tokens=["last_prompt", slice(7, None)])])
    before = lowered(spec, None)
    given[3] = array[2] = 9.0
    spec.edits[0].bias[3] = spec.edits[1].bias[1] = 9.0
    loaded = SteeringSpec.load(spec.save(tmp_path / "biases.safetensors"))
    for one in (spec, loaded):
        after = lowered(one, None)
        assert (after.digest, after.biased) == (before.digest, before.biased)
    assert repr(spec.edits[0]) == "LogitBias({1: 2.0, 3: 1.0}, tokens='all')"


def test_keys_and_values_depend_on_edits_alone() -> None:
    """A bias changes the digest of a spec, and neither what its prefix is known by nor whether it has a salt."""
    change, bias = Add(torch.ones(WIDTH), layer=0), LogitBias({1: 1.0})
    alone, both, other = (
        lowered(SteeringSpec(parts)) for parts in ([change], [bias, change], [change, LogitBias({1: 2.0})])
    )
    assert len({alone.digest, both.digest, other.digest}) == 3
    assert lowered(SteeringSpec([bias])).changes_kv is False
    names = {
        CompiledSteering(one, *scopes_of(one, PROMPT, LIMIT), biased_by(one, PROMPT, LIMIT))
        .placed({one.digest: 0}, 0)
        .identity
        for one in (alone, other)
    }
    assert len(names) == 1


def test_files_with_biases_alone_arm_no_site(tmp_path) -> None:
    """The command line reads sites off edits of rows, shows biases, and looks at their tokens when the model is loaded."""
    from steercap.cli.inspection import inspected
    from steercap.cli.parsing import sites_of

    spec = SteeringSpec([LogitBias({3: 1.0}), LogitBias(torch.ones(9))])
    assert sites_of(spec) == ()
    assert sites_of(spec + SteeringSpec([Add(torch.ones(4), layer=0, site="mlp_out")])) == ("mlp_out",)
    shown = str(inspected(spec.save(tmp_path / "biases.safetensors")))
    assert "LogitBias({3: 1.0}, tokens='all')" in shown
