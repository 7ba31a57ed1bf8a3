"""The streams as a layer's feed-forward block finds them: [streams, hidden]."""

from steercap.architectures.sites.streams import Streams

MEMBER = Streams("mhc_streams_pre_mlp", "ffn")
