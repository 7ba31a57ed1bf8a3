"""Pictures of cosines, of methods by layer, of principal components, and of the comparison of two checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steercap.core.display import COLOURS, GREY, ink, place_names
from steercap.errors import InvalidSpec
from steercap.lab.mechanism.analysis.pictures import (
    COLUMN,
    DIVERGING,
    PAGE,
    Picture,
    bare,
    clipped,
    only,
    written,
)
from steercap.lab.mechanism.analysis.tables import about, rows_of
from steercap.lab.mechanism.patching.plots import Scale

if TYPE_CHECKING:
    import pyarrow as pa

#: Lines drawn from a table of `method_similarity`: column, name in the legend, and matplotlib's style.
LINES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("cosine", "same rows", {"color": COLOURS[0], "linewidth": 1.2}),
    ("apart", "different halves", {"color": COLOURS[1], "linewidth": 1.2}),
    ("ceiling", "ceiling of halves", {"color": COLOURS[1], "linewidth": 0.9, "linestyle": ":"}),
    ("shuffled", "same rows, labels shuffled", {"color": GREY, "linewidth": 1.0}),
)
#: Maximum number of names for which cosines are written into the cells.
MOST_WITH_VALUES = 12


def plot_cosines(table: pa.Table, path: str | Path, *, tree: pa.Table | None = None, layer: int | None = None) -> Path:
    """Draw a matrix of cosines, red positive, blue negative; with a tree, beside it and in its order. Return the path.

    Args:
        table: table from `cosines`.
        path: file to write; its suffix sets the format.
        tree: table from `merges` of the same vectors, drawn as a dendrogram; None for none.
        layer: layer to draw, if the table has several; that of the tree by default.

    Raises:
        InvalidSpec: the table is not from `cosines`, has several layers and none is named, or the tree is of other
            vectors or another layer.
    """
    rows = rows_of(table, "layer", "first", "second", "cosine", maker="cosines")
    known = None if tree is None else about(tree)
    at = only(rows, "layer", known["layer"] if known is not None and layer is None else layer)
    kept = {(row["first"], row["second"]): row["cosine"] for row in rows if row["layer"] == at}
    names = list(dict.fromkeys(first for first, _ in kept))
    if known is not None:
        if known["layer"] != at:
            raise InvalidSpec(f"the tree is of layer {known['layer']}, and layer={at} is drawn; give merges(..., {at})")
        if sorted(known["order"]) != sorted(names):
            raise InvalidSpec(f"the tree is of {known['order']}, and the cosines are of {names}")
        names = known["order"]
    values = np.array([[kept[one, other] for other in names] for one in names])
    side = min(max(0.24 * len(names), 1.6), PAGE - 2.2)
    beside = 0.0 if tree is None else 0.8
    with Picture(path, side + beside + 1.9, side + 1.1) as figure:
        ratios = [beside, side] if tree is not None else [side]
        *left, axes = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
        image = axes.imshow(values, cmap=DIVERGING, vmin=-1, vmax=1, interpolation="nearest", aspect="auto")
        _name(axes, names)
        if len(names) <= MOST_WITH_VALUES:
            _write(axes, values)
        if tree is not None:
            _draw_tree(left[0], rows_of(tree, "left", "right", "distance", maker="merges"), names)
            axes.yaxis.tick_right()
        bar = figure.colorbar(image, ax=axes, shrink=0.7, pad=0.03)
        bar.set_label(f"cosine, layer {at}")
        bar.outline.set_linewidth(0.4)
    return Path(path)


def _name(axes: Any, names: Sequence[str]) -> None:
    shown = [written(name) for name in names]
    size = 7 if len(names) <= 30 else 4.5
    axes.set_xticks(range(len(names)), shown, rotation=90, fontsize=size)
    axes.set_yticks(range(len(names)), shown, fontsize=size)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _write(axes: Any, values: Any) -> None:
    for (row, column), value in np.ndenumerate(values):
        shade = "white" if abs(value) > 0.6 else "black"
        axes.text(column, row, f"{value:.2f}".replace("0.", "."), ha="center", va="center", fontsize=5.5, color=shade)


def _draw_tree(axes: Any, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Draw rows of a table of `merges` as a dendrogram, leaves at the right in the order of the names."""
    places: dict[str, tuple[float, float]] = {name: (0.0, place) for place, name in enumerate(names)}
    for row in rows:
        (near, upper), (far, lower) = places[row["left"]], places[row["right"]]
        at = row["distance"]
        axes.plot([near, at, at, far], [upper, upper, lower, lower], color=ink(), linewidth=0.7, clip_on=False)
        places[f"#{row['step']}"] = (at, (upper + lower) / 2)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.invert_xaxis()
    axes.set_xlabel("1 − cosine")
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)


def plot_methods(table: pa.Table, path: str | Path) -> Path:
    """Draw cosines of every two methods by layer, with the ceiling and the chance level, and return the path.

    Args:
        table: table from `method_similarity`.
        path: file to write; its suffix sets the format.

    Raises:
        InvalidSpec: the table is not from `method_similarity`.
    """
    columns = ("layer", "first", "second", "cosine", "apart", "ceiling", "shuffled", "chance")
    rows = rows_of(table, *columns, maker="method_similarity")
    pairs = list(dict.fromkeys((row["first"], row["second"]) for row in rows))
    with Picture(path, min(PAGE, 2.1 * len(pairs) + 1.2), 2.1) as figure:
        panels = figure.subplots(1, len(pairs), squeeze=False, sharey=True)[0]
        for axes, pair in zip(panels, pairs, strict=True):
            own = sorted((row for row in rows if (row["first"], row["second"]) == pair), key=lambda row: row["layer"])
            for column, said, style in LINES:
                axes.plot([row["layer"] for row in own], [row[column] for row in own], label=said, **style)
            axes.axhline(rows[0]["chance"], color=GREY, linewidth=0.6, linestyle="--", label="random directions")
            axes.set(title=" and ".join(map(written, pair)), xlabel="layer")
            axes.xaxis.get_major_locator().set_params(integer=True)
            bare(axes)
        drawn = np.array([0.0, *(row[column] for row in rows for column, *_ in LINES)], dtype=float)
        panels[0].set(ylabel="cosine", ylim=(np.nanmin(drawn) - 0.03, 1.03))
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    return Path(path)


#: Matplotlib line style of the mean susceptibility, by those groups of the table that are not the user's vectors.
DASHES: Final = {"components": ":", "random": "--"}
#: Maximum number of components that `plot_scree` draws.
COMPONENTS = 20


def plot_scree(table: pa.Table, path: str | Path) -> Path:
    """Draw each component's explained variance over the band of random vectors of the same norms; return the path.

    Args:
        table: table from `scree`.
        path: file to write; its suffix sets the format.

    Raises:
        InvalidSpec: the table is not from `scree`.
    """
    columns = ("component", "explained", "random_mean", "random_low", "random_high")
    found = rows_of(table, *columns, maker="scree")
    rows = found[:COMPONENTS]
    number, explained, mean, low, high = (np.array([row[column] for row in rows]) for column in columns)
    with Picture(path, COLUMN, 2.2) as figure:
        axes: Any = figure.subplots()
        axes.fill_between(number, 100 * low, 100 * high, color=GREY, alpha=0.35, linewidth=0)
        axes.plot(number, 100 * mean, color=GREY, linewidth=1, label="random vectors of these norms, 95 %")
        style = {"marker": "o", "markersize": 3.5, "linewidth": 1.1}
        axes.plot(number, 100 * explained, color=COLOURS[0], label="these vectors", **style)
        some = f" (the first {len(rows)} of {len(found)})" if len(rows) < len(found) else ""
        axes.set(xlabel=f"principal component{some}", ylabel="variance explained, %", ylim=(0, None))
        axes.xaxis.get_major_locator().set_params(integer=True)
        bare(axes)
        axes.legend(loc="upper right")
    return Path(path)


def plot_scores(table: pa.Table, path: str | Path) -> Path:
    """Draw each vector's scores on the first two components, with names, and return the path.

    Args:
        table: table from `scores`, with two components at least.
        path: file to write; its suffix sets the format.

    Raises:
        InvalidSpec: the table is not from `scores`, or has one component.
    """
    rows = rows_of(table, "component", "name", "score", "explained", maker="scores")
    by = {(row["component"], row["name"]): row["score"] for row in rows}
    shares = {row["component"]: row["explained"] for row in rows}
    names, first = list(dict.fromkeys(row["name"] for row in rows)), min(shares)
    if first + 1 not in shares:
        raise InvalidSpec("this picture takes scores on two components at least: scores(..., count=2)")
    points = np.array([[by[first, name], by[first + 1, name]] for name in names])
    scales = [Scale.of(points[:, axis]) for axis in (0, 1)]
    inside = np.stack([clipped(points[:, axis], scales[axis]) for axis in (0, 1)], axis=1)
    beyond = (inside != points).any(1)
    with Picture(path, COLUMN + 0.7, COLUMN) as figure:
        axes: Any = figure.subplots()
        for line in (axes.axhline, axes.axvline):
            line(0, color=GREY, linewidth=0.5, zorder=0)
        for far, marker in ((False, "o"), (True, "D")):  # outliers are at the edge, with their numbers
            axes.scatter(*inside[beyond == far].T, s=11, color=COLOURS[0], zorder=2, marker=marker)
        axes.margins(0.14)
        axes.set(xlabel=_share(first, shares), ylabel=_share(first + 1, shares))
        bare(axes)
        said = [
            f"{written(name)} ({x:.3g}, {y:.3g})" if far else written(name)
            for name, (x, y), far in zip(names, points, beyond, strict=True)
        ]
        place_names(axes, said, inside)
    return Path(path)


def _share(component: int, shares: dict[int, float]) -> str:
    return f"component {component} ({100 * shares[component]:.0f} %)"


def draw_comparison(tables: Mapping[str, pa.Table], folder: str | Path) -> list[Path]:
    """Draw the pictures of a comparison of two checkpoints into a folder, from its tables.

    "susceptibility.png" has the mean distance by layer for each matrix: a solid line for the vectors, a dotted one for
    the components, a dashed one for random vectors; "altered.png" each vector's angular change by its absolute change
    at the focus layers, and histograms; "components.png" the mean |delta| of each component, and its variance.

    Args:
        tables: tables of `comparison.compare` by name, or the same read from its folder; missing ones are not drawn.
        folder: folder of the pictures.

    Returns:
        Paths of the files, sorted.
    """
    how = {"susceptibility": _draw_susceptibility, "feed_forward": _draw_altered, "components": _draw_components}
    paths = []
    for name in how.keys() & tables.keys():
        path = Path(folder) / f"{'altered' if name == 'feed_forward' else name}.png"
        how[name](tables[name], path)
        paths.append(path)
    return sorted(paths)


def _draw_susceptibility(table: pa.Table, path: Path) -> None:
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in table.to_pylist():
        of = row["group"] if row["group"] in DASHES else "vectors"
        found.setdefault((row["matrix"], of), {}).setdefault(row["layer"], []).append(row["distance"])
    colours = dict(zip(dict.fromkeys(matrix for matrix, _ in found), COLOURS, strict=False))
    with Picture(path, COLUMN, 2.4) as figure:
        axes = figure.subplots()
        for (matrix, of), values in found.items():
            layers = sorted(values)
            means = [np.mean(values[layer]) for layer in layers]
            style: dict[str, Any] = {"color": colours[matrix], "linestyle": DASHES.get(of, "-"), "marker": "."}
            axes.plot(layers, means, **style)
        for matrix, colour in colours.items():
            axes.plot([], [], color=colour, label=matrix)
        for of in dict.fromkeys(of for _, of in found):
            axes.plot([], [], color=GREY, linestyle=DASHES.get(of, "-"), label=of)
        axes.set(xlabel="layer", ylabel="mean of 1 − cosine")
        figure.legend(loc="outside right center")
        bare(axes)


def _draw_altered(table: pa.Table, path: Path) -> None:
    """Draw a row for each focus layer: a scatter plot of both changes, and a histogram of the one it is focus of."""
    rows = table.to_pylist()
    groups = list(dict.fromkeys(row["group"] for row in rows))
    focus: dict[str, int] = about(table)["focus"]
    with Picture(path, PAGE, 2.4 * len(focus)) as figure:
        panels = figure.subplots(len(focus), 2)
        for (measure, layer), (scatter, histogram) in zip(focus.items(), panels, strict=True):
            bins = np.histogram_bin_edges([row[measure] for row in rows if row["layer"] == layer], 20)
            for place, group in enumerate(groups):
                own = [row for row in rows if (row["group"], row["layer"]) == (group, layer)]
                colour = COLOURS[place % len(COLOURS)]
                across, up = ([row[one] for row in own] for one in focus)
                scatter.scatter(across, up, s=6, color=colour, label=group)
                histogram.hist([row[measure] for row in own], bins=bins, color=colour, alpha=0.5, density=True)
            scatter.set(xlabel="absolute", ylabel="angular", title=f"layer {layer}, focus of {measure}")
            histogram.set(xlabel=measure, ylabel="density")
            for axes in (scatter, histogram):
                bare(axes)
        panels[0][0].legend()


def _draw_components(table: pa.Table, path: Path) -> None:
    rows = table.to_pylist()
    with Picture(path, COLUMN, 2.4) as figure:
        axes = figure.subplots()
        for place, circuit in enumerate(("qk", "vo")):
            at = [number + 0.2 * (2 * place - 1) for number in range(len(rows))]
            axes.bar(at, [row[circuit] for row in rows], 0.4, color=COLOURS[place], label=circuit)
        axes.set_xticks(range(len(rows)), [_labelled(row) for row in rows])
        axes.set(ylabel="mean |Δz| over layers")
        axes.legend()
        bare(axes)


def _labelled(row: Mapping[str, Any]) -> str:
    """Return a component's name, with the share of variance that it explains if that is known."""
    return row["component"] if row["explained"] is None else f"{row['component']}\n{row['explained']:.0%}"
