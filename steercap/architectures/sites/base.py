"""Base of sites: a place in a decoder layer or in the model, the shape of its rows, and the installation of its tap.

Taps are PyTorch forward hooks, put in before vLLM first traces the model: torch.compile inlines them, CUDA
graphs record them, and vLLM's own code stays untouched. Each tapped module carries the tap's point as a
buffer, so that layers trace to the same code. transformers' layers have the same places, which references read.
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

#: Kind of module that holds a site.
Within: TypeAlias = Literal["layer", "decoder", "model"]
#: Function that a hook calls with a module and its tensor, which it may change in place.
Act: TypeAlias = "Callable[[nn.Module, torch.Tensor], None]"
#: Function from a module's arguments to the stream and the deferred residual to add to it, or None.
Terms: TypeAlias = "Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]"
#: Function called with the rows of a point in a layer of transformers, [..., width]; it may change them in place.
Visit: TypeAlias = "Callable[[torch.Tensor], None]"

#: Names of modules' arguments for their input, and for positions beside it.
_READ: Final = ("hidden_states", "x", "hidden", "input", "input_")
_POSITIONS: Final = ("positions", "position_ids")


class Removable(Protocol):
    """A hook, or several, installed in a module."""

    def remove(self) -> None:
        """Remove it from the module."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's rows, from its configuration.

    Args:
        hidden: elements of the residual stream.
        head_dim: elements of an attention head's output, where its attention module does not state it.
        kv_heads: heads of keys and values, on all ranks together.
        ranks: number of ranks of a tensor-parallel group.
        observed: function that returns the rows of a module's "input" or "output", as observed in a pass. Raises
            `UnsupportedModel` where it has no row for each token.
    """

    hidden: int
    head_dim: int
    kv_heads: int
    ranks: int
    observed: Callable[[nn.Module, str], RowShape]


@dataclass(frozen=True)
class RowShape:
    """Shape and dtype of the rows of a point.

    Args:
        shape: shape of a row, on all ranks together.
        shards: number of ranks that its first axis is split over.
        dtype: torch name of the dtype, None for the model's.
    """

    shape: tuple[int, ...]
    shards: int = 1
    dtype: str | None = None


@dataclass(frozen=True)
class Tap:
    """Parameters of a tap.

    Args:
        point: number of the point, int32 [1], on the model's device.
        kind: kind of its rows, see `kernels.tap.tap`.
        dims: number of dimensions of a row.
    """

    point: torch.Tensor
    kind: int
    dims: int = 1


class Site(ABC):
    """A place where rows can be read and changed: in every layer, or once in a model.

    Its methods take the module that the site is `within`.
    """

    #: Layer number of a site that exists once in a model: 0, or -1 for the last; None for a site in each layer.
    of_model: int | None = None
    #: Module that holds it: a decoder layer, the module that holds the layers, or the model.
    within: Within = "layer"

    #: True if its tap must run before other taps on the same module. It is then installed before them, rather than
    #: moved to the front: torch.compile guards hooks by their places, and mistakes one that was moved for another.
    first: ClassVar[bool] = False
    #: True if the keys and values of its own layer depend on its rows; those of later layers always do.
    before_keys: ClassVar[bool] = False
    #: True if its rows can be changed.
    writable: ClassVar[bool] = True
    #: True if a row has a part for each head of keys, of which there may be fewer than tensor-parallel ranks.
    per_key_head: ClassVar[bool] = False

    def placed(self, layer: int, num_layers: int) -> int:
        """Return the layer number of a point requested at `layer`: always the same for a site that a model has once."""
        return layer if self.of_model is None else self.of_model % num_layers

    def exists(self, family: Family, config: Any, layer: int) -> bool:
        """Check if a layer has the site, as far as it can be told before the model is loaded.

        Args:
            family: family of the model's layers.
            config: transformers' configuration of the model.
            layer: index of the layer.
        """
        return self.known(family)

    @abstractmethod
    def known(self, family: Family) -> bool:
        """Return True if the family says where the site is, in layers that have it."""

    @abstractmethod
    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        """Return the shape of its rows in one of vLLM's decoder layers."""

    @abstractmethod
    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> Removable:
        """Install a tap in one of vLLM's decoder layers."""

    @abstractmethod
    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> Removable:
        """Call `visit` with the rows of one of transformers' decoder layers in each pass; return the hook's handle."""


def output_tap(layer: nn.Module, path: str, name: str, tap: Tap, stream: int | None = None) -> RemovableHandle:
    """Tap the output of the submodule `path` of `layer` ("" is the layer itself).

    Args:
        layer: decoder layer.
        path: dotted path of the submodule, see `Family`.
        name: name of the site, which names the buffer.
        tap: parameters of the tap.
        stream: index of the residual in the returned tuple, to be added to the rows read; None for none.
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
    """Give a module a tap, and return the function that taps a tensor it is called with, [n, *row]."""
    from steercap.kernels.tap import tap as operator

    buffer = f"steercap_{name}"
    module.register_buffer(buffer, tap.point, persistent=False)
    kind, dims = tap.kind, tap.dims

    def act(module: nn.Module, tensor: torch.Tensor) -> None:
        rows = tensor if tensor.dim() == dims + 1 else tensor.squeeze(0)  # transformers' modules carry [1, n, *row]
        operator(rows.flatten(1), None, getattr(module, buffer), kind)

    return act


def of_input(module: nn.Module, act: Act) -> Callable[..., Any]:
    """Return a pre-hook that calls `act` with a copy of the module's input, and passes on the copy."""
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
    """Return a hook that calls `act` with a copy of a module's (first) output, and returns the copy in its place."""

    def hook(module: nn.Module, _args: Any, output: Any) -> Any:
        many = isinstance(output, tuple)
        first = (output[0] if many else output).contiguous().clone()
        act(module, first)
        return (first, *output[1:]) if many else first

    return hook


def read_by(module: nn.Module) -> tuple[int, str]:
    """Return the index and the name of the argument that carries a module's input.

    It is determined before the module is traced: a hook that looks at all arguments has guards on all of them, which
    torch.compile cannot have on functions.
    """
    names = _arguments(module)
    name = next((one for one in _READ if one in names), next((one for one in names if one not in _POSITIONS), ""))
    return (names.index(name) if name else 0), name


def _arguments(module: Any) -> list[str]:
    """Return the names of a module's arguments; for an operator of vLLM's, those of its implementation in PyTorch."""
    native = getattr(module, "forward_native", None)
    return arguments_of(module) or ([] if native is None else list(inspect.signature(native).parameters))


def input_tap(layer: nn.Module, path: str, name: str, tap: Tap, argument: int = 0) -> RemovableHandle:
    """Tap an argument of the submodule `path` of `layer`, by default the first; the rest as for `output_tap`."""
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
    """Visit the (first) output of a module of transformers."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        visit(output[0] if isinstance(output, tuple) else output)

    return module.register_forward_hook(hook)


def part_of(module: nn.Module) -> tuple[int, int]:
    """Return the size of a linear module's input on all ranks together, and the number of ranks it is split over."""
    # vLLM's wrapper for LoRA adapters has another `input_size`: that of one rank's part.
    linear: Any = getattr(module, "base_layer", module)
    whole = int(linear.input_size)
    part = int(getattr(linear, "input_size_per_partition", whole))
    return whole, whole // part


def by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if its rows are adjacent in memory, else a contiguous copy, as of `q`, a view of a fused qkv.

    Inductor of PyTorch 2.13 compiles an in-place change of such a view to a copy of more than the view, and with
    several views of one tensor this copy reads beyond the buffer's end.
    """
    return tensor if tensor.stride(-2) == tensor.shape[-1] else tensor.contiguous()
