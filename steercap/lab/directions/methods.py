"""Methods that compute the direction from rows without a property to rows with it; and the suggestion of a layer.

Shape legend: p, n = rows with the property, and without; hidden = elements of a row. All arithmetic is in float64.

The rule of a suggestion: of the layers, in order, that tie at the highest held-out AUC, take the longest run of
neighbours, and of it the middle one; among runs of equal length, the one nearest the middle of all layers. A single
best layer may be chance; one whose neighbours do as well is less likely to be. If even the highest AUC is within the
chance band of all layers, the texts do not distinguish layers, and the suggestion is only a layer to begin with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import torch
from jaxtyping import Float

from steercap.core.extras import extra
from steercap.core.registry import Registry
from steercap.steering.directions import DirectionSet

#: Inverse strength of the probe's L2 penalty on standardised rows: with fewer rows than elements the classes can be
#: separated, and a weak penalty lets the probe follow noise.
C: Final = 0.01

#: Share of an element's greatest magnitude below which its spread is rounding error of float32 sums.
ROUNDING: Final = 8 * torch.finfo(torch.float32).eps


class Method(ABC):
    """Method of computing a direction from the rows of one layer; abstract base class."""

    #: True if row i of both kinds is a pair, so that there must be equally many of each.
    paired: bool = False
    #: Names of steercap's extras that the method's libraries are in.
    extras: tuple[str, ...] = ()

    @abstractmethod
    def direction(
        self, positive: Float[torch.Tensor, "p hidden"], negative: Float[torch.Tensor, "n hidden"], seed: int
    ) -> Float[torch.Tensor, " hidden"]:
        """Return the direction, scaled so that scales of `Add` are comparable between methods: float64 [hidden].

        Added once, it moves the mean of the negative rows along itself to the projection of the positive rows' mean, in
        the units of the stream.

        Args:
            positive, negative: float64 rows.
            seed: seed for methods that draw.
        """


def carrying(
    direction: Float[torch.Tensor, " hidden"],
    positive: Float[torch.Tensor, "p hidden"],
    negative: Float[torch.Tensor, "n hidden"],
) -> Float[torch.Tensor, " hidden"]:
    """Return a direction of any norm and sign, scaled as `Method.direction` requires; zero stays zero."""
    unit = torch.nn.functional.normalize(direction, dim=0, eps=torch.finfo(direction.dtype).tiny)
    carried: torch.Tensor = unit * (unit @ (positive.mean(0) - negative.mean(0)))
    return carried


class DifferenceOfMeans(Method):
    """Method "difference": mean(positive) - mean(negative).

    Source: Rimsky et al., Steering Llama 2 via Contrastive Activation Addition; Chen et al., Persona Vectors.
    """

    def direction(self, positive: torch.Tensor, negative: torch.Tensor, seed: int) -> torch.Tensor:  # noqa: ARG002 -- nothing is drawn
        return positive.mean(0) - negative.mean(0)


class Pca(Method):
    """Method "pca": first principal component of the paired differences, not centred, as their mean is the target.

    Source: Zou et al., Representation Engineering; they draw the sign of each difference at random, which is equivalent
    to keeping the mean.
    """

    paired = True

    def direction(self, positive: torch.Tensor, negative: torch.Tensor, seed: int) -> torch.Tensor:  # noqa: ARG002 -- nothing is drawn
        _, _, components = torch.linalg.svd(positive - negative, full_matrices=False)
        return carrying(components[0], positive, negative)


class Probe(Method):
    """Method "probe": coefficients of an L2-penalised logistic regression on standardised rows, in stream units."""

    extras = ("probes",)

    def direction(self, positive: torch.Tensor, negative: torch.Tensor, seed: int) -> torch.Tensor:
        with extra("probes"):
            from sklearn.linear_model import LogisticRegression

        rows = torch.cat([positive, negative])
        spread = rows.std(0, unbiased=False)
        scale = torch.where(spread > ROUNDING * rows.abs().amax(0), spread, 1.0)
        kinds = torch.arange(len(rows)) < len(positive)
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


#: Tolerance within which AUCs, ratios of whole numbers, are equal.
EQUAL: Final = 1e-9
#: Maximum of p n min(p, n), for p and n texts, up to which the distribution of U is counted exactly: 50 of each kind.
#: The normal approximation used above is as good in two digits, or wider where one kind has under ten texts.
COUNTED: Final = 125_000


@dataclass(frozen=True)
class Suggestion:
    """Suggested layer of a direction, with the reason.

    Args:
        layer: index of the suggested layer.
        auc: AUC at that layer on held-out texts; 0.5 is chance. It is optimistic, as the layer was chosen on the same
            texts.
        chance: 95 % chance range of all layers' AUCs, see `chance_band`.
        tied: layers with this AUC, up to rounding.
        layer_count: number of layers compared.
    """

    layer: int
    auc: float
    chance: tuple[float, float]
    tied: tuple[int, ...]
    layer_count: int

    @property
    def is_chance(self) -> bool:
        """True if `auc` is within the chance range."""
        return self.chance[0] <= self.auc <= self.chance[1]

    @property
    def reason(self) -> str:
        """Reason for the layer, as a clause."""
        if len(self.tied) == 1:
            why = f"its AUC, {self.auc:.3f}, is the highest"
        else:
            why = (
                f"{len(self.tied)} of {self.layer_count} layers tie at AUC {self.auc:.3f}, and it is in the middle of "
                "the longest run of them"
            )
        if self.is_chance:
            return (
                f"{why}; but directions without meaning reach that by chance too; hold more texts out, or try several "
                "layers"
            )
        return why


def suggested_layer(directions: DirectionSet, name: str) -> Suggestion | None:
    """Return the layer to begin with: the middle of the longest run of layers with the highest held-out AUC.

    Args:
        directions: directions with their provenance.
        name: name of the direction.

    Returns:
        The suggestion, with its AUC, the chance range and the layers that tie; None if no texts of one kind were held
        out.

    Raises:
        UnknownName: there is no direction of the name.
    """
    _ = directions[name]
    known = directions.provenance
    measured, held_out = known.auc.get(name, {}), known.held_out.get(name, (0, 0))
    auc = {layer: value for layer, value in measured.items() if layer in directions.layers}  # old files have others too
    if not auc or not all(held_out):
        return None
    layer = middle_of_best(auc)
    tied = tuple(at for at, value in auc.items() if value > auc[layer] - EQUAL)
    return Suggestion(layer, auc[layer], chance_band(*held_out, best_of=len(auc)), tied, len(auc))


def middle_of_best(values: Mapping[int, float]) -> int:
    """Return the middle layer of the longest run of layers whose values are within `EQUAL` of the highest.

    Of equally long runs, the one whose middle is nearest the middle of all layers is used.
    """
    layers = sorted(values)
    highest = max(values.values())
    runs: list[list[int]] = [[]]
    for place, layer in enumerate(layers):
        if values[layer] > highest - EQUAL:
            runs[-1].append(place)
        elif runs[-1]:
            runs.append([])
    middles = {run[len(run) // 2]: len(run) for run in runs if run}
    centre = (len(layers) - 1) / 2
    return layers[min(middles, key=lambda place: (-middles[place], abs(place - centre)))]


def chance_band(positive: int, negative: int, *, best_of: int = 1) -> tuple[float, float]:
    """Return the ends of the 95 % chance range of the AUC of meaningless scores, both included.

    The AUC is Mann and Whitney's U / (p n). Its distribution is counted where there are few texts, and is normal beyond
    `COUNTED`, with standard deviation sqrt((p + n + 1) / (12 p n)). Answers to one question are dependent, so the true
    band is somewhat wider.

    Args:
        positive, negative: number of scored texts of each kind, 1 or more.
        best_of: number of AUCs, such as one for each layer, of which the highest is used: with a probability of at
            least 95 % all are in the range, however they depend on each other (Bonferroni).
    """
    pairs = positive * negative
    if min(positive, negative) * pairs > COUNTED:
        half = NormalDist().inv_cdf(1 - 0.025 / best_of) * math.sqrt((positive + negative + 1) / (12 * pairs))
        return max(0.5 - half, 0.0), min(0.5 + half, 1.0)
    ways = _ways(*sorted((positive, negative)))
    below, total, low = 0, sum(ways), 0
    while 40 * best_of * (below + ways[low]) <= total:  # less than 2.5 % of one AUC's orders lie at or below
        below += ways[low]
        low += 1
    return low / pairs, (pairs - low) / pairs


def _ways(positive: int, negative: int) -> list[int]:
    """Return for each U from 0 to p n the number of orders of p + n texts: coefficients of the Gaussian binomial."""
    ways = [1] + [0] * (positive * negative)
    for part in range(1, positive + 1):
        step = negative + part
        for place in range(len(ways) - 1, step - 1, -1):  # times 1 - q^step
            ways[place] -= ways[place - step]
        for place in range(part, len(ways)):  # by 1 - q^part
            ways[place] += ways[place - part]
    return ways


def runs_of(layers: Sequence[int]) -> str:
    """Return layer indices as a short text, in which three neighbours or more are a range: "0 to 11, 14, 20 to 29"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)
