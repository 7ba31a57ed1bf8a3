"""What the worker says it did, and the comparison with what must be.

Number 8 in the life of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steercap.core.rows import Ints
from steercap.core.spec import Point
from steercap.errors import CaptureIncomplete


@dataclass(frozen=True)
class Receipt:
    """Proof of a capture: what the workers recorded for one request.

    Args:
        points: points captured, layer by layer.
        positions: position of every row, int64 [rows].
        token_ids: id of the token the model read at each of them, int64 [rows].
        writes: how many rows were written, recomputed ones counted again.
        reduce: the reduction applied in the worker, or None.
    """

    points: tuple[Point, ...]
    positions: Ints
    token_ids: Ints
    writes: int
    reduce: str | None

    @property
    def rows(self) -> int:
        """Rows captured at each point, before any reduction."""
        return len(self.positions)


def check_labels(request: str, expected: Ints, tokens: Sequence[int], positions: Ints, token_ids: Ints) -> None:
    """Compare the labels of the rows with the sequence the client knows.

    Args:
        request: name of the request, for the message.
        expected: positions that must be there, int64 [rows].
        tokens: prompt and generated token ids.
        positions: positions the worker recorded, -1 where no row was written: int64 [rows].
        token_ids: token ids the worker recorded, int64 [rows].

    Raises:
        CaptureIncomplete: a row is missing, or belongs to another position or token.
    """
    if len(positions) != len(expected):
        raise CaptureIncomplete(f"{request}: {len(expected)} rows expected, the worker has {len(positions)}")
    missing = expected[positions != expected]
    if len(missing):
        raise CaptureIncomplete(
            f"{request}: {len(missing)} of {len(expected)} rows were never computed, the first at position {missing[0]}"
        )
    known = np.asarray(tokens, dtype=np.int64)[expected]
    wrong = np.flatnonzero(known != token_ids)
    if len(wrong):
        at = wrong[0]
        raise CaptureIncomplete(
            f"{request}: the row at position {expected[at]} was computed for token {token_ids[at]}, "
            f"but the sequence has token {known[at]} there; {len(wrong)} rows of {len(expected)} are wrong"
        )


def check_points(request: str, expected: Sequence[Point], captured: Sequence[Point]) -> None:
    """See that every point asked for came back.

    Raises:
        CaptureIncomplete: a point is missing.
    """
    missing = [str(point) for point in expected if point not in set(captured)]
    if missing:
        raise CaptureIncomplete(f"{request}: no worker captured {', '.join(missing)}")
