"""The scripts that have a trial on CPU, on one engine of SmolLM2: each measures something, and the figure is right."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import bench_beside
import bench_capture
import bench_collect
import bench_gpu
import bench_host
import bench_patching
import bench_steering
import bench_sweep
import gpu_engines
import numpy as np
import perf_hook
import pytest
import step_report
import study_codecs
from conftest import opened
from gpu_rounds import BASE, CONTROL, HEADS, MODES, NEURONS, Workload
from gpu_shapes import Shape

from steercap import SteerModel
from steercap.lab.demo import smollm2

#: The model's sizes, as the scripts know a model.
SMOLLM2 = Shape(576, 1536, 30, 9, 3, 64, 49_152, tie_word_embeddings=True, dtype="float32")
SITES = ("resid_post", *bench_patching.SITES, "neurons", "z")


@pytest.fixture(scope="module")
def times(tmp_path_factory) -> Iterator[Path]:
    """Where the engine's process writes what its passes take."""
    folder = tmp_path_factory.mktemp("times")
    paths = [str(Path(perf_hook.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(paths))
        patched.setenv("PERF_TIMES", str(folder))
        yield folder


@pytest.fixture(scope="module")
async def model(times) -> AsyncIterator[SteerModel]:
    """SmolLM2 as the scripts start it, with all the sites that any of them arms; its passes are timed."""
    del times
    async with opened(smollm2(), spawned=True, preset="cpu", sites=SITES, enable_prefix_caching=False) as model:
        yield model


async def test_bench_capture(model) -> None:
    """Rows of every layer and token are fetched; texts take time."""
    plain = dict.fromkeys(("plain vLLM", "plain again"), model.engine)
    found = await bench_capture.compare(plain, model, repeats=2, count=2, length=8, generated=2)
    assert found["bytes, all layers"] == 2 * 9 * SMOLLM2.row_bytes("resid_post")
    assert min(map(min, (*found["wall"].values(), *found["fetch"].values()))) > 0
    bench_capture.show("a trial", found)


async def test_bench_steering(model) -> None:
    """Every operation runs, and the library has compared each receipt with what its spec demands."""
    walls = await bench_steering.compare(model.engine, model, model, repeats=2, count=2, length=8, generated=2)
    assert len(walls) == 6
    assert min(map(min, walls.values())) > 0
    bench_steering.show("a trial", walls)


async def test_bench_gpu(model) -> None:
    """Each mode of the bench for GPUs, checked as there: rows of all points, receipts, texts that steering changes."""
    bench = gpu_engines.Bench(model.engine, model.engine, model, gpu_engines.specs_of(2, SMOLLM2, per_layer=False), 1e6)
    bench.watch_phases()
    modes = [CONTROL, *(mode for mode in MODES[1:] if not mode.startswith("steer-")), *NEURONS, HEADS, "steer-2"]
    load, failed = Workload(2, 8, 3), dict[str, str]()
    tokens = bench_capture.prompts(2, 8, 0)
    records = await bench_gpu.one_pass(bench, load, [BASE, *modes], tokens, failed, warm_up=False)
    assert not failed
    assert [record["mode"] for record in records] == [BASE, *modes]
    stored = {record["mode"]: record.get("bytes_per_token", 0) for record in records}
    assert stored["capture-all"] >= SMOLLM2.row_bytes("resid_post") > stored["capture-one"] > 0
    assert all((stored[mode] > 0) == mode.startswith("capture") for mode in stored)
    for record in records:
        assert 0 < record["first_sent_ms"] < record["first_output_ms"] < record["whole_ms"]
        assert record["first_sent_ms"] <= record["last_sent_ms"] < record["whole_ms"]
        assert 3 <= record["passes"] <= 6


def test_bench_host() -> None:
    """What a client encodes: plans, vLLM's own request, and questions of several requests."""
    rows = bench_host.measure_client([1, 3], repeats=3)
    assert len(rows) == 6 + 2 * 2
    assert all(0 < row["p10"] <= row["median"] < 1e6 for row in rows)


async def test_bench_beside(model) -> None:
    """Plain vLLM and steercap run every mode, and captures have a row of each token and layer."""
    loads = [Workload(2, 8, 3)]
    for calls in (bench_beside.plain_calls(model.engine), bench_beside.steercap_calls(model)):
        found = [one async for one in bench_beside.measure(calls, loads, 1, 40_000, model.num_layers)]
        assert [record["mode"] for record in found] == list(calls)
        assert not [record for record in found if "error" in record]
        assert min(record["seconds"] for record in found) > 0
    parts = await bench_beside.one_request(model.engine, model, length=8, repeats=1, vocabulary=40_000)
    fetched = {name for name, (_, fetch, *_) in parts.items() if not math.isnan(fetch)}
    assert fetched == {"one layer", "all layers"}
    assert min(call for call, *_ in parts.values()) > 0
    assert not any(math.isnan(over) for _, _, *both in parts.values() for over in both)
    assert all(len(part) == 4 for part in parts.values())


async def test_perf_hook(model, times) -> None:
    """Passes of the engine's own process are written, each with what steercap did in it."""
    await model.generate(["One", "Two"], {"max_tokens": 6, "ignore_eos": True}, capture_layers=[3])
    deadline = time.monotonic() + 60
    while not (kinds := {kind for _, kind, _, _ in written(times)}) >= {"capture"}:
        assert time.monotonic() < deadline, f"only passes of kind {kinds} were written"
        await asyncio.sleep(0.1)
    for key, numbers in written(times).items():
        assert numbers["passes"] > 0
        assert min(numbers["host"], numbers["period"]) > 0, key
        assert key[1] != "capture" or min(numbers["begin"], numbers["end"]) > 0


def written(folder: Path) -> dict[step_report.Key, dict[str, float]]:
    """What is told of the passes that are written by now."""
    return step_report.summary(folder, least=1) if list(folder.glob("*.jsonl")) else {}


async def test_bench_collect(model, tmp_path) -> None:
    """Documents are read by plain vLLM and collected, in every mode, and the bytes are those of the rows."""
    args = argparse.Namespace(modes=list(bench_collect.MODES), folder=tmp_path, shard_mib=1, statistics_every=None)
    runs = await bench_collect.one_round(model.engine, model, bench_collect.documents(3, "16", "a", 40_000), args)
    stored = {run["mode"]: run["bytes"] for run in runs}
    assert stored["all-raw"] >= 3 * 16 * SMOLLM2.row_bytes("resid_post") > stored["all-full8"] > stored["one"] > 0
    assert min(run["ratio"] for run in runs) > 0


async def test_bench_sweep(model) -> None:
    """A batch says what each of its requests says alone, and the vectors change texts."""
    found = await bench_sweep.measure(model, 3, 6)
    assert found["same tokens"] == 3
    assert found["other than without steering"] > 0


async def test_bench_patching(model) -> None:
    """Patches make a difference, and it is that of transformers with hooks."""
    options = argparse.Namespace(layers=1, pairs=1, tokens=16, alone=8, check=1, concurrency=64)
    found: dict[str, Any] = await bench_patching.measure(model, options)
    assert found["runs"] == 2 * 16
    assert found["against hooks, worst value"] < 1e-2 < found["against hooks, greatest difference that a patch made"]


async def test_study_codecs(model) -> None:
    """Codes are smaller than rows, and point where these do."""
    texts = study_codecs.tasks()["topic"].texts[:8]
    raw = await study_codecs.read(model, texts)
    for codec, least in (("full8", 0.999), ("int4", 0.9)):
        coded = await study_codecs.read(model, texts, codec=codec)
        found = study_codecs.geometry(raw, coded, np.random.default_rng(0))
        assert least < found["cosine with the row"][0] < 1
