"""Facts about a model's checkpoint that are known without starting an engine: its folder, its config.json, its size.

It needs neither torch nor vLLM, so it is checked first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from steercap.adapters.gpus import gather_gpus, gather_processes, named_holders, visible_of
from steercap.adapters.hardware import free_memory
from steercap.adapters.releases import built_for
from steercap.core.extras import extra
from steercap.errors import ModelNotLoaded, ModelTooLarge

#: Files by which vLLM recognises the folder of a model, in transformers' format or Mistral's own.
CONFIGS: Final = ("config.json", "params.json")

#: Memory of a worker's process besides weights and caches: libraries, and activations of a batch.
PROCESS_BYTES: Final = 2 << 30
#: Bytes of an element in dtypes that a model can be asked for.
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}
#: Bytes of an element of dtypes that vLLM converts to the model's, as headers of safetensors name them.
_CONVERTED: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_UTILIZATION: Final = 0.92
#: Arguments with which a checkpoint's size says nothing of the memory of a GPU here.
_CHANGING: Final = ("hf_overrides", "hf_config_path", "language_model_only", "offload_group_size")
_BACKENDS: Final = ("distributed_executor_backend", "data_parallel_backend")


class MemoryNeed(msgspec.Struct, frozen=True):
    """Memory that a model needs, in bytes, and the memory there is; None where it is unknown.

    Args:
        device: "cpu", for the machine's memory; or "cuda", for that of one GPU.
        weights: weights of the model on each device, in the dtype asked for.
        needed: the same with caches of a fixed size and the process itself.
        available: memory that is free now, on the fullest device.
    """

    device: str
    weights: int | None
    needed: int | None
    available: int | None


class Checkpoint(msgspec.Struct, frozen=True):
    """Facts about a checkpoint.

    Args:
        name: name as the user wrote it.
        folder: folder of the model, "" if it is not on this machine.
        architectures: architectures in its config.json.
        layers: number of decoder layers, 0 if unknown.
        width: number of elements of a row, 0 if unknown.
        dtype: dtype that its weights are stored in.
        bytes: bytes of its weights.
        context: number of tokens that its positions are made for, 0 if unknown.
        quantization: its `quantization_config`.
    """

    name: str
    folder: str = ""
    architectures: tuple[str, ...] = ()
    layers: int = 0
    width: int = 0
    dtype: str = ""
    bytes: int = 0
    context: int = 0
    quantization: Mapping[str, Any] = {}


def is_path(name: str) -> bool:
    """Check if a model's name can only be a path, since no name on a hub looks like it.

    Names on a hub are "name" or "owner/name"; vLLM also takes "owner/name/file.gguf" and URLs.
    """
    if "://" in name:
        return False
    return name.startswith(("/", ".", "~")) or (name.count("/") > 1 and not name.endswith(".gguf"))


def require_there(name: str) -> None:
    """Check that a model that can only be on this machine exists.

    Raises:
        ModelNotLoaded: a path that does not exist, or a folder without a model in it.
    """
    path = Path(name)
    if path.is_dir() and not any((path / config).is_file() for config in CONFIGS):
        raise ModelNotLoaded(f"the folder {path.absolute()} has no config.json; give the folder of a model")
    if not path.exists() and is_path(name):
        home = "; ~ is not expanded here: write the path in full" if name.startswith("~") else ""
        raise ModelNotLoaded(
            f"there is no model at {path.absolute()}{home}; give the folder of a model, or a name on the hub such as "
            "Qwen/Qwen3-0.6B"
        )


def require_reachable(name: str) -> None:
    """Check that a model is on this machine or its hub answers; this blocks, for at most 10 s once names are resolved.

    The hub's library tries six times, and vLLM calls it again and again, after a long import: their own error would
    come
    minutes later. Only a connection to the hub, or to the proxy before it, is checked; errors behind a proxy and other
    hubs are left to those libraries.

    Raises:
        ModelNotLoaded: it is not on this machine, and nothing answers, or HF_HUB_OFFLINE forbids to ask.
    """
    if "://" in name or Path(name).exists() or importlib.util.find_spec("huggingface_hub") is None:
        return
    with extra("cuda", "cpu"):
        from huggingface_hub import constants

    elsewhere = os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in {"1", "true"}
    if elsewhere or local_folder(name) is not None:
        return
    remedy = f"give the folder of a model, or fetch it where there is a connection: hf download {name}"
    if constants.HF_HUB_OFFLINE:
        in_parts = name.endswith(".gguf") or ":" in name  # a file of a repository, which vLLM looks up itself
        if not in_parts and not (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").exists():
            raise ModelNotLoaded(
                f"{name!r} is not on this machine: neither a folder nor in {constants.HF_HUB_CACHE}, and "
                f"HF_HUB_OFFLINE=1 forbids to fetch it; unset it, {remedy}"
            )
        return
    address, what = _first_hop(constants.ENDPOINT)
    if address is None:
        return
    try:
        socket.create_connection(address, timeout=10).close()
    except OSError as error:
        raise ModelNotLoaded(
            f"{name!r} is not on this machine, and {what} cannot be reached: {error}; {remedy}"
        ) from error


def _first_hop(endpoint: str) -> tuple[tuple[str, int] | None, str]:
    """Return the host and port that a request to the hub connects to first, None if unknown, and their description."""
    hub = urlsplit(endpoint)
    proxies = {} if urllib.request.proxy_bypass(hub.hostname or "") else urllib.request.getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    try:
        hop = urlsplit(proxy) if proxy else hub
        port = hop.port or {"http": 80, "https": 443}.get(hop.scheme)
    except ValueError:  # a port that is none
        return None, endpoint
    what = f"the proxy before {endpoint}, {hop.hostname}:{port}," if proxy else endpoint
    return (hop.hostname, port) if hop.hostname and port else None, what


def look_up(name: str, folder: Path | None = None) -> Checkpoint:
    """Return the facts about a model from its folder or the hub's cache; unknown ones are left empty.

    Args:
        name: name as the user wrote it.
        folder: folder of the model, if that is known already.
    """
    found = folder or local_folder(name)
    if found is None:
        return Checkpoint(name)
    try:
        config = json.loads((found / "config.json").read_text())
    except (OSError, ValueError):
        return Checkpoint(name, str(found))
    if not isinstance(config, dict):
        return Checkpoint(name, str(found))
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    return Checkpoint(
        name,
        str(found),
        tuple(config.get("architectures") or ()),
        _first(text, "num_hidden_layers", "n_layer"),
        _first(text, "hidden_size", "n_embd"),
        str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""),
        weights_of(found),
        _first(text, "max_position_embeddings", "n_positions"),
        quantization if isinstance(quantization := config.get("quantization_config"), dict) else {},
    )


def local_folder(name: str) -> Path | None:
    """Return the folder of a model on this machine, which may be in the hub's cache; None if there is none."""
    if Path(name).is_dir():
        return Path(name)
    if is_path(name) or importlib.util.find_spec("huggingface_hub") is None:
        return None
    with extra("cuda", "cpu"):
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def weights_of(folder: Path) -> int:
    """Return the bytes of a model's weights; vLLM reads .bin files only where there is no .safetensors."""
    files = _safetensors(folder) or list(folder.glob("*.bin"))
    return sum(path.stat().st_size for path in files)


def _safetensors(folder: Path) -> list[Path]:
    """Return the files that hold the weights; beside those of an index there may be the same in Mistral's format."""
    try:
        named = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        found = list(folder.glob("*.safetensors"))
        return [path for path in found if not path.name.startswith("consolidated")] or found
    return [path for name in sorted(named) if (path := folder / name).exists()]


def _first(config: dict[str, Any], *names: str) -> int:
    """Return the first of some settings that is set to an integer, 0 if none is."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)


def weights_in(checkpoint: Checkpoint, dtype: str) -> int:
    """Return the bytes of a checkpoint's weights when vLLM holds them in a dtype; quantised ones stay as they are.

    Args:
        checkpoint: a checkpoint on this machine.
        dtype: a name of `DTYPE_BYTES`; any other, such as "auto", leaves the stored dtype.
    """
    size = DTYPE_BYTES.get(dtype.removeprefix("torch."))
    if size is None or checkpoint.quantization:
        return checkpoint.bytes
    if not (files := _safetensors(Path(checkpoint.folder))):
        return checkpoint.bytes * size // DTYPE_BYTES.get(checkpoint.dtype, size)
    return sum(_converted(file, size) for file in files)


def _converted(file: Path, size: int) -> int:
    """Return the bytes of the tensors in a file of safetensors, those of floats with `size` bytes an element."""
    with file.open("rb") as content:
        header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
    tensors = [one for name, one in header.items() if name != "__metadata__"]
    held = [(one["data_offsets"][1] - one["data_offsets"][0], _CONVERTED.get(one["dtype"])) for one in tensors]
    return sum(stored if element is None else stored // element * size for stored, element in held)


def check_memory(name: str, arguments: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> MemoryNeed:
    """Compare the memory that a model needs with what is free, without starting an engine.

    Args:
        name: name or path of the model.
        arguments: arguments of vLLM's engine.
        environment: environment variables.

    Returns:
        The numbers; unknown ones are None: those of a model that is not on this machine, or that is quantised when it
        is loaded, and the memory of GPUs that nvidia-smi does not report.

    Raises:
        ModelTooLarge: it does not fit.
    """
    need = _need_of(name, arguments, environment)
    if need.needed is not None and need.available is not None and need.needed > need.available:
        raise _too_large(name, need.needed, need, arguments, environment)
    return need


def require_room(name: str, arguments: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a model whose weights and caches of a fixed size alone exceed what is free.

    A tenth of the weights is not counted, since vLLM may leave some out. Nothing is refused where overrides change the
    model, or where workers run on other machines.

    Args:
        name, arguments, environment: as for `check_memory`.

    Raises:
        ModelTooLarge: it cannot fit.
    """
    if any(arguments.get(one) for one in _CHANGING) or "ray" in {arguments.get(one) for one in _BACKENDS}:
        return
    need = _need_of(name, arguments, environment)
    if need.weights is not None and need.needed is not None and need.available is not None:
        least = need.needed - PROCESS_BYTES - need.weights // 10
        if least > need.available:
            raise _too_large(name, least, need, arguments, environment)


def _need_of(name: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> MemoryNeed:
    copies, tensor, pipeline = (_count(arguments, f"{how}_parallel_size") for how in ("data", "tensor", "pipeline"))
    parts = tensor * pipeline
    checkpoint, dtype = look_up(name), str(arguments.get("dtype") or "auto")
    unknown = not checkpoint.bytes or (arguments.get("quantization") and not checkpoint.quantization)
    # vLLM's "auto" serves what is stored as float32 in 16 bits.
    dtypes = ("auto", "bfloat16") if dtype == "auto" else (dtype,)
    total = None if unknown else min(weights_in(checkpoint, one) for one in dtypes)
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


def _too_large(
    name: str, needed: int, need: MemoryNeed, arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> ModelTooLarge:
    """Return the error of a model that needs more than is available; on GPUs with the processes that hold the rest."""
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
    """Return the memory that the fullest GPU of an engine leaves it, in bytes; None if unknown."""
    share = float(arguments.get("gpu_memory_utilization") or _UTILIZATION)
    lent = int(float(arguments.get("cpu_offload_gb") or 0) * (1 << 30))
    gpus = visible_of(gather_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))[:workers]
    known = [min(gpu.free, int(gpu.bytes * share)) + lent for gpu in gpus if gpu.free is not None and gpu.bytes]
    return min(known, default=None)
