"""Qwen 2 and 2.5: the stream is hidden + residual."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("Qwen2ForCausalLM",),
    classes=("qwen2.Qwen2DecoderLayer",),
)
