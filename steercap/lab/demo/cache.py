"""Cache of checkpoints made by steercap; each is made only once, even by several processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from steercap.engine.environment import CACHE

#: Marker file, written last: a folder without it is unfinished.
DONE = ".complete"


def cache_root() -> Path:
    """Return `$STEERCAP_CACHE`, or `steercap` in the user's cache folder."""
    root = os.environ.get(CACHE)
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "steercap"


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `name` in the cache, filled by `make` unless it exists.

    Args:
        name: name of the folder; it must change whenever what `make` writes does.
        make: function that fills an empty folder.
    """
    folder = cache_root() / name
    if (folder / DONE).exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / DONE).exists():
            scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}."))
            try:
                make(scratch)
                (scratch / DONE).touch()
                shutil.rmtree(folder, ignore_errors=True)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder
