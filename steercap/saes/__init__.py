"""Sparse autoencoders and transcoders: their files, what they read in rows, and what their features write."""

from steercap.saes.features import Features
from steercap.saes.sae import SAE

__all__ = ["SAE", "Features"]
