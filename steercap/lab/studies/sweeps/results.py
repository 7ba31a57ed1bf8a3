"""Results of a sweep: answers with their values, means by condition, and effects beside their controls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steercap.errors import InvalidSpec
from steercap.files.tables import save_table, table_of
from steercap.lab.measures import Measure
from steercap.lab.measures.statistics import cluster_means
from steercap.lab.studies.sweeps.grid import Condition, Sweep
from steercap.lab.studies.sweeps.plots import plot_doses
from steercap.lab.studies.sweeps.summaries import Effect, Mean, Record, Summary

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, eq=False)
class SweepResults:
    """Answers of a sweep and their values.

    Args:
        sweep: sweep that was run.
        records: every answer, in the order of the sweep.
        values: value of each answer, by measure.
        measures: the measures by label.
    """

    sweep: Sweep
    records: Sequence[Record]
    values: Mapping[str, Sequence[float]]
    measures: Mapping[str, Measure]

    @property
    def table(self) -> pa.Table:
        """Answers as a pyarrow Table, one row each, with their values in further columns."""
        return table_of(self.records, self.values)

    def save(self, path: str | Path) -> Path:
        """Write the table to one Parquet file, atomically."""
        return save_table(path, self.table)

    def summary(self) -> list[Summary]:
        """Return means of every measure by condition, in the order of the sweep."""
        places: dict[Condition, list[int]] = {}
        for place, record in enumerate(self.records):
            places.setdefault(record.condition, []).append(place)
        return [
            Summary(condition, len(at), {label: self._mean(label, at) for label in self.values})
            for condition, at in places.items()
        ]

    def effects(self, measure: str) -> list[Effect]:
        """Return every vector at every scale, with its controls.

        Raises:
            InvalidSpec: the measure was not taken.
        """
        self.check(measure)
        places: dict[tuple[str, str, tuple[int, ...]], dict[Condition, Mean]] = {}
        for one in self.summary():
            at = one.condition
            places.setdefault((at.vector, at.operation, at.layers), {})[at] = one.means[measure]
        plain = places.pop(("", "", ()))[Condition(control="none")]
        found = []
        for alike in places.values():
            for condition, steered in alike.items():
                if not condition.control:
                    turned = [
                        mean
                        for other, mean in alike.items()
                        if other.scale == -condition.scale and other.control in {"", "reversed"}
                    ]
                    random = tuple(
                        mean.value
                        for other, mean in alike.items()
                        if other.scale == condition.scale and other.control.startswith("random-")
                    )
                    found.append(Effect(condition, steered, plain, turned[0] if turned else None, random))
        return found

    def plot(self, path: str | Path, *, vector: str | None = None, measures: Sequence[str] | None = None) -> Path:
        """Draw measures against scale; see `steercap.lab.studies.sweeps.plots.plot_doses`."""
        return plot_doses(self, path, vector=vector, measures=measures)

    def check(self, *measures: str) -> None:
        """Check that measures were taken.

        Raises:
            InvalidSpec: one was not taken.
        """
        if missing := [measure for measure in measures if measure not in self.values]:
            raise InvalidSpec(f"{missing} was not measured, but {list(self.values)}; run_sweep(..., measures=) adds it")

    def _mean(self, label: str, places: Sequence[int]) -> Mean:
        by_prompt: dict[int, list[float]] = {}
        for place in places:
            by_prompt.setdefault(self.records[place].prompt_index, []).append(self.values[label][place])
        return mean_of(list(by_prompt.values()), log=self.measures[label].log)


def mean_of(by_prompt: Sequence[Sequence[float]], *, log: bool = False) -> Mean:
    """Compute mean and standard error over prompts; answers to one prompt are dependent, so prompts are the units.

    Args:
        by_prompt: values of each prompt's answers, NaN for a missing one.
        log: True for the geometric mean.
    """
    counts = np.array([np.count_nonzero(~np.isnan(own)) for own in by_prompt])
    means = cluster_means(by_prompt, log=log)[counts > 0]
    if not len(means):
        return Mean(math.nan, math.nan, 0)
    error = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan
    middle = float(means.mean())
    return Mean(math.exp(middle) if log else middle, error, int(counts.sum()))
