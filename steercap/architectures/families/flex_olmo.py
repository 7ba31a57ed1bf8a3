"""FlexOlmo, by transformers' modules: OLMo 2's layer with experts."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("FlexOlmoForCausalLM",),
    classes=("flex_olmo.FlexOlmoDecoderLayer",),
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
    attn_in="self_attn",
    mlp_in="mlp",
    resid_mid="mlp",
    mlp_proj="",
    router="mlp.gate",
    varied=True,
)
