"""HyperCLOVA X: the blocks' outputs are multiplied by a constant before they are added; layers return the stream."""

from typing import Any

from steercap.architectures.families.base import Family
from steercap.architectures.families.granite import multiplier


def _logits(config: Any) -> float:
    return float(config.logits_scaling)


MEMBER = Family(
    architectures=("HyperCLOVAXForCausalLM",),
    classes=("hyperclovax.HyperCLOVAXDecoderLayer",),
    attn_out="post_norm1|self_attn",
    mlp_out="post_norm2|mlp",
    attn_in="self_attn",
    mlp_in="mlp",
    residual_output=None,
    residual_input="",
    factor=multiplier,
    logits=_logits,
)
