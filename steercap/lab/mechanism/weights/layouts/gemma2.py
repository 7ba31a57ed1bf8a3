"""Gemma 2: a norm behind each block, too."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=("Gemma2ForCausalLM",),
    attn_post="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post="post_feedforward_layernorm",
)
