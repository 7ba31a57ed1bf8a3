"""Gemma 4 (text): a norm after each block, whose output is what the block adds.

The layer then adds an embedding that it looks up by token, if any, and multiplies the whole stream by a constant of
its own.
"""

from steercap.architectures.families.base import Family, unknown

MEMBER = Family(
    architectures=("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
    classes=(
        "gemma4.Gemma4DecoderLayer",
        "gemma4.Gemma4TextDecoderLayer",
        "gemma4_unified.Gemma4UnifiedTextDecoderLayer",
    ),
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
    attn_in="self_attn",
    mlp_in="",
    resid_mid="pre_feedforward_layernorm",
    residual_output=None,
    residual_input="",
    router="router.proj",
    factor=unknown,
    varied=True,
)
