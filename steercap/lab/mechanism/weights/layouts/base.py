"""What a layout is: which modules of transformers' decoder layer hold which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of a decoder layer's weights, as transformers has them; "" is a module that there is not.

    The last projections of both blocks, and what is multiplied by a factor, are the family's to say.

    Args:
        architectures: names in `config.json`.
        attn_norm: the norm of what the attention block reads; "" where it reads the stream as it is.
        query, key, value: projections of their own.
        fused: one projection that makes all three, in place of these.
        order: of its outputs: "stacked" is all queries, all keys, all values; "by_head" the three of each head.
        query_norm, key_norm: norms of queries and keys, of each head or of all at once.
        attn_post: the norm of what the attention block adds.
        mlp_norm: as `attn_norm`, for the feed-forward block.
        gate, up: projections to the neurons; without a gate, `up` alone.
        gate_up: one projection that makes both, gates first, in place of these.
        mlp_post: as `attn_post`.
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
        """The modules of the attention block, but for its last projection."""
        projections = (self.fused,) if self.fused else (self.query, self.key, self.value)
        return tuple(filter(None, (self.attn_norm, *projections, self.query_norm, self.key_norm, self.attn_post)))

    @property
    def neurons(self) -> tuple[str, ...]:
        """The modules of the feed-forward block, but for its last projection."""
        projections = (self.gate_up,) if self.gate_up else (self.gate, self.up)
        return tuple(filter(None, (self.mlp_norm, *projections, self.mlp_post)))
