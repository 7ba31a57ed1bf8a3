"""Qwen 3: the stream is hidden + residual."""

from steercap.architectures.families.base import TINY, Family

MEMBER = Family(
    architectures=("Qwen3ForCausalLM",),
    classes=("qwen3.Qwen3DecoderLayer", "qwen3_vl.Qwen3VLDecoderLayer"),
    tiny={"model_type": "qwen3", **TINY, "head_dim": 32},
)
