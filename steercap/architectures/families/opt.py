"""OPT: layers take and return the whole stream; the feed-forward block ends in `fc2`.

OPT 350M has its norms after the blocks: a layer adds a block's output to the stream, and returns the norm of that sum.
"""

from typing import Any

from steercap.architectures.families.base import Family


def _factor(config: Any) -> float | None:
    return 1.0 if config.do_layer_norm_before else None


MEMBER = Family(
    architectures=("OPTForCausalLM",),
    classes=("opt.OPTDecoderLayer",),
    layers="model.decoder.layers",
    mlp_out="fc2",
    mlp_in="fc1",
    resid_mid="final_layer_norm",
    final_norm="model.decoder.final_layer_norm",
    after_norm=("project_out",),
    residual_output=None,
    residual_input="",
    attn_proj="self_attn.out_proj",
    mlp_proj="fc2",
    factor=_factor,
)
