"""Picture of an evaluation: each method's effect by its cost, and all methods at equal cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from steercap.core.display import COLOURS, ink
from steercap.core.extras import extra
from steercap.errors import InvalidSpec
from steercap.files.base import save_figure
from steercap.lab.measures.statistics import Estimate
from steercap.lab.studies.evaluation.tables import Line, Matched
from steercap.lab.studies.sweeps.summaries import RANDOM, frame, scale_log
from steercap.steering.edits.inputs import by_name, several

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Matplotlib markers of methods, in order, as `COLOURS` are their colours.
MARKS: Final = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours, so no two of the first 42 are alike
#: Matplotlib markers of controls, which are grey.
CONTROL_MARKS: Final = ("x", "+", "1", "2", "3", "4")
#: Widths in inches of the panel of doses and of a column's panel, height of a row; dots per inch.
DOSES, COLUMN, HEIGHT, DPI = 4.4, 2.0, 3.0, 150


class Drawn(Protocol):
    """Part of the interface of `EvaluationResults` that `plot_methods` needs."""

    @property
    def columns(self) -> list[str]:
        """Labels of measures and tasks."""

    @property
    def plain(self) -> str:
        """Name of the method that changes nothing."""

    def summary(self) -> list[Line]:
        """Return the means of every method at every dose."""

    def path(self, method: str) -> list[float]:
        """Return the doses through which a method is followed, 0 for no steering."""

    def matched(self, *, by: str, at: float | None = None) -> list[Matched]:
        """Return the means of every method at equal cost; see `EvaluationResults.matched`."""

    def reached_by_all(self, by: str) -> float:
        """Return the highest cost that every method with doses reaches."""

    def is_log(self, column: str) -> bool:
        """Return True if a column's values are factors, drawn on a logarithmic axis."""

    def axis(self, column: str) -> str:
        """Return the axis label of a column."""

    def check(self, *columns: str) -> None:
        """Check that measures or tasks were taken; raise InvalidSpec if one was not."""


def plot_methods(
    results: Drawn | Mapping[str, Drawn],
    to: str | Path,
    *,
    columns: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    by: str,
    at: float | Mapping[str, float] | None = None,
) -> Path:
    """Draw the effects of methods by their costs, and return the file's path.

    On the left is the first column against the cost, each method a line through the doses that `matched` follows, and
    a mark at others. A dashed line is the cost at which all are compared. On the right is a panel for each column: each
    method at that cost, with its interval. Open marks are methods that never reach that cost, or have no doses.
    Controls are grey.

    Args:
        results: results of one evaluation, or of several by name, such as that of a trait, each drawn in a row.
        to: file to write; its suffix sets the format.
        columns: measures and tasks, first the one that methods are to change; by default all but the cost. For several
            results, a mapping by their names.
        by: measure or task of the cost.
        at: cost at which to compare; by default the highest that every method with doses reaches. For several results,
            a mapping by their names.

    Raises:
        InvalidSpec: a column was not taken, there is none but the cost, no method has doses, or a mapping has other
            names than the results.
    """
    rows = results if isinstance(results, Mapping) else {"": results}
    asked = by_name(columns, rows, "columns")
    chosen = {name: _chosen(one, asked[name], by) for name, one in rows.items()}
    figure = _figure(rows, chosen, by, by_name(at, rows, "at"))
    return save_figure(figure, to, DPI)


def _chosen(results: Drawn, columns: Sequence[str] | None, by: str) -> list[str]:
    found = [column for column in results.columns if column != by] if columns is None else several(columns, "columns")
    results.check(by, *found)
    if not found:
        raise InvalidSpec(
            "only the cost was measured; add a measure of the methods' purpose by evaluate(..., measures=)"
        )
    return found


def _figure(
    rows: Mapping[str, Drawn], columns: Mapping[str, Sequence[str]], by: str, at: Mapping[str, float | None]
) -> Figure:
    with extra("evaluation"):
        from matplotlib.figure import Figure

    most = max(map(len, columns.values()))
    figure = Figure(figsize=(DOSES + COLUMN * most + 1.2, HEIGHT * len(rows) + 0.7), layout="constrained")
    panels = figure.subplots(len(rows), 1 + most, squeeze=False, width_ratios=[DOSES, *[COLUMN] * most])
    styles = _styles(rows.values())
    for row, (name, results) in zip(panels, rows.items(), strict=True):
        own = at[name]
        where = results.reached_by_all(by) if own is None else own
        _draw_doses(row[0], results, columns[name][0], styles, by=by, at=where)
        _draw_matched(row[1:], results, columns[name], results.matched(by=by, at=where), styles)
        row[1].set_title(f"where {results.axis(by)} is {where:.3g}", loc="left", fontsize=8)
        if name:
            row[0].set_title(name, loc="left", fontsize=11, fontweight="bold")
    legend: dict[str, Any] = {}
    for row in panels:
        legend |= dict(zip(*reversed(row[0].get_legend_handles_labels()), strict=True))
    figure.legend(
        legend.values(), legend.keys(), loc="outside lower center", ncols=min(len(legend), 4), frameon=False, fontsize=8
    )
    return figure


def _styles(results: Iterable[Drawn]) -> dict[str, dict[str, Any]]:
    """Return matplotlib's `color` and `marker` by name of the method: controls grey, no steering in the text colour."""
    found: dict[str, dict[str, Any]] = {}
    own = controls = 0
    for one in results:
        for line in one.summary():
            if line.method in found:
                continue
            if line.method == one.plain:
                found[line.method] = {"color": ink(), "marker": "o"}
            elif line.control_of:
                found[line.method] = {"color": RANDOM, "marker": CONTROL_MARKS[controls % len(CONTROL_MARKS)]}
                controls += 1
            else:
                found[line.method] = {"color": COLOURS[own % len(COLOURS)], "marker": MARKS[own % len(MARKS)]}
                own += 1
    return found


def _draw_doses(axes: Any, results: Drawn, column: str, styles: Mapping[str, Any], *, by: str, at: float) -> None:
    """Draw a column by the cost `by`, a line for each method, and the cost `at` as a dashed line."""
    lines: dict[str, list[Line]] = {}
    for line in results.summary():
        lines.setdefault(line.method, []).append(line)
    plain = results.plain
    dosed = {one.method for one in results.matched(by=by, at=at) if one.how != "as it is"}
    axes.axvline(at, color=ink(), linewidth=0.8, linestyle="--", alpha=0.6)
    for name in sorted(lines, key=lambda name: name == plain):  # on top
        known = {line.dose: line for line in lines[name]} | {0.0: lines[plain][0]}
        path = results.path(name)
        points = [known[dose] for dose in path]
        others = [line for line in lines[name] if line.dose not in path]
        for place, own in enumerate(filter(None, (points, others))):
            x, y = ([line.means[label] for line in own] for label in (by, column))
            axes.errorbar(
                [one.value for one in x],
                [one.value for one in y],
                yerr=_bars(y),
                label="" if place else name,
                linewidth=1.5,
                elinewidth=0.8,
                markersize=5,
                alpha=0.95,
                zorder=2 if styles[name]["color"] == RANDOM else 3,
                linestyle="-" if name in dosed and not place else "none",
                **styles[name],
            )
    if results.is_log(by):
        scale_log(axes, "x")
    if results.is_log(column):
        scale_log(axes, "y")
    axes.set_xlabel(results.axis(by))
    axes.set_ylabel(results.axis(column))
    frame(axes)


def _draw_matched(
    panels: Sequence[Any], results: Drawn, columns: Sequence[str], matched: Sequence[Matched], styles: Mapping[str, Any]
) -> None:
    """Draw every method at equal cost: a panel for each column, a row for each method, from the top."""
    for at, (axes, column) in enumerate(zip(panels, columns, strict=False)):
        for place, line in enumerate(matched):
            own = line.means[column]
            there = line.how == "interpolated" or line.method == results.plain
            face = styles[line.method]["color"] if there else axes.get_facecolor()
            axes.errorbar(
                [own.value],
                [place],
                xerr=_bars([own]),
                markersize=5,
                elinewidth=1.2,
                linestyle="none",
                markerfacecolor=face,
                **styles[line.method],
            )
        plain = next(line.means[column] for line in matched if line.method == results.plain)
        axes.axvline(plain.value, color=ink(), linewidth=0.7, linestyle=":", alpha=0.7)
        axes.set_ylim(len(matched) - 0.5, -0.5)
        axes.set_yticks(
            range(len(matched)), [line.method for line in matched] if not at else [""] * len(matched), fontsize=8
        )
        axes.set_xlabel(results.axis(column), fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        if results.is_log(column):
            scale_log(axes, "x")
        else:
            axes.locator_params(axis="x", nbins=4)
        frame(axes)
    for axes in panels[len(columns) :]:
        axes.set_axis_off()


def _bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of error bars, below and above each value; 0 without an interval."""
    pairs = [(one.value - one.low, one.high - one.value) if one.low == one.low else (0.0, 0.0) for one in estimates]
    return [[max(below, 0.0) for below, _ in pairs], [max(above, 0.0) for _, above in pairs]]
