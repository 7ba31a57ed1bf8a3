"""Site `resid_pre`: the residual stream before a layer, transformers' `hidden_states[layer]`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Terms, Visit, stream_tap, visit_input

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class ResidPre(Site):
    """Tap on the layer's input, with the deferred residual added where the family has one and it is passed."""

    name: ClassVar[str] = "resid_pre"
    before_keys: ClassVar[bool] = True

    def known(self, family: Family) -> bool:
        return not family.mhc

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return stream_tap(layer, self.name, tap, taken_by(layer, family))

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_input(layer, visit)


def taken_by(layer: nn.Module, family: Family) -> Terms:
    """Return a function from the arguments of one of vLLM's decoder layers to the stream and its deferred part."""
    names = list(inspect.signature(layer.forward).parameters)
    hidden_name, residual_name = family.hidden_input, family.residual_input
    hidden_at = names.index(hidden_name)
    residual_at = names.index(residual_name) if residual_name else len(names)

    def terms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden = args[hidden_at] if hidden_at < len(args) else kwargs[hidden_name]
        return hidden, args[residual_at] if residual_at < len(args) else kwargs.get(residual_name)

    return terms


MEMBER = ResidPre()
