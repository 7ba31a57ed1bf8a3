"""What an evaluation comes to: lines of a table, comparisons, methods at one cost, conversations turn by turn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from steercap.lab.measures.statistics import Difference, Estimate, benjamini_hochberg, holm


class Line(msgspec.Struct, frozen=True):
    """A method at a dose, in every column.

    Args:
        method: its name, or that which it is pooled under.
        dose: factor on its steering; of a method without any 1.
        control_of: the method that it is a control of, or "".
        means: by measure, over questions, and by task, over its items.
    """

    method: str
    dose: float
    control_of: str
    means: dict[str, Estimate]


class Comparison(msgspec.Struct, frozen=True):
    """One thing against another on the same questions.

    Args:
        column: the measure or task.
        method, dose: what is compared; where it was interpolated between doses, the dose between them.
        against, against_dose: with what.
        difference: by how much it is above.
        holm: p adjusted for all comparisons of the list that this came in, so that no false one is among those below a
            level; see `steercap.lab.measures.statistics.holm`.
        bh: the same for the share of false ones.
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
    """A method where it costs as much as the others.

    Args:
        method, control_of: as for `Line`.
        how: "interpolated" between two doses, or dose 0 and the least; "as it is", for what has no doses; "never", if
            no dose costs as much: then it is at the dose that costs most.
        dose: where that is.
        means: by column, at that dose. The dose is taken as given: the intervals are of the questions alone.
    """

    method: str
    control_of: str
    how: str
    dose: float
    means: dict[str, Estimate]


class Drift(msgspec.Struct, frozen=True):
    """A method in the course of a conversation.

    Args:
        method, dose: as for `Line`.
        turns: the mean at each turn, over the questions that have one.
        slope: how much it changes from turn to turn: mean of the questions' least-squares slopes; of a factor, the
            factor.
    """

    method: str
    dose: float
    turns: list[Estimate]
    slope: Estimate


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons, their p adjusted for all of them: give those of all traits together, say.

    Args:
        comparisons: that are looked at together.
    """
    p = [one.difference.p for one in comparisons]
    return [
        msgspec.structs.replace(one, holm=float(held), bh=float(found))
        for one, held, found in zip(comparisons, holm(p), benjamini_hochberg(p), strict=True)
    ]
