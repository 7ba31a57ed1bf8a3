"""GPT-NeoX and Pythia: one projection makes query, key and value of each head in turn; neurons have no gate."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=("GPTNeoXForCausalLM",),
    fused="attention.query_key_value",
    order="by_head",
    gate="",
    up="mlp.dense_h_to_4h",
)
