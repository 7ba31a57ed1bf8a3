"""Changes in answers under a condition, in numbers with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from steercap.errors import InvalidSpec
from steercap.lab.measures.statistics import Estimate, cluster_means, estimate
from steercap.lab.personas.roles.effects import PLAIN, CapRecord

#: Minimum score of an answer that counts as in its role.
IN_ROLE: Final = 50.0


class Change(msgspec.Struct, frozen=True):
    """Change in the mean of a measure under a condition.

    Args:
        kind: kind of the cases.
        condition: condition compared with "plain".
        measure: "projection" (after the edits), "projection read", "in role" (share of the answers), "tokens" or
            "perplexity", whose mean is the geometric one and whose change is a factor.
        before, after: means under "plain" and under the condition; a question's answers count as one value, their mean.
        change: after minus before; for perplexity, after over before.
        low, high: bootstrap 95 % interval of the change, over questions; NaN for a single question. See
            `steercap.lab.measures.statistics.estimate`.
        count: number of pairs of answers.
    """

    kind: str
    condition: str
    measure: str
    before: float
    after: float
    change: float
    low: float
    high: float
    count: int


def changes(records: Sequence[CapRecord], layer: int, *, in_role: float = IN_ROLE, seed: int = 0) -> list[Change]:
    """Compute the change in the mean of every measure under each condition, by the kind of the cases.

    Answers are paired by case, with one seed. A pair counts if both have a value.

    Args:
        records: records, as returned by `compare_steering`.
        layer: layer of the projections.
        in_role: minimum score of an answer that counts as in its role.
        seed: seed of the bootstrap.

    Raises:
        InvalidSpec: there are no projections at the layer, or an answer has no counterpart under "plain".
    """
    if not records:
        raise InvalidSpec("records=[]; give the records of `compare_steering`")
    if any(layer not in record.projection for record in records):
        raise InvalidSpec(f"no projections at layer {layer}; there are those of {sorted(records[0].projection)}")
    plain = {record.case: record for record in records if record.condition == PLAIN}
    if lost := [record for record in records if record.case not in plain]:
        raise InvalidSpec(f"{len(lost)} answers have no counterpart under {PLAIN!r}, such as to {lost[0].case}")
    groups: dict[tuple[str, str], list[CapRecord]] = {}
    for record in records:
        if record.condition != PLAIN:
            groups.setdefault((record.case.kind, record.condition), []).append(record)
    return [
        change
        for (kind, condition), mine in groups.items()
        for measure, (read, factor) in _measures(layer, in_role).items()
        if (change := _change(kind, condition, measure, [(plain[one.case], one) for one in mine], read, factor, seed))
    ]


def _measures(layer: int, in_role: float) -> Mapping[str, tuple[Callable[[CapRecord], float], bool]]:
    """Return the function that reads each measure of a record, and True for measures whose change is a factor."""
    return {
        "projection": (lambda record: record.projection[layer], False),
        "projection read": (lambda record: record.read[layer], False),
        "in role": (lambda record: math.nan if record.score is None else float(record.score >= in_role), False),
        "tokens": (lambda record: float(record.tokens), False),
        "perplexity": (lambda record: record.perplexity, True),
    }


def _change(  # noqa: PLR0917 -- a column each
    kind: str,
    condition: str,
    measure: str,
    pairs: Sequence[tuple[CapRecord, CapRecord]],
    read: Callable[[CapRecord], float],
    factor: bool,
    seed: int,
) -> Change | None:
    """Return the change of one measure, or None if no pair has a value."""
    known: dict[int, list[tuple[float, float]]] = {}
    for before, after in pairs:
        pair = read(before), read(after)
        if not math.isnan(sum(pair)):
            known.setdefault(before.case.question, []).append(pair)
    if not known:
        return None

    def mean(number: Callable[[float, float], float]) -> Estimate:
        clusters = [[number(*pair) for pair in own] for own in known.values()]
        return estimate(cluster_means(clusters, log=factor), seed=seed, log=factor)

    first, later = mean(lambda one, _: one), mean(lambda _, other: other)
    moved = mean(lambda one, other: other / one if factor else other - one)
    count = sum(map(len, known.values()))
    return Change(kind, condition, measure, first.value, later.value, moved.value, moved.low, moved.high, count)
