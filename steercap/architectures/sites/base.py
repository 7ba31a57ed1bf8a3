"""Base of sites: a site's place in a decoder layer or in the model, the shape of its rows, and its tap.

Taps are PyTorch forward hooks, registered before vLLM first traces the model: torch.compile inlines them, CUDA
graphs record them, and vLLM's own code stays untouched. Each tapped module has the index of its point as a buffer, so
that all layers trace to the same code. transformers' layers have the same sites, whose rows references visit.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, TypeAlias

from steercap.architectures.families.base import arguments_of, located, rows_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family

#: Kind of module in which a site is: a layer, the module that contains the layers, or the model.
Within: TypeAlias = Literal["layer", "decoder", "model"]
#: Function that a hook calls with a module and a tensor of its input or output, which it may change in place.
Act: TypeAlias = "Callable[[nn.Module, torch.Tensor], None]"
#: Function from a module's `args` and `kwargs` to the stream and the residual to add to it, or None.
Terms: TypeAlias = "Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]"
#: Function called with the rows [..., width] of a point in a transformers model; it may change them in place.
Visit: TypeAlias = "Callable[[torch.Tensor], None]"

#: Usual names of modules' arguments for the input, and for positions.
_READ: Final = ("hidden_states", "x", "hidden", "input", "input_")
_POSITIONS: Final = ("positions", "position_ids")


class Removable(Protocol):
    """Handle of one or several hooks on a module."""

    def remove(self) -> None:
        """Remove the hooks from the module."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's rows, from the model's configuration.

    Args:
        hidden: width of the residual stream.
        head_dim: width of an attention head's output, for layers whose attention module does not state it.
        kv_heads: number of key heads, over all ranks.
        ranks: tensor-parallel size.
        observed: function of a module and "input" or "output" that returns the row shape observed in a pass; raises
            `UnsupportedModel` unless there is one row per token.
    """

    hidden: int
    head_dim: int
    kv_heads: int
    ranks: int
    observed: Callable[[nn.Module, str], RowShape]


@dataclass(frozen=True)
class RowShape:
    """Shape, sharding and dtype of a point's rows.

    Args:
        shape: shape of one token's row, over all ranks.
        shards: number of tensor-parallel ranks over which the first axis is split; 1 if each rank has all of it.
        dtype: torch name of the rows' dtype, such as "float32"; None for the model's dtype.
    """

    shape: tuple[int, ...]
    shards: int = 1
    dtype: str | None = None


@dataclass(frozen=True)
class Tap:
    """Parameters of an installed tap.

    Args:
        point: index of the point among those that have taps, int32 [1], on the model's device.
        kind: index of the rows' width, dtype and shards among those that the rank's taps have.
        dims: number of a tensor's last dimensions that make one row: 2 for heads, [tokens, heads, width].
    """

    point: torch.Tensor
    kind: int
    dims: int = 1


class Site(ABC):
    """Kind of place where rows can be read and changed: in every layer, or once in a model.

    The argument `layer` of its methods is the module that the site is `within`, even if that is no layer.
    """

    #: Layer index of a site that exists once in a model: 0, or -1 for the last layer; None for a site in each layer.
    of_model: int | None = None
    #: Module in which the site is: a decoder layer, the module that contains the layers, or the model.
    within: Within = "layer"

    #: True if the tap must run before other taps on the same module. It is then installed before them, rather than
    #: moved to the front: torch.compile guards hooks by their places, and mistakes one that was moved for another.
    first: ClassVar[bool] = False
    #: True if keys and values of the same layer depend on the site's rows; those of later layers always do.
    before_keys: ClassVar[bool] = False
    #: True if edits can change the rows.
    writable: ClassVar[bool] = True
    #: True if a row has a part for each head of keys, of which there may be fewer than tensor-parallel ranks.
    per_key_head: ClassVar[bool] = False

    def placed(self, layer: int, num_layers: int) -> int:
        """Return the layer index of a point that is requested at `layer`; always the same for a site of the model."""
        return layer if self.of_model is None else self.of_model % num_layers

    def exists(self, family: Family, config: Any, layer: int) -> bool:
        """Check if a layer has the site, as far as the configuration tells before the model is loaded.

        Args:
            family: family of the model's layers.
            config: transformers' configuration of the model.
            layer: layer index.
        """
        return self.known(family)

    @abstractmethod
    def known(self, family: Family) -> bool:
        """Check if the family has the site, in the layers that have the module."""

    @abstractmethod
    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        """Return the shape of the site's rows in a layer of vLLM's; AttributeError if the layer lacks the site."""

    @abstractmethod
    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> Removable:
        """Install a tap in one of vLLM's decoder layers, and return the handle that removes it."""

    @abstractmethod
    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> Removable:
        """Call `visit` with the site's rows in a transformers decoder layer, in each pass; return the hook's handle."""


def output_tap(layer: nn.Module, path: str, name: str, tap: Tap, stream: int | None = None) -> RemovableHandle:
    """Tap the output, or the first item of it, of the submodule `path` of `layer` ("" is the layer itself).

    Args:
        layer: decoder layer.
        path: path of the submodule as in `Family`.
        name: name of the site, used in the name of the buffer.
        tap: parameters of the tap.
        stream: index in the output tuple of a residual that is added to the rows read; None for none.
    """
    from steercap.kernels.tap import tap as operator

    module = layer.get_submodule(located(layer, path))
    buffer = f"steercap_{name}"
    module.register_buffer(buffer, tap.point, persistent=False)
    kind = tap.kind

    def hook(module: nn.Module, _args: Any, output: Any) -> Any:
        many = isinstance(output, tuple)
        first = by_itself(output[0] if many else output)
        residual = output[stream] if many and stream is not None else None  # None in some layers too
        operator(rows_of(first), None if residual is None else rows_of(residual), getattr(module, buffer), kind)
        return (first, *output[1:]) if many else first

    return module.register_forward_hook(hook)


def tapping(module: nn.Module, name: str, tap: Tap) -> Act:
    """Register a tap's buffer on a module, and return a function that taps a tensor of the module, [n, *row]."""
    from steercap.kernels.tap import tap as operator

    buffer = f"steercap_{name}"
    module.register_buffer(buffer, tap.point, persistent=False)
    kind, dims = tap.kind, tap.dims

    def act(module: nn.Module, tensor: torch.Tensor) -> None:
        rows = tensor if tensor.dim() == dims + 1 else tensor.squeeze(0)  # transformers' modules carry [1, n, *row]
        operator(rows.flatten(1), None, getattr(module, buffer), kind)

    return act


def of_input(module: nn.Module, act: Act) -> Callable[..., Any]:
    """Return a pre-hook that calls `act` on a copy of the module's input and passes on the copy."""
    at, name = read_by(module)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[at] if at < len(args) else kwargs[name]
        copy = given.contiguous().clone()
        act(module, copy)
        if at < len(args):
            return (*args[:at], copy, *args[at + 1 :]), kwargs
        return args, {**kwargs, name: copy}

    return hook


def of_output(act: Act) -> Callable[..., Any]:
    """Return a hook that calls `act` on a copy of the module's (first) output and returns the copy in its place."""

    def hook(module: nn.Module, _args: Any, output: Any) -> Any:
        many = isinstance(output, tuple)
        first = (output[0] if many else output).contiguous().clone()
        act(module, first)
        return (first, *output[1:]) if many else first

    return hook


def read_by(module: nn.Module) -> tuple[int, str]:
    """Return the position and the name of the parameter of `forward` that takes a module's input.

    Call it before the module is traced: a hook that inspects all arguments would make torch.compile guard all of them,
    which it cannot do for functions.
    """
    names = _arguments(module)
    name = next((one for one in _READ if one in names), next((one for one in names if one not in _POSITIONS), ""))
    return (names.index(name) if name else 0), name


def _arguments(module: Any) -> list[str]:
    """Return the parameter names of a module's `forward`; for a custom operator of vLLM's, of `forward_native`."""
    native = getattr(module, "forward_native", None)
    return arguments_of(module) or ([] if native is None else list(inspect.signature(native).parameters))


def input_tap(layer: nn.Module, path: str, name: str, tap: Tap, argument: int = 0) -> RemovableHandle:
    """Tap an argument of the submodule `path` of `layer`, given by position; other parameters as of `output_tap`."""
    from steercap.kernels.tap import tap as operator

    module = layer.get_submodule(located(layer, path))
    buffer = f"steercap_{name}"
    module.register_buffer(buffer, tap.point, persistent=False)
    # Otherwise vLLM passes some modules of quantised models codes and a scale in place of rows (fused activation).
    module.requires_unquantized_input = True  # type: ignore[assignment]
    kind = tap.kind

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*args, *kwargs.values()]
        given[argument] = by_itself(given[argument])
        operator(rows_of(given[argument]), None, getattr(module, buffer), kind)
        return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def visit_output(module: nn.Module, visit: Visit) -> RemovableHandle:
    """Call `visit` with the (first) output of a transformers module in each pass; return the hook's handle."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        visit(output[0] if isinstance(output, tuple) else output)

    return module.register_forward_hook(hook)


def part_of(module: nn.Module) -> tuple[int, int]:
    """Return a linear module's input width over all tensor-parallel ranks, and the number of ranks that split it."""
    # vLLM's wrapper for LoRA adapters has another `input_size`: that of one rank's part.
    linear: Any = getattr(module, "base_layer", module)
    whole = int(linear.input_size)
    part = int(getattr(linear, "input_size_per_partition", whole))
    return whole, whole // part


def by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if its rows are adjacent in memory, else a contiguous copy, as for `q` in a fused qkv.

    Inductor of PyTorch 2.13 compiles an in-place change of such a view to a copy larger than the view, which, with
    several views of one tensor, reads beyond the buffer's end.
    """
    return tensor if tensor.stride(-2) == tensor.shape[-1] else tensor.contiguous()
