"""Families derived for unknown layers: their inputs and outputs are guessed for the residual stream, and then proved.

The output of a block is never guessed: the module has many names, and a norm or a factor may follow it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from steercap.architectures.families.base import Family
from steercap.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import nn

#: Argument names of the stream that layers take, or of its part that is not deferred.
_HIDDEN: Final = ("hidden_states", "x", "hidden")
_RESIDUAL: Final = "residual"
#: Sites of layers of unknown classes that the proof at start needs in any case.
SITES: Final = ("resid_pre", "resid_post")
#: Fields of `Family` with the paths of the sites that are derived of a traced pass, see `architectures.derivation`.
FIELDS: Final[Mapping[str, str]] = {
    "attn_out": "attn_out",
    "mlp_out": "mlp_out",
    "resid_mid": "resid_mid",
    "attn_in": "attn_in",
    "mlp_in": "mlp_in",
    "z": "attn_proj",
    "neurons": "mlp_proj",
    "q": "attention",
    "k": "attention",
    "v": "attention",
    "router": "router",
}
#: Derived sites whose equations hold a site that must itself be proved, by that site.
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {"attn_out": ("z",), "mlp_out": ("neurons",), "z": ("q", "k", "v")}
#: Sites that must be armed beside a derived one, so that the proof has its equations.
_BLOCKS: Final = ("attn_out", "resid_mid", "mlp_out")
_HEADS: Final = ("q", "k", "v", "z")
#: Derived sites that are served only if an equation of the proof holds them.
PROVED: Final = frozenset({*_BLOCKS, *_HEADS, "neurons"})
#: Stream of all such layers, with whatever paths, as the proof at start sees it.
DERIVED: Final = Family(derived=True)


def proving(site: str) -> tuple[str, ...]:
    """Return the sites of a layer that the proof of a derived one needs."""
    if site not in PROVED:
        return ()
    return _BLOCKS + _HEADS if site in {"q", "k", "v"} else _BLOCKS


def dropped(sites: Iterable[str]) -> frozenset[str]:
    """Return sites and all those that are proved by them alone."""
    found = set(sites)
    for site, others in NEEDS.items():
        found |= set(others) if site in found else set()
    return frozenset(found)


def candidates(layers: Sequence[nn.Module], *, transformers: bool) -> tuple[Family, ...]:
    """Return the families that layers may be of, the likelier first.

    Args:
        layers: one layer of each class.
        transformers: True if they are transformers' own, which carry the whole stream.

    Raises:
        UnsupportedModel: no argument carries a stream, or its name differs between layers.
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
        **dict.fromkeys(FIELDS.values(), ""),  # type: ignore[arg-type]
        residual_output=None,
        residual_input="",
        hidden_input=hidden.pop(),
        derived=True,
    )
    if transformers or not all(_RESIDUAL in names for names in arguments):
        return (whole,)
    return replace(whole, residual_output=1, residual_input=_RESIDUAL), whole
