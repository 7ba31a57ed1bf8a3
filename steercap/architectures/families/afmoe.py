"""Trinity: norms before and after each block, a gate on the output of the heads, experts in most layers."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("AfmoeForCausalLM",),
    classes=("afmoe.AfmoeDecoderLayer",),
    attn_out="post_attention_layernorm",
    mlp_out="post_mlp_layernorm",
    attn_in="self_attn",
    mlp_in="mlp",
    resid_mid="pre_mlp_layernorm",
    gated=True,
    router="mlp.gate|mlp.router",
    varied=True,
)
