"""Command A with experts: Command R's layer, in some layers with experts."""

from steercap.architectures.families.base import Family
from steercap.architectures.families.cohere import logit_scale

MEMBER = Family(
    architectures=("Cohere2MoeForCausalLM",),
    classes=("cohere2_moe.Cohere2MoeDecoderLayer",),
    resid_mid="",
    residual_output=None,
    residual_input="",
    router="mlp.gate",
    logits=logit_scale,
    varied=True,
)
