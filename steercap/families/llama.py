"""Llama and what shares its decoder layer: the stream is hidden + residual."""

from steercap.families.base import TINY, Family

MEMBER = Family(
    architectures=(
        "LlamaForCausalLM",
        "LLaMAForCausalLM",
        "InternLM3ForCausalLM",
    ),
    layers="model.layers",
    attn_out="self_attn",
    mlp_out="mlp",
    final_norm="model.norm",
    residual_output=1,
    residual_input="residual",
    tiny={"model_type": "llama", **TINY},
)
