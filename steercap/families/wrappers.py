"""Models that hold a language model, and make its tokens of pictures, sound or video: which one is within.

vLLM and transformers name a wrapper for itself, and the layers are those of the language model. Which sites these have
must be known before any is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: By the `model_type` of a language model that is published within a wrapper alone, the architecture of the same layers
#: by themselves.
WITHIN: Final[Mapping[str, str]] = {
    "granite4_vision_text": "GraniteForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
