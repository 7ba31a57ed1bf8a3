"""GPUs as nvidia-smi knows them, and which of them CUDA will find."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

import msgspec


class Gpu(msgspec.Struct, frozen=True):
    """One GPU, as nvidia-smi sees it.

    Args:
        name: of the product.
        bytes: of its memory; None where nvidia-smi does not say, as of memory shared with the CPU, and of MIG.
        free: bytes that nobody uses; None likewise.
        capability: of its compute units, such as (9, 0); None likewise.
        driver: version.
        index: its number, as in CUDA_VISIBLE_DEVICES.
        uuid: its name there, such as "GPU-3f2a...".
    """

    name: str
    bytes: int | None
    free: int | None
    capability: tuple[int, int] | None
    driver: str
    index: int = 0
    uuid: str = ""


def gather_gpus() -> tuple[Gpu, ...]:
    """All that nvidia-smi knows, hidden ones too; none where there is no nvidia-smi."""
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
    """A GPU from a line of nvidia-smi: name, MiB of memory, MiB free, compute capability, driver, index, UUID.

    Numbers that it does not know are words in brackets, such as "[N/A]".
    """
    name, total, free, capability, driver, index, uuid = (part.strip() for part in line.split(","))
    major, _, minor = capability.partition(".")
    known = (int(major), int(minor or 0)) if major.isdecimal() else None
    return Gpu(name, _mebibytes(total), _mebibytes(free), known, driver, int(index), uuid)


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdecimal() else None


def visible_of(gpus: Sequence[Gpu], said: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA finds, in its order.

    Args:
        gpus: those that there are.
        said: CUDA_VISIBLE_DEVICES, None if it is not set: indices, or UUIDs as far as they tell one from another. What
            follows one that does not exist is not seen.
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
