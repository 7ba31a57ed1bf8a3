"""Runner of a sweep in one engine: every missing answer, then every missing value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from steercap.concurrency.bounded import each_of
from steercap.core.extras import require
from steercap.core.spec import Point
from steercap.core.values import shown
from steercap.errors import InvalidSpec, InvalidVector, PointNotArmed
from steercap.lab.measures import MEASURES
from steercap.lab.measures.base import Answered, Measure
from steercap.lab.studies.sweeps.grid import Request, Sweep
from steercap.lab.studies.sweeps.results import SweepResults
from steercap.lab.studies.sweeps.store import NUMBER, Folder, Record, Table, Value
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel

AnyAnswer = TypeVar("AnyAnswer", bound=Answered)

#: Concurrent requests: more than any batch of vLLM's defaults, few enough to hold in memory.
CONCURRENT: Final = 512
#: Answers measured at once, and then kept.
MEASURED: Final = 256


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
    chosen = measures_of(measures)
    _check(model, sweep)
    folder = Folder(out, sweep.definition(model.identity()))
    await _answer(model, sweep, folder.answers, concurrent, progress or (lambda _done, _all: None))
    records = [folder.answers.rows[request.number] for request in sweep.requests()]
    values = {measure.label: await measured(model, measure, records, folder.values(measure)) for measure in chosen}
    results = SweepResults(sweep, records, values, {measure.label: measure for measure in chosen})
    results.save(folder.path / "results.parquet")
    return results


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
    requests = list(sweep.requests())
    missing = [one for one in requests if one.number not in kept.rows or not kept.rows[one.number].answers(one)]

    async def ask(steered: tuple[Request, SteeringSpec | None]) -> None:
        kept.add([await _asked(model, sweep, *steered)])
        progress(len(kept.rows), len(requests))

    try:
        await each_of(_steered(sweep, missing), ask, concurrent)
    finally:
        kept.flush()
    kept.join()


def _steered(sweep: Sweep, requests: Iterable[Request]) -> Iterator[tuple[Request, SteeringSpec | None]]:
    """Yield requests with their steering, which those of one condition share."""
    for condition, alike in groupby(requests, lambda request: request.condition):
        spec = sweep.spec(condition)
        for request in alike:
            yield request, spec


async def _asked(model: SteerModel, sweep: Sweep, request: Request, spec: SteeringSpec | None) -> Record:
    """Request one answer, steered by its condition alone."""
    prompt, params = sweep.prompts[request.prompt], sweep.sampling_of(request)
    found = await model.run(prompt, params, steering=spec)
    output = found.output
    (sample,) = output.outputs
    condition = request.condition
    return Record(
        number=request.number,
        vector=condition.vector,
        operation=condition.operation,
        layers=condition.layers,
        scale=condition.scale,
        control=condition.control,
        prompt_index=request.prompt,
        sample=request.sample,
        prompt=prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")),
        prompt_token_ids=tuple(output.prompt_token_ids),
        text=sample.text,
        output_token_ids=tuple(sample.token_ids),
        finish_reason=sample.finish_reason or "",
    )


async def measured(
    model: SteerModel, measure: Measure, records: Sequence[AnyAnswer], kept: Table[Value]
) -> list[float]:
    """Return the value of each record, measuring and storing those that are missing.

    Args:
        model: model that gave the answers.
        measure: measure to apply.
        records: answers, with a field `number`.
        kept: table of stored values.

    Raises:
        The errors of the measure; what was measured until then is kept.
    """
    missing = [record for record in records if NUMBER(record) not in kept.rows]
    try:
        for first in range(0, len(missing), MEASURED):
            part = missing[first : first + MEASURED]
            values = await measure.measure(model, part)
            kept.add(Value(number=NUMBER(one), value=value) for one, value in zip(part, values, strict=True))
    finally:
        kept.flush()
    kept.join()
    return [kept.rows[NUMBER(record)].value for record in records]


def measures_of(
    given: Iterable[str | Measure], columns: Sequence[str] = Record.__struct_fields__
) -> tuple[Measure, ...]:
    """Resolve measures given by name or as objects.

    Args:
        given: names in `MEASURES`, or measures.
        columns: column names of the table of answers, which labels must not repeat.

    Raises:
        UnknownName: no measure has a name.
        InvalidSpec: an entry is not a measure, or needs arguments; two have one label; or a label is a column of every
            such table, as "text" is of a sweep's.
    """
    found: dict[str, Measure] = {}
    for one in given:
        measure = _named(one) if isinstance(one, str) else one
        if not isinstance(measure, Measure):
            raise InvalidSpec(f"{shown(one)} is not a measure; give a name from {list(MEASURES)}, or a Measure")
        if measure.label in columns:
            raise InvalidSpec(
                f"{measure!r} would be column {measure.label!r} of the table, which says something else; "
                f"name it otherwise than {', '.join(columns)}"
            )
        if measure.label in found:
            raise InvalidSpec(f"{measure!r} and {found[measure.label]!r} have the same label; leave one out")
        found[measure.label] = measure
    return tuple(found.values())


def _named(name: str) -> Measure:
    kind = MEASURES[name]
    missing = [key for key, one in inspect.signature(kind).parameters.items() if one.default is one.empty]
    if missing:
        example = ", ".join(f"{key}=..." for key in missing)
        raise InvalidSpec(f"measure {name!r} must be told its {' and '.join(missing)}; give {kind.__name__}({example})")
    measure: Measure = kind()
    return measure
