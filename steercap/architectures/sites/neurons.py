"""Site `neurons`: the input of the down projection, after the activation and any gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steercap.architectures.families.base import located
from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Visit, input_tap, part_of, visit_read

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class Neurons(Site):
    """Tap on the input of the family's down projection; each tensor-parallel rank has some of the neurons."""

    def known(self, family: Family) -> bool:
        return bool(family.mlp_proj)

    def exists(self, family: Family, config: Any, layer: int) -> bool:
        return self.known(family) and (family.varied or not family.is_sparse(config, layer))

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        width, shards = part_of(layer.get_submodule(located(layer, family.mlp_proj)))
        return RowShape((width,), shards)

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return input_tap(layer, family.mlp_proj, "neurons", tap)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_read(layer.get_submodule(located(layer, family.mlp_proj)), visit)


MEMBER = Neurons()
