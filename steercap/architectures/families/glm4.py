"""GLM-4 0414: norms before and after each block; `post_attention_layernorm` is the one before the second."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("Glm4ForCausalLM",),
    classes=("glm4.Glm4DecoderLayer",),
    attn_out="post_self_attn_layernorm",
    mlp_out="post_mlp_layernorm",
    attn_in="self_attn",
    mlp_in="mlp",
)
