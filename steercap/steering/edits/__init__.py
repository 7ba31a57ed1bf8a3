"""Edits of rows: base class and registry. To add one, add a class to the `MEMBERS` of a file in this folder.

An edit is a change to rows, its scope, and its lowering to rank-one edits. Its arguments are checked when it is made;
whether it fits the model is checked when it is used.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
from jaxtyping import Float

from steercap.architectures.sites import SITES, placed
from steercap.core.names import read_name
from steercap.core.program import Response
from steercap.core.registry import Registry
from steercap.core.spec import Layers, Point, parse_layers, resolve_layers
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import index_of, number_of, shown, truth_of
from steercap.errors import InvalidEdit, InvalidVector
from steercap.steering.edits.inputs import Vector, at_layer, float32_copy, model_of

__all__ = ["Edit", "RankOne", "Vector", "number_in", "unit"]


class RankOne(NamedTuple):
    """Rank-one edit of a row h, `h <- h + f(u·h + b) w`, or replacement of rows.

    Args:
        write: w, float32 [1, width]; for a replacement the new rows, float32 [rows, width], with `HOLE` for elements
            that are kept.
        response: function f and bias b.
        read: u, float32 [1, width], or None for a response that needs no projection.
        joined: True to compute u·h from the row as it was before the preceding rank-one part of the same edit.
        replaces: True for a replacement.
    """

    write: Float[torch.Tensor, "rows width"]
    response: Response = Response()
    read: Float[torch.Tensor, "1 width"] | None = None
    joined: bool = False
    replaces: bool = False


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Edit(ABC):
    """Base class of edits: a change to rows, and its scope of layers, site and tokens.

    Vectors are float32 copies of those given, and every access returns another copy, so an edit never changes after it
    was made. From `LayerVectors`, or a dict by layer, an edit takes the vector of its `layer`; `SteeringSpec.by_layer`
    makes an edit for each layer.

    Args:
        layer: one layer; negative counts from the last.
        layers: several layers: a slice, range, sequence, mask with a truth value for each layer of the model, or "all".
            Give either `layer` or `layers`.
        site: place in the layer: a name in `steercap.architectures.sites`, TransformerLens's name for it, or the path
            of a module that the engine was opened with. A name with its layer, such as "blocks.5.attn.hook_z", gives
            both.
        tokens: "all", "prompt", "generated", "last_prompt", a slice, positions (negative counts from the end of the
            prompt), a mask with a truth value for each prompt token or for each of prompt + `max_tokens` - 1 positions,
            or a list of these. The last sampled token is never an input to the model, so it is never edited.
        part: for rows with several axes, the part that the vectors, [width of a part], apply to: an index of the first
            axis, such as a head of `z` or a stream of `mhc_streams_pre_mlp`, negative counting from the last; "each"
            for all of them, one after the other. None for vectors of whole rows, flat.
        model: the model that the vectors were made for, "" if unknown; an engine of another model warns. The model of
            `LayerVectors` takes precedence.

    Raises:
        InvalidEdit, InvalidSpec: a number that does not fit, something of another type, or no layer.
        InvalidVector: a vector that holds NaN or inf, has a wrong shape, or is zero where its direction counts.
        InvalidSelection: a malformed `tokens`.
        UnknownName: a site that does not exist.
    """

    layer: int | None = None
    layers: Layers | None = None
    site: str = "resid_post"
    tokens: Tokens | TokenSelection = "all"
    part: int | Literal["each"] | None = None
    model: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.site, str):
            raise InvalidEdit(f"{self.name}: site={shown(self.site)}; an edit has one site, so give one name")
        self._read_site()
        if (self.layer is None) == (self.layers is None):
            each = any(isinstance(value, Mapping) for value in vars(self).values())
            instead = f", or SteeringSpec.by_layer({self.name}, ...) for all that LayerVectors have" if each else ""
            raise InvalidEdit(f"{self.name}: give layer= for one layer, or layers= for several (and not both){instead}")
        if self.layer is not None:
            layer = index_of(self.layer)
            if layer is None:
                raise InvalidEdit(f"{self.name}: layer={shown(self.layer)} is not one layer; give several as layers=")
            object.__setattr__(self, "layer", layer)
        else:
            object.__setattr__(self, "layers", parse_layers(self.layers))
        object.__setattr__(self, "tokens", TokenSelection.parse(self.tokens))
        if self.part is not None and not (isinstance(self.part, str) and self.part == "each"):
            part = index_of(self.part)
            if part is None:
                raise InvalidEdit(f"{self.name}: part={shown(self.part)}; give the index of a part, or 'each'")
            object.__setattr__(self, "part", part)
        if not isinstance(self.model, str):
            raise InvalidEdit(f"{self.name}: model={shown(self.model)}; give the name of a model, or '' for none")
        object.__setattr__(self, "model", model_of(vars(self), self.name) or self.model)
        self._check()

    def _read_site(self) -> None:
        """Split a `site` that includes its layer, such as "blocks.5.attn.hook_z", into `site` and `layer`."""
        found = read_name(self.site)
        _ = SITES[found.site]
        object.__setattr__(self, "site", found.site)
        if found.layer is not None:
            if not (self.layer is None and self.layers is None):
                raise InvalidEdit(f"{self.name}: site={found.site!r} was given with its layer; leave layer= out")
            object.__setattr__(self, "layer", found.layer)

    if not TYPE_CHECKING:  # mypy would take any attribute for one of an edit

        def __getattribute__(self, name: str) -> object:
            value = super().__getattribute__(name)
            return value.clone() if isinstance(value, torch.Tensor) else value

    @abstractmethod
    def _check(self) -> None:
        """Check the subclass's own arguments, and replace its vectors by float32 copies."""

    @abstractmethod
    def lower(self) -> tuple[RankOne, ...]:
        """Return the edit as rank-one edits, in order of application."""

    @property
    def name(self) -> str:
        """Name of the edit's class, such as "Add"."""
        return type(self).__name__

    @property
    def selection(self) -> TokenSelection:
        """Selection of the tokens to edit, parsed from `tokens`."""
        return cast("TokenSelection", self.tokens)

    @property
    def replaced(self) -> tuple[int, ...]:
        """Positions of a `Replace`, in the order of its rows; empty for any other edit."""
        return ()

    def points(self, num_layers: int) -> tuple[Point, ...]:
        """Return the points to edit in a model of `num_layers` layers.

        Raises:
            LayerOutOfRange: an index outside the model.
            UnknownName: a site that does not exist.
        """
        layers = self.layers if self.layer is None else self.layer
        assert layers is not None
        return placed((Point(layer, self.site) for layer in resolve_layers(layers, num_layers)), num_layers)

    def __repr__(self) -> str:
        scope = [field.name for field in fields(Edit)]
        given = ((field.name, vars(self)[field.name]) for field in fields(self) if field.name != "model" or self.model)
        named = sorted(given, key=lambda it: it[0] in scope)
        return f"{self.name}({', '.join(f'{name}={_shown(value)}' for name, value in named if value is not None)})"

    def _keep(self, field: str, *shapes: str) -> Float[torch.Tensor, " ..."]:
        """Replace the value of a field by a float32 copy, independent of the user's tensor, and return it.

        Args:
            field: name of the field.
            shapes: allowed shapes: "width" for one vector, "rows width" for several; "width" if none is given.
        """
        what = f"{self.name}: {field}"
        given = at_layer(vars(self)[field], what, self.layer, self.site)
        kept = float32_copy(given, what, *(shapes or ("width",)))
        object.__setattr__(self, field, kept)
        return kept

    def _number(self, field: str) -> None:
        """Convert the value of a field to a float, or raise InvalidEdit if it is not a number of float32."""
        number = number_of(getattr(self, field))
        if number is None:
            raise InvalidEdit(f"{self.name}: {field}={shown(getattr(self, field))} is not a number; give a real one")
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise InvalidEdit(f"{self.name}: {field}={number}; give a number that float32 can hold")
        object.__setattr__(self, field, number)

    def _flag(self, field: str) -> None:
        """Convert the value of a field to a bool, or raise InvalidEdit if it is not a truth value."""
        flag = truth_of(getattr(self, field), f"{self.name}: {field}", wrong=InvalidEdit)
        object.__setattr__(self, field, flag)


def _shown(value: object) -> str:
    """Return a short text for an argument's value; for a tensor, its shape."""
    if isinstance(value, torch.Tensor):
        return f"<{' × '.join(map(str, value.shape))}>"
    return str(value) if isinstance(value, TokenSelection) else repr(value)


def unit(edit: Edit, field: str) -> Float[torch.Tensor, "1 width"]:
    """Return a vector of an edit scaled to norm 1: float32 [1, width], computed in float64.

    Raises:
        InvalidVector: the vector is zero.
    """
    vector: torch.Tensor = getattr(edit, field)
    norm = vector.double().norm()
    if norm == 0:
        raise InvalidVector(f"{edit.name}: {field} is zero, so it has no direction, which this edit needs")
    direction: torch.Tensor = (vector.double() / norm).to(vector.dtype)
    return direction[None]


def number_in(value: torch.Tensor) -> float:
    """Return a tensor of one number, computed from an edit's vectors, as a float for `Response`.

    One that requires a gradient is returned unchanged; see `steercap.lab.training`.
    """
    return value if value.requires_grad else float(value)  # type: ignore[return-value]


#: Registry of edit classes, subclasses of `Edit`, by operation name, such as "add".
EDITS: Registry[type] = Registry("edit", sys.modules[__name__], type)
