"""The weights of a layer's two blocks, as linear maps of the stream: norms folded in, fused projections taken apart.

Everything here is *up to a positive scale*: norms divide by the length of a row, which no weight knows. Where that
matters, the norms are there to ask. Shape legend: hidden = elements of the stream; heads = query heads;
kv_heads = heads of keys and values, each shared by heads / kv_heads consecutive query heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float

from steercap.lab.mechanism.weights.norms import FrozenNorm

#: A weight, [out, in], and a bias.
Linear: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"


@dataclass(frozen=True, eq=False)
class Projection:
    """What a linear map behind a norm reads of the stream.

    Args:
        weight: float32 [..., hidden], the gain of the norms before and behind it in it.
        constant: what it gives without a row: its bias and the norm's, float32 [...].
    """

    weight: Float[torch.Tensor, "*out hidden"]
    constant: Float[torch.Tensor, "*out"]

    @property
    def flat(self) -> Float[torch.Tensor, "all_out hidden"]:
        """The weight as a matrix."""
        return self.weight.reshape(-1, self.weight.shape[-1])


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The attention block of one layer.

    Rotary embedding is not in `query` and `key`: it turns both by their positions, and leaves them as they are at
    position 0. Neither is what scores are scaled by.

    Args:
        layer: its index.
        query: of each head, [heads, head_dim, hidden]; up to the scales of the norm and of `query_norm`.
        key, value: [kv_heads, head_dim, hidden].
        output: what each element of a head's `z` adds to the stream, float32 [heads, hidden, head_dim], the norm behind
            the block and the factor in it; up to the scale of that norm.
        output_constant: what the block adds whatever it reads, float32 [hidden].
        norm, post: the norms before and behind the block, None for none.
        query_norm, key_norm: of queries and keys, None for none.
    """

    layer: int
    query: Projection
    key: Projection
    value: Projection
    output: Float[torch.Tensor, "heads hidden head_dim"]
    output_constant: Float[torch.Tensor, " hidden"]
    norm: FrozenNorm | None
    post: FrozenNorm | None
    query_norm: FrozenNorm | None
    key_norm: FrozenNorm | None

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.query.weight.shape[0]

    @property
    def group(self) -> int:
        """Query heads that share a key and a value."""
        return self.heads // self.key.weight.shape[0]

    def written(self, rows: Float[torch.Tensor, "rows hidden"]) -> Float[torch.Tensor, "heads rows hidden"]:
        """What each head adds to the stream where it attends to a row with weight one, without constants.

        Args:
            rows: directions, in front of the norm.
        """
        values = torch.einsum("kdh,rh->krd", self.value.weight, rows.float()).repeat_interleave(self.group, dim=0)
        return torch.einsum("nrd,nhd->nrh", values, self.output)


@dataclass(frozen=True, eq=False)
class NeuronWeights:
    """The feed-forward block of one layer.

    Args:
        layer: its index.
        gate: what opens each neuron, [neurons, hidden]; None where neurons have no gate.
        up: what each neuron reads besides; without a gate, all that it reads.
        down: what each neuron adds to the stream, float32 [neurons, hidden], the norm behind the block and the factor
            in it; up to the scale of that norm.
        down_constant: what the block adds whatever it reads, float32 [hidden].
        norm, post: the norms before and behind the block, None for none.
    """

    layer: int
    gate: Projection | None
    up: Projection
    down: Float[torch.Tensor, "neurons hidden"]
    down_constant: Float[torch.Tensor, " hidden"]
    norm: FrozenNorm | None
    post: FrozenNorm | None

    @property
    def reading(self) -> dict[str, Projection]:
        """By name, what neurons read: "gate" and "up", or "in" where there is no gate."""
        return {"in": self.up} if self.gate is None else {"gate": self.gate, "up": self.up}


def taken_apart(fused: torch.Tensor, order: str, heads: int, kv_heads: int) -> Iterable[torch.Tensor]:
    """Queries, keys and values out of what makes all of them.

    Args:
        fused: a weight or a bias, [out, ...].
        order: as `Layout.order`.
        heads, kv_heads: query heads, and those of keys and values.
    """
    head_dim = len(fused) // (heads + 2 * kv_heads)
    if order == "stacked":
        return list(fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]))
    by_head = fused.unflatten(0, (heads, 3, head_dim))
    return [by_head[:, part].flatten(0, 1) for part in range(3)]


def reading(
    linear: Linear, norm: FrozenNorm | None, behind: FrozenNorm | None = None, head_dim: int | None = None
) -> Projection:
    """What a projection reads of the stream.

    Args:
        linear: its weight and bias.
        norm: in front of it.
        behind: of what it gives; of each head, or of all.
        head_dim: elements of a head, where there are heads.
    """
    weight, bias = linear
    constant = torch.zeros(len(weight)) if bias is None else bias
    if norm is not None:
        constant = constant + weight @ norm.constant
        weight = norm.through(weight)
    if behind is not None:
        parts = (-1, behind.width)
        weight = behind.linear(weight.T.unflatten(1, parts)).flatten(1).T
        constant = behind.linear(constant.unflatten(0, parts)).flatten()
    if head_dim is not None:
        weight, constant = weight.unflatten(0, (-1, head_dim)), constant.unflatten(0, (-1, head_dim))
    return Projection(weight, constant)
