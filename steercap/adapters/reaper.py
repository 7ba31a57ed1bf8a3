"""Killing of all processes of one engine, and removal of their shared memory and temporary files.

An engine is a tree of processes that vLLM starts: engine cores, workers, compilers. While one is started, the
environment carries a mark; all descendants inherit the mark, even when their parent has died. The client ends its
engine with `Reaper.end`. In case the client is killed, a small process beside the engine, in a session of its own,
waits for the client's end and does the same. That process runs this file as a script, so nothing but the standard
library is imported here.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Final
from uuid import uuid4

#: Environment variable whose value marks the processes of one engine.
MARK: Final = "STEERCAP_ENGINE"
#: Maximum wait in seconds for killed processes to vanish; a driver that frees much device memory takes a few.
PATIENCE: Final = 10.0
#: Maximum wait in seconds for a process inside `execve`, whose environment cannot be read, to have one.
_EXEC_SECONDS: Final = 1.0
#: Maximum length of the path of a folder for Unix sockets: 107 bytes, less a UUID.
LONGEST_FOLDER: Final = 107 - 37
_SHARED: Final = "/dev/shm/"  # noqa: S108 -- where Linux keeps shared memory
#: File in an engine's folder that lists the file names in /dev/shm before the engine's start.
_BEFORE: Final = "shared memory before"
_ENDED: Final = b"ended\n"
#: Pattern of the file names of vLLM's sockets.
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Reaper:
    """Owner of an engine's processes, shared memory and temporary files, which kills and removes them at the end.

    Attributes:
        mark: value of `MARK` in the engine's processes.
        folder: folder of the engine's sockets and other temporary files; removed by `end`.
    """

    def __init__(self) -> None:
        self._client: Final = os.getpid()
        self.mark: Final = f"{self._client}-{uuid4().hex[:12]}"
        self.folder: Final = Path(tempfile.mkdtemp(prefix="steercap-", dir=_short_folder()))
        self._roots: dict[int, str] = {}
        self._files: set[str] = set()
        self._before: Final = _shared()
        # Not sent through the pipe: there may be more of them than it holds.
        (self.folder / _BEFORE).write_bytes(b"\0".join(map(os.fsencode, self._before)))
        self._lock = threading.Lock()
        resource_tracker.ensure_running()  # otherwise it would inherit the mark, and be killed with them
        self._process = subprocess.Popen(  # noqa: S603 -- this very file
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), self.mark, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl+C in a terminal is for the client
            cwd="/",
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables to set while the engine's processes are spawned."""
        # SPT_NOENV: setproctitle, which vLLM uses, would write its titles over the mark.
        return {MARK: self.mark, "SPT_NOENV": "1", "VLLM_RPC_BASE_PATH": str(self.folder)}

    @property
    def is_ours(self) -> bool:
        """True in the process that made this reaper, False in a fork of it."""
        return os.getpid() == self._client

    def adopt(self, pids: Iterable[int]) -> None:
        """Record the ids of spawned processes, and this process's bound sockets, for `end`.

        Processes that were forked rather than spawned do not show the mark in /proc.
        """
        self._roots |= {pid: began for pid in pids if (began := _began(pid))}
        lines = [f"root {pid} {began}" for pid, began in self._roots.items()]
        lines += [f"file {path}" for path in _listening(os.getpid())]
        self._tell("".join(f"{line}\n" for line in lines).encode())

    def note_files(self) -> set[str]:
        """Record the engine's shared memory files, which cannot be found once the processes that map them are dead.

        Returns:
            Paths of the files.
        """
        found = _processes(self.mark, self._roots)
        files = _own_files(found, self._before)
        self._files |= files
        self._tell(b"".join(b"shared %s\n" % os.fsencode(path) for path in files))
        return files

    def end(self) -> bool:
        """Kill the engine's remaining processes and remove its files; callable from any thread. Idempotent.

        Returns:
            True if all processes are gone. False if some remain, which the process beside the engine goes on killing,
            and in a fork of the client, where nothing is done.
        """
        if not self.is_ours:
            return False
        with self._lock:
            gone, files = reap(self.mark, self._roots, self._before, self._files)
            for file in files:
                _forget(file)
            shutil.rmtree(self.folder, ignore_errors=True)
            if gone:
                self._tell(_ENDED)
            if self._process.stdin is not None and not self._process.stdin.closed:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
            if gone:
                self._process.wait()
            return gone

    def _tell(self, message: bytes) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it was killed; this process can still end its engine itself
                stdin.write(message)
                stdin.flush()


def reap(
    mark: str,
    roots: Mapping[int, str],
    before: Collection[str] | None,
    files: Iterable[str] = (),
    patience: float = PATIENCE,
) -> tuple[bool, set[str]]:
    """Kill every process of an engine until none is left, and remove the shared memory that they alone had mapped.

    Args:
        mark: value of `MARK` in the engine's processes.
        roots: start times, as of `_began`, of processes known to be the engine's, by process id.
        before: file names in /dev/shm before the engine's start, which are kept; None if unknown: then files that its
            processes map are kept too.
        files: paths of shared memory known to be the engine's, since the mappings of a dead process cannot be read.
        patience: maximum seconds to wait for the processes to vanish.

    Returns:
        True if all processes are gone; and the paths of the removed files.
    """
    deadline = time.monotonic() + patience
    gone, left = True, set(files)
    killed = dict(roots)  # a dying process no longer shows its mark
    while found := _processes(mark, killed):
        for pid in found - killed.keys():
            if began := _began(pid):
                killed[pid] = began
        if before is not None:
            left |= _own_files(found, before)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # first stop all: one that outlived the others would complain
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if time.monotonic() > deadline:
            gone = False
            break
        time.sleep(0.005)
    if left:
        left -= mapped(pids())
    removed = set()
    for path in left:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
            removed.add(path)
    return gone, removed


def _processes(mark: str, roots: Mapping[int, str]) -> set[int]:
    """Return the ids of living processes that have the mark, of roots, and of their descendants; not this one."""
    needle = f"{MARK}={mark}".encode()
    found = {pid for pid, began in roots.items() if _began(pid) == began}
    parents: dict[int, int] = {}
    for pid in pids():
        status = _status(pid)
        if status is None:
            continue
        parents[pid] = int(status[1])
        if needle in _environ(pid).split(b"\0"):
            found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def pids() -> Iterator[int]:
    """Return the ids of all processes of the machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208


def _environ(pid: int) -> bytes:
    """Return the environment of a process as it started, variables ended by zero bytes; empty if it cannot be read.

    Inside `execve` a process shows neither environment nor arguments, and its parent has gone on since: on a loaded
    machine for many milliseconds. Who reads then waits, so as not to overlook it.
    """
    deadline = time.monotonic() + _EXEC_SECONDS
    while not (found := _read(f"/proc/{pid}/environ")):
        status = _status(pid)
        has_memory = status is not None and int(status[20])  # a thread of the kernel has none
        if not has_memory or _read(f"/proc/{pid}/cmdline") or time.monotonic() > deadline:
            return _read(f"/proc/{pid}/environ")  # again, as the arguments may have come just before it
        time.sleep(0.001)
    return found


def _status(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the process state on; None if the process has ended.

    A process whose first thread has ended counts as a zombie, while others of its threads may still be about to end.
    """
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()
    return fields if fields and (fields[0] not in "ZX" or int(fields[17]) > 1) else None


def _began(pid: int) -> str | None:
    """Return a process's start time in clock ticks, which tells reused process ids apart; None if it has ended."""
    status = _status(pid)
    return status[19] if status else None


def mapped(processes: Iterable[int], written: bool = False) -> set[str]:
    """Return the paths below /dev/shm that processes map.

    Args:
        processes: ids of the processes.
        written: True for only the files that some process maps shared and writable, which excludes weights and
            libraries stored there.
    """
    found = set()
    for pid in processes:
        for line in os.fsdecode(_read(f"/proc/{pid}/maps")).split("\n"):
            at = line.find(_SHARED)
            if at >= 0 and (not written or line.split(maxsplit=2)[1].startswith("rw-s")):
                found.add(line[at:])
    return {path for path in found if not path.endswith(" (deleted)")}


def named(processes: Iterable[int]) -> set[str]:
    """Return the paths of /dev/shm files whose names contain an id of these processes, as loky's semaphores do."""
    names = _shared()
    return {f"{_SHARED}{name}" for pid in processes for name in names if f"-{pid}-" in name}


def _own_files(processes: Collection[int], before: Collection[str]) -> set[str]:
    """Return the paths of an engine's shared memory files: no files in subfolders or of a name in `before`."""
    found = {path[len(_SHARED) :] for path in mapped(processes, written=True) | named(processes)}
    return {f"{_SHARED}{name}" for name in found if "/" not in name and name not in before}


def _shared() -> frozenset[str]:
    """Return the file names in /dev/shm."""
    return frozenset(os.listdir(_SHARED) if os.path.isdir(_SHARED) else [])  # noqa: PTH112, PTH208


def _listening(pid: int) -> set[str]:
    """Return the paths of vLLM's Unix sockets that the process `pid` has bound."""
    inodes = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
    found = set()
    for line in _read("/proc/net/unix").decode(errors="replace").splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[6] in inodes and _UUID.fullmatch(Path(fields[7]).name):
            found.add(fields[7])
    return found


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:  # it has ended, or it is another user's
        return b""


def _forget(path: str) -> None:
    """Tell Python's resource tracker, which removes leftover files at exit, that this file is removed."""
    name = Path(path).name
    kind, known = ("semaphore", name[len("sem.") :]) if name.startswith("sem.") else ("shared_memory", name)
    if ":" in known:  # the tracker's protocol cannot name it
        return
    resource_tracker.register(f"/{known}", kind)  # otherwise unregistering an unregistered name is an error
    resource_tracker.unregister(f"/{known}", kind)


def _short_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) + len("/steercap-12345678") <= LONGEST_FOLDER else "/tmp"  # noqa: S108


def _client_ended(client: int, pipe: int) -> bytes:
    """Wait until the client process ends or closes the pipe.

    Returns:
        All messages that the client has written to the pipe.
    """
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    with contextlib.suppress(OSError):  # it has ended, or the kernel is older than 5.3 and the pipe alone must do
        # A child that the user forked may hold the pipe: the client's own end is told by its process.
        poll.register(os.pidfd_open(client), select.POLLIN)
    said = b""
    while os.getppid() == client:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if pipe in ready:
            some = os.read(pipe, 1 << 16)
            said += some
            if not some or said.endswith(_ENDED):  # a child that the user forked may hold the pipe open
                return said
    # What it said just before it was killed may still be in the pipe, all of it if this process was slow to start.
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):  # by a fork that holds the pipe
        while some := os.read(pipe, 1 << 16):
            said += some
    return said


def main() -> None:
    """Wait for the client's end, then reap the engine unless it was closed; `python reaper.py CLIENT MARK FOLDER`."""
    client, mark, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    said = _client_ended(client, sys.stdin.fileno())
    if said.endswith(_ENDED):
        return
    whole, _, _ = said.rpartition(b"\n")  # killed while it wrote, it may have left half a line
    lines = [line.split(" ", 1) for line in os.fsdecode(whole).split("\n") if line]
    roots = dict(rest.split() for kind, rest in lines if kind == "root")
    shared = {path for kind, path in lines if kind == "shared"}
    before = None
    with contextlib.suppress(OSError):
        before = frozenset(map(os.fsdecode, (Path(folder) / _BEFORE).read_bytes().split(b"\0")))
    reap(mark, {int(pid): began for pid, began in roots.items()}, before, shared, patience=10 * PATIENCE)
    shutil.rmtree(folder, ignore_errors=True)
    for path in {path for kind, path in lines if kind == "file" and os.getppid() != client}:  # a client closes its own
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


if __name__ == "__main__":
    main()
