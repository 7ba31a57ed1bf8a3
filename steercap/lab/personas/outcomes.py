"""Outcome of a run for each trait, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from steercap.lab.directions.suggestion import middle_of_best
from steercap.lab.personas.records import SIGNS, Records
from steercap.steering.directions import DirectionSet


@dataclass(frozen=True)
class Outcome:
    """Outcome of one trait. Pairs are for answers under positive and under negative system prompts.

    A trait that was left out has no vector: its `best_layer`, `auc` and `relative_norm` are None.

    Args:
        responses: number of answers.
        unscored: number of answers that the scorer could not score.
        kept: number of answers used.
        mean_scores: mean over all answers with a score, 0 to 100; NaN if none has one.
        best_layer: layer with the highest AUC; for ties see `steercap.lab.directions.suggestion`.
        auc: AUC at that layer on held-out questions; 0.5 is chance. It is optimistic, as the layer was chosen on the
            same answers.
        held_out: number of answers of the AUC.
        relative_norm: norm of the vector at that layer, as a share of the rows' mean norm.
        left_out: reason why there is no vector, "" if there is one.
    """

    responses: tuple[int, int]
    unscored: tuple[int, int]
    kept: tuple[int, int]
    mean_scores: tuple[float, float]
    best_layer: int | None = None
    auc: float | None = None
    held_out: tuple[int, int] = (0, 0)
    relative_norm: float | None = None
    left_out: str = ""


def outcomes(
    directions: DirectionSet, records: Records, left_out: Mapping[str, str] = MappingProxyType({})
) -> Mapping[str, Outcome]:
    """Return the outcome of each trait that has a direction or was left out, in the order of the answers.

    Args:
        directions: directions of the traits that have one.
        records: records of the run.
        left_out: reasons for the others, by name.
    """
    names = [
        name for name in dict.fromkeys(one.trait for one in records.responses) if {name} & {*directions, *left_out}
    ]
    return {name: _outcome(name, directions, records, left_out.get(name, "")) for name in names}


def relative_norms(directions: DirectionSet, name: str) -> dict[int, float]:
    """Return the norm of a direction by layer, as a share of the mean norm of its answers' mean rows there."""
    rows = directions.provenance.row_norms[name]
    return {layer: norm / rows[layer] for layer, norm in directions[name].norms().items()}


def _outcome(name: str, directions: DirectionSet, records: Records, left_out: str) -> Outcome:
    found = [records.of(name, sign) for sign in SIGNS]
    scored = [[value for _, value in mine if value is not None] for mine in found]
    used = [len(records.kept_of(name, sign)) for sign in SIGNS]
    means = [sum(mine) / len(mine) if mine else float("nan") for mine in scored]
    told = Outcome(
        responses=(len(found[0]), len(found[1])),
        unscored=(len(found[0]) - len(scored[0]), len(found[1]) - len(scored[1])),
        kept=(used[0], used[1]),
        mean_scores=(means[0], means[1]),
        left_out=left_out,
    )
    if left_out:
        return told
    auc = directions.provenance.auc[name]
    best = middle_of_best(auc)
    return replace(
        told,
        best_layer=best,
        auc=auc[best],
        held_out=directions.provenance.held_out[name],
        relative_norm=relative_norms(directions, name)[best],
    )
