"""Mistral: Llama's layer with an optional fourth argument; the stream is hidden + residual."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("MistralForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM"),
    classes=("mistral.MistralDecoderLayer", "ministral.MinistralDecoderLayer", "ministral3.Ministral3DecoderLayer"),
)
