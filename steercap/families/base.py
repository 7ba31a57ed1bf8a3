"""What a model family is: where its layers live and which of their values carry the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def _as_it_is(tensor: Any) -> Any:
    return tensor


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the decoder layers of some architectures are written, in vLLM and in transformers alike.

    Args:
        architectures: names in `config.json` that this family serves.
        layers: dotted path from the model to its list of decoder layers; the same in both libraries.
        attn_out: submodule of a layer whose output the attention block adds to the stream.
        mlp_out: the same for the feed-forward block.
        final_norm: the norm between the last layer and the unembedding, as transformers names it.
        residual_output: index of the residual in the tuple a vLLM layer returns, when the stream is
            hidden + residual; None when what it returns first is the stream.
        hidden_input: name of the argument that carries the stream (or its undeferred part) into a vLLM layer.
        residual_input: name of the argument that carries the deferred residual, "" if there is none.
        attn_proj: submodule of a layer that projects what the heads give to the stream, "" if there is none.
        attention: submodule that vLLM calls with queries, keys and values; its parent makes them, in transformers too.
            "" where they are handed over without a call.
        mlp_proj: submodule that projects the neurons to the stream, "" if there is none.
        router: submodule that gives the logits of the experts, "" if there are none.
        sparse: of transformers' configuration and a layer's index, whether the layer has experts; None for no layer.
        transformers_backend: whether vLLM runs transformers' own modules, in place of its own.
        see: what a layer carries, as rows [n, width] that share its memory, where that is something else.
        tiny: keyword arguments of transformers' `AutoConfig.for_model` for the smallest model that exercises
            the family, from which the contract tests write a checkpoint.
    """

    architectures: tuple[str, ...]
    layers: str
    attn_out: str
    mlp_out: str
    final_norm: str
    residual_output: int | None
    hidden_input: str = "hidden_states"
    residual_input: str = ""
    attn_proj: str = "self_attn.o_proj"
    attention: str = "self_attn.attn"
    mlp_proj: str = "mlp.down_proj"
    router: str = ""
    sparse: Callable[[Any, int], bool] | None = None
    transformers_backend: bool = False
    see: Callable[[Any], Any] = _as_it_is
    tiny: Mapping[str, Any] = field(repr=False)

    def is_sparse(self, config: Any, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.sparse is not None and self.sparse(config, layer)


#: Shape shared by the tiny models: 4 layers of width 128, 4 heads of 32, the least that vLLM's CPU attention takes.
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
