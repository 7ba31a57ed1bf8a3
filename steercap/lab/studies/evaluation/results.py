"""Results of an evaluation: answers with their numbers, comparisons of methods, and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steercap.core.display import brief, html_table
from steercap.errors import InvalidSpec
from steercap.files.tables import save_table, table_of
from steercap.lab.measures import Measure
from steercap.lab.measures.statistics import Difference, Estimate, Floats, difference, estimate, slope
from steercap.lab.studies.evaluation import tables
from steercap.lab.studies.evaluation.columns import Columns, Place
from steercap.lab.studies.evaluation.definition import Evaluation, EvaluationCondition
from steercap.lab.studies.evaluation.plots import plot_methods
from steercap.lab.studies.evaluation.store import Answer
from steercap.lab.studies.evaluation.tables import Comparison, Drift, Line, Matched, corrected
from steercap.lab.studies.evaluation.tasks import Task

if TYPE_CHECKING:
    import pyarrow as pa

#: Label of the task that measures cost by default, the perplexity of neutral prose (`Passages`).
COST = "neutral"


@dataclass(frozen=True, eq=False)
class EvaluationResults:
    """Answers under every method, their values by measure, and values of the tasks of fixed texts.

    Intervals are of 95 %, over questions or the items of a task, see `steercap.lab.measures.statistics.estimate`.

    Args:
        evaluation: evaluation that was run.
        answers: every answer, in the order of the evaluation.
        values: value of each answer, by label of the measure; NaN if it could not be measured.
        readings: value of each item under each condition, by label of the task.
        measures, tasks: measures and tasks taken, by label.
    """

    evaluation: Evaluation
    answers: Sequence[Answer]
    values: Mapping[str, Sequence[float]]
    readings: Mapping[str, Mapping[EvaluationCondition, Sequence[float]]]
    measures: Mapping[str, Measure]
    tasks: Mapping[str, Task]

    __repr__ = brief

    @property
    def columns(self) -> list[str]:
        """Labels of measures and tasks."""
        return self._numbers.names

    @property
    def plain(self) -> str:
        """Name of the method that changes nothing."""
        return self.evaluation.plain

    @property
    def table(self) -> pa.Table:
        """Answers as a pyarrow Table, one row each, with their values in further columns."""
        return table_of(self.answers, self.values)

    def save(self, to: str | Path) -> Path:
        """Write the table of answers to one Parquet file, atomically; return its path.

        Raises:
            InvalidFile: the name has another extension than .parquet.
        """
        return save_table(to, self.table)

    def summary(self) -> list[Line]:
        """Return means and intervals of every method at every dose, in the evaluation's order; pooled ones are one."""
        return [
            Line(
                line,
                dose,
                self._numbers.control_of(line),
                {label: self._estimate(label, means[line, dose]) for label, means in self._numbers.means.items()},
            )
            for line, dose in self._numbers.lines
        ]

    def _repr_html_(self) -> str:
        """Return an HTML table for a notebook: each method at each dose, its means with their intervals."""
        rows = [
            (
                line.method,
                line.dose,
                line.control_of,
                *(f"{mean.value:.4g} ({mean.low:.4g} to {mean.high:.4g})" for mean in line.means.values()),
            )
            for line in self.summary()
        ]
        columns = ["method", "dose", "control of", *self.columns]
        return html_table(f"Evaluation: {len(self.answers):,} answers", columns, rows)

    def doses(self, method: str) -> list[float]:
        """Return the doses of a method, in the order of the evaluation.

        Args:
            method: name of the method, or its pooled name.

        Raises:
            InvalidSpec: there is no such method.
        """
        return self._numbers.doses(method)

    def path(self, method: str) -> list[float]:
        """Return the doses through which `matched` follows a method, 0 for no steering."""
        return self._numbers.path(method)

    def compare(self, column: str, *, against: str | None = None, dose: float | None = None) -> list[Comparison]:
        """Compare every method at every dose with `against`, on the same questions, p adjusted for all comparisons.

        Controls are left out: `compare_matched` compares them at equal cost.

        Args:
            column: a measure or task.
            against: name of the method to compare with; no steering by default.
            dose: dose of `against`; may be left out if it has only one.

        Raises:
            InvalidSpec: a column, method or dose is missing, or there are several doses and none is given.
        """
        self.check(column)
        against = self.evaluation.plain if against is None else against
        doses = self.doses(against)
        at = doses[0] if dose is None and len(doses) == 1 else dose
        if at not in doses:
            raise InvalidSpec(f"{against!r} was evaluated at doses {doses}; give dose= one of them, not {dose}")
        means = self._numbers.means[column]
        return corrected(
            [
                Comparison(
                    column, line, own, against, at, self._difference(column, means[line, own], means[against, at])
                )
                for line, own in self._numbers.lines
                if (line, own) != (against, at) and not self._numbers.control_of(line)
            ]
        )

    def matched(self, *, by: str = COST, at: float | None = None) -> list[Matched]:
        """Return means of each method at equal cost, interpolated linearly between doses, question by question.

        The dose is the first from no steering on, in order of strength, that has the cost. For a method that never
        reaches it, the means are those at its most costly dose, marked "never"; those without doses stay as they are.

        Args:
            by: measure or task of the cost; the perplexity of neutral prose by default.
            at: value of the column `by`, in its unit; by default that of `reached_by_all`.

        Raises:
            InvalidSpec: the column `by` was not measured or cannot have the value `at`; or as for `reached_by_all`.
        """
        self.check(by)
        at = self.reached_by_all(by) if at is None else at
        return [self._matched(line, self._numbers.place(line, by, at)) for line in self._numbers.methods]

    def reached_by_all(self, by: str = COST) -> float:
        """Return the highest cost that every method with doses reaches at one of them, controls aside.

        Methods that never cost more than no steering are ignored: with these, all would be compared at dose 0.

        Args:
            by: measure or task of the cost. Of a task whose more is better, such as accuracy, less costs more.

        Raises:
            InvalidSpec: no method has doses and costs more than no steering, or the column was not measured.
        """
        self.check(by)
        most = []
        for line in self._numbers.methods:
            if self._numbers.has_doses(line) and not self._numbers.control_of(line):
                costs = [cost for dose, cost in self._numbers.costs(line, by).items() if dose]
                most += [max(costs)] if costs and max(costs) > self._numbers.plain_cost(by) else []
        if not most:
            worse = "above" if self._numbers.less_better(by) else "below"
            raise InvalidSpec(
                f"no method has doses at which its {by} is {worse} that of no steering; say where to compare: at="
            )
        return self._numbers.value_at(min(most), by)

    def compare_matched(
        self, column: str, *, against: str, by: str = COST, at: float | None = None
    ) -> list[Comparison]:
        """Compare every method with `against` at equal cost, on the same questions, p adjusted for all comparisons.

        Controls are compared too. Methods that never reach the cost are left out, and those without doses: see
        `matched`. `against` itself may be without doses.

        Args:
            column: a measure or task.
            against: name of the method to compare with.
            by, at: arguments as for `matched`.

        Raises:
            InvalidSpec: a column or method is missing, or `against` never reaches the cost.
        """
        self.check(column, by)
        self.doses(against)
        at = self.reached_by_all(by) if at is None else at
        places = {line: self._numbers.place(line, by, at) for line in self._numbers.methods}
        if self._numbers.has_doses(against) and not places[against].reached:
            raise InvalidSpec(f"{against!r} never reaches {by}={at:.4g}; give an at= that costs less, or more doses")
        theirs = places[against].between(self._numbers.along(against, column))
        return corrected(
            [
                Comparison(
                    column,
                    line,
                    place.dose,
                    against,
                    places[against].dose,
                    self._difference(column, place.between(self._numbers.along(line, column)), theirs),
                )
                for line, place in places.items()
                if line != against and place.reached and self._numbers.has_doses(line)
            ]
        )

    def drift(self, column: str) -> list[Drift]:
        """Return every method's mean at each turn of the conversations, and its slope over turns, for each dose.

        Args:
            column: label of a measure.

        Raises:
            InvalidSpec: the measure was not taken, or the questions have only one turn.
        """
        if column not in self.values or self.evaluation.turns < 2:
            raise InvalidSpec(
                f"the drift of {column!r}: give one of the measures {list(self.values)}, and questions of several turns"
            )
        log, found = self._numbers[column].log, []
        turns = [self._numbers.by_question(column, turn) for turn in range(self.evaluation.turns)]
        for line, dose in self._numbers.lines:
            rows = np.stack([turn[line, dose] for turn in turns], axis=1)
            by_turn = [estimate(means, log=log) for means in rows.T]
            found.append(Drift(line, dose, by_turn, estimate(slope(rows), log=log)))
        return found

    def markdown(self) -> str:
        """Return the summary as a Markdown table."""
        return tables.markdown(self.summary(), self.columns)

    def save_summary(self, to: str | Path) -> Path:
        """Write the summary, `.md` as Markdown or `.parquet` with a row per method, dose and column; return the path.

        Raises:
            InvalidFile: the file has another suffix.
        """
        return tables.save(self.summary(), self.columns, Path(to))

    def plot(self, to: str | Path, *, columns: Sequence[str] | None = None, by: str = COST) -> Path:
        """Draw methods' effects by cost, and return `to`; see `steercap.lab.studies.evaluation.plots.plot_methods`."""
        return plot_methods(self, to, columns=columns, by=by)

    def check(self, *columns: str) -> None:
        """Check that measures or tasks were taken.

        Raises:
            InvalidSpec: one was not taken.
        """
        for column in columns:
            _ = self._numbers[column]

    def is_log(self, column: str) -> bool:
        """Return True if a column's values are factors, which have geometric means and logarithmic axes."""
        return self._numbers[column].log

    def axis(self, column: str) -> str:
        """Return the axis label of a column, or its own label."""
        return self._numbers[column].axis or column

    @cached_property
    def _numbers(self) -> Columns:
        return Columns(self.evaluation, self.answers, self.values, self.readings, self.measures, self.tasks)

    def _estimate(self, column: str, means: Floats) -> Estimate:
        return estimate(means, log=self._numbers[column].log)

    def _difference(self, column: str, ours: Floats, theirs: Floats) -> Difference:
        return difference(ours, theirs, log=self._numbers[column].log)

    def _matched(self, line: str, place: Place) -> Matched:
        numbers = self._numbers
        how = "as it is" if not numbers.has_doses(line) else "interpolated" if place.reached else "never"
        means = {one: self._estimate(one, place.between(numbers.along(line, one))) for one in self.columns}
        return Matched(line, numbers.control_of(line), how, place.dose, means)
