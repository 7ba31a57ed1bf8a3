"""/dev/shm is full when an engine starts."""

from __future__ import annotations

from pathlib import Path

from steercap.errors import ModelNotLoaded
from support.faults.base import Fault, Outcome, for_root, opened, said

_FULL = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'


async def inject(_folder: Path) -> list[Outcome]:
    """Start an engine where /dev/shm holds 1 MiB, and half of that is taken."""
    Path("/dev/shm/taken").write_bytes(bytes(600 << 10))
    try:
        async with opened():
            raise AssertionError("an engine started")
    except ModelNotLoaded as error:
        assert "/dev/shm" in str(error), repr(error)
        left = {path.name for path in Path("/dev/shm").iterdir()} - {"taken"}
        assert not left, left
        return [Outcome("the start", said(error))]


MEMBER = Fault(
    title="/dev/shm full",
    how="a mount namespace whose /dev/shm is a tmpfs of 1 MiB, more than half of it taken",
    must="the start fails with `ModelNotLoaded` that names /dev/shm, and leaves nothing there (captured rows never lie "
    "there: they are in memory without a name)",
    inject=inject,
    missing=for_root,
    under=("unshare", "--mount", "sh", "-c", _FULL, "sh"),
)
