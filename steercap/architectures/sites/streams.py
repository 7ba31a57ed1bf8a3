"""What the sites of several streams have in common: the operators that mix the streams, and taps on what these take and
give.

DeepSeek-V4 carries [n, streams, hidden] (manifold-constrained hyper-connections, arXiv:2512.24880). Before each block
an operator collapses the streams to what the block reads, and gives the coefficients by which it is added to them
afterwards. Where vLLM fuses, the operator before a block also adds the block before it, so that streams are a tensor
only once they are mixed again. Operators are modules on CPU; on CUDA they are functions of the layers' file, which a
layer then has of its own.
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

#: What layers call the operators that take the streams, and give post mix, residual mix, and what the block reads.
PRE: Final = ("mhc_pre", "mhc_pre_tilelang")
#: The same for those that make the streams, and give them first: of the block before, and of embeddings.
FUSED: Final = ("mhc_fused_post_pre", "mhc_fused_post_pre_tilelang", "mhc_pre_broadcast_tilelang")
#: What the model calls the operator that collapses its last streams.
HEAD: Final = ("hc_head_op", "hc_head_fused_kernel_tilelang")


@cache
def _function() -> type[nn.Module]:
    """A function, as a module that hooks can be put on; PyTorch is looked at when the first is made."""
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
    """An operator that a module's `forward` may call.

    Args:
        module: the operator.
        arguments: what it calls its arguments.
        makes: whether it makes the streams, and gives them first.
    """

    module: nn.Module
    arguments: Sequence[str]
    makes: bool

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call, by their names."""
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}


def operators(module: nn.Module, names: Sequence[str]) -> list[Operator]:
    """The operators that a module's `forward` may call by these names.

    Raises:
        UnsupportedModel: it calls none of them.
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
    """The operators that a module's `forward` calls as functions, as modules.

    From then on `forward` is the same code over a copy of its file's names, in which these are its own.
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
    """Hooks on several operators."""

    handles: Sequence[Removable]

    def remove(self) -> None:
        """Take them away."""
        for handle in self.handles:
            handle.remove()


def tapped(operator: nn.Module, name: str, tap: Tap) -> Callable[[torch.Tensor], None]:
    """What taps a tensor [n, *shape of a row] that an operator takes or gives; `name` is the site's."""
    from steercap.kernels.tap import tap as call

    buffer = f"steercap_{name}"
    operator.register_buffer(buffer, tap.point, persistent=False)
    kind = tap.kind

    def see(tensor: torch.Tensor) -> None:
        call(tensor.view(-1, prod(tensor.shape[1:])), None, getattr(operator, buffer), kind)

    return see


class OfBlock(Site):
    """A place before one of a layer's blocks.

    Args:
        name: of the site.
        block: "attn" or "ffn", by which the layer calls the operator's weights.
    """

    def __init__(self, name: str, block: str) -> None:
        self.name = name
        self.weights = f"hc_{block}_fn"
        #: transformers' module in place of the operator.
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
        """What its rows are, of so many streams."""

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> Removable:
        pre = operators(layer, PRE)
        called = (*pre, *operators(layer, FUSED))
        weights: Any = getattr(layer, self.weights)
        return Hooks([self.hook(one, pre[0], weights, tapped(one.module, self.name, tap)) for one in called])

    @abstractmethod
    def hook(
        self, operator: Operator, pre: Operator, weights: torch.Tensor, see: Callable[[torch.Tensor], None]
    ) -> Removable:
        """Put a tap on an operator, which the layer calls for both blocks.

        Args:
            operator: which.
            pre: of the layer's, the one that takes the streams.
            weights: those that it is called with for the block of this site.
            see: the tap.
        """


class Streams(OfBlock):
    """The streams as a block finds them, all of which the operator before it reads."""

    #: What reads the coefficients, which are of the edited streams, comes behind it.
    first: ClassVar[bool] = True

    def shape(self, streams: int, sizes: Sizes) -> RowShape:
        return RowShape((streams, sizes.hidden))

    def hook(
        self, operator: Operator, pre: Operator, weights: torch.Tensor, see: Callable[[torch.Tensor], None]
    ) -> Removable:
        """Where the operator takes the streams, an edit is made before it. Where it makes them, what it computed of
        rows that an edit changed is computed again; of others it stays, bit for bit.
        """

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            given = operator.given(args, kwargs)
            if given["fn"] is weights:
                see(given["residual"])

        def after(_module: nn.Module, args: Any, kwargs: Any, made: Any) -> Any:
            given = operator.given(args, kwargs)
            return _again(pre, given, made, see) if given["fn"] is weights else made

        if operator.makes:
            return operator.module.register_forward_hook(after, with_kwargs=True)
        return operator.module.register_forward_pre_hook(before, with_kwargs=True)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> Removable:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            visit(args[0])

        return layer.get_submodule(self.module).register_forward_pre_hook(hook)


def _again(
    pre: Operator, given: Mapping[str, Any], made: Sequence[Any], see: Callable[[torch.Tensor], None]
) -> tuple[Any, ...]:
    """What an operator gave, with what it made of streams that an edit changed replaced by what is made of them now.

    Args:
        pre: the operator that takes streams.
        given: to the operator.
        made: the streams, and what it made of them.
        see: the tap on the streams.
    """
    streams, *before = made
    clean = streams.clone()
    see(streams)
    changed = (streams != clean).flatten(1).any(1)
    same = {name: given[name] for name in pre.arguments if name in given}
    renewed = pre.module.forward(**{**same, "residual": streams})
    pairs = zip(renewed, before, strict=True)
    return streams, *(new.where(changed.view(-1, *[1] * (old.dim() - 1)), old) for new, old in pairs)


class Coefficients(OfBlock):
    """What the operator mixes the streams by behind the block: read alone, since kernels hold it elsewhere too.

    Args:
        name, block: see `OfBlock`.
        output: which of what the operator gives, the streams not counted.
        axes: of a row, each as long as there are streams.
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

        def after(_module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
            if operator.given(args, kwargs)["fn"] is weights:
                see(made[at])

        return operator.module.register_forward_hook(after, with_kwargs=True)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> Removable:
        def hook(_module: nn.Module, _args: Any, made: Any) -> None:
            visit(made[self.output])

        return layer.get_submodule(self.module).register_forward_hook(hook)


def collapsed(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """What a model's end makes of the last streams, past the tap on them: [n, hidden].

    Args:
        model: the module that holds the layers.
        rows: [n, streams × hidden].
    """
    (head,) = operators(model, HEAD)
    streams = rows.view(len(rows), model.hc_mult, -1)
    weights = model.hc_head_fn, model.hc_head_scale, model.hc_head_base
    made: torch.Tensor = head.module.forward(streams, *weights, model.rms_norm_eps, model.hc_eps)
    return made
