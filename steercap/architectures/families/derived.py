"""Families derived for unknown layers: their inputs and outputs are guessed for the residual stream, and then proved.

The paths of their sites come from traced passes, see `architectures.derivation`; the proof at start decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from steercap.architectures.families.base import Family, arguments_of, located
from steercap.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch
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
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "attn_out": ("z",),
    "mlp_out": ("neurons", "mlp_in"),
    "z": ("q", "k", "v"),
}
#: Sites that must be armed beside a derived one, so that the proof has its equations.
_BLOCKS: Final = ("attn_out", "resid_mid", "mlp_out")
_HEADS: Final = ("q", "k", "v", "z")
#: Derived sites that are served only if an equation of the proof holds them.
PROVED: Final = frozenset({*_BLOCKS, *_HEADS, "neurons"})
#: Relative difference of columns that do not depend on the stream, between passes.
_ALIKE: Final = 0.05
#: A tensor of each pass, [n, width].
Rows: TypeAlias = "tuple[torch.Tensor, ...]"
#: Stream of all such layers, with whatever paths, as the proof at start sees it.
DERIVED: Final = Family(derived=True)


@dataclass(frozen=True)
class TracedCall:
    """A call of one of a layer's modules in the traced passes.

    Args:
        path: dotted path of the module in the layer.
        module: the module.
        begin, end: places of its begin and end among all of a pass.
        taken: rows of its input; () if it has not one for each token, as for the others.
        stream: `taken`, and the residual that it is given beside it.
        given: rows of its (first) output.
    """

    path: str
    module: nn.Module
    begin: int
    end: int
    taken: Rows
    stream: Rows
    given: Rows

    @property
    def linear(self) -> bool:
        """True for a linear module of vLLM's."""
        return hasattr(getattr(self.module, "base_layer", self.module), "input_size")

    def holds(self, other: TracedCall) -> bool:
        """Check if another call was made within this one."""
        return self.begin < other.begin and other.end < self.end


@dataclass(frozen=True)
class Traced:
    """One layer in the traced passes.

    Args:
        before, after: its residual stream.
        calls: calls of its modules that were called once in each pass, in order.
        attended: calls of vLLM's attention, with the heads' outputs as `given`.
    """

    before: Rows
    after: Rows
    calls: tuple[TracedCall, ...]
    attended: tuple[TracedCall, ...]


def proving(site: str) -> tuple[str, ...]:
    """Return the sites of a layer that the proof of a derived one needs."""
    if site not in PROVED | {"attn_in", "mlp_in"}:
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
    arguments = [arguments_of(layer) for layer in layers]
    first = [names[0] if transformers else "" for names in arguments]
    hidden = {
        next((name for name in _HIDDEN if name in names), one) for names, one in zip(arguments, first, strict=True)
    }
    if len(hidden) != 1 or "" in hidden:
        pairs = zip(layers, arguments, strict=True)
        shown = "; ".join(f"{type(layer).__name__}({', '.join(names)})" for layer, names in pairs)
        raise UnsupportedModel(
            f"steercap cannot tell which argument of these layers carries the residual stream: {shown}"
        )
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


def joined(
    layers: Mapping[int, nn.Module], solved: Mapping[int, tuple[Mapping[str, str], Mapping[str, str]]], family: Family
) -> tuple[Family, dict[str, str]]:
    """Join the sites of all layers to one family.

    Args:
        layers: the loaded layers, by their indices.
        solved: what was derived of each: paths by field, and reasons by site.
        family: the stream that they were derived with.

    Returns:
        The family, and by site the reason why layers lack it.
    """
    paths: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for site, name in FIELDS.items():
        each = {index: found.get(name, "") for index, (found, _) in solved.items()}
        path = "|".join(dict.fromkeys(filter(None, each.values())))
        lacking = [index for index, one in each.items() if not one]
        wrong = [index for index, one in each.items() if path and _located(layers[index], path) != one]
        for index in (*wrong, *lacking)[:1]:
            reason = solved[index][1].get(site, f"only other layers have it, in {path}" if path else "")
            if not reason:  # as a router, where there are no experts
                continue
            refused[site] = f"at layer{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking or wrong))}: {reason}"
        paths[name] = "" if wrong else path
    for site, others in NEEDS.items():
        if not paths[FIELDS[site]]:
            paths |= dict.fromkeys((FIELDS[other] for other in others), "")
    return replace(family, **paths, varied=True), refused


def _located(layer: nn.Module, path: str) -> str:
    try:
        return located(layer, path)
    except AttributeError:
        return ""


def reading_more(traced: Traced, layer: nn.Module, family: Family) -> dict[str, str]:
    """Return the reason by site why a block's input is not all that the block reads.

    Args:
        traced: passes with the same rows at the input of each block, and other streams.
        layer: the layer.
        family: the family with the paths of the blocks.
    """
    path = _located(layer, family.mlp_out)
    heads = [call.taken for call in traced.attended]
    added = [call.given for call in traced.calls if path and call.path == path]
    wrong = {}
    for site, entry, made in (("attn_in", family.attn_in, heads), ("mlp_in", family.mlp_in, added)):
        if not entry or not _located(layer, entry):
            continue
        if not made:
            wrong[site] = "no site that passed the checks depends only on it"
        elif not all(map(_alike, made)):
            wrong[site] = "its block has other inputs too"
    return wrong


def _alike(rows: Rows) -> bool:
    """Check if every column is the same in all passes; one that depends on another random stream is not nearly so."""
    first = rows[0].double() if rows else None
    return first is not None and all(
        bool(((one - first).norm(dim=0) <= _ALIKE * first.norm(dim=0)).all()) for one in rows
    )
