"""GPUs as nvidia-smi reports them, those that CUDA sees, and the processes that hold their memory."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

import msgspec

#: Seconds that nvidia-smi may take; without its daemon it takes some.
SMI_SECONDS = 30.0


class Gpu(msgspec.Struct, frozen=True):
    """GPU as nvidia-smi reports it.

    Args:
        name: name of the product.
        bytes: total memory; None if nvidia-smi does not report it, as for memory shared with the CPU, and for MIG.
        free: free memory in bytes, or None.
        capability: compute capability, such as (9, 0), or None.
        driver: version of the driver.
        index: number of the GPU, as in CUDA_VISIBLE_DEVICES.
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
    """Process that holds memory of a GPU, as nvidia-smi reports it.

    Args:
        uuid: UUID of the GPU.
        pid: process id, of the host's namespace: a container may number it otherwise.
        name: name of the program, or words in brackets where nvidia-smi may not know it.
        bytes: memory that it holds; None if nvidia-smi does not report it.
    """

    uuid: str
    pid: int
    name: str
    bytes: int | None

    def __str__(self) -> str:
        held = "an unknown part" if self.bytes is None else f"{self.bytes / 1e9:.1f} GB"
        return f"process {self.pid} ({self.name}) holds {held}"


def gather_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs that nvidia-smi reports, including hidden ones; none without nvidia-smi."""
    asked = "name,memory.total,memory.free,compute_cap,driver_version,index,uuid"
    return tuple(gpu_of(line) for line in _query_lines(f"--query-gpu={asked}") if line.count(",") == asked.count(","))


def gather_processes() -> tuple[GpuProcess, ...]:
    """Return the processes that hold memory of GPUs, those with most memory first; none without nvidia-smi, and those
    alone that it sees: in a container there may be others.
    """
    lines = _query_lines("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory")
    found = filter(None, map(process_of, lines))
    return tuple(sorted(found, key=lambda one: -(one.bytes or 0)))


def _query_lines(query: str) -> list[str]:
    """Return the lines that nvidia-smi answers to a query; none without it, or where it fails or hangs."""
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
    """Parse a line of nvidia-smi: UUID of the GPU, process id, name, MiB held; None if it is no such line.

    The name may hold commas; unknown numbers are words in brackets, such as "[N/A]".
    """
    parts = [part.strip() for part in line.split(",")]
    if len(parts) < 4 or not parts[1].isdecimal():
        return None
    return GpuProcess(parts[0], int(parts[1]), ", ".join(parts[2:-1]), _mebibytes(parts[-1]))


def named_holders(gpus: Sequence[Gpu], processes: Sequence[GpuProcess]) -> str:
    """Name the processes that hold memory of some GPUs, in words; "" if none are known."""
    numbers = {gpu.uuid: gpu.index for gpu in gpus}
    return ", ".join(f"{one} of GPU {numbers[one.uuid]}" for one in processes if one.uuid in numbers)


def gpu_of(line: str) -> Gpu:
    """Parse a line of nvidia-smi: name, MiB of memory, MiB free, compute capability, driver, index, UUID.

    Unknown numbers are words in brackets, such as "[N/A]".
    """
    name, total, free, capability, driver, index, uuid = (part.strip() for part in line.split(","))
    major, _, minor = capability.partition(".")
    known = (int(major), int(minor or 0)) if major.isdecimal() else None
    return Gpu(name, _mebibytes(total), _mebibytes(free), known, driver, int(index), uuid)


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdecimal() else None


def visible_of(gpus: Sequence[Gpu], devices: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA sees, in its order.

    Args:
        gpus: all GPUs.
        devices: value of CUDA_VISIBLE_DEVICES, None if it is not set: indices, or unambiguous prefixes of UUIDs.
            Entries after one that does not exist are ignored.
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
