"""How much of an axis is found again in other answers: cosines of the axes of two halves, beside chance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int

from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec
from steercap.roles.directions import HOWS, How, directions, how_of
from steercap.roles.role import ASSISTANT
from steercap.roles.rows import LEAST, RoleRows

#: What the halves do not share.
Over = Literal["questions", "roles"]
#: What cosines are of: the rows as they are, with their roles drawn anew, or random vectors in their place.
Of = Literal["found", "permuted", "random"]
OFS: Final[tuple[Of, ...]] = get_args(Of)


@dataclass(frozen=True, eq=False)
class Stability:
    """Cosines of the axes of two halves, a number for each split; made by `stability`.

    Of "pca" they are magnitudes, for a component has no sign. NaN of a split in one half of which the assistant, or all
    roles but one, have no answers.

    Args:
        over: "questions" where the halves share roles but no question, "roles" where they share neither.
        layers: where.
        cosines: by how the axis is found and what of: float64 [layers, splits].
    """

    over: Over
    layers: tuple[int, ...]
    cosines: Mapping[tuple[How, Of], npt.NDArray[np.float64]]

    @property
    def splits(self) -> int:
        """How many there are."""
        return len(next(iter(self.cosines.values())).T)

    def median(self, how: How = "contrast", of: Of = "found") -> dict[int, float]:
        """The median over the splits, by layer; those that are NaN are left out."""
        return dict(zip(self.layers, np.nanmedian(self.cosines[how_of(how), of], 1).tolist(), strict=True))

    def band(self, how: How = "contrast", of: Of = "found", share: float = 0.9) -> dict[int, tuple[float, float]]:
        """The band in which this share of the splits lie, by layer."""
        ends = np.nanquantile(self.cosines[how_of(how), of], [(1 - share) / 2, (1 + share) / 2], axis=1).T
        return {layer: (float(low), float(high)) for layer, (low, high) in zip(self.layers, ends, strict=True)}


def stability(rows: RoleRows, *, over: Over = "questions", splits: int = 20, seed: int = 0) -> Stability:
    """Split the questions, or questions and roles, in random halves, and compare the axes of both.

    Beside each stands chance, by the same splits. "permuted": within each question the rows are dealt out to the roles
    and the assistant anew, so that no label means anything, but the rows lie as rows of this model do; what is left is
    what any axis shares with any other. "random": as many vectors, drawn from a normal distribution. Of "pca" they are
    magnitudes, for a component has no sign.

    Args:
        rows: of roles and assistant; read a layer at a time, so that one half's vectors for all splits are in memory.
        over: what the halves do not share: "questions", or "roles" (and questions, since the assistant has no half).
        splits: how many.
        seed: of all that is drawn.

    Raises:
        InvalidSpec: too few questions or roles to halve, or something that is no number of splits.
    """
    if over not in get_args(Over):
        raise InvalidSpec(f"over={shown(over)}; give {' or '.join(map(repr, get_args(Over)))}")
    if (index_of(splits) or 0) < 1:
        raise InvalidSpec(f"splits={shown(splits)}; give 1 or more")
    if rows.questions < 2 or (over == "roles" and len(rows.names) < 4):
        raise InvalidSpec(
            f"{rows.questions} questions and {len(rows.names)} roles; two questions are needed to halve them, and four "
            "roles where these are halved too"
        )
    drawn = [_Split(rows, over, np.random.default_rng([seed, split])) for split in range(splits)]
    cosines = {key: np.empty((len(rows.layers), splits)) for key in ((how, of) for how in HOWS for of in OFS)}
    for place, layer in enumerate(rows.layers):
        for of in OFS:
            for split, halves in enumerate(_halves(rows, layer, drawn, of)):
                for how, cosine in _cosines(drawn[split], halves).items():
                    cosines[how, of][place, split] = cosine
    return Stability(over, rows.layers, cosines)


class _Split:
    """One split: which half each question is in, and each role; and other roles for the answers to each question.

    The last role is the assistant.
    """

    def __init__(self, rows: RoleRows, over: Over, rng: np.random.Generator) -> None:
        roles = len(rows.names)
        self.half = torch.from_numpy(_halved(rows.questions, rng))
        self.dealt = torch.from_numpy(np.stack([rng.permutation(roles + 1) for _ in range(rows.questions)], 1))
        self.side = torch.from_numpy(_halved(roles, rng)) if over == "roles" else None
        self.seed = int(rng.integers(2**62))

    def has(self, half: int) -> torch.Tensor:
        """Which roles a half has, the assistant aside: bool [roles]."""
        return torch.ones(len(self.dealt) - 1, dtype=torch.bool) if self.side is None else self.side == half


def _halved(number: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """0 or 1 for each of a number of things: as many of each, or one more of 0."""
    found: npt.NDArray[np.int64] = (np.arange(number) % 2)[rng.permutation(number)]
    return found


class _Halves(NamedTuple):
    """What the halves of a split are.

    Args:
        means: of roles and then the assistant: float64 [2, roles + 1, hidden].
        there: which of them have answers: bool [2, roles + 1].
    """

    means: Float[torch.Tensor, "halves both hidden"]
    there: Bool[torch.Tensor, "halves both"]


def _cosines(split: _Split, halves: _Halves) -> dict[How, float]:
    """Of the axes of both halves; NaN where one has none."""
    ends = []
    for half, (means, there) in enumerate(zip(*halves, strict=True)):
        used = split.has(half) & there[:-1]
        if not bool(there[-1]) or int(used.sum()) < LEAST:
            return dict.fromkeys(HOWS, math.nan)
        ends.append(directions(means[:-1][used], means[-1]))
    found = {how: float(ends[0].of(how) @ ends[1].of(how)) for how in HOWS}
    return found | {"pca": abs(found["pca"])}


def _halves(rows: RoleRows, layer: int, drawn: list[_Split], of: Of) -> Iterator[_Halves]:
    """The halves of each split at one layer."""
    names = (*rows.names, ASSISTANT)
    if of == "random":
        width = rows.at(ASSISTANT, layer).shape[1]
        for split in drawn:
            generator = torch.Generator().manual_seed(split.seed + layer)
            means = torch.randn(2, len(names), width, generator=generator, dtype=torch.float64)
            yield _Halves(means, torch.ones(2, len(names), dtype=torch.bool))
        return
    sums, weights = _sums(rows, layer, drawn, dealt=of == "permuted")
    for means, number in zip(sums / weights.clamp(min=1)[..., None], weights, strict=True):
        yield _Halves(means, number > 0)


def _sums(
    rows: RoleRows, layer: int, drawn: list[_Split], *, dealt: bool
) -> tuple[Float[torch.Tensor, "splits halves both hidden"], Int[torch.Tensor, "splits halves both"]]:
    """Rows summed over the questions of each half, and how many; the files of roles are read one after another."""
    names = (*rows.names, ASSISTANT)
    width = rows.at(ASSISTANT, layer).shape[1]
    sums = torch.zeros(len(drawn) * 2 * len(names), width, dtype=torch.float64)
    weights = torch.zeros(len(drawn) * 2 * len(names), dtype=torch.int64)
    for place, name in enumerate(names):
        found = rows.at(name, layer)
        counts = torch.tensor(rows.counts[name])
        there = (counts > 0).long()  # a question counts once, however many answers it has
        for number, split in enumerate(drawn):
            label = split.dealt[place] if dealt else torch.full_like(split.half, place)
            target = (number * 2 + split.half) * len(names) + label
            sums.index_add_(0, target, found)
            weights.index_add_(0, target, there)
    shape = (len(drawn), 2, len(names))
    return sums.view(*shape, width), weights.view(shape)
