"""Tables of methods at their doses, with a column for each measure or task and its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from steercap.errors import InvalidFile
from steercap.files.base import write_whole
from steercap.files.tables import write_table
from steercap.lab.measures.statistics import Estimate
from steercap.lab.studies.evaluation.summaries import Comparison, Line, Matched


class Cell(msgspec.Struct, frozen=True):
    """Value of one method, dose and column, as stored in Parquet; see `Line` and `Estimate`."""

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
    """Format a Markdown table of methods at equal cost; those that never reach it, or have no doses, are marked.

    Args:
        lines: methods of an evaluation at equal cost.
        columns: columns to show, in this order.
    """
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
    """Format a Markdown table of differences with raw and adjusted p.

    Args:
        comparisons: comparisons that are considered together.
    """
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
    """Write the table to a file, atomically.

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


def interval(found: Estimate) -> str:
    """Format a mean with its interval, "" for no value."""
    if math.isnan(found.value):
        return ""
    if math.isnan(found.low):
        return _number(found.value)
    return f"{_number(found.value)} ({_number(found.low)} to {_number(found.high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _p(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2g}"


def _name(method: str, control_of: str) -> str:
    return f"*{method}*" if control_of else method


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
