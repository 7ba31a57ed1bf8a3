"""Models that hold a language model, and make its tokens of pictures, sound or video, or classes of its rows: which one
is within.

vLLM and transformers name a wrapper for itself, and the layers are those of the language model. Which sites these have
must be known before any is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: By the `model_type` of a language model that is published within a wrapper alone, the architecture of the same layers
#: by themselves.
_WITHIN: Final[Mapping[str, str]] = {
    "granite4_vision_text": "GraniteForCausalLM",
    "paddleocr_vl_text": "Ernie4_5ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}


#: What architectures end in of models that pool, whose layers are those of a model that generates.
_POOLING: Final = re.compile(r"(Text)?Model$|For(Sequence|Token)Classification$|For(Process)?RewardModel$")


def generating(architecture: str) -> str:
    """The architecture of a model that generates, with the layers of one that pools; any other is given back as it is.

    Args:
        architecture: as a configuration names it: "Qwen3Model", "Qwen3ForSequenceClassification".
    """
    return _POOLING.sub("ForCausalLM", architecture)


def architectures_within(text: Any, by_type: Mapping[str, str]) -> tuple[str, ...]:
    """The architectures that a language model within a wrapper may have, the likelier first.

    Args:
        text: its configuration.
        by_type: transformers' names of architectures by `model_type`.
    """
    kind = text.model_type
    return (*(text.architectures or ()), *filter(None, (by_type.get(kind), _WITHIN.get(kind))))
