"""Pictures of the analysis tables, in print sizes, and the drawing code that they share.

The file name's suffix sets the format, such as PDF or SVG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steercap.core.display import COLOURS, GREY
from steercap.core.extras import extra
from steercap.core.prompts import FONT, drawn
from steercap.errors import InvalidSpec
from steercap.files.base import save_figure
from steercap.lab.mechanism.analysis.tables import rows_of
from steercap.lab.mechanism.patching.plots import Scale

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure

#: Width of a column and of a page of text in inches; dots per inch of raster pictures.
COLUMN, PAGE, DPI = 3.4, 6.9, 160
#: Diverging colour map: blue is negative, red is positive.
DIVERGING: Final = "RdBu_r"
#: Position at which values beyond a scale are drawn, as a multiple of its limit.
EDGE: Final = 1.1
#: Settings of matplotlib (rcParams) for all pictures.
STYLE: Final[Mapping[str, Any]] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}


class Picture:
    """Figure that is written to a file when its block ends: `with Picture(path, width, height) as figure:`.

    After an error in the block, no file is written.

    Args:
        path: file to write, atomically; its suffix sets the format.
        width, height: size in inches.
    """

    def __init__(self, path: str | Path, width: float, height: float) -> None:
        with extra("analysis"):
            from matplotlib import rc_context
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure

        self._path, self._style = Path(path), rc_context(dict(STYLE))
        self._style.__enter__()
        self._figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self._figure)  # which knows how large texts come out

    def __enter__(self) -> Figure:
        return self._figure

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                save_figure(self._figure, self._path, DPI)
        finally:
            self._style.__exit__(None, None, None)


def bare(axes: Any) -> None:
    """Hide the upper and right line of the frame of matplotlib axes."""
    axes.spines[["top", "right"]].set_visible(False)


def written(name: str) -> str:
    """Return a name as drawn: escaped for matplotlib, undrawable characters replaced, spaces kept."""
    return drawn(name).replace("·", " ")


def token(text: str, width: int = 14) -> str:
    """Return a token's text as drawn, with visible spaces, cut to `width` characters."""
    return drawn(text if len(text) <= width else f"{text[: width - 1]}…")


def only(rows: Sequence[Mapping[str, Any]], column: str, asked: Any) -> Any:
    """Return the requested value `asked` of a table's column, or the only one for None.

    Raises:
        InvalidSpec: there are several values and none was requested, or the requested one is missing.
    """
    found = sorted({row[column] for row in rows})
    if asked is None and len(found) == 1:
        return found[0]
    if asked not in found:
        raise InvalidSpec(f"{column}={asked!r}; the table has {column}s {found}, and this picture is of one")
    return asked


def clipped(values: Any, scale: Scale) -> Any:
    """Return values as an array, clipped to 1.1 times the limit of a scale in both directions."""
    return np.clip(np.asarray(values, dtype=float), -EDGE * scale.limit, EDGE * scale.limit)


def plot_layer_sweep(table: pa.Table, path: str | Path, *, metric: str = "change of the metric") -> Path:
    """Draw the mean effect over prompts by layer, ± one standard error, over the range of random vectors.

    Args:
        table: table from `layer_sweep`.
        path: file to write, which is returned; its suffix sets the format.
        metric: label of the vertical axis.

    Raises:
        InvalidSpec: the table is not from `layer_sweep`.
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
            axes.axhline(0, color=GREY, linewidth=0.5, zorder=0)
            axes.set(title=written(name), xlabel="layer")
            axes.xaxis.get_major_locator().set_params(integer=True)
            bare(axes)
        panels[0].set_ylabel(metric)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return Path(path)


def _draw_random(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the range of the random vectors' means over prompts, by layer."""
    each = [_by_layer([row for row in rows if row["control"] == one]) for one in sorted({r["control"] for r in rows})]
    if each:
        means = np.array([mean for _, mean, _ in each])
        said = f"range of {len(each)} random vectors"
        axes.fill_between(each[0][0], means.min(0), means.max(0), color=GREY, alpha=0.35, linewidth=0, label=said)


def _by_layer(rows: Sequence[dict[str, Any]]) -> tuple[list[int], Any, Any]:
    """Return the layers, ascending, and the mean and standard error over prompts at each, arrays [layers]."""
    layers = sorted({row["layer"] for row in rows})
    values = [np.array([row["difference"] for row in rows if row["layer"] == layer]) for layer in layers]
    error = [one.std(ddof=1) / np.sqrt(len(one)) if len(one) > 1 else 0.0 for one in values]
    return layers, np.array([one.mean() for one in values]), np.array(error)


def plot_position_sweep(
    table: pa.Table,
    path: str | Path,
    *,
    prompt: int | None = None,
    name: str | None = None,
    metric: str = "change of the metric",
) -> Path:
    """Draw effects by layer and token of a prompt, red if adding the vector raises the metric, blue if it lowers it.

    Args:
        table: table from `position_sweep`.
        path: file to write; its suffix sets the format.
        prompt: index of the prompt; by default the only one, or 0 if there are several.
        name: name of the vector, if there are several.
        metric: label of the colour scale.

    Raises:
        InvalidSpec: the table is not from `position_sweep`, or there is no such prompt or vector.
    """
    rows = rows_of(table, "name", "control", "layer", "prompt", "position", "difference", maker="position_sweep")
    if any(row["position"] is None for row in rows):
        raise InvalidSpec("this picture takes a table of position_sweep, and the one given is of all tokens at once")
    several = len({row["prompt"] for row in rows}) > 1
    chosen = only(rows, "name", name), only(rows, "prompt", 0 if prompt is None and several else prompt)
    own = [row for row in rows if (row["name"], row["prompt"]) == chosen and not row["control"]]
    layers, tokens = sorted({row["layer"] for row in own}), {row["position"]: row["token"] for row in own}
    positions = sorted(tokens)
    values = np.full((len(layers), len(positions)), np.nan)
    for row in own:
        values[layers.index(row["layer"]), positions.index(row["position"])] = row["difference"]
    scale = Scale.of(values)
    with Picture(path, min(0.27 * len(positions) + 1.5, PAGE), max(0.16 * len(layers), 1.1) + 0.95) as figure:
        axes: Any = figure.subplots()
        image = axes.imshow(values, cmap=DIVERGING, **scale.style)
        labels = [token(tokens[position], 10) for position in positions]
        axes.set_xticks(range(len(positions)), labels, rotation=90, family=FONT, fontsize=6.5)
        step = max(len(layers) // 12, 1)
        axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
        axes.set(ylabel="layer", title=written(chosen[0]))
        bar = figure.colorbar(image, ax=axes, pad=0.02, extend=scale.extend)
        bar.set_label(scale.label(metric))
        bar.outline.set_linewidth(0.4)
    return Path(path)
