"""Sets of named directions of one model and site, with their provenance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float

from steercap.core.display import brief, html_table
from steercap.core.spec import Layers
from steercap.core.values import choices, shown
from steercap.errors import InvalidSpec, InvalidVector, UnknownName
from steercap.files import native
from steercap.files.native import FileKind
from steercap.steering.edits.inputs import FrozenMapping, Mark, layers_among, marks_of, several
from steercap.steering.layers import LayerVectors


@dataclass(frozen=True)
class Provenance:
    """Origin of a set of directions: texts, method and held-out scores; "" and {} if unknown.

    Args:
        revision: revision of the model.
        dtype: dtype that the model computed in.
        prompts: SHA-256 of all token ids read, by direction's name.
        tokens: selection of the tokens whose rows were used, as `TokenSelection` writes it, or "response".
        reduce: reduction of a text's rows to one row, such as "mean".
        method: name of the method in `METHODS`.
        seed: seed of the held-out split, and of methods that draw at random.
        rows: numbers of texts with and without the property, without those held out, by direction's name.
        held_out: numbers of held-out texts with and without the property, by direction's name.
        auc: area under the ROC curve of the held-out texts' projections, by name and layer; 0.5 is chance.
        row_norms: mean norm of the texts' reduced rows, by name and layer, in the units of the stream. A mean row over
            tokens is somewhat shorter than the tokens' rows, by whose norms `Add(relative=True)` scales.
    """

    revision: str = ""
    dtype: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    tokens: str = ""
    reduce: str = ""
    method: str = ""
    seed: int = 0
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    held_out: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    auc: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    row_norms: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    __repr__ = brief


@dataclass(frozen=True, eq=False)
class DirectionSet(Mapping[str, LayerVectors]):
    """Mapping of names to directions: `directions["optimistic"]` is its vectors by layer, which add, scale and compare.

    Args:
        directions: at least one, all of the same model, site, width and layers; each gets its key as name. They are
            copies, and every access returns copies, so directions that rows were projected on cannot change.
        provenance: origin of the directions.

    Raises:
        InvalidSpec: no direction, an empty name, or directions that differ in model, site, width or layers.

    Two sets are equal if their directions and provenance are.
    """

    directions: Mapping[str, LayerVectors]
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        if not isinstance(self.directions, Mapping) or not self.directions:
            raise InvalidSpec("DirectionSet: no directions; give a mapping from name to LayerVectors, at least one")
        for name, vectors in self.directions.items():
            if not isinstance(name, str) or not name or not isinstance(vectors, LayerVectors):
                raise InvalidSpec(f"DirectionSet: {shown(name)}: {shown(vectors)}; give LayerVectors by their name")
        if not isinstance(self.provenance, Provenance):
            raise InvalidSpec(f"DirectionSet: provenance={shown(self.provenance)}; give a Provenance")
        named = {name: vectors.named(name) for name, vectors in self.directions.items()}
        object.__setattr__(self, "directions", FrozenMapping(named))
        first, *others = self.values()
        for other in others:
            first.require_alike(other)

    @property
    def model(self) -> str:
        """Model that the directions were made for, "" if unknown."""
        return self._first.model

    @property
    def site(self) -> str:
        """Site of the directions, such as "resid_post"."""
        return self._first.site

    @property
    def width(self) -> int:
        """Number of elements of each vector."""
        return self._first.width

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that each direction has a vector for, ascending."""
        return tuple(self._first)

    def at(self, layer: int) -> Float[torch.Tensor, "names hidden"]:
        """Return the vectors of one layer, in the order of the names: float32 [names, hidden].

        Raises:
            LayerOutOfRange: there are no vectors for the layer.
        """
        return torch.stack([vectors[layer] for vectors in self.values()])

    def units(self, layer: int) -> Float[torch.Tensor, "names hidden"]:
        """Return the vectors of one layer scaled to norm 1, in the order of the names: float32 [names, hidden].

        Raises:
            LayerOutOfRange: there are no vectors for the layer.
            InvalidVector: a vector is zero.
        """
        vectors = self.at(layer).double()
        norms = torch.linalg.vector_norm(vectors, dim=1)
        if zero := [name for name, norm in zip(self, norms.tolist(), strict=True) if not norm]:
            raise InvalidVector(f"the vectors of {shown(zero)} at layer {layer} are zero and have no direction")
        vectors /= norms[:, None]
        return vectors.float()

    def project(self, rows: Float[torch.Tensor, "rows hidden"], layer: int) -> Float[torch.Tensor, "rows names"]:
        """Return the scalar products of rows with a layer's unit vectors: float32 [..., names], in the stream's units.

        Args:
            rows: floating-point numbers, [hidden] or [..., hidden], on any device.
            layer: layer of the rows.

        Raises:
            LayerOutOfRange: there are no vectors for the layer.
            InvalidVector: rows that are not such a tensor, or of another width; a direction that is zero.
        """
        units = self.units(layer)
        if not isinstance(rows, torch.Tensor) or not rows.is_floating_point() or rows.is_meta:
            raise InvalidVector(f"rows={shown(rows)}; give a tensor of real numbers, [rows, hidden]")
        if not rows.dim() or rows.shape[-1] != self.width:
            raise InvalidVector(f"rows are {list(rows.shape)}, and the directions have width {self.width}")
        # In float64: of float32, the process may have products made in TF32 or bfloat16.
        return (rows.to(device="cpu", dtype=torch.float64) @ units.T.double()).float()

    def marks(self, layer: int) -> tuple[Mark, ...]:
        """Return the fingerprints of one layer's directions, four numbers each, in the order of the names."""
        return marks_of(self.units(layer))

    def cosines(self, layer: int) -> Float[torch.Tensor, "names names"]:
        """Return the cosines of all pairs of directions at one layer: float64 [names, names]."""
        units = self.units(layer).double()
        return (units @ units.T).clamp(-1, 1)

    def select(self, names: str | Iterable[str]) -> DirectionSet:
        """Return a set of some of the directions, in the order of `names`; the provenance is unchanged.

        Raises:
            UnknownName: there is no direction of a name.
        """
        wanted = [names] if isinstance(names, str) else several(names, "names")
        return replace(self, directions={name: self[name] for name in wanted})

    def at_layers(self, layers: Layers) -> DirectionSet:
        """Return the same directions with the vectors, and the provenance, of some layers only.

        Raises:
            LayerOutOfRange: there are no vectors for a layer.
        """
        wanted = layers_among(layers, self.layers)
        found, known = self._each(lambda vectors: vectors.at_layers(wanted)), self.provenance

        def kept(measured: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
            return {name: {at: by[at] for at in found.layers if at in by} for name, by in measured.items()}

        return replace(found, provenance=replace(known, auc=kept(known.auc), row_norms=kept(known.row_norms)))

    def unit(self) -> DirectionSet:
        """Return the same directions with all vectors scaled to norm 1.

        Raises:
            InvalidVector: a vector is zero.
        """
        return self._each(LayerVectors.unit)

    def orthogonal(self) -> DirectionSet:
        """Return each direction minus its projection on the span of those before it, in the order of the names.

        The AUC of all but the first, which was measured before, is removed from the provenance.
        """
        done: dict[str, LayerVectors] = {}
        for name, vectors in self.items():
            done[name] = vectors.without(*(self[other] for other in done))
        measured = _of_names(self.provenance.auc, [next(iter(self))])
        return replace(self, directions=done, provenance=replace(self.provenance, auc=measured))

    def __or__(self, other: DirectionSet) -> DirectionSet:
        """Return a set with the directions of `self` and `other`, the latter's for equal names.

        Entries of the provenance by name, such as `auc`, stay with the direction that is kept.

        Raises:
            InvalidSpec: model, site, width, layers or the rest of the provenance differ.
        """
        if not isinstance(other, DirectionSet):
            return NotImplemented
        kept = [name for name in self if name not in other]
        return DirectionSet({**self, **other}, _joined((self.provenance, kept), (other.provenance, list(other))))

    def save(self, path: str | Path) -> Path:
        """Write directions and provenance to one safetensors file, and return its path; see `steercap.files.native`."""
        return native.save(self, path, _kind(), model=self.model)

    @staticmethod
    def load(path: str | Path) -> DirectionSet:
        """Read a file that `save` wrote.

        Raises:
            InvalidFile: the file is truncated, changed, of another kind, or of a newer version.
        """
        return native.load(path, _kind(), DirectionSet)

    @property
    def _first(self) -> LayerVectors:
        return next(iter(self.values()))

    def _each(self, how: Any) -> DirectionSet:
        return replace(self, directions={name: how(vectors) for name, vectors in self.items()})

    def __getitem__(self, name: str) -> LayerVectors:
        """Return the vectors, by layer, of one direction.

        Raises:
            UnknownName: there is no direction of this name; it is a KeyError too.
        """
        if not isinstance(name, str) or name not in self.directions:
            raise UnknownName(f"no direction {shown(name)}; {choices(name, self)}")
        return self.directions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.directions)

    def __len__(self) -> int:
        return len(self.directions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DirectionSet):
            return NotImplemented
        return list(self.items()) == list(other.items()) and self.provenance == other.provenance

    def __hash__(self) -> int:
        return hash(tuple(self.values()))

    def _repr_html_(self) -> str:
        """Return an HTML table for a notebook: norm and held-out AUC of each direction at each layer."""
        known = self.provenance
        rows = [
            (name, layer, norm, known.row_norms.get(name, {}).get(layer), known.auc.get(name, {}).get(layer))
            for name, vectors in self.items()
            for layer, norm in vectors.norms().items()
        ]
        return html_table(repr(self), ["direction", "layer", "norm", "norm of rows", "AUC held out"], rows)

    def __repr__(self) -> str:
        about = f"model={self.model!r}, site={self.site!r}, method={self.provenance.method!r}"
        return f"DirectionSet({list(self)}, layers={list(self.layers)}, width={self.width}, {about})"


def _joined(*parts: tuple[Provenance, list[str]]) -> Provenance:
    """Join the provenances of two sets; `parts` has each with the names of the directions that are kept of its set.

    Raises:
        InvalidSpec: the directions were made in different ways.
    """
    (first, _), (second, _) = parts
    for name in ("revision", "dtype", "tokens", "reduce", "method", "seed"):
        mine, theirs = getattr(first, name), getattr(second, name)
        if mine != theirs:
            raise InvalidSpec(
                f"these directions were made in different ways: {name} is {mine!r} for some, {theirs!r} for others"
            )
    found: dict[str, Any] = {name: {} for name in ("prompts", "rows", "held_out", "auc", "row_norms")}
    for name, (one, kept) in product(found, parts):
        found[name] |= _of_names(getattr(one, name), kept)
    return replace(first, **found)


def _of_names(given: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}


def _kind() -> FileKind:
    return FileKind(
        "directions", {"DirectionSet": DirectionSet, "LayerVectors": LayerVectors, "Provenance": Provenance}
    )
