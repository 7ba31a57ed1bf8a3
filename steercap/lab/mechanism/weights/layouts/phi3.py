"""Phi-3: one projection makes queries, keys and values, another gates and neurons."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=("Phi3ForCausalLM",),
    fused="self_attn.qkv_proj",
    gate_up="mlp.gate_up_proj",
)
