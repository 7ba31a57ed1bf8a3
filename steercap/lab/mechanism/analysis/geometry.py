"""Geometry of vectors: cosines of every two, hierarchical clusters, and similarity of several methods' directions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from steercap.core.extras import extra
from steercap.core.spec import Layers
from steercap.core.values import count_of, index_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.directions.contrast import Contrast, directions_of
from steercap.lab.directions.methods import METHODS
from steercap.lab.mechanism.analysis.given import Vectors, chosen_layers, named, origin, units
from steercap.lab.mechanism.analysis.tables import table_of
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors

if TYPE_CHECKING:
    import pyarrow as pa

#: Distance between groups: the mean, the greatest or the least distance of their members.
Linkage: TypeAlias = Literal["average", "complete", "single"]


def chance_cosine(width: int) -> float:
    """Return the mean |cosine| of two random directions, approximately √(2 / (π width)), for widths that are not tiny.

    Source: a coordinate of a random unit vector is close to normal, with variance 1 / width.

    Args:
        width: number of elements of each direction.
    """
    return math.sqrt(2 / (math.pi * width))


def cosines(vectors: Vectors, *, layers: Layers | None = None) -> pa.Table:
    """Compute the cosine of every two vectors, layer by layer.

    Args:
        vectors: a DirectionSet, or LayerVectors of one model, site and width.
        layers: layers of the vectors; all by default.

    Returns:
        Columns `layer`, `first`, `second` (names), `cosine`: a row for every ordered pair, of equal names too.

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
        Columns `step`, `left`, `right` (a name, or "#2" for the group joined in step 2), `distance`, `size`. `about`
        of the table has `order`, the names in an order in which no two lines of the tree cross.

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
    if taken := set(names) & set(labels[len(names) :]):
        raise InvalidSpec(f"a vector is called {taken.pop()!r}, as a group of the table is; give it another name")
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
        count: number of groups; if distances are equal, there may be fewer.

    Returns:
        Columns `name`, `cluster` (from 0) and `place`, in the order of the tree; a row for each vector.

    Raises:
        InvalidSpec: `count` is not from 1 to the number of vectors.
        The errors of `merges`.
    """
    directions = named(vectors)
    tree = _tree(directions, layer, linkage)
    with extra("analysis"):
        from scipy.cluster.hierarchy import fcluster, leaves_list

    wanted = count_of(count, "count", 1, len(directions))
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


#: Vectors by method.
Found = dict[str, LayerVectors]


def method_similarity(
    contrast: Contrast,
    layers: Sequence[int],
    *,
    methods: Sequence[str] = ("difference", "pca", "probe"),
    others: Mapping[str, LayerVectors] | None = None,
    halves: int = 5,
    shuffles: int = 5,
    seed: int = 0,
) -> pa.Table:
    """Compute cosines between the directions of several methods, layer by layer, with the ceiling that the data allow.

    Methods applied to the same rows share noise, and agree for that reason alone. So the groups of the rows are split
    into halves at random, `halves` times, and each method is applied to both. `apart` is the cosine of one method on
    one half with the other on the other half; `ceiling` is its value if both estimated the same direction, the
    geometric mean of each method's cosine with itself across halves. If `apart` reaches `ceiling`, no difference
    between the methods is visible.

    Source of the ceiling: Spearman (1904), The proof and measurement of association between two things.

    Args:
        contrast: rows of texts that show a property, and of texts that do not.
        layers: layers along the second axis of the rows.
        methods: names in `steercap.lab.directions.METHODS`.
        others: further vectors by name, such as trained ones, which are not recomputed on halves: `apart`, `ceiling`
            and `shuffled` are NaN for these.
        halves: number of random splits; a split needs at least two groups with texts of both kinds.
        shuffles: number of shuffles of labels within pairs of texts, to measure agreement without any effect. Methods
            that compare pairs, such as "pca", do not depend on these labels: `shuffled` is NaN for them.
        seed: seed of splits, shuffles and methods.

    Returns:
        Columns `layer`, `first`, `second`, `cosine` (on all rows), `apart`, `ceiling`, `shuffled` (mean |cosine| on all
        rows with shuffled labels), `chance` (mean |cosine| of random directions, √(2 / (π width))).

    Raises:
        InvalidSpec: fewer than two of methods and others together, one name twice, others of another width or without a
            layer, `halves` or `shuffles` below 1, or groups that cannot be split.
        UnknownName, MissingExtra: a method does not exist, or needs a library that is not installed.
    """
    wanted = list(dict.fromkeys(methods))
    if len(wanted) < len(methods) or set(wanted) & set(others or ()) or len(wanted) + len(others or ()) < 2:
        raise InvalidSpec(f"methods={shown(methods)}, others={list(others or ())}; give two at least, each once")
    if any(index_of(one) is None or one < 1 for one in (halves, shuffles)):
        raise InvalidSpec(f"halves={shown(halves)}, shuffles={shown(shuffles)}; give numbers above 0")
    whole = _found(contrast, layers, wanted, seed) | _kept(others or {}, layers, contrast.positive.shape[2])
    pairs = [_halved(contrast, layers, wanted, seed, seed + draw) for draw in range(halves)]
    unpaired = [method for method in wanted if not METHODS[method].paired]
    nothing = [_found(_shuffled(contrast, seed + draw), layers, unpaired, seed) for draw in range(shuffles)]
    width, rows = contrast.positive.shape[2], []
    for layer, (first, second) in product(layers, combinations(whole, 2)):
        known = {first, second} <= set(wanted)
        apart, ceiling = _across(pairs, first, second, layer) if known else (math.nan, math.nan)
        by_label = {first, second} <= set(unpaired)
        without = [abs(_cosine(found[first], found[second], layer)) for found in nothing] if by_label else [math.nan]
        cosine = _cosine(whole[first], whole[second], layer)
        rows.append((layer, first, second, cosine, apart, ceiling, float(np.mean(without)), chance_cosine(width)))
    names = ("layer", "first", "second", "cosine", "apart", "ceiling", "shuffled", "chance")
    made: dict[str, Any] = {"width": width, "halves": halves, "shuffles": shuffles, "seed": seed}
    texts = {"positive": len(contrast.positive), "negative": len(contrast.negative)}
    return table_of(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), **made, **texts)


def _found(contrast: Contrast, layers: Sequence[int], methods: Sequence[str], seed: int) -> Found:
    return {
        method: directions_of(method, contrast, layers, method=method, held_out=0, seed=seed)[method]
        for method in methods
    }


def _kept(others: Mapping[str, LayerVectors], layers: Sequence[int], width: int) -> Found:
    for name, vectors in others.items():
        if not isinstance(vectors, LayerVectors) or vectors.width != width or set(layers) - set(vectors):
            raise InvalidSpec(
                f"others[{name!r}]={shown(vectors)}; give LayerVectors of width {width} for all of {layers}"
            )
    return dict(others)


def _halved(
    contrast: Contrast, layers: Sequence[int], methods: Sequence[str], seed: int, draw: int
) -> tuple[Found, Found]:
    """Return the vectors of each method on either half of the groups, which are split by the seed `draw`."""
    one, other = contrast.split(0.5, draw)
    assert other is not None
    return _found(one, layers, methods, seed), _found(other, layers, methods, seed)


def _across(pairs: Sequence[tuple[Found, Found]], first: str, second: str, layer: int) -> tuple[float, float]:
    """Return the mean cosine of two methods on different halves over all splits, and its ceiling, at least 0."""
    apart = [_cosine(one[first], other[second], layer) for one, other in (*pairs, *(pair[::-1] for pair in pairs))]
    own = [
        max(float(np.mean([_cosine(one[method], other[method], layer) for one, other in pairs])), 0.0)
        for method in (first, second)
    ]
    return float(np.mean(apart)), math.sqrt(own[0] * own[1])


def _shuffled(contrast: Contrast, seed: int) -> Contrast:
    """Return the pairs of texts of a contrast, with the two labels of each pair exchanged at random."""
    pairs = contrast.pairs()
    turned = torch.rand(len(pairs.positive), generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = turned[:, None, None]
    positive = torch.where(mask, pairs.negative, pairs.positive)
    negative = torch.where(mask, pairs.positive, pairs.negative)
    return Contrast(positive, negative, pairs.positive_groups, pairs.negative_groups)


def _cosine(one: LayerVectors, other: LayerVectors, layer: int) -> float:
    first, second = one[layer].double(), other[layer].double()
    return float(first @ second / (first.norm() * second.norm()))
