"""Sites `q`, `k` and `v`: queries, keys and values as attention reads them, after rotary embedding and norms.

Rows are [heads, head_dim] and [kv_heads, head_dim]; keys and values are cached as edited.

vLLM calls the family's attention module with queries, keys and values, each [tokens, heads × head_dim]. transformers
passes them, each [1, heads, tokens, head_dim], to its attention function, which `_Visited` replaces while rows are
visited.
"""

from __future__ import annotations

import sys
import threading
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from steercap.architectures.families.base import located
from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Visit, input_tap
from steercap.core.extras import extra
from steercap.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class AttentionInput(Site):
    """Site at an argument of the family's attention module; each tensor-parallel rank has some of the heads."""

    #: Name of the site, and position of the argument.
    name: ClassVar[str]
    argument: ClassVar[int]

    def known(self, family: Family) -> bool:
        return bool(family.attention)

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        path = located(layer, family.attention)
        attention: Any = layer.get_submodule(path)
        if self.per_key_head and attention.kv_sharing_target_layer_name is not None:
            raise AttributeError("it reads the keys and values of another layer, and computes none itself")
        parent: Any = layer.get_submodule(path.rpartition(".")[0])
        if self.per_key_head and getattr(parent, "hpc_rope_norm", None) is not None:
            raise UnsupportedModel(
                "vLLM's HPC_ATTN norms, rotates and caches keys and values in one operator, and attention is called "
                "with others that it ignores; leave k and v out of SteerModel(..., sites=), or use another attention "
                "backend"
            )
        heads, head_dim = self.head_shape(attention)
        total = int(getattr(parent, "total_num_kv_heads", sizes.kv_heads))  # layers of some models differ in it
        if self.per_key_head and 1 < total < sizes.ranks:
            raise UnsupportedModel(
                f"this layer has {total} key heads, so that some of the {sizes.ranks} tensor-parallel ranks hold "
                f"copies of one; leave k and v out of SteerModel(..., sites=), or use tensor_parallel_size={total}"
            )
        whole = self.per_key_head and total == 1  # every rank has a copy of it
        shards = 1 if whole else sizes.ranks
        return RowShape((heads * shards, head_dim), shards)

    @abstractmethod
    def head_shape(self, attention: Any) -> tuple[int, int]:
        """Return one rank's number of heads and the width of each, as vLLM's attention module states them."""

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return input_tap(layer, family.attention, self.name, tap, self.argument)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        def hook(module: nn.Module, _args: Any) -> None:
            _VISITED.expect(module, self.argument, visit)

        return layer.get_submodule(_parent(layer, family.attention)).register_forward_pre_hook(hook)


def _parent(layer: nn.Module, attention: str) -> str:
    """Return the path of the module that computes queries, keys and values, equal in vLLM and transformers."""
    return located(layer, "|".join(path.rpartition(".")[0] for path in attention.split("|")))


class _Visited:
    """Replacement of transformers' attention functions, in place while modules have inputs to be visited.

    For all other modules, also in other threads, it calls the original function.
    """

    def __init__(self) -> None:
        self._waiting: dict[nn.Module, list[tuple[int, Visit]]] = {}
        self._listed: dict[str, Callable[..., Any] | None] = {}
        self._standing = threading.Lock()

    def expect(self, module: nn.Module, argument: int, visit: Visit) -> None:
        """Visit the input at position `argument` in the module's next attention call."""
        with extra("cuda", "cpu"):
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name = _implementation(module)
        with self._standing:
            if (listed := ALL_ATTENTION_FUNCTIONS.get(name)) is not self:
                self._listed[name] = listed
                ALL_ATTENTION_FUNCTIONS[name] = self
            self._waiting.setdefault(module, []).append((argument, visit))

    def _called(self, module: nn.Module) -> tuple[list[tuple[int, Visit]], Callable[..., Any]]:
        """Remove and return a module's pending visits, with the original attention function.

        Where transformers registers no function, it is `eager_attention_forward` of the module's file.
        """
        with extra("cuda", "cpu"):
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        with self._standing:
            visits = self._waiting.pop(module, [])
            if visits and not self._waiting:
                for name in self._listed:
                    if ALL_ATTENTION_FUNCTIONS.get(name) is self:
                        del ALL_ATTENTION_FUNCTIONS[name]
            listed = self._listed.get(_implementation(module))
        return visits, listed or sys.modules[type(module).__module__].eager_attention_forward

    def __call__(self, module: nn.Module, *inputs: Any, **options: Any) -> Any:
        visits, attention = self._called(module)
        changed = list(inputs)  # not changed in place: queries, keys and values may be views of one tensor
        for argument, visit in visits:
            given = changed[argument]
            # transformers' OPT scales its queries itself, vLLM's does not.
            factor = module.scaling / options["scaling"] if argument == 0 else 1.0
            rows = given.transpose(1, 2).flatten(2) / factor
            visit(rows)
            changed[argument] = (rows * factor).unflatten(2, (given.shape[1], -1)).transpose(1, 2)
        return attention(module, *changed, **options)


def _implementation(module: Any) -> str:
    """Return the name under which transformers registers the module's attention function, such as "eager"."""
    return str(module.config._attn_implementation)  # noqa: SLF001 -- as transformers' modules do


_VISITED: Final = _Visited()


class Q(AttentionInput):
    """Site `q`: the queries, first argument of the family's attention module."""

    name: ClassVar[str] = "q"
    argument: ClassVar[int] = 0

    def head_shape(self, attention: Any) -> tuple[int, int]:
        return int(attention.num_heads), int(attention.head_size)


class K(AttentionInput):
    """Site `k`: the keys, second argument of the family's attention module, before they are cached."""

    name: ClassVar[str] = "k"
    argument: ClassVar[int] = 1
    before_keys: ClassVar[bool] = True
    per_key_head: ClassVar[bool] = True

    def head_shape(self, attention: Any) -> tuple[int, int]:
        return int(attention.num_kv_heads), int(attention.head_size)


class V(AttentionInput):
    """Site `v`: the values, third argument of the family's attention module, before they are cached."""

    name: ClassVar[str] = "v"
    argument: ClassVar[int] = 2
    before_keys: ClassVar[bool] = True
    per_key_head: ClassVar[bool] = True

    def head_shape(self, attention: Any) -> tuple[int, int]:
        return int(attention.num_kv_heads), int(attention.head_size_v)


#: Sites of attention inputs, by name.
MEMBERS: Final[Mapping[str, Site]] = {
    "q": Q(),
    "k": K(),
    "v": V(),
}
