"""Environment of workers that Ray starts, on this machine and on others, beyond vLLM's own.

Ray starts them from a process of its own: they inherit neither the mark nor the settings of vLLM's log, and vLLM copies
the client's environment to them only after they have imported all of it. It relies on `ParallelConfig.use_ray` and
`ray_runtime_env`, which `RayExecutorV2` passes on to Ray, and on `VLLM_RPC_BASE_PATH`, which is read whenever a socket
is made. It can go when vLLM passes an environment on to workers before they begin.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from steercap.adapters.entry import CHOICES, STREAM
from steercap.adapters.reaper import MARK
from steercap.adapters.startup_error import FOLDER


def tell_workers(config: Any, marked: Mapping[str, str]) -> None:
    """Pass the engine's mark and the log settings to workers that Ray starts.

    The mark ends workers on this machine with their engine.

    Args:
        config: vLLM's configuration, changed in place; one whose executor is not Ray's is left alone.
        marked: environment of the engine's processes; see `Reaper.environment`.
    """
    parallel = config.parallel_config
    if not parallel.use_ray:
        return
    given = dict(parallel.ray_runtime_env or {})
    ours = {name: os.environ[name] for name in (*CHOICES, STREAM) if name in os.environ} | {MARK: marked[MARK]}
    parallel.ray_runtime_env = {**given, "env_vars": {**ours, **given.get("env_vars", {})}}


def find_folder() -> None:
    """Choose a folder for this worker's sockets if the engine's, which is on the client's machine, is missing here."""
    folder: Final = os.environ.get(FOLDER)
    if folder is not None and not Path(folder).is_dir():
        os.environ[FOLDER] = tempfile.gettempdir()
