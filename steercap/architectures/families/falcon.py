"""Falcon 7B to 180B: layers take and return the whole stream.

transformers passes its queries, keys and values to no attention function, so vLLM's cannot be compared with them.
"""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("FalconForCausalLM",),
    classes=("falcon.FalconDecoderLayer",),
    layers="transformer.h",
    attn_out="self_attention",
    resid_mid="",
    final_norm="transformer.ln_f",
    residual_output=None,
    residual_input="",
    attn_proj="self_attention.dense",
    attention="",
    mlp_proj="mlp.dense_4h_to_h",
)
