"""What is analysed: vectors as users have them, checked against a model, and which of its blocks see their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from jaxtyping import Float

from steercap.core.spec import Layers, parse_layers, resolve_layers
from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec, InvalidVector
from steercap.lab.mechanism.weights.model import ModelWeights
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors

#: Vectors as users have them: a set with names, one, or several that have names of their own.
Vectors: TypeAlias = "DirectionSet | LayerVectors | Mapping[str, LayerVectors] | Sequence[LayerVectors]"
#: Which of the two blocks of a layer.
Block: TypeAlias = Literal["attention", "mlp"]

#: By site in the stream's own basis, how many layers after its own each block reads it first: attention, feed-forward.
READ: Final[Mapping[str, tuple[int, int]]] = {
    "resid_pre": (0, 0),
    "resid_mid": (1, 0),
    "attn_out": (1, 0),
    "resid_post": (1, 1),
    "mlp_out": (1, 1),
}
#: By site of the stream, how many layers after its own a block wrote to it last.
WRITTEN: Final[Mapping[str, tuple[int, int]]] = {"resid_pre": (-1, -1), "resid_mid": (0, -1), "resid_post": (0, 0)}
#: By site of what one block adds, this block.
OWN: Final[Mapping[str, Block]] = {"attn_out": "attention", "mlp_out": "mlp"}


def named(vectors: Vectors) -> DirectionSet:
    """Vectors as a set with names.

    Args:
        vectors: as given.

    Raises:
        InvalidSpec: something else, two of one name, or some that differ in model, site, width or layers.
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


def matrix(directions: DirectionSet, layer: int) -> Float[torch.Tensor, "names hidden"]:
    """The vectors of one layer: float32 [names, hidden].

    Args:
        directions: with names.
        layer: one that they have vectors for.

    Raises:
        LayerOutOfRange: they have none.
        InvalidVector: one is zero.
    """
    found = directions.at(layer)
    if zero := [name for name, vector in zip(directions, found, strict=True) if not vector.any()]:
        raise InvalidVector(f"the vectors of {', '.join(zero)} at layer {layer} are zero and have no direction")
    return found


def units(directions: DirectionSet, layer: int) -> Float[torch.Tensor, "names hidden"]:
    """The same at length 1."""
    found: torch.Tensor = torch.nn.functional.normalize(matrix(directions, layer).double(), dim=1).float()
    return found


def chosen_layers(directions: DirectionSet, layers: Layers | None) -> list[int]:
    """Layers of vectors: all that there are by default.

    Args:
        directions: with names.
        layers: as in every capture; negative ones count from the last that there is a vector for.

    Raises:
        LayerOutOfRange, InvalidSpec: one that there are no vectors for.
    """
    if layers is None:
        return list(directions.layers)
    wanted = resolve_layers(parse_layers(layers), max(directions.layers) + 1)
    return list(directions.at_layers(wanted).layers)


def in_stream(vectors: Vectors, weights: ModelWeights) -> DirectionSet:
    """Vectors with names, if they are in the basis of a model's stream.

    Args:
        vectors: as given.
        weights: of the model.

    Raises:
        InvalidSpec: of another width, or of a site whose rows are something else than the stream.
    """
    found = named(vectors)
    if not isinstance(weights, ModelWeights):
        raise InvalidSpec(f"weights={shown(weights)}; give ModelWeights.open(checkpoint), of an open model its .model")
    if found.site not in READ:
        raise InvalidSpec(
            f"vectors of {found.site!r} are not in the basis of the stream; those of {', '.join(READ)} are"
        )
    if found.width != weights.width:
        raise InvalidSpec(f"vectors have width {found.width}, and {weights!r} another; are they of another model?")
    return found


def readers(weights: ModelWeights, site: str, layer: int, block: Block, layers: Layers | None) -> list[int]:
    """Layers whose block reads what is added at a point.

    Args:
        weights: of the model.
        site, layer: the point.
        block: which.
        layers: those that are wanted; by default all whose block comes after the point.

    Raises:
        InvalidSpec: none does.
        LayerOutOfRange: a layer that the model does not have.
    """
    first = layer + READ[site][block == "mlp"]
    if site == "attn_out" and block == "mlp" and weights.is_parallel:
        first = layer + 1
    return _wanted(weights, layers, range(first, weights.layers), f"reads what is added at {site} of layer {layer}")


def writers(weights: ModelWeights, site: str, layer: int, block: Block, layers: Layers | None) -> list[int]:
    """Layers whose block has written to the rows of a point; as `readers`, and all by default that came before it."""
    if site in OWN:
        last = layer if OWN[site] == block else -1
        found = range(layer, last + 1)
    else:
        found = range(layer + WRITTEN[site][block == "mlp"] + 1)
    return _wanted(weights, layers, found, f"writes to {site} of layer {layer}")


def random_units(count: int, width: int, seed: int) -> Float[torch.Tensor, "count width"]:
    """Random vectors of length 1, uniform on the sphere; what they are compared with is scaled to length 1, too.

    Args:
        count: how many, 2 at least.
        width: elements of each.
        seed: of the draw.

    Raises:
        InvalidSpec: too few for a spread.
    """
    number = index_of(count)
    if number is None or number < 2:
        raise InvalidSpec(f"random={shown(count)}; give a whole number of random vectors, 2 at least")
    drawn = torch.randn(number, width, generator=torch.Generator().manual_seed(seed))
    found: torch.Tensor = torch.nn.functional.normalize(drawn, dim=1)
    return found


def _wanted(weights: ModelWeights, layers: Layers | None, found: Sequence[int], does: str) -> list[int]:
    if layers is not None:
        return list(resolve_layers(parse_layers(layers), weights.layers))
    if not found:
        raise InvalidSpec(f"no block of this kind {does}; layers= names others")
    return list(found)


def origin(directions: DirectionSet, **more: Any) -> dict[str, Any]:
    """What a table says of the vectors that it is of."""
    return {"model": directions.model, "site": directions.site, "width": directions.width, **more}
