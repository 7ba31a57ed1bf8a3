"""Registry of layer families, and selection of a family by the classes of loaded layers or by an architecture.

Families are entries of tables `MEMBERS`, or files with a `MEMBER`. The classes of the loaded layers decide which family
serves a model; for layers of unknown classes a family is derived, see `derived`.

Multimodal wrappers have architecture names of their own, but their layers are those of the language model inside, whose
sites must be known before a model is loaded.
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
    """Return the family of the first architecture name in `architectures` that has one.

    Raises:
        UnsupportedModel: no name has a family; the message lists the known names.
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
    """Return a family adapted to vLLM's Transformers backend, whose layers pass on the stream without a residual.

    It lacks the sites `q`, `k`, `v` and `router`: there vLLM's attention is called past its hooks, and routers choose
    experts before a hook could change their logits.
    """
    return replace(family, residual_output=None, loops=(), residual_input="", attention="", router="")


def families_of(layers: Sequence[nn.Module]) -> tuple[Family, ...]:
    """Return the families that may serve loaded layers: the known one, or derived candidates, likeliest first.

    Raises:
        UnsupportedModel: no family knows the layers' classes, and none can be derived.
    """
    each = {type(layer): layer for layer in layers}
    names = {name_of(kind) for kind in each}
    transformers = all(map(is_transformers, each))
    for family in FAMILIES.values():
        if names <= set(family.classes):
            return (over_transformers(family) if transformers else family,)
    return candidates(list(each.values()), transformers=transformers)


#: Architecture with equal layers, by `model_type` of a language model that is published only inside a wrapper.
_WITHIN: Final[Mapping[str, str]] = {
    "granite4_vision_text": "GraniteForCausalLM",
    "paddleocr_vl_text": "Ernie4_5ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}


#: Pattern of the endings of pooling architectures, whose layers are those of a generating model.
_POOLING: Final = re.compile(r"(Text)?Model$|For(Sequence|Token)Classification$|For(Process)?RewardModel$")


def generating(architecture: str) -> str:
    """Return the generating architecture with the layers of a pooling architecture; any other name unchanged.

    Args:
        architecture: name in `config.json`, such as "Qwen3Model" or "Qwen3ForSequenceClassification".
    """
    return _POOLING.sub("ForCausalLM", architecture)


def architectures_within(text: Any, by_type: Mapping[str, str]) -> tuple[str, ...]:
    """Return architecture names that the language model inside a wrapper may have, likeliest first.

    Args:
        text: configuration of the language model.
        by_type: transformers' architecture name by `model_type`.
    """
    kind = text.model_type
    return (*(text.architectures or ()), *filter(None, (by_type.get(kind), _WITHIN.get(kind))))
