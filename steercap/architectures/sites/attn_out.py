"""Site `attn_out`: the term that a layer's attention block adds to the residual stream, after any norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steercap.architectures.families.base import located
from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Visit, output_tap, visit_output

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class AttnOut(Site):
    """Tap on the output of the last module of the family's attention block."""

    def known(self, family: Family) -> bool:
        return bool(family.attn_out)

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        located(layer, family.attn_out)  # some layers may lack it
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return output_tap(layer, family.attn_out, "attn_out", tap)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_output(layer.get_submodule(located(layer, family.attn_out)), visit)


MEMBER = AttnOut()
