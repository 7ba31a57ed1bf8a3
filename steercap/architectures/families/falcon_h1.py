"""Falcon H1: attention beside Mamba 2 in every layer; the layer adds both, scaled, so no module outputs the sum."""

from typing import Any

from steercap.architectures.families.base import Family


def _logits(config: Any) -> float:
    return float(config.lm_head_multiplier)


def _scaled(config: Any) -> float:
    return float(config.mlp_multipliers[1])


MEMBER = Family(
    architectures=("FalconH1ForCausalLM",),
    classes=("falcon_h1.FalconH1ParallelHybrid", "falcon_h1.FalconH1DecoderLayer"),
    attn_out="",
    mlp_out="feed_forward",
    resid_mid="pre_ff_layernorm",
    final_norm="model.final_layernorm",
    residual_output=None,
    residual_input="",
    mlp_proj="feed_forward.down_proj",
    scaled=_scaled,
    logits=_logits,
)
