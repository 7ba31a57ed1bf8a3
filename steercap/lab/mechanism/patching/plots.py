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

#: Size of a cell in inches, across and down; space around a panel; dots per inch.
CELL: Final = (0.3, 0.17)
AROUND: Final = (1.9, 1.5)
DPI: Final = 110


#: Factor above all other values at which a value is an outlier, and the share of the values that may be.
FAR_OUT: Final = 10.0
MOST_OUTLIERS: Final = 0.02


class Scale(NamedTuple):
    """Symmetric colour scale of heat maps, which few outliers do not flatten.

    Args:
        limit: magnitude at which the colours are full.
        most: greatest magnitude of the values.
    """

    limit: float
    most: float

    @classmethod
    def of(cls, *values: Any) -> Scale:
        """Return the scale of arrays of numbers; NaN and infinity do not count.

        Up to 2 % of the values, or one, are outliers if each is over ten times as great as all others.
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
        """Arguments of matplotlib's `imshow`: this scale, and the first row at the bottom."""
        fixed = {"aspect": "auto", "interpolation": "nearest", "origin": "lower"}
        return {"vmin": -self.limit, "vmax": self.limit, **fixed}

    @property
    def extend(self) -> str:
        """Ends of the colour bar that have an arrow, since values are beyond them: "both" or "neither"."""
        return "both" if self.most > self.limit else "neither"

    def label(self, quantity: str) -> str:
        """Return the label of the colour bar, which says how far the values reach."""
        return f"{quantity}; up to {self.most:.3g}" if self.most > self.limit else quantity


class Mapped(Protocol):
    """Interface of `Effects`, for drawing."""

    @property
    def records(self) -> Sequence[Any]:
        """All changed runs."""

    @property
    def layers(self) -> list[int]:
        """Layers, the rows of the map."""

    @property
    def axis(self) -> str:
        """Meaning of the columns: position or head."""

    def where(self, **columns: Any) -> Mapped:
        """Select some of the runs."""

    def array(self, of: Any = None) -> npt.NDArray[np.float64]:
        """Return the values of the map: float64 [layers, columns]."""

    def labels(self) -> list[str]:
        """Return a label for each column: the token at its position, or the number of its head."""

    def quantity(self, of: Any) -> str:
        """Return the name of the quantity that is drawn."""


def plot_effects(effects: Mapped, path: str | Path, *, of: str | None = None) -> Path:
    """Draw layers × positions, or layers × heads, means over pairs: a panel for each site and receiver.

    Red is positive, blue negative, white zero; all panels share the scale. Grey cells were not run.

    Args:
        effects: result of `patch`, `ablate` or `path_patch`.
        path: file to write; its suffix sets the format.
        of: quantity to draw: "effect", "difference" or "value"; see `Effects.array`.

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
    """Label layers on the vertical axis, tokens or heads on the horizontal one."""
    labels = [label.replace("$", r"\$").replace("\n", "↵") for label in panel.labels()]
    turned = 90 if panel.axis == "position" else 0
    axes.set_xticks(range(len(labels)), labels, rotation=turned, fontsize=7)
    axes.set_xlabel(panel.axis)
    step = max(len(panel.layers) // 15, 1)
    axes.set_yticks(range(0, len(panel.layers), step), panel.layers[::step], fontsize=7)
