"""The residual stream as a layer receives it: transformers' `hidden_states[layer]`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from steercap.families.base import rows_of
from steercap.sites.base import RowShape, Site, Sizes, Tap, Visit, visit_input

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.families.base import Family


class ResidPre(Site):
    """Tap on the layer's input, the deferred residual added where the family has one and it is already there."""

    before_keys: ClassVar[bool] = True

    def known(self, family: Family) -> bool:
        return True

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        from steercap.kernels.tap import tap as operator

        buffer = "steercap_resid_pre"
        layer.register_buffer(buffer, tap.point, persistent=False)
        names = list(inspect.signature(layer.forward).parameters)
        hidden_name, residual_name = family.hidden_input, family.residual_input
        hidden_at = names.index(hidden_name)
        residual_at = names.index(residual_name) if residual_name else len(names)
        kind = tap.kind

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[hidden_at] if hidden_at < len(args) else kwargs[hidden_name]
            residual = args[residual_at] if residual_at < len(args) else kwargs.get(residual_name)
            operator(rows_of(hidden), None if residual is None else rows_of(residual), getattr(module, buffer), kind)

        return layer.register_forward_pre_hook(hook, with_kwargs=True)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_input(layer, visit)


MEMBER = ResidPre()
