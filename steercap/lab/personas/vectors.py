"""Stage "vectors": directions from the rows of kept answers, tested on held-out questions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from steercap.lab.directions import Contrast
from steercap.lab.directions.contrast import directions_of
from steercap.lab.directions.extraction import digest_of, labelled
from steercap.lab.personas.capture import load_rows, rows_file
from steercap.lab.personas.folder import StageFolder
from steercap.lab.personas.progress import Count, Report
from steercap.lab.personas.records import SIGNS, Kept, Records, Sign
from steercap.lab.personas.settings import PersonaSettings
from steercap.steering.directions import DirectionSet

if TYPE_CHECKING:
    from steercap.model import SteerModel


def vectors(
    model: SteerModel, settings: PersonaSettings, folder: StageFolder, records: Records, report: Report | None
) -> DirectionSet:
    """Return the directions of all traits that have kept answers, with their provenance.

    Groups are questions, so `provenance.auc` is computed on answers to held-out questions.

    Raises:
        InvalidSpec: too few questions have answers of both kinds.
        InvalidFile: rows cannot be read.
    """
    path, names = folder.path / "directions.safetensors", list(dict.fromkeys(one.trait for one in records.kept))
    if folder.is_done("vectors"):
        Count("vectors", len(names), len(names), report)
        return DirectionSet.load(path)
    folder.begin("vectors")
    count, found = Count("vectors", len(names), 0, report), []
    for name in names:
        found.append(_one(model, settings, folder, {sign: records.kept_of(name, sign) for sign in SIGNS}))
        count.add()
    directions = functools.reduce(operator.or_, found)
    directions.save(path)
    folder.finish("vectors")
    return directions


def _one(
    model: SteerModel, settings: PersonaSettings, folder: StageFolder, mine: Mapping[Sign, Sequence[Kept]]
) -> DirectionSet:
    name = mine["positive"][0].trait
    header, rows = load_rows(rows_file(folder, name))
    places = {one: place for place, one in enumerate(header.ids)}
    used = {sign: rows[[places[one.id] for one in mine[sign]]] for sign in SIGNS}
    groups = {sign: [one.question for one in mine[sign]] for sign in SIGNS}
    contrast = Contrast(used["positive"], used["negative"], groups["positive"], groups["negative"])
    found = directions_of(
        name,
        contrast,
        header.layers,
        method=settings.method,
        site=settings.site,
        held_out=settings.held_out,
        seed=settings.seed,
    )
    digests = [bytes.fromhex(header.prompts[places[one.id]]) for sign in SIGNS for one in mine[sign]]
    return labelled(found, model, prompts={name: digest_of(digests)}, tokens="response", reduce="mean")
