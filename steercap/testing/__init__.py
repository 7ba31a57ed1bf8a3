"""Support for tests: tiny random models, and transformers as the reference of rows and edits."""

from steercap.testing.reference import Parity, Reference, compare_rows
from steercap.testing.tiny import tiny_checkpoint

__all__ = ["Parity", "Reference", "compare_rows", "tiny_checkpoint"]
