"""nanochat, by transformers' modules: Llama's layer whose feed-forward block has no gate."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("NanoChatForCausalLM",),
    classes=("nanochat.NanoChatDecoderLayer",),
    norms_embeddings=True,
    mlp_proj="mlp.fc2",
)
