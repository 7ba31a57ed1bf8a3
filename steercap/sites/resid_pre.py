"""The residual stream as a layer receives it: transformers' `hidden_states[layer]`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from steercap.sites.base import Site

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.families.base import Family


class ResidPre(Site):
    """Tap on the layer's input, the deferred residual added where the family has one and it is already there."""

    def attach(self, layer: nn.Module, family: Family, point: torch.Tensor) -> RemovableHandle:
        from steercap.kernels.tap import tap

        buffer = "steercap_resid_pre"
        layer.register_buffer(buffer, point, persistent=False)
        names = list(inspect.signature(layer.forward).parameters)
        hidden_name, residual_name = family.hidden_input, family.residual_input
        hidden_at = names.index(hidden_name)
        residual_at = names.index(residual_name) if residual_name else len(names)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[hidden_at] if hidden_at < len(args) else kwargs[hidden_name]
            residual = args[residual_at] if residual_at < len(args) else kwargs.get(residual_name)
            tap(hidden, residual, getattr(module, buffer))

        return layer.register_forward_pre_hook(hook, with_kwargs=True)


MEMBER = ResidPre()
