"""BioGPT, by transformers' modules: the feed-forward block is no module and ends in `fc2`."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("BioGptForCausalLM",),
    classes=("biogpt.BioGptDecoderLayer",),
    layers="biogpt.layers",
    mlp_out="fc2",
    mlp_in="fc1",
    resid_mid="final_layer_norm",
    final_norm="biogpt.layer_norm",
    attn_proj="self_attn.out_proj",
    mlp_proj="fc2",
)
