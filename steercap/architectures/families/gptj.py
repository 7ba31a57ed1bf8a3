"""GPT-J: attention and feed-forward side by side after one norm.

transformers passes its queries, keys and values to no attention function, so vLLM's cannot be compared with them.
"""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("GPTJForCausalLM",),
    classes=("gpt_j.GPTJBlock", "gptj.GPTJBlock"),
    layers="transformer.h",
    attn_out="attn",
    resid_mid="",
    final_norm="transformer.ln_f",
    residual_output=None,
    residual_input="",
    attn_proj="attn.out_proj",
    attention="",
    mlp_proj="mlp.fc_out",
)
