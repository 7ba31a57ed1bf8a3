"""Pictures of a report on a run over traits, and the canvas of all pictures of personas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steercap.core.display import COLOURS, ink
from steercap.core.extras import extra
from steercap.files.base import save_figure
from steercap.lab.directions import chance_band
from steercap.lab.personas.records import SIGNS, Records
from steercap.lab.personas.settings import PersonaSettings
from steercap.steering.directions import DirectionSet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours of traits, in order; they repeat for more traits.
TRAITS: Final = (*COLOURS, "#000000")
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
POSITIVE, NEGATIVE = COLOURS[0], COLOURS[1]
#: Dots per inch: sharp on a page, and small files.
DPI: Final = 110
#: Maximum panels side by side.
COLUMNS: Final = 3


def draw_auc(directions: DirectionSet, path: Path) -> None:
    """Draw the AUC of every trait by layer, and the 95 % chance range over all layers, to a file."""
    with canvas(path, (9, 4.8)) as axes:
        for place, (name, auc) in enumerate(directions.provenance.auc.items()):
            axes.plot(
                list(auc),
                list(auc.values()),
                color=TRAITS[place % len(TRAITS)],
                marker=MARKERS[place % len(MARKERS)],
                markersize=4,
                linewidth=1.8,
                label="{} ({} + {} answers)".format(name, *directions.provenance.held_out[name]),
            )
        held_out, layers = directions.provenance.held_out.values(), len(directions.layers)
        low, high = min(chance_band(*counts, best_of=layers) for counts in held_out)
        axes.axhspan(low, high, color="grey", alpha=0.15, label="chance, 95 % of all layers (widest)")
        axes.axhline(0.5, color="grey", linewidth=1, linestyle="--")
        axes.set(
            title="How well each vector tells held-out answers apart",
            xlabel=f"layer ({directions.site})",
            ylabel="AUC, questions held out",
            ylim=(min(0.3, *(min(auc.values()) for auc in directions.provenance.auc.values())) - 0.02, 1.02),
        )
        axes.grid(alpha=0.25)
        axes.figure.legend(loc="outside right upper", frameon=False)


def draw_scores(settings: PersonaSettings, records: Records, path: Path) -> None:
    """Draw histograms of the scores under positive and negative system prompts, a panel for each trait, to a file."""
    names = [trait.name for trait in settings.resolved()]
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    with canvas(path, (3.6 * columns + 0.6, 3.0 * rows + 0.7), rows, columns) as grid:
        panels = list(grid.flat) if hasattr(grid, "flat") else [grid]
        for panel, name in zip(panels, names, strict=False):
            for sign, colour, hatch in zip(SIGNS, (POSITIVE, NEGATIVE), (None, "///"), strict=True):
                panel.hist(
                    [value for _, value in records.of(name, sign) if value is not None],
                    bins=range(0, 101, 5),
                    color=colour,
                    edgecolor=colour,
                    alpha=0.45,
                    hatch=hatch,
                    label=f"{sign} prompt",
                )
            for bound in {settings.threshold_high, settings.threshold_low}:
                panel.axvline(bound, color=ink(), linewidth=1, linestyle=":")
            panel.set(title=name, xlabel=f"score ({settings.scorer})", ylabel="answers", xlim=(0, 100))
            panel.tick_params(labelbottom=True)
        for panel in panels[len(names) :]:
            panel.set_visible(False)
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)


def draw_cosines(directions: DirectionSet, layer: int, path: Path) -> None:
    """Draw the cosines of every two traits' vectors at one layer, to a file."""
    names, values = list(directions), directions.cosines(layer).tolist()
    side = 1.2 + 0.75 * len(names)
    with canvas(path, (max(side + 1.4, 4.6), max(side, 3.6))) as axes:
        image = axes.imshow(values, cmap="PuOr_r", vmin=-1, vmax=1)
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                colour = "white" if abs(value) > 0.6 else "black"
                axes.text(column, row, f"{value:+.2f}", ha="center", va="center", fontsize=9, color=colour)
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(names)), names)
        axes.set_title(f"Cosine of the vectors, layer {layer}")
        axes.figure.colorbar(image, ax=axes, label="cosine", shrink=0.85)


def draw_all(
    folder: Path,
    settings: PersonaSettings,
    directions: DirectionSet,
    records: Records,
    layer: int,
) -> Mapping[str, Path]:
    """Draw every picture of a report into a folder; return paths by name: "auc", "scores" and "cosines"."""
    paths = {name: folder / f"{name}.png" for name in ("auc", "scores", "cosines")}
    draw_auc(directions, paths["auc"])
    draw_scores(settings, records, paths["scores"])
    draw_cosines(directions, layer, paths["cosines"])
    return paths


@contextmanager
def canvas(
    to: str | Path | Axes, size: tuple[float, float], rows: int = 1, columns: int = 1, *, dpi: int = DPI
) -> Iterator[Any]:
    """Yield axes to draw on: the given ones, or new ones that are written to a file when the block ends.

    Args:
        to: file to write, whose suffix sets the format, or matplotlib axes.
        size: width and height of a new figure, in inches.
        rows, columns: number of panels of a new figure, with a common horizontal axis; several are yielded as an array.
        dpi: dots per inch of the file.
    """
    if not isinstance(to, (str, Path)):
        yield to
        return
    with extra("plots"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")  # not through pyplot: a notebook's figures are left alone
    yield figure.subplots(rows, columns, sharex=True)
    save_figure(figure, to, dpi)
