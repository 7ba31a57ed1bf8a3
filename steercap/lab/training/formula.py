"""Differentiable formula of the tap, `h <- h + f(u·h + b) w`, for sequences that each have their own vectors.

`core.program.Response` defines f; `kernels.reference` computes the same for an engine. Shape legend: n = sequences, t =
tokens of the longest, k = specs that are trained side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from jaxtyping import Bool, Float, Int

from steercap.core.program import Response
from steercap.steering.edits import RankOne

Rows = Float[torch.Tensor, "n t width"]


@dataclass(frozen=True, eq=False)
class Part:
    """Rank-one edit, stacked over k specs that have the same edits with vectors of their own.

    Args:
        write, read: write and read vectors, float [k, width]; `read` is None if no projection is needed.
        responses: function f of each spec.
        joined: True if the part reads the row as it was before the preceding part.
        relaxed: True if the gradient of f's threshold is needed.
    """

    write: Float[torch.Tensor, "k width"]
    read: Float[torch.Tensor, "k width"] | None
    responses: tuple[Response, ...]
    joined: bool
    relaxed: bool

    def to(self, device: torch.device) -> Part:
        """Return the part with its tensors on a device; the same object if the device is theirs."""
        if self.write.device == device:
            return self
        read = None if self.read is None else self.read.to(device)
        return replace(self, write=self.write.to(device), read=read)

    def number(self, name: str, owners: Int[torch.Tensor, " n"]) -> Any:
        """Return the field `name` of the responses f: a float if all specs share it, else float [n, 1], by sequence."""
        found = [getattr(response, name) for response in self.responses]
        if not any(torch.is_tensor(one) for one in found) and len(set(found)) == 1:
            return found[0]
        like = self.write
        return torch.stack([torch.as_tensor(one, dtype=like.dtype, device=like.device) for one in found])[owners, None]


@dataclass(frozen=True)
class Doses:
    """Factors by which the edits of each sequence are multiplied.

    Args:
        factors: float [n]: 0 for no edit, -1 for the opposite edit; None for 1 everywhere.
        nulled: sequences, bool [n], whose positive projection on each write direction is removed instead of the edit;
            None for none.
    """

    factors: Float[torch.Tensor, " n"] | None = None
    nulled: Bool[torch.Tensor, " n"] | None = None

    def to(self, device: torch.device) -> Doses:
        """Return the doses with their tensors on a device."""
        factors, nulled = (None if one is None else one.to(device) for one in (self.factors, self.nulled))
        return Doses(factors, nulled)


def stacked(lowered: Sequence[Sequence[RankOne]]) -> list[Part]:
    """Stack the same edit of k specs, given as k sequences of rank-one edits, to a list of parts."""
    return [_part(together) for together in zip(*lowered, strict=True)]


def _part(together: Sequence[RankOne]) -> Part:
    reads = [one.read for one in together if one.read is not None]
    gates = [value for one in together for value in (one.read, one.response.threshold, one.response.bias)]
    threshold = any(_is_bound(one.response.threshold) for one in together)
    return Part(
        write=torch.cat([one.write for one in together]),
        read=torch.cat(reads) if reads else None,
        responses=tuple(one.response for one in together),
        joined=together[0].joined,
        relaxed=threshold and any(torch.is_tensor(value) and value.requires_grad for value in gates),
    )


def changed(
    rows: Rows,
    parts: Iterable[Part],
    *,
    owners: Int[torch.Tensor, " n"],
    scope: Bool[torch.Tensor, "n t"],
    doses: Doses,
    gate_width: float,
) -> Rows:
    """Return rows [n, t, width] after one edit, differentiably; each sequence is edited by its own spec.

    Parts are applied one after another; a part that is joined reads the rows that the part before it read.

    Args:
        rows: rows in float32, or wider; not changed.
        parts: rank-one edits of the edit.
        owners: spec index of each sequence.
        scope: tokens to edit.
        doses: each sequence's factor, and the sequences whose positive projections are removed instead of edited.
        gate_width: width of the relaxation of f's threshold, in the units of the projection; see `gate`.
    """
    before = rows
    for part in parts:
        before = before if part.joined else rows
        write = part.write[owners, None]
        length = _length(part, before, rows, owners, gate_width)
        if doses.factors is not None:
            length = length * doses.factors[:, None]
        if doses.nulled is not None:
            squared = write.square().sum(-1).clamp(min=torch.finfo(rows.dtype).tiny)
            taken = -(rows * write).sum(-1).clamp(min=0) / squared
            length = torch.where(doses.nulled[:, None], taken, length)
        rows = rows + torch.where(scope, length, 0.0)[..., None] * write
    return rows


def _length(
    part: Part, before: Rows, rows: Rows, owners: Int[torch.Tensor, " n"], gate_width: float
) -> Float[torch.Tensor, "n t"]:
    """Return f(u·h + b), the multiple of the write vector to add to each row."""

    def f(name: str) -> Any:
        return part.number(name, owners)

    length: torch.Tensor
    if part.read is None:
        length = torch.ones_like(rows[..., 0]) * f("offset")
    else:
        p = (before * part.read[owners, None]).sum(-1) + f("bias")
        reach = _bounded(p, f("floor"), inf)
        length = _bounded(f("gain") * reach + f("offset"), f("low"), f("high")) - f("minus") * reach
        threshold = f("threshold")
        if _is_bound(threshold):
            length = length * gate(p, threshold, gate_width if part.relaxed else 0.0)
    if part.responses[0].relative:
        length = length * torch.linalg.vector_norm(rows, dim=-1)
    return length


def _is_bound(low: Any) -> bool:
    """Return whether a number bounds values from below: True for a tensor, which is trained, and for any but -inf."""
    return torch.is_tensor(low) or low > -inf


def _bounded(value: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
    """Clamp a tensor to [low, high], each a float or a tensor; infinite bounds are not computed."""
    if _is_bound(low):
        value = torch.maximum(value, torch.as_tensor(low, dtype=value.dtype, device=value.device))
    if torch.is_tensor(high) or high < inf:
        value = torch.minimum(value, torch.as_tensor(high, dtype=value.dtype, device=value.device))
    return value


def gate(p: Float[torch.Tensor, "n t"], threshold: Any, width: float) -> Float[torch.Tensor, "n t"]:
    """Return 1 where p is above the threshold, else 0, with the gradient of sigmoid((p - threshold) / width).

    Straight-through estimator (Bengio et al. 2013, arXiv:1308.3432): the forward value is that of the saved edit, and
    only the gradient is smooth. The threshold is a number or [n, 1]; width 0 gives no gradient.
    """
    hard: torch.Tensor = (p > threshold).to(p.dtype)
    if not width:
        return hard
    soft = torch.sigmoid((p - threshold) / width)
    return hard + soft - soft.detach()
