"""Records of a sweep's answers, means by condition, effects of vectors and controls; plots of measures by scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np

from steercap.core.display import COLOURS, GREY, ink
from steercap.core.extras import extra
from steercap.errors import InvalidSpec
from steercap.files.base import save_figure
from steercap.lab.measures import Answered, Measure
from steercap.lab.studies.sweeps.grid import Sweep, SweepCondition, SweepRequest
from steercap.lab.studies.sweeps.operations import OPERATIONS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Record(Answered, frozen=True, kw_only=True):
    """Answer of a sweep, with its condition; see `SweepCondition` and `Answered`.

    Args:
        number: number of the request in the sweep, from 0.
        prompt_index, sample: index of the prompt, and of the answer among those to this prompt.
        finish_reason: vLLM's finish reason: "stop" or "length".
    """

    number: int
    vector: str
    operation: str
    layers: tuple[int, ...]
    scale: float
    control: str
    prompt_index: int
    sample: int
    finish_reason: str

    def __post_init__(self) -> None:
        if self.control == "reversed":  # as steercap 0.1.0 wrote it
            msgspec.structs.force_setattr(self, "control", "negated")

    @property
    def condition(self) -> SweepCondition:
        """Condition under which the answer was generated."""
        return SweepCondition(**{name: getattr(self, name) for name in SweepCondition.__struct_fields__})

    def answers(self, request: SweepRequest, prompt: str) -> bool:
        """Return True if the record has the number, condition, prompt (index, and text as in `Answered`) and sample."""
        asked = (request.number, request.condition, request.prompt, request.sample, prompt)
        return (self.number, self.condition, self.prompt_index, self.sample, self.prompt) == asked


class Mean(msgspec.Struct, frozen=True):
    """Mean of a measure under one condition.

    Args:
        value: mean over prompts of the mean over each prompt's answers; for a measure that is a factor (`Measure.log`)
            the geometric one. NaN if nothing could be measured.
        error: standard error over prompts, for a factor of its logarithm; NaN for fewer than two prompts.
        count: number of answers that could be measured.
    """

    value: float
    error: float
    count: int


class Summary(msgspec.Struct, frozen=True):
    """Means of all measures under one condition.

    Args:
        condition: condition of the answers.
        answers: number of answers.
        means: mean of each measure, by its label.
    """

    condition: SweepCondition
    answers: int
    means: dict[str, Mean]


class Effect(msgspec.Struct, frozen=True):
    """Effect of a vector at one scale on one measure, beside its controls.

    Args:
        condition: condition that steers with the vector.
        steered, plain: means of the measure with the vector, and without steering.
        negated: mean at minus the scale, None if that was not swept or has no opposite effect (`Operation.signed`).
        random: mean of each random vector with the same operation, layers and scale, in the order of their numbers.
    """

    condition: SweepCondition
    steered: Mean
    plain: Mean
    negated: Mean | None
    random: tuple[float, ...]

    @property
    def outside(self) -> float:
        """Distance of the steered mean from the range of the random vectors' means, over that range's width; 0 inside.

        Infinite if all random vectors have one other mean; NaN without random vectors, or if a mean is NaN.
        """
        if not self.random or any(map(math.isnan, (*self.random, self.steered.value))):
            return math.nan
        low, high = min(self.random), max(self.random)
        beyond = max(low - self.steered.value, self.steered.value - high, 0.0)
        if not beyond:
            return 0.0
        return beyond / (high - low) if high > low else math.inf

    @property
    def deviations(self) -> float:
        """Steered mean minus that of the random vectors, in standard deviations of the random vectors' means.

        Infinite if they all agree and it does not, NaN with fewer than two of them, or if one of these means is NaN.
        """
        if len(self.random) < 2 or any(map(math.isnan, (*self.random, self.steered.value))):
            return math.nan
        if min(self.random) == max(self.random):  # the mean of equal numbers is rounded, and seldom one of them
            apart = self.steered.value - self.random[0]
            return math.copysign(math.inf, apart) if apart else 0.0
        return (self.steered.value - float(np.mean(self.random))) / float(np.std(self.random, ddof=1))


STEERED, NEGATED, RANDOM = COLOURS[0], COLOURS[1], GREY
#: Size of one panel in inches, and dots per inch: two columns and rows make some 60 kB.
PANEL: Final = (4.2, 2.9)
DPI: Final = 110


class Plotted(Protocol):
    """Part of the interface of `SweepResults` that `plot_doses` needs."""

    @property
    def sweep(self) -> Sweep:
        """Sweep that was run."""

    @property
    def values(self) -> Mapping[str, Sequence[float]]:
        """Value of each answer in the order of the answers, by the label of the measure; NaN if not measured."""

    @property
    def measures(self) -> Mapping[str, Measure]:
        """Measures by label."""

    def summary(self) -> Sequence[Summary]:
        """Return the means of all measures under each condition."""

    def check(self, *measures: str) -> None:
        """Check that measures were taken.

        Raises:
            InvalidSpec: one was not taken.
        """


def plot_doses(
    results: Plotted, path: str | Path, *, vector: str | None = None, measures: Sequence[str] | None = None
) -> Path:
    """Draw each measure by the scale of a vector, a row per measure, a column per operation and layers; return `path`.

    The vector is drawn with one standard error over prompts, the negated scales dashed, every random
    vector as a thin line in the band from the least to the greatest, and no steering as a dot where the scale
    changes nothing, or else as a level. Measures that are factors, such as perplexity, have a logarithmic axis.

    Args:
        results: results of a sweep.
        path: file to write; its suffix sets the format.
        vector: name of the vector; may be left out if there is only one.
        measures: labels, in the order of the rows; all by default.

    Raises:
        InvalidSpec: an unknown vector or measure, none at all, or several vectors and no name.
    """
    figure = _figure(results, *_chosen(results, vector, measures))
    return save_figure(figure, path, DPI)


def _figure(results: Plotted, vector: str, labels: Sequence[str]) -> Figure:
    with extra("plots"):
        from matplotlib.figure import Figure

    summary = results.summary()
    own = [one.condition for one in summary if one.condition.vector == vector]
    columns = list(dict.fromkeys((condition.operation, condition.layers) for condition in own))
    if not columns:
        raise InvalidSpec(f"{vector!r} was swept only at scales {results.sweep.scales}, which change nothing")
    size = (PANEL[0] * len(columns) + 0.6, PANEL[1] * len(labels) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(labels), len(columns), squeeze=False, sharex="col", sharey="row")
    for row, label in zip(panels, labels, strict=True):
        means = {one.condition: one.means[label] for one in summary}
        for axes, (operation, layers) in zip(row, columns, strict=True):
            here = {
                condition: mean
                for condition, mean in means.items()
                if (condition.vector, condition.operation, condition.layers) == (vector, operation, layers)
            }
            _draw(axes, here, means[SweepCondition(control="none")], operation, log=results.measures[label].log)
        row[0].set_ylabel(results.measures[label].axis or label)
    for axes, (operation, layers) in zip(panels[0], columns, strict=True):
        axes.set_title(f"{operation}, layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}", fontsize=10)
    for axes, (operation, _) in zip(panels[-1], columns, strict=True):
        counted = "fraction of the row's norm" if results.sweep.relative else OPERATIONS[operation].axis
        axes.set_xlabel(f"scale, {counted}")
    drawn = [axes.get_legend_handles_labels() for axes in panels[0]]
    legend = {said: handle for handles, words in drawn for handle, said in zip(handles, words, strict=True)}
    figure.legend(
        legend.values(),
        legend.keys(),
        loc="outside lower center",
        ncols=min(2 * len(columns), 4),  # a column is as wide as two entries
        frameon=False,
        fontsize=8,
    )
    figure.suptitle(vector)
    return figure


def _chosen(results: Plotted, vector: str | None, measures: Sequence[str] | None) -> tuple[str, list[str]]:
    """Return the checked name of the vector, the only one for None, and the labels of measures to draw."""
    labels = list(results.values) if measures is None else list(measures)
    results.check(*labels)
    names = list(results.sweep.vectors)
    if vector is None and len(names) == 1:
        vector = names[0]
    if vector not in names or not labels:
        raise InvalidSpec(f"vector={vector!r}, measures={labels}; name one vector of {names}, and at least one measure")
    return vector, labels


def _draw(axes: Any, means: Mapping[SweepCondition, Mean], plain: Mean, operation: str, *, log: bool) -> None:
    """Draw one panel from means by condition: random vectors, no steering, negated scales, and the vector on top."""
    if log:
        scale_log(axes)
    neutral = OPERATIONS[operation].neutral
    lines: dict[str, dict[float, Mean]] = {}
    for condition, mean in means.items():
        lines.setdefault(condition.control, {})[condition.scale] = mean
    if neutral is not None:
        for line in lines.values():
            line[neutral] = plain
    random = [lines.pop(control) for control in list(lines) if control.startswith("random-")]
    _draw_random(axes, random)
    if neutral is None:
        axes.axhline(plain.value, color=ink(), linewidth=1, linestyle=":", label="no steering")
    if "negated" in lines:
        _draw_line(axes, lines["negated"], NEGATED, "--", "negated", log=log)
    if "" in lines:
        _draw_line(axes, lines[""], STEERED, "-", "vector, ± 1 standard error", log=log)
    if neutral is not None:
        axes.plot([neutral], [plain.value], "o", color=ink(), markersize=6, label="no steering", zorder=5)
    frame(axes)


def frame(axes: Any) -> None:
    """Draw a faint grid in axes, and no frame above and to the right."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def scale_log(axes: Any, which: str = "y") -> None:
    """Make an axis, "x" or "y", of matplotlib axes logarithmic, with ticks at 2, 3, 5, 10, ..., for any range."""
    with extra("plots"):
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_random(axes: Any, lines: Sequence[Mapping[float, Mean]]) -> None:
    if not lines:
        return
    scales = sorted(lines[0])
    values = np.array([[line[scale].value for scale in scales] for line in lines])
    axes.fill_between(scales, values.min(0), values.max(0), color=RANDOM, alpha=0.25, linewidth=0)
    for place, line in enumerate(values):
        said = f"{len(lines)} random vectors of its norm" if not place else None
        axes.plot(scales, line, color=RANDOM, linewidth=0.6, alpha=0.7, label=said)


def _draw_line(axes: Any, line: Mapping[float, Mean], colour: str, style: str, said: str, *, log: bool) -> None:
    scales = sorted(line)
    middle = np.array([line[scale].value for scale in scales])
    error = np.nan_to_num(np.array([line[scale].error for scale in scales]))
    low, high = (middle * np.exp(-error), middle * np.exp(error)) if log else (middle - error, middle + error)
    axes.fill_between(scales, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(scales, middle, color=colour, linestyle=style, marker="o", markersize=4, linewidth=1.8, label=said)
