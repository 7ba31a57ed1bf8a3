"""How the scores of monitors are had of what a request keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from steercap.captures.rows import Captures
from steercap.core.coding import RAW, Coding
from steercap.core.plan import Plan
from steercap.core.spec import CaptureSpec, Point
from steercap.core.tokens import Range, selected
from steercap.errors import InvalidSelection, InvalidSpec
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors
from steercap.steering.monitor import Monitor, labels_of

#: Of each monitor, its point, and which of the products that are kept there is its own; None where rows are.
Gauged: TypeAlias = Sequence[tuple[Point, int | None]]


@dataclass(frozen=True, eq=False)
class Gauge:
    """A monitor, and how its scores are had of what a request keeps.

    Args:
        monitor: what is asked.
        label: what it is called.
        point: where its rows are.
        ranges: positions that it scores.
        column: which of the products that are kept at the point is its own; None where rows are.
    """

    monitor: Monitor
    label: str
    point: Point
    ranges: tuple[Range, ...]
    column: int | None

    def scores(self, captures: Captures) -> torch.Tensor:
        """Of each row: float64 [rows]."""
        rows = captures[self.point].double()
        if self.column is None:
            return rows.flatten(1) @ self.monitor.weights.double() + self.monitor.bias
        return rows[:, self.column] * self.monitor.length + self.monitor.bias


def gauged_by(
    spec: CaptureSpec, coding: Coding, points: Sequence[Point], monitors: Sequence[Monitor], places: Sequence[Point]
) -> Gauged:
    """How monitors read what a request keeps for its user.

    Args:
        spec: what it keeps.
        coding: how.
        points: where.
        monitors: what reads it.
        places: the point of each of them.

    Raises:
        InvalidSpec: the scores of a monitor cannot be had of it.
    """
    found: list[tuple[Point, int | None]] = []
    for monitor, place in zip(monitors, places, strict=True):
        column = None if spec.project is None else _column(spec.project, place, monitor)
        raw = coding == RAW and spec.keeps_rows and spec.gather
        if place not in points or spec.before_edits or (column is None and not raw):
            raise InvalidSpec(
                f"a request keeps rows once, and {monitor} cannot be read of {spec}: capture rows of {place} as they "
                "are, or project= on the probe itself, or leave the capture to a request of its own"
            )
        found.append((place, column))
    return found


def _column(project: object, place: Point, monitor: Monitor) -> int | None:
    """Which of the directions that rows are projected on is a monitor's probe; None if none is."""
    directions = {"": project} if isinstance(project, LayerVectors) else project
    assert isinstance(directions, (dict, DirectionSet))
    units = [one.unit()[place.layer] if place.layer in one else None for one in directions.values()]
    same = [number for number, unit in enumerate(units) if unit is not None and torch.equal(unit, monitor.unit)]
    return same[0] if same else None


def gauges_of(monitors: Sequence[Monitor], gauged: Gauged, plan: Plan) -> list[Gauge]:
    """Monitors of one request, whose tokens are known.

    Raises:
        InvalidSelection, EmptySelection: tokens that it does not have, that it does not keep, or at which a text cannot
            be stopped.
    """
    capture = plan.capture
    assert capture is not None
    kept, found = selected(capture.ranges, plan.limit), []
    for monitor, label, (point, column) in zip(monitors, labels_of(monitors), gauged, strict=True):
        ranges = monitor.selection.ranges(plan.prompt_len, plan.limit)
        wanted = selected(ranges, plan.limit)
        if (wanted & ~kept).any():
            raise InvalidSelection(
                f"{monitor} reads tokens={monitor.selection}, and the request keeps rows of fewer; capture these too"
            )
        if monitor.do == "stop" and wanted[: plan.prompt_len].any():
            raise InvalidSelection(
                f"{monitor} reads tokens={monitor.selection}, and a text ends at a generated token alone; give "
                "tokens='generated'"
            )
        found.append(Gauge(monitor, label, point, ranges, column))
    return found
