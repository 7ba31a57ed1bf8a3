"""Principal components of many vectors: variance explained, and scores of each vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.values import count_of, truth_of
from steercap.errors import InvalidSpec
from steercap.lab.mechanism.analysis.given import LabelledRows, Vectors, matrix, named, origin, random_units
from steercap.lab.mechanism.analysis.tables import table_of
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[np.float64]
#: Share of the vectors' norm below which a component is only float32 rounding error.
ROUNDING: Final = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, eq=False)
class _Found:
    """Principal components of some vectors, float64.

    Args:
        variances: variance along each component, [components]: sums of squares over the number of vectors.
        axes: unit components, [components, hidden].
        scores: scores of each vector, [names, components].
    """

    variances: Array
    axes: Array
    scores: Array


def scree(
    vectors: Vectors,
    layer: int,
    *,
    centred: bool = True,
    unit: bool = False,
    random: int = 100,
    seed: int = 0,
) -> pa.Table:
    """Compute the variance explained by each principal component, and by those of random vectors of equal norms.

    Args:
        vectors: vectors as for `cosines`, two at least.
        layer: layer of the vectors.
        centred: subtract the vectors' mean first; otherwise the first component is close to the mean.
        unit: scale all vectors to length 1 first, so that long ones do not count for more.
        random: number of sets of random vectors to compare with, of the same norms as the vectors.
        seed: seed of the draw.

    Returns:
        Columns `component` (from 1), `variance` (in squared units of the stream), `explained` (share of the sum),
        `random_mean`, `random_low`, `random_high` (mean, and 2.5 % and 97.5 % quantiles over the sets, of the share of
        random vectors' component of the same number).

    Raises:
        InvalidSpec: fewer than two vectors.
        The errors of `cosines`.
    """
    directions = named(vectors)
    given = _rows(directions, layer, unit=unit)
    found = _components(given, centred=centred)
    shares = _random_shares(given, random, seed, centred=centred)[:, : len(found.variances)]
    low, high = np.percentile(shares, [2.5, 97.5], axis=0)
    columns = {
        "component": np.arange(1, len(found.variances) + 1),
        "variance": found.variances,
        "explained": found.variances / found.variances.sum(),
        "random_mean": np.mean(shares, axis=0),
        "random_low": low,
        "random_high": high,
    }
    made = {"layer": layer, "centred": centred, "unit": unit, "random": random, "seed": seed, "vectors": len(given)}
    return table_of(columns, **origin(directions, **made))


def scores(vectors: Vectors, layer: int, *, count: int = 2, centred: bool = True, unit: bool = False) -> pa.Table:
    """Compute each vector's scores on the first principal components; the names at the ends help interpret a component.

    The sign of a component is arbitrary: it is chosen so that the vector furthest from the middle is positive.

    Args:
        vectors, layer, centred, unit: as for `scree`.
        count: number of components.

    Returns:
        Columns `component` (from 1), `place` (0 is the lowest score), `name`, `score` (in units of the residual
        stream), and `explained`, the component's share of the variance; by component, from the lowest score.

    Raises:
        InvalidSpec: `count` exceeds the number of components.
        The errors of `scree`.
    """
    directions = named(vectors)
    found = _components(_rows(directions, layer, unit=unit), centred=centred)
    number, names = count_of(count, "count", 1, len(found.variances)), list(directions)
    order = [np.argsort(found.scores[:, one], kind="stable") for one in range(number)]
    explained = found.variances / found.variances.sum()
    columns: dict[str, Any] = {
        "component": np.repeat(np.arange(1, number + 1), len(names)),
        "place": np.tile(np.arange(len(names)), number),
        "name": [names[place] for places in order for place in places],
        "score": np.concatenate([found.scores[places, one] for one, places in enumerate(order)]),
        "explained": np.repeat(explained[:number], len(names)),
    }
    return table_of(columns, **origin(directions, layer=layer, centred=centred, unit=unit))


def ends(vectors: Vectors, layer: int, *, count: int = 2, top: int = 3, **how: bool) -> pa.Table:
    """Return the vectors with the lowest and the highest scores on each component: `scores`, without the middle.

    Args:
        vectors, layer, count: arguments as for `scores`.
        top: number of names at each end.
        **how: `centred` and `unit`, as for `scores`.

    Returns:
        Columns `component`, `end` ("low" or "high"), `name`, `score` and `explained`, from the outermost inwards.

    Raises:
        InvalidSpec: `top` is not above 0.
        The errors of `scores`.
    """
    wanted = count_of(top, "top")
    table = scores(vectors, layer, count=count, **how)
    rows = table.to_pylist()
    size = len(named(vectors))
    kept = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        kept += [{**row, "end": "low"} for row in part[: min(wanted, size // 2)]]
        kept += [{**row, "end": "high"} for row in part[::-1][: min(wanted, (size + 1) // 2)]]
    columns = {name: [row[name] for row in kept] for name in ("component", "end", "name", "score", "explained")}
    made = origin(named(vectors), layer=layer, top=wanted, **how)
    return table_of(columns, **made)


def principal(vectors: Vectors, *, count: int = 1, centred: bool = True, unit: bool = False) -> DirectionSet:
    """Return the first principal components at every layer: unit vectors named "PC1", "PC2", ...

    Signs are as for `scores`, layer by layer, so a component may change sign from one layer to the next.

    Args:
        vectors, centred, unit: as for `scree`.
        count: number of components.

    Raises:
        InvalidSpec: `count` exceeds the number of components.
        The errors of `scree`.
    """
    directions = named(vectors)
    each = {layer: _components(_rows(directions, layer, unit=unit), centred=centred) for layer in directions.layers}
    number = min(count_of(count, "count", 1, len(found.variances)) for found in each.values())
    return DirectionSet(
        {
            f"PC{one + 1}": LayerVectors(
                {layer: torch.from_numpy(found.axes[one]) for layer, found in each.items()},
                model=directions.model,
                site=directions.site,
            )
            for one in range(number)
        }
    )


def principal_rows(given: LabelledRows, group: str, count: int) -> LabelledRows:
    """Return the first principal components of the rows `given`, at most `count`, as unit rows "PC1", ... of a group.

    Raises:
        InvalidSpec: there are fewer than two rows, or all are the same.
    """
    if len(given) < 2:
        raise InvalidSpec(f"{list(given.names)}: principal components are of two vectors at least; give components=")
    vectors = DirectionSet({f"{at}": LayerVectors({0: row}) for at, row in enumerate(given.rows)})
    axes = _components(_rows(vectors, 0, unit=False), centred=True).axes[:count]
    names = tuple(f"PC{one + 1}" for one in range(len(axes)))
    return LabelledRows((group,) * len(axes), names, torch.from_numpy(axes).float())


def explained_by(given: LabelledRows, axes: LabelledRows) -> dict[str, float | None]:
    """Return the share of the variance of the rows `given` along each of `axes`, by name; None if they do not vary."""
    middle = given.rows.double() - given.rows.double().mean(0)
    if not middle.norm() > given.rows.double().norm() * ROUNDING:
        return dict.fromkeys(axes.names)
    shares = (middle @ axes.units.T).square().sum(0) / middle.square().sum()
    return dict(zip(axes.names, shares.tolist(), strict=True))


def _rows(directions: DirectionSet, layer: int, *, unit: bool) -> Array:
    if len(directions) < 2:
        raise InvalidSpec(f"{list(directions)}: components are of two vectors at least")
    truth_of(unit, "unit")
    found: Array = matrix(directions, layer).double().numpy()
    return found / np.linalg.norm(found, axis=1, keepdims=True) if unit else found


def _components(rows: Array, *, centred: bool) -> _Found:
    """Compute components with variance above rounding error; the outermost vector is on the positive side of each."""
    middle = rows - rows.mean(axis=0) if truth_of(centred, "centred") else rows
    left, sizes, axes = np.linalg.svd(middle, full_matrices=False)
    kept = sizes > np.linalg.norm(rows) * ROUNDING
    found = (left * sizes)[:, kept]
    if not found.size:
        raise InvalidSpec("all vectors are the same, so there is no variance to explain")
    signs = np.sign(found[np.abs(found).argmax(axis=0), np.arange(found.shape[1])])
    return _Found(sizes[kept] ** 2 / len(rows), axes[kept] * signs[:, None], found * signs)


def _random_shares(rows: Array, random: int, seed: int, *, centred: bool) -> Array:
    """Compute the variance shares of components of random vector sets with the rows' norms: [random, names]."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    drawn = random_units(random * len(rows), rows.shape[1], seed).double().numpy().reshape(random, *rows.shape) * norms
    middle = drawn - drawn.mean(axis=1, keepdims=True) if centred else drawn
    variances = np.linalg.eigvalsh(middle @ middle.swapaxes(1, 2))[:, ::-1].clip(min=0)
    shares: Array = variances / variances.sum(axis=1, keepdims=True)
    return shares
