"""Streams before a layer's feed-forward block, [streams, hidden]."""

from steercap.architectures.sites.streams import Streams

MEMBER = Streams("mhc_streams_pre_mlp", "ffn")
