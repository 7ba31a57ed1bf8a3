"""Lock that allows one writer per folder; the kernel releases it when the process ends, for whatever reason."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from steercap.errors import InvalidRequest

#: Lock file; it stays, empty.
FILE: Final = ".lock"


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Lock a local folder against other writers, creating it if needed; a URL is not locked.

    Raises:
        InvalidRequest: another writer holds the lock.
        OSError: the folder cannot be made or written to.
    """
    if "://" in str(folder):
        yield
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = os.open(Path(folder) / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise InvalidRequest(f"another collection writes to {folder}; wait for it, or give another folder") from error
    try:
        yield
    finally:
        os.close(file)
