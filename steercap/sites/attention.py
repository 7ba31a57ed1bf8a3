"""What attention reads: one input of the family's attention module, after rotary embedding and any norm of heads.

vLLM's module is called with queries, keys and values, [tokens, heads × head_dim] each. transformers hands them to its
attention function, [1, heads, tokens, head_dim], which stands in for a module when they are visited.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from steercap.sites.base import RowShape, Site, Sizes, Tap, Visit, input_tap

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.families.base import Family


class AttentionInput(Site):
    """Tap on an argument of the family's attention module; tensor-parallel ranks have some of the heads each."""

    #: Its name, and which argument it is.
    name: ClassVar[str]
    argument: ClassVar[int]

    def exists(self, family: Family, config: Any, layer: int) -> bool:
        return bool(family.attention)

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        heads, head_dim = self.heads(layer.get_submodule(family.attention))
        whole = self.per_key_head and sizes.kv_heads == 1  # every rank has a copy of it
        shards = 1 if whole else sizes.ranks
        return RowShape((heads * shards, head_dim), shards)

    @abstractmethod
    def heads(self, attention: Any) -> tuple[int, int]:
        """Heads of one rank, and elements of each, as vLLM's attention module says."""

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return input_tap(layer, family.attention, self.name, tap, family, self.argument)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        def hook(_module: nn.Module, _args: Any) -> None:
            visited = ALL_ATTENTION_FUNCTIONS.get("eager")
            if not isinstance(visited, _Visited):
                visited = ALL_ATTENTION_FUNCTIONS["eager"] = _Visited()
            visited.visits.append((self.argument, visit))

        return layer.get_submodule(family.attention.rpartition(".")[0]).register_forward_pre_hook(hook)


class _Visited:
    """Stands for transformers' eager attention function in the next call of one, whose inputs it has visited."""

    def __init__(self) -> None:
        self.visits: list[tuple[int, Visit]] = []

    def __call__(self, module: nn.Module, *inputs: Any, scaling: float, **options: Any) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        del ALL_ATTENTION_FUNCTIONS["eager"]
        for argument, visit in self.visits:
            given = inputs[argument]
            # OPT scales its queries itself, and vLLM's does not.
            factor = module.scaling / scaling if argument == 0 else 1.0  # type: ignore[operator]
            rows = given.transpose(1, 2).flatten(2) / factor
            visit(rows)
            given.copy_((rows * factor).unflatten(2, (given.shape[1], -1)).transpose(1, 2))
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, *inputs, scaling=scaling, **options)
