"""Rows on disk: what was written comes back bit for bit or not at all, within the quota, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from keepers import Keeper, delivery, kept

from steercap import SteerModel
from steercap.captures.fetching import fetch_all
from steercap.captures.lifecycle import Lifecycle, Stage
from steercap.captures.rows import Captures, Found
from steercap.captures.spilled import Spilled
from steercap.config import Settings
from steercap.core.budget import Budget, Reservation
from steercap.core.receipt import Receipt
from steercap.core.schema import Coding, PointSchema
from steercap.core.spec import Point
from steercap.engine.admission import Admission
from steercap.engine.spilling import Spilling, require_place
from steercap.errors import CaptureIncomplete, CaptureMemoryFull, CaptureReleased, InvalidSetting, ModelClosed
from steercap.files import spill
from steercap.files.spill import BLOCK_BYTES, CHUNK_BYTES, Extents, SpillFile
from steercap.kernels.codecs.coded import CodedRows

BLOCKS = 40


class ExtentsMachine(RuleBasedStateMachine):
    """Blocks taken and given back in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(BLOCKS)
        self.taken: list[list[Any]] = []

    @rule(count=st.integers(0, BLOCKS))
    def take(self, count: int) -> None:
        free = self.extents.free
        found = self.extents.take(count)
        assert (found is None) == (count > free)
        if found is not None:
            assert sum(extent.length for extent in found) == count
            self.taken.append(found)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data) -> None:
        self.extents.give(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))))

    @invariant()
    def every_block_is_taken_once_or_free(self) -> None:
        held = [block for one in self.taken for start, length in one for block in range(start, start + length)]
        assert len(held) == len(set(held)) == self.extents.in_use
        assert all(0 <= block < BLOCKS for block in held)
        free = [block for start, length in self.extents._free for block in range(start, start + length)]
        assert sorted(held + free) == list(range(BLOCKS))
        ends = [start + length for start, length in self.extents._free]
        assert all(end < start for end, (start, _) in zip(ends, self.extents._free[1:], strict=False))


ExtentsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestExtents = ExtentsMachine.TestCase


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpillFile]:
    made = SpillFile(tmp_path, 64 * BLOCK_BYTES)
    yield made
    made.close()
    assert not list(tmp_path.iterdir())


def some_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@given(sizes=st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=6), chunk=st.sampled_from([BLOCK_BYTES, CHUNK_BYTES]))
@settings(max_examples=40)
def test_what_comes_back_is_what_was_written(tmp_path_factory, sizes, chunk) -> None:
    """Any arrays, among others and in the gaps that dropped ones have left: the same bytes, aligned for any dtype."""
    file = SpillFile(tmp_path_factory.getbasetemp(), 64 * BLOCK_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "CHUNK_BYTES", chunk)
        others = [file.put([some_bytes(BLOCK_BYTES + 1, seed)]) for seed in range(8)]
        del others[::2]
        arrays = [some_bytes(size, size) for size in sizes]
        stored = file.put(arrays)
        found = file.read(stored)
    assert len(found) == len(arrays)
    assert all(np.array_equal(one, other) for one, other in zip(found, arrays, strict=True))
    assert all((one.ctypes.data - found[0].ctypes.data) % spill.ALIGN == 0 for one in found if len(one))
    for seed, one in zip((1, 3, 5, 7), others, strict=True):
        assert np.array_equal(*file.read(one), some_bytes(BLOCK_BYTES + 1, seed))
    file.close()


def test_the_disk_has_what_is_in_use(file) -> None:
    """Dropping one makes its room free for the quota at once, and on the disk at the next occasion; a file that is empty takes nothing."""
    first, second = file.put([some_bytes(8 * BLOCK_BYTES)]), file.put([some_bytes(BLOCK_BYTES + 1)])
    full = os.fstat(file._fd).st_blocks * 512
    assert file.bytes_in_use == 10 * BLOCK_BYTES <= full
    assert file.stored == 2
    del first
    assert (file.bytes_in_use, file.stored) == (2 * BLOCK_BYTES, 1)
    file.sweep()
    assert os.fstat(file._fd).st_blocks * 512 <= full - 8 * BLOCK_BYTES
    assert np.array_equal(*file.read(second), some_bytes(BLOCK_BYTES + 1))
    del second
    file.sweep()
    assert os.fstat(file._fd).st_size == file.bytes_in_use == 0


def test_the_quota_holds(file) -> None:
    """What has no room is refused with both figures, and takes none; what is dropped makes room in pieces."""
    held = [file.put([some_bytes(BLOCK_BYTES)]) for _ in range(64)]
    with pytest.raises(
        CaptureMemoryFull,
        match=rf"{BLOCK_BYTES:,} bytes .* {64 * BLOCK_BYTES:,} of spill_bytes={64 * BLOCK_BYTES:,} are",
    ):
        file.put([some_bytes(1)])
    del held[::2]
    scattered = file.put([some_bytes(32 * BLOCK_BYTES)])
    assert len(scattered.chunks) == 32
    assert np.array_equal(*file.read(scattered), some_bytes(32 * BLOCK_BYTES))


@pytest.mark.parametrize("damage", ["a bit", "cut"])
def test_a_changed_byte_is_found_and_is_of_one_alone(file, damage) -> None:
    """Bytes changed or cut off on the real file: its own are CaptureIncomplete, which names the file, those of others come."""
    good, bad = file.put([some_bytes(BLOCK_BYTES)]), file.put([some_bytes(3 * BLOCK_BYTES, 1)])
    path = f"/proc/{os.getpid()}/fd/{file._fd}"  # as another program would
    with Path(path).open("r+b") as other:
        if damage == "cut":
            other.truncate(2 * BLOCK_BYTES)
        else:
            other.seek(3 * BLOCK_BYTES)
            (byte,) = other.read(1)
            other.seek(3 * BLOCK_BYTES)
            other.write(bytes([byte ^ 1]))
    with pytest.raises(CaptureIncomplete, match=f"spill file in {file.folder} .{path}. does not hold"):
        file.read(bad)
    assert np.array_equal(*file.read(good), some_bytes(BLOCK_BYTES))


def test_a_file_that_may_grow_no_more_is_an_error_and_takes_no_room(file) -> None:
    """The system's own limit on the size of files: the write fails, and afterwards as much can be written as before."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK_BYTES + 100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.put([some_bytes(4 * BLOCK_BYTES)])
        stored = file.put([some_bytes(BLOCK_BYTES)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (file.bytes_in_use, file.stored) == (BLOCK_BYTES, 1)
    assert np.array_equal(*file.read(stored), some_bytes(BLOCK_BYTES))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 blocks."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    size = f"size={16 * BLOCK_BYTES}"
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", mounted], check=False, capture_output=True
    ).returncode:
        pytest.skip("this user may not mount a file system")
    yield mounted
    subprocess.run(["umount", mounted], check=True)


def test_a_disk_that_is_full_has_room_again_when_something_leaves_it(small_disk) -> None:
    """ENOSPC of a real file system, within the quota: no blocks are left of what failed, and those of what leaves can be used."""
    file = SpillFile(small_disk, 64 * BLOCK_BYTES)
    first = file.put([some_bytes(8 * BLOCK_BYTES)])
    with pytest.raises(OSError, match="No space left on device"):
        file.put([some_bytes(12 * BLOCK_BYTES)])
    file.sweep()
    assert (file.bytes_in_use, file.stored) == (8 * BLOCK_BYTES, 1)
    assert os.statvfs(small_disk).f_bfree == 8
    second = file.put([some_bytes(8 * BLOCK_BYTES, 1)])
    assert np.array_equal(*file.read(first), some_bytes(8 * BLOCK_BYTES))
    del first
    third = file.put([some_bytes(8 * BLOCK_BYTES, 2)])
    assert np.array_equal(*file.read(second), some_bytes(8 * BLOCK_BYTES, 1))
    assert np.array_equal(*file.read(third), some_bytes(8 * BLOCK_BYTES, 2))
    file.close()
    assert os.statvfs(small_disk).f_bfree == 16


def test_where_there_is_no_tmpfile_the_file_is_removed_at_once(tmp_path, monkeypatch) -> None:
    """/proc has no O_TMPFILE and no files at all, so it is refused; elsewhere the fallback leaves no name."""
    with pytest.raises(InvalidSetting, match="spill_folder='/proc'"):
        SpillFile(Path("/proc"), BLOCK_BYTES)
    with pytest.raises(InvalidSetting, match="No such file"):
        require_place(Settings(overflow="spill", spill_folder=tmp_path / "absent"))

    for wrong in (3, "", b"/tmp", "a\0b"):
        with pytest.raises(InvalidSetting, match=r"spill_folder=.*give the path of a folder"):
            Settings(spill_folder=wrong)
    for ignored in ({"spill_folder": tmp_path}, {"spill_bytes": 1 << 30, "overflow": "wait"}):
        with pytest.raises(InvalidSetting, match="has no effect with overflow='wait'; give overflow='spill'"):
            SteerModel("m", **ignored)

    def lacking(_folder: Path) -> int:
        raise spill._NoTmpfile

    monkeypatch.setattr(spill, "_tmpfile", lacking)
    made = SpillFile(tmp_path, BLOCK_BYTES)
    stored = made.put([some_bytes(10)])
    assert not list(tmp_path.iterdir())
    assert np.array_equal(*made.read(stored), some_bytes(10))
    made.close()


def _spill_and_wait(folder: str, written: Any) -> None:
    file = SpillFile(Path(folder), 64 << 20)
    stored = file.put([some_bytes(32 << 20)])
    written.set()
    signal.pause()
    del stored


def test_a_killed_process_leaves_no_file(tmp_path) -> None:
    """kill -9 while 32 MiB are spilled: its file has no name, so the disk has the space back when the process is gone."""
    context = multiprocessing.get_context("spawn")
    written = context.Event()
    process = context.Process(target=_spill_and_wait, args=(str(tmp_path), written))
    process.start()
    assert written.wait(300)
    assert not list(tmp_path.iterdir())
    held = [path for path in Path(f"/proc/{process.pid}/fd").iterdir() if str(tmp_path) in str(path.readlink())]
    assert [(path.stat().st_size, path.stat().st_nlink) for path in held] == [(32 << 20, 0)]
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    assert not Path(f"/proc/{process.pid}").exists()


SCHEMA = PointSchema((8,), "bfloat16")


def some_found(seed: int = 0) -> Found:
    """Rows of all kinds: of a model's dtype, NaN among them, shards, and codes."""
    drawn = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, 8, generator=drawn).bfloat16()
    rows[0, 0] = float("nan")
    codes = {
        "q": torch.randint(-9, 9, (5, 8), dtype=torch.int8, generator=drawn),
        "scale": torch.rand(5, generator=drawn),
        "zero": torch.rand(5, generator=drawn),
    }
    coded = CodedRows(Coding("full8"), SCHEMA, codes)
    points = {
        Point(0, "resid_post"): rows,
        Point(1, "resid_post"): (rows[:, :4], rows[:, 4:]),
        Point(2, "resid_post"): coded,
        Point(3, "resid_post"): rows[:0],
    }
    labels = np.arange(5)
    return Found(Captures(points, 4), Receipt(tuple(points), labels, labels, 5, None))


def test_rows_of_every_kind_come_back_as_they_were(file) -> None:
    """dtypes, shapes, shards and codes; NaN keeps its bits; and nothing of them stays in memory meanwhile."""
    found = some_found()
    spilled = Spilled.write(found, file, lambda: None)
    assert all(tensor.is_meta for tensor in tensors_of(spilled.outline.captures))
    back = spilled.read()
    assert back.receipt is found.receipt
    for one, other in zip(tensors_of(found.captures), tensors_of(back.captures), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))
    coded = back.captures.coded[2]
    assert torch.equal(coded.decoded(), found.captures.coded[2].decoded())


def tensors_of(captures: Captures) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    captures.changed(lambda tensor: tensors.append(tensor) or tensor)
    return tensors


# Who is moved


@given(
    held=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(["finished", "running"]), st.integers(0, 2), st.booleans())
    ),
    wanted=st.integers(1, 20),
    engine=st.none() | st.integers(0, 2),
    most=st.integers(1, 20),
)
def test_the_oldest_are_moved_until_there_is_room(held, wanted, engine, most) -> None:
    """Finished reservations of one engine alone, in the order of their ends, no more than is needed or moved at once."""
    budget = Budget(20, 3)
    kept: list[tuple[Reservation, bool]] = []
    for pages, phase, of, movable in held:
        reservation = Reservation(pages, 0, phase, of)
        if pages <= budget.free(of):
            budget._hold(reservation)
            kept.append((reservation, movable))
    head = Reservation(wanted, 1, engine=engine)
    admitted = budget.claim(head)
    free = {one: budget.free(one) for one in range(3)}
    allowed = {reservation for reservation, movable in kept if movable}
    found = budget.movable(allowed.__contains__, most)
    if admitted:
        assert found == []
        return
    engines = range(3) if engine is None else [engine]
    oldest = {
        one: [
            reservation
            for reservation, movable in kept
            if movable and reservation.phase == "finished" and reservation.engine == one and reservation.pages
        ]
        for one in engines
    }
    if not found:
        assert not any(oldest.values())
        return
    (of,) = {reservation.engine for reservation in found}
    assert found == oldest[of][: len(found)]
    assert sum(reservation.pages for reservation in found[:-1]) < max(wanted - free[of], min(wanted, most))
    enough = [one for one in engines if free[one] + sum(reservation.pages for reservation in oldest[one]) >= wanted]
    if enough:
        for reservation in found:
            admitted += budget.release(reservation)
        assert admitted == [head]


# Moving


class Arena(Keeper):
    """The end of an engine that rows are read from and given back to, with an admission of its own."""

    def __init__(self, pages: int, settings: Settings) -> None:
        super().__init__()
        self.admission = Admission(pages, BLOCK_BYTES, settings)
        self.given_back: list[Reservation] = []
        self.right = True
        self.collected = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.spilling = Spilling(
            settings, self.admission.budget, BLOCK_BYTES, self.collect, self.flush, self.admission.admit_waiting
        )
        self.admission.spilling = self.spilling

    async def collect(self, wanted) -> list[Any]:
        self.collected += len(wanted)
        await self.gate.wait()
        return [delivery() if self.right else delivery((5, 9)) for _ in wanted]

    async def flush(self) -> None:
        await asyncio.sleep(0)
        while self.given_back:
            self.admission.release(self.given_back.pop())

    def give_back(self, owner, reservation) -> None:
        super().give_back(owner, reservation)
        self.given_back.append(reservation)
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.flush()))

    def give_back_from_any_thread(self, owner, reservation) -> None:
        self.spilling._home.call(lambda: self.give_back(owner, reservation))

    async def read_spilled(self, work: Callable[[], Any]) -> Any:
        return await self.spilling.read(work)

    def require_open(self) -> None:
        return None

    async def handle(self, call: object = None) -> Lifecycle:
        """A request that ran, and ended."""
        reservation = await self.admission.claim(1, call or object())
        await asyncio.sleep(0.005)  # longer than whoever made room takes to end
        (own,) = self.admission.finish(reservation, [1])
        life = kept(self, own)
        self.spilling.offer(own, life)
        return life

    async def aclose(self) -> None:
        self.admission.close()
        await self.spilling.aclose()
        await asyncio.to_thread(self.spilling.end)


@pytest.fixture
async def arena(tmp_path: Path):
    async def make(pages: int = 2, blocks: int = 64, patience: float = 60.0) -> Arena:
        made.append(
            Arena(
                pages,
                Settings(
                    overflow="spill", spill_folder=tmp_path, spill_bytes=blocks * BLOCK_BYTES, overflow_timeout=patience
                ),
            )
        )
        return made[-1]

    made: list[Arena] = []
    before = set(threading.enumerate())
    yield make
    for one in made:
        await one.aclose()
        assert one.spilling.file.closed
    assert not {thread for thread in threading.enumerate() if "spill" in thread.name} - before
    assert not await asyncio.to_thread(lambda: list(tmp_path.iterdir()))


async def stores(file: SpillFile, count: int) -> None:
    """So many are in a file once the threads that move or read it have let go of what they were given."""
    deadline = time.monotonic() + 30
    while file.stored != count and time.monotonic() < deadline:
        await asyncio.sleep(0.001)
    assert file.stored == count


async def vacant(file: SpillFile) -> None:
    """Nothing is in a file."""
    await stores(file, 0)
    assert file.bytes_in_use == 0


async def test_one_call_holds_many_times_what_there_is_room_for(arena) -> None:
    """Fifty handles of one call, of which two fit: the oldest go to disk, all come back right, and nothing is left."""
    engine = await arena()
    call = object()
    handles = [await engine.handle(call) for _ in range(50)]
    assert [one.stage for one in handles] == [Stage.SPILLED] * 48 + [Stage.KEPT] * 2
    assert engine.spilling.file.stored == 48
    await fetch_all(handles)
    assert all(one.stage is Stage.HERE for one in handles)
    assert all(torch.equal(one.require_here().captures[0], torch.ones(2, 4)) for one in handles)
    await vacant(engine.spilling.file)
    assert len(engine.freed) == 50


async def test_who_waits_already_gets_the_room_of_who_ends(arena) -> None:
    """Where one request fits at a time, the next runs as soon as the rows of the one before are on disk, not after a while."""
    engine = await arena(pages=1, patience=30)
    call = object()
    handles = await asyncio.gather(*(engine.handle(call) for _ in range(20)))
    assert [one.stage for one in handles] == [Stage.SPILLED] * 19 + [Stage.KEPT]


async def test_what_leaves_while_the_file_is_swept_is_swept_too(arena, monkeypatch) -> None:
    """Dropped when the sweep under way has begun: the disk has its space back all the same, without another occasion."""
    engine = await arena(pages=1)
    file, begun, go = engine.spilling.file, threading.Event(), threading.Event()
    handles = [await engine.handle() for _ in range(4)]
    punch = file._punch

    def slowly(extents) -> None:
        begun.set()
        assert go.wait(60)
        punch(extents)

    monkeypatch.setattr(file, "_punch", slowly)
    handles[0].release()
    await asyncio.to_thread(begun.wait, 60)
    handles[1].release()
    handles[2].release()
    await asyncio.sleep(0.01)
    go.set()
    while os.fstat(file._fd).st_blocks:
        await asyncio.sleep(0.005)


async def test_nothing_waits_to_be_collected_as_garbage(arena) -> None:
    """What leaves the file makes room at once, and rows that came back go with their handle, also where Python's collector is off."""
    engine = await arena(pages=1)
    file = engine.spilling.file
    gc.collect()
    gc.disable()
    try:
        handles = [await engine.handle() for _ in range(5)]
        assert file.stored == 4
        handles.pop(0).release()
        del handles[0]
        await stores(file, 2)
        await fetch_all(handles[:1])
        await stores(file, 1)
        rows = weakref.ref(handles[0].require_here().captures[0])
        assert rows() is not None
        handles[0].release()
        assert rows() is None
    finally:
        gc.enable()


async def test_a_full_quota_waits_and_its_error_says_so(arena) -> None:
    """With the quota taken, a request waits for as long as it may, and is told what is full; a spilled handle that goes lets it run."""
    engine = await arena(pages=1, blocks=2, patience=1.0)
    handles = [await engine.handle() for _ in range(3)]
    began = asyncio.get_running_loop().time()
    with pytest.raises(
        CaptureMemoryFull,
        match=rf"no handle was released for 1.0 s, and .* of spill_bytes={2 * BLOCK_BYTES:,} in .* are in use, by 2 handles",
    ):
        await engine.handle()
    assert asyncio.get_running_loop().time() - began >= 1.0
    assert [one.stage for one in handles] == [Stage.SPILLED, Stage.SPILLED, Stage.KEPT]
    waiting = asyncio.create_task(engine.handle())
    await asyncio.sleep(0)
    handles.pop(0)  # dropped unread
    handles.append(await waiting)
    assert [one.stage for one in handles] == [Stage.SPILLED, Stage.SPILLED, Stage.KEPT]


async def test_a_full_disk_fails_who_needs_room_and_takes_no_rows(arena) -> None:
    """A write that fails leaves rows in the arena, where they can be fetched; who waited is told why; a disk that has room again is used."""
    engine = await arena(pages=2)
    handles = [await engine.handle() for _ in range(2)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        waiting = asyncio.create_task(engine.handle())
        while engine.spilling._failure is None:
            assert not waiting.done()
            await asyncio.sleep(0.001)
        engine.admission._refuse_all()  # a minute later
        with pytest.raises(
            CaptureMemoryFull, match=r"no handle was released for 60\.0 s, and rows cannot be moved to .*File too large"
        ):
            await waiting
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.stage for one in handles] == [Stage.KEPT] * 2
    await vacant(engine.spilling.file)
    engine.spilling._admit_again()  # a second later
    handles.append(await engine.handle())
    assert [one.stage for one in handles] == [Stage.SPILLED, Stage.KEPT, Stage.KEPT]
    await fetch_all(handles)


async def test_rows_that_are_wrong_are_no_rows_on_disk_either(arena) -> None:
    """What a fetch would refuse is refused on the way to disk, takes no space anywhere, and is told to whoever fetches it."""
    engine = await arena(pages=1)
    bad = await engine.handle()
    engine.right = False
    good = await engine.handle()
    engine.right = True
    assert bad.stage is Stage.SPILLED
    await vacant(engine.spilling.file)
    for _ in range(2):
        with pytest.raises(CaptureIncomplete, match="was computed for token 9"):
            await fetch_all([bad, good])
    assert good.stage is Stage.HERE


async def moving(engine) -> tuple[Lifecycle, asyncio.Task[Lifecycle]]:
    """Rows that are on their way to disk, and do not get there before the gate opens; and who waits for their room."""
    first = await engine.handle()
    engine.gate.clear()
    second = asyncio.create_task(engine.handle())
    while first.stage is not Stage.SPILLING:
        await asyncio.sleep(0)
    return first, second


async def test_a_fetch_waits_for_rows_on_their_way_to_disk(arena) -> None:
    """It then reads them from there: nothing is fetched twice at once, nothing freed under it."""
    engine = await arena(pages=1)
    first, second = await moving(engine)
    fetching = asyncio.create_task(fetch_all([first]))
    await asyncio.sleep(0.01)
    assert not fetching.done()
    engine.gate.set()
    await fetching
    assert first.stage is Stage.HERE
    await second
    assert len(engine.freed) == 1


async def test_nobody_keeps_what_was_moved_while_its_room_is_given_back(arena) -> None:
    """Dropped meanwhile, it is gone at once, however long whoever has the room takes to give it back."""
    engine = await arena(pages=1)
    first, second = await moving(engine)
    gone, gives_back, flush = weakref.ref(first), asyncio.Event(), engine.flush

    async def slowly() -> None:
        await gives_back.wait()
        await flush()

    engine.flush = engine.spilling._flush = slowly
    gc.disable()
    try:
        engine.gate.set()
        while first.stage is not Stage.SPILLED:
            await asyncio.sleep(0)
        del first
        await stores(engine.spilling.file, 0)
        assert gone() is None
    finally:
        gc.enable()
    gives_back.set()
    await second


@pytest.mark.parametrize("by", ["release", "drop", "cancel", "close"])
async def test_what_happens_on_the_way_to_disk_loses_nothing(arena, by) -> None:
    """A release, a dropped handle, a cancelled request, a model that is closed while rows are moved: freed once, or kept whole."""
    engine = await arena(pages=1)
    first, second = await moving(engine)
    if by == "release":
        first.release()
        assert first.stage is Stage.LEAVING
    elif by == "drop":
        del first
    elif by == "cancel":
        second.cancel()
    else:
        await engine.aclose()
        assert first.stage is Stage.KEPT
        with pytest.raises(ModelClosed):
            await second
        return
    engine.gate.set()
    if by == "cancel":
        with pytest.raises(asyncio.CancelledError):
            await second
        while engine.spilling._task is not None:
            await asyncio.sleep(0)
        assert first.stage is Stage.SPILLED
        await fetch_all([first])
    else:
        await second
    while engine.given_back or engine.spilling._task is not None or engine.spilling.file.stored:
        gc.collect()
        await asyncio.sleep(0)
    await vacant(engine.spilling.file)
    assert len(engine.freed) == 1
    if by == "release":
        with pytest.raises(CaptureReleased):
            await fetch_all([first])


async def test_a_spilled_handle_that_is_released_or_dropped_makes_room(arena) -> None:
    """On disk as in the arena; and a cancelled fetch from disk leaves it there."""
    engine = await arena(pages=1)
    handles = [await engine.handle() for _ in range(4)]
    fetching = asyncio.create_task(fetch_all([handles[2]]))
    while handles[2].stage is not Stage.RETURNING:
        await asyncio.sleep(0)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert [one.stage for one in handles[:3]] == [Stage.SPILLED] * 3
    handles[0].release()
    del handles[1]
    gc.collect()
    while engine.spilling.file.bytes_in_use > BLOCK_BYTES:
        await asyncio.sleep(0.001)
    assert engine.spilling.file.stored == 1
    with pytest.raises(CaptureReleased):
        await fetch_all(handles)
    await fetch_all(handles[1:])


async def test_a_slow_disk_stops_nobody_else(arena, monkeypatch) -> None:
    """While a write takes its time, requests with room run, other handles are fetched, and the loop goes on."""
    engine = await arena(pages=2)
    slow, written = threading.Event(), spill.write_all

    def write(fd: int, data: np.ndarray, offset: int) -> None:
        assert slow.wait(60)
        written(fd, data, offset)

    monkeypatch.setattr(spill, "write_all", write)
    first, second = await engine.handle(), await engine.handle()
    waiting = asyncio.create_task(engine.handle())
    while first.stage is not Stage.SPILLING:
        await asyncio.sleep(0)
    await asyncio.wait_for(
        fetch_all([second]), 10
    )  # gives room, in which who waits runs although the write still lasts
    await asyncio.wait_for(waiting, 10)
    assert first.stage is Stage.SPILLING
    slow.set()
    await fetch_all([first])


async def test_a_disk_that_hangs_does_not_outlast_patience(arena, monkeypatch) -> None:
    """Who waits for a write that does not end is told so after `overflow_timeout`, and not left to wait for ever."""
    engine = await arena(pages=1, patience=0.3)
    hung = threading.Event()
    monkeypatch.setattr(spill, "write_all", lambda *_: hung.wait(60))
    first = await engine.handle()
    with pytest.raises(CaptureMemoryFull, match=r"moving rows to .* takes longer than that"):
        await engine.handle()
    hung.set()
    while first.stage is Stage.SPILLING:
        await asyncio.sleep(0.001)
