"""Split-half stability of an axis: cosines between the axes of two halves of the answers, and their chance levels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int

from steercap.core.display import brief
from steercap.core.values import count_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.personas.roles.axis import HOWS, How, axes, how_of
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.lab.personas.roles.rows import LEAST, RoleRows

#: Items that are split between the halves.
Over = Literal["questions", "roles"]
#: Input of the cosines: the rows, the rows with permuted roles, or random vectors.
Of = Literal["found", "permuted", "random"]
OFS: Final[tuple[Of, ...]] = get_args(Of)


@dataclass(frozen=True, eq=False)
class Stability:
    """Cosines between the axes of the two halves of each random split; made by `stability`.

    For "pca" they are absolute values, as a component has no sign. NaN for a split in which the assistant, or all roles
    but one, have no answers in a half.

    Args:
        over: "questions" if the halves share roles but no question, "roles" if they share neither.
        layers: indices of the layers.
        cosines: cosines by (method, input): float64 [layers, splits].
    """

    over: Over
    layers: tuple[int, ...]
    cosines: Mapping[tuple[How, Of], npt.NDArray[np.float64]]

    __repr__ = brief

    @property
    def splits(self) -> int:
        """Number of splits."""
        return len(next(iter(self.cosines.values())).T)

    def median(self, how: How = "contrast", of: Of = "found") -> dict[int, float]:
        """Return the median cosine over the splits, by layer; NaN is ignored. Arguments as for `band`."""
        return dict(zip(self.layers, np.nanmedian(self.cosines[how_of(how), of], 1).tolist(), strict=True))

    def band(self, how: How = "contrast", of: Of = "found", share: float = 0.9) -> dict[int, tuple[float, float]]:
        """Return the interval of the central share of the splits' cosines, by layer; NaN is ignored.

        Args:
            how: method of the axes: "contrast" or "pca".
            of: input of the cosines: "found" for the rows, "permuted" for rows with permuted roles, "random" for
                random vectors.
            share: share of the splits in the interval: 0.9 leaves out 5 % at either end.

        Returns:
            Lower and upper end at each layer.
        """
        ends = np.nanquantile(self.cosines[how_of(how), of], [(1 - share) / 2, (1 + share) / 2], axis=1).T
        return {layer: (float(low), float(high)) for layer, (low, high) in zip(self.layers, ends, strict=True)}


def stability(rows: RoleRows, *, over: Over = "questions", splits: int = 20, seed: int = 0) -> Stability:
    """Split the questions, or questions and roles, in random halves, and compare the axes of both.

    Two chance levels are computed by the same splits. "permuted": within each question the rows are permuted among the
    roles and the assistant, so that labels mean nothing, but the distribution of rows is the same; the remaining cosine
    is that of any two axes of such rows. "random": as many vectors, drawn from a normal distribution.

    Args:
        rows: rows of roles and assistant; one layer at a time is read, and in memory for both halves of all splits.
        over: items split between the halves: "questions", or "roles" (and questions, since the assistant is in both).
        splits: number of splits.
        seed: seed of all draws.

    Raises:
        InvalidSpec: there are too few questions or roles to halve, or `splits` or `over` is not valid.
    """
    if over not in get_args(Over):
        raise InvalidSpec(f"over={shown(over)}; give {' or '.join(map(repr, get_args(Over)))}")
    count_of(splits, "splits")
    if rows.questions < 2 or (over == "roles" and len(rows.names) < 4):
        raise InvalidSpec(
            f"{rows.questions} questions and {len(rows.names)} roles; two questions are needed to halve them, and four "
            "roles where these are halved too"
        )
    drawn = [_Split(rows, over, np.random.default_rng([seed, split])) for split in range(splits)]
    cosines = {key: np.empty((len(rows.layers), splits)) for key in ((how, of) for how in HOWS for of in OFS)}
    for place, layer in enumerate(rows.layers):
        for of in OFS:
            for how, found in _cosines(drawn, _halves(rows, layer, drawn, of)).items():
                cosines[how, of][place] = found
    return Stability(over, rows.layers, cosines)


class _Split:
    """Random split in halves: the half, 0 or 1, of each question and role, and a permutation of the roles per question.

    The last role is the assistant.
    """

    def __init__(self, rows: RoleRows, over: Over, rng: np.random.Generator) -> None:
        roles = len(rows.names)
        self.half = torch.from_numpy(_halved(rows.questions, rng))
        self.dealt = torch.from_numpy(np.stack([rng.permutation(roles + 1) for _ in range(rows.questions)], 1))
        self.side = torch.from_numpy(_halved(roles, rng)) if over == "roles" else None
        self.seed = int(rng.integers(2**62))

    def has(self, half: int) -> torch.Tensor:
        """Return a mask of the roles in a half, without the assistant: bool [roles]."""
        return torch.ones(len(self.dealt) - 1, dtype=torch.bool) if self.side is None else self.side == half


def _halved(number: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Assign items at random to half 0 or 1, as many to each, or one more to 0: int64 [number]."""
    found: npt.NDArray[np.int64] = (np.arange(number) % 2)[rng.permutation(number)]
    return found


class _Halves(NamedTuple):
    """Mean rows of the halves of all splits.

    Args:
        means: mean rows of roles and then the assistant: float64 [splits, 2, roles + 1, hidden].
        there: True for roles with answers in the half: bool [splits, 2, roles + 1].
    """

    means: Float[torch.Tensor, "splits halves both hidden"]
    there: Bool[torch.Tensor, "splits halves both"]


def _cosines(drawn: list[_Split], halves: _Halves) -> dict[How, npt.NDArray[np.float64]]:
    """Compute the cosine of both halves' axes for each split, float64 [splits] by method; NaN if a half has no axis."""
    used = torch.stack([torch.stack([split.has(half) for half in (0, 1)]) for split in drawn]) & halves.there[..., :-1]
    found = axes(halves.means[..., :-1, :], halves.means[..., -1, :], used)
    lacking = (~halves.there[..., -1] | (used.sum(-1) < LEAST)).any(-1)
    cosines = {"contrast": (found.contrast[:, 0] * found.contrast[:, 1]).sum(-1)}
    cosines["pca"] = (found.pca[:, 0] * found.pca[:, 1]).sum(-1).abs()
    return {how: torch.where(lacking, math.nan, cosines[how]).numpy() for how in HOWS}


def _halves(rows: RoleRows, layer: int, drawn: list[_Split], of: Of) -> _Halves:
    """Compute the mean rows of both halves of each split at one layer, of the input `of`."""
    both = len(rows.names) + 1
    if of == "random":
        width = rows.at(ASSISTANT, layer).shape[1]
        generators = [torch.Generator().manual_seed(split.seed + layer) for split in drawn]
        means = [torch.randn(2, both, width, generator=one, dtype=torch.float64) for one in generators]
        return _Halves(torch.stack(means), torch.ones(len(drawn), 2, both, dtype=torch.bool))
    sums, weights = _sums(rows, layer, drawn, dealt=of == "permuted")
    return _Halves(sums / weights.clamp(min=1)[..., None], weights > 0)


def _sums(
    rows: RoleRows, layer: int, drawn: list[_Split], *, dealt: bool
) -> tuple[Float[torch.Tensor, "splits halves both hidden"], Int[torch.Tensor, "splits halves both"]]:
    """Sum rows over the questions of each half and count these, with permuted roles if `dealt`; reads role by role."""
    names = (*rows.names, ASSISTANT)
    shape = (len(drawn), 2, len(names))
    sums = torch.zeros(*shape, rows.at(ASSISTANT, layer).shape[1], dtype=torch.float64)
    weights = torch.zeros(shape, dtype=torch.int64)
    half = torch.stack([split.half for split in drawn])  # [splits, questions]
    within = torch.stack([half == 0, half == 1], 1).double()  # [splits, 2, questions]
    first = (2 * torch.arange(len(drawn))[:, None] + half) * len(names)
    for place, name in enumerate(names):
        found = rows.at(name, layer)
        there = torch.tensor(rows.counts[name]) > 0  # a question counts once, however many answers it has
        if dealt:
            target = (first + torch.stack([split.dealt[place] for split in drawn])).flatten()
            sums.view(-1, found.shape[1]).index_add_(0, target, found.repeat(len(drawn), 1))
            weights.view(-1).index_add_(0, target, there.long().repeat(len(drawn)))
        else:
            sums[:, :, place] = within @ found
            weights[:, :, place] = (within @ there.double()).long()
    return sums, weights
