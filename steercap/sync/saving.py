"""Captures in a folder, of handles that are not awaited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steercap.captures import saving as _there
from steercap.captures.manifest import Manifest
from steercap.sync.bridge import unwrapped

__all__ = ["save_run"]


def save_run(folder: str | Path, handles: Any) -> Manifest:
    """`steercap.save_run`, of handles of `steercap.sync`.

    Args:
        folder, handles: as there.

    Returns:
        The manifest. Its handles are fetched, so nothing of them is to be awaited.

    Raises:
        The errors of `steercap.save_run`.
    """
    return _there.save_run(folder, unwrapped(handles))
