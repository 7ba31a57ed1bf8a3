"""Engines whose processes begin as copies of one that has imported vLLM, which saves two imports of about 12 s a start.

Python's own fork server makes an engine core, and that forks its workers. Everything else is as in an engine that is
spawned, which all of a user's are: tests about starts, ends and faults, and the fixture `tiny`, have those.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import runpy
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Final

from steercap.adapters.entry import quieten, wants_quiet

_IMPORTED: Final = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "steercap.adapters.extension")
_WRONG: Final = Path(__file__).parent / "wrong_families"
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
        # set with each engine that is configured for CPU
        "AITER_SITUV2_A4W4",
        "LD_PRELOAD",
        "LOCAL_WORLD_SIZE",
        "NUMEXPR_MAX_THREADS",
        "TORCHINDUCTOR_CACHE_DIR",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "VLLM_SSM_CONV_STATE_LAYOUT",
        "VLLM_WORKER_MULTIPROC_METHOD",
    }
)


class _Target:
    """The function of a process; unpickling it is what gives the process its environment."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return _prepared, (dict(os.environ), self._function)


def _prepared(environment: dict[str, str], function: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.v1.executor import multiproc_executor

    os.environ.clear()
    os.environ.update(environment)
    multiproc_executor.get_mp_context = functools.partial(multiprocessing.get_context, "fork")
    if "WRONG_FAMILY" in environment:  # a spawned process would have run this before all else
        runpy.run_path(str(_WRONG / "sitecustomize.py"))
    return function


class _Process(ForkServerProcess):
    def start(self) -> None:
        self._target = _Target(self._target)
        super().start()


class _Context(ForkServerContext):
    Process = _Process


class Preloaded:
    """The fork server of this process, started before its first engine that asks for it."""

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Have the engine cores that are started meanwhile begin as copies.

        Where vLLM binds threads to cores it does so by variables that are read on import: those engines are spawned.
        """
        quieten(log=wants_quiet())
        if os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind":
            yield
            return
        if not self._environment:
            os.environ.update(_SET_EARLY)
            forkserver.set_forkserver_preload(list(_IMPORTED))
            forkserver.ensure_running()
        from vllm.v1.engine import utils

        # What imports set is as good as there from the start: the server makes the same ones.
        self._environment = self._environment or _early()
        original = utils.get_mp_context
        utils.get_mp_context = functools.partial(self._context, original)
        try:
            yield
        finally:
            utils.get_mp_context = original

    def _context(self, original: Callable[[], BaseContext]) -> BaseContext:
        return _Context() if _early() == self._environment else original()


def _early() -> dict[str, str]:
    early = {name: value for name, value in os.environ.items() if name not in _LATE}
    path = [entry for entry in early.get("PYTHONPATH", "").split(os.pathsep) if entry not in {"", str(_WRONG)}]
    return early | {"PYTHONPATH": os.pathsep.join(path)}
