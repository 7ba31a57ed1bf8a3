"""StarCoder 2, by transformers' modules: Llama's layer whose feed-forward block has no gate."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("Starcoder2ForCausalLM",),
    classes=("starcoder2.Starcoder2DecoderLayer",),
    mlp_proj="mlp.c_proj",
)
