"""GPUs as nvidia-smi reports them, and the ones that CUDA sees."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

import msgspec


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


def gather_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs that nvidia-smi reports, including hidden ones; none without nvidia-smi."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    asked = "name,memory.total,memory.free,compute_cap,driver_version,index,uuid"
    done = subprocess.run(  # noqa: S603
        [command, f"--query-gpu={asked}", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines() if not done.returncode else []
    return tuple(gpu_of(line) for line in lines if line.count(",") == asked.count(","))


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


def visible_of(gpus: Sequence[Gpu], said: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA sees, in its order.

    Args:
        gpus: all GPUs.
        said: value of CUDA_VISIBLE_DEVICES, None if it is not set: indices, or unambiguous prefixes of UUIDs. Entries
            after one that does not exist are ignored.
    """
    if said is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for entry in map(str.strip, said.split(",")):
        if entry.startswith("MIG-"):
            found.append(Gpu(f"slice {entry}", None, None, None, gpus[0].driver if gpus else "", uuid=entry))
            continue
        named = entry.startswith("GPU-")
        match = [gpu for gpu in gpus if (gpu.uuid.startswith(entry) if named else str(gpu.index) == entry)]
        if len(match) != 1:
            break
        found += match
    return tuple(found)
