"""Rows as they are handed over, and which shards they come from."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

#: Rows of one point or of points that are joined, or of each point by its name.
Rows: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"
#: Numbers of shards, of rows in them, ascending, and where these were asked for.
Groups: TypeAlias = "list[tuple[int, NDArray[np.int64], torch.Tensor]]"


class Labelled(NamedTuple):
    """Rows with what they are of; for a single row, numbers without an axis.

    Args:
        rows: as without labels.
        document, window, position, token: of each row, int64 [rows]; see `Index`.
        point: number of its point in `ActivationDataset.points`, int64 [rows]; 0 unless points are mixed.
    """

    rows: Rows
    document: torch.Tensor
    window: torch.Tensor
    position: torch.Tensor
    token: torch.Tensor
    point: torch.Tensor


def at(found: Any, place: int) -> Any:
    """One of several rows."""
    if isinstance(found, Labelled):
        return Labelled(*(at(part, place) for part in found))
    if isinstance(found, dict):
        return {name: rows[place] for name, rows in found.items()}
    return found[place]


def groups_of(numbers: NDArray[np.int64], edges: NDArray[np.int64]) -> Groups:
    """Rows by shard, each in the order that they lie in."""
    order = np.argsort(numbers, kind="stable")
    ascending = numbers[order]
    bounds = np.searchsorted(ascending, edges)
    found = []
    for number in np.flatnonzero(np.diff(bounds)):
        part = slice(bounds[number], bounds[number + 1])
        found.append((int(number), ascending[part] - edges[number], torch.from_numpy(order[part])))
    return found
