"""Mistral: Llama's layer with an optional fourth argument; the stream is hidden + residual."""

from steercap.families.base import TINY, Family

MEMBER = Family(
    architectures=(
        "MistralForCausalLM",
        "Ministral3ForCausalLM",
    ),
    layers="model.layers",
    attn_out="self_attn",
    mlp_out="mlp",
    final_norm="model.norm",
    residual_output=1,
    residual_input="residual",
    tiny={"model_type": "mistral", **TINY, "sliding_window": 24},
)
