"""Mistral: Llama's layer with an optional fourth argument; the stream is hidden + residual."""

from steercap.architectures.families.base import TINY, Family

MEMBER = Family(
    architectures=("MistralForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM"),
    classes=("mistral.MistralDecoderLayer", "ministral.MinistralDecoderLayer", "ministral3.Ministral3DecoderLayer"),
    tiny={"model_type": "mistral", **TINY, "sliding_window": 24},
)
