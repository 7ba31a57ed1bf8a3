"""An engine's processes end with their client, however it ends, and leave nothing; nobody else's are touched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from steercap.adapters import reaper
from steercap.adapters.reaper import MARK, Reaper

#: Two process ids and a path.
Named = tuple[int, int, Path]

#: A client with an "engine": a process that maps shared memory, has a child, and says who it is. Each line is one write:
#: both write to the same pipe, and Python may be told not to buffer.
CLIENT = r"""
import os, signal, subprocess, sys, time
from steercap.adapters.reaper import Reaper

if __name__ == "__main__":
    reaper = Reaper()
    if "slow" in sys.argv:
        reaper._process.send_signal(signal.SIGSTOP)
    engine = r'''
import os, subprocess, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
if "dead" in sys.argv:  # vLLM's processes tell the client's tracker, which outlives them
    resource_tracker.unregister(memory._name, "shared_memory")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
os.write(1, f"engine {os.getpid()} {child.pid} {memory.name}\n".encode())
time.sleep(600)
'''
    other = subprocess.Popen(["sleep", "600"])
    process = subprocess.Popen([sys.executable, "-c", engine, *sys.argv], env={**os.environ, **reaper.environment})
    if "adopt" in sys.argv:
        reaper.adopt([process.pid])
    while "note" in sys.argv and not any("psm_" in path for path in reaper.note_files()):
        time.sleep(0.01)
    os.write(1, f"client {reaper._process.pid} {other.pid} {reaper.folder}\n".encode())
    if "end" in sys.argv:
        sys.stdin.readline()  # until both have said who they are
        if "dead" in sys.argv:
            process.kill()
            process.wait()
        reaper.end()
    elif "leave" in sys.argv:
        sys.stdin.readline()
        os._exit(0)
    time.sleep(600)
"""


def gone(pids: list[int], seconds: float) -> list[int]:
    """Those of some processes that are still there after so many seconds, zombies aside."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if psutil.pid_exists(pid) and state(pid) != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def state(pid: int) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status()
    return psutil.STATUS_ZOMBIE


@contextlib.contextmanager
def client_of(script: str, *way: str, stderr: int | None) -> Iterator[tuple[subprocess.Popen[str], Named, Named]]:
    """A client in a session of its own: its process, then engine, child and memory, then watcher, other and folder.

    Nothing of it is left: what outlives this test would hold its pipes open for those that wait for their end.
    """
    client = subprocess.Popen(
        [sys.executable, "-c", script, *way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    pids = {client.pid}
    try:
        said = dict(client.stdout.readline().split(maxsplit=1) for _ in range(2))
        engine, child, memory = said["engine"].split()
        watcher, other, folder = said["client"].split()
        ours = (int(engine), int(child), Path("/dev/shm") / memory), (int(watcher), int(other), Path(folder))
        pids |= {*ours[0][:2], *ours[1][:2]}
        yield client, *ours
    finally:
        pids |= {process.pid for process in psutil.process_iter() if session(process.pid) == client.pid}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        client.communicate(timeout=30)


def go_on(client: subprocess.Popen[str]) -> None:
    """Have a client do what it waits to do."""
    client.stdin.write("\n")
    client.stdin.flush()


def session(pid: int) -> int:
    """Whose session a process is in; 0 if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0


@pytest.mark.parametrize(
    ("way", "number"),
    [
        (["wait"], signal.SIGKILL),
        (["adopt"], signal.SIGKILL),
        (["wait"], signal.SIGTERM),
        (["leave"], None),
        (["note", "all"], signal.SIGKILL),
        (["note", "all", "slow"], signal.SIGKILL),
    ],
)
def test_an_engine_ends_with_its_client(way, number) -> None:
    """Killed, alone or with its engine, terminated or gone without a word: nothing stays but another child of its."""
    with client_of(CLIENT, *way, stderr=None) as (client, (engine, child, memory), (watcher, other, folder)):
        assert memory.exists()
        assert folder.is_dir()
        if "all" in way:  # who dies together can tell nobody what was mapped
            os.killpg(client.pid, number)
        elif number is None:
            go_on(client)
        else:
            client.send_signal(number)
        client.wait(30)
        if "slow" in way:  # the watcher comes to what the client has said only now
            os.kill(watcher, signal.SIGCONT)
        # Idle, it takes 0.05 s; this machine may be shared by many.
        assert gone([engine, child, watcher], 60) == []
        assert not memory.exists()
        assert not folder.exists()
        assert "all" in way or gone([other], 0) == [other]


def test_a_process_inside_execve_is_not_overlooked(monkeypatch) -> None:
    """`Popen` returns before the kernel has written the child's environment: in a quarter of cases, or most."""
    for at in range(100):
        mark = f"{os.getpid()}-execve-{at}"
        with subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark}, start_new_session=True) as child:
            monkeypatch.setattr(reaper, "pids", lambda pid=child.pid: iter([pid]))  # as if it were the first of all
            found = reaper._processes(mark, {})
            child.kill()
        assert found == {child.pid}


@pytest.mark.parametrize("way", [(), ("note", "dead")])
def test_a_client_ends_its_engine_without_a_complaint_of_python(way) -> None:
    """`end` leaves the process beside it nothing to do, and the resource tracker nothing to warn of."""
    script = CLIENT.replace('time.sleep(600)\n"', '"')
    with client_of(script, *way, "end", stderr=subprocess.PIPE) as (
        client,
        (engine, child, memory),
        (watcher, other, _),
    ):
        go_on(client)
        assert gone([engine, child, watcher], 60) == []
        assert not memory.exists()
        assert gone([other], 0) == [other]
        client.terminate()
        os.kill(other, signal.SIGKILL)
        assert client.communicate(timeout=30)[1] == ""


#: What an "engine" maps that is not its own: a file that was there, weights in a folder, weights beside it.
USER = r"""
import mmap, os, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
before, beneath, beside = (os.open(path, os.O_RDWR) for path in sys.argv[1:])
kept = [mmap.mmap(before, 0), mmap.mmap(beneath, 0)]
kept += [mmap.mmap(beside, 0, access=access) for access in (mmap.ACCESS_READ, mmap.ACCESS_COPY)]
print(memory.name, flush=True)
sys.stdin.read()
os._exit(0)
"""
#: A client of such an engine, which is killed.
KILLED = """
import os, pathlib, subprocess, sys, time
from steercap.adapters.reaper import Reaper
reaper = Reaper()
pathlib.Path(sys.argv[4]).write_bytes(bytes(4096))
environment = {**os.environ, **reaper.environment}
process = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=environment)
time.sleep(600)
"""


@pytest.mark.parametrize("way", ["ends by itself", "ended", "client killed"])
def test_files_of_others_in_shared_memory_stay(way) -> None:
    """Weights that somebody keeps in /dev/shm are mapped by engines, and are not theirs."""
    folder = Path(tempfile.mkdtemp(prefix="reaper-", dir="/dev/shm"))
    before, beneath, beside = folder.with_suffix(".before"), folder / "model.safetensors", folder.with_suffix(".beside")
    words = [USER, str(before), str(beneath), str(beside)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    try:
        for path in (before, beneath):
            path.write_bytes(bytes(4096))
        if way == "client killed":
            client = subprocess.Popen([sys.executable, "-c", KILLED, *words], **pipes)
            memory = Path("/dev/shm", client.stdout.readline().strip())
            assert memory.is_file()
            client.kill()
            client.wait(60)
            deadline = time.monotonic() + 60
            while memory.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            client.communicate(timeout=60)
        else:
            reaper = Reaper()
            beside.write_bytes(bytes(4096))
            environment = {**os.environ, **reaper.environment}
            engine = subprocess.Popen([sys.executable, "-c", *words], env=environment, **pipes)
            memory = Path("/dev/shm", engine.stdout.readline().strip())
            assert memory.is_file()
            assert reaper.note_files() == {str(memory)}
            if way == "ends by itself":
                engine.communicate(timeout=60)
            assert reaper.end()
            engine.communicate(timeout=60)
        assert not memory.exists()
        assert [path for path in (before, beneath, beside) if not path.exists()] == []
    finally:
        for path in (before, beneath, beside):
            path.unlink(missing_ok=True)
        folder.rmdir()


def test_ending_twice_is_ending_once_and_a_fork_ends_nothing() -> None:
    """What a fork of the client does with the engine of its parent is nothing."""
    reaper = Reaper()
    sleeper = subprocess.Popen(["sleep", "600"], env={**os.environ, **reaper.environment})
    assert reaper.environment[MARK] == reaper.mark
    child = os.fork()
    if child == 0:
        os._exit(0 if reaper.end() is False else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sleeper.poll() is None
    assert reaper.end()
    assert reaper.end()
    assert sleeper.wait(5) == -signal.SIGKILL
    assert reaper._process.poll() is not None
    assert not reaper.folder.exists()
