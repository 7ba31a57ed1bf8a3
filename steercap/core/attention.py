"""Rules by which a layer's attention computes weights from queries and keys, read off the loaded module.

Workers send them to the client. Where a module does something that a rule cannot express, the rule says so, and no
weights are computed by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from steercap.errors import InvalidRequest


class AttentionRule(msgspec.Struct, frozen=True):
    """Attention weights of one layer: causal softmax of `scale * q·k`, modified by the other fields.

    Args:
        scale: factor of the scalar product of a query and a key.
        window: maximum number of keys a query sees, that of its own position included; None for all up to it.
        soft_cap: bound of the scaled products, `soft_cap * tanh(x / soft_cap)`; None for no bound.
        sinks: learned logit of each head that takes part in its softmax without a key; () for none.
        unknown: reason why weights cannot be computed from these fields, "" if they can.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: tuple[float, ...] = ()
    unknown: str = ""

    def understood(self, layer: int) -> AttentionRule:
        """Return this rule if weights can be computed by it.

        Raises:
            InvalidRequest: they cannot.
        """
        if self.unknown:
            raise InvalidRequest(f"attention weights of layer {layer} cannot be computed: {self.unknown}")
        return self


def joined(parts: Sequence[AttentionRule]) -> AttentionRule:
    """Join the rules of a layer's tensor-parallel ranks into one for all heads.

    Args:
        parts: rule of each rank for its own heads, in the order of the ranks.
    """
    sinks = tuple(sink for part in parts for sink in part.sinks)
    whole = [msgspec.structs.replace(part, sinks=sinks) for part in parts]
    if any(part != whole[0] for part in whole):
        return msgspec.structs.replace(whole[0], unknown=f"its tensor-parallel ranks attend differently: {whole}")
    return whole[0]
