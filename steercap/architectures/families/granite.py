"""Granite 3: the blocks' outputs are multiplied by a constant before they are added to the stream."""

from typing import Any

from steercap.architectures.families.base import Family


def multiplier(config: Any) -> float:
    """Return the factor of the blocks' outputs in all of Granite's layers."""
    return float(config.residual_multiplier)


def divisor(config: Any) -> float:
    """Return the factor of Granite's logits."""
    return 1 / float(config.logits_scaling)


MEMBER = Family(
    architectures=("GraniteForCausalLM", "GraniteSWAForCausalLM"),
    classes=("granite.GraniteDecoderLayer", "granite_swa.GraniteSWADecoderLayer"),
    residual_output=None,
    residual_input="",
    factor=multiplier,
    logits=divisor,
)
