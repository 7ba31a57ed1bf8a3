"""Sparse autoencoders and transcoders: their files, the features that they read in rows, and edits of features."""

from steercap.saes.encoder import Features
from steercap.saes.sae import SAE

__all__ = ["SAE", "Features"]
