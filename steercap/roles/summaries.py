"""What a condition changes in answers, in numbers with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from steercap.errors import InvalidSpec
from steercap.roles.bootstrap import interval
from steercap.roles.effects import PLAIN, CapRecord

#: Least score of an answer that is said to be in its role.
IN_ROLE: Final = 50.0


class Change(msgspec.Struct, frozen=True):
    """What a condition changes in the mean of a number.

    Args:
        kind: of the cases.
        condition: what is compared with "plain".
        measure: "projection" (as the model went on), "projection read", "in role" (share of the answers), "tokens" or
            "perplexity", whose mean is the geometric one and whose change is a factor.
        before, after: means under "plain" and under the condition.
        change: after less before, of perplexity after over before.
        low, high: the bootstrap's 95 % interval of the change, over questions.
        count: pairs of answers.
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
    """What each condition changes in the means of all numbers, by the kind of the cases.

    Answers are paired: both of a pair are to one case, with one seed. A pair counts where both have the number.

    Args:
        records: as `compare_steering` gives them.
        layer: of the projections.
        in_role: least score of an answer that is in its role.
        seed: of the bootstrap.

    Raises:
        InvalidSpec: a layer at which nothing was projected, or answers without a counterpart under "plain".
    """
    if not records or any(layer not in record.projection for record in records):
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
    """How each number is read of a record, and whether it is a factor."""
    return {
        "projection": (lambda record: record.projection[layer], False),
        "projection read": (lambda record: record.read[layer], False),
        "in role": (lambda record: math.nan if record.score is None else float(record.score >= in_role), False),
        "tokens": (lambda record: float(record.tokens), False),
        "perplexity": (lambda record: math.log(record.perplexity), True),
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
    """None where no pair has the number."""
    values = [(before.case.question, read(before), read(after)) for before, after in pairs]
    known = [(question, one, other) for question, one, other in values if not math.isnan(one + other)]
    if not known:
        return None
    questions, before, after = ([row[column] for row in known] for column in range(3))
    change = [two - one for one, two in zip(before, after, strict=True)]
    low, high = interval(change, questions, seed=seed)
    shown = math.exp if factor else float
    means = [sum(part) / len(known) for part in (before, after, change)]
    first, later, moved = (shown(mean) for mean in means)
    return Change(kind, condition, measure, first, later, moved, shown(low), shown(high), len(known))
