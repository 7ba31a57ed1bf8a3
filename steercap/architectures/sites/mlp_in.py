"""Site `mlp_in`: the input of a layer's feed-forward block, normed where the norm comes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steercap.architectures.families.base import located
from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Visit, read_tap, visit_read

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class MlpIn(Site):
    """Tap on the input of the family's feed-forward block; edits reach no other module that reads the same tensor."""

    def known(self, family: Family) -> bool:
        return bool(family.mlp_input)

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        located(layer, family.mlp_out)  # some layers may lack the block
        located(layer, family.mlp_input)
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return read_tap(layer, family.mlp_input, "mlp_in", tap)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_read(layer.get_submodule(located(layer, family.mlp_input)), visit)


MEMBER = MlpIn()
