"""A plug-in of vLLM's: three models whose layers no family knows, of Llama's parts under other names."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models import llama
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper


class Invented(nn.Module):
    """A layer that takes and returns the whole stream; `hidden_states` is its name for it."""

    def __init__(self, vllm_config: Any, prefix: str = "", **options: Any) -> None:
        super().__init__()
        parts: Any = llama.LlamaDecoderLayer(vllm_config, prefix, **options)
        self.mixing, self.feeding = parts.self_attn, parts.mlp
        self.alpha, self.beta = parts.input_layernorm, parts.post_attention_layernorm
        self.gamma = RMSNorm(vllm_config.model_config.hf_config.hidden_size, has_weight=False)

    def mixed(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return what attention gives."""
        found: torch.Tensor = self.mixing(positions=positions, hidden_states=self.alpha(x))
        return found


class OneNorm(Invented):
    """Two blocks side by side, behind one norm."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, _residual: Any) -> tuple[torch.Tensor, Any]:
        x = self.alpha(hidden_states)
        return hidden_states + self.mixing(positions=positions, hidden_states=x) + self.feeding(x), None


class Sandwiched(Invented):
    """Norms before and behind each block."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, _residual: Any) -> tuple[torch.Tensor, Any]:
        middle = hidden_states + self.gamma(self.mixed(positions, hidden_states))
        return middle + self.feeding(self.beta(middle)), None


class HalfFed(Invented):
    """Half of what the feed-forward block gives is added."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, _residual: Any) -> tuple[torch.Tensor, Any]:
        middle = hidden_states + self.mixed(positions, hidden_states)
        return middle + 0.5 * self.feeding(self.beta(middle)), None


class Stack(llama.LlamaModel):
    """The layers, whose stream is whole."""

    def forward(self, input_ids: Any, positions: Any, *_: Any, inputs_embeds: Any = None, **__: Any) -> Any:
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x, _ = layer(positions, x, None)
        return self.norm(x)


class Served(llama.LlamaForCausalLM):
    """A model with one of these layers."""

    layer: ClassVar[type[nn.Module]]
    NAMES: ClassVar[dict[str, str]] = {
        ".self_attn.": ".mixing.",
        ".mlp.": ".feeding.",
        ".input_layernorm.": ".alpha.",
        ".post_attention_layernorm.": ".beta.",
    }

    def _init_model(self, vllm_config: Any, prefix: str = "", **_: Any) -> Any:
        return Stack(vllm_config=vllm_config, prefix=prefix, layer_type=self.layer)

    def load_weights(self, weights: Any) -> set[str]:
        """Load Llama's weights by the layers' names."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=WeightsMapper(orig_to_new_substr=self.NAMES))


class OneNormForCausalLM(Served):
    layer = OneNorm


class SandwichedForCausalLM(Served):
    layer = Sandwiched


class HalfFedForCausalLM(Served):
    layer = HalfFed


def plug_in() -> None:
    """Register them; safe to call again."""
    from vllm import ModelRegistry

    for name in ("OneNorm", "Sandwiched", "HalfFed"):
        ModelRegistry.register_model(f"{name}ForCausalLM", f"invented:{name}ForCausalLM")
