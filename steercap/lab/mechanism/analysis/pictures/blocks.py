"""Pictures of heads as maps of layers × heads, of neurons as points by layer, and of tokens as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steercap.core.display import COLOURS, GREY, ink, place_names
from steercap.core.extras import extra
from steercap.core.prompts import FONT
from steercap.core.values import shown
from steercap.errors import InvalidSpec
from steercap.lab.mechanism.analysis.pictures import (
    DIVERGING,
    PAGE,
    Picture,
    bare,
    clipped,
    only,
    token,
    written,
)
from steercap.lab.mechanism.analysis.tables import about, rows_of
from steercap.lab.mechanism.patching.plots import Scale

if TYPE_CHECKING:
    import pyarrow as pa

#: Size of a cell in inches; number of heads framed and named in a map.
CELL, NAMED = 0.12, 3
#: Columns that may have the vectors' names, depending on the table.
NAMES = ("name", "query")
#: Columns drawn by default: the first of these that a table has.
VALUES = ("copied_z", "z")
SAID = {"copied_z": "copied, z", "strength_z": "strength, z", "z": "z"}


def plot_heads(
    table: pa.Table, path: str | Path, *, value: str | None = None, part: str | None = None, key: str | None = None
) -> Path:
    """Draw values by layer and head, a panel for each vector: red above 0, blue below; the outermost heads are named.

    Args:
        table: table from `ov_circuit`, `qk_circuit` or `head_reads`.
        path: file to write; its suffix sets the format.
        value: column to draw; "copied_z" or "z" by default.
        part: for `head_reads`, "q", "k" or "v".
        key: for `qk_circuit`, the name of the key's vector; by default that of each query.

    Raises:
        InvalidSpec: the table is of another kind, lacks the column, or is from `head_reads` and no part is given.
    """
    maker = "ov_circuit, qk_circuit or head_reads"
    rows = rows_of(table, "layer", "head", maker=maker)
    column = value or next((one for one in VALUES if one in rows[0]), "")
    label = next((one for one in NAMES if one in rows[0]), "")
    if not label or not isinstance(rows[0].get(column), float):
        raise InvalidSpec(f"value={shown(value)}; this picture takes a table of {maker}, and a column of numbers")
    if "part" in rows[0]:
        chosen = only(rows, "part", part)
        rows = [row for row in rows if row["part"] == chosen]
    if label == "query":
        rows = [row for row in rows if row["key"] == (key or row["query"])]
    names = list(dict.fromkeys(row[label] for row in rows))
    if not names:
        raise InvalidSpec(f"key={shown(key)}; the table has no such vector")
    layers, heads = sorted({row["layer"] for row in rows}), 1 + max(row["head"] for row in rows)
    maps = {name: _map([row for row in rows if row[label] == name], layers, heads, column) for name in names}
    _draw_maps(maps, layers, Path(path), SAID.get(column, column))
    return Path(path)


def _map(rows: Sequence[dict[str, Any]], layers: Sequence[int], heads: int, column: str) -> Any:
    found = np.full((len(layers), heads), np.nan)
    for row in rows:
        found[layers.index(row["layer"]), row["head"]] = row[column]
    return found


def _draw_maps(maps: dict[str, Any], layers: Sequence[int], path: Path, said: str) -> None:
    scale, (down, across) = Scale.of(*maps.values()), next(iter(maps.values())).shape
    width = max(CELL * across, 1.25)
    with Picture(path, min((width + 0.35) * len(maps) + 0.9, PAGE), max(CELL * down, 1.4) + 0.9) as figure:
        panels = figure.subplots(1, len(maps), squeeze=False, sharey=True)[0]
        for axes, (name, values) in zip(panels, maps.items(), strict=True):
            image = axes.imshow(values, cmap=DIVERGING, **scale.style)
            axes.set(title=written(name), xlabel=f"head\nframed: {_mark(axes, values, layers)}")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.tick_params(length=2)
        step = max(len(layers) // 10, 1)
        panels[0].set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
        panels[0].set_ylabel("layer")
        bar = figure.colorbar(image, ax=list(panels), shrink=0.8, pad=0.02, extend=scale.extend)
        bar.set_label(scale.label(said))
        bar.outline.set_linewidth(0.4)


def _mark(axes: Any, values: Any, layers: Sequence[int]) -> str:
    """Frame the heads with the greatest absolute values; return their names, "layer.head", the greatest first."""
    with extra("analysis"):
        from matplotlib.patches import Rectangle

    outermost = np.argsort(-np.nan_to_num(np.abs(values)).ravel())[:NAMED]
    places = [np.unravel_index(place, values.shape) for place in outermost]
    for row, head in places:
        frame: dict[str, Any] = {"fill": False, "edgecolor": "black", "linewidth": 0.9, "clip_on": False, "zorder": 3}
        axes.add_patch(Rectangle((head - 0.5, row - 0.5), 1, 1, **frame))
    return ", ".join(f"{layers[row]}.{head}" for row, head in places)


def plot_neurons(table: pa.Table, path: str | Path, *, named: int = 4) -> Path:
    """Draw the z of the neurons that read or write each vector most, by layer; dashed lines are chance.

    Args:
        table: table from `neuron_reads` or `neuron_writes`.
        path: file to write; its suffix sets the format.
        named: number of outermost neurons of each vector to name, as layer.neuron.

    Raises:
        InvalidSpec: the table is of another kind.
    """
    rows = rows_of(table, "name", "layer", "neuron", "z", maker="neuron_reads or neuron_writes")
    names, chance = list(dict.fromkeys(row["name"] for row in rows)), about(table)["once"]
    parts = list(dict.fromkeys(row.get("part", "down") for row in rows))
    scale = Scale.of([row["z"] for row in rows])
    most = 1.2 * max(scale.limit, chance)
    with Picture(path, min(PAGE, 2.1 * len(names) + 0.9), 2.2) as figure:
        panels = figure.subplots(1, len(names), squeeze=False, sharey=True, sharex=True)[0]
        for axes, name in zip(panels, names, strict=True):
            own = [row for row in rows if row["name"] == name]
            for number, part in enumerate(parts):
                some = [row for row in own if row.get("part", "down") == part]
                style = {"s": 8, "color": COLOURS[number], "linewidth": 0, "alpha": 0.85, "label": part}
                axes.scatter([row["layer"] for row in some], clipped([row["z"] for row in some], scale), **style)
            for sign in (-1, 1):
                axes.axhline(sign * chance, color=GREY, linewidth=0.7, linestyle="--", zorder=0)
            axes.set(title=written(name), xlabel="layer", ylim=(-most, most))
            axes.margins(x=0.08)
            axes.xaxis.get_major_locator().set_params(integer=True)
            bare(axes)
        panels[0].set_ylabel(scale.label("z"))
        if len(parts) > 1:
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", handletextpad=0.1)
        for axes, name in zip(panels, names, strict=True):
            _name(axes, [row for row in rows if row["name"] == name], named, scale)
    return Path(path)


def _name(axes: Any, rows: Sequence[dict[str, Any]], count: int, scale: Scale) -> None:
    """Name the `count` outermost neurons, "layer.neuron", each once; beyond the scale they are at its edge, with z."""
    points: dict[str, tuple[int, float]] = {}
    for row in sorted(rows, key=lambda row: -abs(row["z"])):
        at = float(clipped(row["z"], scale))
        far = "" if at == row["z"] else f" ({row['z']:.3g})"
        points.setdefault(f"{row['layer']}.{row['neuron']}{far}", (row["layer"], at))
    place_names(axes, list(points)[:count], list(points.values())[:count], size=5.5)


#: Maximum panels in a row, and default number of tokens for either end.
ACROSS, TOKENS = 3, 8


def plot_tokens(table: pa.Table, path: str | Path, *, layer: int | None = None, top: int = TOKENS) -> Path:
    """Draw the tokens that each vector raises and lowers most, a panel each; dashed lines are chance.

    Bars are z-scores, in standard deviations of that token's logit under random vectors. A random vector goes beyond a
    dashed line at one token of the vocabulary, on average.

    Args:
        table: table from `vector_lens`.
        path: file to write; its suffix sets the format.
        layer: layer to draw, if the table has several.
        top: number of tokens for either end.

    Raises:
        InvalidSpec: the table is not from `vector_lens`, or has several layers and none is named.
    """
    rows = rows_of(table, "name", "layer", "end", "place", "token", "z", maker="vector_lens")
    at = only(rows, "layer", layer)
    rows = [row for row in rows if row["layer"] == at and row["place"] < top]
    names = list(dict.fromkeys(row["name"] for row in rows))
    across = min(len(names), ACROSS)
    down = -(-len(names) // across)
    chance, scale = about(table)["once"], Scale.of([row["z"] for row in rows])
    most = 1.05 * scale.limit
    with Picture(path, min(PAGE, 2.4 * across + 0.2), (0.24 * top + 0.55) * down + 0.1) as figure:
        panels = figure.subplots(down, across, squeeze=False, sharex=True)
        for axes in panels.flat[len(names) :]:
            axes.set_visible(False)
        for axes, name in zip(panels.flat, names, strict=False):
            own = [row for row in rows if row["name"] == name]
            _draw(axes, own, chance, max(most, chance * 1.3), scale)
            axes.set_title(f"{written(name)}, layer {at}", fontweight="bold")
        for axes in panels.flat[: len(names)][-across:]:  # below which there is no other
            axes.tick_params(labelbottom=True)
            axes.set_xlabel(scale.label("z of the logit"))
    return Path(path)


def _draw(axes: Any, rows: list[dict[str, Any]], chance: float, most: float, scale: Scale) -> None:
    """Draw bars of raised tokens to the right, lowered to the left, strongest on top; z is written beyond the scale."""
    for end, colour, sign in (("raised", COLOURS[1], 1), ("lowered", COLOURS[0], -1)):
        own = [row for row in rows if row["end"] == end]
        ends = clipped([row["z"] for row in own], scale)
        axes.barh([row["place"] for row in own], ends, color=colour, height=0.72)
        for row, at in zip(own, ends, strict=True):
            far = "" if at == row["z"] else f" ({row['z']:.3g})"
            axes.annotate(
                token(row["token"]) + far,
                (at, row["place"]),
                (2 * sign, 0),
                textcoords="offset points",
                ha="left" if sign > 0 else "right",
                va="center",
                fontsize=6.5,
                family=FONT,
                color=ink(),
            )
        # A dash between every two rows, so that none crosses a token, on a page of any colour.
        gaps = [place - 0.5 for place in range(len(own) + 1)]
        between = [gap - 0.2 for gap in gaps], [gap + 0.2 for gap in gaps]
        axes.vlines([sign * chance] * len(gaps), *between, color=GREY, linewidth=0.7, zorder=0)
    axes.axvline(0, color=ink(), linewidth=0.6)
    axes.set(xlim=(-1.75 * most, 1.75 * most), yticks=[])
    axes.invert_yaxis()
    bare(axes)
    axes.spines["left"].set_visible(False)
