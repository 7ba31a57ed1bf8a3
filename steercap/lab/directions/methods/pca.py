"""PCA of differences: the direction of the largest differences of paired rows, whatever their sign."""

from __future__ import annotations

import torch

from steercap.lab.directions.methods.base import Method, carrying


class Pca(Method):
    """First principal component of the paired differences, not centred, as their mean is the target.

    Source: Zou et al., Representation Engineering; they draw the sign of each difference at random, which is equivalent
    to keeping the mean.
    """

    paired = True

    def direction(self, positive: torch.Tensor, negative: torch.Tensor, seed: int) -> torch.Tensor:  # noqa: ARG002 -- nothing is drawn
        _, _, components = torch.linalg.svd(positive - negative, full_matrices=False)
        return carrying(components[0], positive, negative)


MEMBER = Pca()
