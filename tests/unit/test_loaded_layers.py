"""Layers as vLLM loads them: heads that differ from layer to layer, streams of another scale, offloaded weights."""

from __future__ import annotations

import inspect
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.AXK1 import AXK1DecoderLayer
from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer
from vllm.model_executor.models.glm4_moe import Glm4MoeDecoderLayer
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.openpangu import OpenPanguDecoderLayer
from vllm.model_executor.offloader.prefetch import PrefetchOffloader
from vllm.model_executor.offloader.uva import UVAOffloader

from steercap.adapters.hooks import require_one_call, require_true_scale
from steercap.architectures.families import FAMILIES, families_of, over_transformers
from steercap.architectures.families.base import Family, arguments_of
from steercap.architectures.sites import SITES
from steercap.architectures.sites.base import RowShape, Sizes, read_by
from steercap.architectures.sites.residual import taken_by
from steercap.errors import UnsupportedModel, UnsupportedRunner


def bare(kind: type[nn.Module], **attributes: Any) -> Any:
    """One of vLLM's layers with these attributes, and none of its modules."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    vars(layer).update(attributes)
    return layer


def sizes(ranks: int = 1, kv_heads: int = 8) -> Sizes:
    return Sizes(64, 512, kv_heads, ranks, lambda *_: RowShape((64,)))


# Heads


def gemma(total: int, held: int) -> nn.Module:
    """A layer of Gemma 4 with this many key heads, some of which are on each rank."""
    layer = nn.Module()
    layer.self_attn = bare(nn.Module, total_num_kv_heads=total)
    layer.self_attn.attn = bare(
        nn.Module,
        num_heads=4,
        num_kv_heads=held,
        head_size=32,
        head_size_v=32,
        kv_sharing_target_layer_name=None,
    )
    return layer


@pytest.mark.parametrize("site", ["k", "v"])
def test_key_heads_are_those_of_the_layer(site) -> None:
    """Gemma 4 has fewer in some layers than in others: what ranks hold copies of is not a row of all ranks' heads."""
    family = Family()
    assert SITES[site].rows(gemma(8, 2), family, sizes(4)) == RowShape((8, 32), 4)
    assert SITES[site].rows(gemma(1, 1), family, sizes(4)) == RowShape((1, 32), 1)
    assert SITES["q"].rows(gemma(2, 1), family, sizes(4)) == RowShape((16, 32), 4)
    with pytest.raises(UnsupportedModel, match=r"this layer has 2 key heads, .* 4 tensor-parallel ranks .* copies"):
        SITES[site].rows(gemma(2, 1), family, sizes(4))


@pytest.mark.parametrize("site", ["k", "v"])
def test_keys_that_an_operator_caches_before_attention_are_refused(site) -> None:
    """HunYuan V3 with HPC_ATTN calls attention with keys before their norm and rotation, which it does not read."""
    layer = gemma(8, 8)
    layer.self_attn.hpc_rope_norm = None  # as with other backends
    assert SITES[site].rows(layer, Family(), sizes()) == RowShape((8, 32), 1)
    layer.self_attn.hpc_rope_norm = object()
    with pytest.raises(UnsupportedModel, match=r"HPC_ATTN .* leave k and v out"):
        SITES[site].rows(layer, Family(), sizes())
    assert SITES["q"].rows(layer, Family(), sizes()) == RowShape((4, 32), 1)


@pytest.mark.parametrize(("layer", "heads"), [(0, (16, 16)), (1, (16, 64))])
def test_heads_over_transformers_modules_are_those_of_the_layer(layer, heads) -> None:
    """Gemma 4's sliding layers have smaller heads than the greatest, which vLLM's configuration tells."""
    config = Gemma4TextConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=64,
        layer_types=["sliding_attention", "full_attention"],
    )
    made = nn.Module()
    made.self_attn = Gemma4TextAttention(config, layer)
    made.self_attn.o_proj.input_size = made.self_attn.o_proj.in_features  # as vLLM's module in its place has
    family = over_transformers(FAMILIES["gemma4"])
    assert SITES["z"].rows(made, family, sizes()) == RowShape(heads, 1)


# Scale


@pytest.mark.parametrize("kind", [DeepseekV2DecoderLayer, AXK1DecoderLayer, OpenPanguDecoderLayer])
def test_layers_that_divide_their_stream_are_refused(kind) -> None:
    """In float16 alone, and where the factor is not one."""
    divided, plain = bare(kind, routed_scaling_factor=2.5), bare(kind, routed_scaling_factor=1.0)
    require_true_scale([divided], torch.bfloat16)
    require_true_scale([plain, bare(kind, routed_scaling_factor=None)], torch.float16)
    with pytest.raises(UnsupportedRunner, match=r"divides the residual stream .* by their routed_scaling_factor, 2\.5"):
        require_true_scale([plain, divided], torch.float16)


def test_layers_that_leave_their_stream_alone_are_not_refused() -> None:
    """GLM-4.5's have the attribute too, and no use for it."""
    require_true_scale([bare(Glm4MoeDecoderLayer, routed_scaling_factor=2.5), bare(LlamaDecoderLayer)], torch.float16)


# Offloading


def fetching(layer: nn.Module) -> nn.Module:
    """A layer whose weights vLLM would fetch before each call."""
    PrefetchOffloader._hook_module_forward(SimpleNamespace(), 0, layer)
    return layer


def test_arguments_are_found_where_weights_are_fetched() -> None:
    """vLLM replaces such a layer's `forward` by one that takes any arguments."""
    layer = fetching(bare(LlamaDecoderLayer))
    assert list(inspect.signature(layer.forward).parameters) == ["args", "kwargs"]
    names = ["positions", "hidden_states", "residual"]
    assert arguments_of(layer)[:3] == arguments_of(bare(LlamaDecoderLayer))[:3] == names
    rows = torch.ones(1, 4), torch.zeros(1, 4)
    (family,) = families_of([layer])
    assert taken_by(layer, family)((None, *rows), {}) == rows
    unknown = fetching(bare(type("Unknown", (LlamaDecoderLayer,), {})))
    assert families_of([unknown])[0].hidden_input == "hidden_states"
    assert read_by(layer) == (1, "hidden_states")
    require_one_call([layer])


def test_an_operator_reads_what_its_own_code_reads() -> None:
    """vLLM's dispatch by platform takes any arguments too, in the class as well."""
    assert read_by(bare(RMSNorm)) == (0, "x")


def test_layers_that_are_called_within_themselves_are_refused() -> None:
    """Where vLLM copies offloaded weights in each call."""
    (code,) = (
        one for one in UVAOffloader._maybe_offload_to_cpu.__code__.co_consts if getattr(one, "co_name", "") == "forward"
    )
    cells = tuple(CellType() for _ in code.co_freevars)
    copying = FunctionType(code, UVAOffloader._maybe_offload_to_cpu.__globals__, closure=cells)
    with pytest.raises(UnsupportedRunner, match="so that its taps run twice"):
        require_one_call([bare(LlamaDecoderLayer), bare(LlamaDecoderLayer, forward=copying)])
