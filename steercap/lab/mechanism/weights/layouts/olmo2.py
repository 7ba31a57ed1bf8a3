"""OLMo 2 and 3: blocks read the stream directly; a norm follows each block, and norms span all queries and all keys."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    attn_norm="",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    attn_post="post_attention_layernorm",
    mlp_norm="",
    mlp_post="post_feedforward_layernorm",
)
