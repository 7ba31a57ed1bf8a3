"""Qwen 3 Next: a gated delta network in place of attention in most layers, a gate on the heads' output in others."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("Qwen3NextForCausalLM",),
    classes=("qwen3_next.Qwen3NextDecoderLayer",),
    attn_out="self_attn|linear_attn",
    gated=True,
    router="mlp.gate",
    varied=True,
)
