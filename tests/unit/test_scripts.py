"""Scripts without an engine: that each measures what it says, at a size that takes no time."""

from __future__ import annotations

import argparse
from typing import Any

import bench_capture
import bench_fetch
import bench_pass
import bench_tap
import bench_training
import pytest
import torch
from workers import CUDA, DEVICE, LateTransfers

from steercap.testing import tiny_checkpoint
from steercap.training import HookedModel
from steercap.worker.taps.transfers import CudaTransfers


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points and rows that cost nothing."""
    monkeypatch.setattr(bench_pass, "POINTS", 3)
    monkeypatch.setattr(bench_pass, "WIDTH", 32)


@pytest.mark.parametrize("mode", bench_pass.MODES)
def test_the_host_around_a_pass_is_timed_with_rows_and_edits(mode, caplog) -> None:
    """The worker follows the plans: it has every row and every edit, and more to do than of requests without a plan."""
    before, after = bench_pass.measured(mode, requests=2, passes=6, profiler=None)
    idle = sum(bench_pass.measured("idle", requests=2, passes=6, profiler=None))
    assert before + after > (0 if mode == "idle" else 3 * idle)
    assert not caplog.records


def test_a_plan_that_the_worker_does_not_follow_is_no_measurement(monkeypatch) -> None:
    """A refused plan is an error, not a fast pass."""
    monkeypatch.setattr(bench_pass, "RAW", "raw")
    with pytest.raises(AssertionError, match="does not know a request"):
        bench_pass.measured("capture", requests=1, passes=2, profiler=None)


@pytest.mark.parametrize("mode", bench_tap.MODES)
def test_a_tap_is_timed_with_what_its_mode_does(mode) -> None:
    """Tables that are open for a pass: rows reach the arena where they are copied, and change where they are edited."""
    copies, specs, _ = bench_tap.MODES[mode]
    transfers: Any = CudaTransfers(DEVICE) if CUDA else LateTransfers()
    tokens, width = 3, 64
    taps = bench_tap.cuda_taps(width, tokens, transfers, arena_bytes=1 << 20)
    bench_tap.opened(taps, tokens, mode, DEVICE)
    hidden = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    residual = torch.ones_like(hidden)
    rows, arena = hidden.clone(), taps._rows.clone()
    taps.on_tap(hidden, residual, torch.tensor([5], dtype=torch.int32, device=DEVICE), 0)
    changed = (hidden != rows).any(dim=1)
    assert changed.all() if specs else not changed.any()
    assert torch.equal(taps._rows, arena) != copies


async def test_fetching_is_timed_with_rows() -> None:
    """Parcels as the worker lays them out are delivered whole; the script compares each one's last row."""
    words = "--requests 2 --rows 5 --points 3 --width 96 --repeat 2 --threads 1"
    ((threads, rates),) = (await bench_fetch.main(bench_fetch.arguments(words.split()))).items()
    assert (threads, len(rates)) == (1, 2)
    assert min(rates) > 0


def test_an_idle_tap_costs_microseconds() -> None:
    """A hook and an operator: more than nothing, less than a millisecond."""
    assert 0 < bench_capture.idle_tap_cost(calls=50) < 1e-3


def test_a_step_of_training_trains() -> None:
    """Vectors of both traits are other ones after a step."""
    args = argparse.Namespace(batch_size=1, tokens=8)
    bench = bench_training.Bench(HookedModel(tiny_checkpoint("qwen3"), torch.float32, device="cpu"), 2, args)
    before = [[one.detach().clone() for one in trait.spec.parameters()] for trait in bench.traits]
    assert bench.step() > 0
    for trait, known in zip(bench.traits, before, strict=True):
        assert any(not torch.equal(one, other) for one, other in zip(trait.spec.parameters(), known, strict=True))
