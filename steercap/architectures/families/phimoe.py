"""Phi 3.5 with experts: layers return the whole stream first."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("PhiMoEForCausalLM", "PhimoeForCausalLM"),
    classes=("phimoe.PhiMoEDecoderLayer", "phimoe.PhimoeDecoderLayer"),
    mlp_out="block_sparse_moe|mlp",
    residual_output=None,
    residual_input="",
    mlp_proj="",
    router="block_sparse_moe.gate|mlp.router",
    varied=True,
)
