"""Summaries of an evaluation: table lines, comparisons, methods at equal cost, and course over turns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from steercap.lab.measures.statistics import Difference, Estimate, benjamini_hochberg, holm


class Line(msgspec.Struct, frozen=True):
    """Method at a dose, with its means in every column.

    Args:
        method: name of the method, or its pooled name.
        dose: factor on its steering; 1 for a method without steering.
        control_of: name of the method that it is a control of, or "".
        means: means by measure, over questions, and by task, over its items.
    """

    method: str
    dose: float
    control_of: str
    means: dict[str, Estimate]


class Comparison(msgspec.Struct, frozen=True):
    """Comparison of one method with another on the same questions.

    Args:
        column: measure or task.
        method, dose: method and dose, which may be interpolated.
        against, against_dose: method and dose it is compared with.
        difference: difference of the first minus the second.
        holm: p adjusted for all comparisons of its list, controlling the probability of any false one below a level;
            see `steercap.lab.measures.statistics.holm`.
        bh: p adjusted to control the share of false ones.
    """

    column: str
    method: str
    dose: float
    against: str
    against_dose: float
    difference: Difference
    holm: float = math.nan
    bh: float = math.nan


class Matched(msgspec.Struct, frozen=True):
    """Method at a cost equal to that of the others.

    Args:
        method, control_of: fields as for `Line`.
        how: "interpolated" between two doses, or dose 0 and the least; "as it is", for a method without doses; "never",
            if no dose reaches the cost: then it is at its most costly dose.
        dose: dose of the method there.
        means: means by column, at that dose. Intervals do not include the uncertainty of the dose.
    """

    method: str
    control_of: str
    how: str
    dose: float
    means: dict[str, Estimate]


class Drift(msgspec.Struct, frozen=True):
    """Course of a method over the turns of a conversation.

    Args:
        method, dose: fields as for `Line`.
        turns: mean at each turn, over the questions that have one.
        slope: change per turn, the mean of the questions' least-squares slopes; for a factor, the factor.
    """

    method: str
    dose: float
    turns: list[Estimate]
    slope: Estimate


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with p adjusted for all of them, such as those of all traits together.

    Args:
        comparisons: comparisons that are considered together.
    """
    p = [one.difference.p for one in comparisons]
    return [
        msgspec.structs.replace(one, holm=float(held), bh=float(found))
        for one, held, found in zip(comparisons, holm(p), benjamini_hochberg(p), strict=True)
    ]
