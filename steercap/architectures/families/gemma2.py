"""Gemma 2: a norm after each block, whose output is what the block adds; the stream is hidden + residual."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("Gemma2ForCausalLM",),
    classes=("gemma2.Gemma2DecoderLayer",),
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
    attn_in="self_attn",
    mlp_in="mlp",
    resid_mid="pre_feedforward_layernorm",
)
