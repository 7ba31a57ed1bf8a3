"""What a layer's feed-forward block adds to the residual stream, any norm after it included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steercap.sites.base import Site, output_hook

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.families.base import Family


class MlpOut(Site):
    """Tap on the output of the family's last module of the feed-forward block."""

    def attach(self, layer: nn.Module, family: Family, point: torch.Tensor) -> RemovableHandle:
        return output_hook(layer, family.mlp_out, "mlp_out", point, None)


MEMBER = MlpOut()
