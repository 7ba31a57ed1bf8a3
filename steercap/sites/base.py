"""What a site is: a place in a decoder layer, and how its tap gets there.

Taps are PyTorch forward hooks, put in before vLLM first traces the model: torch.compile inlines them, CUDA
graphs record them, and vLLM's own code stays untouched. Each tapped module carries the tap's point as a
buffer, so that layers trace to the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.families.base import Family


class Site(ABC):
    """A place in a layer where rows can be read and changed."""

    @abstractmethod
    def attach(self, layer: nn.Module, family: Family, point: torch.Tensor) -> RemovableHandle:
        """Put the tap of `point` (int32 [1], on the model's device) into one decoder layer."""


def output_hook(layer: nn.Module, path: str, name: str, point: torch.Tensor, stream: int | None) -> RemovableHandle:
    """Tap what the submodule `path` of `layer` returns ("" is the layer itself).

    Args:
        layer: decoder layer.
        path: dotted path of the submodule.
        name: name of the site, which names the buffer.
        point: index of the point, int32 [1].
        stream: index of the residual in the returned tuple, to be added to what is read; None for none.
    """
    from steercap.kernels.tap import tap

    module = layer.get_submodule(path)
    buffer = f"steercap_{name}"
    module.register_buffer(buffer, point, persistent=False)

    def hook(module: nn.Module, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        tap(hidden, None if stream is None else output[stream], getattr(module, buffer))

    return module.register_forward_hook(hook)
