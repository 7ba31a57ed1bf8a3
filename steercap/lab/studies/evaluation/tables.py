"""Summaries and comparisons of methods in an evaluation, and their tables in Markdown and Parquet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from steercap.errors import InvalidFile
from steercap.files.base import write_whole
from steercap.files.tables import write_table
from steercap.lab.measures.statistics import Difference, Estimate, benjamini_hochberg, holm


class Line(msgspec.Struct, frozen=True):
    """Method at a dose, with its mean in every column.

    Args:
        method: name of the method, or the name under which several are pooled.
        dose: factor on the scale of the method's edits; 1 for a method without steering.
        control_of: name of the method that this one is a control of, or "".
        means: mean and interval by measure, over questions, and by task, over items.
    """

    method: str
    dose: float
    control_of: str
    means: dict[str, Estimate]


class Comparison(msgspec.Struct, frozen=True):
    """Comparison of one method with another on the same questions.

    Args:
        column: label of the measure or task.
        method, dose: first method and its dose, which may be interpolated.
        against, against_dose: second method and its dose.
        difference: first minus second, with interval and p.
        holm: p adjusted for all comparisons together to control the family-wise error rate; see
            `steercap.lab.measures.statistics.holm`. NaN before `corrected`.
        bh: p adjusted for all comparisons together to control the false discovery rate (Benjamini and Hochberg).
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
    """Method at the dose at which its cost equals a given one.

    Args:
        method, control_of: as in `Line`.
        how: "interpolated" between two doses, or no steering and the least dose; "as it is", for a method without
            doses; "never", if no dose reaches the cost and `dose` is the most costly one.
        dose: dose of the method at that cost.
        means: mean by column, at that dose. Intervals do not include the uncertainty of the dose.
    """

    method: str
    control_of: str
    how: str
    dose: float
    means: dict[str, Estimate]


class Drift(msgspec.Struct, frozen=True):
    """Mean of a measure at each turn of the conversations, under a method at a dose.

    Args:
        method, dose: as in `Line`.
        turns: mean at each turn, over the questions that have this turn.
        slope: change per turn, the mean of the questions' least-squares slopes; for a factor, the factor.
    """

    method: str
    dose: float
    turns: list[Estimate]
    slope: Estimate


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons in order, with `holm` and `bh`, p adjusted for all of them.

    Args:
        comparisons: comparisons that are considered together, such as those of all traits.
    """
    p = [one.difference.p for one in comparisons]
    return [
        msgspec.structs.replace(one, holm=float(held), bh=float(found))
        for one, held, found in zip(comparisons, holm(p), benjamini_hochberg(p), strict=True)
    ]


class Cell(msgspec.Struct, frozen=True):
    """Mean of one method, dose and column, a row of a Parquet table; fields as in `Line` and `Estimate`."""

    method: str
    dose: float
    control_of: str
    column: str
    value: float
    low: float
    high: float
    clusters: int


def markdown(lines: Sequence[Line], columns: Sequence[str]) -> str:
    """Format a Markdown table with a row for each method and dose.

    Args:
        lines: lines of an evaluation.
        columns: columns to show, in this order.
    """
    rows = [
        [_name(line.method, line.control_of), f"{line.dose:g}", *(interval(line.means[column]) for column in columns)]
        for line in lines
    ]
    return _table(["method", "dose", *columns], rows)


def matched_markdown(lines: Sequence[Matched], columns: Sequence[str]) -> str:
    """Format a Markdown table of methods at equal cost; `how` follows the dose unless it is "interpolated"."""
    rows = [
        [
            _name(line.method, line.control_of),
            f"{line.dose:.3g}" + ("" if line.how == "interpolated" else f" ({line.how})"),
            *(interval(line.means[column]) for column in columns),
        ]
        for line in lines
    ]
    return _table(["method", "dose", *columns], rows)


def compared_markdown(comparisons: Sequence[Comparison]) -> str:
    """Format a Markdown table of comparisons, a row each: difference with interval, raw and adjusted p."""
    rows = [
        [
            one.column,
            f"{one.method} at {one.dose:.3g}",
            f"{one.against} at {one.against_dose:.3g}",
            interval(Estimate(one.difference.value, one.difference.low, one.difference.high, one.difference.clusters)),
            *(_p(p) for p in (one.difference.p, one.holm, one.bh)),
        ]
        for one in comparisons
    ]
    return _table(["column", "method", "against", "difference", "p", "Holm", "BH"], rows)


def save(lines: Sequence[Line], columns: Sequence[str], to: Path) -> Path:
    """Write lines to a file, atomically, a row for each in .md, for each line and column in .parquet; return `to`.

    Raises:
        InvalidFile: the suffix is neither .md nor .parquet.
    """
    if to.suffix == ".md":
        with write_whole(to) as scratch:
            scratch.write_text(markdown(lines, columns) + "\n", encoding="utf-8")
        return to
    if to.suffix != ".parquet":
        raise InvalidFile(f"{to}: tables are written as .md or .parquet; name it so")
    return write_table(
        to,
        [
            Cell(line.method, line.dose, line.control_of, column, *msgspec.structs.astuple(line.means[column]))
            for line in lines
            for column in columns
        ],
    )


def interval(estimate: Estimate) -> str:
    """Format a mean with its interval, as "1.2 (0.9 to 1.5)"; "" if the mean is NaN."""
    if math.isnan(estimate.value):
        return ""
    if math.isnan(estimate.low):
        return _number(estimate.value)
    return f"{_number(estimate.value)} ({_number(estimate.low)} to {_number(estimate.high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _p(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2g}"


def _name(method: str, control_of: str) -> str:
    return f"*{method}*" if control_of else method


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
