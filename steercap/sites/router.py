"""What a mixture of experts chooses by: the router's logits of all experts, float32, before any softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steercap.families.base import located
from steercap.sites.base import RowShape, Site, Sizes, Tap, Visit, output_tap

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.families.base import Family


class Router(Site):
    """Tap on the output of the family's gate, which every rank has whole."""

    def known(self, family: Family) -> bool:
        return bool(family.router)

    def exists(self, family: Family, config: Any, layer: int) -> bool:
        return self.known(family) and family.is_sparse(config, layer)

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        gate: Any = layer.get_submodule(located(layer, family.router))
        return RowShape((int(gate.output_size),), dtype="float32")

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return output_tap(layer, family.router, "router", tap)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        """transformers' gate returns logits, weights and experts: these are chosen anew after the visit."""

        def hook(gate: Any, _args: Any, output: Any) -> Any:
            import torch

            logits = output[0]
            visit(logits)
            weights, experts = torch.topk(logits.float().softmax(-1), gate.top_k, dim=-1)
            if gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(logits.dtype), experts

        return layer.get_submodule(located(layer, family.router)).register_forward_hook(hook)


MEMBER = Router()
