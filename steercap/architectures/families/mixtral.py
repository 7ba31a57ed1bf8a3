"""Mixtral: Llama's layer with experts, whose modules have different names in vLLM and transformers."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("MixtralForCausalLM",),
    classes=("mixtral.MixtralDecoderLayer",),
    mlp_out="block_sparse_moe|mlp",
    mlp_proj="",
    router="block_sparse_moe.gate|mlp.gate",
    varied=True,
)
