"""Captured rows on the client: handles, fetching, computations on the rows, and their files."""

from typing import TYPE_CHECKING

from steercap.core.extras import lazy_names

if TYPE_CHECKING:
    from steercap.captures.lens import TunedLens

__all__ = ["TunedLens"]

__getattr__, __dir__ = lazy_names(__name__, {"TunedLens": "lens"})
