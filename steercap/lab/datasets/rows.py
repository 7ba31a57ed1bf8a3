"""Rows as returned to the caller, and their grouping by shard."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

#: Rows of one point or of points that are joined, or of each point by its name.
Rows: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"
#: For each shard: its number, the rows' numbers in it, ascending, and their places in the request.
Groups: TypeAlias = "list[tuple[int, NDArray[np.int64], torch.Tensor]]"


class Labelled(NamedTuple):
    """Rows with their labels; for a single row, labels without an axis.

    Args:
        rows: rows in the same form as without labels.
        document, window, position, token: label of each row, int64 [rows]; see `Index`.
        point: number of its point in `ActivationDataset.points`, int64 [rows]; 0 unless points are mixed.
    """

    rows: Rows
    document: torch.Tensor
    window: torch.Tensor
    position: torch.Tensor
    token: torch.Tensor
    point: torch.Tensor


def at(found: Any, place: int) -> Any:
    """Return one of several rows."""
    if isinstance(found, Labelled):
        return Labelled(*(at(part, place) for part in found))
    if isinstance(found, dict):
        return {name: rows[place] for name, rows in found.items()}
    return found[place]


def groups_of(numbers: NDArray[np.int64], edges: NDArray[np.int64]) -> Groups:
    """Group row numbers by shard, ascending within each."""
    order = np.argsort(numbers, kind="stable")
    ascending = numbers[order]
    bounds = np.searchsorted(ascending, edges)
    found = []
    for number in np.flatnonzero(np.diff(bounds)):
        part = slice(bounds[number], bounds[number + 1])
        found.append((int(number), ascending[part] - edges[number], torch.from_numpy(order[part])))
    return found
