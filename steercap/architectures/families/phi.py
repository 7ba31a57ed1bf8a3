"""Phi 1 and 2, by transformers' modules: attention and feed-forward side by side after one norm."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("PhiForCausalLM",),
    classes=("phi.PhiDecoderLayer",),
    resid_mid="",
    final_norm="model.final_layernorm",
    attn_proj="self_attn.dense",
    mlp_proj="mlp.fc2",
)
