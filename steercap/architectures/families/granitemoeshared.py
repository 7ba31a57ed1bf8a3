"""Granite with experts and a shared one: the layer adds the two itself, so no module outputs the sum."""

from steercap.architectures.families.base import Family
from steercap.architectures.families.granite import divisor, multiplier

MEMBER = Family(
    architectures=("GraniteMoeSharedForCausalLM", "GraniteMoeSWAForCausalLM"),
    classes=("granitemoeshared.GraniteMoeSharedDecoderLayer", "granitemoe_swa.GraniteMoeSWADecoderLayer"),
    mlp_out="",
    residual_output=None,
    residual_input="",
    mlp_proj="",
    router="block_sparse_moe.gate|block_sparse_moe.router",
    factor=multiplier,
    logits=divisor,
    varied=True,
)
