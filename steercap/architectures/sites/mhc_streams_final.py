"""Streams after the last layer, [streams, hidden], which the model collapses to one row for its final norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Visit, visit_input
from steercap.architectures.sites.streams import HEAD, operators, tapped

if TYPE_CHECKING:
    from torch import nn

    from steercap.architectures.families.base import Family
    from steercap.architectures.sites.base import Removable


class FinalStreams(Site):
    """Tap on the input of the model's collapsing operator; it exists once in a model, on the last pipeline stage."""

    of_model = -1
    within = "decoder"

    def known(self, family: Family) -> bool:
        return family.mhc

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        operators(layer, HEAD)
        streams: Any = layer.hc_mult
        return RowShape((int(streams), sizes.hidden))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> Removable:
        (head,) = operators(layer, HEAD)
        see = tapped(head.module, "mhc_streams_final", tap)

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            see(args[0] if args else kwargs["hidden_states"])

        return head.module.register_forward_pre_hook(before, with_kwargs=True)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> Removable:
        return visit_input(layer.get_submodule("hc_head"), visit)


MEMBER = FinalStreams()
