"""The tap in plain PyTorch: what runs on CPU, and what other kernels are tested against.

Number 5 in the life of a request. Shape legend: n = tokens of the pass, padding included; captured = tokens
somebody wants at this point; lines = lines of the arena.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int


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
