"""The bench of the host: every subcommand at a size that takes no time, and the rank that it drives."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import bench_host
import host_rank
import numpy as np
import pytest
import torch
from workers import CUDA, DEVICE, LateTransfers, rows_of

from steercap.errors import SteeringNotApplied
from steercap.worker.step import Step
from steercap.worker.taps.transfers import CudaTransfers


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points and rows that cost nothing."""
    monkeypatch.setattr(host_rank, "POINTS", 3)
    monkeypatch.setattr(host_rank, "WIDTH", 32)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, float)}


@pytest.mark.parametrize("mode", host_rank.MODES)
def test_passes_are_timed_with_rows_and_edits(mode, caplog) -> None:
    """The worker follows the plans: it uploads tables for each pass, and asks for a copy of each row."""
    passes, requests = 6, 2
    row = bench_host.measure_passes(mode, requests, passes)
    captures, steers = host_rank.MODES[mode]
    times = numbers(row)
    assert len(times) == 5
    assert all(
        math.isfinite(value) and value > 0 for name, value in times.items() if mode != "idle" or name != "register"
    )
    assert (0 < row["uploads"] <= passes + 1) == (captures or steers)
    assert row["copies"] == (requests * (passes + 1) if captures else 0)
    assert not caplog.records


def test_a_pass_of_which_nothing_is_tracked_costs_least(monkeypatch) -> None:
    """What is timed is the work that a mode makes, told here by a clock that counts the worker's calls: no load moves it."""
    made = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal made
        made += event == "call" and "/steercap/worker/" in frame.f_code.co_filename

    monkeypatch.setattr(host_rank.time, "perf_counter", lambda: 1e-6 * made)
    sys.setprofile(count)
    try:
        idle, both = (bench_host.measure_passes(mode, 2, 40) for mode in ("idle", "both"))
    finally:
        sys.setprofile(None)
    assert both["before"] + both["after"] > 3 * (idle["before"] + idle["after"]) > 0


def test_a_plan_that_the_worker_does_not_follow_is_no_measurement(monkeypatch) -> None:
    """A refused plan is an error, not a fast pass."""
    monkeypatch.setattr(host_rank, "RAW", "raw")
    with pytest.raises(AssertionError, match="does not know a request"):
        bench_host.measure_passes("capture", requests=1, passes=2)


def test_rows_that_are_not_copied_are_no_measurement(monkeypatch) -> None:
    """Bytes are counted where the driver would copy them."""
    monkeypatch.setattr(host_rank.NoDevice, "copied", 0)
    with pytest.raises(AssertionError, match="were not copied"):
        bench_host.measure_passes("capture", requests=1, passes=2)


class Unedited:
    """A step of which the device says something else."""

    def __init__(self, step: Step) -> None:
        self.positions, self.edits, self.copies = step.positions, step.edits + 1, step.copies

    def __len__(self) -> int:
        return len(self.positions)


def test_edits_that_are_not_made_are_no_measurement(monkeypatch) -> None:
    """What the closing kernel says is believed by nobody."""
    run = host_rank.NoDevice.run
    monkeypatch.setattr(host_rank.NoDevice, "run", lambda self, step: run(self, Unedited(step)))
    with pytest.raises(SteeringNotApplied):
        bench_host.measure_passes("steer", requests=1, passes=2)


def test_a_device_is_driven_as_none_is() -> None:
    """With a device, the taps run: rows of the arena are those that the taps saw, steered ones with their edits."""
    transfers: Any = CudaTransfers(DEVICE) if CUDA else LateTransfers()
    requests, total = 2, host_rank.PROMPT + 3
    names = bench_host.names_of(requests)
    with host_rank.opened(requests * host_rank.PROMPT, transfers) as rank:
        rank.attach(requests * total)
        rank.hidden.copy_(torch.randn(rank.hidden.shape, generator=torch.Generator().manual_seed(0)))
        plans, took = rank.register(names, total, "capture")
        times = bench_host.steady(rank, names, 3)
        shares = rank.check(plans, total)
        assert len(took) == requests
        assert min(map(min, times)) > 0
        for number, captured_rows in enumerate(shares):
            mine = slice(number * host_rank.PROMPT, (number + 1) * host_rank.PROMPT)
            want = torch.cat([rank.hidden[mine], rank.hidden[number].expand(3, -1)]).cpu()
            for rows in rows_of(rank.runtime, captured_rows):
                assert torch.equal(rows, want)


@pytest.mark.parametrize("every", [0, 2, 1])
def test_a_changing_batch_is_timed(every, caplog) -> None:
    """Requests leave and come, and those that are left have every row."""
    row = bench_host.measure_churn(requests=3, every=every, passes=8)
    assert all(
        math.isfinite(value) and value > 0 for name, value in numbers(row).items() if every or name != "a change"
    )
    assert not caplog.records


@pytest.mark.parametrize("question", ["settle", "collect"])
def test_answers_between_passes_are_timed(question) -> None:
    """For each request, and what the client decodes."""
    row = bench_host.measure_settle(question, requests=3, passes=4, repeats=5)
    assert row["bytes"] > 3 * 16
    assert 0 < row["a request"] < row["answer"]
    assert row["decoded"] > 0


@pytest.mark.parametrize("mode", ["capture", "steer"])
def test_every_stage_of_a_pass_is_timed(mode) -> None:
    """Each is still what a pass goes through, the callers take as long as what they call, and nothing stays patched."""
    before = [getattr(owner, name) for owner, name in bench_host.STAGES]
    rows = {row["stage"]: row for row in bench_host.measure_stages(mode, requests=2, passes=10)}
    copying = {"CudaTaps._pieces", "cuda.runs", "cuda.pieces"}
    named = {f"{owner.__name__.rpartition('.')[2]}.{name}" for owner, name in bench_host.STAGES}
    assert set(rows) == named - (set() if mode == "capture" else copying)
    assert all(row["median"] > 0 for row in rows.values())
    assert rows["CudaTaps.open"]["p10"] <= rows["Runtime.begin_step"]["p10"]
    assert [getattr(owner, name) for owner, name in bench_host.STAGES] == before


def test_blocks_leave_the_first_one_out() -> None:
    """It warms up; where there is no second, it is all there is."""
    size = bench_host.BLOCK
    assert bench_host.blocks([1.0] * size + [2.0] * size + [3.0] * (size - 1)) == [2e6]
    assert bench_host.blocks([1.0, 3.0]) == [2e6]
    assert bench_host.spread("x", np.arange(1, 3).tolist()) == {"x": 1.5e6, "x p10": 1.5e6}


def test_the_command_line_prints_and_writes(tmp_path, monkeypatch, capsys) -> None:
    """One table, and the rows as JSON."""
    path = tmp_path / "rows.json"
    words = f"bench_host.py passes --requests 1,2 --passes 2 --modes idle,steer --profile --json {path}"
    monkeypatch.setattr(sys, "argv", words.split())
    threads = torch.get_num_threads()
    try:
        bench_host.main()
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert "steer" in said
    assert "begin_step" in said
    assert path.read_text().count('"mode"') == 4
