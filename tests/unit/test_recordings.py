"""Folders of recordings: limits by bytes and age, permissions, and what a kill or a full disk leaves."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import textwrap
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from full_disk import files_of_at_most
from handles import a_handle

from steercap import Manifest
from steercap.captures.files import bytes_of, write
from steercap.captures.recordings import RecordingFolder, Recordings, RecordLimits
from steercap.errors import CaptureIncomplete, CaptureMemoryFull, InvalidFile, InvalidRequest, InvalidSetting
from steercap.server import recording
from steercap.server.record_settings import RecordSettings
from steercap.server.recording import Recorder

#: Most bytes of the entry of one file in a journal, with its layout.
ENTRY = 1_500


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def opened(path: Path, clock: Clock | None = None, **limits) -> RecordingFolder:
    return RecordingFolder(path, model="m", limits=RecordLimits(**limits), clock=clock or Clock())


def ids(path: Path) -> list[str]:
    return [one.answer_id for one in Recordings.load(path).requests]


def on_disk(path: Path) -> int:
    """Bytes of all files of the folder but the empty one that locks it."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_what_is_recorded_is_read_again(tmp_path) -> None:
    """Several files of a request belong together, and all that is written is its owner's alone, whatever the umask."""
    clock, before = Clock(), os.umask(0)
    try:
        folder = opened(tmp_path / "rows", clock)
        folder.add([a_handle()], "first")
        clock.now += 5
        folder.add([a_handle(output=(8, 9, 10)), a_handle(output=(8, 11))], "second")
        assert ids(tmp_path / "rows") == ["first", "second"]  # while it is written too
        folder.close()
    finally:
        os.umask(before)
    first, second = Recordings.load(tmp_path / "rows").requests
    assert (first.time, second.time, len(second.files)) == (1e9, 1e9 + 5, 2)
    assert second.bytes == sum(file.bytes for file in second.files)
    assert [handle.output_token_ids for handle in second.handles()] == [(8, 9, 10), (8, 11)]
    assert torch.equal(first.handles()[0].captures[1], a_handle().captures[1])
    assert [request.answer_id for request in Manifest.load(tmp_path / "rows" / "000000").requests] == [
        "first",
        "second",
        "second",
    ]
    assert "all its samples" in Manifest.load(tmp_path / "rows" / "000000").document.asked["request"]
    for path in [tmp_path / "rows", *(tmp_path / "rows").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_spent_quota_leaves_later_requests_out(tmp_path) -> None:
    """Labels, headers, manifest and journal count, written or left from an earlier server."""
    folder = opened(tmp_path, most_bytes=9_000)
    for number in range(4):
        folder.add([a_handle()], str(number))
        assert folder.bytes == on_disk(tmp_path) <= 9_000
    with pytest.raises(CaptureMemoryFull, match=r"bytes of recordings, of at most 9,000; .* is not recorded"):
        folder.add([a_handle()] * 9, "large")
    found = ids(tmp_path)
    assert len(found) == 4
    folder.close()
    there = on_disk(tmp_path)  # what is there counts
    for most, full in ((there, True), (there + 1, False)):
        again = opened(tmp_path, most_bytes=most)
        assert (again.bytes, again.full) == (there, full)
        again.close()
    assert on_disk(tmp_path) == there


@pytest.mark.parametrize("seed", range(3))
def test_rotation_keeps_the_newest(tmp_path, seed) -> None:
    """Of segments of one to three requests the oldest go; those that stay are the last ones."""
    draw = random.Random(seed)
    size = draw.choice([1, 1_500, 3_000])
    folder = opened(tmp_path, most_bytes=12_000, segment_bytes=size, when_full="rotate")
    for number in range(draw.randrange(10, 20)):
        folder.add([a_handle()], str(number))
        found = ids(tmp_path)
        assert found == [str(one) for one in range(number + 1 - len(found), number + 1)]
        assert len(found) >= min(number + 1, 2)
        assert folder.bytes == on_disk(tmp_path) <= 12_000 + ENTRY
    assert len(found) < number + 1
    folder.close()


def test_a_request_larger_than_the_folder_takes_nothing_else_with_it(tmp_path) -> None:
    """Rotation would make no room for it: what is recorded stays."""
    folder = opened(tmp_path, most_bytes=12_000, segment_bytes=1, when_full="rotate")
    for number in range(3):
        folder.add([a_handle()], str(number))
    with pytest.raises(CaptureMemoryFull, match="bytes is not recorded"):
        folder.add([a_handle()] * 13, "large")
    assert ids(tmp_path) == ["0", "1", "2"]
    folder.close()


def test_a_file_has_at_most_the_bytes_that_it_was_to_have(tmp_path) -> None:
    """Few and many layers, long prompts, a text full of what JSON escapes: never more, and hardly less."""
    for number, (layers, length) in enumerate([(1, 4), (4, 900), (2, 3), (4, 2000)]):
        saved = a_handle(range(layers), prompt=tuple(range(length))).as_saved()
        header = msgspec.structs.replace(saved.header, text='"\n\\é' * length)
        path = write(saved._replace(header=header), tmp_path / f"{number}.safetensors")
        assert 0 <= bytes_of(saved._replace(header=header)) - path.stat().st_size < 64 + 120 * (layers + 5)


def test_old_requests_are_removed(tmp_path) -> None:
    """A segment goes when its last request is `keep_seconds` old, also where a later server finds it."""
    clock = Clock()
    folder = opened(tmp_path, clock, keep_seconds=100.0, segment_seconds=10.0)
    folder.add([a_handle()], "a")
    clock.now += 5
    folder.add([a_handle()], "b")
    clock.now += 5
    folder.add([a_handle()], "c")
    clock.now += 94.9
    folder.tidy()
    assert ids(tmp_path) == ["a", "b", "c"]
    clock.now += 0.2
    folder.tidy()
    assert ids(tmp_path) == ["c"]
    folder.close()
    clock.now += 100
    again = opened(tmp_path, clock, keep_seconds=100.0)
    again.tidy()
    assert (ids(tmp_path), again.bytes, Recordings.load(tmp_path).segments) == ([], 0, ())
    again.close()


def test_old_requests_are_removed_though_the_clock_was_set_back(tmp_path) -> None:
    """A machine that started with a wrong clock: what it recorded is as old as the correction, in this server or the next."""
    clock, limits = Clock(), {"keep_seconds": 60.0, "segment_seconds": 30.0}
    clock.now = 2e9
    folder = opened(tmp_path, clock, **limits)
    folder.add([a_handle()], "a")
    clock.now = 1e9
    folder.add([a_handle()], "b")
    assert len(Recordings.load(tmp_path).segments) == 2
    folder.close()
    folder = opened(tmp_path, clock, **limits)
    folder.tidy()
    clock.now += 59
    folder.tidy()
    assert ids(tmp_path) == ["a", "b"]
    clock.now += 1
    folder.tidy()
    assert ids(tmp_path) == []
    folder.close()


def test_one_server_writes_at_a_time(tmp_path) -> None:
    folder = opened(tmp_path)
    with pytest.raises(InvalidRequest, match="another process writes to"):
        opened(tmp_path)
    folder.close()
    opened(tmp_path).close()


def test_a_full_disk_leaves_no_half_of_a_request(tmp_path) -> None:
    """The second file of a request finds no room: the first is no record either, and the next request is."""
    folder = opened(tmp_path)
    folder.add([a_handle()], "a")
    wide = a_handle(layers=range(4), prompt=tuple(range(2000)))
    with files_of_at_most(20_000), pytest.raises(OSError, match="cannot be written"):
        folder.add([a_handle(), wide], "b")
    folder.add([a_handle()], "c")
    assert ids(tmp_path) == ["a", "c"]
    assert Recordings.load(tmp_path).unlisted == 0
    folder.close()


#: Servers that are killed before their first operation on a file of the folder, before their second, and so on; each
#: is a fork, and says what it was told to be written.
KILLED = """
    import itertools, os, signal, sys
    from pathlib import Path
    from handles import a_handle
    from steercap.captures.recordings import RecordingFolder, RecordLimits

    def serve(path, left, told):
        def watch(event, arguments):
            nonlocal left
            if event in ("open", "os.rename", "os.mkdir", "os.truncate") and path in str(arguments[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(watch)
        folder = RecordingFolder(Path(path), model="m", limits=RecordLimits(segment_bytes=1))
        for number in range(2):
            folder.add([a_handle(), a_handle()], str(number))
            os.write(told, b".")
        folder.close()

    for operations in itertools.count(1):
        path = os.path.join(sys.argv[1], str(operations))
        os.mkdir(path)
        told, tell = os.pipe()
        if not os.fork():
            serve(path, operations, tell)
            os._exit(0)
        os.close(tell)
        print(path, len(os.read(told, 9)) if (code := os.wait()[1]) else 2, flush=True)
        if not code:
            break
"""


def test_a_kill_at_any_operation_leaves_whole_requests(tmp_path) -> None:
    """What was told to be written is listed and whole; what was not is neither; the next server removes the rest."""
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    said = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    half, kills = 0, said.stdout.splitlines()
    assert len(kills) > 20
    for line in kills:
        path, told = Path(line.split()[0]), int(line.split()[1])
        found = Recordings.load(path)
        assert told <= len(found.requests) <= told + 1
        for one in found.requests:
            assert [handle.token_ids.tolist() for handle in one.handles()] == [[5, 6, 7, 8]] * 2
        half += found.unlisted
        opened(path).close()
        assert ids(path) == [one.answer_id for one in found.requests]
        assert Recordings.load(path).unlisted == 0
    assert half  # a kill between a file and its entry was among them


def test_a_segment_that_is_half_removed_or_gone_stops_nothing(tmp_path) -> None:
    """A kill between a manifest's removal and its files' leaves nothing for ever; what an operator has removed, ended
    segments and the one that is written, is neither missed nor written to.
    """
    clock = Clock()
    folder = opened(tmp_path, clock, segment_bytes=1, keep_seconds=100.0)
    for name in "abc":
        folder.add([a_handle()], name)
    shutil.rmtree(tmp_path / "000000")
    shutil.rmtree(tmp_path / "000002")
    folder.add([a_handle()], "d")
    assert ids(tmp_path) == ["b", "d"]
    folder.close()
    (tmp_path / "000001" / "manifest.json").unlink()
    (tmp_path / "000077").symlink_to(tmp_path / "000003")
    clock.now += 99
    again = opened(tmp_path, clock, keep_seconds=100.0)
    assert not (tmp_path / "000001").exists()
    again.add([a_handle()], "e")
    clock.now += 2
    again.tidy()
    assert ids(tmp_path) == ["e"]
    again.close()


def test_a_disk_that_was_full_leaves_no_empty_segments(tmp_path) -> None:
    folder = opened(tmp_path)
    for _ in range(3):
        with files_of_at_most(0), pytest.raises(OSError):  # noqa: PT011 -- any error of a full disk
            folder.add([a_handle()], "a")
    folder.add([a_handle()], "b")
    assert (ids(tmp_path), len([path for path in tmp_path.iterdir() if path.is_dir()])) == (["b"], 1)
    folder.close()


def test_limits_and_folders_that_do_not_fit_are_refused(tmp_path) -> None:
    with pytest.raises(InvalidSetting, match=r"when_full='never'; .*'drop'.*'rotate'"):
        RecordLimits(when_full="never")  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="keep_seconds=0; give a number above 0"):
        RecordLimits(keep_seconds=0)
    with pytest.raises(InvalidFile, match="is no folder; give one that"):
        Recordings.load(tmp_path / "missing")


async def test_requests_that_end_together_leave_the_workers_together(tmp_path, monkeypatch) -> None:
    """Workers answer once a pass, in which four of 40 requests end; rows of one that are wrong cost no other its own."""
    handles = [a_handle(output=(8, number)) for number in range(40)]
    wrong, fetches = handles[13].lifecycle, list[int]()

    async def fetch_all(wanted) -> None:
        fetches.append(len(wanted))
        for _ in range(4):  # a pass
            await asyncio.sleep(0)
        if wrong in wanted:
            handles[13].release()
            raise CaptureIncomplete("r: rows are missing")

    monkeypatch.setattr(recording, "fetch_all", fetch_all)
    whole = SimpleNamespace(expected=SimpleNamespace(rows=1, plan=SimpleNamespace(capture=None)))
    monkeypatch.setattr(recording, "_source", lambda _: whole)
    monkeypatch.setattr(recording, "_memory_held", lambda _: 1 << 20)
    async with Recorder(RecordSettings(tmp_path), opened(tmp_path)) as recorder:
        for number, handle in enumerate(handles):
            recorder.take([handle], str(number))
            await asyncio.sleep(0)
        while sum(recorder.dropped.values()) + recorder.recorded["requests"] < 40:
            await asyncio.sleep(0.01)
    assert len(fetches) <= 12
    assert max(fetches) <= recording.FETCH_BYTES >> 20
    assert (dict(recorder.dropped), recorder.pending) == ({"rows": 1}, 0)
    assert ids(tmp_path) == [str(number) for number in range(40) if number != 13]
    for sizes, taken in (((40, 9, 7), 1), ((9, 7, 1), 2), ((1, 16), 1), ((16,), 1)):
        recorder._coming = deque(recording._Ended([], "", size << 20) for size in sizes)
        assert len(recorder._next()) == taken


async def test_a_request_is_of_the_time_when_it_ended(tmp_path, monkeypatch) -> None:
    """Not of when the disk had room for it."""
    whole = SimpleNamespace(expected=SimpleNamespace(rows=1, plan=SimpleNamespace(capture=None)))
    monkeypatch.setattr(recording, "_source", lambda _: whole)
    monkeypatch.setattr(recording, "_memory_held", lambda _: 1)
    monkeypatch.setattr(recording, "fetch_all", lambda _: asyncio.sleep(0))
    folder = opened(tmp_path)
    add = folder.add
    monkeypatch.setattr(folder, "add", lambda *given: (time.sleep(0.4), add(*given))[1])
    began = time.time()
    async with Recorder(RecordSettings(tmp_path), folder) as recorder:
        for number in range(3):
            recorder.take([a_handle()], str(number))
        while recorder.recorded["requests"] < 3:
            await asyncio.sleep(0.01)
    times = [one.time for one in Recordings.load(tmp_path).requests]
    assert all(0 <= one - began < 0.3 for one in times), times


def test_a_request_whose_rows_have_no_room_on_disk_is_not_recorded(tmp_path) -> None:
    """Its rows would leave memory while it runs; the request itself must not be refused for it."""
    recorder = Recorder(RecordSettings(tmp_path), opened(tmp_path))
    budget = SimpleNamespace(waiting=False, pages=100, free=lambda _engine: 100)
    for free, fits in ((10, False), (11, True)):
        engine = SimpleNamespace(
            admission=SimpleNamespace(budget=budget),
            spilling=SimpleNamespace(file=SimpleNamespace(free_bytes=free)),
            room_for=lambda plan: (40, 11) if plan == "plan" else (0, 0),
        )
        assert recorder.fits(SimpleNamespace(engine=engine, plan="plan", options={}), 40) is fits
    assert recorder.dropped == {"memory": 1}
