"""Start of an engine, which can be cancelled at any moment, and ownership of its processes.

It relies on this: `CoreEngineProcManager` and `DPCoordinator` of `v1.engine.utils` start all processes of an engine in
their `__init__`, and hold them as `processes` and `proc`; `envs.environment_variables` is asked for the folder of
sockets. It can go when vLLM takes an environment and an entry for its processes. It imports vLLM only on the thread
that runs a start: that takes many seconds, for which Ctrl+C should not have to wait.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from steercap.adapters import releases
from steercap.adapters.entry import COORDINATOR, ENGINE_CORE, ProcessEntry, quieten, wants_quiet
from steercap.adapters.process_exit import FOLDER, READ, READING
from steercap.adapters.reaper import Reaper
from steercap.config import Settings
from steercap.core.extras import extra
from steercap.errors import EngineFailure, ModelClosed

if TYPE_CHECKING:
    from steercap.adapters.engine import VllmEngine

#: The start in whose context vLLM's code runs; None in an engine that steercap did not start.
_CURRENT: Final[ContextVar[Launch | None]] = ContextVar("steercap_launch", default=None)
#: Lock over changes of the process's environment and of vLLM's classes, held for some milliseconds while spawning.
_SPAWNING: Final = threading.Lock()
#: True if steercap chooses the level of vLLM's log.
QUIET: Final = wants_quiet()
#: Maximum wait at the interpreter's exit, in seconds, for starts that are importing vLLM.
EXIT_SECONDS: Final = 2.0
#: Name of a start's stage from its first process until weights are loaded.
_PROCESSES: Final = "starting processes"


class Launch:
    """One start of an engine, which afterwards owns the engine's processes.

    Raises:
        EngineFailure: the process that watches over the engine cannot be started.
    """

    def __init__(self) -> None:
        try:
            self.reaper: Final = Reaper()
        except OSError as error:
            raise EngineFailure(f"no process can be started beside the engine, to end it with us: {error}") from error
        #: Environment variables of the engine's processes, besides those that the reaper sets.
        self.environment: dict[str, str] = {}
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._engine: VllmEngine | None = None
        self._stage = "importing vLLM"
        _LAUNCHES.add(self)

    def run(self, model: str, settings: Settings, engine_args: Mapping[str, Any], candidate: int = 0) -> VllmEngine:
        """Start an engine; blocks its thread, which must be of this start alone. A failed start leaves nothing behind.

        Raises:
            ModelClosed: the start was cancelled by `give_up`.
            SteercapError: any error of `VllmEngine.start`.
        """
        self._thread = threading.current_thread()
        _CURRENT.set(self)
        try:
            self.require_wanted()
            quieten(log=QUIET)
            with extra("cuda", "cpu"), releases.importing():
                from steercap.adapters.engine import VllmEngine

                _hook_launchers()
            releases.warn_of_untried()
            self.require_wanted()
            self._stage = "reading the configuration"
            vllm = self._engine = VllmEngine.start(model, settings, engine_args, self, candidate)
            self.reaper.note_files()
            self._stage = ""
            self.require_wanted()
        except BaseException:
            self.end()
            self.require_wanted()
            raise
        return vllm

    def give_up(self) -> None:
        """Cancel the start: kill the processes started so far and make `run` fail soon; callable from any thread."""
        self._given_up.set()
        self.reaper.end()

    @property
    def stage(self) -> str:
        """Name of the start's current stage, for a progress message; "" once it has ended."""
        if self._stage != _PROCESSES:
            return self._stage
        if (self.reaper.folder / READ).exists():
            return "warming up"
        return "loading weights" if (self.reaper.folder / READING).exists() else _PROCESSES

    @property
    def is_given_up(self) -> bool:
        """True if the start was cancelled by `give_up`."""
        return self._given_up.is_set()

    def end(self) -> None:
        """Release the engine, and kill its processes; callable from any thread, blocks for a moment. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None and self.reaper.is_ours:
            engine.let_go()
        self.reaper.end()

    @property
    def is_starting(self) -> bool:
        """True while the thread that runs the start is alive."""
        return self._thread is not None and self._thread.is_alive()

    def stop_importing(self, deadline: float) -> None:
        """Raise SystemExit in the start's thread, at the interpreter's exit, and wait for it until `deadline`.

        A thread that ends inside a library's C++ after the interpreter aborts the process.

        Args:
            deadline: time of `time.monotonic()`.
        """
        while self._thread is not None and self.is_starting and time.monotonic() < deadline:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(SystemExit)
            )
            self._thread.join(0.05)

    def require_wanted(self) -> None:
        """Check that the start was not cancelled.

        Raises:
            ModelClosed: it was cancelled by `give_up`.
        """
        if self.is_given_up:
            raise ModelClosed("the model was closed, or its start cancelled, before it was up")

    @contextlib.contextmanager
    def spawning(self) -> Iterator[None]:
        """Spawn processes in the block that inherit the engine's mark, log little, and ignore Ctrl+C.

        A terminal sends SIGINT to the whole process group, but the client alone decides what it means: an engine that
        obeyed it would be gone while a notebook still needs it, with a traceback from each process. A blocked signal
        stays blocked in their child processes too.
        """
        with _SPAWNING, _environment({**self.environment, **self.reaper.environment}), _entries():
            self.require_wanted()
            self._stage = _PROCESSES
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


#: All starts of this process that are still referenced.
_LAUNCHES: Final[WeakSet[Launch]] = WeakSet()


def _end_all() -> None:
    """At the interpreter's exit, end engines that nobody closed, and stop starts that still import vLLM."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl+C now means an end at once, without a traceback
    for launch in list(_LAUNCHES):
        launch.give_up()
        launch.end()
    deadline, importing = time.monotonic() + EXIT_SECONDS, [launch for launch in _LAUNCHES if launch.is_starting]
    printing = sys.unraisablehook
    # A SystemExit that meets a `__del__` ends nothing and would be printed; the next one ends the thread.
    sys.unraisablehook = lambda found: None if found.exc_type is SystemExit else printing(found)
    for launch in importing:
        launch.stop_importing(deadline)
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1"):  # a notebook's is long past
        # CPython ends a script that was interrupted by the signal, so that a shell knows; it forgets that with the next
        # text that is executed, on any thread. Dataclasses execute text: an import on its way does, and Ray's own end.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # noqa: S102


atexit.register(_end_all)


@contextlib.contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _entries() -> Iterator[None]:
    """Replace the target functions of vLLM's processes by `ProcessEntry` in the block."""
    with contextlib.ExitStack() as stack:
        for target in (ENGINE_CORE, COORDINATOR):
            owner, name = getattr(import_module(target[0]), target[1]), target[2]
            stack.callback(setattr, owner, name, inspect.getattr_static(owner, name))
            setattr(owner, name, ProcessEntry(target, getattr(owner, name), log=QUIET))
        yield


class _Folder:
    """Callable that returns the folder of vLLM's sockets: the start's own, removed with its engine, or vLLM's.

    vLLM does not remove its socket files in other folders.

    Args:
        elsewhere: vLLM's own function, used for engines that steercap did not start.
    """

    def __init__(self, elsewhere: Callable[[], Any]) -> None:
        self._elsewhere = elsewhere

    def __call__(self) -> Any:
        launch = _CURRENT.get()
        return self._elsewhere() if launch is None else str(launch.reaper.folder)


def _hook_launchers() -> None:
    """Make vLLM spawn the processes of steercap's starts inside `Launch.spawning`; a second call does nothing."""
    from vllm.envs import environment_variables
    from vllm.v1.engine.utils import CoreEngineProcManager, DPCoordinator

    if not isinstance(base := environment_variables[FOLDER], _Folder):
        environment_variables[FOLDER] = _Folder(base)
    for module, owner, _ in (ENGINE_CORE, COORDINATOR):
        releases.require(owner, getattr(import_module(module), owner))
    for launcher in (CoreEngineProcManager, DPCoordinator):
        releases.require(launcher.__name__, launcher)
        original = launcher.__init__
        if getattr(original, "steercap_hook", False):
            continue

        @functools.wraps(original)
        def start(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> None:
            launch = _CURRENT.get()
            if launch is None:
                _original(self, *args, **kwargs)
                return
            with launch.spawning():
                _original(self, *args, **kwargs)
                processes = getattr(self, "processes", None) or [self.proc]
                launch.reaper.adopt(process.pid for process in processes if process.pid)
            if launch.is_given_up:  # the processes came after the killing
                launch.give_up()
                launch.require_wanted()

        start.steercap_hook = True  # type: ignore[attr-defined]
        launcher.__init__ = start
