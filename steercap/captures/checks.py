"""Checks of fetched rows against the rows that the request must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from steercap.captures.rows import Rows
from steercap.core.messages import CapturedRows
from steercap.core.plan import Plan
from steercap.core.receipt import Receipt, SteeringReceipt, check_labels, check_points
from steercap.core.rows import Ints, rows_selected
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.errors import CaptureIncomplete, CaptureNotFinite
from steercap.kernels.codecs.coded import CodedRows

if TYPE_CHECKING:
    from steercap.engine.fetching import Delivery


@dataclass(frozen=True)
class Expected:
    """Rows that a fetch of one request must return, with their labels.

    Args:
        name: name of the request, for messages.
        plan: plan of the request.
        points: points of the plan, layer by layer.
        tokens: prompt and generated token ids, the last sampled one included.
        first: number of rows that were fetched before.
        steering: receipt of the edits, if they were checked.
        constants: tensors that the codec needs besides the delivered ones, by point; see `CodedRows`.
        read: schema of the features that an SAE reads from the rows, by point.
        verified: see `Receipt`.
    """

    name: str
    plan: Plan
    points: tuple[Point, ...]
    tokens: tuple[int, ...]
    first: int = 0
    steering: SteeringReceipt | None = None
    constants: Mapping[Point, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    read: Mapping[Point, PointSchema] = field(default_factory=dict)
    verified: bool | None = None

    @property
    def rows(self) -> int:
        """Number of selected rows that were not fetched before; a reduction makes one of them."""
        capture = self.plan.capture
        assert capture is not None
        return len(rows_selected(capture.ranges, self.plan.limit, len(self.tokens) - 1)) - self.first


def received(expected: Expected, delivery: Delivery, armed: Sequence[Point]) -> tuple[dict[Point, Rows], Receipt]:
    """Check fetched rows against the expected ones; return the rows and their receipt.

    Returns:
        Rows by point, layer by layer, as a tuple of shards if split over ranks and not gathered; and the receipt.

    Raises:
        CaptureIncomplete: a worker failed, a row or a point is missing, or a label differs.
        CaptureNotFinite: a row holds NaN or infinity, and the plan does not allow it.
    """
    if delivery.failure:
        raise CaptureIncomplete(f"{expected.name}: {delivery.failure}")
    capture = expected.plan.capture
    assert capture is not None
    known = check_labelled(expected, delivery.shares)
    writes = sum(captured_rows.writes for captured_rows in delivery.shares)
    shards = {
        armed[index]: tuple(_completed(rows, expected, armed[index]) for rows in found)
        for index, found in delivery.shards.items()
    }
    check_points(expected.name, expected.points, list(shards))
    if not capture.allow_nonfinite:
        check_finite(expected, delivery, shards, armed)
    token_ids = np.asarray(expected.tokens, dtype=np.int64)[known]
    receipt = Receipt(expected.points, known, token_ids, writes, capture.reduce, expected.steering, expected.verified)
    rows: dict[Point, Rows] = {}
    for point in expected.points:
        whole = capture.gather or len(shards[point]) == 1
        rows[point] = delivery.joined(shards[point]) if whole else shards[point]
    return rows, receipt


def _all_finite(numbers: torch.Tensor) -> bool:
    """Return whether all elements are finite; by NumPy where possible, since torch releases the GIL on each call."""
    if numbers.dtype is torch.float32 and numbers.device.type == "cpu":
        return bool(np.isfinite(numbers.numpy(force=True)).all())
    return bool(numbers.isfinite().all())


def _completed(rows: torch.Tensor | CodedRows, expected: Expected, point: Point) -> torch.Tensor | CodedRows:
    """Return rows of a point with the codec constants and the schema that only the client knows."""
    if not isinstance(rows, CodedRows):
        return rows
    constants, schema = expected.constants.get(point), expected.read.get(point)
    if not constants and schema is None:  # nothing, as a rule, and there are many points
        return rows
    return replace(rows, constants=constants or rows.constants, schema=schema or rows.schema)


def parts_of(expected: Expected, rows: int) -> list[Expected]:
    """Split the expected rows into consecutive parts of at most `rows` rows each, one part at least."""
    capture = expected.plan.capture
    assert capture is not None
    known = rows_selected(capture.ranges, expected.plan.limit, len(expected.tokens) - 1)
    firsts = range(expected.first, max(len(known), expected.first + 1), rows)
    stops = [int(known[first - 1]) + 2 for first in firsts[1:]]
    tokens = [*(expected.tokens[:stop] for stop in stops), expected.tokens]
    return [replace(expected, first=first, tokens=own) for first, own in zip(firsts, tokens, strict=True)]


def check_labelled(expected: Expected, shares: Sequence[CapturedRows]) -> Ints:
    """Check the request, encoding and labels of each worker's rows; return the rows' positions, int64 [rows].

    Raises:
        CaptureIncomplete: a row is missing, belongs to another request, position or token, or is in another encoding.
    """
    capture = expected.plan.capture
    assert capture is not None
    known = rows_selected(capture.ranges, expected.plan.limit, len(expected.tokens) - 1)[expected.first :]
    coding, stored = capture.sent, min(len(known), 1) if capture.reduce else len(known)
    for captured_rows in shares:
        if captured_rows.owner.key != expected.plan.key:
            raise CaptureIncomplete(f"{expected.name}: rows of another request came, {captured_rows.owner.key!r}")
        if captured_rows.points and (captured_rows.coding, captured_rows.stored_rows) != (coding, stored):
            raise CaptureIncomplete(
                f"{expected.name}: {captured_rows.stored_rows} rows came as {captured_rows.coding}; expected {stored} "
                f"as {coding}"
            )
        positions = np.frombuffer(captured_rows.positions, dtype=np.int64)
        token_ids = np.frombuffer(captured_rows.token_ids, dtype=np.int64)
        check_labels(expected.name, known, expected.tokens, positions, token_ids)
    return known


def check_finite(
    expected: Expected,
    delivery: Delivery,
    rows: Mapping[Point, Sequence[torch.Tensor | CodedRows]],
    armed: Sequence[Point],
) -> None:
    """Check that every captured row, and every number computed from rows, is finite.

    Raises:
        CaptureNotFinite: a row, or a number computed from rows, is not finite.
    """
    capture = expected.plan.capture
    assert capture is not None
    remedy = "CaptureSpec(..., allow_nonfinite=True) returns such rows"
    found = [captured_rows.nonfinite for captured_rows in delivery.shares if captured_rows.nonfinite]
    if found:
        position, point = min(found)
        if point >= len(armed):
            raise CaptureIncomplete(
                f"{expected.name}: a worker reported point number {point}; this engine has {len(armed)}"
            )
        raise CaptureNotFinite(
            f"{expected.name}: the row of position {position} at {armed[point]} holds NaN or infinity; {remedy}"
        )
    for at, values in rows.items():  # rows that are finite may have sums that are not
        for shard in values:
            numbers = shard.parts.get("scale", shard.parts.get("rest")) if isinstance(shard, CodedRows) else shard
            computed = isinstance(shard, CodedRows) or capture.reduce or capture.vectors
            if computed and numbers is not None and not _all_finite(numbers):
                raise CaptureNotFinite(f"{expected.name}: a number computed from rows at {at} overflows; {remedy}")
