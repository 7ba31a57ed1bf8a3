"""The streams as a layer's attention block finds them, [streams, hidden]; in layer 0 the embedding, repeated."""

from typing import ClassVar

from steercap.architectures.sites.streams import Streams


class BeforeAttention(Streams):
    """Streams that keys and values are made of."""

    before_keys: ClassVar[bool] = True


MEMBER = BeforeAttention("mhc_streams_pre_attn", "attn")
