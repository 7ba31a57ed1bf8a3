"""Runner of a sweep in one engine, which generates missing answers, then measures them; and results of a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from steercap.core.chat import texts_in
from steercap.core.display import brief, html_table, span
from steercap.core.extras import require
from steercap.core.protocols import Count, ProgressCallback
from steercap.core.spec import Point
from steercap.errors import InvalidSpec, InvalidVector, PointNotArmed
from steercap.files.folder import locked
from steercap.files.tables import save_table, table_of
from steercap.lab.measures import Measure
from steercap.lab.measures.statistics import cluster_means, clusters_of
from steercap.lab.studies import StudyFolder, check_same
from steercap.lab.studies.running import CONCURRENCY, ask, fill, measured, measures_of, steered
from steercap.lab.studies.sweeps.grid import SWEEP, Sweep, SweepCondition, SweepDefinition, SweepRequest
from steercap.lab.studies.sweeps.operations import OPERATIONS
from steercap.lab.studies.sweeps.summaries import Effect, Mean, Record, Summary, plot_doses
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    import pyarrow as pa

    from steercap.model import SteerModel


@dataclass(frozen=True, eq=False)
class SweepResults:
    """Answers of a sweep and their values by measure.

    Args:
        sweep: sweep that was run.
        records: every answer, in the order of the sweep.
        values: value of each answer, by label of the measure; NaN if it could not be measured.
        measures: the measures by label.
    """

    sweep: Sweep
    records: Sequence[Record]
    values: Mapping[str, Sequence[float]]
    measures: Mapping[str, Measure]

    __repr__ = brief

    @property
    def table(self) -> pa.Table:
        """Answers as a pyarrow Table, one row each, with their values in further columns."""
        return table_of(self.records, self.values)

    def save(self, path: str | Path) -> Path:
        """Write the table to one Parquet file, atomically; return its path.

        Raises:
            InvalidFile: the name has another extension than .parquet.
        """
        return save_table(path, self.table)

    def summary(self) -> list[Summary]:
        """Return the means of every measure under each condition, in the order of the sweep."""
        places: dict[SweepCondition, list[int]] = {}
        for place, record in enumerate(self.records):
            places.setdefault(record.condition, []).append(place)
        return [
            Summary(condition, len(at), {label: self._mean(label, at) for label in self.values})
            for condition, at in places.items()
        ]

    def effects(self, measure: str) -> list[Effect]:
        """Return the effect on one measure of every vector, operation, group of layers and scale, with its controls.

        Raises:
            InvalidSpec: the measure was not taken.
        """
        self.check(measure)
        places: dict[tuple[str, str, tuple[int, ...]], dict[SweepCondition, Mean]] = {}
        for one in self.summary():
            at = one.condition
            places.setdefault((at.vector, at.operation, at.layers), {})[at] = one.means[measure]
        plain = places.pop(("", "", ()))[SweepCondition(control="none")]
        found = []
        for alike in places.values():
            for condition, own in alike.items():
                if not condition.control:
                    negated = [
                        mean
                        for other, mean in alike.items()
                        if OPERATIONS[condition.operation].signed
                        and other.scale == -condition.scale
                        and other.control in {"", "negated"}
                    ]
                    random = tuple(
                        mean.value
                        for other, mean in alike.items()
                        if other.scale == condition.scale and other.control.startswith("random-")
                    )
                    found.append(Effect(condition, own, plain, negated[0] if negated else None, random))
        return found

    def _repr_html_(self) -> str:
        """Return an HTML table for a notebook: each vector at each scale and its negative, for every measure."""
        rows = [
            (
                measure,
                at.vector,
                at.operation,
                span(at.layers),
                at.scale,
                one.plain.value,
                one.steered.value,
                None if one.negated is None else one.negated.value,
                f"{min(one.random):.4g} to {max(one.random):.4g}" if one.random else None,
                one.outside,
            )
            for measure in self.values
            for one in self.effects(measure)
            for at in (one.condition,)
        ]
        known = f"{len(self.records):,} answers, {len(self.sweep.conditions()):,} conditions"
        places = ("measure", "vector", "operation", "layers", "scale")
        return html_table(f"Sweep: {known}", [*places, "plain", "steered", "negated", "random", "outside"], rows)

    def plot(self, path: str | Path, *, vector: str | None = None, measures: Sequence[str] | None = None) -> Path:
        """Draw measures by scale, and return `path`; see `steercap.lab.studies.sweeps.summaries.plot_doses`."""
        return plot_doses(self, path, vector=vector, measures=measures)

    def check(self, *measures: str) -> None:
        """Check that measures were taken.

        Raises:
            InvalidSpec: one was not taken.
        """
        if missing := [measure for measure in measures if measure not in self.values]:
            raise InvalidSpec(
                f"{missing} was not measured; measured: {list(self.values)}; run_sweep(..., measures=) adds it"
            )

    @cached_property
    def _clusters(self) -> list[int]:
        return clusters_of(self.sweep.prompts)

    def _mean(self, label: str, places: Sequence[int]) -> Mean:
        by_prompt: dict[int, list[float]] = {}
        for place in places:
            cluster = self._clusters[self.records[place].prompt_index]
            by_prompt.setdefault(cluster, []).append(self.values[label][place])
        return mean_of(list(by_prompt.values()), log=self.measures[label].log)


def mean_of(by_prompt: Sequence[Sequence[float]], *, log: bool = False) -> Mean:
    """Return mean and standard error over prompts; answers to one prompt are dependent, so prompts are the units.

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


async def run_sweep(
    model: SteerModel,
    sweep: Sweep,
    *,
    out: str | Path,
    measures: Sequence[str | Measure] = (),
    concurrency: int = CONCURRENCY,
    progress: ProgressCallback | None = None,
) -> SweepResults:
    """Generate answers to every prompt under every condition, and measure the answers.

    All requests run in one engine, each with its own steering, and share batches. An interrupted sweep is resumed by
    the same call, which makes only missing requests. A killed process loses at most two seconds of work.

    Args:
        model: an open model.
        sweep: sweep to run.
        out: folder for answers and values, created if needed.
        measures: names in `MEASURES`, or measure objects; a later call can add others.
        concurrency: maximum concurrent requests.
        progress: function called with a `Progress` whenever the work advances.

    Raises:
        MissingExtra: the extra "experiments" is not installed.
        RunDiffers: the folder has another sweep, or a sweep of another model: one with other weights, whatever its
            name.
        InvalidRequest: another call writes to the folder.
        InvalidSpec: several samples at `top_k` 1, which would all be the same text; of a new sweep.
        PointNotArmed, InvalidVector: the vectors do not fit the engine; raised before anything runs.
        The errors of `SteerModel.generate`; answers generated until then stay in the folder.
    """
    require("experiments")
    chosen = measures_of(measures, Record.__struct_fields__)
    _check(model, sweep)
    with locked(out):
        check_same(SWEEP, out, sweep)
        folder = open_folder(out, sweep.definition(model.identity()))
        await _answer(model, sweep, folder, concurrency, progress)
        records = [folder.answers.rows[request.number] for request in sweep.requests()]
        values = {
            measure.label: await measured(model, measure, records, folder.values(measure), progress)
            for measure in chosen
        }
        results = SweepResults(sweep, records, values, {measure.label: measure for measure in chosen})
        results.save(folder.path / "results.parquet")
        return results


def open_folder(path: str | Path, definition: SweepDefinition) -> StudyFolder[Record]:
    """Open the folder of a sweep, created if needed.

    Raises:
        RunDiffers: the folder has a sweep of another definition.
        InvalidFile: a file in the folder cannot be read.
    """
    if SWEEP.open(path, definition) is None:
        SWEEP.write(path, definition)
    return StudyFolder(path, Record)


def _check(model: SteerModel, sweep: Sweep) -> None:
    for name, vectors in sweep.vectors.items():
        for layer in sorted({layer for layers in sweep.groups for layer in layers}):
            point = Point(layer, vectors.site)
            if point in model.points and vectors.width != model.points[point].width:
                raise InvalidVector(
                    f"Sweep: {name!r} has width {vectors.width}; rows at {point} are {model.points[point]}"
                )
            if point not in model.points:
                raise PointNotArmed(
                    f"Sweep: {name!r} is for {vectors.site!r} of layer {layer}, which this engine has no tap at; "
                    "give SteerModel(..., sites=, layers=)"
                )


async def _answer(
    model: SteerModel,
    sweep: Sweep,
    folder: StudyFolder[Record],
    concurrency: int,
    progress: ProgressCallback | None,
) -> None:
    """Generate the answers to all requests that `folder` lacks, and add them to it."""
    kept, requests = folder.answers, list(sweep.requests())
    texts = [prompt if isinstance(prompt, str) else texts_in(prompt[-1]) for prompt in sweep.prompts]
    missing = [
        one
        for one in requests
        if one.number not in kept.rows or not kept.rows[one.number].answers(one, texts[one.prompt])
    ]
    folder.forget_values(one.number for one in missing)

    async def work(asked: tuple[SweepRequest, SteeringSpec | None], keep: Callable[[Record], None]) -> None:
        request, spec = asked
        keep(
            Record(
                number=request.number,
                **msgspec.structs.asdict(request.condition),
                prompt_index=request.prompt,
                sample=request.sample,
                prompt=texts[request.prompt],
                **await ask(model, sweep.prompts[request.prompt], sweep.sampling_of(request), spec),
            )
        )

    await fill(
        kept,
        steered(missing, sweep.spec),
        work,
        concurrency=concurrency,
        count=Count("answers", len(requests), len(requests) - len(missing), progress),
    )
