"""Vectors by layer, the form of most published steering vectors, and their algebra.

Vectors are added, scaled and compared layer by layer, computed in float64 and kept in float32. Vectors of different
models, sites or layers are not combined, since the result would have no meaning.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float

from steercap.architectures.sites import SITES
from steercap.core.hints import dataclass
from steercap.core.spec import Layers, name_of_site
from steercap.core.values import FAR, index_of, number_of, shown
from steercap.errors import InvalidSpec, InvalidVector, LayerOutOfRange
from steercap.files import native
from steercap.files.native import FileKind
from steercap.steering.edits.inputs import FrozenMapping, Vector, float32_copy, layers_among

#: Singular values below this fraction of the largest are taken for rounding errors.
RANK_TOLERANCE: Final = 1e-6


@dataclass(frozen=True, eq=False)
class LayerVectors(Mapping[int, torch.Tensor]):
    """Vectors by decoder layer, in the order of their layers.

    Layers count from 0: layer `i` of `resid_post` is transformers' `hidden_states[i + 1]`.

    Args:
        vectors: [hidden] by layer, at least one; kept as float32 copies, in the units of the stream. Every access
            returns another copy, so vectors that were compiled or projected on cannot change.
        name: meaning of the vectors, such as "joy"; "" if unnamed.
        model: model that the vectors were made for, "" if unknown.
        site: place in the layer, a name in `steercap.architectures.sites`; vectors for `z` have heads × head_dim
            numbers.

    Raises:
        InvalidSpec: no vector, a layer that is not an index from 0, or a label that is not text.
        UnknownName: a site that does not exist.
        InvalidVector: a vector that holds NaN or inf, is not [hidden], or is of another width than the first.

    Two are equal if labels, layers and values are. `a + b`, `a - b`, `2 * a`, `a / 2` and `-a` work layer
    by layer; the result's name is "", see `named`.
    """

    vectors: Mapping[int, Vector]
    _: KW_ONLY
    name: str = ""
    model: str = ""
    site: str = "resid_post"

    def __post_init__(self) -> None:
        for label in ("name", "model", "site"):
            if not isinstance(getattr(self, label), str):
                raise InvalidSpec(f"LayerVectors: {label}={shown(getattr(self, label))}; give text")
        object.__setattr__(self, "site", name_of_site(self.site))
        _ = SITES[self.site]
        if not isinstance(self.vectors, Mapping) or not self.vectors:
            raise InvalidSpec("LayerVectors: no vectors; give a mapping from layer to [hidden], one layer at least")
        kept = {_layer(layer): _vector(layer, vector) for layer, vector in self.vectors.items()}
        if len(kept) < len(self.vectors):
            raise InvalidSpec(f"LayerVectors: layers {shown(list(self.vectors))} name one twice; give each once")
        object.__setattr__(self, "vectors", FrozenMapping(dict(sorted(kept.items()))))
        widths = {layer: len(vector) for layer, vector in self.items()}
        if len(set(widths.values())) > 1:
            raise InvalidVector(f"LayerVectors: the widths by layer are {widths}; all layers of a model have the same")

    @property
    def width(self) -> int:
        """Number of elements of each vector."""
        return len(next(iter(self.values())))

    def named(self, name: str) -> LayerVectors:
        """Return the same vectors with another `name`.

        Raises:
            InvalidSpec: `name` is not text.
        """
        if not isinstance(name, str):
            raise InvalidSpec(f"LayerVectors: name={shown(name)}; give text")
        other = copy.copy(self)  # what it holds is checked, and never changes
        object.__setattr__(other, "name", name)
        return other

    def at_layers(self, layers: Layers) -> LayerVectors:
        """Return the vectors of some layers only, with the same name, model and site.

        Raises:
            InvalidSpec: `layers` is empty, or means no layers.
            LayerOutOfRange: there is no vector for a layer.
        """
        wanted = layers_among(layers, self)
        if missing := [layer for layer in wanted if index_of(layer) not in self.vectors]:
            raise LayerOutOfRange(f"no vectors for layers {shown(missing)}; they are for {list(self)}")
        return dataclasses.replace(self, vectors={layer: self[layer] for layer in wanted})

    def norms(self) -> dict[int, float]:
        """Return the Euclidean norm of each layer's vector, in the units of the residual stream."""
        return {layer: float(vector.double().norm()) for layer, vector in self.items()}

    def unit(self) -> LayerVectors:
        """Return the vectors scaled to norm 1, with the same name, model and site.

        Raises:
            InvalidVector: a vector is zero.
        """
        norms = self.norms()
        if zero := [layer for layer, norm in norms.items() if not norm]:
            raise InvalidVector(f"{self!r}: the vectors of layers {zero} are zero and have no direction")
        return self._each(lambda layer, vector: vector / norms[layer]).named(self.name)

    def dot(self, other: LayerVectors) -> dict[int, float]:
        """Return the scalar products with the vectors of `other`, by layer.

        Raises:
            InvalidSpec: `other` has another site, width or layers, or names another model.
        """
        self.require_alike(other, unlabelled=True)
        return {layer: float(vector.double() @ other[layer].double()) for layer, vector in self.items()}

    def cosine(self, other: LayerVectors) -> dict[int, float]:
        """Return the cosines with the vectors of `other`, by layer, in [-1, 1].

        Raises:
            InvalidSpec: `other` has another site, width or layers, or names another model.
            InvalidVector: a vector is zero.
        """
        self.require_alike(other, unlabelled=True)
        return {layer: min(max(dot, -1.0), 1.0) for layer, dot in self.unit().dot(other.unit()).items()}

    def without(self, *others: LayerVectors) -> LayerVectors:
        """Return the vectors minus their projections on the span of `others`, by layer; rounding errors become zero.

        Raises:
            InvalidSpec: one of `others` has another model, site, width or layers.
        """
        for other in others:
            self.require_alike(other)

        def left(layer: int, vector: torch.Tensor) -> torch.Tensor:
            span = torch.stack([other[layer].double() for other in others], dim=1)
            span = span / span.norm(dim=0).clamp(min=torch.finfo(span.dtype).tiny)  # long ones do not hide short ones
            directions, sizes, _ = torch.linalg.svd(span, full_matrices=False)
            basis = directions[:, sizes > sizes[0] * RANK_TOLERANCE]
            rest: torch.Tensor = vector - basis @ (basis.T @ vector)
            return rest if rest.norm() > vector.norm() * RANK_TOLERANCE else torch.zeros_like(rest)

        return self._each(left) if others else self.named("")

    def __add__(self, other: LayerVectors) -> LayerVectors:
        return self._combined(other, operator.add)

    def __sub__(self, other: LayerVectors) -> LayerVectors:
        return self._combined(other, operator.sub)

    def __mul__(self, scale: float) -> LayerVectors:
        return self._scaled(scale, operator.mul)

    def __rmul__(self, scale: float) -> LayerVectors:
        return self._scaled(scale, operator.mul)

    def __truediv__(self, scale: float) -> LayerVectors:
        return self._scaled(scale, operator.truediv)

    def __neg__(self) -> LayerVectors:
        return self._scaled(-1, operator.mul)

    def _combined(self, other: LayerVectors, how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> LayerVectors:
        self.require_alike(other)
        return self._each(lambda layer, vector: how(vector, other[layer].double()))

    def _scaled(self, scale: object, how: Callable[[torch.Tensor, float], torch.Tensor]) -> LayerVectors:
        number = number_of(scale)
        if number is None:
            raise InvalidSpec(f"{self!r} is scaled by a number, not by {shown(scale)}")
        if not math.isfinite(number) or (how is operator.truediv and not number):
            raise InvalidSpec(f"{self!r} cannot be scaled by {number}")
        return self._each(lambda _, vector: how(vector, number))

    def _each(self, how: Callable[[int, torch.Tensor], torch.Tensor]) -> LayerVectors:
        """Return the vectors with a function of layer and float64 vector applied to each; the result has no name."""
        return LayerVectors(
            {layer: how(layer, vector.double()) for layer, vector in self.items()}, model=self.model, site=self.site
        )

    def require_alike(self, other: LayerVectors, *, unlabelled: bool = False) -> None:
        """Check that the vectors of `other` can be combined with these.

        Args:
            other: the other vectors.
            unlabelled: True to accept any model if one of the two has model "".

        Raises:
            InvalidSpec: model, site, width or layers differ.
        """
        if not isinstance(other, LayerVectors):
            raise InvalidSpec(f"{self!r} is combined with other LayerVectors, not with {shown(other)}")
        for what in ("model", "site", "width"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs and not (unlabelled and what == "model" and "" in {mine, theirs}):
                raise InvalidSpec(f"{self!r} and {other!r} differ in {what}: {mine!r} and {theirs!r}")
        if list(self) != list(other):
            raise InvalidSpec(f"{self!r} has layers {list(self)}, {other!r} has {list(other)}; take those of both")

    def save(self, path: str | Path) -> Path:
        """Write vectors, name, model and site to one safetensors file; return its path. See `steercap.files.native`."""
        return native.save(self, path, _kind(), model=self.model)

    @staticmethod
    def load(path: str | Path) -> LayerVectors:
        """Return the vectors in a file that `save` wrote, with name, model and site.

        Raises:
            InvalidFile: the file is truncated, changed, of another kind, or of a newer version.
        """
        return native.load(path, _kind(), LayerVectors)

    def __getitem__(self, layer: int) -> Float[torch.Tensor, " hidden"]:
        """Return a copy of the vector of one layer: float32 [hidden].

        Raises:
            LayerOutOfRange: there is no vector for this layer; it is a KeyError too.
        """
        index = index_of(layer)
        if index is None or index not in self.vectors:
            raise LayerOutOfRange(
                f"{shown(layer)} is not a layer of these vectors; they are for layers {list(self)}, counted from 0"
            )
        vector = self.vectors[index]
        assert isinstance(vector, torch.Tensor)
        return vector

    def __iter__(self) -> Iterator[int]:
        return iter(self.vectors)

    def __len__(self) -> int:
        return len(self.vectors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerVectors):
            return NotImplemented
        if self._labels() != other._labels() or self.width != other.width:
            return False
        return all(torch.equal(self[layer], other[layer]) for layer in self)

    def __hash__(self) -> int:
        return hash(self._labels())

    def __repr__(self) -> str:
        labels = f"name={self.name!r}, model={self.model!r}, site={self.site!r}"
        return f"LayerVectors(layers={list(self)}, width={self.width}, {labels})"

    def _labels(self) -> tuple[object, ...]:
        return self.name, self.model, self.site, *self


def _layer(layer: object) -> int:
    index = index_of(layer)
    if index is None or not 0 <= index < FAR:
        raise InvalidSpec(
            f"LayerVectors: layer {shown(layer)}; layers are integers that count from 0, from the first layer"
        )
    return index


def _vector(layer: object, vector: Vector) -> Float[torch.Tensor, " hidden"]:
    """Return a float32 copy of a vector, independent of the user's tensor: [hidden]."""
    return float32_copy(vector, f"LayerVectors: the vector of layer {shown(layer)}", "hidden")


def _kind() -> FileKind:
    return FileKind("vectors", {"LayerVectors": LayerVectors})
