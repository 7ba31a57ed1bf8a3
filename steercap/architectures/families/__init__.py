"""Registry of model families: entries of tables; a file with a `MEMBER` is one too. And the models within wrappers.

The classes of the loaded layers decide which family serves a model; for layers of no known class a family is derived,
see `derived`.

vLLM and transformers have a name for each wrapper, but the layers are those of the language model. Its sites must be
known before any model is loaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from steercap.architectures.families.base import Family
from steercap.architectures.families.derived import candidates
from steercap.architectures.families.proved import is_transformers, name_of
from steercap.core.registry import Registry
from steercap.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import nn

FAMILIES: Registry[Family] = Registry("family", sys.modules[__name__], Family)


def family_of(architectures: Iterable[str]) -> Family:
    """Return the family that serves the first known of `architectures`.

    Raises:
        UnsupportedModel: none is known; the message lists those that are.
    """
    asked = tuple(architectures)
    for architecture in asked:
        for family in FAMILIES.values():
            if architecture in family.architectures:
                return family
    known = sorted(name for family in FAMILIES.values() for name in family.architectures)
    raise UnsupportedModel(
        f"steercap does not know the layers of {', '.join(asked) or 'a model without architectures'}; "
        f"known: {', '.join(known)}. A family is an entry in a table of steercap/architectures/families."
    )


def over_transformers(family: Family) -> Family:
    """Return a family adapted to vLLM running transformers' own modules, which carry the whole stream.

    transformers' attention function calls vLLM's module past its hooks, and its routers choose experts from their
    logits before a hook can change these.
    """
    return replace(family, residual_output=None, loops=(), residual_input="", attention="", router="")


def families_of(layers: Sequence[nn.Module]) -> tuple[Family, ...]:
    """Return the family of a model's layers; if none knows their classes, derived families, the likelier first.

    Raises:
        UnsupportedModel: none can be derived.
    """
    each = {type(layer): layer for layer in layers}
    names = {name_of(kind) for kind in each}
    transformers = all(map(is_transformers, each))
    for family in FAMILIES.values():
        if names <= set(family.classes):
            return (over_transformers(family) if transformers else family,)
    return candidates(list(each.values()), transformers=transformers)


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
