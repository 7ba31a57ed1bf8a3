"""Mamba 2: a layer is one block, in the place of attention in other models."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("Mamba2ForCausalLM",),
    classes=("mamba2.Mamba2DecoderLayer", "mamba2.Mamba2Block"),
    layers="backbone.layers",
    attn_out="mixer",
    mlp_out="",
    resid_mid="",
    final_norm="backbone.norm_f",
    attn_proj="",
    attention="",
    mlp_proj="",
    single=True,
)
