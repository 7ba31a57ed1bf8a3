"""Sparse autoencoders (SAEs) and transcoders: files, feature activations of rows, and edits of features."""

from steercap.saes.encoder import Features
from steercap.saes.sae import SAE

__all__ = ["SAE", "Features"]
