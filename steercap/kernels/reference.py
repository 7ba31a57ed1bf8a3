"""The tap in plain PyTorch: what runs on CPU, and what other kernels are tested against.

Number 5 in the life of a request. Shape legend: n = tokens of the pass, padding included; captured = tokens
somebody wants at this point; lines = lines of the arena; steered = tokens that somebody edits; entries = rank-one edits
of one point, in order; replaced = columns of the step's table of replacements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int

#: What an entry is, as bits of its kind.
USED: Final = 1
READS: Final = 2
RELATIVE: Final = 4
REPLACES: Final = 8
JOINED: Final = 16
LEADS: Final = 32  # the entry after it reads the same row
MEASURES: Final = 64  # the norm of the row is measured before it
RESTORES: Final = 128  # ... and restored after it


@dataclass(frozen=True)
class Program:
    """The entries of one point for the tokens of a step: a row a token, or one row for all of them.

    Args:
        kinds: bits that occur in each column of `kind`.
        kind: bits of each entry.
        scope: bit of the token's mask that each entry asks for.
        write: bank row of w.
        read: bank row of u.
        replacement: column of the table of replacements.
        response: bias, gain, offset, minus, low, high, floor and threshold of f; see `core.program.Response`.
    """

    kinds: tuple[int, ...]
    kind: Int[torch.Tensor, "rows entries"]
    scope: Int[torch.Tensor, "rows entries"]
    write: Int[torch.Tensor, "rows entries"]
    read: Int[torch.Tensor, "rows entries"]
    replacement: Int[torch.Tensor, "rows entries"]
    response: Float[torch.Tensor, "rows entries 8"]


def edit_rows(
    rows: Float[torch.Tensor, "steered width"],
    program: Program,
    masks: Int[torch.Tensor, steered],
    replacements: Int[torch.Tensor, "steered replaced"],
    bank: Float[torch.Tensor, "vectors width"],
) -> Int[torch.Tensor, steered]:
    """Apply the entries of one point, in order and in place, in float32.

    Args:
        rows: float32 rows.
        program: the entries.
        masks: scopes that hold each token.
        replacements: bank row that replaces the token's row, -1 for none.
        bank: float32 vectors.

    Returns:
        How many entries were applied to each row.
    """
    applied = torch.zeros_like(masks)
    norm = before = rows
    for entry, occurring in enumerate(program.kinds):
        kind = program.kind[:, entry]
        active = _has(kind, USED) & ((masks >> program.scope[:, entry]) & 1).bool()
        if occurring & MEASURES:
            norm = _norm(rows) if norm is rows else torch.where(_has(kind, MEASURES), _norm(rows), norm)
        if occurring & LEADS:
            # Whoever is in the middle of a joined edit keeps the row it started from.
            before = rows.clone() if before is rows else torch.where(_has(kind, JOINED)[:, None], before, rows)
        if occurring & REPLACES:
            source = _chosen(replacements, program.replacement[:, entry])
            active &= ~_has(kind, REPLACES) | (source >= 0)
            put = active & _has(kind, REPLACES)
            rows[put] = bank[source[put]]
        length = _length(rows, before, program, entry, bank)
        rows.addcmul_(torch.where(active, length, 0.0)[:, None], bank[program.write[:, entry]])
        if occurring & RESTORES:
            now = _norm(rows)
            rows *= torch.where(_has(kind, RESTORES) & (now > 0), norm / now, 1.0)[:, None]
        applied += active
    return applied


def _length(
    rows: Float[torch.Tensor, "steered width"],
    before: Float[torch.Tensor, "steered width"],
    program: Program,
    entry: int,
    bank: Float[torch.Tensor, "vectors width"],
) -> Float[torch.Tensor, steered | 1]:
    """f(u·h + b) of one entry, for the rows it applies to and the others alike."""
    occurring, kind = program.kinds[entry], program.kind[:, entry]
    bias, gain, offset, minus, low, high, floor, threshold = program.response[:, entry].unbind(-1)
    if not occurring & READS:
        length = offset
    else:
        read = torch.where(_has(kind, JOINED)[:, None], before, rows) if occurring & JOINED else rows
        projection = torch.linalg.vecdot(read, bank[program.read[:, entry]]) + bias
        projection = torch.where(_has(kind, READS), projection, 0.0)
        reach = torch.maximum(projection, floor)
        length = torch.clamp(gain * reach + offset, low, high) - minus * reach
        length = torch.where(projection > threshold, length, 0.0)
    if occurring & RELATIVE:
        length = torch.where(_has(kind, RELATIVE), length * _norm(rows), length)
    return torch.as_tensor(length)


def _has(kind: Int[torch.Tensor, rows], bit: int) -> Bool[torch.Tensor, rows]:
    return (kind & bit) != 0


def _norm(rows: Float[torch.Tensor, "steered width"]) -> Float[torch.Tensor, steered]:
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norm


def _chosen(table: Int[torch.Tensor, "steered replaced"], column: Int[torch.Tensor, rows]) -> torch.Tensor:
    """One column of each row of the table; [steered]."""
    one: torch.Tensor = table.gather(1, column.to(torch.int64).expand(len(table))[:, None])
    return one[:, 0]


def edit_stream(  # noqa: PLR0917 -- the tables of a tap
    hidden: Float[torch.Tensor, "n width"],
    residual: Float[torch.Tensor, "n width"] | None,
    tokens: Int[torch.Tensor, steered],
    program: Program,
    masks: Int[torch.Tensor, steered],
    replacements: Int[torch.Tensor, "steered replaced"],
    bank: Float[torch.Tensor, "vectors width"],
) -> Int[torch.Tensor, steered]:
    """Edit the rows `hidden + residual` of `tokens` in place.

    A row that changed is written to `hidden` whole, rounded once, and its `residual` becomes zero: a difference rounded
    at the size of `hidden` would not cancel what a large `residual` holds. Other rows are left bit for bit.

    Returns:
        How many entries were applied to each row.
    """
    rows = hidden.index_select(0, tokens).float()
    if residual is not None:
        rows += residual.index_select(0, tokens)
    original = rows.clone()
    applied = edit_rows(rows, program, masks, replacements, bank)
    changed = (rows != original).any(-1)
    if not changed.all():
        rows, tokens = rows[changed], tokens[changed]
    hidden.index_copy_(0, tokens, rows.to(hidden.dtype))
    if residual is not None:
        residual.index_fill_(0, tokens, 0)
    return applied


def copy_rows(
    hidden: Float[torch.Tensor, "n width"],
    residual: Float[torch.Tensor, "n width"] | None,
    tokens: Int[torch.Tensor, captured],
    lines: Int[torch.Tensor, captured],
    arena: Float[torch.Tensor, "lines width"],
) -> None:
    """Copy rows `hidden + residual` of `tokens` to `lines` of the arena, rounded to the model's dtype as vLLM does."""
    if len(tokens) == len(hidden):
        rows = hidden if residual is None else hidden + residual
    else:
        rows = hidden.index_select(0, tokens)
        if residual is not None:
            rows += residual.index_select(0, tokens)
    arena.index_copy_(0, lines, rows)


def copy_row(
    hidden: Float[torch.Tensor, "n width"],
    residual: Float[torch.Tensor, "n width"] | None,
    token: int,
    line: Float[torch.Tensor, width],
) -> None:
    """Copy the row of one token to one line."""
    if residual is None:
        line.copy_(hidden[token])
    else:
        torch.add(hidden[token], residual[token], out=line)
