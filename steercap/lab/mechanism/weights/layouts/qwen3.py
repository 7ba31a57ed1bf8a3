"""Qwen 3: Llama's weights, and a norm of each head's queries and keys; its layers may have experts."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
)
