"""Layouts of decoder layers' weights: names of the modules in transformers' layer, for each naming scheme.

Only layouts that were checked against transformers' modules are listed; other architectures are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import nn

from steercap.errors import UnsupportedModel


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Module names of a decoder layer's weights in transformers; "" for a module that does not exist.

    The last projections of both blocks, and factors, are defined by the family.

    Args:
        architectures: names of architectures in `config.json`.
        attn_norm: norm before the attention block; "" if the block reads the stream directly.
        query, key, value: separate projections.
        fused: one projection for queries, keys and values, in place of `query`, `key` and `value`.
        order: order of its outputs: "stacked" is all queries, all keys, all values; "by_head" the three of each head.
        query_norm, key_norm: norms of queries and keys, of each head or of all at once.
        attn_post: norm of the attention block's output.
        mlp_norm: norm before the feed-forward block, as `attn_norm`.
        gate, up: projections to the neurons; without a gate, `up` alone.
        gate_up: one projection for both, gates first, in place of `gate` and `up`.
        mlp_post: norm of the feed-forward block's output.
        experts: names in checkpoints of the router, and of the gate, up and down projection of an expert by its number;
            empty if no layer has experts.
    """

    architectures: tuple[str, ...]
    attn_norm: str = "input_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    fused: str = ""
    order: Literal["stacked", "by_head"] = "stacked"
    query_norm: str = ""
    key_norm: str = ""
    attn_post: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    mlp_post: str = ""
    experts: tuple[str, ...] = ()

    @property
    def attention(self) -> tuple[str, ...]:
        """Names of the attention block's modules, without its last projection."""
        projections = (self.fused,) if self.fused else (self.query, self.key, self.value)
        return tuple(filter(None, (self.attn_norm, *projections, self.query_norm, self.key_norm, self.attn_post)))

    @property
    def neurons(self) -> tuple[str, ...]:
        """Names of the feed-forward block's modules, without its last projection."""
        projections = (self.gate_up,) if self.gate_up else (self.gate, self.up)
        return tuple(filter(None, (self.mlp_norm, *projections, self.mlp_post)))

    def read_by(self, module: nn.Module, path: str) -> dict[str, torch.Tensor]:
        """Return weights that read the stream, [neurons, hidden], of a feed-forward module at `path`: "gate", "up"."""

        def weight(name: str) -> torch.Tensor:
            linear = module.get_submodule(name.removeprefix(f"{path}."))
            found = linear.get_parameter("weight")
            return found.T if type(linear).__name__ == "Conv1D" else found  # Conv1D keeps its weight as [in, out]

        if self.gate_up:
            return dict(zip(("gate", "up"), weight(self.gate_up).chunk(2), strict=True))
        return {part: weight(name) for part, name in (("gate", self.gate), ("up", self.up)) if name}


#: Layouts by name; defaults of the fields are Llama's.
LAYOUTS: Final[Mapping[str, Layout]] = {
    # Cohere: both blocks read one norm.
    "cohere": Layout(
        architectures=("CohereForCausalLM",),
        mlp_norm="input_layernorm",
    ),
    # Gemma 2: a norm behind each block, too.
    "gemma2": Layout(
        architectures=("Gemma2ForCausalLM",),
        attn_post="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post="post_feedforward_layernorm",
    ),
    # Gemma 3: a norm behind each block, and norms of each head's queries and keys.
    "gemma3": Layout(
        architectures=("Gemma3ForCausalLM",),
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        attn_post="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post="post_feedforward_layernorm",
    ),
    # GPT-2: one projection makes queries, keys and values, and neurons have no gate.
    "gpt2": Layout(
        architectures=("GPT2LMHeadModel",),
        attn_norm="ln_1",
        fused="attn.c_attn",
        mlp_norm="ln_2",
        gate="",
        up="mlp.c_fc",
    ),
    # GPT-NeoX and Pythia: one projection makes query, key and value of each head in turn; neurons have no gate.
    "gpt_neox": Layout(
        architectures=("GPTNeoXForCausalLM",),
        fused="attention.query_key_value",
        order="by_head",
        gate="",
        up="mlp.dense_h_to_4h",
    ),
    # Llama, and models with the same weight names: separate projections, a gate, norms before the blocks.
    "llama": Layout(
        architectures=(
            "LlamaForCausalLM",
            "GemmaForCausalLM",
            "GraniteForCausalLM",
            "HeliumForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "SeedOssForCausalLM",
            "SmolLM3ForCausalLM",
            "StableLmForCausalLM",
        ),
    ),
    # Mixtral: the attention of Llama; all its layers have experts.
    "mixtral": Layout(
        architectures=("MixtralForCausalLM",),
        gate="",
        up="",
        experts=(
            "block_sparse_moe.gate",
            "block_sparse_moe.experts.{}.w1",
            "block_sparse_moe.experts.{}.w3",
            "block_sparse_moe.experts.{}.w2",
        ),
    ),
    # OLMo 2 and 3: blocks read the stream directly; a norm follows each block, and norms span all queries and all
    # keys.
    "olmo2": Layout(
        architectures=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        attn_norm="",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        attn_post="post_attention_layernorm",
        mlp_norm="",
        mlp_post="post_feedforward_layernorm",
    ),
    # Phi: both blocks read one norm, and neurons have no gate.
    "phi": Layout(
        architectures=("PhiForCausalLM",),
        mlp_norm="input_layernorm",
        gate="",
        up="mlp.fc1",
    ),
    # Phi-3: one projection makes queries, keys and values, another gates and neurons.
    "phi3": Layout(
        architectures=("Phi3ForCausalLM",),
        fused="self_attn.qkv_proj",
        gate_up="mlp.gate_up_proj",
    ),
    # Qwen 3: Llama's weights, and a norm of each head's queries and keys; its layers may have experts.
    "qwen3": Layout(
        architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        experts=(
            "mlp.gate",
            "mlp.experts.{}.gate_proj",
            "mlp.experts.{}.up_proj",
            "mlp.experts.{}.down_proj",
        ),
    ),
    # StarCoder 2: neurons have no gate.
    "starcoder2": Layout(
        architectures=("Starcoder2ForCausalLM",),
        gate="",
        up="mlp.c_fc",
    ),
}


def layout_of(architectures: Sequence[str]) -> Layout:
    """Return the weight layout of the first known architecture.

    Raises:
        UnsupportedModel: no architecture is known; the message lists the known ones.
    """
    for architecture in architectures:
        for layout in LAYOUTS.values():
            if architecture in layout.architectures:
                return layout
    known = sorted(name for layout in LAYOUTS.values() for name in layout.architectures)
    raise UnsupportedModel(
        f"the weights of {', '.join(architectures) or 'a model without architectures'} cannot be taken apart; those of "
        f"{', '.join(known)} can. A layout is one entry in steercap/lab/mechanism/weights/layouts.py."
    )
