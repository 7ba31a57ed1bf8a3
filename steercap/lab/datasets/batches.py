"""In which order rows come: a plan that follows from a seed, which every worker and rank makes for itself.

Nothing is shuffled but numbers. Blocks of neighbouring rows are put in a random order, and cut into windows of about
`buffer` rows; the numbers in a window are put in a random order, and cut into batches. So the n-th batch is known
without those before it: workers and ranks take their own, and a run goes on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from steercap.core.values import index_of, shown
from steercap.errors import InvalidSetting
from steercap.lab.datasets.rows import Labelled, Rows

#: Rows of a block: neighbours on the disk that are read together. Of 576 elements in bfloat16 they are half a megabyte.
BLOCK: Final = 512


@dataclass(frozen=True)
class Order:
    """How rows are cut into batches; see `ActivationDataset.batches`."""

    batch_size: int
    shuffle: bool
    buffer: int
    seed: int
    epochs: int
    drop_last: bool
    rank: int = 0
    world_size: int = 1

    @staticmethod
    def checked(*values: Any) -> Order:
        """Of what a user gives.

        Raises:
            InvalidSetting: a number that is too small.
        """
        said: dict[str, Any] = dict(zip((field.name for field in fields(Order)), values, strict=True))
        for name in ("batch_size", "buffer", "seed", "epochs", "world_size", "rank"):
            said[name] = _whole(name, said[name], 0 if name in {"seed", "rank"} else 1)  # JSON can hold a state then
        order = Order(**said)
        if order.rank >= order.world_size:
            raise InvalidSetting(f"rank={order.rank} of world_size={order.world_size}; ranks count from 0")
        return order

    def batches(self, rows: int) -> int:
        """Batches in an epoch, of all ranks together."""
        if self.drop_last:
            return rows // self.batch_size // self.world_size * self.world_size
        return -(-rows // self.batch_size)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Neighbouring rows that are read together: [start, stop) each, ascending: int64 [blocks]."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @staticmethod
    def of(edges: NDArray[np.int64], *, whole: bool) -> Blocks:
        """Blocks of shards whose rows lie between `edges`.

        Args:
            edges: ascending from 0: int64 [shards + 1].
            whole: a block for each shard.
        """
        shards = [(int(start), int(stop)) for start, stop in pairwise(edges)]
        parts = [np.arange(start, stop, max(1, stop - start) if whole else BLOCK) for start, stop in shards]
        starts = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return Blocks(starts, np.append(starts[1:], edges[-1])[: len(starts)])

    @property
    def rows(self) -> int:
        """Rows of all of them."""
        return int((self.stops - self.starts).sum())

    @property
    def digest(self) -> str:
        """SHA-256 of where they begin and end, in hexadecimal."""
        return hashlib.sha256(np.stack([self.starts, self.stops]).tobytes()).hexdigest()


class Gathering(Protocol):
    """Where batches take their rows from: an `ActivationDataset`."""

    def gather(self, numbers: NDArray[np.int64]) -> Rows | Labelled:
        """Rows by their numbers, in that order."""

    def foresee(self, start: int, stop: int) -> None:
        """Have the system read rows [start, stop) ahead."""


class Epoch:
    """The order of one epoch.

    Args:
        blocks: of the rows.
        order: how they are cut.
        number: of the epoch.
    """

    def __init__(self, blocks: Blocks, order: Order, number: int) -> None:
        self._order, self._number = order, number
        chosen = np.arange(len(blocks.starts))
        if order.shuffle:
            np.random.default_rng([order.seed, number]).shuffle(chosen)
        self._starts, self._stops = blocks.starts[chosen], blocks.stops[chosen]
        self._ends = np.cumsum(self._stops - self._starts)
        window = (self._ends - (self._stops - self._starts)) // order.buffer
        first = np.flatnonzero(np.diff(window, prepend=-1))
        self._begins = np.append(0, self._ends)[first]  # rows before each window
        self._first = np.append(first, len(chosen))  # the first block of each, and the end
        self._window: tuple[int, NDArray[np.int64]] = (-1, chosen)

    def batch(self, number: int) -> NDArray[np.int64]:
        """Numbers of the rows of a batch."""
        start = number * self._order.batch_size
        stop = min(start + self._order.batch_size, int(self._ends[-1]))
        parts = []
        while start < stop:
            window = int(np.searchsorted(self._begins, start, side="right")) - 1
            rows, begin = self.window(window), int(self._begins[window])
            parts.append(rows[start - begin : stop - begin])
            start += len(parts[-1])
        return np.concatenate(parts)

    def blocks(self, window: int) -> Iterator[tuple[int, int]]:
        """The blocks of a window, [start, stop) each; none behind the last."""
        part = slice(*self._first[window : window + 2]) if window + 1 < len(self._first) else slice(0)
        yield from zip(self._starts[part].tolist(), self._stops[part].tolist(), strict=True)

    def window(self, number: int) -> NDArray[np.int64]:
        """Numbers of the rows of a window, in their order."""
        if self._window[0] != number:
            rows = np.concatenate([np.arange(start, stop) for start, stop in self.blocks(number)])
            if self._order.shuffle:
                np.random.default_rng([self._order.seed, self._number, number + 1]).shuffle(rows)
            self._window = (number, rows)
        return self._window[1]

    def window_of(self, number: int) -> int:
        """The window in which a batch begins."""
        return int(np.searchsorted(self._begins, number * self._order.batch_size, side="right")) - 1


class ActivationBatches(IterableDataset["Rows | Labelled"]):
    """Batches of an `ActivationDataset`; made by its `batches`.

    Each item is a batch, so a DataLoader takes it with `batch_size=None`. It may have any number of workers, forked or
    spawned; their number does not change what comes, nor its order. Iterating begins at the first batch, or behind
    those that `skip` or `load_state_dict` says.

    Args:
        data: whose rows.
        blocks: of its rows.
        order: how they come.
    """

    def __init__(self, data: Gathering, blocks: Blocks, order: Order) -> None:
        self._data, self._blocks, self.order = data, blocks, order
        self._skipped = self._begin = self._given = 0
        self._workers = 1  # of those that `_begin` counts the batches of one of

    def __len__(self) -> int:
        """Batches of all epochs that are still to come, of this rank."""
        return max(0, self._each * self.order.epochs - self._skipped - self._begin * self._workers)

    def __iter__(self) -> Iterator[Rows | Labelled]:
        number, workers = _worker()
        if self._begin and workers != self._workers:
            raise InvalidSetting(
                f"the state is that of one of {self._workers} workers, and now there are {workers}; load it in as "
                "many, or say with skip() how many batches were given"
            )
        mine = range(self._skipped, self._each * self.order.epochs)[number::workers]
        begun, self._begin = self._begin, 0
        epoch, of_epoch, foreseen = None, -1, -1
        for given, which in enumerate(mine):
            if given < begun:
                continue
            turn, within = divmod(which, self._each)
            if epoch is None or turn != of_epoch:
                epoch, of_epoch, foreseen = Epoch(self._blocks, self.order, turn), turn, -1
            batch = self.order.rank + within * self.order.world_size
            foreseen = self._foresee(epoch, epoch.window_of(batch), foreseen)
            self._given = given + 1
            yield self._data.gather(epoch.batch(batch))

    def skip(self, batches: int) -> None:
        """Have every iteration begin behind so many batches of this rank, whatever the number of workers.

        It holds until it is said anew, `skip(0)` for all of them. A DataLoader with `persistent_workers=True` must be
        told before its first iteration.

        Raises:
            InvalidSetting: no number of batches.
        """
        self._skipped, self._begin, self._given = _whole("batches", batches, 0), 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where iteration is, in this process: what torchdata's StatefulDataLoader keeps of each worker."""
        said = {field.name: getattr(self.order, field.name) for field in fields(self.order)}
        return {
            "order": said,
            "rows": self._blocks.rows,
            "blocks": self._blocks.digest,
            "workers": _worker()[1],
            "skipped": self._skipped,
            "given": self._given,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have iteration go on where `state_dict` was taken.

        Raises:
            InvalidSetting: it was taken of other batches, or is no such state.
        """
        wanted = self.state_dict()
        if not isinstance(state, dict) or state.keys() != wanted.keys():
            raise InvalidSetting(f"{shown(state)} is no state of batches; give what state_dict() gave")
        if any(state[name] != wanted[name] for name in ("order", "rows", "blocks")):
            raise InvalidSetting(
                f"this is the state of other batches: {state['order']} of {state['rows']} rows, in blocks "
                f"{shown(state['blocks'])}; rows behind a URL are read in other blocks than those of a folder"
            )
        self._skipped, self._workers = _whole("skipped", state["skipped"], 0), _whole("workers", state["workers"], 1)
        self._begin = self._given = _whole("given", state["given"], 0)

    @property
    def _each(self) -> int:
        """Batches of this rank in an epoch."""
        return len(range(self.order.rank, self.order.batches(self._blocks.rows), self.order.world_size))

    def _foresee(self, epoch: Epoch, window: int, foreseen: int) -> int:
        """Have the system read this window and the next, those that it has not been told of."""
        for ahead in range(max(window, foreseen + 1), window + 2):
            for start, stop in epoch.blocks(ahead):
                self._data.foresee(start, stop)
        return max(foreseen, window + 1)


def _whole(name: str, value: Any, least: int) -> int:
    """A whole number of at least so much.

    Raises:
        InvalidSetting: it is none.
    """
    if (found := index_of(value)) is None or found < least:
        raise InvalidSetting(f"{name}={shown(value)}; give a whole number of at least {least}")
    return found


def _worker() -> tuple[int, int]:
    """Which of a DataLoader's workers this process is, and of how many; 0 of 1 where it is none."""
    worker = get_worker_info()
    return (worker.id, worker.num_workers) if worker else (0, 1)


def ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks: as given, those of torch.distributed, or 0 of 1.

    Raises:
        InvalidSetting: one is given without the other.
    """
    if (rank is None) != (world_size is None):
        raise InvalidSetting(f"rank={rank}, world_size={world_size}; give both, or neither")
    if rank is not None and world_size is not None:
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
