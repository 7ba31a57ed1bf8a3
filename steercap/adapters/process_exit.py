"""Detection of an engine process that has ended, of its exit code, and of the error that ended the engine's start.

vLLM tells the client only that a process failed, so errors at start are written to a file in the folder of the engine's
start, which all of its processes know, see `adapters.reaper`. Only the first error is kept: later ones are
consequences. Empty files in the folder mark the start's progress. It imports nothing heavy.

A process on this machine is watched by a pidfd, which becomes readable when the process ends. Only its parent learns
the exit code: the client for engine cores, an engine core for its workers. An engine core writes the exit code to the
folder of the engine, see `recorded_error`. It relies on this: `MultiprocExecutor.shutdown` is called when a worker has
ended, with `is_failed` set, before others are waited for, and `workers` hold their processes as `proc`; of the client,
on `engine_manager.finished_procs`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
import signal
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

from steercap import errors
from steercap.adapters.gpus import gather_gpus, gather_processes, named_holders
from steercap.adapters.hardware import missing_kernel

#: vLLM's environment variable with the path of the folder of the engine's start.
FOLDER: Final = "VLLM_RPC_BASE_PATH"
#: Pattern of error messages of vLLM and torch for a GPU with too little memory.
MEMORY: Final = re.compile(r"CUDA out of memory|Free memory on device")
#: Name of the file with the type and message of the error that ended a start.
STARTUP_ERROR: Final = "refusal.json"
#: What an engine core raises whose worker has ended; the exit code of that one is written a moment later.
NO_WORKER: Final = "Executor failed."
#: Names of the empty files that a worker creates before it loads the weights, and when it has loaded them.
READING, READ = "reading", "read"


def mark(name: str) -> None:
    """Create an empty file in the engine's folder, which shows the client a start's progress; no-op elsewhere."""
    with contextlib.suppress(OSError):
        (Path(os.environ.get(FOLDER, os.devnull)) / name).touch()


@contextlib.contextmanager
def recorded_error() -> Iterator[None]:
    """Write an error raised in the block to `STARTUP_ERROR` in the engine's folder, and raise it again."""
    try:
        yield
    except Exception as raised:
        error = _within(raised)
        with contextlib.suppress(OSError), (Path(os.environ.get(FOLDER, os.devnull)) / STARTUP_ERROR).open("x") as file:
            json.dump([type(error).__name__, str(error)], file)
        raise


def _within(error: Exception) -> Exception:
    """Return the original exception in Ray's `RayTaskError(...)`; any other exception unchanged."""
    cause = getattr(error, "cause", None)
    return cause if type(error).__name__.startswith("RayTaskError") and isinstance(cause, Exception) else error


def startup_error(folder: Path, start: str) -> errors.SteercapError | None:
    """Return the error that a process of a failed start has recorded; None if there is none.

    An EngineFailure of steercap's keeps its type; any other error becomes a ModelNotLoaded with its message.

    Args:
        folder: folder of the engine's start.
        start: beginning of the message, such as "vLLM's engine for 'x' did not start".
    """
    try:
        name, says = json.loads((folder / STARTUP_ERROR).read_text())
    except (OSError, ValueError):
        return None
    ours = getattr(errors, name, None)
    if isinstance(ours, type) and issubclass(ours, errors.EngineFailure):
        return ours(says)
    held = named_holders(gather_gpus(), gather_processes()) if MEMORY.search(says) else ""
    return errors.ModelNotLoaded(f"{start}: {missing_kernel(says) or f'{name}: {says}'}{held and f'; {held}'}")


#: Seconds to wait for the exit code of a process that has ended.
EXIT_CODE_SECONDS: Final = 0.3
_EXIT_CODES: Final = "ended.json"
#: Files that identify the machine's boot and the namespace of process ids.
_PLACE: Final = (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid"))
#: Likely causes of signals that steercap did not send.
_MEANING: Final[Mapping[int, str]] = {
    signal.SIGKILL: "by a user, or by the kernel because memory ran out; see `dmesg`",
    signal.SIGBUS: "there was no memory for shared memory that it had mapped: /dev/shm or the machine's memory is full",
}


def place() -> str:
    """Return "BOOT_ID PID_NAMESPACE PID" of this process, comparable within a machine; "" if unknown."""
    boot, namespace = _PLACE
    with contextlib.suppress(OSError):
        return f"{boot.read_text().strip()} {namespace.readlink()} {os.getpid()}"
    return ""


def record_exit_codes(executor: Any) -> None:
    """Patch an executor class of vLLM: if workers failed, its `shutdown` writes their exit codes for the client.

    The JSON file, [[name, pid, exit code]], is in the folder that the environment variable `FOLDER` names.
    """
    original = executor.shutdown

    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "is_failed", False):
            _write_exit_codes(handle.proc for handle in getattr(self, "workers", ()))
        return original(self, *args, **kwargs)

    executor.shutdown = shutdown


def _write_exit_codes(processes: Iterable[Any]) -> None:
    by_sentinel = {process.sentinel: process for process in processes}
    found = [by_sentinel[sentinel] for sentinel in wait([*by_sentinel], 0)]
    for process in found:
        process.join(EXIT_CODE_SECONDS / 2)  # it has ended, but its exit code may arrive a moment later
    ended = [[process.name, process.pid, process.exitcode] for process in found if process.exitcode is not None]
    folder = Path(os.environ.get(FOLDER, os.devnull))
    with contextlib.suppress(OSError):
        if ended and not (folder / _EXIT_CODES).exists():
            scratch = folder / f".{_EXIT_CODES}"
            scratch.write_text(json.dumps(ended))
            scratch.replace(folder / _EXIT_CODES)


class Processes:
    """Liveness watch of an engine's processes on this machine, by pidfds.

    Args:
        folder: folder of the engine's start, where processes write exit codes and errors.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watched: dict[int, int] = {}
        self._first: int | None = None

    def watch(self, places: Iterable[str]) -> None:
        """Watch the processes of this machine among `places`, results of `place` in the workers."""
        here = place().rpartition(" ")[0]
        for machine, _, pid in (one.rpartition(" ") for one in places):
            if here and machine == here and int(pid) not in self._watched.values():
                with contextlib.suppress(OSError):  # it has ended, or the kernel is older than 5.3
                    self._watched[os.pidfd_open(int(pid))] = int(pid)

    def ended(self) -> bool:
        """Check if a watched process has ended, and remember the first."""
        if self._first is None and self._watched:
            poll = select.poll()
            for descriptor in self._watched:
                poll.register(descriptor, select.POLLIN)
            self._first = next((self._watched[descriptor] for descriptor, _ in poll.poll(0)), None)
        return self._first is not None

    def exit_message(self, cores: Mapping[str, int]) -> str:
        """Return a sentence on how the engine's process ended, with its exit code or error; "" if not yet known.

        Args:
            cores: exit codes of the engine core processes that have ended, by process name.
        """
        with contextlib.suppress(OSError, ValueError):
            (name, pid, code), *_ = json.loads((self._folder / _EXIT_CODES).read_text())
            return f"{name} (process {pid}) {_exit_text(code)}"
        with contextlib.suppress(OSError, ValueError):
            kind, says = json.loads((self._folder / STARTUP_ERROR).read_text())
            if says != NO_WORKER:
                return f"{', '.join(cores) or 'its engine core'} ended with {missing_kernel(says) or f'{kind}: {says}'}"
        return ", ".join(f"{name} {_exit_text(code)}" for name, code in cores.items())

    @property
    def first_exit_message(self) -> str:
        """Sentence with the id of the watched process that ended first; "" if `ended` has found none."""
        return f"its process {self._first} has ended" if self._first is not None else ""

    def close(self) -> None:
        """Stop watching the processes. Idempotent."""
        while self._watched:
            os.close(self._watched.popitem()[0])


def _exit_text(code: int) -> str:
    """Describe an exit code in words; a negative one is that of a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        name, meaning = signal.Signals(-code).name, _MEANING.get(-code)
        return f"was killed by {name}" + (f" ({meaning})" if meaning else "")
    return f"was killed by signal {-code}"
