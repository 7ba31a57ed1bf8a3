"""Pictures of sweeps: the effect of a vector by layer beside random vectors, and by layer and token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steercap.core.tokenizing import FONT
from steercap.errors import InvalidSpec
from steercap.lab.mechanism.analysis.pictures import (
    CHANCE,
    COLOURS,
    COLUMN,
    DIVERGING,
    PAGE,
    Picture,
    bare,
    limit,
    only,
    token,
    written,
)
from steercap.lab.mechanism.analysis.tables import rows_of

if TYPE_CHECKING:
    import pyarrow as pa


def plot_layer_sweep(table: pa.Table, path: str | Path, *, metric: str = "change of the metric") -> Path:
    """Draw the mean effect over prompts by layer, with one standard error; in grey the range of random vectors.

    Args:
        table: table from `layer_sweep`.
        path: file to write; its suffix sets the format.
        metric: label of the vertical axis.

    Raises:
        InvalidSpec: another table.
    """
    rows = rows_of(table, "name", "control", "layer", "prompt", "difference", maker="layer_sweep")
    names = list(dict.fromkeys(row["name"] for row in rows))
    with Picture(path, min(PAGE, COLUMN * len(names)), 2.5) as figure:
        panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for axes, name in zip(panels, names, strict=True):
            own = [row for row in rows if row["name"] == name]
            _draw_random(axes, [row for row in own if row["control"]])
            layers, mean, error = _by_layer([row for row in own if not row["control"]])
            axes.fill_between(layers, mean - error, mean + error, color=COLOURS[0], alpha=0.25, linewidth=0)
            axes.plot(layers, mean, color=COLOURS[0], marker="o", markersize=3, linewidth=1.1, label="vector")
            axes.axhline(0, color=CHANCE, linewidth=0.5, zorder=0)
            axes.set(title=written(name), xlabel="layer")
            axes.xaxis.get_major_locator().set_params(integer=True)
            bare(axes)
        panels[0].set_ylabel(metric)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return Path(path)


def _draw_random(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the range of the means of random vectors."""
    each = [_by_layer([row for row in rows if row["control"] == one]) for one in sorted({r["control"] for r in rows})]
    if each:
        means = np.array([mean for _, mean, _ in each])
        said = f"range of {len(each)} random vectors"
        axes.fill_between(each[0][0], means.min(0), means.max(0), color=CHANCE, alpha=0.35, linewidth=0, label=said)


def _by_layer(rows: Sequence[dict[str, Any]]) -> tuple[list[int], Any, Any]:
    """Return layers, and the mean and standard error over prompts at each."""
    layers = sorted({row["layer"] for row in rows})
    values = [np.array([row["difference"] for row in rows if row["layer"] == layer]) for layer in layers]
    error = [one.std(ddof=1) / np.sqrt(len(one)) if len(one) > 1 else 0.0 for one in values]
    return layers, np.array([one.mean() for one in values]), np.array(error)


def plot_position_sweep(
    table: pa.Table, path: str | Path, *, prompt: int = 0, name: str | None = None, metric: str = "change of the metric"
) -> Path:
    """Draw layers × tokens of one prompt: red where adding the vector raises the metric, blue where it lowers it.

    Args:
        table: table from `position_sweep`.
        path: file to write; its suffix sets the format.
        prompt: index of the prompt.
        name: name of the vector, if there are several.
        metric: label of the colour scale.

    Raises:
        InvalidSpec: another table, or no such prompt or vector.
    """
    rows = rows_of(table, "name", "control", "layer", "prompt", "position", "difference", maker="position_sweep")
    if any(row["position"] is None for row in rows):
        raise InvalidSpec("this picture takes a table of position_sweep, and the one given is of all tokens at once")
    chosen = only(rows, "name", name), only(rows, "prompt", prompt if len({r["prompt"] for r in rows}) > 1 else None)
    own = [row for row in rows if (row["name"], row["prompt"]) == chosen and not row["control"]]
    layers, tokens = sorted({row["layer"] for row in own}), {row["position"]: row["token"] for row in own}
    positions = sorted(tokens)
    values = np.full((len(layers), len(positions)), np.nan)
    for row in own:
        values[layers.index(row["layer"]), positions.index(row["position"])] = row["difference"]
    most = limit(values)
    with Picture(path, min(0.27 * len(positions) + 1.5, PAGE), max(0.16 * len(layers), 1.1) + 0.95) as figure:
        axes: Any = figure.subplots()
        style = {"vmin": -most, "vmax": most, "aspect": "auto", "interpolation": "nearest", "origin": "lower"}
        image = axes.imshow(values, cmap=DIVERGING, **style)
        labels = [token(tokens[position], 10) for position in positions]
        axes.set_xticks(range(len(positions)), labels, rotation=90, family=FONT, fontsize=6.5)
        step = max(len(layers) // 12, 1)
        axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
        axes.set(ylabel="layer", title=written(chosen[0]))
        bar = figure.colorbar(image, ax=axes, pad=0.02)
        bar.set_label(metric)
        bar.outline.set_linewidth(0.4)
    return Path(path)
