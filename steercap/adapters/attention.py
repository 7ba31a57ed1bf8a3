"""Attention rules of vLLM's attention modules, as far as they are understood.

It relies, besides the names in `releases`, on this: the backends named here compute a causal softmax from their
`scale`, `logits_soft_cap`, `sinks` and the module's `sliding_window`, and from nothing else but options that are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType

from steercap.adapters.releases import require
from steercap.architectures.families.base import Family, located
from steercap.core.attention import AttentionRule
from steercap.core.spec import Point

#: Backends whose source code was checked for their arithmetic.
_KNOWN: Final = frozenset({"CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"})


def attention_rules(
    layers: Mapping[int, nn.Module], family: Family, points: Sequence[Point], model_config: Any
) -> dict[int, AttentionRule]:
    """Return the attention rule of each layer where queries and keys are tapped.

    Args:
        layers: the loaded layers, by their indices.
        family: family of the layers.
        points: tapped points.
        model_config: vLLM's ModelConfig.
    """
    at = {site: {point.layer for point in points if point.site == site} for site in ("q", "k")}
    if model_config.rswa_window is not None:
        return dict.fromkeys(at["q"] & at["k"], AttentionRule(0.0, unknown="its window depends on the prompt (R-SWA)"))
    return {
        layer: rule_of(layers[layer].get_submodule(located(layers[layer], family.attention)))
        for layer in sorted(at["q"] & at["k"])
    }


def rule_of(attention: Any) -> AttentionRule:
    """Return the rule of an attention module; if it is not understood, the rule gives the reason."""
    if unknown := _unknown(attention):
        return AttentionRule(0.0, unknown=unknown)
    impl = attention.impl
    sinks = getattr(impl, "sinks", None)
    return AttentionRule(
        float(impl.scale),
        None if attention.sliding_window is None else int(attention.sliding_window),
        float(impl.logits_soft_cap) if impl.logits_soft_cap else None,
        () if sinks is None else tuple(sinks.float().tolist()),
    )


def _unknown(attention: Any) -> str:
    """Return the features of a module that a rule cannot express, or ""."""
    if type(attention) is not Attention:
        return f"its attention is vLLM's {type(attention).__name__}"
    require("Attention", attention)
    if (backend := attention.attn_backend.get_name()) not in _KNOWN:
        return f"its attention backend is {backend}; known: {', '.join(sorted(_KNOWN))}"
    found = {
        f"its attention is of kind {AttentionType(attention.attn_type).value}": attention.attn_type
        != AttentionType.DECODER,
        (
            f"it reads the keys of another layer, {attention.kv_sharing_target_layer_name}"
        ): attention.kv_sharing_target_layer_name,
        f"its keys are cached as {attention.kv_cache_dtype}": attention.kv_cache_torch_dtype != attention.dtype,
        "it adds ALiBi's slopes": attention.impl.alibi_slopes is not None or attention.use_alibi_sqrt,
        "tokens of its prompts attend to later ones": attention.use_mm_prefix,
        "it attends in chunks": getattr(attention.impl, "chunk_lookback", -1) > -1,
    }
    return "; ".join(reason for reason, holds in found.items() if holds)
