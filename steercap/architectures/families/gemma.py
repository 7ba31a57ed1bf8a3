"""Gemma 1: embeddings scaled before the first layer; the stream is hidden + residual."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("GemmaForCausalLM",),
    classes=("gemma.GemmaDecoderLayer",),
)
