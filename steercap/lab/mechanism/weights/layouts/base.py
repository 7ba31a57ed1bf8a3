"""Layout: module names of the weights in transformers' decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Module names of a decoder layer's weights in transformers; "" for a module that does not exist.

    The last projections of both blocks, and factors, are defined by the family.

    Args:
        architectures: names in `config.json`.
        attn_norm: norm before the attention block; "" if it reads the stream directly.
        query, key, value: separate projections.
        fused: one projection for all three, instead of these.
        order: order of its outputs: "stacked" is all queries, all keys, all values; "by_head" the three of each head.
        query_norm, key_norm: norms of queries and keys, of each head or of all at once.
        attn_post: norm of the attention block's output.
        mlp_norm: norm before the feed-forward block, as `attn_norm`.
        gate, up: projections to the neurons; without a gate, `up` alone.
        gate_up: one projection for both, gates first, instead of these.
        mlp_post: norm of the feed-forward block's output.
    """

    architectures: tuple[str, ...]
    attn_norm: str = "input_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    fused: str = ""
    order: Literal["stacked", "by_head"] = "stacked"
    query_norm: str = ""
    key_norm: str = ""
    attn_post: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    mlp_post: str = ""

    @property
    def attention(self) -> tuple[str, ...]:
        """Names of the attention block's modules, without its last projection."""
        projections = (self.fused,) if self.fused else (self.query, self.key, self.value)
        return tuple(filter(None, (self.attn_norm, *projections, self.query_norm, self.key_norm, self.attn_post)))

    @property
    def neurons(self) -> tuple[str, ...]:
        """Names of the feed-forward block's modules, without its last projection."""
        projections = (self.gate_up,) if self.gate_up else (self.gate, self.up)
        return tuple(filter(None, (self.mlp_norm, *projections, self.mlp_post)))
