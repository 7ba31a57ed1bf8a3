"""Machines for tests: namespaces of this one that share neither network, processes, memory nor temporary files.

Each has an address of its own behind a bridge, an own /proc, /dev/shm and /tmp. Files elsewhere are shared, as on a
cluster's file system. It needs root and iproute2.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

#: This checkout, which all have, also where it is in /tmp.
HERE = Path(__file__).parent.parent
NETWORK = "10.77.0"
BRIDGE = "steercap0"
#: What each does before anything else runs on it.
_BOOT = """
hostname {name}
mount -t tmpfs tmpfs /dev/shm
cd {here}
mount -t tmpfs tmpfs /tmp
if ! test -e {here}; then mkdir -p {here}; mount --no-canonicalize --bind . {here}; cd {here}; fi
mkdir /tmp/etc
printf '127.0.0.1 localhost\\n{address} {name}\\n' > /tmp/etc/hosts
mount --bind /tmp/etc/hosts /etc/hosts
exec "$@"
"""


def can_be_had() -> bool:
    """Whether this process may make namespaces and links between them."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        return False
    tried = subprocess.run(["unshare", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "true"], check=False)
    return tried.returncode == 0


@dataclass(frozen=True)
class Machine:
    """One, by its name and address."""

    name: str
    address: str

    def start(self, *command: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Run a command on it, as its first process: what that one started ends with it."""
        boot = _BOOT.format(name=self.name, address=self.address, here=shlex.quote(str(HERE)))
        apart = ["--pid", "--mount", "--ipc", "--uts", "--fork", "--mount-proc", "--kill-child"]
        with log.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, "unshare", *apart, "sh", "-ec", boot, "sh", *command],
                env={**env},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextmanager
def machines(*names: str) -> Iterator[list[Machine]]:
    """So many machines behind one bridge, on which this process has address `NETWORK`.1."""
    with ExitStack() as stack:
        _link(stack, BRIDGE, "type", "bridge")
        _ip("address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        found = []
        for number, name in enumerate(names, 2):
            address = f"{NETWORK}.{number}"
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _link(stack, f"{name}-out", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{name}-out", "master", BRIDGE, "up")
            for command in (
                ("address", "add", f"{address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
                ("route", "add", "default", "via", f"{NETWORK}.1"),
            ):
                _ip("-n", name, *command)
            found.append(Machine(name, address))
        yield found


def _link(stack: ExitStack, name: str, *kind: str) -> None:
    _ip("link", "add", name, *kind)
    stack.callback(subprocess.run, ["ip", "link", "del", name], check=False, capture_output=True)


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


#: Of Ray, on a small machine: nothing is reported, nobody looks at a page, and no workers are started before need.
RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # it would leave a token in the user's home, and nobody else is on the bridge
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",
    "RAY_num_prestart_python_workers": "0",
    "RAY_worker_register_timeout_seconds": "180",
}


#: Where Ray keeps the address of a cluster that was started here, for those who name none; `ray stop` removes it.
LAST_STARTED = Path("/tmp/ray/ray_current_cluster")


@contextmanager
def ray_node(folder: Path, env: Mapping[str, str], *arguments: str, machine: Machine | None = None) -> Iterator[str]:
    """A node of Ray's, here or on another machine, until this ends."""
    name = "head" if machine is None else machine.name
    log = folder / f"{name}.log"
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
    command += [f"--object-store-memory={80 << 20}", *arguments]
    if machine is None:
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, env={**env}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
    else:
        process = machine.start(*command, env=env, log=log)
    try:
        _started(process, log)
        yield name
    finally:
        end(process, by=signal.SIGTERM if machine is None else signal.SIGKILL)
        if machine is None:
            LAST_STARTED.unlink(missing_ok=True)


def _started(process: subprocess.Popen[bytes], log: Path, patience: float = 120.0) -> None:
    deadline = time.monotonic() + patience
    while "Ray runtime started" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Ray did not start: {log.read_text()[-4000:]}")
        time.sleep(0.2)


def end(process: subprocess.Popen[bytes], *, by: signal.Signals = signal.SIGTERM) -> None:
    """End a process and what it has started; a machine dies at once."""
    process.send_signal(by)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
