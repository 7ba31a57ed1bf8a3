"""Site `final_norm`: the output of the final norm, from which the model makes its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steercap.architectures.families.base import located
from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Visit, output_tap, visit_output

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class FinalNorm(Site):
    """Tap on the output of the norm after the last layer; it exists once in a model, on the last pipeline stage."""

    of_model = -1
    within = "decoder"

    def known(self, family: Family) -> bool:
        return bool(family.norm) and not family.norms_embeddings

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        located(layer, family.norm)
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return output_tap(layer, family.norm, "final_norm", tap)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_output(layer.get_submodule(located(layer, family.norm)), visit)


MEMBER = FinalNorm()
