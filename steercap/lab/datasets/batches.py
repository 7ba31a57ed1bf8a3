"""Order of rows in batches: computed from a seed, so every worker and rank derives it without communication.

Only row indices are shuffled. Blocks of neighbouring rows are put in a random order and cut into windows of about
`buffer` rows; the indices in a window are put in a random order and cut into batches. So batch n can be computed
without the batches before it: each worker and rank computes its own batches, and an interrupted run can resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from steercap.core.values import count_of, shown
from steercap.errors import InvalidSetting
from steercap.lab.datasets.rows import Labelled, Rows

#: Rows of a block, which are neighbours on disk and read together: half a megabyte at 576 bfloat16 elements a row.
BLOCK: Final = 512


@dataclass(frozen=True)
class Order:
    """Settings by which rows are cut into batches; see `ActivationDataset.batches`."""

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
        """Return an order from the values of its fields, in their order, after checking them.

        Raises:
            InvalidSetting: a number is not whole, too small, or a rank is outside the world size.
        """
        said: dict[str, Any] = dict(zip((field.name for field in fields(Order)), values, strict=True))
        for name in ("batch_size", "buffer", "seed", "epochs", "world_size", "rank"):
            said[name] = _whole(said[name], name, 0 if name in {"seed", "rank"} else 1)  # JSON can hold a state then
        order = Order(**said)
        if order.rank >= order.world_size:
            raise InvalidSetting(f"rank={order.rank} of world_size={order.world_size}; ranks count from 0")
        return order

    def batches(self, rows: int) -> int:
        """Return the number of batches in an epoch of `rows` rows, over all ranks."""
        if self.drop_last:
            return rows // self.batch_size // self.world_size * self.world_size
        return -(-rows // self.batch_size)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of neighbouring rows that are read together: [start, stop) each, ascending, int64 [blocks]."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @staticmethod
    def of(edges: NDArray[np.int64], *, whole: bool) -> Blocks:
        """Return the blocks of shards; shard k has the rows [edges[k], edges[k + 1]), `edges` being int64 [shards + 1].

        Blocks have at most `BLOCK` rows, or are whole shards if `whole`.
        """
        shards = [(int(start), int(stop)) for start, stop in pairwise(edges)]
        parts = [np.arange(start, stop, max(1, stop - start) if whole else BLOCK) for start, stop in shards]
        starts = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return Blocks(starts, np.append(starts[1:], edges[-1])[: len(starts)])

    @property
    def rows(self) -> int:
        """Number of rows in all blocks."""
        return int((self.stops - self.starts).sum())

    @property
    def digest(self) -> str:
        """SHA-256 of the block boundaries, in hexadecimal."""
        return hashlib.sha256(np.stack([self.starts, self.stops]).tobytes()).hexdigest()


class Gathering(Protocol):
    """Interface of a source of rows for batches, such as `ActivationDataset`."""

    @property
    def identity(self) -> str:
        """Digest of which row has which index; equal for the same rows in another process."""

    def gather(self, numbers: NDArray[np.int64]) -> Rows | Labelled:
        """Return rows by their indices, in that order."""

    def foresee(self, start: int, stop: int) -> None:
        """Ask the operating system to read rows [start, stop) ahead into its cache."""


class Epoch:
    """Order of the rows in one epoch, number `number`, computed from the seed."""

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
        """Return the row indices of batch `number` of the epoch: int64 [rows]."""
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
        """Yield the blocks of rows, [start, stop) each, that are shuffled together as a window; none after the last."""
        part = slice(*self._first[window : window + 2]) if window + 1 < len(self._first) else slice(0)
        yield from zip(self._starts[part].tolist(), self._stops[part].tolist(), strict=True)

    def window(self, number: int) -> NDArray[np.int64]:
        """Return the row indices of window `number`, in their shuffled order: int64 [rows]."""
        if self._window[0] != number:
            rows = np.concatenate([np.arange(start, stop) for start, stop in self.blocks(number)])
            if self._order.shuffle:
                np.random.default_rng([self._order.seed, self._number, number + 1]).shuffle(rows)
            self._window = (number, rows)
        return self._window[1]

    def window_of(self, number: int) -> int:
        """Return the number of the window in which batch `number` begins."""
        return int(np.searchsorted(self._begins, number * self._order.batch_size, side="right")) - 1


class ActivationBatches(IterableDataset["Rows | Labelled"]):
    """Iterable of batches of an `ActivationDataset`; made by its `batches` method.

    Each item is a batch, so pass `batch_size=None` to a DataLoader. It may have any number of workers, forked or
    spawned; their number changes neither the batches nor their order. Iteration begins at the first batch, or after
    those skipped by `skip` or `load_state_dict`.

    Args:
        data: source of the rows.
        blocks: blocks of neighbouring rows.
        order: settings of the batches.
    """

    def __init__(self, data: Gathering, blocks: Blocks, order: Order) -> None:
        self._data, self._blocks, self.order = data, blocks, order
        self._skipped = self._begin = self._given = 0
        self._workers = 1  # number of workers when `_begin` was saved; `_begin` counts the batches of one of them

    def __repr__(self) -> str:
        order = self.order
        shuffled = f"shuffled within {order.buffer:,}" if order.shuffle else "in order"
        return f"ActivationBatches({len(self):,} to come, of {order.batch_size} rows, {shuffled}, seed={order.seed})"

    def __len__(self) -> int:
        """Return the number of this rank's batches that the next iteration yields, over all epochs."""
        return max(0, self._each * self.order.epochs - self._skipped - self._begin * self._workers)

    def __iter__(self) -> Iterator[Rows | Labelled]:
        number, workers = _worker()
        if self._begin and workers != self._workers:
            raise InvalidSetting(
                f"the state was saved by one of {self._workers} workers, and now there are {workers}; load it with as "
                "many workers, or call skip() with the number of batches that were given"
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
        """Begin every iteration after the first `batches` batches of this rank, for any number of workers.

        The skip applies until the next call; `skip(0)` undoes it. With a DataLoader with `persistent_workers=True`,
        call `skip` before the first iteration.

        Raises:
            InvalidSetting: `batches` is not a whole number of at least 0.
        """
        self._skipped, self._begin, self._given = _whole(batches, "batches", 0), 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration state of this process, as torchdata's StatefulDataLoader stores it for each worker."""
        said = {field.name: getattr(self.order, field.name) for field in fields(self.order)}
        return {
            "order": said,
            "rows": self._blocks.rows,
            "blocks": self._blocks.digest,
            "data": self._data.identity,
            "workers": _worker()[1],
            "skipped": self._skipped,
            "given": self._given,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next iteration after the batches that were returned before `state_dict` was called.

        Raises:
            InvalidSetting: the state belongs to other batches, or is malformed.
        """
        wanted = self.state_dict()
        if not isinstance(state, dict) or {"data", *state} != wanted.keys():  # older states lack "data"
            raise InvalidSetting(f"{shown(state)} is not a state of batches; give the result of state_dict()")
        if state.get("data", wanted["data"]) != wanted["data"]:
            raise InvalidSetting(
                "this is the state of batches of other rows; load it with the same data set, positions=, "
                "without_tokens= and keep="
            )
        if any(state[name] != wanted[name] for name in ("order", "rows", "blocks")):
            raise InvalidSetting(
                f"this is the state of other batches: {state['order']} of {state['rows']} rows, in blocks "
                f"{shown(state['blocks'])}; rows behind a URL are read in other blocks than those of a folder"
            )
        self._skipped, self._workers = _whole(state["skipped"], "skipped", 0), _whole(state["workers"], "workers")
        self._begin = self._given = _whole(state["given"], "given", 0)

    @property
    def _each(self) -> int:
        """Number of this rank's batches in an epoch."""
        return len(range(self.order.rank, self.order.batches(self._blocks.rows), self.order.world_size))

    def _foresee(self, epoch: Epoch, window: int, foreseen: int) -> int:
        """Ask the system to read a window and the next ahead, unless done up to `foreseen`; return the last done."""
        for ahead in range(max(window, foreseen + 1), window + 2):
            for start, stop in epoch.blocks(ahead):
                self._data.foresee(start, stop)
        return max(foreseen, window + 1)


_whole: Final = partial(count_of, wrong=InvalidSetting)


def _worker() -> tuple[int, int]:
    """Return the index of this DataLoader worker and the number of workers; (0, 1) outside a worker."""
    worker = get_worker_info()
    return (worker.id, worker.num_workers) if worker else (0, 1)


def ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, else those of torch.distributed if initialised, else 0 and 1.

    Raises:
        InvalidSetting: only one of the two is given.
    """
    if (rank is None) != (world_size is None):
        raise InvalidSetting(f"rank={rank}, world_size={world_size}; give both, or neither")
    if rank is not None and world_size is not None:
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
