"""Gemma 1: embeddings scaled before the first layer; the stream is hidden + residual."""

from steercap.architectures.families.base import TINY, Family

MEMBER = Family(
    architectures=("GemmaForCausalLM",),
    classes=("gemma.GemmaDecoderLayer",),
    tiny={"model_type": "gemma", **TINY, "head_dim": 32, "tie_word_embeddings": True},
)
