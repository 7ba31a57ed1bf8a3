"""Gemma 3: a norm behind each block, and norms of each head's queries and keys."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=("Gemma3ForCausalLM",),
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    attn_post="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post="post_feedforward_layernorm",
)
