"""Qwen 3 with a mixture of experts: the stream is hidden + residual; some layers may be dense."""

from typing import Any

from steercap.architectures.families.base import Family


def _sparse(config: Any, layer: int) -> bool:
    dense = layer in (config.mlp_only_layers or ())
    return not dense and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0


MEMBER = Family(
    architectures=("Qwen3MoeForCausalLM",),
    classes=("qwen3_moe.Qwen3MoeDecoderLayer",),
    router="mlp.gate",
    sparse=_sparse,
)
