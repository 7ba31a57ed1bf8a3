"""Granite 3 with experts: otherwise as Granite."""

from steercap.architectures.families.base import Family
from steercap.architectures.families.granite import divisor, multiplier

MEMBER = Family(
    architectures=("GraniteMoeForCausalLM",),
    classes=("granitemoe.GraniteMoeDecoderLayer",),
    mlp_out="block_sparse_moe",
    residual_output=None,
    residual_input="",
    mlp_proj="",
    router="block_sparse_moe.gate|block_sparse_moe.router",
    factor=multiplier,
    logits=divisor,
    varied=True,
)
