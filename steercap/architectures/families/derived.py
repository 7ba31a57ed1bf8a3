"""Layers that no family knows: what they take and give is guessed, for the residual stream alone, and then proved.

What a block adds is never guessed: the module is called by many names, a norm or a factor may follow it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from steercap.architectures.families.base import Family
from steercap.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import nn

#: What layers call the stream that they take, or the part of it that is not deferred.
_HIDDEN: Final = ("hidden_states", "x", "hidden")
_RESIDUAL: Final = "residual"
#: What layers of unknown classes can be asked for.
SITES: Final = ("resid_pre", "resid_post")


def candidates(layers: Sequence[nn.Module], *, transformers: bool) -> tuple[Family, ...]:
    """What layers may take and give, the likelier first.

    Args:
        layers: one of each class.
        transformers: whether they are transformers' own, which carry the whole stream.

    Raises:
        UnsupportedModel: their arguments are none that carry a stream, or those of one differ from those of another.
    """
    arguments = [list(inspect.signature(layer.forward).parameters) for layer in layers]
    first = [names[0] if transformers else "" for names in arguments]
    hidden = {
        next((name for name in _HIDDEN if name in names), one) for names, one in zip(arguments, first, strict=True)
    }
    if len(hidden) != 1 or "" in hidden:
        pairs = zip(layers, arguments, strict=True)
        shown = "; ".join(f"{type(layer).__name__}({', '.join(names)})" for layer, names in pairs)
        raise UnsupportedModel(f"steercap cannot tell which argument of these layers carries the stream: {shown}")
    whole = Family(
        attn_out="",
        mlp_out="",
        resid_mid="",
        attn_proj="",
        attention="",
        mlp_proj="",
        residual_output=None,
        residual_input="",
        hidden_input=hidden.pop(),
        derived=True,
    )
    if transformers or not all(_RESIDUAL in names for names in arguments):
        return (whole,)
    return replace(whole, residual_output=1, residual_input=_RESIDUAL), whole
