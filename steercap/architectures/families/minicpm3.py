"""MiniCPM 3: the blocks' outputs are multiplied by a constant before they are added; values are padded in attention."""

from typing import Any

from steercap.architectures.families.base import Family


def _multiplier(config: Any) -> float:
    return float(config.scale_depth / config.num_hidden_layers**0.5)


def _logits(config: Any) -> float:
    return float(config.dim_model_base / config.hidden_size)


MEMBER = Family(
    architectures=("MiniCPM3ForCausalLM",),
    classes=("minicpm3.MiniCPM3DecoderLayer",),
    divisor="scale_width",
    residual_output=None,
    residual_input="",
    attention="",
    factor=_multiplier,
    logits=_logits,
)
