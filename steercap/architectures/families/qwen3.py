"""Qwen 3: the stream is hidden + residual."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("Qwen3ForCausalLM",),
    classes=("qwen3.Qwen3DecoderLayer", "qwen3_vl.Qwen3VLDecoderLayer"),
)
