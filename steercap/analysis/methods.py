"""How alike the directions are that several methods find in the same rows, with the most and the least that may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from steercap.analysis.geometry import chance_cosine
from steercap.analysis.tables import table_of
from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec
from steercap.vectors.contrast import Contrast, directions_of
from steercap.vectors.layers import LayerVectors

if TYPE_CHECKING:
    import pyarrow as pa

#: By method, its vectors.
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
    """Cosines of the directions of several methods, layer by layer, with what the data allow.

    No two methods can be expected to agree better than each agrees with itself on other data. So the groups of the rows
    are split into halves at random, `halves` times, each method is used on both, and `ceiling` is the geometric mean of
    what the two methods' agreements come to for all of the data: 2c / (1 + c), c the mean cosine between halves.

    Sources: Spearman (1910) and Brown (1910) for the step from halves to the whole; Spearman (1904) for the ceiling.

    Args:
        contrast: rows of texts that show something, and of texts that do not.
        layers: what the second axis of the rows is.
        methods: names in `steercap.vectors.METHODS`.
        others: further vectors by name, such as trained ones, which are not found anew: `ceiling` is NaN for them.
        halves: splits; each needs groups that both kinds have, two at least.
        shuffles: how often labels are shuffled within pairs of texts, for what methods agree in where there is nothing.
        seed: of splits, shuffles and methods.

    Returns:
        Columns `layer`, `first`, `second`, `cosine`, `ceiling`, `shuffled` (mean |cosine| with shuffled labels; NaN for
        `others`), `chance` (mean |cosine| of random directions, √(2 / (π width))).

    Raises:
        InvalidSpec: no method, one name twice, others of another width or without a layer, fewer than 1 split, or
            groups that do not allow any.
        UnknownName, MissingExtra: a method that does not exist, or needs a library.
    """
    wanted = list(dict.fromkeys(methods))
    if len(wanted) < len(methods) or set(wanted) & set(others or ()) or len(wanted) + len(others or ()) < 2:
        raise InvalidSpec(f"methods={shown(methods)}, others={list(others or ())}; give two at least, each once")
    if any(index_of(one) is None or one < 1 for one in (halves, shuffles)):
        raise InvalidSpec(f"halves={shown(halves)}, shuffles={shown(shuffles)}; give numbers above 0")
    whole = _found(contrast, layers, wanted, seed) | _kept(others or {}, layers, contrast.positive.shape[2])
    agreement = _agreement(contrast, layers, wanted, halves, seed)
    nothing = [_found(_shuffled(contrast, seed + draw), layers, wanted, seed) for draw in range(shuffles)]
    width = contrast.positive.shape[2]
    rows = []
    for layer in layers:
        for first, second in combinations(whole, 2):
            known = first in agreement and second in agreement
            ceiling = math.sqrt(agreement[first][layer] * agreement[second][layer]) if known else math.nan
            without = [abs(_cosine(found[first], found[second], layer)) for found in nothing] if known else [math.nan]
            cosine = _cosine(whole[first], whole[second], layer)
            rows.append((layer, first, second, cosine, ceiling, float(np.mean(without)), chance_cosine(width)))
    names = ("layer", "first", "second", "cosine", "ceiling", "shuffled", "chance")
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


def _agreement(
    contrast: Contrast, layers: Sequence[int], methods: Sequence[str], halves: int, seed: int
) -> dict[str, dict[int, float]]:
    """How well each method would agree with itself on as many other rows, by method and layer: 0 at least."""
    found: dict[str, dict[int, list[float]]] = {method: {layer: [] for layer in layers} for method in methods}
    for draw in range(halves):
        one, other = contrast.split(0.5, seed + draw)
        assert other is not None
        pair = [_found(half, layers, methods, seed) for half in (one, other)]
        for method in methods:
            for layer in layers:
                found[method][layer].append(_cosine(pair[0][method], pair[1][method], layer))
    mean = {
        method: {layer: max(float(np.mean(each)), 0.0) for layer, each in by.items()} for method, by in found.items()
    }
    return {method: {layer: 2 * c / (1 + c) for layer, c in by.items()} for method, by in mean.items()}


def _shuffled(contrast: Contrast, seed: int) -> Contrast:
    """Pairs of texts, each in the right or the wrong order, at random."""
    pairs = contrast.pairs()
    turned = torch.rand(len(pairs.positive), generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = turned[:, None, None]
    positive = torch.where(mask, pairs.negative, pairs.positive)
    negative = torch.where(mask, pairs.positive, pairs.negative)
    return Contrast(positive, negative, pairs.positive_groups, pairs.negative_groups)


def _cosine(one: LayerVectors, other: LayerVectors, layer: int) -> float:
    first, second = one[layer].double(), other[layer].double()
    return float(first @ second / (first.norm() * second.norm()))
