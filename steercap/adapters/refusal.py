"""Why a process of vLLM's gave up at start, left where the client finds it: vLLM tells the client only that it did.

The place is the folder of the engine's start, which all of its processes know, see `adapters.reaper`. What ended first
is kept: what ends after it ends because of it. It imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from steercap import errors
from steercap.adapters.hardware import missing_kernel

#: vLLM's own variable, which says where the folder is.
FOLDER: Final = "VLLM_RPC_BASE_PATH"
#: The file with the word.
NAME: Final = "refusal.json"


@contextlib.contextmanager
def left_behind() -> Iterator[None]:
    """Leave word of an error that ends what runs within."""
    try:
        yield
    except Exception as raised:
        error = _within(raised)
        with contextlib.suppress(OSError), (Path(os.environ.get(FOLDER, os.devnull)) / NAME).open("x") as file:
            json.dump([type(error).__name__, str(error)], file)
        raise


def _within(error: Exception) -> Exception:
    """What a worker raised, where Ray has made a `RayTaskError(...)` of it; any other error as it is."""
    cause = getattr(error, "cause", None)
    return cause if type(error).__name__.startswith("RayTaskError") and isinstance(cause, Exception) else error


def refusal(folder: Path, start: str) -> errors.SteercapError | None:
    """What a start failed of: an error of steercap's as it was raised, or ModelNotLoaded with vLLM's; None if nobody
    left word.

    Args:
        folder: of the start.
        start: what did not come about, in words.
    """
    try:
        name, says = json.loads((folder / NAME).read_text())
    except (OSError, ValueError):
        return None
    ours = getattr(errors, name, None)
    if isinstance(ours, type) and issubclass(ours, errors.EngineFailure):
        return ours(says)
    return errors.ModelNotLoaded(f"{start}: {missing_kernel(says) or f'{name}: {says}'}")
