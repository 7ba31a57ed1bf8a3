"""StableLM: layers return a pair, but its first half is already the whole stream."""

from steercap.families.base import TINY, Family

MEMBER = Family(
    architectures=(
        "StableLmForCausalLM",
        "StablelmForCausalLM",
    ),
    layers="model.layers",
    attn_out="self_attn",
    mlp_out="mlp",
    final_norm="model.norm",
    residual_output=None,
    tiny={"model_type": "stablelm", **TINY},
)
