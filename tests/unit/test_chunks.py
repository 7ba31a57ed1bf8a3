"""Rows that leave the arena in chunks while their request runs: those of a runtime with room for all, byte for byte."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.bench import POINTS, Bench, expected
from workers import some_runtime

from steercap import CaptureHandle
from steercap.captures.checks import Expected, parts_of
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.rows import Captures, Found
from steercap.core.messages import Attach, Attached, Collect, GetStats, Lines, Owner, Read, Wanted, decode_answer
from steercap.core.plan import CapturePlan, Plan
from steercap.core.receipt import Receipt
from steercap.core.rows import page_shape
from steercap.core.schema import LINE_BYTES, RAW
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.engine.workers import Workers
from steercap.errors import CaptureReleased, InvalidRequest, WorkerFailure
from steercap.files.spill import BLOCK_BYTES
from steercap.worker.arena import Arena
from steercap.worker.chunk_file import ChunkFile
from steercap.worker.memory import WireReader, open_reader


@pytest.fixture(params=("host",), autouse=True)
def kind(request):
    """Taps of the host; those of a device, whose rows come late, where a test says so."""
    Bench.kind = request.param
    return request.param


@pytest.fixture(autouse=True)
def small_pages(monkeypatch) -> None:
    """Pages of 9 lines: three records of three points, or nine of one."""
    monkeypatch.setattr("steercap.worker.runtime.page_shape", lambda lines: page_shape(lines, 9 * LINE_BYTES))


class Chunked(Bench):
    """A bench whose runtime has a file for rows that leave its arena."""

    def __init__(self, folder: Path, pages: int, file_bytes: int = 1 << 20) -> None:
        self.runtime = some_runtime(
            self.kind, POINTS, self.width, torch.float32, tokens=1024, device_ring_bytes=1 << 20
        )
        self.attached = self.ask(Attach(pages * 9 * LINE_BYTES, str(folder), file_bytes))
        assert isinstance(self.attached, Attached)
        self.reader = open_reader(self.attached, "shared", self.no_wire)

    def long(self, key: str, window: int, limit: int, ranges=(Range(0, None),), points=(0, 1, 2)) -> None:
        capture = CapturePlan(tuple(points), tuple(ranges), None, RAW, window=window)
        self.runtime.register(key, Plan(key, 10, limit, capture=capture).encode(), 0)

    @property
    def file_bytes(self) -> int:
        return Path(self.attached.file).stat().st_size

    @property
    def lines(self) -> int:
        return self.attached.pages * self.attached.page_lines


async def same(bench: Bench, oracle: Bench, key: str, total: int, first: int = 0) -> None:
    """Compare the rows and labels of a request on two benches."""
    found, rows = await bench.rows(key, total, first)
    wanted, known = await oracle.rows(key, total, first)
    assert found.failure is wanted.failure is None
    assert (found.positions, found.token_ids, found.stored_rows) == (
        wanted.positions,
        wanted.token_ids,
        wanted.stored_rows,
    )
    assert torch.equal(rows, known)


@pytest.mark.parametrize(
    ("kind", "seed"), [("host", seed) for seed in range(8)] + [("cuda", seed) for seed in range(2)], indirect=["kind"]
)
async def test_rows_are_those_of_a_runtime_with_room(tmp_path, seed) -> None:
    """Prompts in parts, decoding, rejected drafts, preemption to the start or to a cached prefix, and reads meanwhile."""
    draw = random.Random(seed)
    window = draw.choice([4, 7, 16])
    limit = draw.choice([60, 121]) if Bench.kind == "host" else 36
    ranges = draw.choice([(Range(0, None),), (Range(3, None, 2),), (Range(0, 9), Range(14, 90))])
    points = draw.choice([(0, 1, 2), (1,)])
    bench, oracle = Chunked(tmp_path, 12), Bench(1 << 20)
    bench.long("r1", window, limit, ranges, points)
    oracle.plan("r1", points, ranges, limit)
    oracle.plan("r2", limit=limit)
    bench.plan("r2", limit=12)  # it stays in memory, beside it
    reached = at = 0
    while at < limit - 4:
        count = min(draw.choice([1, 1, 1, draw.randint(1, window)]), limit - at)
        scale = 1.0 + at / 7
        parts = [("r1", at, count)] + ([("r2", at, 1)] if reached == at < 12 else [])
        for one in (bench, oracle):
            one.step(*parts, scale=scale)
        at += count
        reached = max(reached, at)
        if draw.random() < 0.2:
            first = draw.randint(0, 3)
            await same(bench, oracle, "r1", at, min(first, len(range(at)) // 3))
        if count > 1 and draw.random() < 0.4:
            at -= draw.randint(1, count - 1)  # drafts were rejected
        elif draw.random() < 0.06:
            at = draw.choice([0, at // 2])  # it was preempted, with a cached prefix or without
    for one in (bench, oracle):
        one.runtime.end_requests(["r1"])
    await same(bench, oracle, "r1", at)
    await same(bench, oracle, "r1", at, 5)
    assert bench.ask(GetStats()).pages_in_use <= 4  # those of r2 alone


async def test_the_arena_holds_a_window_and_the_file_the_rest(tmp_path) -> None:
    """A sequence of ten times the memory: pages in use stay those of the window, and nothing is left once released."""
    bench = Chunked(tmp_path, 4)
    bench.long("r1", 12, 120)
    for start in range(0, 120, 6):
        bench.step(("r1", start, 6))
        assert bench.ask(GetStats()).pages_in_use == 4
    found, rows = await bench.rows("r1", 120)
    assert 2 * bench.lines < 120 * 3
    assert all(one.start >= bench.lines for one in found.lines)
    for point in range(POINTS):
        torch.testing.assert_close(rows[point], expected(1, range(120), point))
    assert bench.file_bytes >= 120 * 3 * LINE_BYTES
    bench.runtime.end_requests(["r1"])
    bench.ask(Collect(()), (Owner("r1", 0),))
    assert bench.ask(GetStats()).pages_in_use == bench.file_bytes == 0


async def test_lines_of_the_file_go_by_rpc_too(tmp_path) -> None:
    """A client that cannot map the arena reads the same rows."""
    bench = Chunked(tmp_path, 4)
    bench.long("r1", 12, 60)
    for start in range(0, 60, 6):
        bench.step(("r1", start, 6))
    _, near = await bench.rows("r1", 60)

    async def ask(ranges) -> bytes:
        answer = bench.ask(Read(bench.attached.nonce, ranges))
        assert isinstance(answer, Lines)
        return answer.data

    bench.reader = WireReader(ask)
    assert torch.equal((await bench.rows("r1", 60))[1], near)


async def test_lines_come_from_the_rank_that_has_them(tmp_path) -> None:
    """Ranks with arenas of other sizes: lines of one mean nothing on another, which neither fails nor sends any."""
    ranks, sent = [Chunked(tmp_path, pages) for pages in (4, 2)], []

    async def rpc(frame, _engine) -> list[list[bytes]]:
        answers = [bench.runtime.answer(frame) for bench in ranks]
        sent.append([isinstance(decode_answer(answer), Lines) for answer in answers])
        return [answers]

    workers = Workers(SimpleNamespace(rpc=rpc, aborted=0))
    for number, bench in enumerate(ranks):
        bench.long("r1", 6, 60)
        for start in range(0, 60, 6):
            bench.step(("r1", start, 6))
        _, near = await bench.rows("r1", 60)
        bench.reader = WireReader(workers.line_source(0, bench.attached.nonce))
        assert torch.equal((await bench.rows("r1", 60))[1], near)
        assert sent.pop() == [rank == number for rank in (0, 1)]
    with pytest.raises(WorkerFailure, match="0 workers of engine 0 have the arena"):
        await workers.line_source(0, b"of a worker before")(())


@pytest.mark.parametrize("when", ["at once", "later"])
async def test_a_disk_that_fails_fails_the_request_alone(tmp_path, monkeypatch, when) -> None:
    """The error says so; a request beside it keeps its rows, and the failed one's pages come back."""
    bench, writes = Chunked(tmp_path, 12), []

    def full(_file, line, _data) -> None:
        writes.append(line)
        if when == "at once" or len(writes) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ChunkFile, "write", full)
    bench.long("r1", 6, 60)
    bench.plan("r2", limit=12)
    for start in range(0, 60, 3):
        bench.step(("r1", start, 3), *([("r2", start, 3)] if start < 12 else []))
    found, _ = await bench.rows("r2", 12)
    assert found.failure is None
    answer = bench.ask(Collect((Wanted(Owner("r1", 0), 60),)))
    assert "cannot be written to disk" in answer.shares[0].failure
    assert "No space left" in answer.shares[0].failure
    bench.runtime.end_requests(["r1", "r2"])
    bench.ask(Collect(()), (Owner("r1", 0), Owner("r2", 0)))
    assert bench.ask(GetStats()).pages_in_use == 0


def test_regions_do_not_overlap_and_are_used_again(tmp_path) -> None:
    """Driven at random against a list of intervals; beyond its lines nothing is given."""
    draw, file = random.Random(3), ChunkFile(tmp_path, 1_000, 64 * 40)
    held: dict[int, tuple[int, np.ndarray]] = {}
    for step in range(400):
        if held and draw.random() < 0.5:
            line = draw.choice(list(held))
            count, data = held.pop(line)
            assert np.array_equal(file.read(line, count).numpy().reshape(-1), data)
            file.free(line)
            continue
        count = draw.randint(1, 64 * 9)
        line = file.take(count)
        if line is None:
            assert held
            continue
        assert 1_000 <= line <= 1_000 + file.lines - count
        assert all(line + count <= other or other + size <= line for other, (size, _) in held.items())
        data = np.full(count * LINE_BYTES, step % 251, dtype=np.uint8)
        file.write(line, data)
        held[line] = count, data
    assert not list(tmp_path.iterdir())


def test_without_a_folder_there_is_no_file(tmp_path) -> None:
    """A machine that lacks the folder starts all the same, and says that it has no file."""
    bench = Chunked(tmp_path / "none", 4)
    assert (bench.attached.file, bench.attached.file_lines) == ("", 0)
    bench.long("r1", 6, 60)
    bench.step(("r1", 0, 3))
    assert bench.ask(GetStats()).requests == 0


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_what_must_come_have_all_rows_once(seed) -> None:
    """Against a list of positions: each part's tokens end where its last row is read, and no part has too many."""
    draw = random.Random(seed)
    ranges = draw.choice([(Range(0, None),), (Range(3, None, 2),), (Range(0, 4), Range(9, 30)), (Range(50, None),)])
    total, first, most = draw.randint(2, 40), draw.randint(0, 3), draw.randint(1, 50)
    capture = CapturePlan((0,), ranges, None, RAW)
    expected = Expected("r", Plan("r", 2, 60, capture=capture), (), tuple(range(total + 1)), first)
    selected = [p for p in range(total) if any(p in range(r.start, r.stop or 60, r.step) for r in ranges)]
    assert expected.rows == len(selected) - first
    found = []
    parts = parts_of(expected, most)
    for part in parts:
        own = [p for p in selected if p < len(part.tokens) - 1][part.first :]
        assert len(own) <= most
        found += own
    assert found == selected[first:]
    assert parts[-1].tokens == expected.tokens
    assert len(parts) == max(1, -(-len(selected[first:]) // most))


async def test_chunks_of_rows_that_are_here_come_in_one(tmp_path) -> None:
    """As of a file; and a wrong number names the argument."""
    positions = np.arange(5)
    receipt = Receipt((Point(0, "resid_post"),), positions, positions + 7, 5, None)
    rows = {Point(0, "resid_post"): torch.randn(5, 4)}
    handle = CaptureHandle(
        request_id="r",
        model="m",
        text="",
        prompt_token_ids=tuple(range(7, 12)),
        output_token_ids=(1,),
        points=tuple(rows),
        num_layers=1,
        lifecycle=Lifecycle("r", found=Found(Captures(rows, 1), receipt)),
    )
    again = CaptureHandle.load(handle.save(tmp_path / "r.safetensors"))
    (chunk,) = [one async for one in again.chunks(2)]
    assert torch.equal(chunk.captures[0], rows[Point(0, "resid_post")])
    for wrong in (0, -1, 1.5, "2", None, True, float("nan")):
        with pytest.raises(InvalidRequest, match=r"rows=.*1 or more"):
            await anext(again.chunks(wrong))
    again.release()
    with pytest.raises(CaptureReleased):
        await anext(again.chunks(2))


def test_what_the_quota_grants_has_room_between_others(tmp_path) -> None:
    """Of ten blocks four, two and four are held, and the fours end: five are free, though no five lie together."""
    block = BLOCK_BYTES // LINE_BYTES
    arena = SimpleNamespace(lines=torch.zeros(100, LINE_BYTES, dtype=torch.uint8), file=None)
    Arena.add_file(arena, tmp_path, 10 * BLOCK_BYTES)
    first, _, last = (arena.file.take(count * block) for count in (4, 2, 4))
    arena.file.free(first)
    arena.file.free(last)
    assert arena.file.take(5 * block) is not None


def test_an_arena_of_more_lines_than_32_bits_number_has_a_file(tmp_path) -> None:
    """Behind 300 GiB of memory, none of which is touched."""
    arena = Arena(page_shape(1), 300 << 30, torch.device("cpu"))
    arena.add_file(tmp_path, 10 * BLOCK_BYTES)
    line = arena.file.take(3)
    assert line == len(arena.lines) > 1 << 32
    arena.file.write(line, np.full(3 * LINE_BYTES, 7, dtype=np.uint8))
    assert (arena.stored(line, 3) == 7).all()
