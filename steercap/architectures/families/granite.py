"""Granite 3: what the blocks give is multiplied by a constant before it is added to the stream."""

from typing import Any

from steercap.architectures.families.base import Family


def multiplier(config: Any) -> float:
    """The constant, of all of Granite's layers."""
    return float(config.residual_multiplier)


def divisor(config: Any) -> float:
    """What Granite's logits are multiplied by."""
    return 1 / float(config.logits_scaling)


MEMBER = Family(
    architectures=("GraniteForCausalLM", "GraniteSWAForCausalLM"),
    classes=("granite.GraniteDecoderLayer", "granite_swa.GraniteSWADecoderLayer"),
    residual_output=None,
    residual_input="",
    factor=multiplier,
    logits=divisor,
)
