"""Entry functions of vLLM's processes, which reduce what the processes log, and the environment of Ray's workers.

A process that vLLM spawns unpickles its target function first, then the arguments, which import all of vLLM, and vLLM
logs at once. So steercap replaces the target by a `ProcessEntry`, and unpickling it configures the log. It relies on
this: `EngineCoreProc.run_engine_core`, `DPCoordinatorProc.run_coordinator` and `WorkerProc.worker_main` are each the
target of a `Process`. It imports nothing heavy.

An engine core whose Ray worker died is terminated here. vLLM's monitor of such workers notices within seconds, but the
core may be waiting for that worker's answer on a socket, and would wait for VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: 5
minutes, in which requests hang. It relies on this: the monitor sets `is_failed` before it calls
`RayExecutorV2.shutdown`. It can go when waiting for answers ends with the executor.

Ray starts workers from a process of its own: they inherit neither the engine's mark (`reaper`) nor the settings of
vLLM's log, and vLLM copies the client's environment to them only after they have imported all of it. It relies on
`ParallelConfig.use_ray` and `ray_runtime_env`, which `RayExecutorV2` passes on to Ray, and on `VLLM_RPC_BASE_PATH`,
which is read whenever a socket is made. It can go when vLLM passes an environment on to workers before they begin.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from steercap.adapters import torchvision
from steercap.adapters.process_exit import FOLDER, record_exit_codes, recorded_error
from steercap.adapters.reaper import MARK
from steercap.adapters.releases import require

#: Environment variables of vLLM's log; steercap leaves the log alone if the user has set one of `CHOICES`.
STREAM: Final = "VLLM_LOGGING_STREAM"
CHOICES: Final = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING")
#: Parts of warnings that no user can act on, by logger: Triton is missing where steercap does not need it; effects of
#: `enforce_eager=True`, which the user or a preset set; a cache of models that have none; libraries to preload; a limit
#: of open files below the maximum.
UNWANTED: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm.triton_utils.importing": ("Triton",),
    "vllm.platforms.cpu": ("Triton", "Reset SSM cache type to float32"),
    "vllm.config.vllm": (
        "Triton",
        "Enforce eager set, disabling",
        "Inductor compilation was disabled by user settings",
    ),
    "vllm.v1.worker.cpu_worker": ("is not found in LD_PRELOAD",),
    "vllm.utils.system_utils": ("Found ulimit",),
}
#: Environment variable: minimum level that torch's C++ code logs, such as its note on binding memory to a NUMA node.
CPP_LEVEL: Final = "TORCH_CPP_LOG_LEVEL"

ENGINE_CORE: Final = ("vllm.v1.engine.core", "EngineCoreProc", "run_engine_core")
COORDINATOR: Final = ("vllm.v1.engine.coordinator", "DPCoordinatorProc", "run_coordinator")
WORKER: Final = ("vllm.v1.executor.multiproc_executor", "WorkerProc", "worker_main")
EXECUTOR: Final = "MultiprocExecutor"


def wants_quiet() -> bool:
    """Check if the user has left all settings of vLLM's log unset; call it before `quieten` sets any."""
    return not any(name in os.environ for name in CHOICES)


def quieten(*, log: bool) -> None:
    """Send vLLM's log to stderr, filtered if steercap chooses the level; call in each process before vLLM's import.

    Args:
        log: True to log warnings and errors alone, without the warnings of `UNWANTED`; False to keep the user's level.
    """
    os.environ.setdefault(STREAM, "ext://sys.stderr")
    # vLLM inspects every attribute of torch.distributed, one of which is deprecated.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.reduce_op.*", category=FutureWarning)
    # In notebooks, libraries that vLLM imports want widgets that nobody needs.
    warnings.filterwarnings("ignore", message="IProgress not found", category=Warning)
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    if log:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if "VLLM_LOGGING_CONFIG_PATH" not in os.environ and os.environ.get("VLLM_CONFIGURE_LOGGING") != "0":
        # vLLM configures its log long after it has begun to write.
        with contextlib.suppress(ValueError):  # a level that vLLM will refuse
            logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
    if log:
        for name in UNWANTED:
            logger = logging.getLogger(name)
            if _is_wanted not in logger.filters:
                logger.addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    said = record.getMessage()
    return record.levelno > logging.WARNING or not any(part in said for part in UNWANTED[record.name])


class ProcessEntry:
    """Picklable replacement of the target function of a vLLM process, which configures the log and runs the function.

    Args:
        target: module, class and name of the target function.
        function: the target function itself, for forked processes; None to import it when called.
        log: see `quieten`.
    """

    def __init__(
        self, target: tuple[str, str, str], function: Callable[..., None] | None = None, *, log: bool = False
    ) -> None:
        self._target = target
        self._function = function
        self._log = log

    def __reduce__(self) -> tuple[Callable[..., ProcessEntry], tuple[tuple[str, str, str], bool]]:
        return _prepared, (self._target, self._log)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Hook vLLM's classes in this process, then run the target function; its error is recorded for the client."""
        module, owner, name = self._target
        function = self._function or getattr(getattr(import_module(module), owner), name)
        if self._target == ENGINE_CORE:
            torchvision.hook()  # its scheduler makes the model's processor of media
            for core in vars(import_module(module)).values():
                if isinstance(core, type) and "run_busy_loop" in vars(core):  # the client hears of the end before it
                    core.run_busy_loop = recorded_error()(core.run_busy_loop)  # type: ignore[attr-defined]
            module, owner, name = WORKER
            worker, executor = (getattr(import_module(module), one) for one in (owner, EXECUTOR))
            require(owner, worker)
            require(EXECUTOR, executor)
            record_exit_codes(executor)
            setattr(worker, name, ProcessEntry(WORKER, getattr(worker, name), log=self._log))
            # Its workers meet at a file, which they remove only if they end in order; this folder is removed in any
            # case.
            tempfile.tempdir = os.environ.get(FOLDER)
            if "vllm_config" in kwargs and kwargs["vllm_config"].parallel_config.use_ray:
                hook_executor()
        if self._target == WORKER:  # it only logs an error at its start, and ends with success
            worker = getattr(import_module(module), owner)
            worker.__init__ = recorded_error()(worker.__init__)
        if self._function is None:
            gc.freeze()  # all that is imported lives as long as the process: collections need not go through it
            gc.enable()
        with recorded_error():
            function(*args, **kwargs)


def _prepared(target: tuple[str, str, str], log: bool) -> ProcessEntry:
    quieten(log=log)
    if log or os.environ.get("VLLM_LOGGING_LEVEL", "").upper() in {"ERROR", "CRITICAL"}:
        os.environ.setdefault(CPP_LEVEL, "ERROR")  # before torch is imported, and in processes of the engine alone
    gc.disable()  # until the target function runs: collections are a fifth of the time that vLLM's import takes
    return ProcessEntry(target, log=log)


#: Seconds from a failed executor's shutdown until its engine core process is killed.
GRACE: Final = 2.0


def hook_executor() -> None:
    """Make this engine core end when a Ray worker dies: hook `RayExecutorV2.shutdown`; a second call does nothing."""
    with contextlib.suppress(ImportError):  # where Ray's workers answer through Ray, it notices
        from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

        from steercap.adapters.hooks import wrap

        wrap(RayExecutorV2, "shutdown", _shut_down)


def _shut_down(original: Callable[[], Any], executor: Any, *_args: Any, **_options: Any) -> Any:
    if getattr(executor, "is_failed", False):
        end = threading.Timer(GRACE, os.kill, (os.getpid(), signal.SIGKILL))
        end.daemon = True
        end.start()
    return original()


def tell_workers(config: Any, marked: Mapping[str, str]) -> None:
    """Pass the engine's mark and the log settings to workers that Ray starts.

    By the mark, `Reaper` ends workers on this machine together with their engine.

    Args:
        config: the `VllmConfig`, changed in place; left alone unless its executor is Ray's.
        marked: environment of the engine's processes; see `Reaper.environment`.
    """
    parallel = config.parallel_config
    if not parallel.use_ray:
        return
    given = dict(parallel.ray_runtime_env or {})
    ours = {name: os.environ[name] for name in (*CHOICES, STREAM) if name in os.environ} | {MARK: marked[MARK]}
    parallel.ray_runtime_env = {**given, "env_vars": {**ours, **given.get("env_vars", {})}}


def find_folder() -> None:
    """Set this worker's folder of sockets to the temporary folder, if the engine's folder is on another machine."""
    folder: Final = os.environ.get(FOLDER)
    if folder is not None and not Path(folder).is_dir():
        os.environ[FOLDER] = tempfile.gettempdir()
