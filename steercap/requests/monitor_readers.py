"""Computation of monitor scores from the captured rows or projections of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from steercap.captures.rows import Captures
from steercap.core.plan import Plan
from steercap.core.schema import RAW, Coding
from steercap.core.spec import CaptureSpec, Point
from steercap.core.tokens import Range, selected
from steercap.errors import InvalidSelection, InvalidSpec
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors
from steercap.steering.monitor import Monitor, labels_of

#: For each monitor: its point; the column of its projection there, None if rows are captured; and the factor by which
#: the projection is multiplied.
ReadAt: TypeAlias = Sequence[tuple[Point, int | None, float]]


@dataclass(frozen=True, eq=False)
class MonitorReader:
    """Monitor bound to the captured data from which its scores are computed.

    Args:
        monitor: the monitor.
        label: name of the monitor in reports.
        point: point of the rows that the monitor reads.
        ranges: positions that the monitor scores.
        column: column of the monitor's projection among those captured at the point; None if rows are captured.
        factor: factor from the captured projection to that on the probe: the ratio of the vectors' lengths.
    """

    monitor: Monitor
    label: str
    point: Point
    ranges: tuple[Range, ...]
    column: int | None
    factor: float = 1.0

    def scores(self, captures: Captures) -> torch.Tensor:
        """Return the score of each row: float64 [rows]."""
        rows = captures[self.point].double()
        if self.column is None:
            return rows.flatten(1) @ self.monitor.weights.double() + self.monitor.bias
        return rows[:, self.column] * self.factor + self.monitor.bias


def reader_for(
    spec: CaptureSpec, coding: Coding, points: Sequence[Point], monitors: Sequence[Monitor], places: Sequence[Point]
) -> ReadAt:
    """Return, for each monitor, the point, projection column and factor to read its scores from.

    Args:
        spec: the user's capture spec.
        coding: encoding of the captured rows.
        points: points that the spec captures.
        monitors: the monitors.
        places: the point of each monitor.

    Raises:
        InvalidSpec: the scores of a monitor cannot be computed from the capture.
    """
    found: list[tuple[Point, int | None, float]] = []
    for monitor, place in zip(monitors, places, strict=True):
        column = None if spec.project is None else _column(spec.project, place, monitor)
        raw = coding == RAW and spec.keeps_rows and spec.gather
        if place not in points or spec.before_edits or (column is None and not raw):
            raise InvalidSpec(
                f"{monitor} cannot be computed from {spec}: capture unchanged rows of {place}, or give project= the "
                "probe itself, or capture in a separate request"
            )
        found.append((place, column, monitor.length))
    return found


def _column(project: object, place: Point, monitor: Monitor) -> int | None:
    """Return the index of the projection direction that equals a monitor's probe; None if there is none."""
    directions = {"": project} if isinstance(project, LayerVectors) else project
    assert isinstance(directions, (dict, DirectionSet))
    units = [one.unit()[place.layer] if place.layer in one else None for one in directions.values()]
    same = [number for number, unit in enumerate(units) if unit is not None and torch.equal(unit, monitor.unit)]
    return same[0] if same else None


def monitor_readers_of(monitors: Sequence[Monitor], read_at: ReadAt, plan: Plan) -> list[MonitorReader]:
    """Bind monitors to the captured data of one request, whose number of tokens is known.

    Raises:
        InvalidSelection, EmptySelection: a monitor reads tokens that the request does not have or capture, or would
            stop the text at a token of the prompt.
    """
    capture = plan.capture
    assert capture is not None
    kept, found = selected(capture.ranges, plan.limit), []
    for monitor, label, (point, column, factor) in zip(monitors, labels_of(monitors), read_at, strict=True):
        ranges = monitor.selection.ranges(plan.prompt_len, plan.limit)
        wanted = selected(ranges, plan.limit)
        if (wanted & ~kept).any():
            raise InvalidSelection(
                f"{monitor} reads tokens={monitor.selection}, and the request captures rows of fewer tokens; capture "
                "these too"
            )
        if monitor.do == "stop" and wanted[: plan.prompt_len].any():
            raise InvalidSelection(
                f"{monitor} reads tokens={monitor.selection}, but do='stop' can end a text only at a generated token; "
                "give tokens='generated'"
            )
        found.append(MonitorReader(monitor, label, point, ranges, column, factor))
    return found
