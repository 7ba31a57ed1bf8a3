"""Llama and what shares its decoder layer: the stream is hidden + residual."""

from steercap.families.base import TINY, Family

MEMBER = Family(
    architectures=(
        "LlamaForCausalLM",
        "LLaMAForCausalLM",
        "InternLM3ForCausalLM",
        "Phi3ForCausalLM",
        "Ernie4_5ForCausalLM",
    ),
    classes=("llama.LlamaDecoderLayer",),
    tiny={"model_type": "llama", **TINY},
)
