"""Site `resid_mid`: the residual stream between a layer's blocks, after attention has been added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from steercap.architectures.families.base import located
from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Visit, first_terms, stream_tap

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class ResidMid(Site):
    """Tap on the stream where the family's first module after the attention block takes it."""

    first: ClassVar[bool] = True

    def known(self, family: Family) -> bool:
        return bool(family.resid_mid)

    def exists(self, family: Family, config: Any, layer: int) -> bool:
        # Layers that norm their sums have no such row: they continue with a norm's output.
        return self.known(family) and (family.varied or family.factor(config) is not None)

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        located(layer, family.resid_mid)
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        module = layer.get_submodule(located(layer, family.resid_mid))
        return stream_tap(module, "resid_mid", tap, first_terms(module))

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        module = layer.get_submodule(located(layer, family.resid_mid))
        terms = first_terms(module)

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            visit(terms(args, kwargs)[0])

        return module.register_forward_pre_hook(hook, with_kwargs=True)


MEMBER = ResidMid()
