"""Put the taps into a loaded model.

Number 4 in the life of a request, once for all requests: after the weights are loaded, before vLLM traces the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from steercap.core.spec import Point
from steercap.families.base import Family
from steercap.sites import SITES


def install_taps(
    model: nn.Module, family: Family, armed: Sequence[Point], present: range, device: torch.device
) -> tuple[int, ...]:
    """Attach the taps of the layers in `present`.

    Args:
        model: the loaded model.
        family: how its layers are written.
        armed: every point of the engine, layer by layer.
        present: layers that this pipeline stage holds.
        device: where the model computes.

    Returns:
        Indices into `armed` of the points attached here; a tap carries its place in this tuple.
    """
    layers = model.get_submodule(family.layers)
    local = tuple(index for index, point in enumerate(armed) if point.layer in present)
    for place, index in enumerate(local):
        point = armed[index]
        number = torch.tensor([place], dtype=torch.int32, device=device)
        SITES[point.site].attach(layers.get_submodule(str(point.layer)), family, number)
    return local
