"""Pipeline from traits to vectors and a report, in one call; and the vectors by level of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from steercap.core.display import brief
from steercap.core.extras import require
from steercap.core.protocols import Count, ProgressCallback
from steercap.core.spec import CaptureSpec
from steercap.errors import InvalidSpec, RunUnfinished
from steercap.files.base import read_tensors_at
from steercap.files.folder import locked
from steercap.files.tables import read_table, write_table
from steercap.lab.personas.capture import AnswerRowsHeader, capture, read_rows, room_of, vectors
from steercap.lab.personas.folder import RUN, open_folder
from steercap.lab.personas.generate import generate
from steercap.lab.personas.levels import LevelMeans, LevelPlan, plan_levels
from steercap.lab.personas.records import Records, Response, RunSettings, Score
from steercap.lab.personas.report import Outcome, outcomes, write_report
from steercap.lab.personas.score import keep, score
from steercap.lab.personas.settings import PersonaSettings, trait_hashes
from steercap.steering.directions import DirectionSet
from steercap.steering.formats import save_levels
from steercap.steering.layers import LayerVectors

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Label of the answers of each sign.
_LABELS: Final = {"positive": "pos", "negative": "neg"}


@dataclass(frozen=True)
class PersonaResult:
    """Result of a run over traits.

    Args:
        directions: directions of all traits but those left out, with provenance: sources, and the AUC by layer on
            held-out questions.
        outcomes: outcome of each trait, in numbers, with the reason if it was left out.
        folder: folder of the run.
        report: path of the report, Markdown with pictures in the same folder.
    """

    directions: DirectionSet
    outcomes: Mapping[str, Outcome]
    folder: Path
    report: Path

    __repr__ = brief


async def run_persona(
    model: SteerModel, settings: PersonaSettings, out: str | Path, *, progress: ProgressCallback | None = None
) -> PersonaResult:
    """Compute persona vectors of traits from a model's answers.

    The model answers under contrasting system prompts; the answers are scored, filtered and read again by the model,
    and their mean rows are compared.

    Args:
        model: an open model, with taps at the site and layers of the settings, whose tokenizer has a chat template.
        settings: settings of the run.
        out: folder of the run. An interrupted run is resumed; a finished one is loaded. If only settings of later
            stages differ, these stages are repeated. Traits may be added, dropped and reordered: only missing answers
            are requested, and results of dropped traits stay in the tables.
        progress: function called with a `Progress` whenever the work advances.

    Source: Chen et al., Persona Vectors: Monitoring and Controlling Character Traits in Language Models.

    Raises:
        MissingExtra: the extra "personas" is not installed.
        RunDiffers: the folder has answers of another model or run; the message names the difference.
        InvalidFile: the folder is not that of a run over traits, or cannot be read.
        InvalidRequest: another call writes to the folder.
        InvalidSetting: several samples at temperature 0, which would all be the same text; of a new run.
        PointNotArmed, LayerOutOfRange: there is no tap at a point to read; raised before anything is generated.
        TooFewKept: for every trait, too few answers show it or its opposite.
        The errors of `SteerModel.run`, and of the scorer.
    """
    require("personas")
    check(model, settings)
    with locked(out):
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
    """Check that the model has taps at the layers and the site of a run.

    Raises:
        PointNotArmed, LayerOutOfRange: a point has no tap.
    """
    model.check_capture(CaptureSpec(layers=settings.layers, sites=settings.site))


@dataclass(frozen=True)
class WrittenLevels:
    """Files of levels; written by `write_levels`.

    Args:
        files: path of the file of each trait with a level.
        used: number of answers averaged in each level, by trait and level.
        left_out: number of answers or pairs left out, by trait, level and reason; for a trait that is not done with
            these settings, 1 at level "all".
    """

    files: Mapping[str, Path]
    used: Mapping[str, Mapping[str, int]]
    left_out: Mapping[str, Mapping[str, Mapping[str, int]]]

    __repr__ = brief


def write_levels(run: str | Path, out: str | Path, *, minimum: int | None = None) -> WrittenLevels:
    """Write the vectors by level of a finished run's traits, `NAME.pt` in one folder, without a model.

    Only kept answers have rows. A level is written if all its answers were kept, else it is absent: with the default
    thresholds there are `pos_neg_50` and `pos_70`; `pos_neg` needs threshold_high=0 and threshold_low=100. There are no
    default answers, so no `pos_default`. An older file of a trait without a level is removed. Rows are loaded one
    answer at a time.

    Args:
        run: folder of a run over traits, with rows at `resid_post` of all layers.
        out: folder to write the files to, created if needed.
        minimum: minimum number of pairs or answers of a level; see `plan_levels`.

    Raises:
        RunUnfinished: there is no trait whose answers are all scored and read.
        InvalidSpec: the rows are of another site or of some layers only.
        InvalidFile: the folder is not that of a run over traits, or is damaged.
    """
    run, definition = Path(run), RUN.read(run)
    settings, hashes = definition.settings, trait_hashes(definition.settings, definition.model)
    if settings["site"] != "resid_post":
        raise InvalidSpec(f"{run} has rows of {settings['site']}; files of levels are of resid_post")
    stages = ("generate", "score", "capture")
    ready = [
        name
        for name in settings["traits"]
        if all(definition.done.get(f"{stage}/{name}") == hashes[stage][name] for stage in stages)
    ]
    if not ready:
        raise RunUnfinished(f"{run}: none of {', '.join(settings['traits'])} is done with these settings; run it again")
    responses = read_table(run / "responses.parquet", Response)
    scores = {one.id: one.score for one in read_table(run / "scores.parquet", Score)}
    files, used = dict[str, Path](), dict[str, dict[str, int]]()
    left_out = {name: {"all": {"not done with these settings": 1}} for name in settings["traits"] if name not in ready}
    for name in ready:
        keys = {_key_of(one): one for one in responses if one.trait == name}
        plan, means = _level_means(run / "rows" / f"{name}.safetensors", keys, scores, minimum)
        if means:
            model = definition.model["name"]
            levels = {level: LayerVectors(dict(enumerate(rows)), model=model) for level, rows in means.items()}
            files[name] = save_levels(levels, Path(out) / f"{name}.pt")
        used[name] = {level: len(weights) for level, weights in plan.weights.items()}
        left_out[name] = {level: dict(reasons) for level, reasons in plan.left_out.items() if reasons}
    for name in settings["traits"].keys() - files.keys():
        (Path(out) / f"{name}.pt").unlink(missing_ok=True)  # of another run, or of other settings
    return WrittenLevels(files, used, left_out)


def _key_of(response: Response) -> str:
    """Return the key of an answer for `plan_levels`, "SAMPLE/pos_pP_qQ", with the sample in place of a file's name."""
    return f"{response.sample}/{_LABELS[response.sign]}_p{response.prompt}_q{response.question}"


def _level_means(
    path: Path, keys: Mapping[str, Response], scores: Mapping[str, float | None], minimum: int | None
) -> tuple[LevelPlan, dict[str, torch.Tensor]]:
    """Return the plan of the levels of one trait whose answers all have rows in `path`, and these levels by name."""
    header = read_rows(path, AnswerRowsHeader, tensors=False)[0] if path.exists() else AnswerRowsHeader(1, (), (), ())
    if list(header.layers) != list(range(len(header.layers))):
        raise InvalidSpec(f"{path} has rows of layers {list(header.layers)}; files of levels have all from 0 on")
    places = {name: place for place, name in enumerate(header.ids)}
    plan = plan_levels("trait", keys, {key: scores.get(one.id) for key, one in keys.items()}, minimum=minimum)
    whole, left_out = {}, dict(plan.left_out)
    for level, weights in plan.weights.items():
        if lacking := sum(keys[key].id not in places for key in weights):
            left_out[level] = {**left_out[level], "absent, as answers were not kept": lacking}
        else:
            whole[level] = weights
    plan = replace(plan, weights=whole, left_out=left_out)
    means = LevelMeans(plan)
    for key in sorted(plan.needed):
        means.add(key, read_tensors_at(path, "rows", places[keys[key].id]))
    return plan, means.means()
