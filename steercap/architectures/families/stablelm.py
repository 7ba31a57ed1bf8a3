"""StableLM: layers return a pair, but its first half is already the whole stream."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=(
        "StableLmForCausalLM",
        "StablelmForCausalLM",
    ),
    classes=("stablelm.StablelmDecoderLayer",),
    residual_output=None,
    residual_input="",
)
