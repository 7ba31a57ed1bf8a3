"""Geometry of vectors: cosines of every two, and hierarchical clusters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from steercap.core.extras import extra
from steercap.core.spec import Layers
from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.mechanism.analysis.given import Vectors, chosen_layers, named, origin, units
from steercap.lab.mechanism.analysis.tables import table_of
from steercap.steering.directions import DirectionSet

if TYPE_CHECKING:
    import pyarrow as pa

#: Distance between groups: the mean, the greatest or the least distance of their members.
Linkage: TypeAlias = Literal["average", "complete", "single"]


def chance_cosine(width: int) -> float:
    """Return the mean |cosine| of two random directions, √(2 / (π width)), for widths that are not tiny.

    Source: a coordinate of a random unit vector is close to normal, with variance 1 / width.

    Args:
        width: number of elements of each.
    """
    return math.sqrt(2 / (math.pi * width))


def cosines(vectors: Vectors, *, layers: Layers | None = None) -> pa.Table:
    """Compute the cosine of every two vectors, layer by layer.

    Args:
        vectors: a DirectionSet, or LayerVectors of one model, site and width.
        layers: some of their layers; all by default.

    Returns:
        Columns `layer`, `first`, `second`, `cosine`: every ordered pair, each with itself included.

    Raises:
        InvalidSpec, LayerOutOfRange: the vectors cannot be compared, or lack a layer.
        InvalidVector: a vector is zero.
    """
    directions = named(vectors)
    names, at = list(directions), chosen_layers(directions, layers)
    found = []
    for layer in at:
        unit = units(directions, layer).double()
        found.append((unit @ unit.T).clamp(-1, 1).numpy().ravel())
    count = len(names)
    columns: dict[str, Any] = {
        "layer": np.repeat(at, count * count),
        "first": np.repeat(names, count).tolist() * len(at),
        "second": names * count * len(at),
        "cosine": np.concatenate(found),
    }
    return table_of(columns, **origin(directions, chance=chance_cosine(directions.width)))


def merges(vectors: Vectors, layer: int, *, linkage: Linkage = "average") -> pa.Table:
    """Cluster vectors hierarchically: join the nearest two groups repeatedly, until one is left.

    Distances are 1 - cosine: 0 for equal directions, 1 for orthogonal ones, 2 for opposite ones.

    Args:
        vectors: vectors as for `cosines`, two at least.
        layer: layer of the vectors.
        linkage: distance between groups: "average", "complete" or "single".

    Returns:
        Columns `step`, `left`, `right` (a name, or "#2" for what step 2 made), `distance`, `size`. `about` says the
        `order` of the names in which no two lines of the tree cross.

    Raises:
        InvalidSpec: fewer than two vectors, or an unknown linkage.
        The errors of `cosines`.
    """
    directions = named(vectors)
    tree = _tree(directions, layer, linkage)
    with extra("analysis"):
        from scipy.cluster.hierarchy import leaves_list

    names = list(directions)
    labels = [*names, *(f"#{step}" for step in range(len(tree)))]
    columns: dict[str, Any] = {
        "step": np.arange(len(tree)),
        "left": [labels[int(one)] for one in tree[:, 0]],
        "right": [labels[int(one)] for one in tree[:, 1]],
        "distance": tree[:, 2],
        "size": tree[:, 3].astype(np.int64),
    }
    order = [names[one] for one in leaves_list(tree)]
    return table_of(columns, **origin(directions, layer=layer, linkage=linkage, order=order))


def clusters(vectors: Vectors, layer: int, *, count: int, linkage: Linkage = "average") -> pa.Table:
    """Cut the tree of `merges` into `count` groups.

    Args:
        vectors, layer, linkage: arguments as for `merges`.
        count: number of groups; fewer result if distances are equal.

    Returns:
        Columns `name`, `cluster` (from 0, in the order of the tree) and `place` in that order, one row a vector.

    Raises:
        InvalidSpec: `count` is not from 1 to the number of vectors.
        The errors of `merges`.
    """
    directions = named(vectors)
    tree = _tree(directions, layer, linkage)
    with extra("analysis"):
        from scipy.cluster.hierarchy import fcluster, leaves_list

    wanted = index_of(count)
    if wanted is None or not 1 <= wanted <= len(directions):
        raise InvalidSpec(f"count={shown(count)}; give a number of groups, from 1 to {len(directions)}")
    groups, order = fcluster(tree, wanted, criterion="maxclust"), leaves_list(tree)
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups[order].tolist()))}
    names = list(directions)
    columns: dict[str, Any] = {
        "name": [names[one] for one in order],
        "cluster": [numbers[groups[one]] for one in order],
        "place": np.arange(len(order)),
    }
    return table_of(columns, **origin(directions, layer=layer, linkage=linkage, count=wanted))


def _tree(directions: DirectionSet, layer: int, linkage: str) -> Any:
    with extra("analysis"):
        from scipy.cluster.hierarchy import linkage as joined
        from scipy.spatial.distance import squareform

    if linkage not in get_args(Linkage):
        raise InvalidSpec(f"linkage={shown(linkage)}; give one of {', '.join(get_args(Linkage))}")
    if len(directions) < 2:
        raise InvalidSpec(f"{list(directions)}: a tree needs two vectors at least")
    unit = units(directions, layer).double()
    distances = (1 - (unit @ unit.T)).clamp(0, 2).fill_diagonal_(0).numpy()
    return joined(squareform((distances + distances.T) / 2, checks=False), method=linkage, optimal_ordering=True)
