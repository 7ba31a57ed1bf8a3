"""Blocks of a layer as exact functions of whole rows, with the norms themselves and unfolded matrices.

The module `blocks` has the same weights as linear maps of directions. Here rows are of the residual stream at a block's
input, and results are a block's output, before it is added to the stream. Shape legend as in `blocks`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float

from steercap.core.display import brief
from steercap.core.spec import CaptureSpec
from steercap.core.values import shown
from steercap.errors import InvalidSpec
from steercap.kernels.bits import exact_products
from steercap.kernels.codecs import codec_of
from steercap.kernels.codecs.random_projection import signs
from steercap.lab.mechanism.weights import TensorFiles
from steercap.lab.mechanism.weights.blocks import AttentionWeights, FrozenNorm, Linear, reading, writing


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Attention block of one layer; its matrices are float32, as in the checkpoint, with no norm folded in.

    Rotary embedding is omitted, so results are those at position 0, and so is the scale of the attention scores.

    Args:
        layer: index of the layer.
        query, key, value: weight [heads · head_dim, hidden] (kv_heads for key and value) and bias of each.
        output: weight [hidden, heads · head_dim] and bias of the last projection.
        heads: number of query heads.
        norm, post: norms before and behind the block, None for none.
        query_norm, key_norm: norms of queries and keys, None for none.
        factor: factor of the block's output before it is added to the stream.
    """

    layer: int
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    heads: int
    norm: FrozenNorm | None
    post: FrozenNorm | None
    query_norm: FrozenNorm | None
    key_norm: FrozenNorm | None
    factor: float

    __repr__ = brief

    @property
    def head_dim(self) -> int:
        """Number of elements of a head."""
        return self.query[0].shape[0] // self.heads

    @property
    def matrices(self) -> dict[str, torch.Tensor]:
        """Unfolded weights that read the stream, [out, hidden], by name: "q", "k" and "v"."""
        return {"q": self.query[0], "k": self.key[0], "v": self.value[0]}

    @property
    def is_odd(self) -> bool:
        """True if the block is an odd function of rows: no projection has a bias, and no norm a constant."""
        norms = (self.norm, self.post, self.query_norm, self.key_norm)
        biases = (self.query[1], self.key[1], self.value[1], self.output[1])
        constants = [norm.constant for norm in norms if norm is not None] + [
            bias for bias in biases if bias is not None
        ]
        return not any(bool(one.any()) for one in constants)

    def normed(self, rows: Float[torch.Tensor, "rows hidden"]) -> Float[torch.Tensor, "rows hidden"]:
        """Apply the norm before the block to rows of the stream: the input of `matrices`, float32."""
        return _normed(self.norm, rows.float())

    def queries(self, rows: Float[torch.Tensor, "rows hidden"]) -> Float[torch.Tensor, "rows heads head_dim"]:
        """Return each head's queries for rows of the stream, norms applied, biases included: float32."""
        return self._headed(rows, self.query, self.query_norm)

    def keys(self, rows: Float[torch.Tensor, "rows hidden"]) -> Float[torch.Tensor, "rows heads head_dim"]:
        """Return the keys that each query head uses, as for `queries`; heads that share a key head have equal ones."""
        return self._shared(self._headed(rows, self.key, self.key_norm))

    def forward(self, rows: Float[torch.Tensor, "rows hidden"]) -> Float[torch.Tensor, "rows hidden"]:
        """Return the block's output, biases, norms and factor applied, if each row attends to itself alone: float32."""
        values = self._shared(self._headed(rows, self.value, None)).flatten(1)
        return self.factor * _normed(self.post, _projected(values, self.output))

    def contributions(
        self, z: Float[torch.Tensor, "rows heads head_dim"], k: int = 128, seed: int = 0
    ) -> Float[torch.Tensor, "rows heads k"]:
        """Project each head's contribution to the block's output, its z through its part of the last projection, to k
        numbers; without the bias, and before the norm behind the block and the factor.

        The random projection is that of the codec `rp8` for rows of the stream with the same k and seed, unrounded. The
        sum over heads is the projection of their whole contribution, and the dot product with a projected direction
        estimates how much of that direction a head writes.

        Args:
            z: rows at the site `z`, of any floating dtype.
            k: number of elements of each projection.
            seed: seed of the random signs.

        Raises:
            InvalidSpec: z is not floats of this shape, or k or seed is not valid for `rp8`.
        """
        wanted = (self.heads, self.output[0].shape[1] // self.heads)
        if not isinstance(z, torch.Tensor) or tuple(z.shape[1:]) != wanted or not z.is_floating_point():
            had = tuple(z.shape) if isinstance(z, torch.Tensor) else shown(z)
            raise InvalidSpec(f"z={had}; give rows at the site z, [rows, {wanted[0]}, {wanted[1]}] of floats")
        spec = CaptureSpec(codec="rp8", codec_k=k, codec_seed=seed)
        coding = codec_of("rp8", spec.codec_k, spec.codec_seed)
        drawn = signs(coding.k, len(self.output[0]), coding.seed) * coding.k**-0.5
        with exact_products():
            through = (drawn @ self.output[0]).unflatten(1, wanted)
            found: torch.Tensor = torch.einsum("rnd,knd->rnk", z.float(), through)
        return found

    def folded(self) -> AttentionWeights:
        """Return the block as linear maps of directions, norms folded in."""
        by_head = self.output[0].unflatten(1, (self.heads, self.head_dim)).permute(1, 2, 0)
        output, constant = writing((by_head, self.output[1]), self.post, self.factor)
        return AttentionWeights(
            layer=self.layer,
            query=reading(self.query, self.norm, self.query_norm, self.head_dim),
            key=reading(self.key, self.norm, self.key_norm, self.head_dim),
            value=reading(self.value, self.norm, None, self.head_dim),
            output=output.transpose(1, 2),
            output_constant=constant,
            norm=self.norm,
            post=self.post,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
        )

    def _headed(self, rows: torch.Tensor, linear: Linear, norm: FrozenNorm | None) -> torch.Tensor:
        """Apply the block's norm, a projection and its own norm to rows: float32 [rows, query/key heads, head_dim]."""
        found = _projected(self.normed(rows), linear)
        if norm is not None:
            found = norm(found.unflatten(1, (-1, norm.width))).flatten(1)
        by_head: torch.Tensor = found.unflatten(1, (-1, self.head_dim))
        return by_head

    def _shared(self, found: torch.Tensor) -> torch.Tensor:
        return found.repeat_interleave(self.heads // found.shape[1], dim=1)


@dataclass(frozen=True, eq=False)
class FeedForward:
    """Feed-forward block of one layer.

    Args:
        layer: index of the layer.
        inner: function of normed rows that returns the output of the last projection, float32 [rows, hidden]:
            transformers' module, or experts.
        norm, post: norms before and behind the block, None for none.
        factor: factor of the block's output before it is added to the stream.
        matrices: unfolded weights that read the stream, [neurons, hidden], by name: "gate" and "up", or "up" alone
            without a gate; empty for a layer with experts.
    """

    layer: int
    inner: Callable[[torch.Tensor], torch.Tensor]
    norm: FrozenNorm | None
    post: FrozenNorm | None
    factor: float
    matrices: Mapping[str, torch.Tensor]

    __repr__ = brief

    def normed(self, rows: Float[torch.Tensor, "rows hidden"]) -> Float[torch.Tensor, "rows hidden"]:
        """Apply the norm before the block to rows of the stream: the input of `matrices`, float32."""
        return _normed(self.norm, rows.float())

    def forward(self, rows: Float[torch.Tensor, "rows hidden"]) -> Float[torch.Tensor, "rows hidden"]:
        """Return the block's output for each row, float32: norm, neurons (of the experts that the row is routed to),
        last projection, norm behind it and factor applied.

        Args:
            rows: rows of the stream at the block's input, any dtype.
        """
        with torch.no_grad(), exact_products():
            found = _normed(self.post, self.inner(self.normed(rows)))
            return found * self.factor


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """Experts of one layer; on each call, the weights of the experts that rows are routed to are read one by one.

    Args:
        router: transformers' router with its weights: it returns logits [rows, experts], and the scores and indices of
            each row's experts, [rows, chosen].
        activation: activation of the gates.
        read: function that reads the gate, up and down weights, [out, in] each, of the expert of an index.
    """

    router: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    activation: Callable[[torch.Tensor], torch.Tensor]
    read: Callable[[int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    __repr__ = brief

    @classmethod
    def of(cls, module: Any, files: TensorFiles, prefix: str, names: Sequence[str]) -> RoutedExperts:
        """Open the experts of a layer; only the router's weights are read.

        Args:
            module: transformers' module of router and experts, without weights.
            files: tensor files of the checkpoint.
            prefix: path of the layer's module in the model.
            names: names of router and weights in the checkpoint, as in `Layout.experts`.
        """
        router, *parts = names
        hidden, neurons = module.experts.down_proj.shape[1:]
        shapes = ((neurons, hidden), (neurons, hidden), (hidden, neurons))

        def read(expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            full = (f"{prefix}.{part.format(expert)}.weight" for part in parts)
            gate, up, down = map(files.read, full, shapes)
            return gate, up, down

        return cls(files.fill(f"{prefix}.{router}", copy.deepcopy(module.gate).eval()), module.experts.act_fn, read)

    def __call__(self, rows: Float[torch.Tensor, "rows hidden"]) -> Float[torch.Tensor, "rows hidden"]:
        """Return the sum of the outputs of each row's experts, weighted by their scores."""
        _, scores, chosen = self.router(rows)
        found = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            at, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up, down = self.read(expert)
            neurons = self.activation(rows[at] @ gate.T) * (rows[at] @ up.T)
            found.index_add_(0, at, scores[at, place, None] * (neurons @ down.T))
        return found


def _normed(norm: FrozenNorm | None, rows: torch.Tensor) -> torch.Tensor:
    return rows if norm is None else norm(rows)


@exact_products()
def _projected(rows: torch.Tensor, linear: Linear) -> torch.Tensor:
    weight, bias = linear
    return torch.nn.functional.linear(rows, weight, bias)
