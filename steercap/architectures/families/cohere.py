"""Command R: attention and feed-forward side by side after one norm; layers return the whole stream first."""

from typing import Any

from steercap.architectures.families.base import Family


def logit_scale(config: Any) -> float:
    """Return the factor of Command's logits."""
    return float(config.logit_scale)


MEMBER = Family(
    architectures=("CohereForCausalLM", "Cohere2ForCausalLM"),
    classes=("commandr.CohereDecoderLayer", "cohere.CohereDecoderLayer", "cohere2.Cohere2DecoderLayer"),
    resid_mid="",
    residual_output=None,
    residual_input="",
    logits=logit_scale,
)
