"""Shipped for tests, of steercap and of what is built on it: small real models, and transformers as the reference."""

from steercap.testing.parity import Parity, compare_rows
from steercap.testing.reference import Reference
from steercap.testing.smollm2 import smollm2
from steercap.testing.tiny import tiny_checkpoint

__all__ = ["Parity", "Reference", "compare_rows", "smollm2", "tiny_checkpoint"]
