"""Engines shared between tests, and the check that none of them leaves anything behind."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

# Commands that tests call look for warm engines: not for those of whoever runs the tests.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="steercap-tests-")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.pop("FORCE_COLOR", None)  # rich and typer would take a pipe for a terminal
os.environ.pop("PY_COLORS", None)
os.environ.pop("GITHUB_ACTIONS", None)
os.environ.pop("STEERCAP_PROGRESS", None)
if "PYTEST_XDIST_WORKER" in os.environ:  # tests beside these need a core too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import psutil
import pytest
import torch
import uvicorn
from hypothesis import settings

# Triton looks at it when it is imported, when a kernel is defined, and when one runs: before any test imports it.
# A test that imports something from here imports it once more, which is why it may have been set before.
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    assert "triton" not in sys.modules, "a plugin of pytest has imported Triton, whose kernels would not be interpreted"
    os.environ["TRITON_INTERPRET"] = "1"

import shapes  # noqa: F401 -- before any module that it checks
from preloaded import PRELOADED
from scheduling import in_order, pytest_xdist_make_scheduler  # noqa: F401 -- a hook of pytest-xdist
from skips import UNEXPECTED, pytest_make_collect_report, pytest_runtest_makereport, unexpected  # noqa: F401 -- hooks of pytest
from stalls import (  # noqa: F401 -- hooks of pytest
    pytest_runtest_logreport,
    pytest_timeout_cancel_timer,
    pytest_timeout_set_timer,
)
from support.faults.base import for_two_workers
from support.rows import ALL_SITES, CRAMPED, TINY_ENGINE
from triton_on_cpu.interpreter_backend.once import patch_once

from steercap import SteerModel
from steercap.adapters.reaper import mapped
from steercap.lab.demo import smollm2
from steercap.testing import Reference, tiny_checkpoint

atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    patch_once()

settings.register_profile("steercap", deadline=None)  # examples differ in what they compile
settings.load_profile("steercap")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts an engine of its own as slow (the one of `tiny` serves all that `make test` runs), and extended tests."""
    for item in items:
        used = set(getattr(item, "fixturenames", ()))
        on_engines = "unit" not in item.path.parts
        starts_one = on_engines and ("tiny" not in used or used & {"cramped", "smol"})
        if starts_one or item.get_closest_marker("extended"):
            item.add_marker(pytest.mark.slow)
    if moving := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"names that differ from process to process, which xdist refuses; give ids=: {moving}")
    config.stash[UNEXPECTED] = unexpected(items)
    items[:] = in_order(items)


class Mapped(threading.Thread):
    """Sees which files of /dev/shm this process and its children map, once a second.

    A file does not say whose it was: what others that run beside this process leave when they are killed, or have not
    removed yet, is theirs.
    """

    def __init__(self) -> None:
        super().__init__(name="mapped files", daemon=True)
        self.files: set[Path] = set()

    def look(self) -> None:
        """Take note of what is mapped now."""
        own = {process.pid for process in (psutil.Process(), *psutil.Process().children(recursive=True))}
        self.files |= {Path(path) for path in mapped(own)}

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(1)


_MAPPED = Mapped()


@asynccontextmanager
async def listening(app: Any, path: Path | None = None) -> AsyncIterator[str]:
    """The address of a server of this process that answers with an application; at a path, a Unix socket's."""
    with socket.create_server(("127.0.0.1", 0)) if path is None else socket.socket(socket.AF_UNIX) as sock:
        if path is not None:
            sock.bind(str(path))
        served = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        running = asyncio.create_task(served.serve([sock]))
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}" if path is None else f"unix:{path}"
        finally:
            served.should_exit = True
            await running


class Leftovers:
    """What exists now and must not exist in addition later."""

    def __init__(self) -> None:
        if not _MAPPED.is_alive():
            _MAPPED.start()
        self.processes = self._processes()
        self.threads = set(threading.enumerate())
        self.shared = set(Path("/dev/shm").iterdir())
        self.segments = self._segments()

    def new(self) -> dict[str, set[Any]]:
        """What has come since, by kind; empty sets left out."""
        gc.collect()
        _MAPPED.look()
        now = Leftovers()
        found = {
            "processes": now.processes - self.processes,
            # vLLM's and torch's pools may keep a thread for the process's life; none of them is ours.
            "threads": {thread for thread in now.threads - self.threads if "steercap" in thread.name},
            "shared memory files": (now.shared - self.shared) & _MAPPED.files,
            "mapped segments": now.segments - self.segments,
        }
        return {kind: left for kind, left in found.items() if left}

    @staticmethod
    def _processes() -> set[str]:
        found = set()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # zombies included: they have ended
                command = " ".join(child.cmdline())
                if "resource_tracker" not in command:
                    found.add(f"{child.pid} {command[:80]}")
        return found

    @staticmethod
    def _segments() -> set[str]:
        return {
            line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:steercap" in line
        }


@pytest.fixture(autouse=True)
def preloaded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start engines of tests as copies of a process that has imported vLLM, but for tests marked as `spawned`."""
    if "engine" not in request.path.parts or request.node.get_closest_marker("spawned"):
        yield
        return
    with PRELOADED.starting():
        yield


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers on CPU, whose cores steercap names."""
    if reason := for_two_workers():
        pytest.skip(reason)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)


@asynccontextmanager
async def opened(path: str | Path, *, spawned: bool = False, **arguments: Any) -> AsyncIterator[SteerModel]:
    """Open a SteerModel, and prove that closing it leaves nothing of what it made (others may open meanwhile).

    Args:
        path: of the checkpoint.
        spawned: start its processes as a user's are started, and not as copies of one that has imported vLLM.
        **arguments: of `SteerModel`.
    """
    model = SteerModel(str(path), **arguments)
    with PRELOADED.spawning() if spawned else PRELOADED.starting():
        before = Leftovers()
        await model.start()
    made: dict[str, set[Any]] = {}
    try:
        async with model:
            made = before.new()
            yield model
    finally:
        left = before.new()
        assert not {kind: both for kind in made if (both := made[kind] & left.get(kind, set()))}


@pytest.fixture(scope="session")
async def tiny() -> AsyncIterator[SteerModel]:
    """Tiny qwen3, all sites armed, eager, float32."""
    async with opened(tiny_checkpoint("qwen3"), spawned=True, sites=ALL_SITES, **TINY_ENGINE) as model:
        yield model


@pytest.fixture(scope="session")
async def cramped() -> AsyncIterator[SteerModel]:
    """Tiny qwen3 where there is little room, all sites armed."""
    async with opened(tiny_checkpoint("qwen3"), sites=ALL_SITES, **CRAMPED) as model:
        yield model


@pytest.fixture(scope="session")
def tiny_reference() -> Reference:
    """transformers on the checkpoint of `tiny`."""
    return Reference(tiny_checkpoint("qwen3"))


@pytest.fixture(scope="session")
async def smol() -> AsyncIterator[SteerModel]:
    """SmolLM2-135M-Instruct, float32, eager."""
    async with opened(smollm2(), preset="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def smol_reference() -> Reference:
    """transformers on SmolLM2, float32."""
    return Reference(smollm2())
