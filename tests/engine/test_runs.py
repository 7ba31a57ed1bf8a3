"""Captures of an engine in folders: what is listed is what came, and a command that is killed goes on."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.rows import ALL_SITES, GREEDY, random_prompt
from support.specs import vector

from steercap import Add, CaptureSpec, Manifest, SteeringSpec, save_run
from steercap.lab.directions import mean_rows
from steercap.testing import tiny_checkpoint

SIX = {"max_tokens": 6, **GREEDY}
#: Prompts of a command that is killed: some ten seconds, two at a time.
COUNT = 150


async def test_a_run_gives_back_what_came(tiny, tmp_path) -> None:
    """All sites, a reduction, chosen tokens, steered or not, in two sessions: bit for bit, with what was asked of each."""
    steering = SteeringSpec([Add(vector(128, seed=1), layer=1)])
    specs = [
        CaptureSpec(sites=ALL_SITES),
        CaptureSpec(layers=[1, 2], reduce="mean"),
        CaptureSpec(layers=-1, tokens=[0, "generated"]),
    ]
    prompts = [random_prompt(12, seed) for seed in range(3)]
    _, plain = await tiny.generate(prompts, SIX, capture=specs)
    _, steered = await tiny.generate(prompts, SIX, capture=specs, steering=steering)
    await tiny.fetch_captures_batch([plain, steered])
    save_run(tmp_path, plain)
    manifest = save_run(tmp_path, steered)
    for known, found in zip([*plain, *steered], manifest.handles(), strict=True):
        assert all(torch.equal(known.captures[point], found.captures[point]) for point in known.points)
        assert known.receipt.steering == found.receipt.steering
    digest = tiny.serving.engine.compiler.lowered(steering).digest.hex()
    assert [request.steering for request in manifest.requests] == [None] * 3 + [digest] * 3
    assert [request.positions for request in manifest.requests[:3]] == [((0, 17),), ((0, 17),), ((0, 1), (12, 17))]
    assert [manifest.layout_of(request).returned for request in manifest.requests[:3]] == [
        "gathered",
        "summary",
        "gathered",
    ]
    assert len(manifest.document.layouts) == 3


async def test_the_codec_of_the_environment_is_that_of_captures_that_name_none(tiny, monkeypatch) -> None:
    """By layers and by a spec; a spec that names one has it. What directions are found in is raw, and reductions are."""
    engine, prompt = tiny.serving.engine, random_prompt(9, 4)
    specs = [CaptureSpec(layers=2), CaptureSpec(layers=2, codec="raw"), CaptureSpec(layers=2, reduce="mean")]
    before, *_ = known = await tiny.read([prompt] * 3, capture=specs)
    await tiny.fetch_captures_batch(known)
    means = await mean_rows(tiny, ["One two three"], layers=[2])
    monkeypatch.setattr(engine.compiler, "_settings", dataclasses.replace(engine.settings, codec="full8"))
    coded, raw, mean = found = await tiny.read([prompt] * 3, capture=specs)
    short = await tiny.read(prompt, capture_layers=2)
    await tiny.fetch_captures_batch([found, short])
    rows = before.captures[2]
    step = (rows.amax(dim=1) - rows.amin(dim=1))[:, None] / 255
    for handle in (coded, short):
        assert not torch.equal(handle.captures[2], rows)
        assert ((handle.captures[2] - rows).abs() <= 0.51 * step).all()  # 0.01 for the rounding of two batches
    assert not torch.allclose(coded.captures[2], rows, atol=float(step.min()) / 100, rtol=0)
    torch.testing.assert_close(raw.captures[2], rows, rtol=1e-5, atol=1e-5)  # float32, batched otherwise
    torch.testing.assert_close(mean.captures[2], known[2].captures[2], rtol=1e-5, atol=1e-5)
    again = await mean_rows(tiny, ["One two three"], layers=[2])
    torch.testing.assert_close(again.values, means.values, rtol=1e-5, atol=1e-5)


@pytest.mark.extended
@pytest.mark.timeout(1500)
def test_a_command_that_is_killed_goes_on(tmp_path) -> None:
    """SIGKILL while it writes, twice, at random moments: what is listed is whole, the rest is asked for when it goes on,
    and the end is the run of a command that was not killed. Another question is refused.
    """
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"This is the {number}th text of many\n" for number in range(COUNT)))
    model = ("-m", str(tiny_checkpoint("qwen3")), "--dtype", "float32", "--eager", "--max-model-len", "128")
    room = ("--engine-arg", "kv_cache_memory_bytes=33554432", "--engine-arg", "max_num_seqs=2")

    def started(out: Path, *more: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "steercap",
            "capture",
            "--prompts",
            str(prompts),
            "--out",
            str(out),
            *model,
            *room,
        ]
        command += ["--max-tokens", "48", "--codec", "full8", "--json", *more]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ
        )

    folder, rng, had = tmp_path / "killed", random.Random(5), 0
    for _ in range(2):
        process = started(folder)
        while not (folder / "manifest.json").exists() or len(Manifest.load(folder).requests) <= had:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=100)
        manifest = Manifest.load(folder)
        assert had < len(manifest.requests) < COUNT, "it was killed on the way"
        assert len([*manifest.handles()]) == len(manifest.requests)
        had = len(manifest.requests)
    process = started(folder, "--max-tokens", "47")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "sampling.max_tokens" in error
    whole = tmp_path / "whole"
    for out in (folder, whole):
        process = started(out)
        _, error = process.communicate(timeout=300)
        assert not process.returncode, error
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}
    one, other = Manifest.load(folder), Manifest.load(whole)
    assert one.document.asked == other.document.asked
    assert one.document.layouts == other.document.layouts
    names = ("file", "prompt_sha256", "text_sha256", "positions", "rows")
    assert [[getattr(request, name) for name in names] for request in one.requests] == [
        [getattr(request, name) for name in names] for request in other.requests
    ]
    assert len([*one.handles()]) == COUNT
