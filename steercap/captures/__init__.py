"""Captured rows on the client: handles, their rows, computations on them, and their files."""

from steercap.captures.tuned_lens import TunedLens

__all__ = ["TunedLens"]
