"""Cores, NUMA nodes and kernels of this machine: what is said of them, and what an engine is told or refused for them."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.quantised import KINDS, quantised_checkpoint
from support.streams import streams_checkpoint
from vllm.platforms import current_platform

from steercap import SteerModel, errors
from steercap.adapters import hardware, process_exit
from steercap.adapters.gpus import Gpu, GpuProcess
from steercap.adapters.hardware import BIND, NEEDS
from steercap.adapters.process_exit import STARTUP_ERROR, recorded_error, startup_error
from steercap.engine.checkpoint import look_up
from steercap.errors import InvalidSetting, ModelNotLoaded

on_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM is built for GPUs here")


@on_cpu
def test_the_library_is_the_one_of_the_processors_instructions() -> None:
    """AVX-512 or not is torch's answer, and vLLM has two libraries for those that have it."""
    found = hardware.library()
    assert (found == hardware.AVX2) == (not torch.cpu._is_avx512_supported())
    assert found in {hardware.AVX2, "_C_AVX512", "_C"}
    assert not hardware.kernel_error("cpu_attention_with_kv_cache"), "which every model needs"
    assert f"{found}, has no kernel 'no_such_kernel'" in hardware.kernel_error("no_such_kernel")


@on_cpu
def test_a_model_is_unfit_where_its_kernel_is_missing() -> None:
    """And nowhere else: of each need, models that have it and models that nearly do."""
    fit = [need.kernel for need in NEEDS if not hardware.kernel_error(need.kernel)]
    four = {"bits": 4}
    for kernel, architecture, quantization, needed in [
        ("flash_mla_with_kvcache_cpu", "DeepseekV4ForCausalLM", {}, True),
        ("flash_mla_with_kvcache_cpu", "DeepseekV3ForCausalLM", {}, False),
        ("selective_scan_fwd", "JambaForCausalLM", {}, True),
        ("selective_scan_fwd", "Mamba2ForCausalLM", {}, False),
        ("cpu_gemm_wna16", "Qwen3ForCausalLM", {"quant_method": "gptq", **four}, True),
        ("cpu_gemm_wna16", "Qwen3ForCausalLM", {"quant_method": "awq", **four}, True),
        ("cpu_gemm_wna16", "Qwen3ForCausalLM", {"quant_method": "awq", "w_bit": 4}, True),
        ("cpu_gemm_wna16", "Qwen3ForCausalLM", {"quant_method": "gptq", "bits": 8}, False),
        ("cpu_gemm_wna16", "Qwen3ForCausalLM", {"quant_method": "bitsandbytes", **four}, False),
        ("cpu_gemm_wna16", "Qwen3ForCausalLM", {"quant_method": "awq", **four, "modules_to_not_convert": ["q"]}, False),
        ("cpu_gemm_wna16", "Qwen3ForCausalLM", {}, False),
    ]:
        says = hardware.unfit([architecture], quantization)
        assert bool(says) == (needed and kernel not in fit), (architecture, quantization, says)
        assert not says or kernel in says


@on_cpu
@pytest.mark.parametrize("kind", ["deepseek_v4", "gptq", "awq"])
async def test_a_model_without_its_kernel_is_refused_before_an_engine_starts(kind, monkeypatch) -> None:
    """With the reason, where vLLM's engine would die of an AttributeError; doctor says the same of its config.json."""
    folder = streams_checkpoint() if kind == "deepseek_v4" else quantised_checkpoint(kind)
    checkpoint = look_up(str(folder))
    reason = hardware.unfit(checkpoint.architectures, checkpoint.quantization)
    if not reason:  # the same where vLLM has them, of one that it has not
        need = hardware.Need("no_such_kernel", "this model", "other processors", lambda *_: True)
        monkeypatch.setattr(hardware, "NEEDS", (need,))
        reason = hardware.unfit((), {})
    model = SteerModel(str(folder), enforce_eager=True, max_model_len=256)
    with pytest.raises(ModelNotLoaded, match="has no kernel") as refused:
        await model.start()
    assert str(refused.value).endswith(reason)
    assert "AttributeError" not in str(refused.value)


def test_every_kind_that_is_tested_says_the_same() -> None:
    """A quantised checkpoint of the tests is left out for a kernel that its model is refused for."""
    for name, kind in KINDS.items():
        assert kind.cpu == "AVX-512" or not any(need.applies((), kind.config) for need in NEEDS), name


def test_an_engine_that_died_of_a_missing_kernel_says_so(tmp_path, monkeypatch) -> None:
    """Of a model that no table knows; other errors are given as they were."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    with pytest.raises(AttributeError), recorded_error():
        torch.ops._C.no_such_kernel  # noqa: B018
    found = startup_error(tmp_path, "the engine did not start")
    assert isinstance(found, ModelNotLoaded)
    if current_platform.is_cpu():
        assert "has no kernel 'no_such_kernel'" in str(found)
        assert "OpNamespace" not in str(found)
    (tmp_path / STARTUP_ERROR).write_text(json.dumps(["AttributeError", "'X' object has no attribute 'y'"]))
    says = "the engine did not start: AttributeError: 'X' object has no attribute 'y'"
    assert str(startup_error(tmp_path, "the engine did not start")) == says
    (tmp_path / STARTUP_ERROR).write_text(json.dumps(["UnsupportedModel", "says"]))
    assert isinstance(startup_error(tmp_path, ""), errors.UnsupportedModel)


def test_an_engine_without_memory_names_who_holds_it(tmp_path, monkeypatch) -> None:
    """vLLM's own words, and the processes behind them; of another error nobody is asked."""
    gpus = (Gpu("H200", 1 << 40, 1, None, "", 0, "GPU-0"),)
    monkeypatch.setattr(process_exit, "gather_gpus", lambda: gpus)
    monkeypatch.setattr(process_exit, "gather_processes", lambda: (GpuProcess("GPU-0", 77, "python", 129 * 10**9),))
    says = "Free memory on device cuda:0 (5.2/139.8 GiB) on startup is less than desired GPU memory utilization"
    for error, more in ((says, "; process 77 (python) holds 129.0 GB of GPU 0"), ("no such file", "")):
        (tmp_path / STARTUP_ERROR).write_text(json.dumps(["ValueError", error]))
        assert str(startup_error(tmp_path, "no start")) == f"no start: ValueError: {error}{more}"


def topology(folder: Path, siblings: list[list[int]]) -> Path:
    """A folder as the kernel's, for processors whose physical cores are these logical ones."""
    for group in siblings:
        for core in group:
            (folder / f"cpu{core}" / "topology").mkdir(parents=True)
            (folder / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(",".join(map(str, group)) + "\n")
    return folder


def test_each_worker_gets_cores_of_its_own(tmp_path) -> None:
    """On processors of any layout, and however many of their cores are allowed: equal, disjoint, no two of one physical
    core while there are enough, and one in hand for each worker while each has one.
    """
    draw = random.Random(7)
    for number in range(200):
        physical, threads = draw.randint(1, 12), draw.choice([1, 2])
        siblings = [[core + thread * physical for thread in range(threads)] for core in range(physical)]
        allowed = sorted(draw.sample(range(physical * threads), draw.randint(1, physical * threads)))
        workers = draw.randint(1, len(allowed))
        found = hardware.cores_each(workers, allowed, topology(tmp_path / str(number), siblings))
        each = [[int(core) for core in one.split(",")] for one in found.split("|")]
        assert len(each) == workers
        assert len({len(one) for one in each}) == 1
        taken = [core for one in each for core in one]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(allowed)
        there = len({core % physical for core in allowed})
        if there >= workers:
            assert len({core % physical for core in taken}) == len(taken)
            assert len(taken) == workers * max(there // workers - 1, 1)


@pytest.mark.parametrize(
    ("changes", "amx", "expected"),
    [
        ({}, True, {"attention_backend": "CPU_MLA"}),
        ({"dtype": torch.float16}, True, {"attention_backend": "CPU_MLA"}),
        ({}, False, {}),
        ({"dtype": torch.bfloat16}, True, {}),
        ({"use_mla": False}, True, {}),
        ({"device": "cuda"}, True, {}),
        ({"backend": "AMX_MLA"}, True, {}),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, True, {}),
    ],
)
def test_latent_attention_runs_in_the_models_dtype(changes, amx, expected, monkeypatch) -> None:
    """On a processor with AMX, for which vLLM's own choice takes bfloat16 alone. `test_experts` runs it."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    given = {"dtype": torch.float32, "use_mla": True, "architectures": ["DeepseekV3ForCausalLM"], **changes}
    config = SimpleNamespace(
        model_config=SimpleNamespace(**given),
        device_config=SimpleNamespace(device_type=changes.get("device", "cpu")),
        attention_config=SimpleNamespace(backend=changes.get("backend")),
    )
    assert hardware.attention_for(config) == expected


def test_cores_and_nodes_are_those_that_this_process_may_use(monkeypatch) -> None:
    """The kernel's own list of cores, and nodes within what vLLM's variable leaves."""
    assert set(hardware.cores()) == os.sched_getaffinity(0)
    nodes = hardware.numa_nodes()
    assert all(Path(f"/sys/devices/system/node/node{node}").exists() for node in nodes) or len(nodes) == 1
    monkeypatch.setenv("CPU_VISIBLE_MEMORY_NODES", f"{nodes[0]},99")
    assert hardware.numa_nodes() == nodes[:1]
    monkeypatch.setenv("CPU_VISIBLE_MEMORY_NODES", "98-99")
    assert hardware.numa_nodes() == ()
    assert hardware._numbers("0-2,5") == (0, 1, 2, 5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, 1, (0, 1), (0,), None), {}),
        ((2, 1, (0, 1), (0,), None), {BIND: "0|1"}),
        ((2, 1, (3, 5), (0,), None), {BIND: "3|5"}),
        ((1, 2, (0, 1), (0,), None), {BIND: "0|1"}),
        ((2, 2, (4, 5, 6, 7), (0,), None), {BIND: "4|5|6|7"}),
        ((2, 1, (0, 1), (0, 1), None), {}),
        ((2, 1, (0, 1), (0,), "nobind"), {}),
        ((2, 1, (0, 1), (0,), "1|0"), {}),
        ((1, 2, (0,), (0,), None), {}),
        ((1, 2, (0, 1), (0,), "auto"), {}),
        ((2, 1, (0,), (0,), None), "'nobind'"),
        ((2, 1, (0, 1), (0,), "auto"), "'0|1'"),
        ((2, 2, (0, 1), (0,), None), "'nobind'"),
    ],
)
def test_workers_get_cores_where_there_are_too_few_nodes(given, expected, monkeypatch) -> None:
    """Unless the user has said who gets which; too few cores are an error that names the variable and what works.

    Given are the workers of an engine, engines, cores, NUMA nodes, and what the user has set.
    """
    part, copies, cores, nodes, said = given
    monkeypatch.setattr(hardware, "cores", lambda: cores)
    monkeypatch.setattr(hardware, "numa_nodes", lambda: nodes)
    monkeypatch.delenv("VLLM_CPU_SIM_MULTI_NUMA", raising=False)
    monkeypatch.delenv(BIND, raising=False)
    if said is not None:
        monkeypatch.setenv(BIND, said)

    def config(**changes: Any) -> Any:
        parallel = {"local_world_size": part, "data_parallel_size_local": copies, "use_ray": False, **changes}
        return SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel), device_config=SimpleNamespace(device_type="cpu")
        )

    if isinstance(expected, str):
        with pytest.raises(InvalidSetting, match=BIND) as refused:
            hardware.cpu_binding(config())
        assert f"set {BIND}={expected}" in str(refused.value)
    else:
        assert hardware.cpu_binding(config()) == expected
    assert hardware.cpu_binding(config(use_ray=True)) == {}
    on_gpu = config()
    on_gpu.device_config.device_type = "cuda"
    assert hardware.cpu_binding(on_gpu) == {}
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")
    assert hardware.cpu_binding(config()) == {}
