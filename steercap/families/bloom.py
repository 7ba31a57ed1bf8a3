"""BLOOM: what the blocks add is what their last projections give: transformers' blocks return the sum.

transformers hands its queries, keys and values to no function of attention, so vLLM's cannot be compared with them.
"""

from steercap.families.base import Family

MEMBER = Family(
    architectures=("BloomForCausalLM",),
    classes=("bloom.BloomBlock",),
    layers="transformer.h",
    attn_out="self_attention.dense",
    mlp_out="mlp.dense_4h_to_h",
    final_norm="transformer.ln_f",
    residual_output=None,
    residual_input="",
    attn_proj="self_attention.dense",
    attention="",
    mlp_proj="mlp.dense_4h_to_h",
)
