"""Qwen 2 and 2.5: the stream is hidden + residual."""

from steercap.families.base import TINY, Family

MEMBER = Family(
    architectures=("Qwen2ForCausalLM",),
    layers="model.layers",
    attn_out="self_attn",
    mlp_out="mlp",
    final_norm="model.norm",
    residual_output=1,
    residual_input="residual",
    tiny={"model_type": "qwen2", **TINY},
)
