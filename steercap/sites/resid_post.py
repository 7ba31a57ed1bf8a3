"""The residual stream as a layer leaves it: transformers' `hidden_states[layer + 1]`, before any final norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steercap.sites.base import Site, output_hook

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.families.base import Family


class ResidPost(Site):
    """Tap on the layer's output, the deferred residual added where the family has one."""

    def attach(self, layer: nn.Module, family: Family, point: torch.Tensor) -> RemovableHandle:
        return output_hook(layer, "", "resid_post", point, family.residual_output)


MEMBER = ResidPost()
