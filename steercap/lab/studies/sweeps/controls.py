"""Vectors that ought to do nothing in particular: random ones, as long as those they are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from steercap.steering.layers import LayerVectors


def random_like(vectors: LayerVectors, index: int, seed: int, layers: Iterable[int] | None = None) -> LayerVectors:
    """A random vector for each layer, as long as the one it is compared with.

    Directions are uniform on the sphere. Each depends on the seed, the name of the vectors, the index and the layer
    alone, so it is the same whatever else is swept.

    Args:
        vectors: those to match.
        index: which of the random ones, from 0.
        seed: of the draw.
        layers: some of the layers; all by default.
    """
    matched = {
        layer: _normal(f"{seed}/{vectors.name}/{index}/{layer}", vectors.width).double()
        for layer in (vectors if layers is None else layers)
    }
    sized = {layer: drawn * (vectors[layer].double().norm() / drawn.norm()) for layer, drawn in matched.items()}
    return LayerVectors(sized, name=f"{vectors.name}-random-{index:02}", model=vectors.model, site=vectors.site)


def derived_seed(text: str) -> int:
    """A seed of 63 bits that depends on a text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def _normal(text: str, width: int) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(derived_seed(text)))
