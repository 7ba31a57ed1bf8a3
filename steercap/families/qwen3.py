"""Qwen 3: the stream is hidden + residual."""

from steercap.families.base import TINY, Family

MEMBER = Family(
    architectures=("Qwen3ForCausalLM",),
    layers="model.layers",
    attn_out="self_attn",
    mlp_out="mlp",
    final_norm="model.norm",
    residual_output=1,
    residual_input="residual",
    tiny={"model_type": "qwen3", **TINY, "head_dim": 32},
)
