"""The formula of the tap, one entry after the other on one row, in float64: what the kernels are held against.

`docs/mechanisms/edits.md` has it: `h <- h + f(u·h + b) w`. `testing.edits` knows operations instead, and nothing
of entries; together they say that an operation is lowered to the right entries, and an entry computed right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch

from steercap.core.program import HOLE, NONE, Entry, Response


def formula(
    row: torch.Tensor, entries: Sequence[Entry], scopes: int, blobs: Sequence[torch.Tensor], replaced: Sequence[int]
) -> torch.Tensor:
    """One row after the entries of its point.

    Args:
        row: [width], of any dtype.
        entries: of the point, in order.
        scopes: bit `i` says whether scope `i` holds the row's token.
        blobs: the vectors that entries name, [rows, width] each.
        replaced: of each replacement the row of its blob that it puts there, NONE for none.

    Returns:
        float64 [width].
    """
    h = start = row.double()
    for norm, neighbours in groupby(entries, key=lambda entry: entry.norm):
        before = h.norm()
        for entry in neighbours:
            start = start if entry.joined else h
            if entry.replacement != NONE:
                chosen = replaced[entry.replacement]
                given = h if chosen == NONE else blobs[entry.write][chosen].double()
                h = torch.where(given == HOLE, h, given)
            elif scopes >> entry.scope & 1:
                read = None if entry.read == NONE else blobs[entry.read][0].double() @ start
                h = h + _length(entry.response, read, h) * blobs[entry.write][0].double()
        if norm != NONE and h.any():
            h = h * before / h.norm()
    return h


def _length(f: Response, read: torch.Tensor | None, h: torch.Tensor) -> torch.Tensor:
    """f(u·h + b), see `Response`; of an entry that reads nothing, its offset."""
    length = torch.tensor(f.offset, dtype=torch.float64)
    if read is not None:
        p = read + f.bias
        q = p.clamp(min=f.floor)
        closed = p <= f.threshold and f.threshold > -math.inf
        length = torch.zeros_like(p) if closed else (f.gain * q + f.offset).clamp(f.low, f.high) - f.minus * q
    return length * h.norm() if f.relative else length
