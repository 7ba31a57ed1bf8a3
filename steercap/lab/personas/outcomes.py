"""What became of each trait, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from steercap.lab.directions.suggestion import middle_of_best
from steercap.lab.personas.records import SIGNS, Records
from steercap.steering.directions import DirectionSet


@dataclass(frozen=True)
class Outcome:
    """One trait. Pairs are of answers under positive and under negative system prompts.

    A trait that was left out has no vector: its `best_layer`, `auc` and `relative_norm` are None.

    Args:
        responses: how many answers there are.
        unscored: how many the scorer could say nothing of.
        kept: how many are used.
        mean_scores: of all that have a score, 0 to 100; NaN where none has.
        best_layer: where the AUC is highest; among equals see `steercap.lab.directions.suggestion`.
        auc: there, on questions held out; 0.5 is chance. The layer was chosen on the same answers, so it flatters.
        held_out: how many answers it is from.
        relative_norm: length of the vector there, as a share of the rows' mean length.
        left_out: why no vector was made, "" where one was.
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
    """The outcome of each trait that has a direction, and of each that was left out, in the order of the answers.

    Args:
        directions: of the traits that have one.
        records: of the run.
        left_out: why the others have none, by name.
    """
    names = [
        name for name in dict.fromkeys(one.trait for one in records.responses) if {name} & {*directions, *left_out}
    ]
    return {name: _outcome(name, directions, records, left_out.get(name, "")) for name in names}


def relative_norms(directions: DirectionSet, name: str) -> dict[int, float]:
    """Length of a direction by layer, as a share of the mean length of its answers' mean rows there."""
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
