"""Reference implementation of edits in plain float64, to compare the kernels with.

It uses no rank-one edits or compiled configurations: each class of edit has its own formula.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float

from steercap.core.spec import Point
from steercap.core.tokens import selected
from steercap.steering.edits import Edit
from steercap.steering.edits.add import Add, AddIf, LowRank, SAEFeature
from steercap.steering.edits.replace import Ablate, Cap, Replace, SetProjection
from steercap.steering.spec import SteeringSpec

Rows = Float[torch.Tensor, "rows hidden"]


def edited(spec: SteeringSpec, point: Point, rows: Rows, prompt_len: int, num_layers: int) -> Rows:
    """Return the rows of one sequence at one point after the edits of a spec: float64 [rows, hidden].

    Args:
        spec: the edits.
        point: point of the rows.
        rows: row of each position from 0, any dtype.
        prompt_len: number of prompt tokens.
        num_layers: number of decoder layers of the model.
    """
    rows = rows.double()
    before = rows
    for edit in spec.edits:
        if isinstance(edit, SteeringSpec):
            rows = edited(edit, point, rows, prompt_len, num_layers)
        elif isinstance(edit, Edit) and point in edit.points(num_layers):
            ranges = edit.selection.ranges(prompt_len, max(len(rows), prompt_len + 1))
            chosen = torch.from_numpy(selected(ranges, len(rows)))[:, None]
            rows = torch.where(chosen, _parted(edit, rows, prompt_len), rows)
    if spec.preserve_norm:
        now = rows.norm(dim=-1, keepdim=True)
        rows = torch.where(now > 0, rows * before.norm(dim=-1, keepdim=True) / now, rows)
    return rows


def _parted(edit: Edit, rows: Rows, prompt_len: int) -> Rows:
    """Return rows after one edit of the part of each row that `edit.part` names, of each part, or of whole rows."""
    if edit.part is None:
        return _one(edit, rows, prompt_len)
    width = max(len(one.write[0]) for one in edit.lower())
    parts = list(rows.split(width, dim=-1))
    for place in range(len(parts)) if edit.part == "each" else [edit.part]:
        parts[place] = _one(edit, parts[place], prompt_len)
    return torch.cat(parts, dim=-1)


def _one(edit: Edit, rows: Rows, prompt_len: int) -> Rows:  # noqa: PLR0911 -- one formula an operation
    match edit:
        case Add():
            return rows + _step(edit, rows)
        case AddIf():
            value = rows @ _wide(edit.probe) + edit.bias
            return torch.where((value > edit.threshold)[:, None], rows + _step(edit, rows), rows)
        case Ablate():
            return rows - (1 - edit.keep) * (rows @ _unit(edit.vector))[:, None] * _unit(edit.vector)
        case Cap():
            along = rows @ _unit(edit.vector)
            bounded = along if edit.low is None else along.clamp(min=edit.low)
            bounded = bounded if edit.high is None else bounded.clamp(max=edit.high)
            return rows + (bounded - along)[:, None] * _unit(edit.vector)
        case SetProjection():
            along = rows @ _unit(edit.vector)
            return rows + (edit.value - along)[:, None] * _unit(edit.vector)
        case SAEFeature():
            centred = rows if edit.decoder_bias is None else rows - _wide(edit.decoder_bias)
            activation = (centred @ _wide(edit.encoder) + edit.bias).relu()
            activation = activation * (activation > edit.threshold)
            return rows + (edit.value - activation)[:, None] * _wide(edit.decoder)
        case LowRank():
            return rows + edit.scale * (rows @ _wide(edit.read).T + _wide(edit.bias)) @ _wide(edit.write)
        case Replace():
            rows = rows.clone()
            elements = torch.arange(rows.shape[-1]) if edit.elements is None else torch.tensor(edit.elements)
            for position, row in zip(edit.replaced, _wide(edit.rows), strict=True):
                rows[position + prompt_len if position < 0 else position, elements] = row[elements]
            return rows
    raise NotImplementedError(f"no reference for {edit.name}")


def _step(edit: Add | AddIf, rows: Rows) -> Rows:
    if edit.relative:
        return torch.mul(edit.scale * rows.norm(dim=-1, keepdim=True), _unit(edit.vector))
    step: torch.Tensor = edit.scale * _wide(edit.vector)
    return step.expand_as(rows)


def _wide(vector: Any) -> torch.Tensor:
    wide: torch.Tensor = torch.as_tensor(vector).double()
    return wide


def _unit(vector: Any) -> torch.Tensor:
    wide = _wide(vector)
    return torch.div(wide, wide.norm())
