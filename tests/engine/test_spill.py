"""Rows that find no room in memory wait on disk: bit for bit, within limits, and without holding up anybody."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from conftest import Leftovers, opened
from support.folders import flip
from support.rows import ALL_SITES, GREEDY, TINY_ENGINE, hold, random_prompt, settled

from steercap import CaptureSpec, SteerModel, errors
from steercap.captures.lifecycle import Stage
from steercap.core.spec import Point
from steercap.testing import tiny_checkpoint

SIX = {"max_tokens": 6, **GREEDY}
#: Room for 4 requests of 4 layers × about 120 tokens × 512 bytes.
LITTLE = 1 << 20
#: Sites whose rows of 240 tokens are twice the memory.
WIDE = ["resid_pre", "resid_post", "attn_out", "mlp_out"]
#: What all spilled rows of these tests fit in.
QUOTA = 64 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where rows spill to."""
    return tmp_path_factory.mktemp("spill")


@pytest.fixture(scope="module")
async def spilling(folder) -> AsyncIterator[SteerModel]:
    """An engine with a megabyte of capture memory, whose rows spill to disk."""
    settings = {"capture_bytes": LITTLE, "overflow": "spill", "spill_folder": folder, "spill_bytes": QUOTA}
    async with opened(
        tiny_checkpoint("qwen3"),
        sites=ALL_SITES,
        overflow_timeout=8.0,
        max_num_batched_tokens=128,  # so that other tests' prompts run in one pass
        **settings,
        **TINY_ENGINE,
    ) as model:
        yield model
    assert not list(folder.iterdir())


async def empty(model: SteerModel) -> tuple[int, int, int]:
    """Handles on disk, bytes there and blocks of the file, once what was dropped is gone."""
    file = model.serving.opened().spilling.file
    found = (1, 1, 1)
    for _ in range(100):
        gc.collect()
        stats = await model.stats()
        found = stats.handles_spilled, stats.spill_bytes_in_use, os.fstat(file._fd).st_blocks
        if found == (0, 0, 0):
            break
        await asyncio.sleep(0.1)
    return found


async def test_a_reduction_that_does_not_fit_by_itself_is_refused_however_it_is_asked(spilling) -> None:
    """A stop string is the client's to see, so that all rows must be there at the end; with both figures, at once."""
    prompt, stops = random_prompt(240, 1), {**SIX, "stop": ["zzz"]}
    mean = CaptureSpec(sites=WIDE, reduce="mean")
    says = r"may need [\d,]+ bytes of capture memory, of which [\d,]+ exist.*not reduced leave memory.*_batched_tokens="
    with pytest.raises(errors.CaptureMemoryFull, match=says):
        await spilling.generate(prompt, stops, capture=mean)
    assert await empty(spilling) == (0, 0, 0)


async def test_rows_of_a_sequence_larger_than_memory_leave_it_in_chunks(spilling) -> None:
    """Generated, read, in a stream, in chunks and in a sketch: those of captures that fit, site by site."""
    prompt, wide = random_prompt(240, 1), CaptureSpec(sites=WIDE)
    assert 245 * 4 * len(WIDE) * 512 > 1.9 * LITTLE
    text, handle = await spilling.generate(prompt, SIX, capture=wide)
    chunks = [chunk async for chunk in handle.chunks(100)]
    assert [len(chunk.positions) for chunk in chunks] == [100, 100, 45]
    assert torch.equal(torch.cat([chunk.token_ids for chunk in chunks])[:240], torch.tensor(prompt))
    async for _ in handle.chunks(100):
        for other in (handle.fetch, handle.chunks().__anext__):
            with pytest.raises(errors.InvalidRequest, match="handed out in chunks; end that loop"):
                await other()
    assert (await spilling.stats()).capture_bytes_claimed == 0
    await handle.fetch()
    read = await spilling.read(prompt, capture=wide)
    await read.fetch()
    streamed = [chunk async for chunk in spilling.stream(prompt, SIX, capture=wide)]
    assert "".join(chunk.text for chunk in streamed) == text
    assert max(len(chunk.positions) for chunk in streamed) <= 128
    async with spilling.sketch("moments", sites=["resid_post"]) as sketch:
        (await spilling.read(prompt, capture=wide)).release()
        found = await sketch.fetch()
    for site in WIDE:
        _, small = await spilling.generate(prompt, SIX, capture=CaptureSpec(sites=[site]))
        await small.fetch()
        for layer in range(4):
            wanted = small.captures[layer, site]
            assert torch.equal(handle.captures[layer, site], wanted)
            assert torch.equal(read.captures[layer, site], wanted[:240])
            assert torch.equal(torch.cat([one.captures[layer, site] for one in chunks]), wanted)
            assert torch.equal(torch.cat([one.captures[layer, site] for one in streamed]), wanted)
            if site == "resid_post":
                mean = wanted[:240].double().mean(0).numpy()
                np.testing.assert_allclose(found.mean(layer, site), mean, rtol=1e-3, atol=1e-5)
        small.release()
    handle.release()
    read.release()
    assert await settled(spilling) == await empty(spilling) == (0, 0, 0)


async def test_more_than_the_quota_is_refused_and_cancelled_requests_leave_nothing(spilling) -> None:
    """Long requests beside one another; some are cancelled while their rows leave memory."""
    wide = CaptureSpec(sites=WIDE)
    tasks = [
        asyncio.create_task(spilling.generate(random_prompt(200, seed), {**SIX, "max_tokens": 50}, capture=wide))
        for seed in range(6)
    ]
    await asyncio.sleep(0.3)
    for task in tasks[::2]:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    for one in found[1::2]:
        assert not isinstance(one, BaseException)
        await one[1].fetch()
        assert len(one[1].positions) == 249
        one[1].release()
    with pytest.raises(errors.CaptureMemoryFull, match="of spill_bytes="):
        await spilling.generate([random_prompt(240, 1)] * 40, SIX, capture=wide)
    del found, tasks
    assert await settled(spilling) == await empty(spilling) == (0, 0, 0)


async def test_a_request_larger_than_memory_for_recordings_is_recorded(spilling, tmp_path) -> None:
    """They may have half of it. By a codec for each site: the files hold what these make of rows fetched at once."""
    from steercap.adapters import server
    from steercap.captures.recordings import Recordings
    from steercap.captures.site_codecs import SiteCodecs
    from steercap.server.record_settings import RecordSettings
    from steercap.server.recording import Recorder
    from steercap.server.server import ServerSettings, application

    codecs = SiteCodecs.parse(["resid_post=rp8,k=32", "mlp_out"])
    prompt = random_prompt(240, 1)
    settings = RecordSettings(folder=tmp_path, codecs=codecs)
    async with Recorder.of(settings, spilling.serving.model) as recorder:
        flags = server.read_flags(spilling.serving.model, ["--served-model-name", "tiny"])
        app = await application(spilling, flags, ServerSettings(record=settings), recorder=recorder)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            asked = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=asked)).raise_for_status().json()
        while not recorder.recorded["requests"] + sum(recorder.dropped.values()):
            await asyncio.sleep(0.02)
    assert (recorder.recorded["rows"], dict(recorder.dropped)) == (245, {})
    (request,) = Recordings.load(tmp_path).requests
    assert request.answer_id.startswith(answer["id"])
    _, handle = await spilling.generate(prompt, SIX, capture=codecs.spec(layers="all"))
    await handle.fetch()
    for kept, wanted in zip(request.handles(), codecs.parted(handle), strict=True):
        assert torch.equal(kept.positions, wanted.positions)
        for point, rows in wanted.captures.items():
            assert torch.equal(kept.captures[point], rows)
    handle.release()
    assert await settled(spilling) == await empty(spilling) == (0, 0, 0)


@pytest.mark.slow
async def test_one_call_over_ten_times_the_memory(spilling, tiny, tiny_reference) -> None:
    """Rows of a call that nobody can fetch before it ends go to disk: bit for bit those of an engine with room.

    The oracle is another engine, given the same prompts one at a time: what a batch adds up in another order may differ
    in the last bit, so here each prompt runs alone in both.
    """
    prompts = [random_prompt(110, seed) for seed in range(48)]
    written = (await spilling.stats()).spill_bytes_written
    _, handles = await spilling.generate(prompts, SIX, capture_layers="all")
    stats = await spilling.stats()
    written = stats.spill_bytes_written - written
    rows = 48 * 115 * 4 * 128 * 4
    assert rows > 10 * LITTLE
    assert stats.spill_bytes_in_use > rows - LITTLE
    assert stats.handles_spilled >= 44
    assert stats.capture_bytes_claimed <= stats.capture_bytes <= LITTLE
    assert 0 <= stats.spill_bytes_in_use - written < stats.handles_spilled * 4096  # whole blocks
    await spilling.fetch_captures_batch(handles)
    hold(handles, tiny_reference)
    assert await settled(spilling) == await empty(spilling) == (0, 0, 0)
    for seed in range(0, 48, 12):
        held, room = [], []
        for model, found in ((spilling, held), (tiny, room)):
            _, handle = await model.generate(prompts[seed], SIX, capture_layers="all")
            found.append(handle)
        filler = [
            (await spilling.generate(random_prompt(110, 90 + one), SIX, capture_layers="all"))[1] for one in range(4)
        ]
        assert held[0].lifecycle.stage is Stage.SPILLED
        await held[0].fetch()
        await room[0].fetch()
        for layer in range(4):
            assert torch.equal(held[0].captures[layer], room[0].captures[layer])
        assert torch.equal(held[0].positions, room[0].positions)
        for handle in filler:
            handle.release()


@pytest.mark.parametrize(
    "spec",
    [
        CaptureSpec(sites=ALL_SITES),
        CaptureSpec(codec="full8"),
        CaptureSpec(codec="topk8", codec_k=8),
        CaptureSpec(codec="rp8", codec_k=32),
        CaptureSpec(sites=["attn_out", "mlp_out"], tokens="prompt"),
    ],
    ids=["all sites", "full8", "topk8", "rp8", "prompt"],
)
async def test_what_is_spilled_is_what_was_kept(spilling, tiny, spec) -> None:
    """Every kind of rows, and codes as codes: as an engine with room keeps them, receipts and labels too."""
    prompts = [random_prompt(60, seed) for seed in range(3)]
    for prompt in prompts:
        _, spilled = await spilling.generate(prompt, SIX, capture=spec)
        filler = [
            (await spilling.generate(random_prompt(110, 90 + one), SIX, capture_layers="all"))[1] for one in range(5)
        ]
        assert spilled.lifecycle.stage is Stage.SPILLED
        _, kept = await tiny.generate(prompt, SIX, capture=spec)
        await spilled.fetch()
        await kept.fetch()
        assert tuple(spilled.captures) == tuple(kept.captures)
        assert spilled.receipt.points == kept.receipt.points
        assert torch.equal(spilled.token_ids, kept.token_ids)
        for point in kept.captures:
            one, other = spilled.captures.as_kept(point), kept.captures.as_kept(point)
            parts = [one], [other]
            if not isinstance(one, torch.Tensor):
                assert one.terms == other.terms
                parts = list(one.parts.values()), list(other.parts.values())
            for found, wanted in zip(*parts, strict=True):
                assert found.dtype == wanted.dtype
                assert torch.equal(found, wanted)
        del filler
    assert await settled(spilling) == await empty(spilling) == (0, 0, 0)


async def test_reductions_projections_streams_and_sketches_run_beside_it(spilling, tiny_reference) -> None:
    """A mean and its handle on disk, a stream that reads while others spill, rows of a sketch: all as without."""
    mean = CaptureSpec(reduce="mean")
    _, means = await spilling.generate([random_prompt(40, seed) for seed in range(30)], SIX, capture=mean)
    async with spilling.sketch("moments", layers=[3]) as sketch:
        background = asyncio.create_task(
            spilling.generate([random_prompt(110, seed) for seed in range(24)], SIX, capture_layers="all")
        )
        chunks = [chunk async for chunk in spilling.stream(random_prompt(50, 7), SIX, capture_layers=[2, 3])]
        _, handles = await background
        assert sketch.rows > 0
    assert (await spilling.stats()).handles_spilled > 10
    await spilling.fetch_captures_batch([*means, *handles])
    hold(means, tiny_reference)
    hold(handles, tiny_reference)
    assert sum(len(chunk.positions) for chunk in chunks) == 55
    del means, handles
    assert await settled(spilling) == await empty(spilling) == (0, 0, 0)


async def test_a_changed_byte_on_disk_is_found(spilling) -> None:
    """Another program changes one byte of the real file: that handle is CaptureIncomplete, and no other."""
    _, handles = await spilling.generate([random_prompt(110, seed) for seed in range(12)], SIX, capture_layers="all")
    spilled = [handle for handle in handles if handle.lifecycle.stage is Stage.SPILLED]
    chunk = spilled[3].lifecycle.spilled.stored.chunks[0]
    file = spilling.serving.opened().spilling.file
    flip(Path(f"/proc/{os.getpid()}/fd/{file._fd}"), chunk.offset + 1000)
    with pytest.raises(errors.CaptureIncomplete, match=r"spill file in .* does not hold what was written"):
        await spilling.fetch_captures_batch(handles)
    assert [handle for handle in handles if not handle.fetched] == [spilled[3]]
    spilled.clear()
    for handle in handles:
        handle.release()
    assert await settled(spilling) == await empty(spilling) == (0, 0, 0)


async def test_a_full_quota_waits_then_says_so(spilling) -> None:
    """With memory and quota full, a request waits for `overflow_timeout` and names the quota; one that is fetched lets it run."""
    file = spilling.serving.opened().spilling.file
    held: list[Any] = []

    async def fill() -> None:
        while True:  # one by one: what a call that fails has held is nobody's
            spec = CaptureSpec(sites=ALL_SITES)
            held.append((await spilling.generate(random_prompt(110, len(held)), SIX, capture=spec))[1])

    full = rf"no handle was released for 8\.0 s, and .* of spill_bytes={QUOTA:,} in"
    with pytest.raises(errors.CaptureMemoryFull, match=full):
        await fill()
    assert file.bytes_in_use > QUOTA * 0.9
    assert (await spilling.stats()).spill_bytes_in_use <= QUOTA
    before = time.monotonic()
    waiting = asyncio.create_task(spilling.generate(random_prompt(110, 3), SIX, capture_layers="all"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await spilling.fetch_captures_batch(held[:4])
    _, handle = await waiting
    assert time.monotonic() - before < 30
    await handle.fetch()
    for one in held:
        one.release()
    held.clear()
    assert await settled(spilling) == await empty(spilling) == (0, 0, 0)


async def test_a_full_disk_is_a_clean_error_and_rows_stay(spilling) -> None:
    """The system lets the file grow no more: who needs room is told, and all that is held comes, from memory and from disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    _, held = await spilling.generate([random_prompt(110, seed) for seed in range(8)], SIX, capture_layers="all")
    size = os.fstat(spilling.serving.opened().spilling.file._fd).st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(errors.CaptureMemoryFull, match=r"rows cannot be moved to .*: .*File too large"):
            await spilling.generate([random_prompt(110, seed) for seed in range(8, 20)], SIX, capture_layers="all")
        await spilling.fetch_captures_batch(held)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(handle.captures[2].shape == (115, 128) for handle in held)
    _, more = await spilling.generate([random_prompt(110, seed) for seed in range(12)], SIX, capture_layers="all")
    await spilling.fetch_captures_batch(more)
    assert await settled(spilling) == await empty(spilling) == (0, 0, 0)


async def test_held_handles_hold_up_nobody(spilling) -> None:
    """Two hundred handles held and none fetched: a request beside them takes what it takes with none held, and all come at last."""

    async def seconds() -> float:
        before = time.monotonic()
        _, handle = await spilling.generate(random_prompt(30, 5), SIX, capture_layers=[1])
        await handle.fetch()
        return time.monotonic() - before

    alone = median([await seconds() for _ in range(15)])
    held, beside = [], []
    for round_ in range(20):
        prompts = [random_prompt(110, 10 * round_ + seed) for seed in range(10)]
        held += (await spilling.generate(prompts, SIX, capture_layers="all"))[1]
        beside.append(await seconds())
    stats = await spilling.stats()
    assert stats.handles_spilled > 190
    assert stats.requests_waiting == 0
    # Half a second is far more than any of it takes, and far less than the seconds that a wait would have cost.
    assert median(beside) < alone + 0.5
    await spilling.fetch_captures_batch(held)
    assert all(handle.fetched for handle in held)
    held.clear()
    assert await settled(spilling) == await empty(spilling) == (0, 0, 0)


async def test_cancelling_and_dropping_on_the_way_leaves_nothing(spilling) -> None:
    """Calls cancelled at many moments while rows go to disk: memory, quota and file are empty afterwards."""

    def call() -> asyncio.Task[Any]:
        prompts = [random_prompt(110, seed) for seed in range(24)]
        return asyncio.create_task(spilling.generate(prompts, SIX, capture_layers="all"))

    whole, cancelled = math.inf, 0
    for _ in range(2):
        began = time.monotonic()
        await call()
        whole = min(whole, time.monotonic() - began)
    for part in (0.0, 0.05, 0.2, 0.4, 0.6, 0.8):
        task = call()
        await asyncio.sleep(part * whole)
        if task.cancel():  # or it took less time than the first
            with pytest.raises(asyncio.CancelledError):
                await task
            cancelled += 1
        del task  # which holds the handles of a call that was done
    assert cancelled >= 2
    assert await settled(spilling) == await empty(spilling) == (0, 0, 0)


@pytest.mark.extended  # test_memory holds the same of two thousand requests
async def test_memory_does_not_grow_with_what_was_spilled(spilling, record_property) -> None:
    """Over 1,500 handles that go to disk and come back, the client's memory stays where 300 had put it."""
    process = psutil.Process()
    marks = []
    for round_ in range(10):
        _, handles = await spilling.generate(
            [random_prompt(60, seed) for seed in range(150)], SIX, capture_layers=[0, 3]
        )
        assert (await spilling.stats()).handles_spilled > 100
        await spilling.fetch_captures_batch(handles)
        del handles
        if round_ in {1, 9}:
            assert await empty(spilling) == (0, 0, 0)
            marks.append(process.memory_info().rss)
    record_property("client RSS after 300 and 1,500, MiB", [mark >> 20 for mark in marks])
    # Had rows stayed, it would be 150 MiB more.
    assert marks[1] - marks[0] < 48 << 20


@pytest.mark.extended
@pytest.mark.usefixtures("two_workers")
async def test_two_engines_spill_into_one_file(folder, tiny_reference) -> None:
    """Data parallel: each arena is relieved by itself, and one call has ten times what both hold."""
    settings = {"capture_bytes": LITTLE, "overflow": "spill", "spill_folder": folder, "transport": "wire"}
    async with opened(tiny_checkpoint("qwen3"), **settings, **TINY_ENGINE, data_parallel_size=2) as model:
        prompts = [random_prompt(110, seed) for seed in range(90)]
        _, handles = await model.generate(prompts, SIX, capture_layers="all")
        stats = await model.stats()
        assert stats.handles_spilled > 80
        assert stats.wire_bytes == 2 * (64 << 20)
        await model.fetch_captures_batch(handles)
        hold(handles, tiny_reference)
        assert await settled(model) == await empty(model) == (0, 0, 0)


@pytest.mark.extended
@pytest.mark.usefixtures("two_workers")
async def test_shards_of_two_ranks_are_spilled_whole(folder, tiny_reference) -> None:
    """Tensor parallel: what ranks hold by parts goes to disk and comes back joined, or as its shards."""
    settings = {"capture_bytes": LITTLE, "overflow": "spill", "spill_folder": folder}
    sites = ["resid_post", "z"]
    async with opened(
        tiny_checkpoint("qwen3"), sites=sites, **settings, **TINY_ENGINE, tensor_parallel_size=2
    ) as model:
        prompts = [random_prompt(100, seed) for seed in range(20)]
        _, handles = await model.generate(prompts, SIX, capture=CaptureSpec(sites=sites))
        _, parted = await model.generate(prompts[:8], SIX, capture=CaptureSpec(sites=["z"], gather=False))
        assert (await model.stats()).handles_spilled > 20
        await model.fetch_captures_batch([*handles, *parted])
        hold(handles, tiny_reference)
        for whole, parts in zip(handles, parted, strict=False):
            joined = torch.cat(parts.captures.shards(1, "z"), dim=1)
            torch.testing.assert_close(joined, whole.captures[1, "z"], rtol=1e-4, atol=1e-4)
        assert isinstance(parted[0].captures.as_kept(Point(1, "z")), tuple)
        assert await settled(model) == await empty(model) == (0, 0, 0)


async def test_closing_while_rows_go_to_disk_leaves_nothing(folder) -> None:
    """A model closed at such a moment: who waits gets ModelClosed, handles on disk too, and neither thread nor file is left."""
    before = Leftovers()
    model = SteerModel(
        tiny_checkpoint("qwen3"), capture_bytes=LITTLE, overflow="spill", spill_folder=folder, **TINY_ENGINE
    )
    await model.start()
    _, held = await model.generate([random_prompt(110, seed) for seed in range(12)], SIX, capture_layers="all")
    running = asyncio.create_task(
        model.generate([random_prompt(110, seed) for seed in range(60)], SIX, capture_layers="all")
    )
    while (await model.stats()).handles_spilled < 20:
        assert not running.done()
    await model.aclose()
    with pytest.raises(errors.ModelClosed):
        await running
    with pytest.raises(errors.ModelClosed):
        await held[0].fetch()
    del held
    assert not before.new()


CLIENT = """
import asyncio, sys
from steercap import SteerModel
from steercap.testing import tiny_checkpoint
from support.rows import GREEDY, TINY_ENGINE, random_prompt


async def main():
    async with SteerModel(
        tiny_checkpoint("qwen3"), capture_bytes=1 << 20, overflow="spill", spill_folder=sys.argv[1], **TINY_ENGINE
    ) as model:
        held = []
        while True:
            prompts = [random_prompt(110, seed) for seed in range(20)]
            held += (await model.generate(prompts, {"max_tokens": 6, **GREEDY}, capture_layers="all"))[1]
            print((await model.stats()).handles_spilled, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.extended
def test_a_killed_client_leaves_no_file(tmp_path) -> None:
    """kill -9 in the middle of spilling: no name before, no file after, and the disk has its blocks back."""
    folder, script = tmp_path / "spill", tmp_path / "client.py"
    folder.mkdir()
    script.write_text(CLIENT)
    client = subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert int(client.stdout.readline()) > 10
        assert int(client.stdout.readline()) > 30
        open_files = [path for path in Path(f"/proc/{client.pid}/fd").iterdir() if str(folder) in str(path.readlink())]
        assert len(open_files) == 1
        assert "(deleted)" in str(open_files[0].readlink())
        inode, device = open_files[0].stat().st_ino, open_files[0].stat().st_dev
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait()
        client.stdout.close()
    assert not list(folder.iterdir())
    assert not held_by_anybody(inode, device)


def held_by_anybody(inode: int, device: int) -> list[str]:
    """Processes that have a file open."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.NoSuchProcess):  # it ends meanwhile
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    stat = descriptor.stat()
                    if (stat.st_ino, stat.st_dev) == (inode, device):
                        found.append(process.name())
    return found
