"""SantaCoder and StarCoder 1, by transformers' modules: GPT-2 with one head of keys."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("GPTBigCodeForCausalLM",),
    classes=("gpt_bigcode.GPTBigCodeBlock",),
    layers="transformer.h",
    attn_out="attn",
    resid_mid="ln_2",
    final_norm="transformer.ln_f",
    attn_proj="attn.c_proj",
    attention="attn.attn",
    mlp_proj="mlp.c_proj",
)
