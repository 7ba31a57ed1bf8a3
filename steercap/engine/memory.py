"""Memory that a model needs, compared with the free memory before an engine is started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap.adapters.gpus import gather_gpus, gather_processes, named_holders, visible_of
from steercap.adapters.hardware import free_memory
from steercap.adapters.releases import built_for
from steercap.engine.checkpoint import Checkpoint, look_up, weight_files
from steercap.errors import ModelTooLarge

#: Estimated bytes of a worker's process besides weights and caches: libraries, and activations of a batch.
PROCESS_BYTES: Final = 2 << 30
#: Bytes of an element, by name of a dtype that vLLM accepts as `dtype`.
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}
#: Bytes of an element of the stored dtypes that vLLM converts to the model's dtype, by their names in safetensors.
_CONVERTED: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_UTILIZATION: Final = 0.92
#: Engine arguments with which the memory needed on this machine does not follow from the checkpoint's size.
_CHANGING: Final = (
    "hf_overrides",
    "hf_config_path",
    "language_model_only",
    "limit_mm_per_prompt",
    "offload_group_size",
    "data_parallel_size_local",
    "nnodes",
)
_BACKENDS: Final = ("distributed_executor_backend", "data_parallel_backend")


class MemoryNeed(msgspec.Struct, frozen=True):
    """Memory that a model needs and memory that is free, in bytes; None where unknown.

    Args:
        device: "cpu": the numbers are of the whole machine; or "cuda": of one GPU.
        weights: weights of the model there, in the dtype asked for.
        needed: weights, caches of a fixed size and the process itself together.
        available: free memory, on the GPU with the least.
    """

    device: str
    weights: int | None
    needed: int | None
    available: int | None


def weights_in(checkpoint: Checkpoint, dtype: str) -> int:
    """Return the bytes of a checkpoint's weights when vLLM has loaded them in `dtype`; quantised ones keep their size.

    Args:
        checkpoint: a checkpoint on this machine.
        dtype: a key of `DTYPE_BYTES`; any other, such as "auto", keeps the stored dtype.

    Raises:
        ValueError, OSError: a file of weights cannot be read, such as a pointer of Git LFS.
    """
    size = DTYPE_BYTES.get(dtype.removeprefix("torch."))
    if size is None or checkpoint.quantization:
        return checkpoint.bytes
    if not (files := weight_files(Path(checkpoint.folder))):
        return checkpoint.bytes * size // DTYPE_BYTES.get(checkpoint.dtype, size)
    return sum(_converted(file, size) for file in files)


def _converted(file: Path, size: int) -> int:
    """Return the bytes of all tensors in a safetensors file, with floats of 16 to 64 bits counted at `size` bytes each.

    Raises:
        ValueError, OSError: the file cannot be read.
    """
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is not a safetensors file")
        header = content.read(length)
    try:
        tensors = [one for name, one in json.loads(header).items() if name != "__metadata__"]
        held = [(one["data_offsets"][1] - one["data_offsets"][0], _CONVERTED.get(one["dtype"])) for one in tensors]
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    return sum(stored if element is None else stored // element * size for stored, element in held)


def check_memory(name: str, arguments: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> MemoryNeed:
    """Compare the memory that a model needs with the free memory, without starting an engine.

    Args:
        name: name or path of the model.
        arguments: vLLM's engine arguments.
        environment: environment variables.

    Returns:
        The numbers. Unknown ones are None: the need of a model that is not on this machine, cannot be read, is
        quantised while it is loaded, or is changed or spread over machines by `arguments`; and the memory of GPUs
        that nvidia-smi does not report.

    Raises:
        ModelTooLarge: the model does not fit.
    """
    need = _need_or_unknown(name, arguments, environment)
    if need.needed is not None and need.available is not None and need.needed > need.available:
        raise _too_large(name, need.needed, need, arguments, environment)
    return need


def require_room(name: str, arguments: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a model whose weights and caches of a fixed size alone exceed the free memory.

    A quarter of the weights is not counted, since vLLM may skip some.

    Args:
        name, arguments, environment: as for `check_memory`.

    Raises:
        ModelTooLarge: the model cannot fit.
    """
    need = _need_or_unknown(name, arguments, environment)
    if need.weights is not None and need.needed is not None and need.available is not None:
        least = need.needed - PROCESS_BYTES - need.weights // 4
        if least > need.available:
            raise _too_large(name, least, need, arguments, environment)


def _need_or_unknown(name: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> MemoryNeed:
    """Return a model's `MemoryNeed`; all of its numbers are None where weights or arguments cannot be read."""
    try:
        return _need_of(name, arguments, environment)
    except (TypeError, ValueError, OSError):  # vLLM refuses it in words of its own
        return MemoryNeed(built_for(), None, None, None)


def _need_of(name: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> MemoryNeed:
    copies, tensor, pipeline = (_count(arguments, f"{how}_parallel_size") for how in ("data", "tensor", "pipeline"))
    parts, total = tensor * pipeline, _total_of(name, arguments)
    device, available = built_for(), None
    if device == "cpu":
        weights = None if total is None else total * copies
        space = int(arguments.get("kv_cache_memory_bytes") or int(environment.get("VLLM_CPU_KVCACHE_SPACE") or 0) << 30)
        caches, available = space * parts * copies, free_memory()
    else:
        shares = parts * (copies if arguments.get("enable_expert_parallel") else 1)
        weights = None if total is None else total // shares
        caches, available = 0, _least_free(arguments, environment, parts * copies)
    needed = None if weights is None else weights + caches + PROCESS_BYTES
    return MemoryNeed(device, weights, needed, available)


def _total_of(name: str, arguments: Mapping[str, Any]) -> int | None:
    """Return the bytes of all weights of a model, not divided among devices; None if unknown.

    Raises:
        ValueError, OSError: a file of weights cannot be read.
    """
    checkpoint, dtype = look_up(name), str(arguments.get("dtype") or "auto")
    changed = any(arguments.get(one) for one in _CHANGING) or "ray" in {arguments.get(one) for one in _BACKENDS}
    if changed or not checkpoint.bytes or (arguments.get("quantization") and not checkpoint.quantization):
        return None
    # vLLM's "auto" serves what is stored as float32 in 16 bits.
    dtypes = ("auto", "bfloat16") if dtype == "auto" else (dtype,)
    return min(weights_in(checkpoint, one) for one in dtypes)


def _too_large(
    name: str, needed: int, need: MemoryNeed, arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> ModelTooLarge:
    """Return the error for a model that needs `needed` bytes; on GPUs it names the processes that use the rest."""
    where, held, free = "", "", need.available or 0
    if need.device != "cpu":
        gpus = visible_of(gather_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))
        named = named_holders(gpus, gather_processes())
        where, held = " on one of its GPUs", f"; {named}" if named else ""
    return ModelTooLarge(
        f"{name} needs {needed / 1e9:.1f} GB{where} in dtype {arguments.get('dtype') or 'auto'!r}, and "
        f"{free / 1e9:.1f} GB are free; use a smaller dtype or model, or more GPUs{held}"
    )


def _count(arguments: Mapping[str, Any], name: str) -> int:
    return int(arguments.get(name) or 1)


def _least_free(arguments: Mapping[str, Any], environment: Mapping[str, str], workers: int) -> int | None:
    """Return the bytes that vLLM may use on the fullest of the first `workers` GPUs; None if unknown."""
    share = float(arguments.get("gpu_memory_utilization") or _UTILIZATION)
    lent = int(float(arguments.get("cpu_offload_gb") or 0) * (1 << 30))
    gpus = visible_of(gather_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))[:workers]
    known = [min(gpu.free, int(gpu.bytes * share)) + lent for gpu in gpus if gpu.free is not None and gpu.bytes]
    return min(known, default=None)
