"""What the first layer reads: a token's embedding, with what the model multiplies it by, or adds for its position.

It is transformers' `hidden_states[0]`, and `resid_pre` of layer 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from steercap.sites.base import RowShape, Site, Sizes, Tap, Visit, stream_tap, visit_input
from steercap.sites.resid_pre import taken_by

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.families.base import Family


class Embed(Site):
    """Tap on the first layer's input, before that of `resid_pre`; on the first pipeline stage."""

    of_model = 0
    first: ClassVar[bool] = True
    before_keys: ClassVar[bool] = True

    def known(self, family: Family) -> bool:
        return not family.mhc

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return stream_tap(layer, "embed", tap, taken_by(layer, family))

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_input(layer, visit)


MEMBER = Embed()
