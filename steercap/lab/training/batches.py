"""Batches of training: the examples of each step, and their tensors.

The examples of a step depend on the seed, the trait's name and the step alone: a resumed run needs no sampler state,
and a trait has the same batches whether it is trained alone or beside others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch.utils.data import DataLoader, Dataset, Sampler

from steercap.core.tokens import TokenSelection, selected
from steercap.lab.training.examples import ExampleTokens


@dataclass(frozen=True, eq=False)
class Padded:
    """Token sequences of different lengths, padded at the end, where causal models do not attend to the padding.

    Args:
        ids: input tokens, all of a sequence but the last: int64 [n, t].
        targets: next token after each: int64 [n, t].
        counted: True where the next token belongs to the response: bool [n, t].
        scopes: True for the tokens that each token selection selects: bool [selections, n, t].
        owners: trait index of each sequence: int64 [n].
    """

    ids: Int[torch.Tensor, "n t"]
    targets: Int[torch.Tensor, "n t"]
    counted: Bool[torch.Tensor, "n t"]
    scopes: Bool[torch.Tensor, "selections n t"]
    owners: Int[torch.Tensor, " n"]

    def __add__(self, other: Padded) -> Padded:
        """Return the sequences of both, `other`'s last, padded to one length."""
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
    """Tokenised examples of one training step, from one or several traits.

    Args:
        roles: padded sequences by their role in an example: for pairs, `roles[0]` holds the first sequence of every
            example and `roles[1]` the second, in the order of `owners`.
        owners: trait index of each example: int64 [examples].
        draws: random number in [0, 1) for each example, for objectives that sample: float32 [examples]; None to average
            instead of sampling.
    """

    roles: tuple[Padded, ...]
    owners: Int[torch.Tensor, " examples"]
    draws: Float[torch.Tensor, " examples"] | None


@dataclass(frozen=True)
class Picked:
    """Example chosen for a step: its trait, its index in the trait, and its random number in [0, 1), None for none."""

    trait: int
    place: int
    draw: float | None


class EncodedExamples(Dataset[tuple[Picked, tuple[ExampleTokens, ...]]]):
    """Data set of the tokenised examples of several traits; indexed by `Picked`, which it returns with the tokens."""

    def __init__(self, traits: Sequence[Sequence[tuple[ExampleTokens, ...]]]) -> None:
        self._traits = traits

    def __len__(self) -> int:
        return sum(map(len, self._traits))

    def __getitem__(self, picked: Picked) -> tuple[Picked, tuple[ExampleTokens, ...]]:
        return picked, self._traits[picked.trait][picked.place]


class Steps(Sampler[list[Picked]]):
    """Batch sampler of the examples of each step; each trait cycles through its examples in random orders of its own.

    Args:
        sizes: number of examples of each trait, by name.
        size: number of examples of each trait in a step.
        seed: seed of the orders and draws.
        start, stop: range of steps, counted from 0.
        live: function that returns the indices of the traits still in training; called before each step.
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
            picked = [one for trait in self._live() for one in self._examples_of(trait, step)]
            yield picked[self._rank :: self._world]

    def __len__(self) -> int:
        return self._stop - self._start

    def _examples_of(self, trait: int, step: int) -> list[Picked]:
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
    """Return a random generator whose seed is a hash of the texts of `parts`."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def loader(
    examples: EncodedExamples, order: Any, selections: Sequence[TokenSelection], device: torch.device
) -> DataLoader[Any]:
    """Return a loader that yields a `Batch` on `device` for each list of examples that `order` yields.

    Args:
        examples: examples to load from.
        order: batch sampler, such as `Steps`.
        selections: token selections, each of which gets a mask.
        device: device of the batches.
    """
    return DataLoader(examples, batch_sampler=order, collate_fn=partial(collated, selections=selections, device=device))


def collated(
    found: Sequence[tuple[Picked, tuple[ExampleTokens, ...]]],
    selections: Sequence[TokenSelection],
    device: torch.device,
) -> Batch:
    """Collate examples to a `Batch` on `device`, with a mask for each of the token selections."""
    owners = torch.tensor([picked.trait for picked, _ in found])
    draws = [picked.draw for picked, _ in found]
    roles = zip(*(tokens for _, tokens in found), strict=True)
    drawn = None if None in draws else torch.tensor(draws, dtype=torch.float32).to(device)
    return Batch(tuple(padded(role, selections, owners, device) for role in roles), owners.to(device), drawn)


def padded(
    sequences: Sequence[ExampleTokens], selections: Sequence[TokenSelection], owners: torch.Tensor, device: torch.device
) -> Padded:
    """Pad sequences at the end to one length, on `device`; `owners` are their trait indices, int64 [n].

    Raises:
        EmptySelection, InvalidSelection: a selection does not fit one of the sequences.
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
