"""How a layer's attention makes weights of queries and keys: read off the loaded module, sent to the client.

Where a module does something that is not written down here, its rule says so, and no weights are computed by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from steercap.errors import InvalidRequest


class AttentionRule(msgspec.Struct, frozen=True):
    """How one layer weighs its keys: causal softmax of `scale * q·k`, changed as the rest says.

    Args:
        scale: what the scalar product of a query and a key is multiplied with.
        window: how many keys a query sees at most, the one of its own position included; None for all before it.
        soft_cap: what scaled products are bounded by, `soft_cap * tanh(x / soft_cap)`; None for no bound.
        sinks: a learned logit for each head, which takes part in its softmax and is no key; () for none.
        unknown: why weights cannot be computed by the above, "" if they can.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: tuple[float, ...] = ()
    unknown: str = ""

    def understood(self, layer: int) -> AttentionRule:
        """This rule, if weights can be computed by it.

        Args:
            layer: whose it is.

        Raises:
            InvalidRequest: they cannot.
        """
        if self.unknown:
            raise InvalidRequest(f"attention weights of layer {layer} cannot be computed: {self.unknown}")
        return self


def joined(parts: Sequence[AttentionRule]) -> AttentionRule:
    """The rule of all heads of a layer.

    Args:
        parts: what each tensor-parallel rank says of its own heads, in the order of the ranks.
    """
    sinks = tuple(sink for part in parts for sink in part.sinks)
    whole = [msgspec.structs.replace(part, sinks=sinks) for part in parts]
    if any(part != whole[0] for part in whole):
        return msgspec.structs.replace(whole[0], unknown=f"its tensor-parallel ranks attend differently: {whole}")
    return whole[0]
