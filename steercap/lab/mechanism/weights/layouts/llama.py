"""Llama, and models with the same weight names: separate projections, a gate, norms before the blocks."""

from steercap.lab.mechanism.weights.layouts.base import Layout

MEMBER = Layout(
    architectures=(
        "LlamaForCausalLM",
        "GemmaForCausalLM",
        "GraniteForCausalLM",
        "HeliumForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "StableLmForCausalLM",
    ),
)
