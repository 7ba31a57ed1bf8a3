"""GPUs as nvidia-smi reports them, the ones visible to CUDA, and the processes that use GPU memory."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

import msgspec

#: Timeout of a call of nvidia-smi, in seconds; without its persistence daemon it takes a few.
SMI_SECONDS = 30.0


class Gpu(msgspec.Struct, frozen=True):
    """GPU as nvidia-smi reports it.

    Args:
        name: product name.
        bytes: total memory in bytes; None if nvidia-smi does not report it, as where the CPU shares it, and for MIG.
        free: free memory in bytes, or None.
        capability: compute capability, such as (9, 0), or None.
        driver: version of NVIDIA's driver.
        index: nvidia-smi's index, as used in CUDA_VISIBLE_DEVICES.
        uuid: UUID, such as "GPU-3f2a...".
    """

    name: str
    bytes: int | None
    free: int | None
    capability: tuple[int, int] | None
    driver: str
    index: int = 0
    uuid: str = ""


class GpuProcess(msgspec.Struct, frozen=True):
    """Process that uses memory of a GPU, as nvidia-smi reports it.

    Args:
        uuid: UUID of the GPU.
        pid: process id in the host's namespace, which may differ inside a container.
        name: program name, or a bracketed text such as "[Not Found]" where nvidia-smi has none.
        bytes: GPU memory of the process in bytes; None if nvidia-smi does not report it.
    """

    uuid: str
    pid: int
    name: str
    bytes: int | None

    def __str__(self) -> str:
        held = "an unknown part" if self.bytes is None else f"{self.bytes / 1e9:.1f} GB"
        return f"process {self.pid} ({self.name}) holds {held}"


def gather_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs that nvidia-smi reports, also ones hidden by CUDA_VISIBLE_DEVICES; () without nvidia-smi."""
    asked = "name,memory.total,memory.free,compute_cap,driver_version,index,uuid"
    return tuple(gpu_of(line) for line in _query_lines(f"--query-gpu={asked}") if line.count(",") == asked.count(","))


def gather_processes() -> tuple[GpuProcess, ...]:
    """Return the processes that nvidia-smi lists as using GPU memory, by memory descending; () without nvidia-smi."""
    lines = _query_lines("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory")
    found = filter(None, map(process_of, lines))
    return tuple(sorted(found, key=lambda one: -(one.bytes or 0)))


def _query_lines(query: str) -> list[str]:
    """Return the lines of nvidia-smi's CSV output for a query option; [] if it is absent, fails or times out."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    asked = [command, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=SMI_SECONDS)  # noqa: S603
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.splitlines() if not done.returncode else []


def process_of(line: str) -> GpuProcess | None:
    """Parse a CSV line of nvidia-smi: GPU's UUID, process id, name, MiB used; None if the line has another format.

    The name may hold commas; unknown numbers are words in brackets, such as "[N/A]".
    """
    parts = [part.strip() for part in line.split(",")]
    if len(parts) < 4 or not parts[1].isdecimal():
        return None
    return GpuProcess(parts[0], int(parts[1]), ", ".join(parts[2:-1]), _mebibytes(parts[-1]))


def named_holders(gpus: Sequence[Gpu], processes: Sequence[GpuProcess]) -> str:
    """Describe the processes that use memory of `gpus`: "process 7 (python) holds 2.0 GB of GPU 0, ..."; "" if none."""
    numbers = {gpu.uuid: gpu.index for gpu in gpus}
    return ", ".join(f"{one} of GPU {numbers[one.uuid]}" for one in processes if one.uuid in numbers)


def gpu_of(line: str) -> Gpu:
    """Parse a CSV line of nvidia-smi: name, MiB total, MiB free, compute capability, driver, index, UUID.

    Unknown numbers are words in brackets, such as "[N/A]".
    """
    name, total, free, capability, driver, index, uuid = (part.strip() for part in line.split(","))
    major, _, minor = capability.partition(".")
    known = (int(major), int(minor or 0)) if major.isdecimal() else None
    return Gpu(name, _mebibytes(total), _mebibytes(free), known, driver, int(index), uuid)


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdecimal() else None


def visible_of(gpus: Sequence[Gpu], devices: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs visible to CUDA, in CUDA's order.

    Args:
        gpus: all GPUs of the machine.
        devices: value of CUDA_VISIBLE_DEVICES, None if it is not set: indices, or unambiguous prefixes of UUIDs.
            As in CUDA, entries after an unknown one are ignored.
    """
    if devices is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for entry in map(str.strip, devices.split(",")):
        if entry.startswith("MIG-"):
            found.append(Gpu(f"slice {entry}", None, None, None, gpus[0].driver if gpus else "", uuid=entry))
            continue
        named = entry.startswith("GPU-")
        match = [gpu for gpu in gpus if (gpu.uuid.startswith(entry) if named else str(gpu.index) == entry)]
        if len(match) != 1:
            break
        found += match
    return tuple(found)
