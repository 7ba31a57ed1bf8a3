"""Sites of layers that nobody knows, derived of invented layers in plain PyTorch: right, or refused by name."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from unit.test_proof import RULES, attention_of, pass_of

from steercap.adapters import tracing
from steercap.architectures.decoder import Decoder
from steercap.architectures.families.base import Family
from steercap.architectures.families.derived import FIELDS, PROVED, candidates, proving
from steercap.core.spec import Point
from steercap.engine.engine import Engine
from steercap.errors import UnsupportedModel
from steercap.requests.equations import attends, equations, projected
from steercap.requests.probe import _proved

WIDTH, HEADS, NEURONS = 32, 4, 48


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + 0.3 * torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        found = self.gain * total / total.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
        return found if residual is None else (found, total)


class Linear(nn.Linear):
    """With the attribute that vLLM's linear modules have."""

    def __init__(self, size: int, made: int) -> None:
        super().__init__(size, made)
        self.input_size = size


class Heads(nn.Module):
    """With the attributes that vLLM's attention has."""

    impl, kv_cache_dtype, head_size_v = None, "auto", WIDTH // HEADS

    def forward(self, q: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(q)


class Mixing(nn.Module):
    """Attention with names that no family has."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.qkv, self.core, self.back = Linear(WIDTH, 3 * WIDTH), Heads(), Linear(WIDTH, WIDTH)
        self.gate = Linear(WIDTH, WIDTH) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.core(*self.qkv(x).chunk(3, -1))
        return self.back(z if self.gate is None else z * self.gate(x).sigmoid())


class Feeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = Linear(WIDTH, NEURONS), Linear(NEURONS, WIDTH)

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        found = self.narrow(torch.nn.functional.gelu(self.widen(x)))
        return found if beside is None else found * beside.sigmoid()


class Invented(nn.Module):
    """A layer with norms first; others differ in `run`."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.alpha, self.mixing, self.beta, self.feeding = Norm(), Mixing(gated), Norm(), Feeding()
        self.gamma, self.delta, self.other = Norm(), Norm(), Feeding()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        middle = x + self.mixing(self.alpha(x))
        return middle + self.feeding(self.beta(middle))


class Gated(Invented):
    def __init__(self) -> None:
        super().__init__(gated=True)


class Deferred(Invented):
    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> Any:
        x, residual = self.alpha(hidden_states, residual)
        x, residual = self.beta(self.mixing(x), residual)
        return self.feeding(x), residual


class SideBySide(Invented):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.alpha(hidden_states)
        return hidden_states + self.feeding(x) + self.mixing(x)


class Sandwich(Invented):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        middle = hidden_states + self.gamma(self.mixing(self.alpha(hidden_states)))
        return middle + self.delta(self.feeding(self.beta(middle)))


class Unnormed(Invented):
    """Blocks that read the stream itself, with norms behind them."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        middle = hidden_states + self.gamma(self.mixing(hidden_states))
        return middle + self.delta(self.feeding(middle))


class HalfFed(Invented):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        middle = hidden_states + self.mixing(self.alpha(hidden_states))
        return middle + 0.5 * self.feeding(self.beta(middle))


class AlmostWhole(Invented):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        middle = hidden_states + 0.9999 * self.mixing(self.alpha(hidden_states))
        return middle + self.feeding(self.beta(middle))


class TwoFed(Invented):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        middle = hidden_states + self.mixing(self.alpha(hidden_states))
        x = self.beta(middle)
        return middle + (self.feeding(x) + self.other(x))


class FedFirst(Invented):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        middle = hidden_states + self.feeding(self.beta(hidden_states))
        return middle + self.mixing(self.alpha(middle))


class NormedSums(Invented):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        middle = self.alpha(hidden_states + self.mixing(hidden_states))
        return self.beta(middle + self.feeding(middle))


class Shrinking(Invented):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 0.9 * super().forward(hidden_states)


class ReadingMore(Invented):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        middle = hidden_states + self.mixing(self.alpha(hidden_states))
        return middle + self.feeding(self.beta(middle), hidden_states)


class Alike(Invented):
    """Beside the block that is added, a copy of it whose output is the same but for rounding."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        middle = hidden_states + self.mixing(self.alpha(hidden_states))
        x = self.beta(middle)
        made = self.feeding(x)
        self.gamma.forward = lambda x: x * (1 + 2e-7)
        self.gamma(made)
        return middle + made


class State(nn.Module):
    """With the method of vLLM's modules that keep a state for each request, in place of the feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = Linear(WIDTH, NEURONS), Linear(NEURONS, WIDTH)

    def get_kv_cache_spec(self) -> None:
        """What vLLM asks for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.widen(x).cumsum(0).tanh())


class Recurrent(Invented):
    def __init__(self) -> None:
        super().__init__()
        self.feeding = State()


class NormedInside(Invented):
    """Blocks that norm the stream in code of their own."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        middle = hidden_states + self.mixing(self.alpha(hidden_states))
        self.feeding.forward = lambda x: Feeding.forward(self.feeding, torch.nn.functional.layer_norm(x, [WIDTH]))
        return middle + self.feeding(middle)


class SmallExtra(Invented):
    """Beside the feed-forward block, a fifth of it in its directions is added by code."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        middle = hidden_states + self.mixing(self.alpha(hidden_states))
        x = self.beta(middle)
        made = self.feeding(x)
        return middle + made + 0.2 * made.norm(dim=-1, keepdim=True) * torch.nn.functional.normalize(x.flip(-1), dim=-1)


class SmallValues(Invented):
    """Values, much smaller than queries and keys, that are made of another tensor than these."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        mixing, x = self.mixing, self.alpha(hidden_states)
        mixing.forward = lambda x: mixing.back(
            mixing.core(*mixing.qkv(x).chunk(3, -1)[:2], 0.001 * hidden_states * x.abs())
        )
        middle = hidden_states + mixing(x)
        return middle + self.feeding(self.beta(middle))


EVERY = {
    "attn_out": "mixing",
    "mlp_out": "feeding",
    "resid_mid": "beta",
    "attn_in": "mixing",
    "mlp_in": "feeding",
    "z": "mixing.back",
    "neurons": "feeding.narrow",
    **dict.fromkeys("qkv", "mixing.core"),
}
BLOCKS = ("attn_out", "resid_mid", "mlp_out")
ALL = tuple(EVERY)
#: The layer, what differs from `EVERY`, what is refused, and a part of the reason.
LAYERS: dict[type[Invented], tuple[dict[str, str], tuple[str, ...], str]] = {
    Invented: ({}, (), ""),
    Deferred: ({}, (), ""),
    SideBySide: ({}, ("resid_mid",), "no module reads the stream after attention was added"),
    Sandwich: ({"attn_out": "gamma", "mlp_out": "delta"}, (), ""),
    Unnormed: ({"attn_out": "gamma", "mlp_out": "delta", "resid_mid": "feeding"}, (), ""),
    HalfFed: ({}, ("mlp_out", "neurons", "mlp_in"), "it adds 0.5 times the output of its module"),
    AlmostWhole: ({}, ("attn_out", "z", "q", "k", "v"), "it adds 0.9999 times the output of its module"),
    Gated: ({}, ("z", "q", "k", "v"), "its last projection does not read the output of"),
    TwoFed: ({}, ALL, "no outputs of its modules add up to its"),
    FedFirst: ({}, ("resid_mid", "attn_in"), "no module reads the stream after attention was added"),
    NormedSums: ({}, ALL, "no outputs of its modules add up to its"),
    Shrinking: ({}, ALL, "no outputs of its modules add up to its"),
    ReadingMore: ({}, ("mlp_in", "neurons"), "its block has other inputs too"),
    Alike: ({}, ALL, "no outputs of its modules add up to its"),
    Recurrent: ({}, ("mlp_out", "mlp_in", "neurons"), "its block holds a State, which mixes tokens beside attention"),
    NormedInside: ({"resid_mid": "feeding"}, ("mlp_in",), "no single module of the block reads the output"),
    SmallExtra: ({}, ALL, "no outputs of its modules add up to its"),
    SmallValues: ({}, ("attn_in",), "its block has other inputs too"),
}


class Model(nn.Module):
    def __init__(self, kind: type[Invented]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self) -> None:
        x = torch.randn(tracing.TOKENS, WIDTH)
        state = (x, x) if isinstance(self.layers[0], Deferred) else (x,)
        for layer in self.layers:
            found = layer(*state)
            state = found if isinstance(found, tuple) else (found,)


@pytest.fixture
def derive(monkeypatch) -> Any:
    """Derive an invented layer's sites as a start does, with passes of its own."""
    monkeypatch.setattr(tracing, "run_pass", lambda _runner, model: model())

    def derive(kind: type[Invented], dtype: torch.dtype, seed: int, ranks: int = 1) -> tuple[Family, dict[str, str]]:
        torch.manual_seed(seed)
        model = Model(kind).to(dtype)
        with torch.no_grad():
            monkeypatch.setattr(torch, "randn", _in(dtype, torch.randn)) if dtype != torch.float32 else None
            decoder = Decoder(model, "layers", model, dict(enumerate(model.layers)))
            attending = {str(index): layer.mixing.core for index, layer in enumerate(model.layers)}
            config = SimpleNamespace(
                compilation_config=SimpleNamespace(static_forward_context=attending),
                parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1),
            )
            family = candidates([model.layers[0]], transformers=False)[0]
            return tracing.derived(SimpleNamespace(vllm_config=config), decoder, family, WIDTH // HEADS)

    return derive


def _in(dtype: torch.dtype, plain: Any) -> Any:
    return lambda *shape, **options: plain(*shape, **options).to(dtype)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_sites_are_derived_or_refused_by_name(kind, seed, derive) -> None:
    """Whatever modules are called: only equations say which is which."""
    differs, refused, reason = LAYERS[kind]
    family, reasons = derive(kind, torch.float32, seed)
    found = {site: path for site, field in FIELDS.items() if (path := getattr(family, field))}
    assert found == {site: path for site, path in {**EVERY, **differs}.items() if site not in refused}
    assert set(reasons) >= set(refused)
    assert not refused or any(reason in one for one in reasons.values()), reasons


def test_a_traced_pass_that_fails_leaves_the_stream(derive, monkeypatch) -> None:
    def failing(_runner: Any, _model: Any) -> None:
        raise ValueError("no metadata")

    monkeypatch.setattr(tracing, "run_pass", failing)
    family, reasons = derive(Invented, torch.float32, 0)
    assert not any(getattr(family, field) for field in FIELDS.values())
    assert set(reasons.values()) == {"a traced pass failed: ValueError: no metadata"}
    assert set(reasons) == set(FIELDS)


def test_ranks_that_could_differ_have_the_stream(derive) -> None:
    family, reasons = derive(Invented, torch.float32, 0, ranks=2)
    assert not any(getattr(family, field) for field in FIELDS.values())
    assert set(reasons.values()) == {"derived on one rank alone: tensor_parallel_size=1, pipeline_parallel_size=1"}


def test_a_stream_in_sixteen_bits_is_derived_too(derive) -> None:
    family, _ = derive(Invented, torch.bfloat16, 0)
    assert {site: getattr(family, field) for site, field in FIELDS.items() if site != "router"} == EVERY
    family, reasons = derive(HalfFed, torch.bfloat16, 0)
    assert not family.mlp_out
    assert "it adds 0." in reasons["mlp_out"]
    family, reasons = derive(SmallExtra, torch.bfloat16, 0)
    assert not family.mlp_out
    assert "no outputs of its modules add up to its" in reasons["mlp_out"]


#: What is wrong with rows of a derived site, and what is then left out.
SPOILT = {
    "attn_out": {"attn_out", "mlp_out", "resid_mid", "z", "q", "k", "v", "neurons", "mlp_in"},
    "resid_mid": {"attn_out", "mlp_out", "resid_mid", "z", "q", "k", "v", "neurons", "mlp_in"},
    "mlp_out": {"attn_out", "mlp_out", "resid_mid", "z", "q", "k", "v", "neurons", "mlp_in"},
    "z": {"z", "q", "k", "v"},
    "neurons": {"neurons"},
    "q": {"q", "k", "v"},
    "v": {"q", "k", "v"},
}


def _engine(sites: Any, asked: tuple[str, ...] = ()) -> Any:
    armed = {Point(1, site): number for number, site in enumerate(sites)}
    settings = SimpleNamespace(every_site=not asked, sites=asked)
    found = SimpleNamespace(family=Family(derived=True), armed=armed, schemas=dict(armed), refused={})
    found.settings, found.loaded, found.attention = settings, SimpleNamespace(code={"a.Layer": ""}), {1: None}
    found.drop, found._require_sites = MethodType(Engine.drop, found), MethodType(Engine._require_sites, found)
    return found


def _claims(spoilt: str) -> list[Any]:
    """The claims of a pass, of which one site's rows are another tensor."""
    rows = {point: one for point, one in pass_of(5).items() if point.layer == 1}
    rows |= attention_of(5, RULES["plain"])
    made = {"z": rows[1, "attn_out"].clone(), "neurons": rows[1, "mlp_out"].clone()}
    if spoilt == "z":
        rows[1, "z"] = rows[1, "z"].flip(0)
    for site, one in made.items():
        made[site] = one.flip(0) if spoilt == site else one
    if spoilt in {"attn_out", "resid_mid", "mlp_out", "q", "v"}:
        rows[1, spoilt] = rows[1, spoilt].flip(0)
    claims = [*equations(rows, 1.0), *attends(1, rows, RULES["plain"])]
    pairs = (("z", "attn_out"), ("neurons", "mlp_out"))
    return claims + [projected(Point(1, one), Point(1, other), rows[1, other], made[one]) for one, other in pairs]


@pytest.mark.parametrize("spoilt", SPOILT)
def test_each_equation_refuses_the_derived_site_that_it_holds(spoilt) -> None:
    """And those that it proves; the others stay, and a site that was asked for is an error with the numbers."""
    sites = ("resid_pre", "resid_post", "attn_in", "mlp_in", *sorted(PROVED))
    engine = _engine(sites)
    claims = _proved(engine, _claims(spoilt))
    left = {point.site for point in engine.armed}
    assert set(sites) - left == SPOILT[spoilt]
    assert all(claim.holds and set(claim.sites) <= left for claim in claims)
    assert "off by" in engine.refused[spoilt] or "no equation" in engine.refused[spoilt]
    with pytest.raises(UnsupportedModel, match=rf"knows no {spoilt} in layers of a\.Layer; {spoilt}: "):
        _proved(_engine(sites, (spoilt,)), _claims(spoilt))


def test_a_derived_site_without_an_equation_is_refused() -> None:
    engine = _engine(("resid_pre", "resid_post", *sorted(PROVED)))
    _proved(engine, [claim for claim in _claims("") if "weighed" not in claim.name])
    assert {point.site for point in engine.armed} == {"resid_pre", "resid_post", *PROVED} - {"q", "k", "v"}
    assert engine.refused["k"] == "no equation of the checks at start contains it"


def test_the_proof_of_a_derived_site_has_its_terms() -> None:
    assert set(proving("q")) == {"q", "k", "v", "z", *BLOCKS}
    assert set(proving("neurons")) == set(BLOCKS)
    assert set(proving("mlp_in")) == set(proving("attn_in")) == set(BLOCKS)
    assert proving("resid_post") == ()
