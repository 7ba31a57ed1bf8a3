"""EXAONE 4: a norm follows each block, and its output is what the block adds; layers return the whole stream first."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("Exaone4ForCausalLM",),
    classes=("exaone4.Exaone4DecoderLayer",),
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
    attn_in="self_attn",
    mlp_in="mlp",
    resid_mid="mlp",
    residual_output=None,
    residual_input="",
)
