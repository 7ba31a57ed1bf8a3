"""Control vectors: random ones with the norms of those they are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from steercap.steering.layers import LayerVectors


def random_like(vectors: LayerVectors, index: int, seed: int, layers: Iterable[int] | None = None) -> LayerVectors:
    """Draw a random vector for each layer, with the norm of the given one.

    Directions are uniform on the sphere. Each depends on the seed, the name of the vectors, the index and the layer
    alone, so it is the same whatever else is swept.

    Args:
        vectors: vectors to match.
        index: index of the random control, from 0.
        seed: seed of the draw.
        layers: some of the layers; all by default.
    """
    matched = {
        layer: _normal(f"{seed}/{vectors.name}/{index}/{layer}", vectors.width).double()
        for layer in (vectors if layers is None else layers)
    }
    sized = {layer: drawn * (vectors[layer].double().norm() / drawn.norm()) for layer, drawn in matched.items()}
    return LayerVectors(sized, name=f"{vectors.name}-random-{index:02}", model=vectors.model, site=vectors.site)


def derived_seed(text: str) -> int:
    """Derive a 63-bit seed from a text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def _normal(text: str, width: int) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(derived_seed(text)))
