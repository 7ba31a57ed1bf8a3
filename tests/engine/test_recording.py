"""A server that records: unmodified clients, and rows that are those of local requests."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.rows import random_prompt, settled

from steercap import CaptureSpec, SteerModel
from steercap.adapters import server
from steercap.captures.recordings import RecordedRequest, Recordings
from steercap.captures.site_codecs import SiteCodecs
from steercap.server.record_settings import RecordSettings
from steercap.server.recording import Recorder
from steercap.server.server import ServerSettings, application

FLAGS = ["--served-model-name", "tiny"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
SITES = SiteCodecs.parse(["resid_post", "attn_out"])
SPEC = CaptureSpec(layers=[0, 2], sites=["resid_post", "attn_out"])


class Recorded:
    """A server with its recorder, and what a client gets of it."""

    def __init__(self, app: Any, recorder: Recorder) -> None:
        self._app, self.recorder = app, recorder
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")
        self.openai = AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=self.http, max_retries=0)

    async def written(self, count: int) -> tuple[RecordedRequest, ...]:
        """Wait until this many requests are recorded or dropped; what is listed then."""
        recorder = self.recorder
        await until(lambda: recorder.recorded["requests"] + sum(recorder.dropped.values()) >= count)
        return Recordings.load(recorder.folder.path).requests


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def recording(tiny: SteerModel, **given: Any) -> AsyncIterator[Recorded]:
    settings = RecordSettings(**{"codecs": SITES, "layers": [0, 2], **given})
    async with Recorder.of(settings, tiny.serving.model) as recorder:
        flags = server.read_flags(tiny.serving.model, FLAGS)
        app = await application(tiny, flags, ServerSettings(record=settings), recorder=recorder)
        yield Recorded(app, recorder)


async def test_rows_are_those_of_local_requests(tiny: SteerModel, tmp_path) -> None:
    """Texts, streams and several samples of clients that know nothing of it; each under the id of its answer."""
    prompt = random_prompt(40, 1)
    text, handle = await tiny.generate(prompt, {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}, capture=SPEC)
    await handle.fetch()
    async with recording(tiny, folder=tmp_path / "rows") as served:
        plain = await served.openai.completions.create(model="tiny", prompt=prompt, **GREEDY)
        stream = await served.openai.completions.create(model="tiny", prompt=prompt, stream=True, **GREEDY)
        chunks = [chunk async for chunk in stream]
        several = await served.openai.completions.create(model="tiny", prompt=prompt, n=3, seed=1, max_tokens=4)
        assert plain.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == text
        assert "steercap" not in (plain.model_extra or {})
        found = await served.written(3)
    assert [one.answer_id.rpartition("-")[0] for one in found] == [plain.id, chunks[0].id, several.id]
    assert [len(one.files) for one in found] == [1, 1, 3]
    for one in found[:2]:
        (kept,) = one.handles()
        assert (kept.text, kept.prompt_token_ids, kept.output_token_ids) == (
            text,
            tuple(prompt),
            handle.output_token_ids,
        )
        for point, rows in handle.captures.items():
            torch.testing.assert_close(kept.captures[point], rows, rtol=1e-5, atol=1e-5)
    assert {kept.text for kept in found[2].handles()} == {choice.text for choice in several.choices}
    for path in (tmp_path / "rows").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert Recordings.load(tmp_path / "rows").unlisted == 0
    await settled(tiny)


async def test_a_header_and_a_capture_of_ones_own_leave_a_request_out(tiny: SteerModel, tmp_path) -> None:
    prompt = random_prompt(12, 2)
    async with recording(tiny, folder=tmp_path) as served:
        for said in ("no", "0", "never", ""):
            await served.openai.completions.create(
                model="tiny", prompt=prompt, extra_headers={"x-steercap-record": said}, **GREEDY
            )
        own = {"ignore_eos": True, "steercap": {"capture": True, "deliver": "inline"}}
        answer = await served.openai.completions.create(
            model="tiny", prompt=prompt, temperature=0.0, max_tokens=6, extra_body=own
        )
        assert answer.model_extra["steercap"]["results"][0]["capture"]["rows"] == 17
        await served.openai.completions.create(
            model="tiny", prompt=prompt, extra_headers={"x-steercap-record": "yes"}, **GREEDY
        )
        found = await served.written(2)
        assert (served.recorder.skipped, served.recorder.dropped) == ({"opted_out": 4}, {"own_capture": 1})
    assert len(found) == 1
    await settled(tiny)


async def test_a_request_without_rows_to_record_is_not_dropped(tiny: SteerModel, tmp_path) -> None:
    """A sampled token has a row only once a later pass reads it: one token, or an end at the first, has none."""
    prompt = random_prompt(12, 4)
    async with recording(tiny, folder=tmp_path, tokens="generated") as served:

        async def asked(**more: Any) -> Any:
            given = {"model": "tiny", "prompt": prompt, "temperature": 0.0, **more}
            return (await served.openai.completions.create(**given)).choices[0]

        first = await asked(max_tokens=1, extra_body={"return_token_ids": True})
        assert (served.recorder.skipped, served.recorder.dropped) == ({"no_rows": 1}, {})
        ends = {"stop_token_ids": first.token_ids, "ignore_eos": True}
        assert (await asked(max_tokens=6, extra_body=ends)).finish_reason == "stop"
        await asked(max_tokens=6, extra_body={"ignore_eos": True})
        found = await served.written(2)
        assert (served.recorder.skipped, served.recorder.dropped) == ({"no_rows": 1}, {})
    assert [len(one.positions) for request in found for one in request.handles()] == [0, 5]
    await settled(tiny)


async def test_a_stalled_file_system_stops_no_request(tiny: SteerModel, tmp_path, monkeypatch) -> None:
    """The segment's manifest is a FIFO, at which the writer waits in the kernel. Requests are answered meanwhile; what
    no longer fits the queue is counted; and once the FIFO gives way, the next segment is written.
    """
    monkeypatch.setattr("steercap.server.recording.LARGE", 1)  # the queue is small, and a page no large request
    async with recording(tiny, folder=tmp_path / "rows", queue_bytes=400_000) as served:
        (tmp_path / "rows" / "000000").mkdir()
        os.mkfifo(tmp_path / "rows" / "000000" / "manifest.json")
        prompt, recorder = random_prompt(20, 3), served.recorder
        texts = set()
        for _ in range(16):
            answer = await served.openai.completions.create(model="tiny", prompt=prompt, **GREEDY)
            texts.add(answer.choices[0].text)
            await until(lambda: recorder.pending < 1 << 18)  # rows are here, and a page of the workers is not counted
        assert len(texts) == 1
        assert recorder.recorded["requests"] == 0
        assert recorder.dropped["queue"] >= 8
        assert 0 < recorder.pending <= 400_000
        await settled(tiny)  # no row of them is left in the workers
        with (tmp_path / "rows" / "000000" / "manifest.json").open("wb") as fifo:
            fifo.write(b"nothing")
        (tmp_path / "rows" / "000000" / "manifest.json").unlink()
        found = await served.written(16)
        assert recorder.pending == 0
        assert recorder.recorded["requests"] == len(found) == 16 - sum(recorder.dropped.values()) > 0
    await settled(tiny)


async def test_a_server_ends_before_a_stalled_file_system(tiny: SteerModel, tmp_path, monkeypatch) -> None:
    """What is queued behind the stall is dropped, and the end does not wait for it."""
    monkeypatch.setattr("steercap.server.recording.END_SECONDS", 0.2)
    manifest = tmp_path / "rows" / "000000" / "manifest.json"
    async with recording(tiny, folder=tmp_path / "rows") as served:
        manifest.parent.mkdir()
        os.mkfifo(manifest)
        for _ in range(3):
            await served.openai.completions.create(model="tiny", prompt=random_prompt(9, 10), **GREEDY)
    assert served.recorder.dropped == {"ended": 2}
    assert served.recorder.pending > 0  # of the request that is being written
    with manifest.open("wb") as fifo:
        fifo.write(b"nothing")
    await until(lambda: all(thread.name != "steercap recorder" for thread in threading.enumerate()))
    assert (served.recorder.dropped, served.recorder.pending) == ({"ended": 2, "rows": 1}, 0)
    await settled(tiny)


@pytest.mark.parametrize("steering", [None, {"op": "add", "vector": [4.0] * 128, "layer": 1}])
async def test_a_steered_request_is_recorded_as_the_model_ran_it(tiny: SteerModel, tmp_path, steering) -> None:
    prompt = random_prompt(16, 4)
    async with recording(tiny, folder=tmp_path) as served:
        body = {"ignore_eos": True} | ({} if steering is None else {"steercap": {"steering": steering}})
        answer = await served.openai.completions.create(
            model="tiny", prompt=prompt, temperature=0.0, max_tokens=6, extra_body=body
        )
        (found,) = await served.written(1)
    (kept,) = found.handles()
    assert kept.text == answer.choices[0].text
    assert (found.files[0].steering is None) == (steering is None)
    assert kept.captures[2, "resid_post"].shape == (21, 128)
    await settled(tiny)


async def test_metrics_hold_steercaps_figures_behind_vllms(tiny: SteerModel, tmp_path) -> None:
    """Both formats are read by Prometheus's own parsers, and every figure of the recorder is what it counted."""
    prompt = random_prompt(12, 5)
    async with recording(tiny, folder=tmp_path, codecs=SiteCodecs.parse(["resid_post"]), layers=[0]) as served:
        for out in ("yes", "yes", "no"):
            await served.openai.completions.create(
                model="tiny", prompt=prompt, extra_headers={"x-steercap-record": out}, **GREEDY
            )
        too_much = {"steercap": {"steering": {"op": "add", "vector": [1.0] * 128, "layer": 77}}}
        refused = await served.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", **too_much})
        assert refused.status_code == 400
        found = await served.written(3)  # of these one request failed before it could be recorded
        in_folder = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        plain = await served.http.get("/metrics")
        told = await served.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        stats = await tiny.stats()
        samples = {
            (one.name, *one.labels.values()): one.value
            for family in text_string_to_metric_families(plain.text)
            for one in family.samples
            if one.name.startswith("steercap_")
        }
        if told.headers["content-type"].startswith("application/openmetrics-text"):
            assert {one.name for one in openmetrics(told.text)} >= {"steercap_recorded_rows", "steercap_workers_up"}
        assert "vllm:" in plain.text or "http_requests" in plain.text or "python_info" in plain.text
    assert samples["steercap_recorded_requests_total",] == len(found) == 2
    assert samples["steercap_recorded_rows_total",] == 2 * 17
    assert samples["steercap_recorded_bytes_total",] == sum(one.bytes for one in found)
    assert samples["steercap_recording_folder_bytes",] == in_folder
    assert samples["steercap_recording_skipped_requests_total", "opted_out"] == 1
    assert samples["steercap_recording_skipped_requests_total", "not_sampled"] == 0
    assert samples["steercap_recording_dropped_requests_total", "disk"] == 0  # there before the first, for rate()
    assert samples["steercap_failed_requests_total", "LayerOutOfRange"] == 1
    assert samples["steercap_workers_up",] == 1
    assert samples["steercap_captured_rows_total",] == stats.rows_captured
    assert samples["steercap_steering_slots",] == stats.steering_slots
    assert samples["steercap_capture_memory_bytes",] == stats.capture_bytes
    await settled(tiny)


async def test_each_site_is_recorded_in_its_codec(tiny: SteerModel, tmp_path) -> None:
    """Two codecs and raw rows of one request: each as a local request of that codec alone has them."""
    prompt, sites = random_prompt(24, 6), ["resid_post=rp8,k=64,seed=2", "mlp_out=topk8,k=16", "attn_out"]
    async with recording(tiny, folder=tmp_path, codecs=SiteCodecs.parse(sites), layers=[1, 3]) as served:
        await served.openai.completions.create(model="tiny", prompt=prompt, **GREEDY)
        (found,) = await served.written(1)
    specs = [
        CaptureSpec(layers=[1, 3], sites="resid_post", codec="rp8", codec_k=64, codec_seed=2),
        CaptureSpec(layers=[1, 3], sites="mlp_out", codec="topk8", codec_k=16),
        CaptureSpec(layers=[1, 3], sites="attn_out"),
    ]
    for part, spec in zip(found.handles(), specs, strict=True):
        _, handle = await tiny.generate(prompt, {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}, capture=spec)
        async with handle:
            assert (part.points, part.output_token_ids) == (handle.points, handle.output_token_ids)
            for point, rows in handle.captures.items():
                step = float(handle.coded[point].parts["scale"].max()) if point.site != "attn_out" else 0.0
                torch.testing.assert_close(part.captures[point], rows, rtol=1e-5, atol=1e-5 + 1.01 * step)
    await settled(tiny)


async def test_a_prompt_can_be_left_out(tiny: SteerModel, tmp_path) -> None:
    async with recording(tiny, folder=tmp_path, tokens="generated", prompts=False) as served:
        answer = await served.openai.completions.create(model="tiny", prompt=random_prompt(24, 7), **GREEDY)
        (found,) = await served.written(1)
    (kept,) = found.handles()
    assert (kept.text, set(kept.prompt_token_ids)) == (answer.choices[0].text, {-1})
    assert kept.positions.tolist() == [24, 25, 26, 27, 28]
    await settled(tiny)


async def test_what_has_no_room_in_the_workers_is_answered_unrecorded(tiny: SteerModel, tmp_path) -> None:
    """Half of the capture memory is left to others: with more than that taken, a request is not recorded, nor does it
    wait; and the rows of a client that goes away are freed.
    """
    engine, prompt = tiny.serving.here(), random_prompt(24, 8)
    async with recording(tiny, folder=tmp_path) as served:
        reservation = await engine.admit(engine.admission.budget.pages // 2 + 1, object())
        answer = await served.openai.completions.create(model="tiny", prompt=prompt, **GREEDY)
        engine.admission.release(reservation)
        assert answer.choices[0].finish_reason == "length"
        stream = await served.openai.completions.create(
            model="tiny", prompt=prompt, stream=True, **{**GREEDY, "max_tokens": 60}
        )
        await served.openai.completions.create(model="tiny", prompt=prompt, **GREEDY)
        asking = asyncio.create_task(
            served.openai.completions.create(model="tiny", prompt=prompt, **{**GREEDY, "max_tokens": 60})
        )
        await until(lambda: engine.admission.budget.running > 0)
        asking.cancel()
        await asyncio.wait([asking])
        await stream.close()
        await until(lambda: served.recorder.recorded["requests"] + sum(served.recorder.dropped.values()) == 4)
        assert served.recorder.dropped["memory"] == 1
        assert set(served.recorder.dropped) <= {"memory", "cancelled"}
    await settled(tiny)


async def test_a_sample_of_the_requests_is_recorded(tiny: SteerModel, tmp_path) -> None:
    async with recording(tiny, folder=tmp_path, fraction=0.5, layers=[0]) as served:
        body = {"model": "tiny", "prompt": random_prompt(4, 9), "max_tokens": 1}
        answers = [await served.http.post("/v1/completions", json=body) for _ in range(60)]
        assert {answer.status_code for answer in answers} == {200}
        count = 60 - served.recorder.skipped["not_sampled"]
        assert 10 < count < 50  # but for one in ten million runs
        assert len(await served.written(count)) == count
    await settled(tiny)
