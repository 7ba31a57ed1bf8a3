"""Mistral: Llama's layer with an optional fourth argument; the stream is hidden + residual."""

from steercap.families.base import TINY, Family

MEMBER = Family(
    architectures=(
        "MistralForCausalLM",
        "Ministral3ForCausalLM",
    ),
    classes=("mistral.MistralDecoderLayer",),
    tiny={"model_type": "mistral", **TINY, "sliding_window": 24},
)
