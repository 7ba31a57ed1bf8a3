"""Demonstration, and the small real model that it, the notebooks and the pages use."""

from steercap.lab.demo.checkpoint import smollm2

__all__ = ["smollm2"]
