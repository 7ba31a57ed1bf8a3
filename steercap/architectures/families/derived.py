"""Families derived for layers of unknown classes, whose inputs and outputs are guessed and then proved.

The paths of sites come from traced passes, see `architectures.derivation`; the proof at start decides.
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

#: Usual argument names of the stream in layers, or of the part of it that is not in the residual.
_HIDDEN: Final = ("hidden_states", "x", "hidden")
_RESIDUAL: Final = "residual"
#: Sites that the proof at start needs of every layer of an unknown class.
SITES: Final = ("resid_pre", "resid_post")
#: Field of `Family` with the path of a derived site, by site; see `architectures.derivation`.
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
#: Derived sites whose equations contain another site, by that other site.
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "attn_out": ("z",),
    "mlp_out": ("neurons", "mlp_in"),
    "z": ("q", "k", "v"),
}
#: Sites that must be armed beside a derived one, so that the proof has its equations.
_BLOCKS: Final = ("attn_out", "resid_mid", "mlp_out")
_HEADS: Final = ("q", "k", "v", "z")
#: Derived sites that are served only if an equation of the proof contains them.
PROVED: Final = frozenset({*_BLOCKS, *_HEADS, "neurons"})
#: Maximum relative difference between passes of columns that do not depend on the stream.
_ALIKE: Final = 0.05
#: Rows [n, width] of one tensor, one item for each traced pass.
Rows: TypeAlias = "tuple[torch.Tensor, ...]"
#: Placeholder for any derived family, for code that reads no paths.
DERIVED: Final = Family(derived=True)


@dataclass(frozen=True)
class TracedCall:
    """Call of one module of a layer, with its rows in each traced pass.

    Args:
        path: dotted path of the module in the layer.
        module: the module.
        begin, end: sequence numbers of the call's begin and end within a pass.
        inputs: rows of the module's input; () if it has not one row per token, likewise for `stream` and `outputs`.
        stream: `inputs` plus the residual passed beside it, if any.
        outputs: rows of the module's (first) output.
    """

    path: str
    module: nn.Module
    begin: int
    end: int
    inputs: Rows
    stream: Rows
    outputs: Rows

    @property
    def linear(self) -> bool:
        """True if the module is one of vLLM's linear layers."""
        return hasattr(getattr(self.module, "base_layer", self.module), "input_size")

    def covers(self, other: TracedCall) -> bool:
        """Check if another call was made during this one."""
        return self.begin < other.begin and other.end < self.end


@dataclass(frozen=True)
class Traced:
    """Rows and calls of one layer in all traced passes.

    Args:
        before, after: residual stream at the layer's input and output.
        calls: calls of the layer's modules that were called once in each pass.
        attended: calls of vLLM's attention modules; `outputs` are the heads' outputs.
    """

    before: Rows
    after: Rows
    calls: tuple[TracedCall, ...]
    attended: tuple[TracedCall, ...]


def proving(site: str) -> tuple[str, ...]:
    """Return the sites of the same layer that must be armed to prove a derived site; () if none."""
    if site not in PROVED | {"attn_in", "mlp_in"}:
        return ()
    return _BLOCKS + _HEADS if site in {"q", "k", "v"} else _BLOCKS


def dropped(sites: Iterable[str]) -> frozenset[str]:
    """Return the given sites and all sites that cannot be proved without them."""
    found = set(sites)
    for site, others in NEEDS.items():
        found |= set(others) if site in found else set()
    return frozenset(found)


def candidates(layers: Sequence[nn.Module], *, transformers: bool) -> tuple[Family, ...]:
    """Return the families with which layers of unknown classes may be served, likeliest first.

    Args:
        layers: one layer of each class.
        transformers: True if the layers are transformers' own, which have no separate residual.

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
    """Combine the sites derived for each layer into one family.

    Args:
        layers: the loaded layers, by index.
        solved: by layer index, the derived paths by field of `Family`, and reasons of refusals by site.
        family: family with the stream's fields, from which they were derived.

    Returns:
        The family with the derived paths; and, by site, the reason why some layers lack it.
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
    """Return, by site, the reason why a block reads more than the derived input of the block; {} if none does.

    Args:
        traced: the layer in passes with equal rows at the input of each block, and differing streams.
        layer: the layer.
        family: the family with the paths of the blocks.
    """
    path = _located(layer, family.mlp_out)
    heads = [call.inputs for call in traced.attended]
    added = [call.outputs for call in traced.calls if path and call.path == path]
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
    """Check if every column is nearly equal in all passes, as it is only where it does not depend on the stream."""
    first = rows[0].double() if rows else None
    return first is not None and all(
        bool(((one - first).norm(dim=0) <= _ALIKE * first.norm(dim=0)).all()) for one in rows
    )
