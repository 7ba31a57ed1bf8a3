"""Normalisation of rows: centred on their mean, of unit variance, or scaled to a common norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float

from steercap.core.values import shown
from steercap.errors import InvalidRequest, InvalidSetting
from steercap.lab.datasets.statistics import PointStatistics

#: none: unchanged. mean: their mean is 0. standard: each element's variance is 1 too. norm: their mean norm is the
#: square root of their width, and nothing is moved.
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

    @staticmethod
    def of(kind: Normalise, statistics: PointStatistics) -> Normalisation:
        """Return the normalisation of a kind that follows from statistics of the rows.

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
            raise InvalidRequest(f"normalise={kind!r} needs statistics, and no rows were looked at")
        mean = torch.zeros(statistics.width) if kind in {"none", "norm"} else statistics.mean.float()
        return Normalisation(mean, _scale(kind, statistics))

    def __call__(self, rows: Float[torch.Tensor, "rows width"]) -> Float[torch.Tensor, "rows width"]:
        """Return normalised rows: float32, on the device of the rows."""
        return (rows.float() - self.mean.to(rows.device)) * self.scale.to(rows.device)

    def undone(self, rows: Float[torch.Tensor, "rows width"]) -> Float[torch.Tensor, "rows width"]:
        """Invert the normalisation: float32, on the device of the rows."""
        return rows.float() / self.scale.to(rows.device) + self.mean.to(rows.device)


def _scale(kind: Normalise, statistics: PointStatistics) -> Float[torch.Tensor, " width_or_1"]:
    if kind == "standard":
        spread = statistics.standard_deviation
        return torch.where(spread > 0, 1 / spread, 1.0).float()  # what never varies is 0 behind its mean
    if kind == "norm":
        if not float(statistics.norm_mean) > 0:
            raise InvalidRequest("normalise='norm' needs rows with a norm, and all that were looked at are 0")
        return torch.tensor([math.sqrt(statistics.width) / float(statistics.norm_mean)])
    return torch.ones(1)
