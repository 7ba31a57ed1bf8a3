"""Base of the sites of several residual streams: the operators that mix streams, and taps on them.

DeepSeek-V4 has streams [n, streams, hidden] (manifold-constrained hyper-connections, arXiv:2512.24880). Before each
block an operator collapses the streams to the block's input, and returns the coefficients by which the block's output
is added to the streams. Where vLLM fuses operators, that before a block also adds the output of the previous block, so
that the streams exist as a tensor only at its end. Operators are modules on CPU. On CUDA they are functions in the
layers' file, and each tapped layer gets modules in their place.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Visit
from steercap.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch
    from torch import nn

    from steercap.architectures.families.base import Family
    from steercap.architectures.sites.base import Removable

#: Names of operators that read the streams, and return post mix, residual mix and the block's input.
PRE: Final = ("mhc_pre", "mhc_pre_tilelang")
#: Names of operators that compute the streams first, from the previous block or embeddings, and return them first.
FUSED: Final = ("mhc_fused_post_pre", "mhc_fused_post_pre_tilelang", "mhc_pre_broadcast_tilelang")
#: Names of the operator that collapses the streams after the last layer.
HEAD: Final = ("hc_head_op", "hc_head_fused_kernel_tilelang")


@cache
def _function() -> type[nn.Module]:
    """Return a module class that calls a function, so that the call can have hooks; PyTorch is imported here."""
    from torch import nn

    class Function(nn.Module):
        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__()
            self.function = function

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs)

    return Function


@dataclass(frozen=True)
class Operator:
    """Operator on streams that a module's `forward` may call.

    Args:
        module: the operator as a module.
        arguments: names of the operator's parameters, in order.
        makes: True if the operator computes the streams and returns them first, as those of `FUSED` do.
    """

    module: nn.Module
    arguments: Sequence[str]
    makes: bool

    def named_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of the operator, by name."""
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}


def operators(module: nn.Module, names: Sequence[str]) -> list[Operator]:
    """Return the operators with these names that a module's `forward` may call.

    Raises:
        UnsupportedModel: it calls no operator of these names.
    """
    children = dict(module.named_children())
    called: Mapping[str, Any] = {name: one for name, one in _functions(module).items() if name in names} or {
        name: children[name] for name in names if name in children
    }
    if not called:
        raise UnsupportedModel(f"forward of {type(module).__name__} calls neither {' nor '.join(names)}")
    # vLLM's dispatch by platform hides what modules call their arguments.
    written = {name: getattr(one, "forward_native", None) or one.function for name, one in called.items()}
    return [
        Operator(one, tuple(inspect.signature(written[name]).parameters), name in FUSED) for name, one in called.items()
    ]


def _functions(module: nn.Module) -> dict[str, nn.Module]:
    """Wrap the operators that a module's `forward` calls as functions in modules, and return them by name.

    The module then gets a `forward` of the same code, with a copy of its globals in which these functions are replaced.
    """
    written: Any = getattr(module.forward, "__func__", None)
    if written is None:
        return {}
    scope = written.__globals__
    called = [name for name in (*PRE, *FUSED, *HEAD) if name in scope and name in written.__code__.co_names]
    if any(not isinstance(scope[name], _function()) for name in called):
        scope = {**scope, **{name: _function()(scope[name]) for name in called}}
        again = FunctionType(written.__code__, scope, written.__name__, written.__defaults__, written.__closure__)
        again.__kwdefaults__ = written.__kwdefaults__
        module.forward = MethodType(again, module)
    return {name: scope[name] for name in called}


@dataclass(frozen=True)
class Hooks:
    """Handle of hooks on several operators."""

    handles: Sequence[Removable]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


def tapped(operator: nn.Module, name: str, tap: Tap) -> Callable[[torch.Tensor], None]:
    """Register a tap's buffer on an operator; return a function that taps a tensor [n, *row] of the site `name`."""
    from steercap.kernels.tap import tap as call

    buffer = f"steercap_{name}"
    operator.register_buffer(buffer, tap.point, persistent=False)
    kind = tap.kind

    def see(tensor: torch.Tensor) -> None:
        call(tensor.view(-1, prod(tensor.shape[1:])), None, getattr(operator, buffer), kind)

    return see


class OfBlock(Site):
    """Base of the sites of the operator before one of a layer's blocks.

    Args:
        name: name of the site.
        block: "attn" or "ffn", as in the names of the operator's weights.
    """

    def __init__(self, name: str, block: str) -> None:
        self.name = name
        self.weights = f"hc_{block}_fn"
        #: Name of the transformers module that corresponds to the operator.
        self.module = f"{block}_hc"

    def known(self, family: Family) -> bool:
        return family.mhc

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        operators(layer, PRE)
        operators(layer, FUSED)
        getattr(layer, self.weights)
        streams: Any = layer.hc_mult
        return self.shape(int(streams), sizes)

    @abstractmethod
    def shape(self, streams: int, sizes: Sizes) -> RowShape:
        """Return the shape of a row, given the number of streams."""

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> Removable:
        pre = operators(layer, PRE)
        called = (*pre, *operators(layer, FUSED))
        weights: Any = getattr(layer, self.weights)
        return Hooks([self.hook(one, pre[0], weights, tapped(one.module, self.name, tap)) for one in called])

    @abstractmethod
    def hook(
        self, operator: Operator, pre: Operator, weights: torch.Tensor, see: Callable[[torch.Tensor], None]
    ) -> Removable:
        """Tap an operator in the calls for this site's block, since the layer calls one operator for both blocks.

        Args:
            operator: operator to tap.
            pre: the layer's operator that reads the streams.
            weights: the operator's argument `fn` in calls for this site's block.
            see: function that taps a tensor [n, *row].
        """


class Streams(OfBlock):
    """Site of the streams [streams, hidden] before a block, which the block's operator reads."""

    #: True, since taps of the coefficients, which are computed from edited streams, run afterwards.
    first: ClassVar[bool] = True

    def shape(self, streams: int, sizes: Sizes) -> RowShape:
        return RowShape((streams, sizes.hidden))

    def hook(
        self, operator: Operator, pre: Operator, weights: torch.Tensor, see: Callable[[torch.Tensor], None]
    ) -> Removable:
        """Tap the streams before an operator that reads them, or after one that computes them.

        In the second case the operator's other results are recomputed for edited rows; the rest stay bit-identical.
        """

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            arguments = operator.named_arguments(args, kwargs)
            if arguments["fn"] is weights:
                see(arguments["residual"])

        def after(_module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
            arguments = operator.named_arguments(args, kwargs)
            return _again(pre, arguments, outputs, see) if arguments["fn"] is weights else outputs

        if operator.makes:
            return operator.module.register_forward_hook(after, with_kwargs=True)
        return operator.module.register_forward_pre_hook(before, with_kwargs=True)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> Removable:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            visit(args[0])

        return layer.get_submodule(self.module).register_forward_pre_hook(hook)


def _again(
    pre: Operator, arguments: Mapping[str, Any], outputs: Sequence[Any], see: Callable[[torch.Tensor], None]
) -> tuple[Any, ...]:
    """Tap an operator's streams, and return its results, recomputed for the rows that an edit changed.

    Args:
        pre: operator that reads the streams.
        arguments: the operator's arguments, by name.
        outputs: the operator's results, the streams first.
        see: function that taps the streams.
    """
    streams, *before = outputs
    clean = streams.clone()
    see(streams)
    changed = (streams != clean).flatten(1).any(1)
    same = {name: arguments[name] for name in pre.arguments if name in arguments}
    renewed = pre.module.forward(**{**same, "residual": streams})
    pairs = zip(renewed, before, strict=True)
    return streams, *(new.where(changed.view(-1, *[1] * (old.dim() - 1)), old) for new, old in pairs)


class Coefficients(OfBlock):
    """Site of the coefficients that mix streams after a block; read-only, since kernels have copies of them.

    Args:
        name, block: see `OfBlock`.
        output: index among the operator's results, without the streams.
        axes: number of axes of a row, each of length `streams`.
    """

    writable: ClassVar[bool] = False

    def __init__(self, name: str, block: str, *, output: int, axes: int) -> None:
        super().__init__(name, block)
        self.output = output
        self.axes = axes

    def shape(self, streams: int, sizes: Sizes) -> RowShape:
        return RowShape((streams,) * self.axes, dtype="float32")

    def hook(
        self,
        operator: Operator,
        pre: Operator,
        weights: torch.Tensor,
        see: Callable[[torch.Tensor], None],
    ) -> Removable:
        at = self.output + operator.makes

        def after(_module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            if operator.named_arguments(args, kwargs)["fn"] is weights:
                see(outputs[at])

        return operator.module.register_forward_hook(after, with_kwargs=True)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> Removable:
        def hook(_module: nn.Module, _args: Any, made: Any) -> None:
            visit(made[self.output])

        return layer.get_submodule(self.module).register_forward_hook(hook)


def collapsed(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return last-layer streams collapsed as the model's head operator does, [n, hidden], bypassing its tap.

    Args:
        model: module that contains the layers.
        rows: streams, [n, streams × hidden].
    """
    (head,) = operators(model, HEAD)
    streams = rows.view(len(rows), model.hc_mult, -1)
    weights = model.hc_head_fn, model.hc_head_scale, model.hc_head_base
    made: torch.Tensor = head.module.forward(streams, *weights, model.rms_norm_eps, model.hc_eps)
    return made
