"""CPU cores, memory, NUMA nodes and vLLM kernels of this machine, for `steercap doctor`, an engine's start, and tests.

It relies on this: vLLM's platform for CPU loads one of several libraries by the processor's instruction sets, whose
kernels are `torch.ops._C`; and `VLLM_CPU_OMP_THREADS_BIND`, unset or "auto", gives each worker a NUMA node. It imports
nothing heavy until a function needs it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steercap.errors import InvalidSetting, ModelNotLoaded

#: Variable of vLLM that binds workers' threads to cores.
BIND: Final = "VLLM_CPU_OMP_THREADS_BIND"
#: vLLM's library for x86 processors without AVX-512.
AVX2: Final = "_C_AVX2"
#: Name in `torch.ops` of the kernels of the loaded library.
_KERNELS: Final = "_C"
#: Pattern of torch's error message for a kernel that the loaded library lacks.
_NO_KERNEL: Final = re.compile(r"'_OpNamespace' '_C' object has no attribute '(\w+)'")


@dataclass(frozen=True)
class Need:
    """Kernel of vLLM that some models require, with the processors that support it.

    Args:
        kernel: name of the kernel in `torch.ops._C`.
        who: subject and verb for an error message, such as "DeepSeek-V4's attention needs".
        processor: description of the processors for which vLLM has the kernel; "" for none.
        applies: predicate on a model's architecture names and `quantization_config`: True if the model needs the
            kernel.
    """

    kernel: str
    who: str
    processor: str
    applies: Callable[[Sequence[str], Mapping[str, Any]], bool]


def _in_4_bits(_architectures: Sequence[str], quantization: Mapping[str, Any]) -> bool:
    bits = quantization.get("bits", quantization.get("w_bit"))
    some_plain = quantization.get("modules_to_not_convert") or quantization.get("dynamic")
    return quantization.get("quant_method") in {"gptq", "awq"} and bits == 4 and not some_plain


#: Architectures whose state-space layers are of Mamba's first generation.
_SCANNING: Final = frozenset({"FalconMambaForCausalLM", "JambaForCausalLM", "MambaForCausalLM"})
#: Kernels that some of vLLM's CPU libraries lack without a substitute.
NEEDS: Final = (
    Need(
        "flash_mla_with_kvcache_cpu",
        "DeepSeek-V4's attention needs",
        "processors with AVX-512 and BF16",
        lambda architectures, _quantization: "DeepseekV4ForCausalLM" in architectures,
    ),
    Need(
        "selective_scan_fwd",
        "Mamba's layers of the first generation need",
        "",
        lambda architectures, _quantization: not _SCANNING.isdisjoint(architectures),
    ),
    Need("cpu_gemm_wna16", "GPTQ's and AWQ's weights of 4 bits need", "processors with AVX-512", _in_4_bits),
)


def cores() -> tuple[int, ...]:
    """Return the ids of the logical CPU cores that this process may run on, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def numa_nodes() -> tuple[int, ...]:
    """Return the ids of the NUMA nodes whose memory this process may use, within `CPU_VISIBLE_MEMORY_NODES` if set."""
    status = Path("/proc/self/status").read_text()
    (allowed,) = re.findall(r"^Mems_allowed_list:\s*(\S*)", status, re.MULTILINE) or [""]
    nodes = _numbers(allowed)
    named = os.environ.get("CPU_VISIBLE_MEMORY_NODES")
    return tuple(node for node in nodes if node in _numbers(named)) if named else nodes


def _numbers(ranges: str) -> tuple[int, ...]:
    """Parse ranges of integers written as "0-2,5" to (0, 1, 2, 5)."""
    found = (part.partition("-") for part in ranges.split(",") if part)
    return tuple(number for first, _, last in found for number in range(int(first), int(last or first) + 1))


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free bytes of the machine's memory or of the container's limit, whichever is less.

    Page cache of the container counts as free, since the kernel drops it when memory is short.
    """
    free = _counts(meminfo)["MemAvailable"] << 10
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        stat = cgroup / "memory.stat"
        counts = _counts(stat) if stat.exists() else {}
        cached = counts.get("inactive_file", 0) + counts.get("active_file", 0)
        free = min(free, int(most) - int(used.read_text()) + cached)
    return free


def _counts(path: Path) -> dict[str, int]:
    """Read the integer of each name from a kernel file with one "name value" pair per line."""
    lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}


def cores_each(workers: int, allowed: Sequence[int], topology: Path = Path("/sys/devices/system/cpu")) -> str:
    """Return a value of `BIND` that gives each worker equally many cores of its own: "0,1|2,3" for two workers.

    As in vLLM, each physical core contributes one logical core, and one core per worker is left to other processes
    where a worker has more than one.

    Args:
        workers: number of workers.
        allowed: ids of the logical cores to distribute, at least `workers`.
        topology: sysfs folder that says which logical cores share a physical core.
    """
    physical = dict[str, int]()
    for core in allowed:
        siblings = topology / f"cpu{core}" / "topology" / "thread_siblings_list"
        physical[siblings.read_text().strip() if siblings.exists() else str(core)] = core
    usable = sorted(physical.values()) if len(physical) >= workers else sorted(allowed)
    each = len(usable) // workers
    taken = each - 1 if each > 1 else each
    return "|".join(",".join(map(str, usable[rank * each : rank * each + taken])) for rank in range(workers))


def cpu_binding(config: Any) -> dict[str, str]:
    """Return environment variables that give each worker of an engine CPU cores of its own.

    Args:
        config: vLLM's configuration of the engine.

    Returns:
        VLLM_CPU_OMP_THREADS_BIND (`BIND`) with the cores of each worker, such as "0|1", if more workers run here than
        there are NUMA nodes and the user has not set it; else {}.

    Raises:
        InvalidSetting: there are fewer cores than workers, or `BIND` is "auto" with fewer NUMA nodes than workers.
    """
    parallel = config.parallel_config
    part = parallel.local_world_size
    workers = part * parallel.data_parallel_size_local
    simulated = os.environ.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0"
    if config.device_config.device_type != "cpu" or parallel.use_ray or simulated or workers == 1:
        return {}
    nodes, allowed, said = numa_nodes(), cores(), os.environ.get(BIND)
    if workers <= len(nodes) or said not in {None, "auto"}:
        return {}
    if said is None and len(allowed) >= workers:
        return {BIND: cores_each(workers, allowed)}
    if part <= len(nodes):  # vLLM has the engines share the nodes
        return {}
    works = cores_each(workers, allowed) if len(allowed) >= workers else "nobind"
    raise InvalidSetting(
        f"{BIND} is {'not set' if said is None else repr(said)}: vLLM then gives each of {workers} workers a NUMA "
        f"node, and this process may use {len(nodes)} of them, and {len(allowed)} cores; set {BIND}={works!r}, or "
        "lower tensor_parallel_size or pipeline_parallel_size"
    )


def attention_for(config: Any) -> dict[str, str]:
    """Return engine arguments that select latent attention kernels able to run in the model's dtype.

    On a processor with AMX vLLM selects the bfloat16 kernels for any dtype, and the worker crashes on the weights. Can
    go when vLLM checks the dtype.

    Returns:
        {"attention_backend": "CPU_MLA"} where vLLM would choose wrongly and the user has not chosen; else {}.
    """
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model = config.model_config
    latent = config.device_config.device_type == "cpu" and model.use_mla and model.dtype != torch.bfloat16
    if not latent or "AMX_MLA" not in AttentionBackendEnum.__members__:
        return {}
    refused = torch.cpu._is_amx_tile_supported()  # noqa: SLF001 -- torch has no public name for it
    chosen = config.attention_config.backend is not None or "DeepseekV4ForCausalLM" in model.architectures
    return {"attention_backend": "CPU_MLA"} if refused and not chosen else {}


def library() -> str:
    """Return the name of vLLM's kernel library for this CPU, such as "_C_AVX2"; "" if vLLM runs on GPUs.

    Loads the library if necessary; vLLM must be installed.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ""
    current_platform.import_kernels()
    found = re.search(r"/vllm/(_C(?:_\w+)?)\.", Path("/proc/self/maps").read_text())
    return found[1] if found else ""


def unfit(architectures: Sequence[str], quantization: Mapping[str, Any]) -> str:
    """Return the reason why vLLM cannot run a model with these architecture names on this CPU; "" if it can."""
    needs = [need for need in NEEDS if need.applies(architectures, quantization)]
    return next(filter(None, (kernel_error(need.kernel) for need in needs)), "")


def kernel_error(kernel: str) -> str:
    """Return an error message if vLLM's library for this CPU lacks a kernel; else, and if vLLM runs on GPUs, ""."""
    import torch

    loaded = library()
    return "" if not loaded or hasattr(getattr(torch.ops, _KERNELS), kernel) else _lacking_message(kernel, loaded)


def _lacking_message(kernel: str, loaded: str) -> str:
    need = next((need for need in NEEDS if need.kernel == kernel), None)
    what = f", which {need.who}" if need else ""
    places = [need.processor if need else "a newer processor, perhaps", "a GPU"]
    where = ", or on ".join(filter(None, places))
    return f"vLLM's library for this processor, {loaded}, has no kernel {kernel!r}{what}; run it on {where}"


def missing_kernel(says: str) -> str:
    """Return an explanation of torch's error message `says` about an absent vLLM kernel; "" for any other message."""
    found = _NO_KERNEL.search(says)
    return _lacking_message(found[1], library()) if found else ""


def check_kernels(config: Any) -> None:
    """Check that vLLM has the kernels on this CPU that a `VllmConfig`'s model needs; no check on GPUs.

    Raises:
        ModelNotLoaded: a kernel is absent.
    """
    model = config.model_config
    quantization = getattr(model.hf_config, "quantization_config", None)
    if config.device_config.device_type != "cpu":
        return
    if reason := unfit(model.architectures, quantization if isinstance(quantization, Mapping) else {}):
        raise ModelNotLoaded(f"vLLM cannot run {model.model!r} here: {reason}")
