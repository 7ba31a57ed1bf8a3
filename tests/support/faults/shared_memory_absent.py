"""There is no /dev/shm."""

from __future__ import annotations

import time
from pathlib import Path

from steercap.errors import ModelNotLoaded
from support.faults.base import Fault, Outcome, for_root, opened, said

#: A /dev of its own, with what programs need of it: to remove /dev/shm itself would remove it for all.
_WITHOUT = """
d=$(mktemp -d) && mount -t tmpfs -o mode=755 tmpfs $d
for name in null zero full random urandom tty; do : > $d/$name; mount --bind /dev/$name $d/$name; done
ln -s /proc/self/fd $d/fd
mount --rbind $d /dev
umount $d/null $d/zero $d/full $d/random $d/urandom $d/tty; umount $d; rmdir $d
exec "$@"
"""


async def inject(_folder: Path) -> list[Outcome]:
    """Start an engine where there is no /dev/shm."""
    assert not Path("/dev/shm").exists()
    began = time.monotonic()
    try:
        async with opened():
            raise AssertionError("an engine started")
    except ModelNotLoaded as error:
        assert "/dev/shm" in str(error), repr(error)
        return [Outcome("the start, of which most is importing vLLM", said(error), time.monotonic() - began)]


MEMBER = Fault(
    title="/dev/shm absent",
    how="a mount namespace with a /dev that has none",
    must="`ModelNotLoaded` that names it, before any process is started",
    inject=inject,
    missing=for_root,
    under=("unshare", "--mount", "sh", "-c", _WITHOUT, "sh"),
)
