"""OLMo 2 and 3, which vLLM runs as transformers' own modules: a layer gives one tensor, [1, tokens, width].

A norm follows each block, and its output is what the block adds.
"""

from typing import Any

from steercap.families.base import TINY, Family


def _see(hidden: Any) -> Any:
    return hidden.view(-1, hidden.shape[-1])


MEMBER = Family(
    architectures=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    layers="model.layers",
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
    final_norm="model.norm",
    residual_output=None,
    attention="",  # transformers' attention function calls vLLM's module past its hooks
    transformers_backend=True,
    see=_see,
    tiny={"model_type": "olmo2", **TINY},
)
