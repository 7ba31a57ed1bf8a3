"""GPT-2: layers take and return the whole stream."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("GPT2LMHeadModel",),
    classes=("gpt2.GPT2Block",),
    layers="transformer.h",
    attn_out="attn",
    resid_mid="ln_2",
    final_norm="transformer.ln_f",
    residual_output=None,
    residual_input="",
    attn_proj="attn.c_proj",
    attention="attn.attn",
    mlp_proj="mlp.c_proj",
)
