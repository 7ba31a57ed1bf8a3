"""Methods that compute a direction from rows without a property to rows with it.

Shape legend: p, n = rows with the property, and without; hidden = elements of a row. All arithmetic is in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import torch
from jaxtyping import Float

from steercap.core.extras import extra
from steercap.core.registry import Registry

#: Inverse strength of the penalty on standardised rows: with fewer rows than elements the classes can always be
#: separated, and a weak penalty lets the probe follow noise.
C: Final = 0.01


class Method(ABC):
    """Method of computing a direction at one layer."""

    #: True if row i of both kinds are a pair, so that there must be as many of each.
    paired: bool = False
    #: Extras that it needs beside steercap's own dependencies.
    extras: tuple[str, ...] = ()

    @abstractmethod
    def direction(
        self, positive: Float[torch.Tensor, "p hidden"], negative: Float[torch.Tensor, "n hidden"], seed: int
    ) -> Float[torch.Tensor, " hidden"]:
        """Return the direction, scaled so that doses mean the same for every method: float64 [hidden].

        Added once, it moves the mean of the negative rows along itself to the projection of the positive rows' mean. It
        is in the units of the stream.

        Args:
            positive, negative: float64 rows.
            seed: seed for methods that draw.
        """


def carrying(
    direction: Float[torch.Tensor, " hidden"],
    positive: Float[torch.Tensor, "p hidden"],
    negative: Float[torch.Tensor, "n hidden"],
) -> Float[torch.Tensor, " hidden"]:
    """Scale a direction of any length and sign as `Method.direction` requires."""
    unit = direction / direction.norm()
    carried: torch.Tensor = unit * (unit @ (positive.mean(0) - negative.mean(0)))
    return carried


class DifferenceOfMeans(Method):
    """mean(positive) - mean(negative).

    Source: Rimsky et al., Steering Llama 2 via Contrastive Activation Addition; Chen et al., Persona Vectors.
    """

    def direction(self, positive: torch.Tensor, negative: torch.Tensor, seed: int) -> torch.Tensor:  # noqa: ARG002 -- nothing is drawn
        return positive.mean(0) - negative.mean(0)


class Pca(Method):
    """First principal component of the paired differences, not centred, as their mean is the target.

    Source: Zou et al., Representation Engineering; they draw the sign of each difference at random, which is equivalent
    to keeping the mean.
    """

    paired = True

    def direction(self, positive: torch.Tensor, negative: torch.Tensor, seed: int) -> torch.Tensor:  # noqa: ARG002 -- nothing is drawn
        _, _, components = torch.linalg.svd(positive - negative, full_matrices=False)
        return carrying(components[0], positive, negative)


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


METHODS: Final[Registry[Method]] = Registry(
    "method",
    {
        "difference": DifferenceOfMeans(),
        "pca": Pca(),
        "probe": Probe(),
    },
)
