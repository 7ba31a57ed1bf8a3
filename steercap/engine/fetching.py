"""Fetching of finished requests' rows out of the workers' arenas, on threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final, TypeAlias

import torch

from steercap.concurrency.loops import each_of
from steercap.core.framing import in_batches
from steercap.core.messages import CapturedRows, Unknown
from steercap.core.receipt import knowing
from steercap.engine.ranks import Rank, Ranks
from steercap.errors import CaptureIncomplete, ModelClosed
from steercap.kernels.codecs import ENCODINGS
from steercap.kernels.codecs.coded import CodedRows
from steercap.worker.assembly import PART_BYTES, Assembly, stored_bytes
from steercap.worker.memory import Readable

#: Bytes from which rows are copied on threads, so that the event loop is not blocked for more than about 0.1 ms.
THREAD_BYTES: Final = 256 << 10
#: Maximum number of copying threads. One copies 2 to 4 GB/s to fresh memory (scripts/bench_fetch.py); twelve copied
#: 94 MB in 3.4 ms where eight took 4.9 (16 cores).
MOST_THREADS: Final = 12
#: Maximum number of requests per task on a thread, so that neither thread nor event loop holds Python's GIL for long.
LOAD_REQUESTS: Final = 16


#: Each capturing worker's answer about one sample of a request, engine by engine.
WorkerAnswers: TypeAlias = Sequence[Sequence[CapturedRows | Unknown]]


@dataclass(frozen=True)
class Delivery:
    """Fetched rows of one sample of a request, or the reason why there are none.

    Args:
        shares: answers of the capturing workers that have rows of it.
        shards: rows of each point by point index: one item, or one per shard in rank order.
        failure: error that a worker reported, or None.
    """

    shares: tuple[CapturedRows, ...]
    shards: Mapping[int, tuple[torch.Tensor | CodedRows, ...]]
    failure: str | None

    def joined(self, shards: Sequence[torch.Tensor | CodedRows]) -> torch.Tensor | CodedRows:
        """Join the shards of one point's rows, in rank order, to whole rows."""
        coded = [shard for shard in shards if isinstance(shard, CodedRows)]
        if coded:
            return CodedRows.joined(coded)
        tensors = [shard for shard in shards if isinstance(shard, torch.Tensor)]
        return ENCODINGS[self.shares[0].coding.encoding].joined(tensors)


@dataclass
class _Order:
    """One sample whose rows are being fetched.

    Args:
        gathered: workers that have rows of it, each with its answer, which locates them.
        failure: reason why the rows cannot be fetched, or None.
        assemblies: destination of each worker's rows, in the order of `gathered`.
    """

    gathered: list[tuple[Rank, CapturedRows]]
    failure: str | None
    assemblies: list[Assembly] = field(default_factory=list)

    @cached_property
    def size(self) -> int:
        """Bytes of the rows, over all workers."""
        return sum(stored_bytes(captured_rows, rank.schemas_in(captured_rows)) for rank, captured_rows in self.gathered)

    def delivery(self) -> Delivery:
        """Return the fetched rows, or the failure; a missing shard is a failure."""
        shares = tuple(captured_rows for _, captured_rows in self.gathered)
        if self.failure:
            return Delivery(shares, {}, self.failure)
        shards: dict[int, list[tuple[int, torch.Tensor | CodedRows]]] = {}
        wanted: dict[int, int] = {}
        for (rank, captured_rows), assembly in zip(self.gathered, self.assemblies, strict=True):
            for point, schema, rows in zip(
                captured_rows.points, rank.schemas_in(captured_rows), assembly.rows(), strict=True
            ):
                shards.setdefault(point, []).append((rank.attached.shard, rows))
                wanted[point] = schema.shards
        for point, found in shards.items():
            found.sort(key=lambda one: one[0])
            numbers = [number for number, _ in found]  # whole rows have no shard number
            if len(found) != wanted[point] or (wanted[point] > 1 and numbers != list(range(wanted[point]))):
                failure = f"{len(found)} of {wanted[point]} shards of a point arrived"
                return Delivery(shares, {}, failure)
        return Delivery(shares, {point: tuple(rows for _, rows in found) for point, found in shards.items()}, None)


class Fetcher:
    """Fetcher of rows out of an engine's arenas, on a bounded pool of threads, which start at the first fetch.

    Args:
        threads: maximum number of threads; by default one less than this process's cores, at most `MOST_THREADS`.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads: Final = threads or max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) - 1))
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="steercap fetcher")
        self._closed = False

    async def deliver(self, ranks: Ranks, found: Sequence[WorkerAnswers]) -> list[Delivery]:
        """Copy the rows of many samples out of the workers' arenas.

        Args:
            ranks: capturing workers, engine by engine.
            found: for each sample, the answers of these workers.

        Returns:
            A delivery per sample, in the order of `found`.

        Raises:
            EngineFailure: the model was closed, or a worker could not answer.
        """
        # A task on a thread for each small request is not worth it.
        orders = (_order(ranks, one) for one in found)
        loads = in_batches(orders, lambda order: order.size, PART_BYTES, LOAD_REQUESTS)
        # One more than there are threads, so that a thread that has finished finds work.
        delivered = await each_of(loads, self._deliver, self.threads + 1)
        return [delivery for load in delivered for delivery in load]

    def close(self) -> None:
        """Fail all waiting fetches, and end the threads; blocks until they end. Idempotent."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)

    async def _deliver(self, orders: Sequence[_Order]) -> list[Delivery]:
        sources = [
            [await rank.reader.read(captured_rows.lines) for rank, captured_rows in order.gathered] for order in orders
        ]
        parts: list[Callable[[], None]] = []
        made: list[Delivery] = []

        def begin() -> None:
            for order, readable in zip(orders, sources, strict=True):
                parts.extend(_begin(order, readable))
            if not parts:
                end()

        def end() -> None:
            made.extend(order.delivery() for order in orders)

        if sum(order.size for order in orders) < THREAD_BYTES:
            begin()
            await asyncio.sleep(0)
            return made
        await self._all([begin])
        if parts:
            await self._all(parts)
            await self._all([end])  # codes of a codec are taken apart, which copies them
        return made

    async def _all(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run calls on the threads and wait for them; if the caller is cancelled, those not begun are dropped."""
        self._require_open()
        queued = [self._pool.submit(call) for call in calls]
        try:
            for future in queued:
                await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # it was the pool that ended
                self._require_open()
            raise
        finally:
            for future in queued:
                future.cancel()

    def _require_open(self) -> None:
        if self._closed:
            raise ModelClosed("the model was closed while rows were fetched")


def shares_of(found: WorkerAnswers) -> tuple[list[CapturedRows], str | None]:
    """Return the answers of the one engine that ran a sample.

    Returns:
        The captured rows, worker by worker, and the reason why they cannot be used, or None.
    """
    known = knowing(found)
    if len(known) != 1:
        claim = f"engines {', '.join(map(str, known))} all have" if known else "no worker has"
        return [], f"{claim} rows of this request"
    shares, failure = [], None
    for number, captured_rows in enumerate(found[known[0]]):
        if isinstance(captured_rows, Unknown):
            failure = failure or f"worker {number} of engine {known[0]} has no rows of this request"
        else:
            failure = failure or captured_rows.failure
            shares.append(captured_rows)
    return shares, failure


def _order(ranks: Ranks, found: WorkerAnswers) -> _Order:
    """Make the order for one sample; it fails unless one engine alone ran the sample and all its workers have rows."""
    shares, failure = shares_of(found)
    if failure:
        return _Order([], failure)
    (engine,) = knowing(found)
    if reason := next(filter(None, map(Rank.invalid_reason, ranks[engine], shares)), None):
        return _Order([], reason)
    gathered = [
        (rank, captured_rows) for rank, captured_rows in zip(ranks[engine], shares, strict=True) if captured_rows.points
    ]
    return _Order(gathered, None)


def _begin(order: _Order, sources: Sequence[Readable]) -> list[Callable[[], None]]:
    """Locate an order's rows, allocate memory for them, and copy small ones; return the calls that copy large ones."""
    try:
        for (rank, captured_rows), source in zip(order.gathered, sources, strict=True):
            assembly = Assembly(captured_rows, rank.schemas_in(captured_rows), source, rank.attached.shard)
            order.assemblies.append(assembly)
    except CaptureIncomplete as error:
        order.failure, order.assemblies = str(error), []
    parts: list[Callable[[], None]] = [
        partial(assembly.fill, part) for assembly in order.assemblies for part in assembly.parts
    ]
    if order.size >= PART_BYTES:
        return parts
    for fill in parts:
        fill()
    return []
