"""GPT-2: one projection makes queries, keys and values, and neurons have no gate."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=("GPT2LMHeadModel",),
    attn_norm="ln_1",
    fused="attn.c_attn",
    mlp_norm="ln_2",
    gate="",
    up="mlp.c_fc",
)
