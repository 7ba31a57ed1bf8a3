"""OLMo 2 and 3: a norm follows each block, and its output is what the block adds."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    classes=("olmo2.Olmo2DecoderLayer", "olmo3.Olmo3DecoderLayer"),
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
    attn_in="self_attn",
    mlp_in="mlp",
    resid_mid="mlp",
    residual_output=None,
    residual_input="",
)
