"""Sites of a model that carries several residual streams (mHC): the streams, and what mixes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from steercap.architectures.sites.base import RowShape, Site, Sizes, Tap, Visit, visit_input
from steercap.architectures.sites.streams import HEAD, Coefficients, Streams, operators, tapped

if TYPE_CHECKING:
    from torch import nn

    from steercap.architectures.families.base import Family
    from steercap.architectures.sites.base import Removable


class BeforeAttention(Streams):
    """Streams from which keys and values are made."""

    before_keys: ClassVar[bool] = True


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


#: By name. Streams are [streams, hidden]; before layer 0's attention block they are the embedding, repeated. Factors by
#: which a block's output is added to each stream are [streams], 0 to 2. Matrices that mix the streams after a block
#: are [from, to], rows and columns of sum 1. Both are float32.
MEMBERS: Final[Mapping[str, Site]] = {
    "mhc_streams_pre_attn": BeforeAttention("mhc_streams_pre_attn", "attn"),
    "mhc_attn_post_mix": Coefficients("mhc_attn_post_mix", "attn", output=0, axes=1),
    "mhc_attn_res_mix": Coefficients("mhc_attn_res_mix", "attn", output=1, axes=2),
    "mhc_streams_pre_mlp": Streams("mhc_streams_pre_mlp", "ffn"),
    "mhc_ffn_post_mix": Coefficients("mhc_ffn_post_mix", "ffn", output=0, axes=1),
    "mhc_ffn_res_mix": Coefficients("mhc_ffn_res_mix", "ffn", output=1, axes=2),
    "mhc_streams_final": FinalStreams(),
}
