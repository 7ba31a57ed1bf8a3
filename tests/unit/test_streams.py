"""Several streams: taps on vLLM's own layers for NVIDIA, without a GPU; what must hold of their rows; what is refused."""

from __future__ import annotations

import inspect
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from steercap.adapters.hooks import require_whole_batches
from steercap.architectures.families import FAMILIES
from steercap.architectures.families.base import Family
from steercap.architectures.sites import SITES
from steercap.architectures.sites.base import RowShape, Sizes, Tap
from steercap.architectures.sites.streams import operators
from steercap.config import MIXED, Settings
from steercap.core.spec import Point
from steercap.errors import UnsupportedModel, UnsupportedRunner
from steercap.kernels import tap as taps
from steercap.requests.equations import STREAMS, mixes

N, S, HIDDEN = 5, 4, 16
V4 = FAMILIES["deepseek_v4"]
SIZES = Sizes(HIDDEN, 512, 1, 1, lambda _module, _what: RowShape((HIDDEN,)))
#: The order in which a layer's points come in a pass.
ORDER = STREAMS[:3] + STREAMS[4:7]


def mixed(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, res: torch.Tensor) -> torch.Tensor:
    """The streams behind a block."""
    return torch.einsum("nij,nih->njh", res, residual) + post * x[:, None]


def pre(residual: torch.Tensor, fn: torch.Tensor, *_: Any, **__: Any) -> Any:
    """What an operator makes of streams, in float32: enough that all of it depends on all of them."""
    logits = residual.flatten(1) @ fn.T
    post, res = torch.sigmoid(logits[:, S : 2 * S])[..., None], torch.softmax(logits[:, 2 * S :].view(-1, S, S), 1)
    return post, res, (torch.sigmoid(logits[:, :S])[..., None] * residual).sum(1)


def fused(x: Any, residual: Any, post_layer_mix: Any, comb_res_mix: Any, fn: Any, *_: Any, **__: Any) -> Any:
    """The same behind a block, off by a rounding, as a kernel that sums in another order is."""
    streams = mixed(x, residual, post_layer_mix, comb_res_mix)
    return (streams, *(part * (1 + 2**-20) for part in pre(streams, fn)))


def broadcast(residual: Any, fn: Any, *_: Any, **__: Any) -> Any:
    """The same of an embedding."""
    streams = residual[:, None].repeat(1, S, 1)
    return (streams, *(part * (1 + 2**-20) for part in pre(streams, fn)))


KERNELS: Any = {"mhc_pre_tilelang": pre, "mhc_fused_post_pre_tilelang": fused, "mhc_pre_broadcast_tilelang": broadcast}


def nvidia_layer(seed: int) -> nn.Module:
    """A layer that runs vLLM's `forward` for NVIDIA, over kernels of this file; its blocks are small."""
    from vllm.models.deepseek_v4.nvidia import model as nvidia

    generator = torch.Generator().manual_seed(seed)
    layer: Any = nn.Module()
    layer.attn_norm = layer.ffn_norm = SimpleNamespace(weight=torch.ones(HIDDEN), variance_epsilon=1e-6)
    layer.hc_mult, layer.use_sequence_parallel, layer.hc_attn_fn_broadcast = S, False, torch.empty(0)
    layer.rms_norm_eps = layer.hc_eps = 1e-6
    layer.hc_post_alpha, layer.hc_sinkhorn_iters = 2.0, 20
    for block in ("attn", "ffn"):
        weights = torch.randn((2 + S) * S, S * HIDDEN, generator=generator) / 4
        setattr(layer, f"hc_{block}_fn", nn.Parameter(weights, requires_grad=False))
        setattr(layer, f"hc_{block}_scale", torch.ones(3))
        setattr(layer, f"hc_{block}_base", torch.zeros((2 + S) * S))
    layer.attn = lambda _positions, x, _cache: torch.tanh(x)
    layer.ffn = lambda x, _ids, _routing: torch.sin(x)
    written: Any = nvidia.DeepseekV4DecoderLayer.forward
    for name, kernel in KERNELS.items():
        kernel.__signature__ = inspect.signature(getattr(nvidia, name))  # taps go by vLLM's names of arguments
    scope = {**written.__globals__, **KERNELS}
    forward = FunctionType(written.__code__, scope, "forward", written.__defaults__)
    layer.__class__ = type("Layer", (nn.Module,), {"forward": forward})
    return layer  # type: ignore[no-any-return]


class Seen:
    """Stands behind the taps: keeps the rows of each point, and adds to those of one."""

    def __init__(self, edit: int | None = None, added: torch.Tensor | None = None) -> None:
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.edit, self.added = edit, added

    def on_tap(self, hidden: torch.Tensor, residual: torch.Tensor | None, point: torch.Tensor, kind: int) -> None:
        assert residual is None
        assert kind == 7
        if int(point) == self.edit:
            hidden += self.added
        self.rows.setdefault(int(point), []).append(hidden.clone())


@pytest.fixture
def bound() -> Any:
    """Bind what stands behind the taps, for the length of a test."""
    yield taps.bind
    taps.bind(None)


def attach(layer: nn.Module, order: tuple[str, ...] = ORDER) -> None:
    """All taps of a layer, put in in some order, but for those that come first, as `worker.install` has it."""
    for site in sorted(order, key=lambda name: not SITES[name].first):
        SITES[site].rows(layer, V4, SIZES)
        SITES[site].attach(layer, V4, Tap(torch.tensor([ORDER.index(site)], dtype=torch.int32), 7))


def run(layers: list[nn.Module], embedded: torch.Tensor) -> tuple[Any, ...]:
    """A pass through some layers."""
    carried: tuple[Any, ...] = (embedded, None, None, None)
    for layer in layers:
        x, residual, post, res = carried
        carried = layer(x, torch.arange(N), None, post, res, residual)
    return carried


EMBEDDED = torch.randn(N, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("start", [EMBEDDED, EMBEDDED[:, None].repeat(1, S, 1)], ids=["embedding", "stage"])
def test_idle_taps_change_no_bit_of_a_fused_layer(bound, start) -> None:
    """Though what the operator gives is not what it would give of streams it takes: whatever the first layer is given."""
    plain = run([nvidia_layer(1), nvidia_layer(2)], start.clone())
    layers = [nvidia_layer(1), nvidia_layer(2)]
    for layer in layers:
        attach(layer)
    bound(seen := Seen())
    found = run(layers, start.clone())
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert {point: len(rows) for point, rows in seen.rows.items()} == dict.fromkeys(range(len(ORDER)), 2)


@pytest.mark.parametrize("order", [ORDER, ORDER[::-1]], ids=["forwards", "backwards"])
@pytest.mark.parametrize("site", ["mhc_streams_pre_attn", "mhc_streams_pre_mlp"])
def test_an_edit_of_the_streams_of_a_fused_layer_reaches_all_that_is_made_of_them(bound, site, order) -> None:
    """The coefficients, what the block reads, and the streams behind it; of rows that it changed, and of no others."""
    added = torch.zeros(N, S * HIDDEN)
    added[2, HIDDEN : 2 * HIDDEN] = 0.5
    bound(clean := Seen())
    layers = [nvidia_layer(1), nvidia_layer(2)]
    attach(layers[1], order)
    run(layers, EMBEDDED.clone())
    layers = [nvidia_layer(1), nvidia_layer(2)]
    attach(layers[1], order)
    bound(seen := Seen(ORDER.index(site), added))
    x, streams, post, res = run(layers, EMBEDDED.clone())
    rows = [seen.rows[number][0] for number in range(len(ORDER))]
    at, block = ORDER.index(site), "attn" if site.endswith("attn") else "ffn"
    edited = rows[at].view(N, S, HIDDEN)
    said = pre(edited, getattr(layers[1], f"hc_{block}_fn"))
    assert torch.equal(rows[at], clean.rows[at][0] + added)
    assert torch.equal(rows[at + 1][2], said[0][2].flatten())
    assert torch.equal(rows[at + 2][2], said[1][2].flatten())
    others = [0, 1, 3, 4]
    assert all(torch.equal(rows[number][others], clean.rows[number][0][others]) for number in range(len(ORDER)))
    if block == "attn":
        behind = mixed(torch.tanh(said[2]), edited, said[0], said[1]).flatten(1)
        assert torch.allclose(rows[3][2], behind[2], atol=1e-6)
    else:
        assert torch.equal(streams[2], edited[2])
        assert torch.equal(x[2], torch.sin(said[2])[2])
        assert torch.equal(post[2].flatten(), rows[4][2])
        assert torch.equal(res[2].flatten(), rows[5][2])


def test_a_layer_has_operators_of_its_own() -> None:
    """Taps of one layer are in no other, and the file that layers have in common stays as it is."""
    from vllm.models.deepseek_v4.nvidia import model as nvidia

    first, second = nvidia_layer(1), nvidia_layer(2)
    attach(first)
    assert operators(first, ["mhc_pre_tilelang"])[0].module is operators(first, ["mhc_pre_tilelang"])[0].module
    assert operators(first, ["mhc_pre_tilelang"])[0].module is not operators(second, ["mhc_pre_tilelang"])[0].module
    assert isinstance(nvidia.mhc_pre_tilelang, FunctionType)
    with pytest.raises(UnsupportedModel, match="calls neither mhc_pre nor mhc_pre_tilelang"):
        operators(nn.Linear(1, 1), ["mhc_pre", "mhc_pre_tilelang"])


# What must hold


def layer_rows() -> dict[Point, torch.Tensor]:
    """Rows of a layer that is also the last, as the equations say."""
    generator = torch.Generator().manual_seed(3)
    rows: dict[Point, torch.Tensor] = {}
    streams = torch.randn(N, S, HIDDEN, generator=generator).double()
    for at, name in ((0, "mhc_streams_pre_attn"), (4, "mhc_streams_pre_mlp")):
        post = torch.rand(N, S, generator=generator).double()
        res = torch.softmax(torch.randn(N, S, S, generator=generator).double(), 1)
        block = torch.randn(N, HIDDEN, generator=generator).double()
        for site, one in zip(STREAMS[at : at + 4], (streams, post, res, block), strict=True):
            rows[Point(0, site)] = one
        assert STREAMS[at] == name
        streams = mixed(block, streams, post[..., None], res)
    rows[Point(0, STREAMS[8])] = streams
    return rows


def test_rows_of_streams_that_are_what_their_names_say_are_proved() -> None:
    """Two sums of residual mixes, and the streams behind two blocks; with an edit too."""
    rows, end = layer_rows(), Point(0, "mhc_streams_final")
    claims = list(mixes(rows, end))
    assert len(claims) == 4
    assert all(claim.holds for claim in claims)
    added = torch.ones(N, S * HIDDEN).double()
    rows[end] = rows[end] + added.view(N, S, HIDDEN)
    assert not all(claim.holds for claim in mixes(rows, end))
    assert all(claim.holds for claim in mixes(rows, end, (end, added)))


@pytest.mark.parametrize("wrong", ["transposed", "swapped", "block", "stream", "late"])
def test_rows_of_streams_that_are_something_else_are_not(wrong) -> None:
    """A mix the other way round, one block's for the other's, a block's input, streams in another order, or behind."""
    rows, end = layer_rows(), Point(0, "mhc_streams_final")
    one, other = (Point(0, STREAMS[place]) for place in (2, 6))
    match wrong:
        case "transposed":
            rows[one] = rows[one].mT
        case "swapped":
            rows[one], rows[other] = rows[other], rows[one]
        case "block":
            rows[Point(0, "attn_out")] = rows[Point(0, "attn_out")] * 1.1
        case "stream":
            rows[Point(0, STREAMS[0])] = rows[Point(0, STREAMS[0])].roll(1, 1)
        case _:
            rows[Point(0, STREAMS[4])] = rows[end]
    assert not all(claim.holds for claim in mixes(rows, end))


# What is armed, and what is refused


def armed(family: Family, *sites: str) -> set[str]:
    """The sites that an engine arms at the last layer."""
    config = SimpleNamespace(num_hidden_layers=3)
    points = Settings(sites=sites, layers=[0]).armed(
        3, exists=lambda point: SITES[point.site].exists(family, config, point.layer), end=family.end
    )
    return {point.site for point in points if point.layer == 2}


def test_the_last_streams_are_armed_where_others_have_resid_post() -> None:
    """And all that the last layer mixes, where any of it is asked for."""
    assert armed(V4, "final_norm") == {"final_norm", "mhc_streams_final"}
    assert armed(V4, "mhc_streams_pre_mlp") == armed(V4, "attn_out") == {*MIXED, "mhc_streams_final"}
    assert armed(FAMILIES["llama"], "resid_post") == {"resid_post"}


@pytest.mark.parametrize("site", [site for site in SITES if site.startswith("mhc_")])
def test_models_with_one_stream_have_none_of_these_sites(site) -> None:
    """They are refused by name before anything is loaded."""
    with pytest.raises(UnsupportedModel, match=f"this model has no {site} at any of the layers"):
        armed(FAMILIES["llama"], site)


def test_a_model_with_several_streams_has_no_single_one() -> None:
    """The message says what it has."""
    with pytest.raises(
        UnsupportedModel, match=r"no resid_post at any .* it carries several streams, see .*mhc_streams_final"
    ):
        armed(V4, "resid_post")


def test_layers_that_shard_tokens_are_refused() -> None:
    """Rows there are of other tokens than the batch's."""
    whole, sharded = SimpleNamespace(use_sequence_parallel=False), SimpleNamespace(use_sequence_parallel=True)
    require_whole_batches([whole, nn.Linear(1, 1)])
    with pytest.raises(UnsupportedRunner, match="sequence-parallel"):
        require_whole_batches([whole, sharded])
