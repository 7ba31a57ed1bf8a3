"""Runner of a sweep in one engine: every missing answer, then every missing value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from steercap.core.extras import require
from steercap.core.spec import Point
from steercap.errors import InvalidVector, PointNotArmed
from steercap.lab.measures import Measure
from steercap.lab.studies.running import CONCURRENT, ask, fill, measured, measures_of, steered
from steercap.lab.studies.store import StudyFolder, Table
from steercap.lab.studies.sweeps.grid import SWEEP, Definition, Request, Sweep
from steercap.lab.studies.sweeps.results import SweepResults
from steercap.lab.studies.sweeps.summaries import Record
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel


async def run_sweep(
    model: SteerModel,
    sweep: Sweep,
    *,
    out: str | Path,
    measures: Sequence[str | Measure] = (),
    concurrent: int = CONCURRENT,
    progress: Callable[[int, int], None] | None = None,
) -> SweepResults:
    """Have every prompt answered under every condition, and measure the answers.

    All requests run in one engine, each with its own steering, and share its batches. An interrupted sweep resumes: run
    it again and only missing requests are made. A killed process loses two seconds of work.

    Args:
        model: an open model.
        sweep: sweep to run.
        out: folder for answers and values, created if needed.
        measures: names in `MEASURES`, or measure objects; you can add others in a later call.
        concurrent: maximum concurrent requests.
        progress: function called with the number of answers so far, and of all answers.

    Raises:
        MissingExtra: the extra "experiments" is not installed.
        RunDiffers: the folder holds another sweep, or that of another model: other weights are another model, whatever
            their folder is called.
        PointNotArmed, InvalidVector: the vectors do not fit the engine; raised before anything runs.
        The errors of `SteerModel.generate`; what was answered until then is kept.
    """
    require("experiments")
    chosen = measures_of(measures, Record.__struct_fields__)
    _check(model, sweep)
    folder = open_folder(out, sweep.definition(model.identity()))
    await _answer(model, sweep, folder.answers, concurrent, progress or (lambda _done, _all: None))
    records = [folder.answers.rows[request.number] for request in sweep.requests()]
    values = {measure.label: await measured(model, measure, records, folder.values(measure)) for measure in chosen}
    results = SweepResults(sweep, records, values, {measure.label: measure for measure in chosen})
    results.save(folder.path / "results.parquet")
    return results


def open_folder(path: str | Path, definition: Definition) -> StudyFolder[Record]:
    """Open the folder of a sweep, created if needed.

    Raises:
        RunDiffers: the folder holds a sweep of another definition.
        InvalidFile: a file in it cannot be read.
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
    model: SteerModel, sweep: Sweep, kept: Table[Record], concurrent: int, progress: Callable[[int, int], None]
) -> None:
    """Have every missing request answered."""
    requests = list(sweep.requests())
    missing = [one for one in requests if one.number not in kept.rows or not kept.rows[one.number].answers(one)]

    async def work(asked: tuple[Request, SteeringSpec | None], keep: Callable[[Record], None]) -> None:
        request, spec = asked
        prompt = sweep.prompts[request.prompt]
        keep(
            Record(
                number=request.number,
                **msgspec.structs.asdict(request.condition),
                prompt_index=request.prompt,
                sample=request.sample,
                prompt=prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")),
                **await ask(model, prompt, sweep.sampling_of(request), spec),
            )
        )

    await fill(
        kept,
        steered(missing, sweep.spec),
        work,
        concurrent=concurrent,
        done=len(requests) - len(missing),
        wanted=len(requests),
        progress=progress,
    )
