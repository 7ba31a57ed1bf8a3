"""Site `router`: the router's logits of all experts, float32, before any softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steercap.architectures.families.base import located
from steercap.architectures.sites.base import Removable, RowShape, Site, Sizes, Tap, Visit, output_tap

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class Router(Site):
    """Tap on the output of the family's gate, which every rank has in full."""

    def known(self, family: Family) -> bool:
        return bool(family.router)

    def exists(self, family: Family, config: Any, layer: int) -> bool:
        return self.known(family) and (family.varied or family.is_sparse(config, layer))

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        gate: Any = layer.get_submodule(located(layer, family.router))
        return RowShape((int(gate.output_size),), dtype="float32")

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return output_tap(layer, family.router, "router", tap)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> Removable:
        """Visit the logits in transformers' gate.

        They are the product that the gate computes, before it chooses experts by rules of its own.
        """
        return _Products(layer.get_submodule(located(layer, family.router)), visit)


class _Products:
    """Hooks that visit the results of linear functions within a module."""

    def __init__(self, module: nn.Module, visit: Visit) -> None:
        import torch
        from torch.overrides import TorchFunctionMode

        class Product(TorchFunctionMode):
            def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
                found = function(*args, **(kwargs or {}))
                if function is torch.nn.functional.linear:
                    visit(found)
                return found

        def enter(*_: Any) -> None:
            product.__enter__()

        def leave(*_: Any) -> None:
            product.__exit__(None, None, None)

        product: Any = Product()
        self._handles = (module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


MEMBER = Router()
