"""Gemma 1: embeddings scaled before the first layer; the stream is hidden + residual."""

from steercap.families.base import TINY, Family

MEMBER = Family(
    architectures=("GemmaForCausalLM",),
    layers="model.layers",
    attn_out="self_attn",
    mlp_out="mlp",
    final_norm="model.norm",
    residual_output=1,
    residual_input="residual",
    tiny={"model_type": "gemma", **TINY, "head_dim": 32, "tie_word_embeddings": True},
)
