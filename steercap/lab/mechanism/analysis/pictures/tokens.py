"""Picture of the tokens that vectors raise and lower, as bars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from steercap.core.texts import FONT
from steercap.lab.mechanism.analysis.pictures.base import (
    CHANCE,
    COLOURS,
    INK,
    PAGE,
    Picture,
    bare,
    limit,
    only,
    token,
    written,
)
from steercap.lab.mechanism.analysis.tables import about, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

#: Panels in a row, and the number of tokens shown for either end.
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
        InvalidSpec: another table, or several layers and none named.
    """
    rows = rows_of(table, "name", "layer", "end", "place", "token", "z", maker="vector_lens")
    at = only(rows, "layer", layer)
    rows = [row for row in rows if row["layer"] == at and row["place"] < top]
    names = list(dict.fromkeys(row["name"] for row in rows))
    across = min(len(names), ACROSS)
    down = -(-len(names) // across)
    chance, most = about(table)["once"], 1.05 * limit([row["z"] for row in rows])
    with Picture(path, min(PAGE, 2.4 * across + 0.2), (0.24 * top + 0.55) * down + 0.1) as figure:
        panels = figure.subplots(down, across, squeeze=False, sharex=True)
        for axes in panels.flat[len(names) :]:
            axes.set_visible(False)
        for axes, name in zip(panels.flat, names, strict=False):
            own = [row for row in rows if row["name"] == name]
            _draw(axes, own, chance, max(most, chance * 1.3))
            axes.set_title(f"{written(name)}, layer {at}", fontweight="bold")
        for axes in panels[-1]:
            axes.set_xlabel("z of the logit")
    return Path(path)


def _draw(axes: Any, rows: list[dict[str, Any]], chance: float, most: float) -> None:
    """Draw raised tokens to the right, lowered ones to the left, the strongest on top."""
    for end, colour, sign in (("raised", COLOURS[1], 1), ("lowered", COLOURS[0], -1)):
        own = [row for row in rows if row["end"] == end]
        axes.barh([row["place"] for row in own], [row["z"] for row in own], color=colour, height=0.72)
        for row in own:
            axes.annotate(
                token(row["token"]),
                (row["z"], row["place"]),
                (2 * sign, 0),
                textcoords="offset points",
                ha="left" if sign > 0 else "right",
                va="center",
                fontsize=6.5,
                family=FONT,
                color=INK,
                bbox={"facecolor": "white", "linewidth": 0, "pad": 0.6},
            )
        axes.axvline(sign * chance, color=CHANCE, linewidth=0.7, linestyle="--", zorder=0)
    axes.axvline(0, color=INK, linewidth=0.6)
    axes.set(xlim=(-1.75 * most, 1.75 * most), yticks=[])
    axes.invert_yaxis()
    bare(axes)
    axes.spines["left"].set_visible(False)
