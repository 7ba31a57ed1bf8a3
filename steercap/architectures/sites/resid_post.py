"""Site `resid_post`: the residual stream after a layer.

It is transformers' `hidden_states[layer + 1]`, before any final norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Visit, output_tap, visit_output

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class ResidPost(Site):
    """Tap on the layer's output, with the deferred residual added where the family has one."""

    def known(self, family: Family) -> bool:
        return not family.mhc

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return output_tap(layer, "", "resid_post", tap, family.residual_output)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_output(layer, visit)


MEMBER = ResidPost()
