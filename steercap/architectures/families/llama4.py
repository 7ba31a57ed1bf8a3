"""Llama 4 (text): Llama's layer, the feed-forward block of some layers with experts.

vLLM orders the elements of queries and keys differently, so they cannot be compared with transformers'.
"""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("Llama4ForCausalLM",),
    classes=("llama4.Llama4DecoderLayer", "llama4.Llama4TextDecoderLayer"),
    mlp_out="feed_forward",
    attention="",
    mlp_proj="feed_forward.down_proj",
    router="feed_forward.router",
    varied=True,
)
