"""Rules by which a layer's attention weights follow from queries and keys, read from the loaded module.

Workers send the rules to the client. Where a module does something that a rule cannot express, the rule has the reason,
and no weights are computed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from steercap.errors import InvalidRequest


class AttentionRule(msgspec.Struct, frozen=True):
    """Formula of one layer's attention weights: causal softmax of `scale * q·k`, modified by the other fields.

    Args:
        scale: factor of the scalar product of a query and a key.
        window: maximum number of keys that a query attends to, its own position included; None for all earlier ones.
        soft_cap: bound of the scaled products, `soft_cap * tanh(x / soft_cap)`; None for no bound.
        sinks: learned attention sinks: a logit for each head that joins the head's softmax without a key; () for none.
            Minus infinity becomes the least finite number, of equal effect: JSON has no infinity.
        unknown: reason why weights cannot be computed from these fields, "" if they can.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: tuple[float | None, ...] = ()
    unknown: str = ""

    def __post_init__(self) -> None:
        least = -sys.float_info.max
        known = tuple(least if sink is None else max(sink, least) for sink in self.sinks)  # None in older files
        msgspec.structs.force_setattr(self, "sinks", known)

    def understood(self, layer: int) -> AttentionRule:
        """Return this rule if attention weights can be computed by it.

        Raises:
            InvalidRequest: the rule has a reason in `unknown`.
        """
        if self.unknown:
            raise InvalidRequest(f"attention weights of layer {layer} cannot be computed: {self.unknown}")
        return self


def joined(parts: Sequence[AttentionRule]) -> AttentionRule:
    """Merge the attention rules of a layer's tensor-parallel ranks into one for all heads.

    Args:
        parts: rule of each rank for the rank's heads, by rank. If rules differ, the result has a reason in `unknown`.
    """
    sinks = tuple(sink for part in parts for sink in part.sinks)
    whole = [msgspec.structs.replace(part, sinks=sinks) for part in parts]
    if any(part != whole[0] for part in whole):
        return msgspec.structs.replace(whole[0], unknown=f"its tensor-parallel ranks attend differently: {whole}")
    return whole[0]
