"""An S3 server: Ceph's object gateway (radosgw) over a monitor and one OSD of this machine, as Debian packages them.

apt-get install --no-install-recommends ceph-mon ceph-osd ceph-common radosgw
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

KEY, SECRET = "steercap", "steercap-steercap"
_CONF = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon}/0]
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
mon data avail warn = 1
osd objectstore = memstore
memstore device bytes = 4294967296
osd op queue = wpq
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
log to stderr = false
err to stderr = true
pid file = {folder}/$name.pid
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
[client.admin]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw dns name = localhost
rgw thread pool size = 32
"""


def can_be_had() -> bool:
    """Whether Ceph is installed."""
    return all(map(shutil.which, ("ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool")))


@dataclass
class Ceph:
    """A running cluster of one.

    Args:
        folder: of all its files.
        port: of the gateway.
    """

    folder: Path
    port: int
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Of the gateway, for clients of S3."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, object]:
        """What s3fs must know."""
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.url}

    def serve(self) -> None:
        """Start the gateway; returns when it answers."""
        self.start("radosgw", "-f", "-n", "client.admin")
        deadline = time.monotonic() + 120
        while not _answers(self.url):
            if time.monotonic() > deadline or self.running["radosgw"].poll() is not None:
                raise RuntimeError(f"radosgw does not answer: {(self.folder / 'radosgw.out').read_text()[-2000:]}")
            time.sleep(0.1)

    def kill(self, name: str = "radosgw") -> None:
        """Kill one of its processes, the gateway by default."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def start(self, *command: str) -> None:
        """Start a process of the cluster."""
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            self.running[command[0]] = subprocess.Popen([*command, *self.conf], stdout=log, stderr=log)

    def run(self, *command: str) -> str:
        """Run one of its tools."""
        done = subprocess.run(
            [*command, *self.conf], capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        return done.stdout

    @property
    def conf(self) -> tuple[str, str]:
        """The argument of every command."""
        return ("-c", str(self.folder / "ceph.conf"))


@contextmanager
def ceph(folder: Path) -> Iterator[Ceph]:
    """A cluster with a gateway, and a user who may make buckets."""
    mon, port = _free_port(), _free_port()
    fsid = str(uuid4())
    found = Ceph(folder, port)
    (folder / "mon").mkdir()
    (folder / "osd").mkdir()
    (folder / "ceph.conf").write_text(_CONF.format(fsid=fsid, mon=mon, port=port, folder=folder))
    address = f"[v2:127.0.0.1:{mon}/0]"
    try:
        found.run("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, f"{folder}/monmap")
        found.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{folder}/monmap")
        found.start("ceph-mon", "-f", "-i", "a")
        uuid = str(uuid4())
        found.run("ceph", "osd", "new", uuid)
        found.run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", uuid)
        found.start("ceph-osd", "-f", "-i", "0")
        user = ("--uid=steercap", "--display-name=steercap", f"--access-key={KEY}", f"--secret={SECRET}")
        found.run("radosgw-admin", "user", "create", *user)
        found.serve()
        yield found
    finally:
        for name in list(found.running):
            found.kill(name)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
