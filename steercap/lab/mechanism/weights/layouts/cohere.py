"""Cohere: both blocks read one norm."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=("CohereForCausalLM",),
    mlp_norm="input_layernorm",
)
