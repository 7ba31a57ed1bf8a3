"""Pictures of principal components: variance explained, and the vectors on the first two components."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steercap.errors import InvalidSpec
from steercap.lab.mechanism.analysis.pictures.base import CHANCE, COLOURS, COLUMN, Picture, bare, place_names, written
from steercap.lab.mechanism.analysis.tables import rows_of

if TYPE_CHECKING:
    import pyarrow as pa

#: Most components that a scree shows.
COMPONENTS = 20


def plot_scree(table: pa.Table, path: str | Path) -> Path:
    """Draw the variance explained by each component, over the band of random vectors of the same norms.

    Args:
        table: table from `scree`.
        path: file to write; its suffix sets the format.

    Raises:
        InvalidSpec: another table.
    """
    columns = ("component", "explained", "random_mean", "random_low", "random_high")
    rows = rows_of(table, *columns, maker="scree")[:COMPONENTS]
    number, explained, mean, low, high = (np.array([row[column] for row in rows]) for column in columns)
    with Picture(path, COLUMN, 2.2) as figure:
        axes: Any = figure.subplots()
        axes.fill_between(number, 100 * low, 100 * high, color=CHANCE, alpha=0.35, linewidth=0)
        axes.plot(number, 100 * mean, color=CHANCE, linewidth=1, label="random vectors of these norms, 95 %")
        style = {"marker": "o", "markersize": 3.5, "linewidth": 1.1}
        axes.plot(number, 100 * explained, color=COLOURS[0], label="these vectors", **style)
        axes.set(xlabel="principal component", ylabel="variance explained, %", ylim=(0, None))
        axes.xaxis.get_major_locator().set_params(integer=True)
        bare(axes)
        axes.legend(loc="upper right")
    return Path(path)


def plot_scores(table: pa.Table, path: str | Path) -> Path:
    """Draw each vector by name on the first two components.

    Args:
        table: table from `scores`, with two components at least.
        path: file to write; its suffix sets the format.

    Raises:
        InvalidSpec: another table.
    """
    rows = rows_of(table, "component", "name", "score", "explained", maker="scores")
    by = {(row["component"], row["name"]): row["score"] for row in rows}
    shares = {row["component"]: row["explained"] for row in rows}
    names, first = list(dict.fromkeys(row["name"] for row in rows)), min(shares)
    if first + 1 not in shares:
        raise InvalidSpec("this picture takes scores on two components at least: scores(..., count=2)")
    points = np.array([[by[first, name], by[first + 1, name]] for name in names])
    with Picture(path, COLUMN + 0.7, COLUMN) as figure:
        axes: Any = figure.subplots()
        for line in (axes.axhline, axes.axvline):
            line(0, color=CHANCE, linewidth=0.5, zorder=0)
        axes.scatter(*points.T, s=11, color=COLOURS[0], zorder=2)
        axes.margins(0.14)
        axes.set(xlabel=_share(first, shares), ylabel=_share(first + 1, shares))
        bare(axes)
        place_names(axes, [written(name) for name in names], points)
    return Path(path)


def _share(component: int, shares: dict[int, float]) -> str:
    return f"component {component} ({100 * shares[component]:.0f} %)"
