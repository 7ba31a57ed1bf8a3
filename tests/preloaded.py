"""Engines, kernels of notebooks and scripts whose processes begin as copies of one that has imported vLLM: each saves 12 s.

Python's own fork server makes an engine core, and that forks its workers. Everything else is as in an engine that is
spawned, which all of a user's are: tests about starts, ends and faults, and the fixture `tiny`, have those.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from pathlib import Path
from subprocess import Popen
from typing import Any, Final

import pytest
from jupyter_client.launcher import launch_kernel

from steercap.adapters.entry import quieten, wants_quiet

_IMPORTED: Final = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.async_llm",
    "steercap.adapters.extension",
    "ipykernel.kernelapp",
    "compressed_tensors",
    "preloading",
)
_BINDING: Final = "VLLM_CPU_OMP_THREADS_BIND"
_HERE: Final = Path(__file__).parent
_WRONG: Final = _HERE / "wrong_families"
#: Read on import, and set by vLLM with the first engine of a process that it configures for CPU.
_SET_EARLY: Final = {"TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
#: Variables that nothing reads on import; engines that differ in another one from the fork server are spawned.
_LATE: Final = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "WRONG_FAMILY",
        # steercap's, for each engine
        "STEERCAP_ENGINE",
        "SPT_NOENV",
        "VLLM_RPC_BASE_PATH",
        # of a notebook's kernel
        "CLICOLOR",
        "CLICOLOR_FORCE",
        "FORCE_COLOR",
        "GIT_PAGER",
        "JPY_PARENT_PID",
        "MPLBACKEND",
        "PAGER",
        "PYDEVD_USE_FRAME_EVAL",
        "TERM",
        # set with each engine that is configured for CPU
        "AITER_SITUV2_A4W4",
        "LD_PRELOAD",
        "LOCAL_WORLD_SIZE",
        "NUMEXPR_MAX_THREADS",
        "TORCHINDUCTOR_CACHE_DIR",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "VLLM_SSM_CONV_STATE_LAYOUT",
        "VLLM_USE_BREAKABLE_CUDAGRAPH",  # what models are imported for, which are not imported before
        # what it binds threads to is read on import, so that these copies are bound to nothing
        _BINDING,
        "VLLM_WORKER_MULTIPROC_METHOD",
    }
)


class _Target:
    """The function of a process; unpickling it is what gives the process its environment."""

    def __init__(self, function: Callable[..., Any], environment: dict[str, str]) -> None:
        self._function = function
        self._environment = environment

    def __reduce__(self) -> tuple[Any, ...]:
        return _prepared, (self._environment, self._function)


def _prepared(environment: dict[str, str], function: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.v1.executor import multiproc_executor

    os.environ.clear()
    os.environ.update(environment)
    multiproc_executor.get_mp_context = functools.partial(multiprocessing.get_context, "fork")
    if "WRONG_FAMILY" in environment:  # a spawned process would have run this before all else
        runpy.run_path(str(_WRONG / "sitecustomize.py"))
    return function


class _Process(ForkServerProcess):
    def __init__(self, *args: Any, environment: dict[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = environment

    def start(self) -> None:
        self._target = _Target(self._target, self._environment or dict(os.environ))
        super().start()


class _Context(ForkServerContext):
    Process = _Process


class Preloaded:
    """The fork server of this process, started before its first engine that asks for it."""

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}
        # The socket of a fork server lies in a folder of its own there, and its path has 107 bytes at most.
        self._possible = os.environ.get(_BINDING) == "nobind" and len(tempfile.gettempdir()) <= 75
        self._spawning = False

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Have the engine cores that are started meanwhile begin as copies.

        They are not bound to cores, as that takes variables that are read on import: where this process is to be bound,
        because no other runs tests beside it, they are spawned.
        """
        if not self._possible:
            yield
            return
        self._run()
        from vllm.v1.engine import utils

        original = utils.get_mp_context
        utils.get_mp_context = functools.partial(self._context, original)
        try:
            yield
        finally:
            utils.get_mp_context = original

    @contextlib.contextmanager
    def spawning(self) -> Iterator[None]:
        """Have the engine cores that are started meanwhile spawned, within `starting` too."""
        before, self._spawning = self._spawning, True
        try:
            yield
        finally:
            self._spawning = before

    def launch_kernel(self, cmd: list[str], *, env: dict[str, str], cwd: Path, **options: Any) -> _Copy | Popen[bytes]:
        """Start a kernel as `jupyter_client.launcher.launch_kernel` does, in a session of its own."""
        if not self._possible:
            return launch_kernel(cmd, env=env, cwd=cwd, **options)
        return self._start(_run_kernel, cmd[cmd.index("ipykernel_launcher") :], cwd, env)

    def launch_script(self, path: Path, *arguments: object) -> _Copy | Popen[bytes]:
        """Start a script as `python PATH ARGUMENTS` does, in a session of its own."""
        words = [str(path), *map(str, arguments)]
        if not self._possible:
            env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            return Popen([sys.executable, *words], env=env, start_new_session=True)
        return self._start(_run_script, words, Path.cwd(), dict(os.environ))

    def _start(
        self, run: Callable[[list[str]], None], words: list[str], folder: Path, environment: dict[str, str]
    ) -> _Copy:
        self._run()
        key = getattr(forkserver._forkserver, "_forkserver_authkey", None)
        process = _Context().Process(target=_run_apart, args=(run, words, folder, key), environment=environment)
        process.start()
        with contextlib.suppress(ProcessLookupError):  # it has ended, which whoever waits for it is told
            while process.is_alive() and os.getpgid(process.pid) != process.pid:  # the whole group is sent signals
                time.sleep(0.01)
        return _Copy(process)

    def _run(self) -> None:
        quieten(log=wants_quiet())
        if not self._environment:
            os.environ.update(_SET_EARLY)
            forkserver.set_forkserver_preload(list(_IMPORTED))
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv("PYTHONPATH", str(_HERE), prepend=os.pathsep)
                patched.delenv("WRONG_FAMILY", raising=False)  # of one engine, not of all copies
                forkserver.ensure_running()
            import vllm.v1.engine.async_llm  # noqa: F401 -- what imports set is as good as there from the start

            self._environment = _early()
            gc.collect()
            gc.freeze()  # tests collect garbage often, and need not go through all that is imported

    def _context(self, original: Callable[[], BaseContext]) -> BaseContext:
        return _Context() if not self._spawning and _early() == self._environment else original()


#: The one of this process: pytest imports conftest.py twice, which would make two of them.
PRELOADED: Final = Preloaded()


def _early() -> dict[str, str]:
    early = {name: value for name, value in os.environ.items() if name not in _LATE}
    path = [entry for entry in early.get("PYTHONPATH", "").split(os.pathsep) if entry not in {"", str(_WRONG)}]
    return early | {"PYTHONPATH": os.pathsep.join(path)}


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Copy:
    """A notebook's kernel or a script that began as a copy, with the members of a Popen that jupyter_client uses."""

    stdin = stdout = stderr = None

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _run_apart(run: Callable[[list[str]], None], words: list[str], folder: Path, key: bytes | None) -> None:
    """Run a program whose engine cores begin as copies of the same fork server's process; it ends with who started it.

    Args:
        run: the program.
        words: of its command line.
        folder: its working folder.
        key: which the fork server asks for, since Python 3.14.
    """
    from vllm.v1.engine import utils

    os.setsid()
    os.chdir(folder)
    sys.argv = words
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # it runs: this process came from it
    forkserver._forkserver._forkserver_authkey = key
    threading.Thread(target=_end_with_parent, daemon=True).start()
    utils.get_mp_context = _Context
    run(words)


def _run_kernel(_words: list[str]) -> None:
    from ipykernel.kernelapp import launch_new_instance

    sys.path[0:0] = [""]
    launch_new_instance()


def _run_script(words: list[str]) -> None:
    sys.path[0:0] = [str(Path(words[0]).parent)]
    runpy.run_path(words[0], run_name="__main__")


def killed(script: Path, *arguments: object) -> None:
    """Have a script run until it kills itself; what it started is killed after it, or ends by itself where it is a copy."""
    process = PRELOADED.launch_script(script, *arguments)
    try:
        assert process.wait(timeout=400) == -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
