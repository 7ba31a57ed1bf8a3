"""What is read of a model's rows: handles, their rows, what is computed of them, and their files."""

from steercap.captures.tuned_lens import TunedLens

__all__ = ["TunedLens"]
