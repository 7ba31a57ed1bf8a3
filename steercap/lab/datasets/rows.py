"""Rows of a data set in the form that callers get: grouped by shard, normalised, joined, or shuffled in a buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray

from steercap.core.display import brief
from steercap.core.values import shown
from steercap.errors import InvalidRequest, InvalidSetting
from steercap.lab.datasets.statistics import PointStatistics

if TYPE_CHECKING:
    from steercap.lab.datasets.reading import Join

#: Rows of one point, or of joined points, as a tensor; of several points, a dict by name.
Rows: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"
#: For each shard: its number, the rows' indices in it, ascending, and their places in the request.
Groups: TypeAlias = "list[tuple[int, NDArray[np.int64], torch.Tensor]]"


class Labelled(NamedTuple):
    """Rows with their labels; for a single row, labels without an axis.

    Args:
        rows: rows in the same form as without labels.
        document, window, position, token: label of each row, int64 [rows]; see `Index`.
        point: index of each row's point in `ActivationDataset.points`, int64 [rows]; 0 unless points are mixed.
    """

    rows: Rows
    document: torch.Tensor
    window: torch.Tensor
    position: torch.Tensor
    token: torch.Tensor
    point: torch.Tensor

    def __repr__(self) -> str:
        return brief(self)


def at(found: Any, place: int) -> Any:
    """Return the row at index `place`, in the form of `found`: a tensor, a dict by point, or labelled."""
    if isinstance(found, Labelled):
        return Labelled(*(at(part, place) for part in found))
    if isinstance(found, dict):
        return {name: rows[place] for name, rows in found.items()}
    return found[place]


def groups_of(numbers: NDArray[np.int64], edges: NDArray[np.int64]) -> Groups:
    """Group row indices by shard, ascending in each; shard k has the rows [edges[k], edges[k + 1])."""
    order = np.argsort(numbers, kind="stable")
    ascending = numbers[order]
    bounds = np.searchsorted(ascending, edges)
    found = []
    for number in np.flatnonzero(np.diff(bounds)):
        part = slice(bounds[number], bounds[number + 1])
        found.append((int(number), ascending[part] - edges[number], torch.from_numpy(order[part])))
    return found


#: Result of normalising rows. none: unchanged. mean: their mean is 0. standard: each element's variance is 1 too.
#: norm: their mean norm is the square root of their width; they are only scaled.
Normalise: TypeAlias = Literal["none", "mean", "standard", "norm"]
NORMALISE: Final = get_args(Normalise)


@dataclass(frozen=True, eq=False)
class Normalisation:
    """Affine normalisation of a point's rows: `(rows - mean) * scale`.

    Args:
        mean: float32 [width]; zeros for no centring.
        scale: float32 [width], or [1] for one factor for all elements.
    """

    mean: Float[torch.Tensor, " width"]
    scale: Float[torch.Tensor, " width_or_1"]

    __repr__ = brief

    @staticmethod
    def of(kind: Normalise, statistics: PointStatistics) -> Normalisation:
        """Return the normalisation of this kind, computed from statistics of the rows.

        Args:
            kind: kind of normalisation; see `Normalise`.
            statistics: statistics of the rows.

        Raises:
            InvalidSetting: there is no such kind.
            InvalidRequest: the statistics cover no rows, or only rows of zeros.
        """
        if kind not in NORMALISE:
            raise InvalidSetting(f"normalise={shown(kind)}; use one of {', '.join(map(repr, NORMALISE))}")
        if kind != "none" and not int(statistics.count):
            raise InvalidRequest(f"normalise={kind!r} needs statistics, and they cover no rows")
        mean = torch.zeros(statistics.width) if kind in {"none", "norm"} else statistics.mean.float()
        return Normalisation(mean, _scale(kind, statistics))

    def __call__(self, rows: Float[torch.Tensor, "rows width"]) -> Float[torch.Tensor, "rows width"]:
        """Return normalised rows: float32 [rows, width], on the device of the rows."""
        return (rows.float() - self.mean.to(rows.device)) * self.scale.to(rows.device)

    def undone(self, rows: Float[torch.Tensor, "rows width"]) -> Float[torch.Tensor, "rows width"]:
        """Invert the normalisation: return float32 [rows, width], on the device of the rows."""
        return rows.float() / self.scale.to(rows.device) + self.mean.to(rows.device)


def _scale(kind: Normalise, statistics: PointStatistics) -> Float[torch.Tensor, " width_or_1"]:
    if kind == "standard":
        spread = statistics.standard_deviation
        return torch.where(spread > 0, 1 / spread, 1.0).float()  # what never varies is 0 behind its mean
    if kind == "norm":
        if not float(statistics.norm_mean) > 0:
            raise InvalidRequest("normalise='norm' needs rows with a norm, and all rows of the statistics are 0")
        return torch.tensor([math.sqrt(statistics.width) / float(statistics.norm_mean)])
    return torch.ones(1)


def normalise_rows(rows: torch.Tensor, normalise: Normalisation | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows of one point in a dtype, normalised first unless `normalise` is None."""
    return (rows if normalise is None else normalise(rows.flatten(1)).view_as(rows)).to(dtype)


def join_points(rows: dict[str, torch.Tensor], join: Join) -> Rows:
    """Return the rows of one point as they are; of several as a dict, or concatenated to [rows, sum of widths]."""
    if len(rows) == 1:
        return next(iter(rows.values()))
    return rows if join == "dict" else torch.cat([one.flatten(1) for one in rows.values()], dim=1)


class ShuffleBuffer:
    """Shuffle buffer: rows in named columns, at most `capacity`, drawn at random from the seed."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self._generator = torch.Generator().manual_seed(seed)
        self._columns: dict[str, torch.Tensor] = {}
        self._filled = 0

    def __len__(self) -> int:
        return self._filled

    @property
    def full(self) -> bool:
        """True if the buffer is at capacity."""
        return self._filled == self.capacity

    @property
    def columns(self) -> dict[str, torch.Tensor]:
        """Columns of the rows in the buffer, [rows, ...] each; views that a draw overwrites."""
        return {name: column[: self._filled] for name, column in self._columns.items()}

    def add(self, columns: Mapping[str, torch.Tensor]) -> int:
        """Add as many leading rows of columns, [rows, ...] each, as there is room for, and return their number."""
        taken = min(self.capacity - self._filled, len(next(iter(columns.values()))))
        for name, column in columns.items():
            if name not in self._columns:
                self._columns[name] = torch.empty((self.capacity, *column.shape[1:]), dtype=column.dtype)
            self._columns[name][self._filled : self._filled + taken] = column[:taken]
        self._filled += taken
        return taken

    def draw(self, rows: int) -> dict[str, torch.Tensor]:
        """Remove and return `rows` random rows in a random order, or all rows if there are fewer."""
        rows = min(rows, self._filled)
        order = torch.randperm(self._filled, generator=self._generator)[:rows]
        drawn = {name: column.index_select(0, order) for name, column in self._columns.items()}
        kept = self._filled - rows
        holes = order[order < kept]
        is_drawn = torch.zeros(rows, dtype=torch.bool)
        is_drawn[order[order >= kept] - kept] = True
        moved = torch.arange(kept, self._filled)[~is_drawn]  # the last rows that stay go where rows are missing
        for column in self._columns.values():
            column[holes] = column[moved]
        self._filled = kept
        return drawn
