"""Weights of a layer's two blocks, as linear maps of the residual stream: norms folded in, fused projections split.

Everything here is *up to a positive scale*: norms divide by the length of a row, which does not follow from weights.
Where that matters, apply the norms given here. Shape legend: hidden = elements of the stream; heads = query heads;
kv_heads = heads of keys and values, each shared by heads / kv_heads consecutive query heads.

A norm is a linear map of directions, with the scale of the row taken as given. RMSNorm and LayerNorm are `scale(row) *
gain * (row - mean) + constant`, the mean subtracted by LayerNorm alone. Only the scale depends on the row, and it is
positive, so a direction is read as `gain * (direction - mean)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from jaxtyping import Float

from steercap.core.display import brief
from steercap.errors import UnsupportedModel
from steercap.kernels.bits import exact_products

#: Maximum distance of a normed row from its linear form, relative to the row's length.
LINEAR: Final = 1e-4


class FrozenNorm:
    """Norm as a linear map: the scale, which depends on the row, is treated as a constant.

    Args:
        module: transformers' module with its weights, which may be gains, or gains minus one.
        width: number of elements of its input.

    Attributes:
        gain: factor of each element, float32 [width].
        constant: constant added at the end, float32 [width].
        centred: True if the mean is subtracted first.

    Raises:
        UnsupportedModel: the norm is not a scale and a gain, with or without a mean subtracted first.
    """

    def __init__(self, module: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
        self.module, self.width = module, width
        signs = torch.ones(1, width, dtype=torch.float32)
        signs[:, 1::2] = -1  # of mean 0 and length √width, where the width is even
        with torch.no_grad():
            self.constant = module(torch.zeros(1, width, dtype=torch.float32))[0]
            self.gain = (module(signs)[0] - self.constant) * signs[0]
        self.centred = False
        tried = torch.randn(2, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32) + 1
        for centred in (False, True):
            self.centred = centred
            if self._is_linear(tried):
                return
        raise UnsupportedModel(f"{type(module).__name__} is not a norm that can be frozen, a scale times a gain")

    def __call__(self, rows: Float[torch.Tensor, "*any width"]) -> Float[torch.Tensor, "*any width"]:
        """Apply the norm itself to whole rows."""
        with torch.no_grad():
            found: torch.Tensor = self.module(rows)
            return found

    def linear(self, directions: Float[torch.Tensor, "*any width"]) -> Float[torch.Tensor, "*any width"]:
        """Map directions through the norm without the positive scale of the row: float32, of the same shape."""
        return self.gain * self._centre(directions.float())

    def through(self, readers: Float[torch.Tensor, "*any width"]) -> Float[torch.Tensor, "*any width"]:
        """Fold the norm into weights that read its output: `through(w) · v` is `w · linear(v)`; float32, same shape."""
        return self._centre(readers.float() * self.gain)

    def scales(self, rows: Float[torch.Tensor, "rows width"]) -> Float[torch.Tensor, "rows 1"]:
        """Return the scale of each row: the norm is `scales * linear(rows) + constant`.

        Raises:
            UnsupportedModel: the equation does not hold for these rows.
        """
        scales, rest, length = self._fitted(rows)
        if not bool((rest <= LINEAR * length).all()):
            raise UnsupportedModel(
                f"{type(self.module).__name__} is not a norm that can be frozen, a scale times a gain"
            )
        return scales

    def _is_linear(self, rows: torch.Tensor) -> bool:
        scales, rest, length = self._fitted(rows)
        return bool((rest <= LINEAR * length).all() and (scales > 0).all())

    def _fitted(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fit each row's scale by least squares; return scales [rows, 1], and lengths of residuals and normed rows."""
        behind, scaled = self(rows.float()) - self.constant, self.linear(rows)
        scales = (behind * scaled).sum(dim=1, keepdim=True) / scaled.square().sum(dim=1, keepdim=True)
        return scales, (behind - scales * scaled).norm(dim=1), behind.norm(dim=1)

    def _centre(self, directions: torch.Tensor) -> torch.Tensor:
        return directions - directions.mean(dim=-1, keepdim=True) if self.centred else directions


#: Weight [out, in] and bias [out] of a projection, None for no bias.
Linear: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"


@dataclass(frozen=True, eq=False)
class Projection:
    """Linear map of the stream, with the norm before it folded in.

    Args:
        weight: weight with the gains of the norms before and behind it, float32 [..., hidden].
        constant: output for a zero direction, from the biases of the projection and of the norms: float32 [...].
    """

    weight: Float[torch.Tensor, "*out hidden"]
    constant: Float[torch.Tensor, "*out"]

    __repr__ = brief

    @property
    def flat(self) -> Float[torch.Tensor, "all_out hidden"]:
        """Weight as a matrix, [product of the output dimensions, hidden]."""
        return self.weight.reshape(-1, self.weight.shape[-1])


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Weights of the attention block of one layer, as linear maps of the residual stream.

    Rotary embedding is not in `query` and `key`: it rotates both by their positions, and leaves them unchanged at
    position 0. The scale of scores is not included either.

    Args:
        layer: index of the layer.
        query: queries of each head, [heads, head_dim, hidden]; up to the scales of the norm and of `query_norm`.
        key, value: keys and values of each head, [kv_heads, head_dim, hidden].
        output: contribution of each element of a head's `z` to the stream, float32 [heads, hidden, head_dim], the norm
            behind the block and the factor in it; up to the scale of that norm.
        output_constant: constant contribution of the block, float32 [hidden].
        norm, post: the norms before and behind the block, None for none.
        query_norm, key_norm: norms of queries and keys, None for none.
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

    __repr__ = brief

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.query.weight.shape[0]

    @property
    def group(self) -> int:
        """Number of query heads that share a key and a value."""
        return self.heads // self.key.weight.shape[0]

    @exact_products()
    def written(self, rows: Float[torch.Tensor, "rows hidden"]) -> Float[torch.Tensor, "heads rows hidden"]:
        """Return each query head's output into the stream if it attends to a row with weight one, without constants.

        Args:
            rows: directions in the stream, before the norm.
        """
        values = torch.einsum("kdh,rh->krd", self.value.weight, rows.float()).repeat_interleave(self.group, dim=0)
        return torch.einsum("nrd,nhd->nrh", values, self.output)


@dataclass(frozen=True, eq=False)
class NeuronWeights:
    """Weights of the feed-forward block of one layer, as linear maps of the residual stream.

    Args:
        layer: index of the layer.
        gate: gate of each neuron, [neurons, hidden]; None if neurons have no gate.
        up: second input of each neuron, or its only input without a gate.
        down: contribution of each neuron to the stream, float32 [neurons, hidden], the norm behind the block and the
            factor in it; up to the scale of that norm.
        down_constant: constant contribution of the block, float32 [hidden].
        norm, post: the norms before and behind the block, None for none.
    """

    layer: int
    gate: Projection | None
    up: Projection
    down: Float[torch.Tensor, "neurons hidden"]
    down_constant: Float[torch.Tensor, " hidden"]
    norm: FrozenNorm | None
    post: FrozenNorm | None

    __repr__ = brief

    @property
    def reading(self) -> dict[str, Projection]:
        """Input projections by name: "gate" and "up", or "in" if there is no gate."""
        return {"in": self.up} if self.gate is None else {"gate": self.gate, "up": self.up}


def taken_apart(fused: Linear, order: str, heads: int, kv_heads: int) -> tuple[Linear, Linear, Linear]:
    """Split a fused projection into the weights and biases of queries, keys and values.

    `order` is the order of outputs, see `Layout.order`; `heads` and `kv_heads` count query heads and key heads.
    """
    weights, biases = (None if one is None else _taken_apart(one, order, heads, kv_heads) for one in fused)
    assert weights is not None
    query, key, value = zip(weights, biases or (None, None, None), strict=True)
    return query, key, value


def _taken_apart(fused: torch.Tensor, order: str, heads: int, kv_heads: int) -> Sequence[torch.Tensor]:
    head_dim = len(fused) // (heads + 2 * kv_heads)
    if order == "stacked":
        return list(fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]))
    by_head = fused.unflatten(0, (heads, 3, head_dim))
    return [by_head[:, part].flatten(0, 1) for part in range(3)]


def reading(
    linear: Linear, norm: FrozenNorm | None, behind: FrozenNorm | None = None, head_dim: int | None = None
) -> Projection:
    """Return a projection that reads the residual stream as a linear map, with its norms folded in.

    Args:
        linear: weight and bias.
        norm: norm before the projection, None for none.
        behind: norm of the projection's output, of each head or of all at once; None for none.
        head_dim: number of elements of a head, to split the outputs into [heads, head_dim]; None for no heads.
    """
    weight, bias = linear
    constant = torch.zeros(len(weight), dtype=torch.float32) if bias is None else bias
    if norm is not None:
        with exact_products():
            constant = constant + weight @ norm.constant
        weight = norm.through(weight)
    if behind is not None:
        parts = (-1, behind.width)
        weight = behind.linear(weight.T.unflatten(1, parts)).flatten(1).T
        constant = behind.linear(constant.unflatten(0, parts)).flatten()
    if head_dim is not None:
        weight, constant = weight.unflatten(0, (-1, head_dim)), constant.unflatten(0, (-1, head_dim))
    return Projection(weight, constant)


def writing(linear: Linear, post: FrozenNorm | None, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a block's last projection as a linear map into the residual stream, with norm and factor folded in.

    Args:
        linear: weight, [..., in, hidden], and bias, [hidden].
        post: norm behind the projection, None for none.
        factor: factor of the block's output.

    Returns:
        Contribution of each input, [..., in, hidden], and the constant contribution, [hidden].
    """
    weight, bias = linear
    constant = torch.zeros(weight.shape[-1], dtype=torch.float32) if bias is None else bias
    if post is not None:
        weight, constant = post.linear(weight), post.linear(constant)
    return weight * factor, constant * factor
