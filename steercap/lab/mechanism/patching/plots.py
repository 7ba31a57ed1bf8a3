"""Heat maps of patching: a panel for each site and receiver; and the scale that heat maps share.

Layer 0 is at the bottom of every picture of layers, or at its left, as in the explorer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from steercap.core.extras import extra
from steercap.files.base import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Width and height of a cell, and of the space around a panel, in inches; dots per inch.
CELL: Final = (0.3, 0.17)
AROUND: Final = (1.9, 1.5)
DPI: Final = 110


#: Ratio to the greatest other value above which a value is an outlier, and the maximum share of outliers.
FAR_OUT: Final = 10.0
MOST_OUTLIERS: Final = 0.02


class Scale(NamedTuple):
    """Symmetric colour scale of heat maps, which few outliers do not flatten.

    Args:
        limit: absolute value at and beyond which colours are full.
        most: greatest absolute value.
    """

    limit: float
    most: float

    @classmethod
    def of(cls, *values: Any) -> Scale:
        """Return one scale for all values of some arrays, NaN and infinity ignored.

        Up to 2 % of the values, or one value, are outliers if each is over ten times as great as all other values.
        """
        sizes = np.concatenate([np.abs(np.asarray(one, dtype=np.float64)).ravel() for one in values])
        sizes = np.sort(sizes[np.isfinite(sizes)])[::-1]
        if not len(sizes) or not sizes[0]:
            return cls(1.0, 1.0)
        allowed = min(max(int(MOST_OUTLIERS * len(sizes)), 1), len(sizes) - 1)
        gaps = [at for at in range(1, allowed + 1) if sizes[at - 1] > FAR_OUT * sizes[at] > 0]
        return cls(float(sizes[gaps[-1] if gaps else 0]), float(sizes[0]))

    @property
    def style(self) -> dict[str, Any]:
        """Keyword arguments for matplotlib's `imshow`: limits of this scale, and the first row at the bottom."""
        fixed = {"aspect": "auto", "interpolation": "nearest", "origin": "lower"}
        return {"vmin": -self.limit, "vmax": self.limit, **fixed}

    @property
    def extend(self) -> str:
        """Argument `extend` of matplotlib's `colorbar`: "both" if values are beyond the limit, else "neither"."""
        return "both" if self.most > self.limit else "neither"

    def label(self, quantity: str) -> str:
        """Return the label of the colour bar: the quantity, and the greatest absolute value if beyond the limit."""
        return f"{quantity}; up to {self.most:.3g}" if self.most > self.limit else quantity


class Mapped(Protocol):
    """Part of the interface of `Effects` that `plot_effects` needs."""

    @property
    def records(self) -> Sequence[Any]:
        """Results of all patched or ablated runs, each with fields `site` and `receiver`."""

    @property
    def layers(self) -> list[int]:
        """Layer indices, ascending, the rows of the map."""

    @property
    def axis(self) -> str:
        """Meaning of the columns: "position" or "head"."""

    def where(self, **columns: Any) -> Mapped:
        """Return the runs whose fields have the given values."""

    def array(self, of: Any = None) -> npt.NDArray[np.float64]:
        """Return the values of the map, of the quantity `of`: float64 [layers, columns]; NaN without a run."""

    def labels(self) -> list[str]:
        """Return a label for each column: the position with its token, or the index of the head."""

    def quantity(self, of: Any) -> str:
        """Return the name of the quantity to draw, the default for None."""


def plot_effects(effects: Mapped, path: str | Path, *, of: str | None = None) -> Path:
    """Draw means over pairs by layer and position or head, a panel for each site and receiver, and return `path`.

    Red is positive, blue negative, white zero; all panels share the scale. Grey cells were not run.

    Args:
        effects: result of `patch`, `ablate` or `path_patch`.
        path: file to write; its suffix sets the format.
        of: quantity to draw: "effect", "difference" or "value"; None for the default, see `Effects.array`.

    Raises:
        InvalidSpec: as for `Effects.array`, for a panel.
    """
    figure = _figure(effects, of)
    return save_figure(figure, path, DPI)


def _figure(effects: Mapped, of: str | None) -> Figure:
    with extra("plots"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure

    keys = list(dict.fromkeys((one.site, one.receiver) for one in effects.records))
    panels = [effects.where(site=site, receiver=receiver) for site, receiver in keys]
    arrays = [panel.array(of) for panel in panels]
    wide = [max(CELL[0] * array.shape[1], 1.2) + AROUND[0] for array in arrays]
    tall = max(CELL[1] * len(array) for array in arrays) + AROUND[1]
    figure = Figure(figsize=(sum(wide), max(tall, 2.4)), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=wide)[0]
    scale = Scale.of(*arrays)
    colours = colormaps["RdBu_r"].with_extremes(bad="#cccccc")
    for one, panel, array, (site, receiver) in zip(axes, panels, arrays, keys, strict=True):
        image = one.imshow(array, cmap=colours, **scale.style)
        one.set_title(f"{site} → {receiver}" if receiver else site, fontsize=10)
        _label(one, panel)
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes[-1], label=scale.label(effects.quantity(of)), extend=scale.extend)
    return figure


def _label(axes: Any, panel: Mapped) -> None:
    """Label the layers on a panel's vertical axis, and the tokens or heads on the horizontal one."""
    labels = [label.replace("$", r"\$").replace("\n", "↵") for label in panel.labels()]
    turned = 90 if panel.axis == "position" else 0
    axes.set_xticks(range(len(labels)), labels, rotation=turned, fontsize=7)
    axes.set_xlabel(panel.axis)
    step = max(len(panel.layers) // 15, 1)
    axes.set_yticks(range(0, len(panel.layers), step), panel.layers[::step], fontsize=7)
