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
COLUMN, PAGE, DPI = 3.4, 6.9, 200
#: Of the palette of Okabe and Ito, which the colour-blind tell apart; grey is chance.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
CHANCE: Final = "#999999"
INK: Final = "#222222"
#: Both ways from nothing: blue is less, red is more.
DIVERGING: Final = "RdBu_r"
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
