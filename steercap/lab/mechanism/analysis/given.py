"""Input vectors of an analysis, checked against a model, and the blocks that read or write their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from jaxtyping import Float

from steercap.core.display import brief
from steercap.core.spec import Layers, parse_layers, resolve_layers
from steercap.core.values import count_of, shown
from steercap.errors import InvalidSpec, InvalidVector
from steercap.files.fingerprint import names_of, warn_of_other_model
from steercap.lab.mechanism.weights.model import ModelWeights
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors

#: Accepted forms of vectors: a DirectionSet, one LayerVectors, or several of these by name or with different names.
Vectors: TypeAlias = "DirectionSet | LayerVectors | Mapping[str, LayerVectors] | Sequence[LayerVectors]"
#: One of the two blocks of a layer.
Block: TypeAlias = Literal["attention", "mlp"]

#: By site in the basis of the residual stream: layers on from the point to the first (attention, feed-forward) block
#: that reads it.
READ: Final[Mapping[str, tuple[int, int]]] = {
    "resid_pre": (0, 0),
    "resid_mid": (1, 0),
    "attn_out": (1, 0),
    "resid_post": (1, 1),
    "mlp_out": (1, 1),
}
#: By site of the residual stream: layers from the point to the last (attention, feed-forward) block that wrote to it.
LAST_WRITERS: Final[Mapping[str, tuple[int, int]]] = {"resid_pre": (-1, -1), "resid_mid": (0, -1), "resid_post": (0, 0)}
#: Block whose output is the row, by site.
OWN: Final[Mapping[str, Block]] = {"attn_out": "attention", "mlp_out": "mlp"}


def named(vectors: Vectors) -> DirectionSet:
    """Return vectors of any accepted form as a DirectionSet; a single one without a name is called "vector".

    Raises:
        InvalidSpec: not vectors, two of one name, or vectors that differ in model, site, width or layers.
    """
    if isinstance(vectors, DirectionSet):
        return vectors
    if isinstance(vectors, LayerVectors):
        return DirectionSet({vectors.name or "vector": vectors})
    if isinstance(vectors, Mapping):
        return DirectionSet(cast("Mapping[str, LayerVectors]", vectors))
    if not isinstance(vectors, Sequence) or not all(isinstance(one, LayerVectors) for one in vectors):
        raise InvalidSpec(f"vectors={shown(vectors)}; give a DirectionSet, LayerVectors, or several of these by name")
    names = [one.name for one in vectors]
    if not names or "" in names or len(set(names)) < len(names):
        raise InvalidSpec(f"vectors have the names {names}; give each one of its own: vectors.named('joy')")
    return DirectionSet(dict(zip(names, vectors, strict=True)))


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Vectors of several groups at one layer, as rows in the basis of the residual stream.

    Args:
        groups, names: name of the group, and of the vector, of each row.
        rows: the vectors, float32 [rows, hidden].
    """

    groups: tuple[str, ...]
    names: tuple[str, ...]
    rows: Float[torch.Tensor, "rows hidden"]

    __repr__ = brief

    def __len__(self) -> int:
        return len(self.names)

    @property
    def units(self) -> Float[torch.Tensor, "rows hidden"]:
        """Rows scaled to L2 norm 1, float64 [rows, hidden]."""
        return _of_length_1(self.rows)

    def scaled(self, length: float) -> LabelledRows:
        """Return the rows scaled to L2 norm `length`, so that all weigh the same, also against a norm's epsilon."""
        return replace(self, rows=(self.units * length).float())

    @property
    def labels(self) -> dict[str, list[str]]:
        """Columns `group` and `name` of a table with these rows."""
        return {"group": list(self.groups), "name": list(self.names)}

    def where(self, kept: Iterable[int]) -> LabelledRows:
        """Return the rows of the indices `kept`, in this order, with their labels."""
        places = list(kept)
        groups, names = (tuple(labels[one] for one in places) for labels in (self.groups, self.names))
        return LabelledRows(groups, names, self.rows[places])

    def sampled(self, per_group: int | None, seed: int) -> LabelledRows:
        """Return `per_group` rows of each group, drawn by `seed`, group by group in their order; all rows for None."""
        kept, generator = list[int](), torch.Generator().manual_seed(seed)
        for group in dict.fromkeys(self.groups):
            places = [at for at, own in enumerate(self.groups) if own == group]
            kept += sorted(places[at] for at in torch.randperm(len(places), generator=generator)[:per_group].tolist())
        return self.where(kept)

    def __add__(self, other: LabelledRows) -> LabelledRows:
        """Return the rows of `self`, then those of `other`, which must be of the same layer and width; not checked."""
        rows = torch.cat([self.rows, other.rows])
        return LabelledRows(self.groups + other.groups, self.names + other.names, rows)


def labelled(
    groups: Mapping[str, Vectors], weights: ModelWeights, layer: int, also: ModelWeights | None = None
) -> LabelledRows:
    """Return the vectors of several groups at one layer, group by group, at their own lengths.

    `also` is as for `in_stream`.

    Raises:
        InvalidSpec: no groups, groups of several sites, or vectors that do not fit the model.
        LayerOutOfRange, InvalidVector: there are no vectors for the layer, or one is zero.
    """
    if not isinstance(groups, Mapping) or isinstance(groups, DirectionSet) or not groups:
        raise InvalidSpec(f"groups={shown(groups)}; give vectors by the name of their group: {{'traits': directions}}")
    sets = {group: in_stream(vectors, weights, also) for group, vectors in groups.items()}
    if len({directions.site for directions in sets.values()}) > 1:
        sites = ", ".join(f"{group} of {directions.site}" for group, directions in sets.items())
        raise InvalidSpec(f"the groups are of several sites: {sites}; give vectors of one")
    first, *others = (LabelledRows((group,) * len(one), tuple(one), matrix(one, layer)) for group, one in sets.items())
    return sum(others, start=first)


def matrix(directions: DirectionSet, layer: int) -> Float[torch.Tensor, "names hidden"]:
    """Return the vectors of one layer: float32 [names, hidden].

    Raises:
        LayerOutOfRange: there are no vectors for the layer.
        InvalidVector: a vector is zero.
    """
    found = directions.at(layer)
    if zero := [name for name, vector in zip(directions, found, strict=True) if not vector.any()]:
        raise InvalidVector(f"the vectors of {', '.join(zero)} at layer {layer} are zero and have no direction")
    return found


def units(directions: DirectionSet, layer: int) -> Float[torch.Tensor, "names hidden"]:
    """Return the vectors of one layer, scaled to length 1: float32 [names, hidden]; errors as for `matrix`."""
    return _of_length_1(matrix(directions, layer)).float()


def _of_length_1(rows: torch.Tensor) -> torch.Tensor:
    """Return rows divided by their norms, however small, float64 [rows, hidden]."""
    exact = rows.double()
    scaled: torch.Tensor = exact / exact.norm(dim=1, keepdim=True)
    return scaled


def chosen_layers(directions: DirectionSet, layers: Layers | None) -> list[int]:
    """Return the indices of selected layers, all of the vectors' for None; negative ones count from their last layer.

    Raises:
        LayerOutOfRange, InvalidSpec: there are no vectors for a layer.
    """
    if layers is None:
        return list(directions.layers)
    wanted = resolve_layers(parse_layers(layers), max(directions.layers) + 1)
    return list(directions.at_layers(wanted).layers)


def in_stream(vectors: Vectors, weights: ModelWeights, also: ModelWeights | None = None) -> DirectionSet:
    """Return vectors as a DirectionSet, after checking that they are in the basis of the model's residual stream.

    Vectors that say that they were made for another model are warned of; with `also`, a second checkpoint that the
    vectors may be of, base and instruct count as one.

    Raises:
        InvalidSpec: the width differs from the model's, the site is not in that basis, or as for `named`.
    """
    found = named(vectors)
    if not isinstance(weights, ModelWeights):
        raise InvalidSpec(
            f"weights={shown(weights)}; give ModelWeights.open(checkpoint); for an open model the checkpoint is its "
            ".model"
        )
    if found.site not in READ:
        raise InvalidSpec(
            f"vectors of {found.site!r} are not in the basis of the stream; those of {', '.join(READ)} are"
        )
    if found.width != weights.width:
        raise InvalidSpec(f"vectors have width {found.width}, and {weights!r} another; are they of another model?")
    names = [name for one in (weights, also) if one is not None for name in names_of(one.name)]
    warn_of_other_model("vectors", found.model, names, tuned=also is not None)
    return found


def readers(weights: ModelWeights, site: str, layer: int, block: Block, layers: Layers | None) -> list[int]:
    """Return the layers, ascending, whose block reads a vector that is added at a point.

    Args:
        weights: weights of the model.
        site, layer: site and layer of the point.
        block: "attention" or "mlp".
        layers: layers to return instead, without regard to the point; None for all whose block comes after it.

    Raises:
        InvalidSpec: no block reads the vector.
        LayerOutOfRange: the model does not have a layer.
    """
    first = layer + READ[site][block == "mlp"]
    if site == "attn_out" and block == "mlp" and weights.is_parallel:
        first = layer + 1
    does = f"reads what is added at {site} of layer {layer}"
    return _layers_wanted(weights, layers, range(first, weights.layers), does)


def writers(weights: ModelWeights, site: str, layer: int, block: Block, layers: Layers | None) -> list[int]:
    """Return the layers, ascending, whose block has written to the rows of a point; the rest is as for `readers`."""
    if site in OWN:
        last = layer if OWN[site] == block else -1
        found = range(layer, last + 1)
    else:
        found = range(layer + LAST_WRITERS[site][block == "mlp"] + 1)
    return _layers_wanted(weights, layers, found, f"writes to {site} of layer {layer}")


def random_units(count: int, width: int, seed: int) -> Float[torch.Tensor, "count width"]:
    """Draw random vectors of length 1, uniform on the sphere.

    Args:
        count: number of vectors, 2 at least.
        width: number of elements of each.
        seed: seed of the draw.

    Raises:
        InvalidSpec: `count` is below 2, too few for a spread, or `seed` is no whole number.
    """
    number = count_of(count, "random", 2)
    generator = torch.Generator().manual_seed(count_of(seed, "seed", 0))
    drawn = torch.randn(number, width, generator=generator, dtype=torch.float32)
    found: torch.Tensor = torch.nn.functional.normalize(drawn, dim=1)
    return found


def random_pairs(
    count: int, width: int, seed: int
) -> tuple[Float[torch.Tensor, "count width"], Float[torch.Tensor, "count width"]]:
    """Draw random unit vectors, and for each an orthogonal unit vector; arguments as for `random_units`.

    Raises:
        InvalidSpec: as for `random_units`.
    """
    first, across = random_units(count, width, seed), random_units(count, width, seed + 1)
    across -= (across * first).sum(1, keepdim=True) * first
    across /= across.norm(dim=1, keepdim=True)
    return first, across


def _layers_wanted(weights: ModelWeights, layers: Layers | None, found: Sequence[int], does: str) -> list[int]:
    if layers is not None:
        return list(resolve_layers(parse_layers(layers), weights.layers))
    if not found:
        raise InvalidSpec(f"no block of this kind {does}; choose others by layers=")
    return list(found)


def origin(directions: DirectionSet, **more: Any) -> dict[str, Any]:
    """Return a table's metadata about its vectors: model, site, width, and the entries of `more`."""
    return {"model": directions.model, "site": directions.site, "width": directions.width, **more}
