"""StarCoder 2: neurons have no gate."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=("Starcoder2ForCausalLM",),
    gate="",
    up="mlp.c_fc",
)
