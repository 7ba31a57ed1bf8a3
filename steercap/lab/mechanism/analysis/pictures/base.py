"""What the pictures have in common: sizes in inches of a printed page, colours, labels, and how a file is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steercap.core.extras import extra
from steercap.core.texts import drawn
from steercap.errors import InvalidSpec
from steercap.files.base import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Width of a column and of a page of text in inches; dots per inch of pictures that have dots.
COLUMN, PAGE, DPI = 3.4, 6.9, 160
#: Of the palette of Okabe and Ito, which the colour-blind tell apart; grey is chance.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
CHANCE: Final = "#999999"
INK: Final = "#222222"
#: Both ways from nothing: blue is less, red is more.
DIVERGING: Final = "RdBu_r"
#: Where a name may stand: points to the right of its dot and above it, and which of its corners is there.
SIDES: Final = (
    (4, 0, "left", "center"),
    (-4, 0, "right", "center"),
    (0, 4, "center", "bottom"),
    (0, -4, "center", "top"),
    (4, 6, "left", "bottom"),
    (-4, 6, "right", "bottom"),
    (4, -6, "left", "top"),
    (-4, -6, "right", "top"),
)
#: What matplotlib is told, in place of its defaults.
STYLE: Final[Mapping[str, Any]] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.edgecolor": INK,
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
    """A figure while it is drawn: `with Picture(path, width, height) as figure:`; left without an error, it is a file.

    Args:
        path: the file, which appears whole or not at all; its ending says the format.
        width, height: in inches.
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
                with write_whole(self._path) as scratch:
                    self._figure.savefig(scratch, dpi=DPI, format=self._path.suffix[1:] or "png")
        finally:
            self._style.__exit__(None, None, None)


def bare(axes: Any) -> None:
    """Take away the frame's upper and right line."""
    axes.spines[["top", "right"]].set_visible(False)


def place_names(axes: Any, names: Sequence[str], points: Any, size: float = 6.5) -> None:
    """Names beside points, each on the first side where it covers no other name and no point, and stays in the axes;
    on the last of them where there is none.

    Args:
        axes: where, its limits as they are to be.
        names: as they are drawn.
        points: [names, 2].
        size: of the letters.
    """
    axes.figure.draw_without_rendering()  # so that places in the axes are known
    renderer: Any = axes.figure.canvas.get_renderer()
    taken: list[Any] = []
    dots, frame = axes.transData.transform(np.asarray(points, dtype=float)), axes.get_window_extent()
    for name, point in zip(names, points, strict=True):
        for number, (across, up, beside, over) in enumerate(SIDES, 1):
            style = {"ha": beside, "va": over, "fontsize": size, "color": INK}
            text = axes.annotate(name, point, (across, up), textcoords="offset points", **style)
            box = text.get_window_extent(renderer)
            covers = any(map(box.overlaps, taken)) or any(box.contains(*dot) for dot in dots)
            if number == len(SIDES) or (not covers and frame.x0 <= box.x0 and box.x1 <= frame.x1 + 12):
                taken.append(box)
                break
            text.remove()


def written(name: str) -> str:
    """A name as it is drawn: no dollar begins a formula, what cannot be drawn has a sign; spaces stay spaces."""
    return drawn(name).replace("·", " ")


def token(text: str, width: int = 14) -> str:
    """A token as it is drawn, its spaces to be seen."""
    return drawn(text if len(text) <= width else f"{text[: width - 1]}…")


def only(rows: Sequence[Mapping[str, Any]], column: str, asked: Any) -> Any:
    """The one value of a column, or the one asked for.

    Args:
        rows: of a table.
        column: `layer`, mostly.
        asked: by the user; None for the only one there is.

    Raises:
        InvalidSpec: there are several and none was asked for, or it is not there.
    """
    found = sorted({row[column] for row in rows})
    if asked is None and len(found) == 1:
        return found[0]
    if asked not in found:
        raise InvalidSpec(f"{column}={asked!r}; the table has {column}s {found}, and this picture is of one")
    return asked


def limit(values: Any, least: float = 1e-12) -> float:
    """The greatest magnitude of some numbers, for a scale that is even on both sides."""
    return max(float(np.nanmax(np.abs(values))), least)
