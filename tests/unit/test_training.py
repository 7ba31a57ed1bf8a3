"""Training by gradient: the formula that is differentiated, what is learned from, and the steps."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_calls import call
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from steercap import (
    Ablate,
    Add,
    AddIf,
    Cap,
    LogitBias,
    LowRank,
    Progress,
    Replace,
    SAEFeature,
    SetProjection,
    SteeringSpec,
)
from steercap.architectures.sites import SITES
from steercap.core.spec import Point
from steercap.core.tokens import TokenSelection
from steercap.errors import (
    EmptySelection,
    InvalidFile,
    InvalidPrompt,
    InvalidSelection,
    InvalidSetting,
    InvalidSpec,
    InvalidVector,
    ModelNotLoaded,
    RunDiffers,
    TrainingDiverged,
    UnknownName,
    UnsupportedModel,
)
from steercap.files.native import read_header
from steercap.lab.training import (
    OBJECTIVES,
    Example,
    HookedModel,
    Preference,
    Prompted,
    TrainableAdd,
    TrainableLowRank,
    losses_of,
    train,
    train_many,
)
from steercap.lab.training.batches import EncodedExamples, Picked, Steps, collated, padded
from steercap.lab.training.examples import ExampleTokens, split, tokens_of
from steercap.lab.training.folder import FOLDER, TrainingDefinition
from steercap.lab.training.formula import Doses, changed, gate, stacked
from steercap.lab.training.objectives import BiPO, Distillation, Likelihood, RePS, objective_of
from steercap.lab.training.rates import RATES_FOLDER, RatesDefinition
from steercap.lab.training.settings import Penalties, TrainingSettings
from steercap.lab.training.steered import SteeredTraits
from steercap.lab.training.trainable import TrainableSpec
from steercap.steering import DirectionSet, LayerVectors
from steercap.steering.edits import Edit
from steercap.testing import tiny_checkpoint
from steercap.testing.edits import edited
from steercap.testing.reference import Reference

WIDTH = 128
ALL = TokenSelection.parse("all")


@pytest.fixture(scope="module")
def model() -> HookedModel:
    """A tiny model, in float32."""
    return HookedModel(tiny_checkpoint("qwen3"))


@pytest.fixture(scope="module")
def wide() -> HookedModel:
    """One in float64, for finite differences; norms of other families are computed in float32 all the same."""
    return HookedModel(tiny_checkpoint("gpt2"), torch.float64)


@pytest.mark.parametrize(
    ("family", "changes", "computes"),
    [
        ("gemma2", {"attn_logit_softcapping": 5.0}, "eager"),
        ("gemma2", {"attn_logit_softcapping": 1e4}, "eager"),  # too high to be seen in a short text
        ("gemma2", {"attn_logit_softcapping": None}, "sdpa"),
        ("vaultgemma", {"attn_logit_softcapping": 5.0}, "eager"),
        ("gemma3", {}, "sdpa"),
        ("falcon", {}, "sdpa"),  # whose class cannot change its implementation
        ("llama", {}, "sdpa"),
    ],
)
def test_attention_leaves_nothing_out(family, changes, computes) -> None:
    """Losses of random texts are those of transformers' eager attention; sdpa is kept where it is right, and refused where
    it was asked for and is not.
    """
    path = tiny_checkpoint(family, **changes)
    hooked = HookedModel(path)
    if not hooked.model._supports_sdpa:  # Gemma 2's class in transformers 5.24, with and without a cap
        computes = "eager"
    assert hooked.model.config.get_text_config()._attn_implementation == computes
    eager = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for seed in range(5):
        ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            losses = [float(model(input_ids=ids, labels=ids).loss) for model in (hooked.model, eager)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    if computes == "sdpa":
        assert HookedModel(path, attn_implementation="sdpa").model.config._attn_implementation == "sdpa"
    else:
        reason = "the loss of a short text is" if hooked.model._supports_sdpa else "does not support"
        with pytest.raises(UnsupportedModel, match=rf"attn_implementation='sdpa' of .*: .*{reason}"):
            HookedModel(path, attn_implementation="sdpa")


def test_an_implementation_of_attention_that_there_is_not_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"attn_implementation='fast' of .*tiny-llama.*not supported"):
        HookedModel(tiny_checkpoint("llama"), attn_implementation="fast")


def test_losses_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """What cannot be compared is not taken for right; the eager implementation itself is loaded as it is."""
    broken = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"))
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    broken.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"in torch.float32: the losses of a short text are not finite"):
        HookedModel(tmp_path)
    assert HookedModel(tmp_path, attn_implementation="eager").path == str(tmp_path)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Transformers' own error is an OSError, which no `except SteercapError` takes."""
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelNotLoaded, match=r"no configuration of a model at .*model'"):
        HookedModel(tmp_path / "model")


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_edits(width: int) -> dict[str, Edit]:
    """An edit of each kind, each of which does something to rows of length about sqrt(width)."""
    v, u, w = (drawn(width, seed=seed) for seed in (1, 2, 3))
    at = {"layer": 1}
    return {
        "add": Add(v, scale=0.7, **at),
        "add relative": Add(v, scale=0.3, relative=True, **at),
        "add_if": AddIf(v, u, threshold=0.2, bias=0.1, **at),
        "add_if relative": AddIf(v, u, threshold=0.2, scale=0.4, relative=True, **at),
        "low_rank": LowRank(drawn(3, width, seed=4), drawn(3, width, seed=5), bias=drawn(3, seed=6), scale=0.1, **at),
        "ablate": Ablate(v, keep=0.3, **at),
        "cap": Cap(v, low=-0.2, high=0.1, **at),
        "set_projection": SetProjection(v, value=1.5, **at),
        "sae_feature": SAEFeature(u / width, w, value=0.8, bias=0.05, decoder_bias=v / width, **at),
        "sae_feature jumprelu": SAEFeature(u, w, value=0.8, threshold=0.5, **at),
    }


EDITS = some_edits(WIDTH)
#: Of each kind every vector and number that a gradient is taken of. A gate's, whose gradient is stated, are tried below.
SMOOTH = {
    "add": ("vector", "scale"),
    "add relative": ("vector", "scale"),
    "add_if": ("vector", "scale"),
    "add_if relative": ("vector", "scale"),
    "low_rank": ("read", "write", "bias", "scale"),
    "ablate": ("vector", "keep"),
    "cap": ("vector", "low", "high"),
    "set_projection": ("vector", "value"),
    "sae_feature": ("encoder", "decoder", "value", "bias", "decoder_bias"),
    "sae_feature jumprelu": ("decoder", "value"),
}


def edit_rows(spec: TrainableSpec, rows: torch.Tensor, doses: Doses = Doses(), gate_width: float = 1.0) -> torch.Tensor:
    """Rows [n, t, width] after the one edit of a spec."""
    n, t, _ = rows.shape
    parts = stacked([spec.lowered()[0]])
    scope, owners = torch.ones(n, t, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    return changed(rows, parts, owners=owners, scope=scope, doses=doses, gate_width=gate_width)


@pytest.mark.parametrize("kind", EDITS)
def test_what_is_differentiated_is_what_the_edit_says(kind) -> None:
    """Of each kind, rows are those of the operation's own formula in float64, to rounding of its float32 vectors."""
    rows = drawn(2, 5, WIDTH, seed=9).double()
    found = edit_rows(TrainableSpec(SteeringSpec([EDITS[kind]]), dtype=torch.float64), rows)
    for mine, before in zip(found, rows, strict=True):
        wanted = edited(SteeringSpec([EDITS[kind]]), Point(1, "resid_post"), before, 5, 4)
        assert (mine - wanted).norm() < 1e-6 * wanted.norm()
    assert not torch.equal(found, rows)


@pytest.mark.parametrize("kind", EDITS)
def test_gradients_are_those_of_finite_differences(kind) -> None:
    """In float64, of every vector and number of every kind of edit, and of the rows."""
    small = some_edits(6)[kind]
    rows = drawn(2, 4, 6, seed=8).double().requires_grad_()
    spec = TrainableSpec(SteeringSpec([small]), SMOOTH[kind], torch.float64)
    assert {name.split("/")[1] for name in spec.values} == set(SMOOTH[kind])

    def after(rows: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(Edited(spec), dict(zip(names, values, strict=True)), (rows,))

    names = [f"spec.{name}" for name, _ in spec.named_parameters()]
    values = [value.detach().clone().requires_grad_() for value in spec.parameters()]
    assert torch.autograd.gradcheck(after, (rows, *values), eps=1e-6, atol=1e-7)


class Edited(torch.nn.Module):
    """An edit of rows, as a module, so that its parameters can be replaced."""

    def __init__(self, spec: TrainableSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return edit_rows(self.spec, rows)


def test_a_trained_gate_has_the_gradient_of_a_sigmoid() -> None:
    """Forward it is hard; the gradient of probe, bias and threshold is that of sigmoid((p - threshold) / width)."""
    width, rows, weights = 0.7, drawn(2, 4, 6, seed=8).double(), drawn(2, 4, 6, seed=7).double()
    edit = some_edits(6)["add_if"]
    spec = TrainableSpec(SteeringSpec([edit]), ["probe", "bias", "threshold"], torch.float64)
    (edit_rows(spec, rows, gate_width=width) * weights).sum().backward()

    def soft(probe: torch.Tensor, bias: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        opened = torch.sigmoid((rows @ probe + bias - threshold) / width)
        return (opened[..., None] * edit.vector.double() * weights).sum()

    values = [spec.values[f"0/{name}"].detach().clone().requires_grad_() for name in ("probe", "bias", "threshold")]
    wanted = torch.autograd.grad(soft(*values), values)
    for name, gradient in zip(("probe", "bias", "threshold"), wanted, strict=True):
        torch.testing.assert_close(spec.values[f"0/{name}"].grad, gradient)
    hard = edit_rows(spec, rows, gate_width=width)
    p = rows @ edit.probe.double() + edit.bias
    assert (((hard - rows).norm(dim=-1) > 1e-6) == (p > edit.threshold)).all()


def test_a_gate_that_is_not_trained_gives_no_gradient() -> None:
    """Behind a fixed gate the vector alone is trained, and rows that are left alone give it nothing."""
    rows = drawn(1, 8, 6, seed=8)
    edit = some_edits(6)["add_if"]
    spec = TrainableSpec(SteeringSpec([edit]))
    assert list(spec.values) == ["0/vector"]
    edit_rows(spec, rows).sum().backward()
    opened = ((rows @ edit.probe + edit.bias) > edit.threshold).sum()
    torch.testing.assert_close(spec.values["0/vector"].grad, torch.full((6,), float(opened)))
    assert gate(torch.zeros(1, 1, requires_grad=True), 0.5, 0.0).requires_grad is False


def test_doses_multiply_and_null() -> None:
    """A factor multiplies the edit of its sequence, 0 leaves it bit for bit; nulling takes a positive share away."""
    rows = drawn(3, 4, 6, seed=8)
    spec = TrainableSpec(SteeringSpec([some_edits(6)["add"]]))
    whole = edit_rows(spec, rows) - rows
    dosed = edit_rows(spec, rows, Doses(torch.tensor([0.0, -1.0, 2.0])))
    assert torch.equal(dosed[0], rows[0])
    torch.testing.assert_close(dosed[1] - rows[1], -whole[1])
    torch.testing.assert_close(dosed[2] - rows[2], 2 * whole[2])
    direction = spec.values["0/vector"] / spec.values["0/vector"].norm()
    nulled = edit_rows(spec, rows, Doses(nulled=torch.tensor([True, True, False])))
    torch.testing.assert_close((nulled @ direction)[:2], (rows @ direction)[:2].clamp(max=0), atol=1e-5, rtol=0)
    torch.testing.assert_close(nulled[2], rows[2] + whole[2])


def tried(model: HookedModel, spec: SteeringSpec, tokens: Sequence[ExampleTokens]) -> list[torch.Tensor]:
    """Logits where responses are predicted, of each sequence."""
    module = SteeredTraits(model, [TrainableSpec(spec, dtype=model.dtype)], OBJECTIVES["likelihood"], Penalties(), 1.0)
    batch = padded(tokens, module.selections, torch.zeros(len(tokens), dtype=torch.int64), torch.device("cpu"))
    with torch.no_grad(), module.hooked():
        return list(module.logits(batch).split([one.inputs - one.prompt_len + 1 for one in tokens]))


#: Sequences of different lengths, so that all but one are padded.
SEQUENCES = (
    ExampleTokens(tuple(range(40, 61)), 7),
    ExampleTokens(tuple(range(80, 90)), 3),
    ExampleTokens(tuple(range(5, 35)), 29),
)


@pytest.mark.parametrize("tokens", ["all", "prompt", "generated", slice(-3, None, 2), [0, -1]])
def test_the_model_is_steered_as_the_reference_is(model, tokens) -> None:
    """Several edits, layers and scopes, norms kept, sequences padded: the rows that logits are made of are those of the
    reference, which is what engines are compared with.
    """
    scope = {"tokens": tokens}
    first = SteeringSpec([replace(EDITS["low_rank"], **scope), replace(EDITS["cap"], **scope)], preserve_norm=True)
    spec = SteeringSpec([Add(drawn(WIDTH, seed=3), layers=[0, 2], site="mlp_out", **scope), first, EDITS["add_if"]])
    found = tried(model, spec, SEQUENCES[:2])
    reference = Reference(tiny_checkpoint("qwen3"))
    head = model.model.get_output_embeddings()
    for one, logits in zip(SEQUENCES, found, strict=False):
        point = Point(3, "final_norm")
        rows = reference.rows(one.ids[:-1], [point], steering=spec, prompt_len=one.prompt_len)[point]
        torch.testing.assert_close(logits, head(rows[one.prompt_len - 1 :]).detach(), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    "site",
    ["resid_pre", "attn_in", "q", "k", "v", "z", "attn_out", "resid_mid", "mlp_in", "neurons", "mlp_out", "resid_post"],
)
def test_gradients_reach_edits_at_every_site(wide, site) -> None:
    """At each site, below another edit, the gradient of a loss is that of finite differences."""
    rows: list[torch.Tensor] = []
    from contextlib import ExitStack

    with ExitStack() as hooks, torch.no_grad():
        wide.visit(hooks, [(Point(2, site), lambda hidden: rows.append(hidden.reshape(1, 4, -1)))])
        wide.model(input_ids=torch.tensor([[1, 2, 3, 4]]), use_cache=False)
    width = rows[0].shape[-1]
    spec = SteeringSpec(
        [
            LowRank(drawn(2, WIDTH, seed=1, scale=0.1), drawn(2, WIDTH, seed=2), layer=1),
            LowRank(drawn(2, width, seed=3, scale=0.1), drawn(2, width, seed=4, scale=0.3), layer=2, site=site),
            Add(drawn(WIDTH, seed=5, scale=0.3), layer=3),
        ]
    )
    trainable = TrainableSpec(spec, dtype=torch.float64)
    module = SteeredTraits(wide, [trainable], OBJECTIVES["likelihood"], Penalties(), 1.0)
    batch = collated([(Picked(0, 0, None), (one,)) for one in SEQUENCES[:2]], module.selections, torch.device("cpu"))
    loss, _ = module(batch, 2)
    loss.backward()
    for key, value in trainable.values.items():
        along = drawn(*value.shape, seed=11).double()
        step = 1e-5
        with torch.no_grad():
            sides = []
            for sign in (1, -1):
                value.add_(sign * step * along)
                sides.append(float(module(batch, 2)[0]))
                value.sub_(sign * step * along)
        slope = (sides[0] - sides[1]) / (2 * step)
        assert float((value.grad * along).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-9), key


def test_the_likelihood_is_that_computed_by_hand(model) -> None:
    """-1/|y| sum of log p over the response's tokens alone, from the whole model's own logits."""
    spec = SteeringSpec([Add(torch.zeros(WIDTH), layer=1)])
    module = SteeredTraits(model, [TrainableSpec(spec)], OBJECTIVES["likelihood"], Penalties(), 1.0)
    found = [(Picked(0, 0, None), (one,)) for one in SEQUENCES]
    losses = module.losses(collated(found, module.selections, torch.device("cpu")))
    for one, loss in zip(SEQUENCES, losses, strict=True):
        with torch.no_grad():
            logits = model.model(input_ids=torch.tensor([one.ids]), use_cache=False).logits[0]
        each = [
            -math.log(logits[at - 1].double().softmax(-1)[one.ids[at]]) for at in range(one.prompt_len, len(one.ids))
        ]
        assert float(loss) == pytest.approx(sum(each) / len(each), rel=1e-5)


def test_preferences_are_those_computed_by_hand(model) -> None:
    """BiPO and RePS, from log probabilities of each response by itself."""
    chosen, rejected, vector = SEQUENCES[0], replace_end(SEQUENCES[0]), drawn(WIDTH, seed=3)

    def log_p(one: ExampleTokens, edit: SteeringSpec | None) -> float:
        logits = tried(model, edit or SteeringSpec([Add(vector, layer=1, scale=0)]), [one])[0]
        return float(logits.log_softmax(-1).gather(1, torch.tensor(one.ids[one.prompt_len :])[:, None]).sum())

    sides = {d: SteeringSpec([Add(vector, layer=1, scale=d)]) for d in (1.0, -1.0, 2.0)}
    gains = {
        d: (log_p(chosen, sides[d]) - log_p(chosen, None)) - (log_p(rejected, sides[d]) - log_p(rejected, None))
        for d in (1.0, -1.0)
    }
    wanted = {d: -math.log(1 / (1 + math.exp(-d * 0.3 * gains[d]))) for d in gains}
    assert loss_of(model, BiPO(beta=0.3), (chosen, rejected), vector, 0.7) == pytest.approx(wanted[1.0], rel=1e-4)
    assert loss_of(model, BiPO(beta=0.3), (chosen, rejected), vector, 0.2) == pytest.approx(wanted[-1.0], rel=1e-4)
    assert loss_of(model, BiPO(beta=0.3), (chosen, rejected), vector, None) == pytest.approx(
        sum(wanted.values()) / 2, rel=1e-4
    )

    (c, r), (nc, nr) = [len(one.ids) - one.prompt_len for one in (chosen, rejected)], [0.0, 0.0]
    above = SteeringSpec([Cap(vector, high=0.0, layer=1)])  # what nulling is: a positive projection becomes 0
    nc, nr = log_p(chosen, above) / c, log_p(rejected, above) / r
    up, down = (
        max(one, 1.0)
        for one in (log_p(rejected, None) - log_p(chosen, None), log_p(chosen, None) - log_p(rejected, None))
    )
    plus = up * log_p(chosen, sides[2.0]) / c - log_p(rejected, sides[2.0]) / r
    minus = down * nr - nc
    by_hand = sum(math.log1p(math.exp(-one)) for one in (plus, minus))
    assert loss_of(model, RePS(factors=(1.0, 2.0)), (chosen, rejected), vector, 0.9) == pytest.approx(by_hand, rel=1e-4)


def replace_end(one: ExampleTokens) -> ExampleTokens:
    """Another, shorter response to the same prompt."""
    return ExampleTokens((*one.ids[: one.prompt_len], 100, 101, 7), one.prompt_len)


def loss_of(
    model: HookedModel,
    objective,
    pair: tuple[ExampleTokens, ExampleTokens],
    vector: torch.Tensor,
    draw: float | None = None,
) -> float:
    module = SteeredTraits(model, [TrainableSpec(SteeringSpec([Add(vector, layer=1)]))], objective, Penalties(), 1.0)
    batch = collated([(Picked(0, 0, draw), pair)], module.selections, torch.device("cpu"))
    return float(module.losses(batch))


def test_distillation_is_the_divergence_from_the_prompted_model(model) -> None:
    """Mean over the response of KL(prompted ‖ edited); 0 where the prompt is the same and nothing is edited."""
    ours, prompted = SEQUENCES[0], ExampleTokens((*range(20), *SEQUENCES[0].ids), 20 + SEQUENCES[0].prompt_len)
    edit = SteeringSpec([Add(drawn(WIDTH, seed=3), layer=1)])
    nothing = SteeringSpec([Add(torch.zeros(WIDTH), layer=1)])
    p, q = tried(model, nothing, [prompted])[0].log_softmax(-1), tried(model, edit, [ours])[0].log_softmax(-1)
    wanted = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    objective = OBJECTIVES["distillation"]
    assert loss_of(model, objective, (ours, prompted), drawn(WIDTH, seed=3)) == pytest.approx(float(wanted), rel=1e-4)
    assert loss_of(model, objective, (ours, ours), torch.zeros(WIDTH)) == pytest.approx(0, abs=1e-6)


def test_penalties_are_sums_of_squares_and_of_absolute_values(model) -> None:
    """They are added to the loss that is made small, and to no loss that is reported."""
    vector = drawn(WIDTH, seed=3)
    spec = TrainableSpec(SteeringSpec([Add(vector, layer=1)]))
    assert float(Penalties(norm=2.0).of(spec).detach()) == pytest.approx(2 * float(vector.square().sum()), rel=1e-5)
    assert float(Penalties(sparsity=3.0).of(spec).detach()) == pytest.approx(3 * float(vector.abs().sum()), rel=1e-5)
    module = SteeredTraits(model, [spec], OBJECTIVES["likelihood"], Penalties(norm=1.0, sparsity=1.0), 1.0)
    batch = collated([(Picked(0, 0, None), (SEQUENCES[0],))], module.selections, torch.device("cpu"))
    whole, reported = module(batch, 1)
    assert float(whole.detach() - reported.sum()) == pytest.approx(
        float(vector.square().sum() + vector.abs().sum()), rel=1e-4
    )


@given(
    sources=st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=2, max_size=40),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_a_source_is_never_on_both_sides(sources, share, seed) -> None:
    """Every example is on one side, no source on both, neither side is empty, whatever the order."""
    if len({source for source in sources if source}) + sources.count(None) < 2:
        with pytest.raises(InvalidSetting, match="at least 2"):
            split(sources, share, seed)
        return
    seen, unseen = split(sources, share, seed)
    assert sorted([*seen, *unseen]) == list(range(len(sources)))
    assert seen
    assert unseen
    assert not {sources[place] for place in seen} & {sources[place] for place in unseen} - {None}
    if None not in sources:
        turned, _ = split(sources[::-1], share, seed)
        assert {sources[place] for place in seen} == {sources[::-1][place] for place in turned}


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3), size=st.integers(1, 7), world=st.integers(1, 3))
@settings(deadline=None, max_examples=50)
def test_the_examples_of_a_step_follow_from_seed_name_and_step(sizes, size, world) -> None:
    """Each epoch has every example once; a later start, other traits or more processes change nothing of it."""
    named = {f"trait {number}": count for number, count in enumerate(sizes)}
    steps = 2 * max(sizes)
    whole = list(Steps(named, size, 3, start=0, stop=steps, live=lambda: range(len(sizes))))
    for number, count in enumerate(sizes):
        order = [one.place for step in whole for one in step if one.trait == number]
        for epoch in range(len(order) // count):
            assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert list(Steps(named, size, 3, start=2, stop=steps, live=lambda: range(len(sizes)))) == whole[2:]
    alone = Steps({"trait 0": sizes[0]}, size, 3, start=0, stop=steps, live=lambda: [0])
    assert list(alone) == [[one for one in step if one.trait == 0] for step in whole]
    shares = [
        list(Steps(named, size, 3, start=0, stop=steps, live=lambda: range(len(sizes)), rank=rank, world=world))
        for rank in range(world)
    ]
    for step, parts in zip(whole, zip(*shares, strict=True), strict=True):
        assert sorted((one for part in parts for one in part), key=step.index) == step


def test_texts_become_the_tokens_of_an_engine() -> None:
    """A prompt's special tokens, a response's none; a text by itself has its first token for a prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3"))
    found = tokens_of(tokenizer, "ab", "cd")
    assert found.ids == (*tokenizer.encode("ab"), *tokenizer.encode("cd", add_special_tokens=False))
    assert found.prompt_len == len(tokenizer.encode("ab"))
    assert tokens_of(tokenizer, [1, 2], [3]) == ExampleTokens((1, 2, 3), 2)
    assert tokens_of(tokenizer, "", "cd").prompt_len == 1
    with pytest.raises(InvalidPrompt, match="no token to predict"):
        tokens_of(tokenizer, "ab", "")
    with pytest.raises(InvalidPrompt, match="give text"):
        tokens_of(tokenizer, "ab", 3)


def examples(count: int = 12, seed: int = 0) -> list[Example]:
    """Texts that repeat themselves, four of each source."""
    words = ["wind", "moon", "sea", "light", "stone", "bird"]
    return [
        Example(
            f"Say {place}. ",
            " ".join(words[(place + at + seed) % 6] for at in range(3)),
            source=str(place % (count // 4)),
        )
        for place in range(count)
    ]


QUICK = {"steps": 6, "evaluate_every": 2, "batch_size": 3, "held_out": 0.34}


def test_losses_are_those_of_the_objective_asked_for(model) -> None:
    """Of an edit by zeros, both responses of a preference have equal odds under BiPO."""
    pairs = [Preference(one.prompt, one.response, "no", one.source) for one in examples()[:3]]
    losses = losses_of(model, pairs, Add(torch.zeros(WIDTH), layer=1), objective="bipo")
    torch.testing.assert_close(losses, torch.full((3,), math.log(2)))


def test_training_makes_texts_likelier_and_the_file_says_how(model, tmp_path) -> None:
    """What is held out becomes likelier; the file loads as steering, as it is, and says where it comes from."""
    many = {**QUICK, "steps": 12}
    trained = train(model, examples(), edit=TrainableAdd(layers=[1, 2]), out=tmp_path / "sea", **many)
    assert trained.name == "sea"
    assert trained.validation_loss < trained.history[0].validation_loss - 0.05
    assert [one.step for one in trained.history] == [0, 2, 4, 6, 8, 10, 12]
    spec = SteeringSpec.load(tmp_path / "sea" / "sea.safetensors")
    for one, other in zip(spec.of_rows(), trained.spec.of_rows(), strict=True):
        assert torch.equal(one.vector, other.vector)
    said = read_header(trained.file)
    assert said.model == model.config._name_or_path.rpartition("/")[2] or said.model
    assert said.provenance["objective"] == "Likelihood()"
    assert said.provenance["validation_loss"] == trained.validation_loss
    assert trained.directions["sea"][2].equal(spec.of_rows()[1].vector)
    assert DirectionSet.load(tmp_path / "sea" / "sea.directions.safetensors") == trained.directions
    held = losses_of(model, examples()[1::3], trained.spec)
    assert float(held.mean()) < float(losses_of(model, examples()[1::3], Add(torch.zeros(WIDTH), layer=1)).mean())
    assert "before: " in repr(trained)


def test_it_trains_where_gradients_are_off(model, tmp_path) -> None:
    """As in a notebook that begins with torch.set_grad_enabled(False)."""
    with torch.no_grad():
        trained = train(model, examples(), edit=TrainableAdd(layers=[1]), out=tmp_path / "sea", **QUICK)
        assert not torch.is_grad_enabled()
    assert trained.validation_loss < trained.history[0].validation_loss


def test_traits_trained_together_are_those_trained_alone(model, tmp_path) -> None:
    """Of each, vector and history are those of a run of its own, to rounding; one that has stopped waits unmoved."""
    data = {"one": examples(12), "two": examples(8, seed=3), "three": examples(20, seed=1)}
    how = {**QUICK, "patience": 1, "scheduler": functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=6)}
    how["optimizer"] = functools.partial(torch.optim.Adam, lr=0.3)
    start = TrainableAdd(layers=[1])
    together = train_many(model, data, edit=start, out=tmp_path / "together", **how)
    for name, texts in data.items():
        alone = train(model, texts, edit=start, out=tmp_path / name, **how)
        assert [one.step for one in alone.history] == [one.step for one in together[name].history]
        mine, theirs = (one.spec.of_rows()[0].vector for one in (alone, together[name]))
        assert (mine - theirs).norm() <= 1e-4 * max(float(mine.norm()), 1e-3)
    assert together["one"].spec.of_rows()[0].vector.ne(together["two"].spec.of_rows()[0].vector).any()


def test_a_training_that_finds_nothing_better_says_so(model, tmp_path) -> None:
    """What it began with is kept, and nobody takes it for something that was learned; the same call says it is done."""
    calls: list[Progress] = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="it: no step lowered the validation loss"):
            still = train(
                model,
                examples(),
                edit=TrainableAdd(layers=[1]),
                out=tmp_path,
                name="it",
                optimizer=partial(torch.optim.SGD, lr=0.0),
                progress=calls.append,
                **{**QUICK, "patience": 2},
            )
        assert calls.pop() == Progress("training steps", 6, 6)
        calls.clear()
    assert (still.best_step, len({one.validation_loss for one in still.history})) == (0, 1)


@pytest.mark.filterwarnings("ignore:it. no step lowered:UserWarning")  # a bias alone need not help
@pytest.mark.parametrize("edit", [LowRank(drawn(2, WIDTH), drawn(2, WIDTH, seed=1), layer=1), EDITS["add_if"]])
def test_an_edit_that_is_given_is_where_training_starts(model, tmp_path, edit) -> None:
    """The first look is at the edit as it is; what is not named to be trained stays bit for bit."""
    trained = train(model, examples(), edit=edit, out=tmp_path, name="it", fields=["bias"], **QUICK)
    start = train(model, examples(), edit=edit, out=tmp_path / "other", name="it", fields=["scale"], **QUICK)
    assert trained.history[0].validation_loss == start.history[0].validation_loss
    (found,) = trained.spec.of_rows()
    kept = ("read", "write") if isinstance(edit, LowRank) else ("vector", "probe")
    assert all(torch.equal(getattr(found, name), getattr(edit, name)) for name in kept)
    with pytest.raises(InvalidSpec, match="only a spec of Add edits at one site"):
        _ = trained.directions


def test_a_finished_run_is_read_and_another_is_refused(model, tmp_path) -> None:
    """The same call gives the same again, without a step; any other names what differs."""
    first = train(model, examples(), edit=TrainableAdd(layers=[1]), out=tmp_path / "x", **QUICK)
    calls: list[Progress] = []
    again = train(
        model,
        examples(),
        edit=TrainableAdd(layers=[1]),
        out=tmp_path / "x",
        progress=calls.append,
        **QUICK,
    )
    assert again.history == first.history
    assert torch.equal(again.spec.of_rows()[0].vector, first.spec.of_rows()[0].vector)
    assert {(at.done, at.total) for at in calls} <= {(6, 6)}
    for change, named in (
        ({"seed": 4}, "seed"),
        ({"objective": "bipo"}, "Preference"),
        ({"norm_penalty": 1.0}, "norm_penalty"),
    ):
        with pytest.raises((RunDiffers, InvalidSetting), match=named):
            train(model, examples(), edit=TrainableAdd(layers=[1]), out=tmp_path / "x", **{**QUICK, **change})
    with pytest.raises(RunDiffers, match=r"examples\.x was"):
        train(model, examples(16), edit=TrainableAdd(layers=[1]), out=tmp_path / "x", **QUICK)


def test_equal_numbers_are_the_same_settings(tmp_path) -> None:
    """Of a training that is resumed: whole or not, NumPy's or not, as in folders that were written by text alone."""

    def made(kind: type, whole: type) -> TrainingDefinition:
        real = dict.fromkeys(("norm_penalty", "sparsity_penalty", "max_grad_norm", "gate_width"), kind(1))
        settings = TrainingSettings(**real, steps=whole(3), seed=whole(2)).described()
        return TrainingDefinition({}, "o", settings, {}, {}, {}, 1)

    FOLDER.write(tmp_path, made(float, int))
    file = tmp_path / "training.json"
    text = file.read_text()
    for number in ("1.0", "1", "np.float64(1.0)"):
        file.write_text(text.replace('"1.0"', f'"{number}"'))
        for kind, whole in ((int, int), (float, np.int64), (np.float64, int), (np.float32, np.int32)):
            assert FOLDER.open(tmp_path, made(kind, whole)) is not None
    with pytest.raises(RunDiffers, match=r"max_grad_norm was '1\.0', is '2\.0'"):
        FOLDER.open(
            tmp_path, TrainingDefinition({}, "o", made(int, int).settings | {"max_grad_norm": "2"}, {}, {}, {}, 1)
        )
    assert (
        TrainingDefinition({}, "o", TrainingSettings().described(), {}, {}, {}, 1).settings["max_grad_norm"] == "None"
    )


def test_equal_numbers_are_the_same_objective(tmp_path) -> None:
    """Of an objective, optimiser and scheduler too, whose texts stay as they are given; other numbers are others."""

    def made(number: Any, rate: Any = 1.0) -> TrainingDefinition:
        optimizer = functools.partial(torch.optim.SGD, lr=rate, momentum=1e-05)
        objectives = [BiPO(beta=number), RePS(factors=(number, 2.0)), Distillation(temperature=number)]
        said = TrainingSettings(optimizer=optimizer).described()
        return TrainingDefinition({}, "; ".join(map(repr, objectives)), said, {}, {}, {}, 1)

    same = (1, 1.0, np.float64(1), np.float32(1), np.int64(1))
    for at, (number, rate) in enumerate(itertools.product(same, same)):
        FOLDER.write(tmp_path / str(at), made(number, rate))
        assert f"beta={number!r}" in FOLDER.read(tmp_path / str(at)).objective
        assert FOLDER.open(tmp_path / str(at), made(1.0)) is not None
        assert FOLDER.open(tmp_path / str(at), made(1)) is not None
        for other in (made(1.5), made(2), made(-1), made(1, 2), made(1, 0.1)):
            with pytest.raises(RunDiffers, match="was"):
                FOLDER.open(tmp_path / str(at), other)
    RATES_FOLDER.write(tmp_path / "rates", RatesDefinition(made(1), [0.1]))
    assert RATES_FOLDER.open(tmp_path / "rates", RatesDefinition(made(1.0), [0.1])) is not None
    with pytest.raises(RunDiffers, match=r"training\.objective was"):
        RATES_FOLDER.open(tmp_path / "rates", RatesDefinition(made(2), [0.1]))


@pytest.mark.filterwarnings("ignore:x. no step lowered:UserWarning")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            SteeringSpec([SteeringSpec([EDITS["add"]], preserve_norm=True)]),
            SteeringSpec([SteeringSpec([EDITS["add"]])]),
        ),
        *(
            (replace(EDITS[name], vector=drawn(WIDTH)), replace(EDITS[name], vector=4 * drawn(WIDTH)))
            for name in ("add relative", "add_if relative", "ablate", "cap", "set_projection")
        ),
    ],
)
def test_a_run_of_other_initial_edits_is_refused(model, tmp_path, one, other) -> None:
    """Norms that a nested spec keeps, and the norm of a vector of which the edit uses the direction alone, are of a run."""
    train(model, examples(), edit=one, out=tmp_path / "x", **{**QUICK, "steps": 2})
    with pytest.raises(RunDiffers, match=r"edits\.x was"):
        train(model, examples(), edit=other, out=tmp_path / "x", **{**QUICK, "steps": 2})


OPTIMIZERS = {
    "adamw": (functools.partial(torch.optim.AdamW, lr=0.1), None),
    "sgd": (
        functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=8),
    ),
    "adagrad": (torch.optim.Adagrad, functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.slow
def test_a_run_that_was_cut_short_goes_on_to_the_same_vector(model, tmp_path, name) -> None:
    """Bit for bit, on a CPU: parameters, the optimiser's state, the scheduler's, and the history."""
    optimizer, scheduler = OPTIMIZERS[name]
    how = {
        **QUICK,
        "steps": 8,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "objective": "bipo",
        "max_grad_norm": 1.0,
    }
    pairs = {
        key: [Preference(one.prompt, one.response, "no", one.source) for one in examples(12, seed)]
        for seed, key in enumerate("ab")
    }
    whole = train_many(model, pairs, edit=TrainableLowRank(layers=[1], rank=2), out=tmp_path / "whole", **how)

    def stop(at: Progress) -> None:
        if at.done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_many(model, pairs, edit=TrainableLowRank(layers=[1], rank=2), out=tmp_path / "cut", progress=stop, **how)
    again = train_many(model, pairs, edit=TrainableLowRank(layers=[1], rank=2), out=tmp_path / "cut", **how)
    for key in pairs:
        assert again[key].history == whole[key].history
        for one, other in zip(again[key].spec.of_rows(), whole[key].spec.of_rows(), strict=True):
            assert all(torch.equal(getattr(one, field), getattr(other, field)) for field in ("read", "write", "bias"))


HERE = Path(__file__).parent
#: For processes that import this file.
ELSEWHERE = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1]))),
    "OMP_NUM_THREADS": "1",
}
LONG = {**QUICK, "steps": 300, "patience": 999}
SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from test_training import LONG, examples
from steercap.testing import tiny_checkpoint
from steercap.lab.training import TrainableAdd, train
train(tiny_checkpoint("qwen3"), examples(), edit=TrainableAdd(layers=[1]), out=sys.argv[1], name="it", **LONG)
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are made in one order, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_vector(model, tmp_path) -> None:
    """kill -9 while it trains: the folder holds a whole state, from which it ends with the vector of a run left alone."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "cut")], env=ELSEWHERE)
    until = time.monotonic() + 240
    while not (tmp_path / "cut" / "state.safetensors").exists():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "cut" / "it.safetensors").exists()
    how = {"edit": TrainableAdd(layers=[1]), "name": "it", **LONG}
    again, whole = (train(model, examples(), out=tmp_path / folder, **how) for folder in ("cut", "whole"))
    assert again.history == whole.history
    assert again.file.read_bytes() == whole.file.read_bytes()


SHARED = """
import sys, torch
from torch import distributed
torch.set_num_threads(1)
from test_training import QUICK, examples
from steercap.testing import tiny_checkpoint
from steercap.lab.training import TrainableAdd, train_many
distributed.init_process_group("gloo")
data = {"one": examples(12), "two": examples(8, seed=3)}
train_many(tiny_checkpoint("qwen3"), data, edit=TrainableAdd(layers=[1]), out=sys.argv[1], norm_penalty=0.01, **QUICK)
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_the_vectors_of_one(model, tmp_path) -> None:
    """DistributedDataParallel over gloo: batches that two processes share unevenly, two traits, a penalty."""
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    arguments = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
        str(tmp_path / "two"),
    ]
    done = subprocess.run(
        [sys.executable, *arguments],
        env=ELSEWHERE,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    data = {"one": examples(12), "two": examples(8, seed=3)}
    alone = train_many(model, data, edit=TrainableAdd(layers=[1]), out=tmp_path / "alone", norm_penalty=0.01, **QUICK)
    for name, trained in alone.items():
        mine = trained.spec.of_rows()[0].vector
        theirs = SteeringSpec.load(tmp_path / "two" / f"{name}.safetensors").of_rows()[0].vector
        assert (mine - theirs).norm() <= 1e-4 * mine.norm()


def test_losses_that_are_no_numbers_end_the_training(model, tmp_path) -> None:
    """With what to change, and no file of a vector."""
    how = {**QUICK, "optimizer": functools.partial(torch.optim.SGD, lr=float("inf"))}
    with pytest.raises(TrainingDiverged, match="learning rate"):
        train(model, examples(), edit=TrainableAdd(layers=[1]), out=tmp_path / "x", **how)
    assert not (tmp_path / "x" / "x.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"steps": 0}, InvalidSetting, "steps"),
        ({"batch_size": 1.5}, InvalidSetting, "batch_size"),
        ({"norm_penalty": -1.0}, InvalidSetting, "norm_penalty"),
        ({"gate_width": 0.0}, InvalidSetting, "gate_width"),
        ({"fields": ["vektor"]}, InvalidSetting, "vector, scale"),
        ({"fields": 3}, InvalidSetting, "fields"),
        ({"learning_rate": 0.1}, InvalidSetting, "unknown settings"),
        ({"lr": -0.1}, InvalidSetting, "lr=-0.1; give a number above 0"),
        ({"lr": math.inf}, InvalidSetting, "lr=inf"),
        ({"accumulation": 0}, InvalidSetting, "accumulation=0"),
        ({"epochs": 2}, InvalidSetting, "epochs=2 and evaluate_every=2; give one of them"),
        ({"optimizer": "adamv"}, UnknownName, "'adamw'"),
        ({"optimizer": 3}, InvalidSetting, "optimizer=3; give a function of parameters, or adagrad, adam"),
        ({"scheduler": "cos"}, UnknownName, "cosine"),
        ({"scheduler": 0.5}, InvalidSetting, "scheduler=0.5"),
        ({"optimizer": lambda own: torch.optim.SGD(own, lr=1.0)}, InvalidSetting, "could not tell it from another"),
        ({"device": "cpu", "device_map": "auto"}, InvalidSetting, "give one of them"),
        ({"held_out": 1.0}, InvalidSetting, "held_out=1.0; give a share of the sources, between 0 and 1"),
        ({"objective": "dpo"}, UnknownName, "likelihood"),
        ({"objective": "distillation"}, InvalidSetting, "Prompted"),
        ({"name": "state"}, InvalidFile, "state"),
        ({"edit": LogitBias({3: 1.0})}, InvalidSpec, "trains edits"),
        ({"edit": Replace(drawn(1, WIDTH), positions=[0], layer=1)}, InvalidSpec, "trains edits"),
        ({"edit": Add(drawn(5), layer=1)}, InvalidVector, "width 5"),
        ({"edit": TrainableAdd(layers=[9])}, InvalidSpec, "9"),
        ({"edit": 3}, InvalidSpec, "edit=3 is of type int"),
    ],
)
def test_what_does_not_fit_is_refused(model, tmp_path, changes, error, says) -> None:
    """Before any step, with the name of what is wrong."""
    arguments = {"edit": TrainableAdd(layers=[1]), "out": tmp_path / "x", **QUICK, **changes}
    with pytest.raises(error, match=says):
        train(model, examples(), **arguments)
    assert not (tmp_path / "x" / "state.safetensors").exists()


def test_reps_needs_a_direction_to_take_away(model, tmp_path) -> None:
    """At zero there is none: an error says what to give."""
    pairs = [Preference(one.prompt, one.response, "no", one.source) for one in examples()]
    with pytest.raises(InvalidSetting, match="norm="):
        train(model, pairs, edit=TrainableAdd(layers=[1]), objective="reps", out=tmp_path / "x", **QUICK)
    trained = train(
        model, pairs, edit=TrainableAdd(layers=[1], norm=0.1), objective="reps", out=tmp_path / "y", **QUICK
    )
    assert trained.validation_loss < trained.history[0].validation_loss


def test_traits_of_different_forms_are_refused(model, tmp_path) -> None:
    """They cannot share a pass: the error names the odd one."""
    edits = {"one": Add(drawn(WIDTH), layer=1), "two": Add(drawn(WIDTH), layer=2)}
    with pytest.raises(InvalidSpec, match="two has other edits than one"):
        train_many(model, {"one": examples(), "two": examples()}, edit=edits, out=tmp_path, **QUICK)


def test_traits_of_another_formula_are_refused(model, tmp_path) -> None:
    """A relative edit beside an absolute one: both would be trained by the first one's formula."""
    edits = {"one": Add(drawn(WIDTH), layer=1), "two": Add(drawn(WIDTH), layer=1, relative=True)}
    for names in (("one", "two"), ("two", "one")):
        with pytest.raises(InvalidSpec, match=f"{names[1]} has other edits than {names[0]}"):
            train_many(model, dict.fromkeys(names, examples()), edit=edits, out=tmp_path, **QUICK)


def test_the_files_of_traits_are_not_written_over(model, tmp_path) -> None:
    """`a.directions.safetensors` holds the directions of "a"."""
    edit = TrainableAdd(layers=[1])
    for names in (("a", "a.directions"), ("a.directions", "a")):
        with pytest.raises(InvalidFile, match=r"'a\.directions' is the file of the directions of another trait"):
            train_many(model, dict.fromkeys(names, examples()), edit=edit, out=tmp_path, **QUICK)
    trained = train(model, examples(), edit=edit, out=tmp_path / "b.directions", **QUICK)
    assert trained.file.name == "b.directions.safetensors"


@pytest.mark.parametrize("what", ["edit", "held_out"])
@pytest.mark.parametrize("names", [["rain"], ["rain", "sun", "snow"], []])
def test_what_is_given_by_trait_is_given_for_each(what, names, model, tmp_path) -> None:
    """A trait that is left out, or a name that is misspelt, is found before any step."""
    given = [Example([5, 6, 7 + place], [8, 9, 10]) for place in range(8)]
    value = {"edit": Add(drawn(WIDTH), layer=1), "held_out": given[:2]}
    how = {**value, what: dict.fromkeys(names, value[what])} | ({"held_out": 0.5} if what == "edit" else {})
    with pytest.raises(InvalidSpec, match=rf"{what} is given for .*; give one for each of \['rain', 'sun'\]"):
        train_many(model, {"rain": given, "sun": given}, out=tmp_path / "x", steps=1, **how)
    assert not (tmp_path / "x").exists()


def test_vectors_by_layer_are_trained_as_an_edit_of_each(model, tmp_path) -> None:
    """As everywhere else that takes steering."""
    given = [Example([5, 6, 7 + place], [8, 9, 10]) for place in range(8)]
    vectors = LayerVectors({1: drawn(WIDTH), 2: drawn(WIDTH, seed=1)})
    how = {"held_out": 0.5, "steps": 2, "evaluate_every": 1, "name": "rain"}
    trained = train(model, given, edit=vectors, out=tmp_path / "a", **how)
    alike = train(model, given, edit=SteeringSpec.by_layer(Add, vectors), out=tmp_path / "b", **how)
    assert [edit.layer for edit in trained.spec.of_rows()] == [1, 2]
    assert trained.history == alike.history


def test_layers_of_two_blocks_of_attention_are_counted_once(tmp_path) -> None:
    """LongCat's configuration counts the blocks; its last layer is the fourth, whose output a hook of our own sees."""
    hooked = HookedModel(tiny_checkpoint("longcat_flash"))
    assert list(hooked.layers) == [0, 1, 2, 3]
    assert hooked.layers[3] is hooked.model.model.layers[3]
    given = [Example([5, 6, 7], [8, 9, 10])]
    edit = Add(drawn(hooked.width), layer=3)
    trained = train(hooked, given, edit=edit, held_out=given, out=tmp_path, steps=4, evaluate_every=1, lr=0.05)
    assert trained.validation_loss < trained.history[0].validation_loss


@pytest.mark.parametrize(("tokens", "kind"), [("generated", EmptySelection), ([6], InvalidSelection)])
def test_an_example_without_a_selected_token_is_found_before_any_step(tokens, kind, model, tmp_path) -> None:
    """Its turn may come late, or never: no folder is made."""
    short = Example([5, 6, 7], [8])
    with pytest.raises(kind, match="an example of 3 prompt and 1 response tokens"):
        train(model, [*examples(), short], edit=Add(drawn(WIDTH), layer=1, tokens=tokens), out=tmp_path / "x", **QUICK)
    assert not (tmp_path / "x").exists()


def test_a_run_that_never_drew_such_an_example_is_opened_again(model, tmp_path, monkeypatch) -> None:
    """It was begun when its turn alone would have found it."""
    given = [*(Example([5, 6, 7 + place], [8, 9, 10]) for place in range(40)), Example([5, 6, 7], [8])]
    held = [Example([15, 6, 7 + place], [8, 9, 10]) for place in range(3)]
    how = {"edit": Add(drawn(WIDTH), layer=1, tokens="generated"), "held_out": held, "out": tmp_path}
    short = {"steps": 2, "batch_size": 1, "evaluate_every": 1}
    with monkeypatch.context() as patched:
        patched.setattr("steercap.lab.training.training._check_tokens", lambda *_: None)
        first = train(model, given, **how, **short)
    assert train(model, given, **how, **short).history == first.history


def test_a_site_that_the_model_lacks_is_named(model, tmp_path) -> None:
    """Not by an attribute that some layer of torch's lacks."""
    edit = Add(drawn(WIDTH), layer=1, site="mhc_streams_pre_mlp")
    with pytest.raises(InvalidSpec, match=r"mhc_streams_pre_mlp\[1\]: the layers of .* have no such site"):
        train(model, examples(), edit=edit, out=tmp_path, **QUICK)


def test_the_system_prompt_is_in_front_of_the_teacher_alone() -> None:
    """Distillation reads the same response behind both."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3"))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    ours, theirs = OBJECTIVES["distillation"].tokens(tokenizer, Prompted("Rhyme.", "Why?", "Because."))
    assert tokenizer.decode(ours.ids) == "<user>Why?<answer>Because."
    assert tokenizer.decode(theirs.ids) == "<system>Rhyme.<user>Why?<answer>Because."
    assert len(ours.ids) - ours.prompt_len == len(theirs.ids) - theirs.prompt_len


def lines(*records: dict[str, object]) -> str:
    return "\n".join(map(json.dumps, records))


def test_the_command_trains_each_trait_of_a_file(tmp_path, monkeypatch) -> None:
    """From JSONL to files that load as steering; --json says where they are, and how the losses went."""
    monkeypatch.chdir(tmp_path)
    texts = [{"prompt": "Say. ", "response": "wind moon", "source": str(place % 3)} for place in range(6)]
    Path("texts.jsonl").write_text(lines(*texts, *({**one, "trait": "other"} for one in texts)))
    asked = [
        "train",
        "texts.jsonl",
        "--layers",
        "1",
        "--out",
        "out/it",
        "--steps",
        "2",
        "--model",
        str(tiny_checkpoint("qwen3")),
    ]
    done = call(*asked, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) == {"it", "other"}
    assert all(SteeringSpec.load(one["file"]).of_rows()[0].layer == 1 for one in found.values())
    assert [one["step"] for one in found["it"]["history"]] == [0, 2]
    assert "out/it/other.safetensors" in call(*asked).stdout  # read, not trained again
    asked[asked.index("out/it")] = "out/relative"
    done = call(*asked, "--json", "--site", "attn_out", "--relative", "--norm", "0.1")
    assert done.exit_code == 0, done.output
    (edit,) = SteeringSpec.load(json.loads(done.stdout)["relative"]["file"]).of_rows()
    assert (edit.site, edit.relative) == ("attn_out", True)


@pytest.mark.parametrize(
    ("line", "more", "says"),
    [
        ({"prompt": "a", "response": "b"}, [], "--layers"),
        ({"prompt": "a"}, ["--layers", "1"], "line 1"),
        ({"prompt": "a", "response": "b"}, ["--layers", "1", "--dtype", "int8"], "--dtype"),
        ({"prompt": "a", "response": "b"}, ["--layers", "1", "--gate-width", "0.5"], "--edit add has no gate"),
        ({"prompt": "a", "response": "b"}, ["--edit", "none.safetensors"], "none.safetensors"),
        ({"prompt": "a", "response": "b"}, ["--edit", "none.safetensors", "--layers", "1"], "--layers"),
        ({"prompt": "a", "response": "b"}, ["--edit", "none.safetensors", "--tokens", "generated"], "--tokens"),
        ({"prompt": "a", "response": "b"}, ["--layers", "1", "--edit", "add", "--rank", "2"], "--rank"),
        ({"prompt": "a", "response": "b"}, ["--layers", "1", "--edit", "low_rank", "--norm", "1"], "--norm"),
        ({"prompt": "a", "response": "b"}, ["--layers", "1", "--edit", "low_rank", "--relative"], "--relative"),
        ({"prompt": "a", "response": "b"}, ["--edit", "none.safetensors", "--site", "attn_out"], "--site"),
        ({"prompt": "a", "response": "b"}, ["--layers", "1", "--site", "resid"], "unknown site 'resid'"),
    ],
)
def test_the_command_says_what_is_wrong_before_it_loads_a_model(tmp_path, monkeypatch, line, more, says) -> None:
    """A line, an option or a file that does not fit is named."""
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text(lines(line))
    done = call("train", "texts.jsonl", "--out", "out/it", *more)
    assert done.exit_code in {1, 2}
    assert says in " ".join(done.stderr.replace("│", " ").split())


def test_vllm_is_not_imported() -> None:
    """Training needs no engine."""
    code = (
        "import sys, steercap.lab.training.training; print(sorted(n for n in sys.modules if n.split('.')[0] == 'vllm'))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_an_objective_without_a_repr_of_its_own_is_refused() -> None:
    """The address in it is another's later, whose folder would be taken for that of this one."""

    class Plain(Likelihood):
        __repr__ = object.__repr__

    with pytest.raises(InvalidSetting, match="make Plain a frozen dataclass"):
        objective_of(Plain())


def test_every_objective_is_told_apart_by_its_settings() -> None:
    """A run of other settings is another run: members are data whose repr says them."""
    for objective in OBJECTIVES.values():
        assert repr(objective).startswith(type(objective).__name__ + "(")
    assert len(EncodedExamples([[(SEQUENCES[0],)], [(SEQUENCES[1],)]])) == 2
    assert set(OBJECTIVES) == {"bipo", "distillation", "likelihood", "reps"}
    assert all(SITES[site] for site in ("resid_post",))
