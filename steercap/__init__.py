"""steercap: read what a language model computes while vLLM serves it.

Importing it loads neither vLLM nor torch; the public names load what they need when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steercap.config import Settings
    from steercap.core.receipt import Receipt
    from steercap.core.spec import CaptureSpec, Point
    from steercap.handle import CaptureHandle
    from steercap.job import Chunk
    from steercap.model import SteerModel

__version__ = "0.1.0"

_HOMES = {
    "CaptureHandle": "steercap.handle",
    "CaptureSpec": "steercap.core.spec",
    "Chunk": "steercap.job",
    "Point": "steercap.core.spec",
    "Receipt": "steercap.core.receipt",
    "Settings": "steercap.config",
    "SteerModel": "steercap.model",
}

__all__ = ["CaptureHandle", "CaptureSpec", "Chunk", "Point", "Receipt", "Settings", "SteerModel"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'steercap' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
