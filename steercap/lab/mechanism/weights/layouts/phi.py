"""Phi: both blocks read one norm, and neurons have no gate."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=("PhiForCausalLM",),
    mlp_norm="input_layernorm",
    gate="",
    up="mlp.fc1",
)
