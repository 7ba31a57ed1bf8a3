"""A.X K1: DeepSeek's layer with a norm after the experts; dense layers have that norm too, but do not call it.

So no path names the feed-forward block's output in every layer.
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
