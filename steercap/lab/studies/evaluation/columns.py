"""Columns of an evaluation: means of each question or item by method and dose; interpolated doses of equal cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from steercap.core.values import choices, number_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.measures import Measure
from steercap.lab.measures.statistics import Floats, cluster_means, clusters_of
from steercap.lab.studies.evaluation.definition import Evaluation, EvaluationCondition
from steercap.lab.studies.evaluation.store import Answer
from steercap.lab.studies.evaluation.tasks import Task

#: Tolerance for being at a tried dose, as a share of the step between doses: costs are exponentials of logarithms.
ROUNDING: Final = 1e-9


@dataclass(frozen=True, eq=False)
class Columns:
    """Values of an evaluation by column, a measure or task; arguments as for `EvaluationResults`.

    A *line* is a method, or several pooled under one name. Numbers in a column of factors are logarithms. Of equal
    questions or items, the first has the values of all, and the others have none: repeated, they would count as
    independent.
    """

    evaluation: Evaluation
    answers: Sequence[Answer]
    values: Mapping[str, Sequence[float]]
    readings: Mapping[str, Mapping[EvaluationCondition, Sequence[float]]]
    measures: Mapping[str, Measure]
    tasks: Mapping[str, Task]

    @property
    def names(self) -> list[str]:
        """Labels of measures and tasks."""
        return [*self.measures, *self.tasks]

    def __getitem__(self, column: str) -> Measure | Task:
        """Return the measure or task of a label.

        Raises:
            InvalidSpec: the measure or task was not taken.
        """
        if column not in self.names:
            raise InvalidSpec(
                f"{column!r} was not measured; measured: {self.names}; evaluate(..., measures=, tasks=) adds it"
            )
        return self.measures[column] if column in self.measures else self.tasks[column]

    @cached_property
    def lines(self) -> list[tuple[str, float]]:
        """Every line at each of its doses, in the order of the evaluation."""
        each = ((method.line, dose) for method in self.evaluation.methods for dose in method.doses)
        return list(dict.fromkeys(each))

    @property
    def methods(self) -> list[str]:
        """Names of all lines, each once."""
        return list(dict(self.lines))

    def doses(self, line: str) -> list[float]:
        """Return the doses of a line, in the order of the evaluation.

        Raises:
            InvalidSpec: there is no line of this name.
        """
        found = [dose for name, dose in self.lines if name == line]
        if not found:
            raise InvalidSpec(f"{line!r} is not evaluated; {choices(line, self.methods)}")
        return found

    def control_of(self, line: str) -> str:
        """Return the name of the method that a line is a control of, or ""."""
        return next(method.control_of for method in self.evaluation.methods if method.line == line)

    def has_doses(self, line: str) -> bool:
        """Return True if a line steers by edits with a scale, so that other doses than 1 are possible."""
        return next(method.scales for method in self.evaluation.methods if method.line == line)

    @cached_property
    def means(self) -> dict[str, dict[tuple[str, float], Floats]]:
        """Means by column, then by line and dose: float64 [questions], or [items] for a task."""
        found = {label: self.by_question(label) for label in self.values}
        for label, readings in self.readings.items():
            pooled: dict[tuple[str, float], list[Sequence[float]]] = {}
            for condition, values in readings.items():
                line = self.evaluation.method(condition.method).line
                pooled.setdefault((line, condition.dose), []).append(values)
            clusters, log = clusters_of(self.tasks[label].items), self.tasks[label].log
            found[label] = {}
            for at, rows in pooled.items():
                items: list[list[float]] = [[] for _ in clusters]
                for cluster, own in zip(clusters, zip(*rows, strict=True), strict=True):
                    items[cluster] += own
                found[label][at] = cluster_means(items, log=log)
        return found

    def by_question(self, label: str, turn: int | None = None) -> dict[tuple[str, float], Floats]:
        """Return a measure's mean over each question's answers: float64 [questions] by line and dose.

        Args:
            label: label of a measure.
            turn: index of the turn whose answers to use, from 0; None for all turns.
        """
        lines = {method.name: method.line for method in self.evaluation.methods}
        found: dict[tuple[str, float], list[list[float]]] = {
            at: [[] for _ in self.evaluation.questions] for at in self.lines
        }
        clusters = clusters_of(self.evaluation.questions)
        for answer, value in zip(self.answers, self.values[label], strict=True):
            if turn is None or answer.turn == turn:
                found[lines[answer.method], answer.dose][clusters[answer.question]].append(value)
        log = self.measures[label].log
        return {at: cluster_means(values, log=log) for at, values in found.items()}

    def path(self, line: str) -> list[float]:
        """Return the doses through which a line is followed: 0, no steering, first, if the line can be scaled.

        A method with a system prompt has no dose 0: without its edits it is the prompt alone, which was not tried.
        """
        if not self.has_doses(line):
            return self.doses(line)
        found = [dose for dose in path(self.doses(line)) if dose]
        return found if self._is_prompted(line) else [0.0, *found]

    def along(self, line: str, column: str) -> dict[float, Floats]:
        """Return a column's means at each dose of a line's `path`: as in `means`, by dose."""
        means = self.means[column]
        return {dose: means[line, dose] if dose else means[self.evaluation.plain, 1.0] for dose in self.path(line)}

    def costs(self, line: str, by: str) -> dict[float, float]:
        """Return the cost at each dose of a line: the mean of a column, negated if more is better.

        The mean is over the questions or items measured under all methods and doses; a dose without any is left out.
        """
        shared = self._shared(by)
        along = {dose: means for dose, means in self.along(line, by).items() if not np.isnan(means).all()}
        return {dose: self._sign(by) * float(means[shared].mean()) for dose, means in along.items()}

    def plain_cost(self, by: str) -> float:
        """Return the cost of no steering, over the same questions or items as `costs`."""
        return self._sign(by) * float(self.means[by][self.evaluation.plain, 1.0][self._shared(by)].mean())

    def value_at(self, cost: float, by: str) -> float:
        """Return the value of the column `by`, in its unit, at a cost."""
        return math.exp(self._sign(by) * cost) if self[by].log else self._sign(by) * cost

    def less_better(self, column: str) -> bool:
        """Return True if more of a column costs more; False for a task whose more is better, such as an accuracy."""
        return column not in self.tasks or self.tasks[column].better != "more"

    def _sign(self, column: str) -> int:
        return 1 if self.less_better(column) else -1

    def _shared(self, column: str) -> npt.NDArray[np.bool_]:
        """Return a mask of the questions, or items of a task, measured under every method and dose that has a value.

        Raises:
            InvalidSpec: there are no such questions or items.
        """
        known = [~np.isnan(means) for means in self.means[column].values()]
        found: npt.NDArray[np.bool_] = np.logical_and.reduce([one for one in known if one.any()])
        if not found.any():
            raise InvalidSpec(
                f"{column!r} was measured for no question under all methods, so their costs cannot be compared"
            )
        return found

    def _is_prompted(self, line: str) -> bool:
        return next(bool(method.system) for method in self.evaluation.methods if method.line == line)

    def place(self, line: str, by: str, at: float) -> Place:
        """Return the first dose, interpolated, at which the column `by` of a line is `at`, in the column's unit.

        Raises:
            InvalidSpec: the value is not a number, or a factor and not above 0.
        """
        if number_of(at) is None:
            raise InvalidSpec(f"at={shown(at)}: give a number, in the unit of {by}")
        if self[by].log and not at > 0:
            raise InvalidSpec(f"at={at}: {by} is a factor; give a number above 0")
        if not self.has_doses(line):
            (own,) = self.doses(line)
            return Place(own, own, 0.0, reached=False)
        return place_of(self.costs(line, by), self._sign(by) * (math.log(at) if self[by].log else at))


@dataclass(frozen=True)
class Place:
    """Interpolated dose, between two that were tried.

    Args:
        low, high: neighbouring tried doses; equal if the dose itself was tried. Dose 0 is no steering.
        share: position between `low` (0) and `high` (1).
        reached: True if the method has the wanted cost at this dose.
    """

    low: float
    high: float
    share: float
    reached: bool

    @property
    def dose(self) -> float:
        """Interpolated dose."""
        return self.low + self.share * (self.high - self.low)

    def between(self, at: Mapping[float, Floats]) -> Floats:
        """Interpolate values linearly between both doses: float64 [clusters]; logarithms for a factor.

        Args:
            at: values of each question or item by dose, 0 included: float64 [clusters] each.
        """
        if self.low == self.high or not self.share:
            return at[self.low]
        found: Floats = (1 - self.share) * at[self.low] + self.share * at[self.high]
        return found


def path(doses: Sequence[float]) -> list[float]:
    """Return 0 and the positive doses, ascending; if there are none, 0 and the negative doses, descending."""
    up = sorted(dose for dose in doses if dose > 0)
    return [0.0, *(up or sorted(doses, reverse=True))]


def place_of(costs: Mapping[float, float], wanted: float) -> Place:
    """Find the first dose with the wanted cost, interpolated linearly between neighbouring doses.

    Args:
        costs: costs by dose, in the order of `path`; for a factor, their logarithms.
        wanted: wanted cost, on the same scale.

    Returns:
        The dose; if the cost is never reached, the dose with the highest cost, a finite one if there is one, except
        dose 0, marked as not reached. Nothing is interpolated to an infinite cost.
    """
    doses, near = list(costs), partial(math.isclose, wanted, rel_tol=ROUNDING, abs_tol=ROUNDING)
    for low, high in pairwise(doses):
        first, second = costs[low], costs[high]
        if second == first or math.isinf(second):
            share = 0.0 if near(first) else -1.0
        else:
            share = (wanted - first) / (second - first)
        if abs(share) <= ROUNDING:
            return _at(low)
        if abs(share - 1) <= ROUNDING:
            return _at(high)
        if 0 < share < 1:
            return Place(low, high, share, reached=True)
    if len(doses) == 1 and near(costs[doses[0]]):
        return _at(doses[0])
    steered = [dose for dose in doses if dose] or doses
    most = max([dose for dose in steered if not math.isinf(costs[dose])] or steered, key=costs.__getitem__)
    return Place(most, most, 0.0, reached=False)


def _at(dose: float) -> Place:
    return Place(dose, dose, 0.0, reached=True)
