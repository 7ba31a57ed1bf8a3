"""Streams before a layer's attention block, [streams, hidden]; in layer 0 the embedding, repeated."""

from typing import ClassVar

from steercap.architectures.sites.streams import Streams


class BeforeAttention(Streams):
    """Streams from which keys and values are made."""

    before_keys: ClassVar[bool] = True


MEMBER = BeforeAttention("mhc_streams_pre_attn", "attn")
