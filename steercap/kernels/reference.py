"""The tap in PyTorch, as it runs on CPU: edits of steered rows, and selection of captured rows.

`tests/support/formula.py` defines the result, one entry and row at a time; here an entry is computed for all rows at
once, and only the terms that some row needs. Shape legend: n = tokens of the pass, padding included; captured = tokens
whose rows are kept at this point; steered = tokens that are edited; entry = one edit of a point (`core.program.Entry`);
replaced = columns of the step's table of replacements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from jaxtyping import Bool, Float, Int

from steercap.core.program import HOLE
from steercap.kernels.bits import (
    JOINED,
    LEADS,
    MEASURES,
    READS,
    RELATIVE,
    REPLACES,
    RESTORES,
    edited_most,
    stray_rows,
)


@dataclass(frozen=True)
class TokenEntries:
    """The `n`-th entry of every slot at one point, expanded to one value per steered token, or one for all tokens.

    Fields whose terms would change nothing are None, since most operations need few terms of the formula.

    Args:
        kinds: bitwise or of all tokens' kinds (`kernels.bits`); terms of absent bits are not computed.
        write: bank row of the write vector w.
        read: bank row of the read vector u.
        used: True where the token's slot has such an entry; None if all have.
        scope: number of the bit, in the token's scope mask, that activates the entry; None if it is set for all tokens.
        replacement: column of the table of replacements.
        reads, relative, replaces, joined, measures, restores: True where the kind has this bit; None if it is so for
            all tokens.
        bias, gain, offset, minus, low, high, floor, threshold: parameters of the response function f, see
            `core.program.Response`.
    """

    kinds: int
    write: Int[torch.Tensor, " rows"]
    read: Int[torch.Tensor, " rows"]
    replacement: Int[torch.Tensor, " rows"]
    gain: Float[torch.Tensor, " rows"]
    offset: Float[torch.Tensor, " rows"]
    used: Bool[torch.Tensor, " rows"] | None = None
    scope: Int[torch.Tensor, " rows"] | None = None
    reads: Bool[torch.Tensor, " rows"] | None = None
    relative: Bool[torch.Tensor, " rows"] | None = None
    replaces: Bool[torch.Tensor, " rows"] | None = None
    joined: Bool[torch.Tensor, " rows"] | None = None
    measures: Bool[torch.Tensor, " rows"] | None = None
    restores: Bool[torch.Tensor, " rows"] | None = None
    bias: Float[torch.Tensor, " rows"] | None = None
    minus: Float[torch.Tensor, " rows"] | None = None
    low: Float[torch.Tensor, " rows"] | None = None
    high: Float[torch.Tensor, " rows"] | None = None
    floor: Float[torch.Tensor, " rows"] | None = None
    threshold: Float[torch.Tensor, " rows"] | None = None

    def active(self, masks: Int[torch.Tensor, " steered"]) -> Bool[torch.Tensor, " steered"] | None:
        """Return a mask of the tokens to which the entry applies, given their scope masks; None for all tokens."""
        if self.scope is None:
            return self.used
        inside = ((masks >> self.scope) & 1).bool()
        return inside if self.used is None else inside & self.used


def edit_rows(
    rows: Float[torch.Tensor, "steered width"],
    program: Sequence[TokenEntries],
    masks: Int[torch.Tensor, " steered"],
    replacements: Int[torch.Tensor, "steered replaced"],
    bank: Float[torch.Tensor, "vectors width"],
) -> Int[torch.Tensor, " steered"]:
    """Apply the entries of one point to float32 rows, in order and in place.

    Args:
        rows: float32 rows.
        program: the entries, in order.
        masks: scope mask of each token: bit `i` for scope `i`.
        replacements: bank row that each replacement puts in place of the token's row, -1 for none.
        bank: float32 vector bank.

    Returns:
        Number of entries applied to each row.
    """
    applied = torch.zeros_like(masks)
    norm = before = rows
    for column in program:
        active = column.active(masks)
        if column.kinds & MEASURES:
            norm = _norm(rows) if norm is rows else _where(column.measures, _norm(rows), norm)
        if column.kinds & LEADS:
            # A token in the middle of a joined edit keeps the row it started from.
            inside = column.joined if column.kinds & JOINED else None
            before = rows.clone() if before is rows or inside is None else torch.where(inside[:, None], before, rows)
        if column.kinds & REPLACES:
            source = replacements.gather(1, column.replacement.expand(len(rows))[:, None])[:, 0]
            put = source >= 0 if column.replaces is None else (source >= 0) & column.replaces
            active = put if column.replaces is None else _both(active, put | ~column.replaces)
            given = bank[source[put]]
            rows[put] = torch.where(given == HOLE, rows[put], given)
        length = _length(rows, before, column, bank)
        if active is not None:
            length = torch.where(active, length, 0.0)
        rows.addcmul_(length[:, None], bank[column.write])
        if column.kinds & RESTORES:
            now = _norm(rows)
            factor = torch.where(now > 0, norm / now, 1.0)
            rows *= _where(column.restores, factor, torch.ones_like(factor))[:, None]
        applied += 1 if active is None else active
    return applied


def _length(
    rows: Float[torch.Tensor, "steered width"],
    before: Float[torch.Tensor, "steered width"],
    column: TokenEntries,
    bank: Float[torch.Tensor, "vectors width"],
) -> Float[torch.Tensor, " #steered"]:
    """Compute the response f(u·h + b) of one entry for all rows, whether or not it applies to them."""
    length = column.offset
    if column.kinds & READS:
        read = rows
        if column.kinds & JOINED:
            read = before if column.joined is None else torch.where(column.joined[:, None], before, rows)
        projection = torch.linalg.vecdot(read, bank[column.read])
        projection = projection if column.bias is None else projection + column.bias
        projection = _where(column.reads, projection, torch.zeros_like(projection))
        reach = projection if column.floor is None else torch.maximum(projection, column.floor)
        length = torch.addcmul(column.offset, column.gain, reach)
        length = length if column.low is None else torch.maximum(length, column.low)
        length = length if column.high is None else torch.minimum(length, column.high)
        length = length if column.minus is None else length - column.minus * reach
        if column.threshold is not None:  # a projection that is NaN must remain visible
            length = torch.where((projection <= column.threshold) & (column.threshold > -inf), 0.0, length)
    if column.kinds & RELATIVE:
        length = _where(column.relative, length * _norm(rows), length)
    return length


def _where(
    chosen: Bool[torch.Tensor, " rows"] | None, then: torch.Tensor, otherwise: torch.Tensor
) -> Float[torch.Tensor, " ..."]:
    """Return `torch.where(chosen, then, otherwise)`; `then` if `chosen` is None, which means True everywhere."""
    return then if chosen is None else torch.where(chosen, then, otherwise)


def _both(
    first: Bool[torch.Tensor, " rows"] | None, second: Bool[torch.Tensor, " steered"]
) -> Bool[torch.Tensor, " steered"]:
    return second if first is None else first & second


def _norm(rows: Float[torch.Tensor, "steered width"]) -> Float[torch.Tensor, " steered"]:
    """Return Euclidean norms of rows without overflow of squares; NaN if an element is NaN or infinite."""
    greatest = rows.abs().amax(-1)
    unit = torch.where(greatest > 0, greatest, 1.0)
    norm: torch.Tensor = greatest * torch.linalg.vector_norm(rows / unit[:, None], dim=-1)
    return norm


def edit_stream(  # noqa: PLR0917 -- the tables of a tap
    hidden: Float[torch.Tensor, "n width"],
    residual: Float[torch.Tensor, "n width"] | None,
    tokens: Int[torch.Tensor, " steered"],
    program: Sequence[TokenEntries],
    masks: Int[torch.Tensor, " steered"],
    replacements: Int[torch.Tensor, "steered replaced"],
    bank: Float[torch.Tensor, "vectors width"],
) -> tuple[Int[torch.Tensor, " steered"], Bool[torch.Tensor, " steered"] | None]:
    """Edit the rows `hidden + residual` of the token indices `tokens` in place; other arguments as of `edit_rows`.

    A changed row is written to `hidden` whole, rounded once, and its `residual` is set to zero: adding a rounded
    difference to `hidden` could not cancel a large `residual`. Other rows stay bit-identical. A row that is not finite,
    or exceeds `edited_most`, is set to zero, edited or not, so that nothing is computed from it.

    Returns:
        Number of entries applied to each row; and a mask of the rows that were set to zero, None for none.
    """
    rows = hidden.index_select(0, tokens).float()
    if residual is not None:
        rows += residual.index_select(0, tokens)
    original = rows.clone()
    applied = edit_rows(rows, program, masks, replacements, bank)
    stray = stray_rows(rows, edited_most(hidden.dtype))
    if stray is not None:
        rows[stray] = 0
    changed = (rows != original).any(-1)
    if not changed.all():
        rows, tokens = rows[changed], tokens[changed]
    hidden.index_copy_(0, tokens, rows.to(hidden.dtype))
    if residual is not None:
        residual.index_fill_(0, tokens, 0)
    return applied, stray


def rows_at(
    hidden: Float[torch.Tensor, "n width"],
    residual: Float[torch.Tensor, "n width"] | None,
    tokens: Int[torch.Tensor, " captured"],
) -> Float[torch.Tensor, "captured width"]:
    """Return the rows `hidden + residual` of the tokens with indices `tokens`, in the model's dtype; may be a view."""
    if len(tokens) == len(hidden):  # all of them, in their order
        return hidden if residual is None else hidden + residual
    if len(tokens) == 1:
        token = int(tokens)
        row = hidden[token : token + 1]
        return row if residual is None else row + residual[token : token + 1]
    rows = hidden.index_select(0, tokens)
    if residual is not None:
        rows += residual.index_select(0, tokens)
    return rows


def add_norm(
    hidden: Float[torch.Tensor, "n width"],
    residual: Float[torch.Tensor, "n width"],
    weight: Float[torch.Tensor, " width"],
    epsilon: float,
) -> None:
    """Write `hidden + residual` to `residual`, and the RMSNorm of the sum, over the full width, to `hidden`.

    As in vLLM's `RMSNorm` compiled by inductor, both are computed in float32 and each is rounded once. PyTorch alone
    would round the norm a second time, before it is multiplied by the weights.
    """
    row = hidden.float() + residual.float()
    residual.copy_(row)
    hidden.copy_(row * torch.rsqrt(row.square().mean(-1, keepdim=True) + epsilon) * weight.float())
