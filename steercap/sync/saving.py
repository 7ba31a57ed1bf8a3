"""`save_run` for blocking handles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steercap.captures import saving as _there
from steercap.captures.manifest import Manifest
from steercap.sync.bridge import unwrapped

__all__ = ["save_run"]


def save_run(folder: str | Path, handles: Any) -> Manifest:
    """Save captures in a folder: `steercap.save_run` for handles of `steercap.sync`.

    Args:
        folder, handles: as for `steercap.save_run`.

    Returns:
        The manifest. Its handles are fetched, and need no `await`.

    Raises:
        The errors of `steercap.save_run`.
    """
    return _there.save_run(folder, unwrapped(handles))
