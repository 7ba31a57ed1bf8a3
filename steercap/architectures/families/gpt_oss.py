"""gpt-oss: attention with sinks, and experts in every layer; vLLM's module names differ from transformers'."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("GptOssForCausalLM",),
    classes=("gpt_oss.TransformerBlock", "gpt_oss.GptOssDecoderLayer"),
    attn_out="attn|self_attn",
    attn_proj="attn.o_proj|self_attn.o_proj",
    attention="attn.attn|self_attn.attn",
    mlp_proj="",
    router="mlp.router",
    varied=True,
)
