"""Architectures of language models within wrappers, which read pictures, sound or video, or classify or pool.

vLLM and transformers have a name for each wrapper, but the layers are those of the language model. Its sites must be
known before any model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: Architecture with the same layers, by the `model_type` of a language model that is published only within a wrapper.
_WITHIN: Final[Mapping[str, str]] = {
    "granite4_vision_text": "GraniteForCausalLM",
    "paddleocr_vl_text": "Ernie4_5ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}


#: Endings of the architectures of pooling models, whose layers are those of a generating model.
_POOLING: Final = re.compile(r"(Text)?Model$|For(Sequence|Token)Classification$|For(Process)?RewardModel$")


def generating(architecture: str) -> str:
    """Return the architecture of the generating model with the layers of a pooling one; any other is returned as it is.

    Args:
        architecture: name in a configuration: "Qwen3Model", "Qwen3ForSequenceClassification".
    """
    return _POOLING.sub("ForCausalLM", architecture)


def architectures_within(text: Any, by_type: Mapping[str, str]) -> tuple[str, ...]:
    """Return the architectures that a language model within a wrapper may have, the likelier first.

    Args:
        text: configuration of the language model.
        by_type: transformers' names of architectures by `model_type`.
    """
    kind = text.model_type
    return (*(text.architectures or ()), *filter(None, (by_type.get(kind), _WITHIN.get(kind))))
