"""Files by which vLLM's processes tell the client how far a start is, and why it failed; vLLM itself does not.

They are in the folder of the engine's start, which all of its processes know, see `adapters.reaper`. Of errors only the
first is kept: later ones are consequences. It imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from steercap import errors
from steercap.adapters.gpus import gather_gpus, gather_processes, named_holders
from steercap.adapters.hardware import missing_kernel

#: Variable of vLLM's with the path of the folder.
FOLDER: Final = "VLLM_RPC_BASE_PATH"
#: Errors of vLLM and torch where a GPU has too little memory.
MEMORY: Final = re.compile(r"CUDA out of memory|Free memory on device")
#: Name of the file with the error.
NAME: Final = "refusal.json"
#: Names of the empty files of a worker that begins to read the weights, and of one that has them.
READING, READ = "reading", "read"


def mark(name: str) -> None:
    """Leave an empty file for the client; on another machine, where the folder is not, none."""
    with contextlib.suppress(OSError):
        (Path(os.environ.get(FOLDER, os.devnull)) / name).touch()


@contextlib.contextmanager
def left_behind() -> Iterator[None]:
    """Write an error that ends the block to the file, and raise it."""
    try:
        yield
    except Exception as raised:
        error = _within(raised)
        with contextlib.suppress(OSError), (Path(os.environ.get(FOLDER, os.devnull)) / NAME).open("x") as file:
            json.dump([type(error).__name__, str(error)], file)
        raise


def _within(error: Exception) -> Exception:
    """Return the original error in Ray's `RayTaskError(...)`; any other error as it is."""
    cause = getattr(error, "cause", None)
    return cause if type(error).__name__.startswith("RayTaskError") and isinstance(cause, Exception) else error


def refusal(folder: Path, start: str) -> errors.SteercapError | None:
    """Return the error that a start failed with: steercap's own as it was raised, or ModelNotLoaded with vLLM's.

    None if no process has written one.

    Args:
        folder: folder of the start.
        start: sentence that says what failed, for the message.
    """
    try:
        name, says = json.loads((folder / NAME).read_text())
    except (OSError, ValueError):
        return None
    ours = getattr(errors, name, None)
    if isinstance(ours, type) and issubclass(ours, errors.EngineFailure):
        return ours(says)
    held = named_holders(gather_gpus(), gather_processes()) if MEMORY.search(says) else ""
    return errors.ModelNotLoaded(f"{start}: {missing_kernel(says) or f'{name}: {says}'}{held and f'; {held}'}")
