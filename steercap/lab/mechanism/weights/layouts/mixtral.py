"""Mixtral: the attention of Llama; all its layers have experts."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=("MixtralForCausalLM",),
    gate="",
    up="",
)
