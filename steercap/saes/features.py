"""Most active SAE features of tokens, sparse, with bounds on the features left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from steercap.core.values import shown
from steercap.errors import InvalidSpec
from steercap.kernels.codecs.coded import CodedRows


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """Most active features of each row: the k of greatest activation, greatest first.

    Args:
        ids: ids of these features, int32 [rows, k]; -1 where fewer are active.
        values: their activations, float32 [rows, k]; 0 where there is none, NaN throughout a row that was not finite.
        active: number of active features of each row, int32 [rows]; -1 for a row that was not finite.
        rest: the greatest activation of each row that is not among `values`, float32 [rows]; 0 where all are.
        width: number of features of the SAE.
    """

    ids: Int[torch.Tensor, "rows k"]
    values: Float[torch.Tensor, "rows k"]
    active: Int[torch.Tensor, " rows"]
    rest: Float[torch.Tensor, " rows"]
    width: int

    @staticmethod
    def of(rows: CodedRows) -> Features:
        """Return the features of coded rows.

        Raises:
            InvalidSpec: they came as something else.
        """
        if not rows.is_read:
            raise InvalidSpec(f"{rows} are not features of an SAE; capture with CaptureSpec(sae=)")
        parts = rows.parts
        return Features(parts["indices"], parts["q"], parts["active"], parts["rest"], rows.schema.width)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice | torch.Tensor) -> Features:
        """Return the features of some rows: a slice, or indices or a mask as a tensor."""
        return Features(self.ids[rows], self.values[rows], self.active[rows], self.rest[rows], self.width)

    def __repr__(self) -> str:
        rows, k = self.ids.shape
        return f"Features({rows} rows, the {k} greatest of {self.width:,}; all of {int(self.complete.sum())} rows)"

    @property
    def complete(self) -> torch.Tensor:
        """Mask of rows that have all their active features here, bool [rows]; the others are off by at most `rest`."""
        return (self.active >= 0) & (self.active <= self.ids.shape[1])

    def dense(self) -> Float[torch.Tensor, "rows width"]:
        """Return all features of each row, with 0 for those that are not here: float32 [rows, width]."""
        rows = self.values.new_zeros(len(self), self.width)
        rows.scatter_add_(1, self.ids.clamp(min=0).long(), self.values.where(self.ids >= 0, 0.0))
        return rows.masked_fill_((self.active < 0)[:, None], torch.nan)

    def of_feature(self, feature: int) -> Float[torch.Tensor, " rows"]:
        """Return one feature's activation in each row, float32 [rows]; 0 where it is not here, see `rest`.

        Raises:
            InvalidSpec: the SAE has no such feature.
        """
        if isinstance(feature, bool) or not isinstance(feature, int) or not 0 <= feature < self.width:
            raise InvalidSpec(f"feature {shown(feature)}; this SAE has features 0 to {self.width - 1}")
        found = self.values.where(self.ids == feature, 0.0).sum(dim=1)
        return found.masked_fill(self.active < 0, torch.nan)
