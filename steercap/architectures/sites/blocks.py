"""Sites at a layer's blocks: a block's input, the input of its last projection, its output, and router logits.

The input of attention's output projection, `z`, has the output of each head, [heads, head_dim]; the input of the down
projection, `neurons`, comes after the activation and any gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from steercap.architectures.families.base import located
from steercap.architectures.sites.base import (
    Removable,
    RowShape,
    Site,
    Sizes,
    Tap,
    Visit,
    input_tap,
    of_input,
    output_tap,
    part_of,
    tapping,
    visit_output,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class BlockInput(Site):
    """Site at the input of an attention or feed-forward block; edits reach no other module that reads the tensor.

    Args:
        name: name of the site.
        path: function of a family that returns the path of the module whose input it is.
        added: function of a family that returns the path of the block's last module, to check for the block.
    """

    def __init__(self, name: str, path: Callable[[Family], str], added: Callable[[Family], str]) -> None:
        self._name, self._path, self._added = name, path, added

    def known(self, family: Family) -> bool:
        return bool(self._path(family))

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        located(layer, self._added(family))  # some layers may lack the block
        located(layer, self._path(family))
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return read_tap(layer, self._path(family), self._name, tap)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_read(layer.get_submodule(located(layer, self._path(family))), visit)


class BlockOutput(Site):
    """Site at the output of a block's last module, which is added to the stream; `path` returns the module's path."""

    def __init__(self, name: str, path: Callable[[Family], str]) -> None:
        self._name, self._path = name, path

    def known(self, family: Family) -> bool:
        return bool(self._path(family))

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        located(layer, self._path(family))  # some layers may lack it
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return output_tap(layer, self._path(family), self._name, tap)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_output(layer.get_submodule(located(layer, self._path(family))), visit)


class AttnIn(BlockInput):
    """Site at the input of the attention block, from which keys and values are computed."""

    before_keys: ClassVar[bool] = True


class Z(Site):
    """Site of the attention heads' outputs before their projection; each tensor-parallel rank has some heads."""

    def known(self, family: Family) -> bool:
        return bool(family.attn_proj)

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        path = located(layer, family.attn_proj)
        width, shards = part_of(layer.get_submodule(path))
        head_dim = sizes.head_dim
        if family.attention:  # layers of some models differ in it
            attention: Any = layer.get_submodule(located(layer, family.attention))
            head_dim = int(attention.head_size_v)
        elif not family.derived:  # a derived family's layers all have this one
            block = layer.get_submodule(path.rpartition(".")[0])
            head_dim = int(getattr(block, "v_head_dim", None) or getattr(block, "head_dim", None) or head_dim)
        return RowShape((width // head_dim, head_dim), shards)

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return input_tap(layer, family.attn_proj, "z", tap)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_read(layer.get_submodule(located(layer, family.attn_proj)), visit)


class Neurons(Site):
    """Site at the input of the down projection; each tensor-parallel rank has some of the neurons."""

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


class Router(Site):
    """Site of the router logits, float32 [experts], which every tensor-parallel rank has in full."""

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

        They are the result of the gate's linear function, before the gate chooses experts.
        """
        return _Products(layer.get_submodule(located(layer, family.router)), visit)


class _Products:
    """Hooks that call `visit` with the result of each `torch.nn.functional.linear` within a module."""

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


#: Sites of blocks, by name. Inputs come after a norm before the block; outputs after any norm behind it.
MEMBERS: Final[Mapping[str, Site]] = {
    "attn_in": AttnIn("attn_in", lambda family: family.attention_input, lambda family: family.attn_out),
    "attn_out": BlockOutput("attn_out", lambda family: family.attn_out),
    "mlp_in": BlockInput("mlp_in", lambda family: family.mlp_input, lambda family: family.mlp_out),
    "mlp_out": BlockOutput("mlp_out", lambda family: family.mlp_out),
    "neurons": Neurons(),
    "z": Z(),
    "router": Router(),
}


def read_tap(layer: nn.Module, path: str, name: str, tap: Tap) -> RemovableHandle:
    """Tap a copy of the input of the submodule `path` of `layer`, so that edits reach no other module.

    The tensor may also be the input of a parallel block, or the stream itself. Arguments as for `output_tap`.
    """
    module = layer.get_submodule(located(layer, path))
    return module.register_forward_pre_hook(of_input(module, tapping(module, name, tap)), with_kwargs=True)


def visit_read(module: nn.Module, visit: Visit) -> RemovableHandle:
    """Call `visit` with a copy of a transformers module's input, which the module then reads."""
    return module.register_forward_pre_hook(of_input(module, lambda _, rows: visit(rows)), with_kwargs=True)
