"""A tap that adds and norms too gives what a tap, and then vLLM's norm, give; and it is put where just that follows."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.specs import edit, vector
from torch import nn
from workers import KINDS, batch, device_of, known_schemas, rows_of, some_runtime, tap, tap_norm

from steercap import SteeringSpec
from steercap.architectures.decoder import Decoder
from steercap.architectures.families import FAMILIES, over_transformers
from steercap.architectures.sites.base import Sizes
from steercap.core.messages import (
    Attach,
    Call,
    Collect,
    Configure,
    Configured,
    Owner,
    Placed,
    Vectors,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import SteeringPlan
from steercap.core.schema import RAW
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.kernels.reference import add_norm
from steercap.kernels.tap import bind
from steercap.steering.lowering import lower, scopes_of
from steercap.worker.install import install_taps
from steercap.worker.taps import Installed, TapSizes
from steercap.worker.taps.host import HostTaps

ARMED = {Point(0, "resid_post"): 0, Point(1, "resid_post"): 1}
EPSILON = 1e-5
STEERED, IDLE, PADDING = 4, 3, 2
#: One rounding; in Triton's interpreter, which cuts bfloat16 off instead, up to two units.
NEAR = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def normed(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The RMS norm of rows, in float64."""
    row = row.double()
    return row / (row.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def asking(runtime: Any, question: Any) -> Any:
    return decode_answer(runtime.answer(encode(Call((), question))))


def opened(kind: str, dtype: torch.dtype, width: int, edits: list[Any], *, before: bool, preserve: bool) -> Any:
    """A rank in the middle of a pass: the first request is edited and captured, the second one is not, padding follows."""
    runtime = some_runtime(kind, 2, width, dtype, slots=1, bank_rows=64, tokens=64)
    asking(runtime, Attach(1 << 20))
    ready = lower(
        SteeringSpec(edits, preserve_norm=preserve), armed=ARMED, schemas=known_schemas(ARMED, width, 2), num_layers=2,
        edits_per_point=8,
    )  # fmt: skip
    places, row = [], 0
    for blob in ready.configuration.blobs:
        places.append(tuple(range(row, row + blob.rows)))
        row += blob.rows
    blobs = zip(ready.configuration.blobs, places, strict=True)
    vectors = tuple(Vectors(blob.digest, place, ready.vectors[blob.digest]) for blob, place in blobs)
    placed = (Placed(0, ready.configuration, tuple(places)),)
    assert asking(runtime, Configure(vectors, placed)) == Configured(())
    scopes, replaced = scopes_of(ready, STEERED, STEERED)
    steering = SteeringPlan(0, ready.configuration.digest, b"", scopes, replaced)
    capture = CapturePlan((0, 1), (Range(0, None),), None, RAW, before_edits=before)
    runtime.register("r", Plan("r", STEERED, STEERED, capture=capture, steering=steering).encode(), 0)
    positions = [*range(STEERED), *range(IDLE)]
    counts = [STEERED, IDLE]
    runtime.begin_step(batch(kind, ["r", "other"], [0, 0], counts, range(STEERED + IDLE), positions))
    return runtime


def closed(runtime: Any) -> Any:
    """The share of the captured request, and its rows."""
    runtime.end_step()
    (share,) = asking(runtime, Collect((Wanted(Owner("r", 0), STEERED),))).shares
    return share, [] if share.failure else rows_of(runtime, share)


def both(  # noqa: PLR0917 -- one call a case
    kind: str, dtype: torch.dtype, width: int, edits: list[Any], rows: Any, weight: torch.Tensor, **options: Any
) -> Any:
    """Hidden, residual, share and rows of a tap with its norm; and those of a tap alone."""
    found = []
    for joined in (True, False):
        runtime = opened(kind, dtype, width, edits, **options)
        hidden, residual = (one.clone() for one in rows)
        tap(runtime, hidden.clone(), residual.clone(), 0)
        if joined:
            tap_norm(runtime, hidden, residual, weight, 1, EPSILON)
        else:
            tap(runtime, hidden, residual, 1)
        found.append((hidden, residual, *closed(runtime)))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("operations", "before", "preserve"),
    [
        ([], False, False),
        (["add"], False, False),
        (["add"], True, False),
        (["ablate", "cap"], False, True),
        (["low_rank", "relative", "sae_feature"], True, True),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 8), (torch.float16, 96), (torch.bfloat16, 128), (torch.float32, 576)]
)
def test_it_is_a_tap_and_then_a_norm(  # noqa: PLR0917 -- parameters
    kind, dtype, width, operations, before, preserve
) -> None:
    """Rows kept and edits are the tap's; every row, of idle tokens and padding too, is added and normed."""
    edits = [edit(name, width, seed=seed, layer=1) for seed, name in enumerate(operations)]
    edits += [edit("add", width, seed=9, layer=1, tokens=[1])]
    total = STEERED + IDLE + PADDING
    rows = [vector(total, width, seed=seed).to(device_of(kind), dtype) for seed in (1, 2)]
    weight = vector(width, seed=3).to(device_of(kind), dtype)
    (hidden, residual, _, kept), (edited, left, _, known) = both(
        kind, dtype, width, edits, rows, weight, before=before, preserve=preserve
    )
    assert len(kept) == 2
    assert all(map(torch.equal, kept, known))
    stream = edited.float() + left.float()
    assert not torch.equal(stream[:STEERED], rows[0][:STEERED].float() + rows[1][:STEERED].float())
    near = {"rtol": NEAR[dtype], "atol": NEAR[dtype] / 16}
    torch.testing.assert_close(residual.double(), stream.double(), **near)
    torch.testing.assert_close(hidden.double(), normed(stream, weight), **near)
    changed = (left == 0).all(-1)
    assert changed[1]
    assert not changed[STEERED:].any()
    assert torch.equal(residual[changed], edited[changed])  # as the tap rounds them


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_that_is_not_finite_is_told_as_a_tap_tells_it(kind, dtype) -> None:
    """An edited one becomes zero, as does its norm; another one is NaN for the layers that follow, as in vLLM."""
    width, total = 96, STEERED + IDLE + PADDING
    hidden, residual = (vector(total, width, seed=seed).to(device_of(kind), dtype) for seed in (1, 2))
    hidden[1, 5], hidden[STEERED, 7] = float("inf"), float("nan")
    edits, weight = [edit("add", width, layer=1)], torch.ones(width, dtype=dtype, device=hidden.device)
    (one, sums, share, _), (_, _, known, _) = both(
        kind, dtype, width, edits, (hidden, residual), weight, before=False, preserve=False
    )
    assert (share.failure, share.nonfinite) == (known.failure, known.nonfinite)
    assert not one[1].any()
    assert not sums[1].any()
    assert one[STEERED].isnan().any()
    assert one[[0, 2, 3, *range(STEERED + 1, total)]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_pass_rows_are_added_and_normed(dtype) -> None:
    """By the kernel that reads the tables, which is compiled first, and by that of idle passes, which reads none."""
    tokens, width = 531, 24
    runtime = some_runtime("cuda", 1, width, dtype, tokens=tokens)
    device, found = device_of("cuda"), []
    weight = vector(width, seed=3).to(device, dtype)
    for _ in range(2):
        hidden, residual = (vector(tokens, width, seed=seed).to(device, dtype) for seed in (1, 2))
        summed = hidden.float() + residual.float()
        tap_norm(runtime, hidden, residual, weight, 0, EPSILON)  # no pass is open: a tap alone would not run
        near = {"rtol": NEAR[dtype], "atol": NEAR[dtype] / 16}
        torch.testing.assert_close(hidden.double(), normed(summed, weight), **near)
        torch.testing.assert_close(residual.double(), summed.double(), **near)
        found.append((hidden, residual))
    assert all(map(torch.equal, *found))
    (launcher,) = runtime.taps._launchers
    assert [key[0] for key in launcher._compiled] == ["norm", "idle"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_reference_is_vllms_norm(dtype) -> None:
    """But for the second rounding, of the norm before its weights, that inductor leaves out."""
    from vllm import ir

    hidden, residual = (vector(7, 160, seed=seed).to(dtype) for seed in (1, 2))
    weight = vector(160, seed=3).to(dtype)
    native = ir.ops.fused_add_rms_norm.impls["native"].impl_fn
    want, summed = native(hidden.clone(), residual.clone(), weight, EPSILON)
    add_norm(hidden, residual, weight, EPSILON)
    assert torch.equal(residual, summed)
    torch.testing.assert_close(hidden, want, rtol=2 * torch.finfo(dtype).eps, atol=0)


def named(module: str) -> Any:
    """A decorator for a class that says it is one of vLLM's models."""

    def of(cls: type) -> type:
        cls.__module__ = f"vllm.model_executor.models.{module}"
        cls.__qualname__ = cls.__name__
        return cls

    return of


@named("llama")
class LlamaDecoderLayer(nn.Module):
    """What a layer of Llama's is to a tap."""

    def __init__(self, width: int, norms: Any) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norms(width), norms(width)
        self.self_attn, self.mlp = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states, residual = self.post_attention_layernorm(self.self_attn(hidden_states), residual)
        return self.mlp(hidden_states), residual


@named("llama")
class LlamaModel(nn.Module):
    """Layers, and a norm behind them."""

    def __init__(self, width: int, layers: int, norms: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaDecoderLayer(width, norms) for _ in range(layers))
        self.norm = norms(width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        return self.norm(hidden_states, residual)[0]


WIDTH, LAYERS, TOKENS = 8, 4, 5


@pytest.fixture(scope="module")
def norms():
    """vLLM's RMSNorm, outside of an engine."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    with set_current_vllm_config(VllmConfig()):
        yield RMSNorm


def installed(
    model: LlamaModel, armed: list[Point], norms: Any, family: Any = FAMILIES["llama"], **options: Any
) -> Installed:
    decoder = Decoder(model, "layers", model, options.pop("layers", dict(enumerate(model.layers))))
    sizes = Sizes(WIDTH, WIDTH, 1, 1, lambda *_: None)
    return install_taps(
        decoder, family, armed, sizes, torch.float32, shard=0, num_layers=LAYERS, device=torch.device("cpu"),
        norms=norms, **options,
    )  # fmt: skip


def tapped(model: LlamaModel) -> list[int]:
    """The layers whose `resid_post` is tapped in the norm behind them."""
    behind = [*(layer.input_layernorm for layer in model.layers[1:]), model.norm]
    return [layer for layer, norm in enumerate(behind) if hasattr(norm, "steercap_resid_post")]


POSTS = [Point(layer, "resid_post") for layer in range(LAYERS)]


@pytest.mark.parametrize(
    ("others", "options", "joined"),
    [
        ([], {}, [0, 1, 2, 3]),
        ([], {"norms": None}, []),
        ([], {"family": over_transformers(FAMILIES["llama"])}, []),
        ([], {"family": FAMILIES["gemma"]}, []),
        ([Point(2, "resid_pre"), Point(0, "resid_pre")], {}, [0, 2, 3]),
        ([Point(1, "resid_mid"), Point(3, "final_norm"), Point(0, "embed")], {}, [0, 1, 2, 3]),
        ([], {"aux": (2,)}, []),
        ([], {"weightless": 2}, [0, 2, 3]),
        ([], {"here": [1, 2]}, [1]),
    ],
)
def test_a_tap_is_in_the_norm_only_where_nothing_comes_between(norms, others, options, joined) -> None:
    """Of vLLM's own class, with weights, on this rank, where the loop hands rows on and no other tap reads them."""
    model = LlamaModel(WIDTH, LAYERS, norms)
    if "aux" in options:
        model.aux_hidden_state_layers = options.pop("aux")
    if "weightless" in options:
        model.layers[options.pop("weightless")].input_layernorm.has_weight = False
    if "here" in options:
        options["layers"] = {layer: model.layers[layer] for layer in options.pop("here")}
    options = {"norms": norms, **options}
    installed(model, sorted([*POSTS, *others]), **options)
    assert tapped(model) == joined


def run(model: LlamaModel, found: Installed, rows: torch.Tensor, call: Any = None) -> tuple[torch.Tensor, list[int]]:
    """What a pass gives, and how often each tap has fired."""
    taps = HostTaps(found, TapSizes(slots=1, bank_rows=1, entries=1, tokens=TOKENS))
    fired = [0] * len(found.points)
    original = taps.on_tap

    def on_tap(hidden: torch.Tensor, residual: torch.Tensor | None, point: torch.Tensor, kind: int) -> None:
        fired[int(point)] += 1
        hidden += 0.5 * (1 + int(point))
        original(hidden, residual, point, kind)

    taps.on_tap = on_tap  # type: ignore[method-assign]
    bind(taps)
    try:
        with torch.no_grad():
            return (model if call is None else call)(rows.clone()), fired
    finally:
        bind(None)


def test_the_model_computes_the_same(norms) -> None:
    """With taps in norms as with taps behind layers, compiled or not; and the layers are traced to the same code."""
    rows, outputs, graphs = vector(TOKENS, WIDTH, seed=1), [], []

    def kept(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    for joined in (norms, None):
        torch.manual_seed(0)
        model = LlamaModel(WIDTH, LAYERS, norms)
        found = installed(model, POSTS, joined)
        outputs.append(run(model, found, rows))
        outputs.append(run(model, found, rows, torch.compile(model, backend=kept, fullgraph=True)))
    for output, fired in outputs:
        assert fired == [1] * LAYERS
        torch.testing.assert_close(output, outputs[-1][0], rtol=1e-5, atol=1e-6)
    first, second = ([str(node.target) for node in graph.graph.nodes if node.op == "call_function"] for graph in graphs)
    assert [name.count("tap_norm") for name in first if "tap" in name] == [1] * LAYERS
    assert not any("tap_norm" in name for name in second)
    starts = [at for at, name in enumerate(first) if "tap_norm" in name]
    parts = [first[start:end] for start, end in pairwise(starts)]
    assert parts == [parts[0]] * (LAYERS - 1)
    (_, *others) = [node for node in graphs[0].graph.nodes if "tap_norm" in str(node.target)]
    assert all(node.args[4:] == others[0].args[4:] for node in others)  # the numbers in it


def test_a_norm_that_takes_no_residual_taps_nothing(norms) -> None:
    """So the pass fails as any whose tap did not fire, and the final norm of fetched rows is what it was."""
    torch.manual_seed(0)
    model = LlamaModel(WIDTH, LAYERS, norms)
    rows = vector(TOKENS, WIDTH, seed=1)
    found = installed(model, POSTS, norms)
    output, fired = run(model, found, rows, model.norm)
    assert fired == [0] * LAYERS
    plain = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + model.norm.variance_epsilon) * model.norm.weight
    torch.testing.assert_close(output, plain.detach())


@pytest.mark.parametrize(
    ("device", "compiled", "priority", "invariant", "joined"),
    [
        ("cuda", True, ["native"], "0", True),
        ("cuda", True, ["vllm_c", "native"], "0", False),
        ("cuda", False, ["native"], "0", False),
        ("cuda", True, None, "0", False),
        ("cuda", True, ["native"], "1", False),
        ("cpu", True, ["native"], "0", False),
    ],
)
def test_norms_are_vllms_only_where_inductor_compiles_them(  # noqa: PLR0917 -- parameters
    monkeypatch, device, compiled, priority, invariant, joined
) -> None:
    """Elsewhere vLLM rounds in other places, or has a kernel of its own, and a tap stays apart."""
    from vllm.config import CompilationMode
    from vllm.model_executor.layers.layernorm import RMSNorm

    from steercap.adapters.hooks import _norms_of

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    mode = CompilationMode.VLLM_COMPILE if compiled else CompilationMode.NONE
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(mode=mode, backend="inductor"),
        device_config=SimpleNamespace(device_type=device),
    )
    if priority is not None:
        config.kernel_config = SimpleNamespace(ir_op_priority=SimpleNamespace(fused_add_rms_norm=priority))
    assert _norms_of(config) is (RMSNorm if joined else None)
