"""What a user asks to capture, checked against the model before anything runs.

Number 1 in the life of a request.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, SupportsIndex, TypeAlias, cast

from steercap.core.tokens import Tokens, TokenSelection
from steercap.errors import InvalidSpec, LayerOutOfRange, PointNotArmed, UnknownName

if TYPE_CHECKING:
    from steercap.vectors.directions import DirectionSet
    from steercap.vectors.layers import LayerVectors

#: Layers as a user writes them; negative indices count from the last layer.
Layers: TypeAlias = "int | slice | range | Sequence[int] | Literal['all']"
Reduction: TypeAlias = Literal["mean", "sum", "max", "last"]

REDUCTIONS: Final[tuple[Reduction, ...]] = ("mean", "sum", "max", "last")


class Point(NamedTuple):
    """A site at a layer: one place in the model where rows can be read."""

    layer: int
    site: str

    def __str__(self) -> str:
        return f"{self.site}[{self.layer}]"


@dataclass(frozen=True, kw_only=True)
class CaptureSpec:
    """Which activations a request keeps.

    Args:
        layers: an index, a slice, a range, a sequence of indices, or "all"; negative counts from the last layer.
            Layer `i` of `resid_post` is transformers' `hidden_states[i + 1]`, before the final norm for the last layer.
        sites: places in the layer, one name or several.
        tokens: "all", "prompt", "generated", "last_prompt", a slice, positions (negative counts from the end of the
            prompt), or a list of these. Prompt + generated - 1 tokens exist: the last sampled one is never an input.
        reduce: None for one row a token, or "mean", "sum", "max", "last" over the tokens selected, computed in the
            worker in float32: one row a point.
        codec: how rows are stored on their way to the client; "raw" keeps them bit for bit.
        before_edits: keep rows as they were before the edits of their own point; by default they are what the
            model goes on with, edits included. Edits at earlier points have had their effect either way.
        project: a DirectionSet, or LayerVectors for one direction: in the place of each row, its scalar products with
            the unit vectors of its layer, float32 [rows, directions], computed in the worker. `layers="all"` then
            means all layers that the directions have, and the site is theirs.

    Raises:
        InvalidSpec: no site, an unknown reduction, layers or sites of another type, or `project` beside `reduce`.
        InvalidSelection: a malformed `tokens`.
    """

    layers: Layers = "all"
    sites: str | Sequence[str] = ("resid_post",)
    tokens: Tokens | TokenSelection = "all"
    reduce: Reduction | None = None
    codec: str = "raw"
    before_edits: bool = False
    project: DirectionSet | LayerVectors | None = None

    def __post_init__(self) -> None:
        sites = (self.sites,) if isinstance(self.sites, str) else _tuple(self.sites, "sites")
        if not sites:
            raise InvalidSpec("sites=() captures nothing; name at least one site")
        if self.reduce is not None and self.reduce not in REDUCTIONS:
            raise InvalidSpec(f"unknown reduce={self.reduce!r}; known: None, {', '.join(map(repr, REDUCTIONS))}")
        object.__setattr__(self, "sites", tuple(dict.fromkeys(sites)))
        object.__setattr__(self, "tokens", TokenSelection.parse(self.tokens))
        if not isinstance(self.layers, (SupportsIndex, slice, range, str)):
            object.__setattr__(self, "layers", _tuple(self.layers, "layers"))
        if self.project is not None and self.reduce is not None:
            raise InvalidSpec(
                f"project= gives a few numbers a token, and reduce={self.reduce!r} one row a request; give one of them"
            )
        if self.project is not None and self.codec != "raw":
            raise InvalidSpec(f"project= gives float32 numbers, which codec={self.codec!r} cannot hold; leave it out")

    @property
    def selection(self) -> TokenSelection:
        """The tokens asked for, parsed."""
        return cast("TokenSelection", self.tokens)

    def points(self, num_layers: int) -> tuple[Point, ...]:
        """The points asked for in a model of `num_layers` layers, layer by layer.

        Raises:
            LayerOutOfRange: an index outside the model.
            InvalidSpec: a selection of layers that holds none.
        """
        layers = resolve_layers(self.layers, num_layers)
        return tuple(Point(layer, site) for layer in layers for site in self.sites)


def resolve_layers(layers: Layers, num_layers: int) -> tuple[int, ...]:
    """Sorted, distinct, non-negative layer indices.

    Raises:
        LayerOutOfRange: an index outside the model.
        InvalidSpec: a value of another type, or a selection that holds no layer.
    """
    found = sorted({_index(layer, num_layers) for layer in _listed(layers, num_layers)})
    if not found:
        raise InvalidSpec(f"layers={layers!r} selects none of the {num_layers} layers")
    return tuple(found)


def check_armed(points: Iterable[Point], armed: Iterable[Point], known_sites: Iterable[str]) -> None:
    """See that every point has a tap.

    Raises:
        UnknownName: a site that does not exist.
        PointNotArmed: a point without a tap in this engine.
    """
    taps, sites = set(armed), tuple(known_sites)
    for point in points:
        if point.site not in sites:
            raise UnknownName(f"unknown site {point.site!r}; known: {', '.join(map(repr, sites))}")
        if point not in taps:
            armed_sites = sorted({tap.site for tap in taps})
            armed_layers = sorted({tap.layer for tap in taps if tap.site == point.site})
            raise PointNotArmed(
                f"{point} has no tap in this engine, which was started with sites={armed_sites}"
                + (f" at layers {armed_layers} for {point.site!r}" if armed_layers else "")
                + f"; arm it with SteerModel(..., sites=[..., {point.site!r}], layers=...)"
            )


def _tuple(values: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise InvalidSpec(f"{name}={values!r} is none; see CaptureSpec for what it can be")
    return tuple(values)


def _listed(layers: Layers, num_layers: int) -> Iterable[object]:
    if isinstance(layers, str):
        if layers != "all":
            raise InvalidSpec(f"layers={layers!r} is no layer; use 'all', an index, a slice or a sequence of indices")
        return range(num_layers)
    if isinstance(layers, slice):
        return range(num_layers)[layers]
    return layers if isinstance(layers, Iterable) else (layers,)


def _index(layer: object, num_layers: int) -> int:
    if isinstance(layer, bool) or not isinstance(layer, SupportsIndex):
        raise InvalidSpec(f"layer {layer!r} is no integer; layers run from 0 to {num_layers - 1}")
    index = operator.index(layer)
    if not -num_layers <= index < num_layers:
        raise LayerOutOfRange(
            f"layer {index} is outside this model of {num_layers} layers; use 0 to {num_layers - 1}, "
            f"or -{num_layers} to -1 from the end"
        )
    return index % num_layers
