"""GPT-NeoX and Pythia, by transformers' modules: attention and feed-forward side by side after a norm each."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("GPTNeoXForCausalLM",),
    classes=("gpt_neox.GPTNeoXLayer",),
    layers="gpt_neox.layers",
    attn_out="attention",
    resid_mid="",
    final_norm="gpt_neox.final_layer_norm",
    attn_proj="attention.dense",
    attention="attention.attn",
    mlp_proj="mlp.dense_4h_to_h",
)
