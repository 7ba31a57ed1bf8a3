"""Folders compared, and files changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that is not hidden, by its name below the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def flip(path: Path, at: int) -> None:
    """Change a bit of the byte `at` of a file."""
    with path.open("r+b") as file:
        (byte,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ 0x10]), at)
