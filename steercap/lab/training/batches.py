"""Which examples each step has, and the tensors that they become.

What a step has is a function of the seed, the trait's name and the step: a run that goes on needs no state of a
sampler, and a trait that is trained beside others has the batches that it has alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch.utils.data import DataLoader, Dataset, Sampler

from steercap.core.tokens import TokenSelection, selected
from steercap.lab.training.examples import Tokens


@dataclass(frozen=True, eq=False)
class Padded:
    """Sequences of different lengths side by side, padded behind: causal models see nothing of it.

    Args:
        ids: what the model reads, all tokens of a sequence but the last: int64 [n, t].
        targets: the token behind each: int64 [n, t].
        counted: where that token is of the response: bool [n, t].
        scopes: the tokens that each selection holds: bool [selections, n, t].
        owners: the trait of each sequence: int64 [n].
    """

    ids: Int[torch.Tensor, "n t"]
    targets: Int[torch.Tensor, "n t"]
    counted: Bool[torch.Tensor, "n t"]
    scopes: Bool[torch.Tensor, "selections n t"]
    owners: Int[torch.Tensor, " n"]

    def __add__(self, other: Padded) -> Padded:
        """The sequences of both."""
        longest = max(self.ids.shape[1], other.ids.shape[1])
        mine, theirs = self._to(longest), other._to(longest)
        names = {"ids": 0, "targets": 0, "counted": 0, "scopes": 1, "owners": 0}
        return Padded(
            **{name: torch.cat([getattr(mine, name), getattr(theirs, name)], dim=axis) for name, axis in names.items()}
        )

    def _to(self, length: int) -> Padded:
        more = (0, length - self.ids.shape[1])
        wide = ("ids", "targets", "counted", "scopes")
        return replace(self, **{name: torch.nn.functional.pad(getattr(self, name), more) for name in wide})


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples of a step, of any traits.

    Args:
        roles: of each kind of sequence that an example has, those of all examples, in the same order.
        owners: the trait of each example: int64 [examples].
        draws: of each example a number in [0, 1) for what is sampled: float32 [examples]; None where nothing is
            sampled, and what would be is averaged over.
    """

    roles: tuple[Padded, ...]
    owners: Int[torch.Tensor, " examples"]
    draws: Float[torch.Tensor, " examples"] | None


@dataclass(frozen=True)
class Picked:
    """One example of a step: its trait, its place there, and its draw."""

    trait: int
    place: int
    draw: float | None


class Encoded(Dataset[tuple[Picked, tuple[Tokens, ...]]]):
    """Examples of several traits as tokens, by trait and place."""

    def __init__(self, traits: Sequence[Sequence[tuple[Tokens, ...]]]) -> None:
        self._traits = traits

    def __len__(self) -> int:
        return sum(map(len, self._traits))

    def __getitem__(self, picked: Picked) -> tuple[Picked, tuple[Tokens, ...]]:
        return picked, self._traits[picked.trait][picked.place]


class Steps(Sampler[list[Picked]]):
    """The examples of each step from one on, each trait going through its own in an order of its own, again and again.

    Args:
        sizes: examples of each trait, by its name.
        size: examples of each trait in a step.
        seed: of the orders and draws.
        start, stop: steps, counted from 0.
        live: the traits that are still trained, asked before each step.
        rank, world: this process takes every `world`-th example of a step, from the `rank`-th on.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        size: int,
        seed: int,
        *,
        start: int,
        stop: int,
        live: Callable[[], Sequence[int]],
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._names, self._sizes = list(sizes), list(sizes.values())
        self._size, self._seed, self._start, self._stop, self._live = size, seed, start, stop, live
        self._rank, self._world = rank, world

    def __iter__(self) -> Iterator[list[Picked]]:
        for step in range(self._start, self._stop):
            picked = [one for trait in self._live() for one in self._of(trait, step)]
            yield picked[self._rank :: self._world]

    def __len__(self) -> int:
        return self._stop - self._start

    def _of(self, trait: int, step: int) -> list[Picked]:
        name, count = self._names[trait], self._sizes[trait]
        draws = torch.rand(self._size, generator=generator(self._seed, name, "draw", step)).tolist()
        places = range(step * self._size, (step + 1) * self._size)
        orders = {epoch: self._order(name, count, epoch) for epoch in {place // count for place in places}}
        return [
            Picked(trait, orders[place // count][place % count], draw)
            for place, draw in zip(places, draws, strict=True)
        ]

    def _order(self, name: str, count: int, epoch: int) -> list[int]:
        order: list[int] = torch.randperm(count, generator=generator(self._seed, name, "order", epoch)).tolist()
        return order


def generator(*parts: object) -> torch.Generator:
    """A generator whose seed follows from these parts alone."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def loader(
    examples: Encoded, order: Any, selections: Sequence[TokenSelection], device: torch.device
) -> DataLoader[Any]:
    """Batches of examples, read when they are asked for.

    Args:
        examples: of all traits.
        order: the examples of each batch.
        selections: of tokens, what the edits are of.
        device: where the tensors go.
    """

    def collate(found: Sequence[tuple[Picked, tuple[Tokens, ...]]]) -> Batch:
        return collated(found, selections, device)

    return DataLoader(examples, batch_sampler=order, collate_fn=collate)


def collated(
    found: Sequence[tuple[Picked, tuple[Tokens, ...]]], selections: Sequence[TokenSelection], device: torch.device
) -> Batch:
    """Examples as a batch."""
    owners = torch.tensor([picked.trait for picked, _ in found])
    draws = [picked.draw for picked, _ in found]
    roles = zip(*(tokens for _, tokens in found), strict=True)
    drawn = None if None in draws else torch.tensor(draws, dtype=torch.float32).to(device)
    return Batch(tuple(padded(role, selections, owners, device) for role in roles), owners.to(device), drawn)


def padded(
    sequences: Sequence[Tokens], selections: Sequence[TokenSelection], owners: torch.Tensor, device: torch.device
) -> Padded:
    """Sequences side by side.

    Raises:
        EmptySelection, InvalidSelection: a selection that does not fit one of them.
    """
    longest = max(one.inputs for one in sequences)
    ids, targets = (torch.zeros(len(sequences), longest, dtype=torch.int64) for _ in range(2))
    counted = torch.zeros(len(sequences), longest, dtype=torch.bool)
    scopes = torch.zeros(len(selections), len(sequences), longest, dtype=torch.bool)
    for row, one in enumerate(sequences):
        ids[row, : one.inputs] = torch.tensor(one.ids[:-1])
        targets[row, : one.inputs] = torch.tensor(one.ids[1:])
        counted[row, one.prompt_len - 1 : one.inputs] = True
        for number, selection in enumerate(selections):
            chosen = selected(selection.ranges(one.prompt_len, one.inputs), one.inputs)
            scopes[number, row, : one.inputs] = torch.from_numpy(chosen)
    return Padded(*(tensor.to(device) for tensor in (ids, targets, counted, scopes, owners)))
