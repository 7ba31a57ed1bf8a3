"""Pipeline from traits to vectors and a report, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from steercap.core.extras import require
from steercap.core.spec import CaptureSpec
from steercap.files.tables import write_table
from steercap.lab.personas.capture import capture, room_of, vectors
from steercap.lab.personas.folder import Count, Report, open_folder
from steercap.lab.personas.generate import generate
from steercap.lab.personas.records import Records, RunSettings
from steercap.lab.personas.report import Outcome, outcomes, write_report
from steercap.lab.personas.score import keep, score
from steercap.lab.personas.settings import PersonaSettings
from steercap.steering.directions import DirectionSet

if TYPE_CHECKING:
    from steercap.model import SteerModel


@dataclass(frozen=True)
class PersonaResult:
    """Result of a run.

    Args:
        directions: directions of all traits but those left out, with their provenance: their sources, and the AUC by
            layer on questions held out.
        outcomes: outcome of each trait, in numbers; the reason, if it was left out.
        folder: folder of the run.
        report: the report, Markdown with pictures beside it.
    """

    directions: DirectionSet
    outcomes: Mapping[str, Outcome]
    folder: Path
    report: Path


async def run(
    model: SteerModel, settings: PersonaSettings, out: str | Path, *, progress: Report | None = None
) -> PersonaResult:
    """Compute persona vectors of traits.

    The model answers under contrasting system prompts; the answers are scored, filtered and read again, and their
    mean rows are compared.

    Args:
        model: an open model, with a tap at the site and layers wanted, whose tokenizer has a chat template.
        settings: settings of the run.
        out: the run's folder. An interrupted run resumes; a finished one is read. Where only later settings differ, the
            stages that depend on them are repeated. Traits may be added, dropped and reordered: only missing answers
            are requested, and the results of the others stay in the tables.
        progress: function called with a `Progress`.

    Source: Chen et al., Persona Vectors: Monitoring and Controlling Character Traits in Language Models.

    Raises:
        MissingExtra: the extra "personas" is not installed.
        RunDiffers: the folder holds answers of another model or run; the message names the difference.
        InvalidFile: the folder holds something else.
        PointNotArmed, LayerOutOfRange: there is no tap at a point to read; raised before anything is generated.
        TooFewKept: for every trait, too few answers show it or its opposite.
        The errors of `SteerModel.run`, and of the scorer.
    """
    require("personas")
    check(model, settings)
    folder = open_folder(out, model.identity(), settings)
    responses = await generate(model, settings, folder, progress)
    scores = await score(settings, folder, responses, progress)
    count = Count("filter", 1, 0, progress)
    (folder.path / "kept.parquet").unlink(missing_ok=True)  # of other thresholds, if too few are kept now
    room = room_of(model.tokenizer, model.max_model_len, settings, responses)
    kept, left_out = keep(settings, responses, scores, room)
    write_table(folder.path / "kept.parquet", kept)
    count.add()
    records = Records(responses, scores, kept)
    await capture(model, settings, folder, records, room=room, report=progress)
    directions = vectors(model, settings, folder, records, progress)
    count = Count("report", 1, 0, progress)
    found = outcomes(directions, records, left_out)
    report = write_report(folder.path, settings, directions, found, records)
    count.add()
    return PersonaResult(directions, found, folder.path, report)


def check(model: SteerModel, settings: RunSettings) -> None:
    """Check that rows can be read at the points of a run.

    Raises:
        PointNotArmed, LayerOutOfRange: a point has no tap.
    """
    model.check_capture(CaptureSpec(layers=settings.layers, sites=settings.site))
