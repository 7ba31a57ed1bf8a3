"""Granite 4: Mamba 2 in place of attention in most layers; the layer adds the outputs of experts and a shared one."""

from steercap.architectures.families.base import Family
from steercap.architectures.families.granite import divisor, multiplier

MEMBER = Family(
    architectures=("GraniteMoeHybridForCausalLM",),
    classes=(
        "granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer",
        "granitemoehybrid.GraniteMoeHybridMambaDecoderLayer",
        "granitemoehybrid.GraniteMoeHybridDecoderLayer",
    ),
    attn_out="self_attn|mamba",
    mlp_out="",
    residual_output=None,
    residual_input="",
    mlp_proj="",
    router="block_sparse_moe.gate|block_sparse_moe.router",
    factor=multiplier,
    logits=divisor,
    varied=True,
)
