"""A.X K1: DeepSeek's layer with a norm after the experts, which dense layers have too and do not call.

So no path says what the feed-forward block of every layer adds.
"""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("AXK1ForCausalLM",),
    classes=("AXK1.AXK1DecoderLayer", "axk1.AXK1DecoderLayer"),
    mlp_out="",
    attention="",
    router="mlp.gate",
    varied=True,
)
