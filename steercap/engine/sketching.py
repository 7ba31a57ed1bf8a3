"""Sketches (running statistics of rows on the workers): their records on the client, and the calls of the workers.

A request's rows enter a sketch on every worker that captures its points, or on none. The client's row count is compared
with the workers' whenever a sketch is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from steercap.core.messages import (
    CloseSketch,
    Collected,
    CommitSketch,
    Joining,
    OpenSketch,
    PrepareSketch,
    ReadSketch,
    SketchCommitted,
    SketchOpened,
    SketchPart,
)
from steercap.core.spec import Point
from steercap.engine.fetching import WorkerAnswers
from steercap.engine.ranks import Rank, Ranks
from steercap.engine.workers import Batcher, Workers
from steercap.errors import PointSplit, SketchClosed, SketchIncomplete, SketchMemoryFull
from steercap.kernels.sketches import SKETCHES, Kind, SketchState

#: Maximum bytes of a sketch's state in one answer of a worker.
PIECE_BYTES: Final = 256 << 20


@dataclass
class SketchRecord:
    """The client's record of a sketch.

    Args:
        name: name of the sketch.
        kind, size: key of `SKETCHES`, and the kind's own size parameter.
        points: points whose rows enter it, with their indices among the engine's armed points.
        requests: number of samples of requests that have entered it.
        rows: number of rows that have entered it, per point.
        broken: reason why its counts are unreliable, or None.
        unsure: number of requests to a server that failed in transit, whose rows may have entered nevertheless.
        closed: True once it was freed.
    """

    name: str
    kind: str
    size: int
    points: dict[Point, int]
    requests: int = 0
    rows: int = 0
    broken: str | None = None
    closed: bool = False
    unsure: int = 0

    def require(self) -> None:
        """Check that the sketch is open and reliable.

        Raises:
            SketchClosed, SketchIncomplete: it was freed, or `broken` is set.
        """
        if self.closed:
            raise SketchClosed(
                "this sketch ended with the block that it was opened for, and its statistics are freed; call fetch() "
                "inside the block, and use its result"
            )
        if self.broken:
            raise SketchIncomplete(f"this sketch cannot be trusted: {self.broken}; begin another one")


class Sketching:
    """Registry of an engine's sketches: opens, fills, reads and frees them on the workers.

    Args:
        workers: connection to the workers.
        ranks: capturing workers, engine by engine.
        most_bytes: maximum bytes of all sketches on a worker.
    """

    def __init__(self, workers: Workers, ranks: Ranks, most_bytes: int) -> None:
        self._workers, self._ranks, self._most_bytes = workers, ranks, most_bytes
        self._preparing: Batcher[Joining, WorkerAnswers] = Batcher(self._prepare)
        self._committing: Batcher[tuple[tuple[Joining, ...], tuple[SketchRecord, ...]], int] = Batcher(self._commit)
        self._turn = asyncio.Lock()  # so that no reader sees a request half entered
        self._records: list[SketchRecord] = []

    async def aclose(self) -> None:
        """Fail all callers that wait for `prepare` or `commit`. Idempotent."""
        await self._preparing.aclose()
        await self._committing.aclose()

    def mark_broken(self, why: str) -> None:
        """Mark all sketches as broken with the reason `why`, since the workers have died."""
        for record in self._records:
            record.broken = record.broken or why

    async def open(self, record: SketchRecord) -> None:
        """Allocate a sketch on every worker.

        Raises:
            PointSplit: the kind needs whole rows, and a point's rows are split over ranks.
            SketchMemoryFull: a worker has no room for it.
        """
        kind = SKETCHES[record.kind]
        for rank in self._all_ranks if kind.whole else ():
            for point, index in record.points.items():
                if index in rank.schemas and rank.schemas[index].shards > 1:
                    raise PointSplit(
                        f"the rows of {point} are split over {rank.schemas[index].shards} ranks, and a {record.kind} "
                        "sketch needs whole ones; use the kind 'variances' there, or other sites"
                    )
        indices = tuple(sorted(record.points.values()))
        asked = OpenSketch(record.name, record.kind, record.size, indices, self._most_bytes)
        self._records.append(record)
        try:
            engines = await self._workers.ask(asked, SketchOpened)
        except BaseException:
            await asyncio.shield(self.close(record))  # some workers may have allocated it
            raise
        refusals = [answer.refused for answers in engines for answer in answers if answer.refused]
        if refusals:
            await self.close(record)
            raise SketchMemoryFull(
                f"there is no room for a {record.kind} sketch of {len(record.points)} points: {refusals[0]}; sketch "
                "fewer layers, use the kind 'frequent_directions' or 'variances', or raise "
                "SteerModel(..., sketch_bytes=)"
            )

    async def close(self, record: SketchRecord) -> None:
        """Free a sketch on the workers, unless the model is closed, which frees all of them. Idempotent."""
        if not record.closed:
            record.closed = True
            self._records = [one for one in self._records if one is not record]
            if not self._workers.closed:
                await self._workers.ask(CloseSketch(record.name), SketchOpened)

    async def prepare(self, joining: Joining) -> WorkerAnswers:
        """Prepare a finished sample for its sketches; return each capturing worker's answer. See `PrepareSketch`."""
        return await self._preparing.ask(joining)

    async def commit(self, samples: Sequence[Joining], records: Sequence[SketchRecord]) -> int:
        """Add the prepared rows of a request's samples to its sketches; return the number of rows, -1 if none.

        They are added even if the caller is cancelled; its sketches are then marked as broken, since the count is
        unknown.

        Args:
            samples: one item per sample, each given to `prepare` before.
            records: the request's sketches.

        Raises:
            SketchIncomplete: rows were not added, or not on all workers.
        """
        try:
            return await self._committing.ask((tuple(samples), tuple(records)))
        except asyncio.CancelledError:
            for record in records:
                record.broken = record.broken or "a request was cancelled while its rows entered"
            raise

    async def states(self, record: SketchRecord, points: Sequence[Point]) -> tuple[dict[Point, SketchState], int]:
        """Read the statistics of points, merged over all engines; no request enters between two of them.

        Returns:
            Statistics by point, and the number of samples in them.

        Raises:
            SketchClosed, SketchIncomplete: the sketch was freed, or its number of rows differs from the client's count.
        """
        async with self._turn:
            return {point: await self._state(record, point) for point in points}, record.requests

    async def _prepare(self, joining: Sequence[Joining]) -> list[WorkerAnswers]:
        engines = await self._workers.ask(PrepareSketch(tuple(joining)), Collected)
        return [[[answer.shares[at] for answer in answers] for answers in engines] for at in range(len(joining))]

    async def _commit(self, requests: Sequence[tuple[tuple[Joining, ...], tuple[SketchRecord, ...]]]) -> list[int]:
        records = {record.name: record for _, known in requests for record in known}
        joinings = tuple(joining for samples, _ in requests for joining in samples)
        async with self._turn:
            try:
                engines = await self._workers.ask(CommitSketch(joinings), SketchCommitted)
            except BaseException as error:
                for record in records.values():
                    record.broken = record.broken or f"it is unknown whether rows of a request entered it: {error!r}"
                raise
            added = iter(
                [[answer.rows[at] for answer in answers] for answers in engines] for at in range(len(joinings))
            )
            return [self._count(known, [next(added) for _ in samples]) for samples, known in requests]

    @staticmethod
    def _count(records: Sequence[SketchRecord], samples: Sequence[Sequence[Sequence[int]]]) -> int:
        """Count a request in its sketches' records, and return its number of rows; -1 if no engine added any.

        One engine's workers must all have added equally many rows of each sample, and all others none; otherwise the
        records are marked as broken, and nothing is raised.

        Args:
            records: records of the request's sketches.
            samples: for each sample, engine by engine, the rows that each worker added; -1 for none.
        """
        ran = [[set(ranks) for ranks in answers if set(ranks) != {-1}] for answers in samples]
        if not any(ran):
            return -1
        rows = sum(min(engines[0]) for engines in ran if engines)
        for record in records:
            if any(len(engines) != 1 or len(engines[0]) != 1 for engines in ran):
                record.broken = f"the workers took in {samples} rows of a request"
            record.requests += len(samples)
            record.rows += rows
        return rows

    async def _state(self, record: SketchRecord, point: Point) -> SketchState:
        record.require()
        kind, index = SKETCHES[record.kind], record.points[point]
        widths = [[rank.schemas[index].shard_width for rank in ranks if index in rank.schemas] for ranks in self._ranks]
        wanted = max(kind.nbytes(width, record.size) for ranks in widths for width in ranks)
        pieces: list[list[list[SketchPart]]] = []
        for start in range(0, wanted, PIECE_BYTES):
            asked = ReadSketch(record.name, index, start, start + PIECE_BYTES)
            engines = await self._workers.ask(asked, SketchPart)
            pieces.append([[answer for answer in answers if answer.kept] for answers in engines])
        total = kind.empty(sum(widths[0]), record.size)
        for engine, ranks in enumerate(widths):
            shards = [
                _restored(kind, width, record.size, [piece[engine][rank] for piece in pieces])
                for rank, width in enumerate(ranks)
            ]
            kind.merge(total, _joined(shards))
        if total.rows != record.rows:
            record.broken = f"the workers hold {total.rows} rows of {point}, and {record.rows} were counted"
        record.require()
        return total

    @property
    def _all_ranks(self) -> list[Rank]:
        return [rank for ranks in self._ranks for rank in ranks]


def _restored(kind: Kind, width: int, size: int, parts: Sequence[SketchPart]) -> SketchState:
    """Rebuild a shard's state from the pieces of bytes that a worker sent, in order.

    Args:
        kind: kind of the sketch.
        width: number of elements of the worker's rows.
        size: size parameter of the sketch.
        parts: the pieces.

    Raises:
        SketchIncomplete: the number of bytes is not that of such a state.
    """
    sent = sum(len(part.data) for part in parts)
    if sent != kind.nbytes(width, size):
        raise SketchIncomplete(f"a worker sent {sent:,} bytes for a state of {kind.nbytes(width, size):,}")
    stored = torch.frombuffer(bytearray(b"".join(part.data for part in parts)), dtype=torch.uint8)
    tensors, before = {}, 0
    for name, (shape, dtype) in kind.shapes(width, size).items():
        bytes_ = torch.Size(shape).numel() * dtype.itemsize
        tensors[name] = stored[before : before + bytes_].view(dtype).view(shape)
        before += bytes_
    last = parts[-1]
    return SketchState(last.rows, last.squares, tensors, last.filled)


def _joined(shards: Sequence[SketchState]) -> SketchState:
    """Join the states of a point's shards, in rank order, along the elements; only for kinds without cross terms.

    Raises:
        SketchIncomplete: the shards hold different numbers of rows.
    """
    if len(shards) == 1:
        return shards[0]
    if len({shard.rows for shard in shards}) != 1:
        raise SketchIncomplete(f"the ranks hold different numbers of rows, {[shard.rows for shard in shards]}")
    tensors = {name: torch.cat([shard.tensors[name] for shard in shards]) for name in shards[0].tensors}
    return SketchState(shards[0].rows, sum(shard.squares for shard in shards), tensors)
