"""Site `z`: the output of each attention head, before the output projection, [heads, head_dim]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steercap.architectures.families.base import located
from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Visit, input_tap, part_of, visit_read

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class Z(Site):
    """Tap on the input of the family's output projection; each tensor-parallel rank has some of the heads."""

    def known(self, family: Family) -> bool:
        return bool(family.attn_proj)

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        width, shards = part_of(layer.get_submodule(located(layer, family.attn_proj)))
        head_dim = sizes.head_dim
        if family.attention:
            attention: Any = layer.get_submodule(located(layer, family.attention))
            head_dim = int(attention.head_size_v)  # layers of some models differ in it
        return RowShape((width // head_dim, head_dim), shards)

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return input_tap(layer, family.attn_proj, "z", tap)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_read(layer.get_submodule(located(layer, family.attn_proj)), visit)


MEMBER = Z()
