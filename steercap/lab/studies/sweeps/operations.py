"""Operations that a sweep can scale, each an edit of a vector and a scale; and random control vectors for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

from steercap.core.registry import Registry
from steercap.steering.edits import Edit
from steercap.steering.edits.add import Add
from steercap.steering.edits.projecting import Ablate, Cap, SetProjection
from steercap.steering.layers import LayerVectors


@dataclass(frozen=True)
class Operation:
    """Operation of a sweep, such as addition, and what its scale is.

    Where the scale is a projection, the vector's length does not count, so random vectors of the same norm are random
    directions: the change of a row depends on the row.

    Args:
        edit: function of a vector, [hidden] in the units of the stream, and a scale, which returns the edit. Further
            arguments are the edit's `layer`, `site` and `tokens` and, if the operation has it, `relative`.
        axis: axis label of the scale.
        neutral: scale at which it changes nothing; None if there is none.
        relative: True if its scale can be a fraction of the row's norm.
        signed: True if minus the scale has the opposite effect, so that there is a reversed control. Another sign of a
            projection is another value, not the reverse.
    """

    edit: Callable[..., Edit]
    axis: str
    neutral: float | None
    relative: bool = False
    signed: bool = True


OPERATIONS: Final[Registry[Operation]] = Registry(
    "operation",
    {
        # The share removed is 1 - keep: 1 removes the projection, 0 nothing, and -1 doubles it.
        "ablate": Operation(
            lambda vector, scale, **scope: Ablate(vector, keep=1 - scale, **scope),
            "share of the projection taken out",
            neutral=0.0,
        ),
        "add": Operation(Add, "times the vector", neutral=0.0, relative=True),
        "cap": Operation(
            lambda vector, scale, **scope: Cap(vector, high=scale, **scope),
            "greatest projection",
            neutral=None,
            signed=False,
        ),
        "set_projection": Operation(SetProjection, "projection", neutral=None, signed=False),
    },
)


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
