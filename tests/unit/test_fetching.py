"""From an arena's lines to tensors: bit for bit, on threads, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from steercap.core.messages import Attached, CapturedRows, LineRange, Owner, Unknown
from steercap.core.schema import LINE_BYTES, RAW, REDUCED, Coding, PointSchema
from steercap.engine import fetching
from steercap.engine.fetching import Delivery, Fetcher
from steercap.engine.ranks import Rank
from steercap.errors import ModelClosed, WorkerFailure
from steercap.worker import assembly, memory
from steercap.worker.memory import LineReader, Readable, WireReader

#: A row takes 8 lines of the arena.
LINES, WIDTH, ROW = 8 * 4096, 256, 8
SCHEMA = PointSchema((WIDTH,), "bfloat16")
MOST = 7  # points
#: Every bit pattern, so that NaN and -0 are among the values.
ARENA = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (LINES, LINE_BYTES), dtype=np.uint8))


class ArenaReader(LineReader):
    """Looks at `ARENA`."""

    async def read(self, ranges) -> Readable:
        return Readable(ARENA, tuple(ranges))

    def close(self) -> None:
        return None


def attached(shard: int = 0, schema: PointSchema = SCHEMA) -> Attached:
    return Attached(
        tuple(range(MOST)),
        (schema,) * MOST,
        shard=shard,
        page_lines=64 * ROW,
        pages=LINES // (64 * ROW),
        bank_rows=0,
        bank_width=WIDTH,
        reductions=0,
        held=0,
        path="",
        nonce=b"",
    )


def rank(index: int = 0, of: LineReader | None = None) -> Rank:
    return Rank(index, attached(), of or ArenaReader())


def captured_rows(name: str, points: int, ranges, rows: int, coding: Coding = RAW) -> CapturedRows:
    """Ranges are given in rows of the arena."""
    labels = np.arange(rows).tobytes()
    lines = tuple(LineRange(start * ROW, count * ROW) for start, count in ranges)
    return CapturedRows(Owner(name, 0), coding, tuple(range(points)), lines, rows, labels, labels, rows, None)


def paged(name: str, points: int, rows: int, seed: int) -> CapturedRows:
    """Rows in pages of 64 rows anywhere in the arena, some of them neighbours, the first one begun in its middle."""
    rng = np.random.default_rng(seed)
    per_page = 64 // points
    pages = rng.permutation(LINES // (64 * ROW))[: rows // per_page + 2]
    pages[1:3] = np.sort(pages[1:3])
    ranges, left, skipped = [], rows, min(1, per_page - 1)
    for page in pages.tolist():
        count = min(left, per_page - skipped)
        if count:
            ranges.append((page * 64 + skipped * points, count * points))
        left, skipped = left - count, 0
    return captured_rows(name, points, ranges, rows)


def by_hand(one: CapturedRows) -> torch.Tensor:
    """The rows one by one, as bytes: [points, rows, bytes of a row]."""
    lines = torch.cat([ARENA[item.start : item.start + item.count] for item in one.lines])
    records = lines.reshape(one.stored_rows, len(one.points), -1)
    return torch.stack([torch.stack([record[point] for record in records]) for point in range(len(one.points))])


def stacked(delivery: Delivery) -> torch.Tensor:
    """The rows of every point, of one worker: [points, rows, width]."""
    assert delivery.failure is None
    return torch.stack([rows for (rows,) in delivery.shards.values()])


@asynccontextmanager
async def fetcher(threads: int = 2) -> Iterator[Fetcher]:
    before = set(threading.enumerate())  # other models of this process have couriers too
    made = Fetcher(threads)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)
        assert not [thread for thread in set(threading.enumerate()) - before if "steercap fetcher" in thread.name]


@asynccontextmanager
async def busy(made: Fetcher) -> Iterator[threading.Event]:
    """All its threads are occupied until the event is set."""
    go = threading.Event()
    for _ in range(made.threads):
        made._pool.submit(go.wait)
    while made._pool._work_queue.qsize():
        await asyncio.sleep(0)
    try:
        yield go
    finally:
        go.set()


@pytest.mark.parametrize("part_bytes", [LINE_BYTES // 2, 3 * ROW * LINE_BYTES, assembly.PART_BYTES])
@pytest.mark.parametrize("threads", [1, 3])
async def test_rows_come_bit_for_bit(threads, part_bytes, monkeypatch) -> None:
    """Any points, pages anywhere, in one part or many, many requests at once: the bytes of the arena, each in its place."""
    for module in (assembly, fetching):
        monkeypatch.setattr(module, "PART_BYTES", part_bytes)
    asked = [paged(f"r{seed}", 1 + seed % 7, 1 + 37 * seed % 150, seed) for seed in range(40)]
    asked.append(captured_rows("pairs", 3, [(10, 6), (700, 6)], 2, REDUCED))  # float32 rows take twice the lines
    asked.append(captured_rows("none", 3, [], 0))
    monkeypatch.setattr(fetching, "THREAD_BYTES", min(part_bytes, 20_000))  # both ways
    async with fetcher(threads) as made:
        deliveries = await made.deliver([[rank()]], [[[one]] for one in asked])
    for one, delivery in zip(asked, deliveries, strict=True):
        assert delivery.failure is None
        rows = stacked(delivery)
        assert rows.dtype == (torch.float32 if one.coding == REDUCED else torch.bfloat16)
        assert rows.shape == (len(one.points), one.stored_rows, WIDTH)
        if one.stored_rows:
            assert torch.equal(rows.view(torch.uint8), by_hand(one))


@pytest.mark.parametrize("part_bytes", [LINE_BYTES // 2, assembly.PART_BYTES])
async def test_points_of_other_widths_come_in_one_delivery(part_bytes, monkeypatch) -> None:
    """Whatever lies beside them in a record, and however few they are."""
    for module in (assembly, fetching):
        monkeypatch.setattr(module, "PART_BYTES", part_bytes)
    monkeypatch.setattr(fetching, "THREAD_BYTES", min(part_bytes, fetching.THREAD_BYTES))
    wide = PointSchema((4 * WIDTH,), "bfloat16")
    schemas = (SCHEMA, wide, SCHEMA, SCHEMA, wide)
    lines = sum(ROW * schema.width // WIDTH for schema in schemas)
    labels = np.arange(3).tobytes()
    one = CapturedRows(Owner("r", 0), RAW, tuple(range(5)), (LineRange(7, 3 * lines),), 3, labels, labels, 3, None)
    mixed = Rank(0, replace(attached(), points=tuple(range(5)), schemas=schemas), ArenaReader())
    async with fetcher() as made:
        (delivery,) = await made.deliver([[mixed]], [[[one]]])
    records, at = ARENA[7 : 7 + 3 * lines].reshape(3, -1), 0
    for (rows,), schema in zip(delivery.shards.values(), schemas, strict=True):
        assert torch.equal(rows.view(torch.uint8), records[:, at : at + 2 * schema.width])
        at += 2 * schema.width


@pytest.mark.parametrize(
    ("lying", "message"),
    [
        (
            captured_rows("liar", 3, [(0, 9)], 4),
            "4 records of 3 points, 24 lines each, expected; the worker names 72 lines",
        ),
        (
            captured_rows("liar", 3, [(0, 4), (9, 8)], 4),
            "4 records of 3 points, 24 lines each, expected; the worker names 96 lines",
        ),
        (captured_rows("liar", 3, [], 4), "4 records"),
        (captured_rows("liar", 3, [(0, 3)], 0), "0 records"),
        (captured_rows("liar", 2, [(LINES // ROW - 2, 4)], 2), "outside of its arena"),
        (captured_rows("liar", 2, [(-2, 4)], 2), "outside of its arena"),
    ],
)
async def test_lines_that_cannot_be_the_rows_fail_their_request_alone(lying, message) -> None:
    """Too few lines, torn records, lines beyond the arena: no tensor, and the neighbours get theirs."""
    good = paged("r1", 3, 50, 1)
    async with fetcher() as made:
        first, bad, last = await made.deliver([[rank()]], [[[good]], [[lying]], [[good]]])
    assert message in bad.failure
    assert bad.shards == {}
    for one in (first, last):
        assert torch.equal(stacked(one).view(torch.uint8), by_hand(good))


async def test_a_worker_that_failed_or_knows_nothing_fails_its_request_alone() -> None:
    """What another worker, or another engine, has of the request is not handed over as if it were all."""
    good = paged("r1", 3, 50, 1)
    none, spoilt = Unknown(good.owner), replace(good, failure="out of cheese")
    split = PointSchema((2 * WIDTH,), "bfloat16", shards=2)
    ranks = [[Rank(shard, attached(shard, split), ArenaReader(), engine) for shard in range(2)] for engine in range(2)]
    cases = {
        None: [[none, none], [good, good]],
        "no worker has rows of this request": [[none, none], [none, none]],
        "worker 0 of engine 1 has no rows of this request": [[none, none], [none, good]],
        "engines 0, 1 all have rows of this request": [[good, good], [none, good]],
        "out of cheese": [[good, spoilt], [none, none]],
    }
    async with fetcher() as made:
        deliveries = await made.deliver(ranks, list(cases.values()))
    for failure, delivery in zip(cases, deliveries, strict=True):
        assert delivery.failure == failure
        assert [len(shards) for shards in delivery.shards.values()] == ([] if failure else [2] * 3)


async def test_shards_are_handed_over_in_the_order_of_their_ranks_and_complete() -> None:
    """Whoever answers first; a shard that is missing or came twice, or a whole row that two have, is not a row."""
    split = PointSchema((2 * WIDTH,), "bfloat16", shards=2)
    first, second = paged("r1", 3, 50, 1), paged("r1", 3, 50, 2)
    ranks = {
        (shards, shard): Rank(shard, attached(shard, schema), ArenaReader())
        for shards, schema in ((1, SCHEMA), (2, split))
        for shard in range(2)
    }
    async with fetcher() as made:
        (found,) = await made.deliver([[ranks[2, 1], ranks[2, 0]]], [[[second, first]]])
        wrong = [
            (await made.deliver([[ranks[key] for key in keys]], [[[first] * len(keys)]]))[0]
            for keys in ([(2, 1)], [(2, 0), (2, 0)], [(1, 0), (1, 0)])
        ]
    for point, shards in found.shards.items():
        for shard, one in zip(shards, (first, second), strict=True):
            assert torch.equal(shard.view(torch.uint8), by_hand(one)[point])
        whole = torch.cat(shards, dim=1).view(torch.uint8)  # bytes at random may be NaN
        assert torch.equal(found.joined(shards).view(torch.uint8), whole)
    assert [one.failure for one in wrong] == [
        "1 of 2 shards of a point arrived",
        "2 of 2 shards of a point arrived",
        "2 of 1 shards of a point arrived",
    ]
    assert not any(one.shards for one in wrong)


async def test_the_loop_goes_on_while_rows_are_gathered() -> None:
    """Large rows wait for threads, not the loop for them; small ones are not worth the trip."""
    large, small = paged("large", 2, 1500, 1), paged("small", 2, 10, 2)
    async with fetcher() as made, busy(made) as go:
        waiting = asyncio.create_task(made.deliver([[rank()]], [[[large]]]))
        (at_once,) = await made.deliver([[rank()]], [[[small]]])
        assert torch.equal(stacked(at_once).view(torch.uint8), by_hand(small))
        assert not waiting.done()
        go.set()
        (delivery,) = await waiting
    assert torch.equal(stacked(delivery).view(torch.uint8), by_hand(large))


def go_on() -> None:
    """One of many parts."""


async def test_who_is_cancelled_leaves_nothing_in_the_queue() -> None:
    """A fetch given up before its turn is not gathered for nobody."""
    large = paged("large", 2, 1500, 1)
    async with fetcher() as made, busy(made):
        for waiting in (made.deliver([[rank()]], [[[large]]] * 5), made._all([go_on] * 5)):
            task = asyncio.create_task(waiting)
            before = made._pool._work_queue.qsize()
            while made._pool._work_queue.qsize() == before:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        queued = [made._pool._work_queue.get_nowait() for _ in range(made._pool._work_queue.qsize())]
        assert queued
        assert all(item.future.cancelled() for item in queued)


async def test_closing_ends_a_delivery_as_closed() -> None:
    """Whoever waits for rows while the model closes is told so, and so is who comes later."""
    large = paged("large", 2, 1500, 1)
    async with fetcher() as made, busy(made) as go:
        waiting = asyncio.create_task(made.deliver([[rank()]], [[[large]]] * 5))
        while not made._pool._work_queue.qsize():
            await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(made.close))
        with pytest.raises(ModelClosed):
            await waiting
        go.set()
        await closing
        with pytest.raises(ModelClosed):
            await made.deliver([[rank()]], [[[large]]])


async def test_the_wire_gives_the_same_rows_one_call_at_a_time(monkeypatch) -> None:
    """Bytes over RPC are bounded: one request's calls at a time, none above the limit, and the rows are the same."""
    monkeypatch.setattr(memory, "WIRE_BYTES", 100 * ROW * LINE_BYTES)
    monkeypatch.setattr("steercap.engine.fetching.LOAD_REQUESTS", 1)  # or few requests would not be several at once
    under_way = most = 0

    async def ask(ranges: tuple[LineRange, ...]) -> bytes:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        assert 0 < wire.wire_bytes_in_flight == sum(item.count for item in ranges) * LINE_BYTES <= wire.wire_bytes
        await asyncio.sleep(0)
        under_way -= 1
        sent = torch.cat([ARENA[item.start : item.start + item.count] for item in ranges])
        assert len(sent) <= 100 * ROW
        return sent.numpy().tobytes()

    asked = [paged(f"r{seed}", 1 + seed % 5, 300, seed) for seed in range(8)]
    asked.append(captured_rows("of one range", 3, [(5, 750)], 250))
    async with fetcher() as made:
        wire = WireReader(ask)
        deliveries = await made.deliver([[rank(of=wire)]], [[[one]] for one in asked])
    assert most == 1
    assert wire.wire_bytes_in_flight == 0
    for one, delivery in zip(asked, deliveries, strict=True):
        assert torch.equal(stacked(delivery).view(torch.uint8), by_hand(one))


@pytest.mark.parametrize("fails", [False, True])
async def test_a_reader_that_is_closed_while_a_thread_reads_gives_no_rows(tmp_path, monkeypatch, fails) -> None:
    """The number of its file may be another file's by then: what was read is not handed out, and no other error is told."""
    segment, content = memory.SharedSegment.create(4 * LINE_BYTES), np.random.default_rng(1).bytes(3 * LINE_BYTES)
    (tmp_path / "lines").write_bytes(content)
    told = {"path": segment.path, "nonce": segment.nonce, "file": str(tmp_path / "lines"), "file_lines": 3}
    reader, ranges = memory.SharedReader(replace(attached(), **told)), [LineRange(4, 1), LineRange(6, 1)]
    assert (await reader.read(ranges)).lines.numpy().tobytes() == content[:LINE_BYTES] + content[2 * LINE_BYTES :]

    read = memory.read_lines

    def closing(fd: int, line: int, count: int) -> torch.Tensor:
        found = read(fd, line, count)
        reader.close()
        if fails:
            raise WorkerFailure("bad file descriptor")
        return found

    monkeypatch.setattr(memory, "read_lines", closing)
    with pytest.raises(ModelClosed, match="closed while rows were fetched"):
        await reader.read(ranges)
    segment.close()
