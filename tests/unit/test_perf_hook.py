"""What looks into vLLM's workers: modules are patched as they are imported, passes are written and read, taps are known by point."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_tap
import perf_hook
import pytest
import step_report
import torch
from perf_hook import strip, times
from workers import CUDA, DEVICE, LateTransfers

from steercap.kernels import tap
from steercap.worker.taps.cuda import CudaTaps
from steercap.worker.taps.transfers import CudaTransfers

HOOK = Path(perf_hook.__file__).parent
#: Stand-ins, by their files: a device whose clock is a millisecond further at each event, a worker, its graphs, a runtime.
FAKES = {
    "torch/__init__.py": """
        from types import SimpleNamespace
        class Event:
            clock = 0
            def __init__(self, enable_timing): pass
            def record(self): Event.clock += 1; self.at = Event.clock
            def elapsed_time(self, other): return other.at - self.at
        cuda = SimpleNamespace(Event=Event, is_available=lambda: True)
    """,
    "vllm/v1/worker/gpu_worker.py": """
        from steercap.worker.runtime import Runtime
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
        class Worker:
            def __init__(self): self.runtime, self.graphs = Runtime(), ModelCudaGraphManager()
            def execute_model(self, scheduler_output):
                if not scheduler_output.total_num_scheduled_tokens: return "nothing"
                self.runtime.begin_step("batch")
                found = self.graphs.run_fullgraph("desc")
                self.runtime.end_step()
                return found
            def sample_tokens(self, grammar_output): return "sampled"
    """,
    "vllm/v1/worker/gpu/cudagraph_utils.py": """
        class CudaGraphManager:
            def run_fullgraph(self, desc): return "ran"
        class ModelCudaGraphManager(CudaGraphManager): pass
    """,
    "steercap/worker/runtime.py": """
        from types import SimpleNamespace
        class RequestTable:
            def make_step(self, batch): assert batch == "batch"
        class Runtime:
            taps = SimpleNamespace(open_step=SimpleNamespace(kept=[True], changed=[False]))
            def begin_step(self, batch): RequestTable().make_step(batch)
            def end_step(self, error=None): self._take_completed(); assert error is None
            def _take_completed(self): self._verify()
            def _verify(self): pass
    """,
}
PASSES = """
from types import SimpleNamespace
from vllm.v1.worker.gpu_worker import Worker
from perf_hook.times import recorder
worker = Worker()
for tokens in (7, 2, 2, 2, 0):
    output = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1}, total_num_scheduled_tokens=tokens)
    assert worker.execute_model(output) == ("ran" if tokens else "nothing")
    assert worker.sample_tokens(None) == "sampled"
recorder().write()
"""


def run_passes(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run passes of the stand-ins in a process that has the hook on its path."""
    for name, text in FAKES.items():
        path = folder / "fakes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in path.relative_to(folder / "fakes").parents[:-1]:
            (folder / "fakes" / package / "__init__.py").touch()
        path.write_text(textwrap.dedent(text))
    paths = {"PYTHONPATH": os.pathsep.join([str(HOOK), str(folder / "fakes")])}
    command = [sys.executable, "-P", "-c", PASSES]
    return subprocess.run(
        command, env=os.environ | paths | environment, capture_output=True, text=True, check=False, timeout=100
    )


def test_modules_are_patched_when_they_are_imported(tmp_path) -> None:
    """What they return stays the same, and every pass with tokens is written, with the times of host and device."""
    done = run_passes(tmp_path, PERF_TIMES=str(tmp_path / "times"))
    assert not done.returncode, done.stderr
    (path,) = (tmp_path / "times").glob("*.jsonl")
    *passes, end = map(json.loads, path.read_text().splitlines())
    assert end == {"over": True}
    assert [one["tokens"] for one in passes] == [7, 2, 2, 2]
    assert ["gap" in one for one in passes] == [False, True, True, True]
    for one in passes:
        assert (one["kind"], one["replayed"], one["requests"]) == ("capture", True, 2)
        assert one["started"] < one["executed"] < one["sampling"] < one["ended"]
        assert (one["prepare"], one["graph"], one["tail"]) == (1000, 1000, 1000)
        assert set(one["stages"]) == {"make_step", "_take_completed", "_verify"}
        assert 0 < one["stages"]["_verify"] < one["stages"]["_take_completed"] < one["end"]
        assert 0 < one["thread"] <= one["process"]
    ((key, medians),) = step_report.summary(tmp_path / "times", least=2).items()
    assert key == (path.stem, "capture", 2, True)
    assert (medians["passes"], medians["gap"]) == (2, 1000)
    assert set(step_report.COLUMNS) < set(medians)
    assert min(medians[name] for name in {*step_report.COLUMNS, "make_step"} - {"others"}) > 0
    assert len(step_report.table_of({key: medians}).rows) == 1
    stages = step_report.stages_of({key: medians})
    assert stages is not None
    assert len(stages.columns) == 4 + 3
    assert step_report.stages_of({key: {"passes": 2}}) is None
    prompts = [line | {"replayed": False} if line["tokens"] == 7 else line for line in passes]
    path.write_text("\n".join(map(json.dumps, [*prompts, end])))
    found = step_report.summary(tmp_path / "times", least=1)
    assert [key[1:] for key in found] == [("capture", 2, True), ("capture with prompts", 2, False)]
    period = 1e6 * (passes[1]["started"] - passes[0]["started"])
    assert found[path.stem, "capture with prompts", 2, False]["period"] == pytest.approx(period)


def test_nothing_is_patched_without_being_asked_for(tmp_path) -> None:
    """The folder on the path alone changes nothing, and a word that means nothing ends the process."""
    done = run_passes(tmp_path, PERF_TIMES="", PERF_STRIP="")
    assert "No module named 'perf_hook'" in done.stderr
    assert "write idle or need" in run_passes(tmp_path, PERF_STRIP="all").stderr


def test_times_of_no_passes_say_what_is_missing(tmp_path) -> None:
    """A folder to which nothing was written is an error."""
    with pytest.raises(FileNotFoundError, match="was PERF_TIMES="):
        step_report.summary(tmp_path)


def test_passes_without_a_device_have_the_times_of_the_host() -> None:
    """On CPU there are no events, and so no columns of the device."""
    one = times.PassTimes(2, 2, 1.0, executed=1.1, sampling=1.2, ended=1.3)
    other = times.PassTimes(2, 2, 1.5, executed=1.6, sampling=1.8, ended=2.0)
    lines = [json.dumps(each.record(None)) for each in (one, other)]
    ((kind, first, after),) = step_report.counted(lines)
    assert kind == "plain"
    said = step_report.of_pass(first, after)
    assert {name: round(value) for name, value in said.items() if value} == {
        "period": 500_000,
        "host": 200_000,
        "wait": 300_000,
    }
    assert not list(step_report.counted([*lines[:1], '{"over": true}', *lines[1:]]))


def test_vllm_has_what_is_patched() -> None:
    """The classes and methods are where they are looked for; vLLM is not imported for it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    for module, wanted in (
        ("v1/worker/gpu_worker.py", {"Worker.execute_model", "Worker.sample_tokens"}),
        ("v1/worker/gpu/cudagraph_utils.py", {"CudaGraphManager.run_fullgraph", "ModelCudaGraphManager.capture"}),
    ):
        body = ast.parse((Path(spec.origin).parent / module).read_text()).body
        methods = {
            f"{one.name}.{method.name}"
            for one in body
            if isinstance(one, ast.ClassDef)
            for method in one.body
            if isinstance(method, ast.FunctionDef)
        }
        assert wanted <= methods


def some_taps(mode: str) -> CudaTaps:
    """Taps of 36 points, open for a pass of three tokens."""
    transfers: Any = CudaTransfers(DEVICE) if CUDA else LateTransfers()
    taps = bench_tap.cuda_taps(64, 3, transfers, device_ring_bytes=1 << 20)
    bench_tap.opened(taps, 3, mode, DEVICE)
    return taps


@pytest.fixture
def points(monkeypatch) -> strip.Stripper:
    """A stripper that knows the points of a model with four of the taps' points."""
    monkeypatch.setattr(tap, "_bound", None)
    model = torch.nn.Module()
    for number in range(bench_tap.POINTS):
        model.register_buffer(f"steercap_{number}", torch.tensor([number], dtype=torch.int32))
    model.register_buffer("another", torch.zeros(1))
    found = strip.Stripper(need=True)
    found.learn(model)
    assert found.addresses == {
        number: model.get_buffer(f"steercap_{number}").data_ptr() for number in range(bench_tap.POINTS)
    }
    return found


def test_a_pass_keeps_the_taps_that_it_needs(points, monkeypatch) -> None:
    """None of an idle pass, those that copy or edit of another, all where it cannot be known."""
    assert points.wanted() is None  # plain vLLM
    monkeypatch.setattr(tap, "_bound", some_taps("idle"))
    assert points.wanted() == frozenset()
    for mode in ("copy", "add"):
        taps = some_taps(mode)
        monkeypatch.setattr(tap, "_bound", taps)
        assert points.wanted() == frozenset(points.addresses.values())
        taps.layouts.offsets[:, 5:] = taps.programs.counts[:, 5:] = -1
        points._known = (None, None)
        assert points.wanted() == frozenset(points.addresses[number] for number in range(5))
    assert strip.Stripper(need=False).wanted() is None
    del points.addresses[2]
    points._known = (None, None)
    assert points.wanted() is None


def test_graphs_are_kept_of_models_with_taps_alone(monkeypatch) -> None:
    """While such a model is captured, and never of plain vLLM."""
    plain = torch.cuda.CUDAGraph
    seen = []

    class Manager:
        def capture(self, _model: Any, more: int) -> int:
            seen.append(torch.cuda.CUDAGraph)
            return more

    module = SimpleNamespace(ModelCudaGraphManager=Manager)
    strip.patch_cudagraph_utils(module)
    for bound, graph in ((None, plain), (some_taps("idle"), strip.StrippedGraph)):
        monkeypatch.setattr(tap, "_bound", bound)
        assert Manager().capture(torch.nn.Module(), 3) == 3
        assert seen.pop() is graph
        assert torch.cuda.CUDAGraph is plain
