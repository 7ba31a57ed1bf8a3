"""Scripts without an engine: that each measures what it says, at a size that takes no time."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

import bench_beside
import bench_capture
import bench_fetch
import bench_fused
import bench_gpu
import bench_host
import bench_tap
import bench_training
import pytest
import torch
from gpu_rounds import Workload
from verification.checks import gpu_mib
from workers import CUDA, DEVICE, LateTransfers

from steercap.lab.training import HookedModel
from steercap.testing import tiny_checkpoint
from steercap.worker.taps.transfers import CudaTransfers


@pytest.mark.parametrize("mode", bench_tap.MODES)
def test_a_tap_is_timed_with_what_its_mode_does(mode) -> None:
    """Tables that are open for a pass: rows reach the arena where they are copied, and change where they are edited."""
    copies, specs, _ = bench_tap.MODES[mode]
    transfers: Any = CudaTransfers(DEVICE) if CUDA else LateTransfers()
    tokens, width = 3, 64
    taps = bench_tap.cuda_taps(width, tokens, transfers, device_ring_bytes=1 << 20)
    bench_tap.opened(taps, tokens, mode, DEVICE)
    hidden = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    residual = torch.ones_like(hidden)
    rows, arena = hidden.clone(), taps._rows.clone()
    taps.on_tap(hidden, residual, torch.tensor([5], dtype=torch.int32, device=DEVICE), 0)
    changed = (hidden != rows).any(dim=1)
    assert changed.all() if specs else not changed.any()
    assert torch.equal(taps._rows, arena) != copies


def test_a_tap_is_timed_in_one_kernel_with_a_norm() -> None:
    """The one that adds, edits and norms as PyTorch does."""
    transfers: Any = CudaTransfers(DEVICE) if CUDA else LateTransfers()
    layers = bench_fused.Layers(3, 64, 0, DEVICE)
    taps = bench_tap.cuda_taps(64, 3, transfers, device_ring_bytes=1 << 20)
    bench_tap.opened(taps, 3, "add", DEVICE)
    assert bench_fused.error_of(layers, taps) < 0.02


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


@pytest.mark.parametrize("script", [bench_beside, bench_fused, bench_gpu, bench_host])
def test_help_says_how_a_script_is_called(script, capsys) -> None:
    """Its docstring, and every option."""
    with pytest.raises(SystemExit, match=r"^0$"):
        script.arguments(["--help"])
    said = capsys.readouterr().out
    assert f"python scripts/{script.__name__}.py" in said
    assert "--help" in said


def test_words_that_mean_nothing_are_refused(capsys) -> None:
    """Before an engine is started."""
    for script, words, reason in (
        (bench_beside, "plain --one-request", "of steercap alone"),
        (bench_beside, "other", "invalid choice"),
        (bench_beside, "plain --workloads 3", "invalid"),
        (bench_host, "passes --modes idle,fast", "no mode 'fast'"),
        (bench_host, "passes --requests many", "invalid"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            script.arguments(words.split())
        assert reason in capsys.readouterr().err
    args = bench_beside.arguments(["interp-engine"])
    assert (args.shape, len(args.workloads), args.modes) == ("qwen3-4b", 4, [])


SCRIPTS = Path(bench_gpu.__file__).parent


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere, by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_a_script_finds_the_tests_support_without_pytest() -> None:
    """Whatever takes `support`, itself or through what lies beside it, imports `beside_tests`, which puts it on the path."""
    files = {".".join(path.relative_to(SCRIPTS).with_suffix("").parts): path for path in SCRIPTS.rglob("*.py")}
    reached = {name: imported(path) for name, path in files.items()}
    takers = {name for name, modules in reached.items() if any(one.split(".")[0] == "support" for one in modules)}
    while more := {name for name, modules in reached.items() if modules & takers} - takers:
        takers |= more
    scripts = {name for name in takers if "." not in name}
    assert {"verify_gpu", "soak"} <= scripts
    assert not {name for name in scripts if "beside_tests" not in reached[name]}


def test_gpu_memory_is_that_of_the_processes_that_are_ours(tmp_path, monkeypatch) -> None:
    """Another process comes and goes; where none of ours is listed, or not with its memory, it is that of all."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("""#!/bin/sh
case $1 in
--query-compute-apps*) printf 'GPU-1b, 7, python, 300\nGPU-1b, 8, [N/A], [N/A]\nGPU-1b, 9, VLLM, 40\n' ;;
*) echo 1000 ;;
esac
""")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [gpu_mib(ours) for ours in ({7}, {7, 9}, {8}, {10})] == [300, 340, 1000, 1000]


async def test_a_library_that_cannot_is_a_line_of_the_result() -> None:
    """Rows that are missing, and errors, are told of their mode and workload alone."""

    async def some(tokens: list[list[int]], generated: int) -> int:
        return len(tokens) * (len(tokens[0]) + generated - 1) * 3

    async def none(*_: Any) -> int:
        raise NotImplementedError("not here")

    calls = {"capture-all": some, "capture-one": some, "generate": none}
    found = [record async for record in bench_beside.measure(calls, [Workload(2, 5, 1)], 2, 1000, layers=3)]
    assert found[0]["rows"] == 30
    assert len(found[0]["all"]) == 3
    assert "30 rows, not 10" in found[1]["error"]
    assert "not here" in bench_beside.line_of(found[2])
