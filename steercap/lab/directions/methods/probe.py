"""Logistic probe: the direction that best separates the rows, with an L2 penalty."""

from __future__ import annotations

from typing import Final

import torch

from steercap.core.extras import extra
from steercap.lab.directions.methods.base import Method, carrying

#: Inverse strength of the penalty on standardised rows: with fewer rows than elements the classes can always be
#: separated, and a weak penalty lets the probe follow noise.
C: Final = 0.01


class Probe(Method):
    """Coefficients of an L2-penalised logistic regression on standardised rows, in the units of the stream."""

    extras = ("probes",)

    def direction(self, positive: torch.Tensor, negative: torch.Tensor, seed: int) -> torch.Tensor:
        with extra("probes"):
            from sklearn.linear_model import LogisticRegression

        rows = torch.cat([positive, negative])
        spread = rows.std(0, unbiased=False)
        scale = torch.where(spread > 0, spread, 1.0)
        kinds = torch.cat([torch.ones(len(positive)), torch.zeros(len(negative))])
        fitted = LogisticRegression(C=C, max_iter=2000, random_state=seed).fit(
            ((rows - rows.mean(0)) / scale).numpy(), kinds.numpy()
        )
        return carrying(torch.from_numpy(fitted.coef_[0]) / scale, positive, negative)


MEMBER = Probe()
