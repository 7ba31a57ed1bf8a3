"""Families that multiply what their blocks add, or their logits, by constants of the configuration: by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from steercap.architectures.families.base import Family


def logit_scale(config: Any) -> float:
    """Return the factor of Command's logits."""
    return float(config.logit_scale)


def multiplier(config: Any) -> float:
    """Return the factor of the blocks' outputs in all of Granite's layers."""
    return float(config.residual_multiplier)


def divisor(config: Any) -> float:
    """Return the factor of Granite's logits."""
    return 1 / float(config.logits_scaling)


def _logits_scaling(config: Any) -> float:
    return float(config.logits_scaling)


def _depth_multiplier(config: Any) -> float:
    return float(config.scale_depth / config.num_hidden_layers**0.5)


def _width_divisor(config: Any) -> float:
    return float(config.dim_model_base / config.hidden_size)


MEMBERS: Final[Mapping[str, Family]] = {
    # Command R: attention and feed-forward side by side after one norm; layers return the whole stream first.
    "cohere": Family(
        architectures=("CohereForCausalLM", "Cohere2ForCausalLM"),
        classes=("commandr.CohereDecoderLayer", "cohere.CohereDecoderLayer", "cohere2.Cohere2DecoderLayer"),
        resid_mid="",
        residual_output=None,
        residual_input="",
        logits=logit_scale,
    ),
    # Granite 3: the blocks' outputs are multiplied by a constant before they are added to the stream.
    "granite": Family(
        architectures=("GraniteForCausalLM", "GraniteSWAForCausalLM"),
        classes=("granite.GraniteDecoderLayer", "granite_swa.GraniteSWADecoderLayer"),
        residual_output=None,
        residual_input="",
        factor=multiplier,
        logits=divisor,
    ),
    # HyperCLOVA X: the blocks' outputs are multiplied by a constant before they are added; layers return the stream.
    "hyperclovax": Family(
        architectures=("HyperCLOVAXForCausalLM",),
        classes=("hyperclovax.HyperCLOVAXDecoderLayer",),
        attn_out="post_norm1|self_attn",
        mlp_out="post_norm2|mlp",
        attn_in="self_attn",
        mlp_in="mlp",
        residual_output=None,
        residual_input="",
        factor=multiplier,
        logits=_logits_scaling,
    ),
    # MiniCPM 3: the blocks' outputs are multiplied by a constant before they are added; values are padded in
    # attention.
    "minicpm3": Family(
        architectures=("MiniCPM3ForCausalLM",),
        classes=("minicpm3.MiniCPM3DecoderLayer",),
        divisor="scale_width",
        residual_output=None,
        residual_input="",
        attention="",
        factor=_depth_multiplier,
        logits=_width_divisor,
    ),
}
