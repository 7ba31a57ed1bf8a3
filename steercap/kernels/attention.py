"""Attention weights computed from captured queries and keys, by the attention rule of the model's layer.

Shape legend: heads = query heads; kv_heads = key heads, each shared by heads / kv_heads consecutive query heads;
queries, keys = tokens that attend, and tokens that can be attended to.

Weights are computed in float32, whatever autocast setting the process has, a few queries at a time, so that memory does
not grow with queries × keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int

from steercap.core.attention import AttentionRule
from steercap.core.display import brief
from steercap.errors import InvalidRequest, InvalidSelection
from steercap.kernels.bits import exact_products

#: Maximum number of attention logits computed at once: 64 MiB of float32.
CHUNK: Final = 1 << 24


@dataclass(frozen=True, eq=False)
class AttentionSummary:
    """Most attended tokens of each head of a layer, for each query token, with the entropy of the weights.

    Args:
        positions: positions of the query tokens, int64 [queries].
        targets: positions of the most attended tokens, by weight descending, int64 [heads, queries, top]; -1 if a query
            can attend to fewer tokens.
        weights: attention weights of the targets, float32 [heads, queries, top]; 0 at targets of -1.
        entropy: entropy in nats of each head's weights, the sink's included, float32 [heads, queries].
        first: weight of the sequence's first token, float32 [heads, queries]; 0 if it is outside of the window.
        sink: weight of the head's learned sink, which is no token, float32 [heads, queries]; 0 in models without sinks.
    """

    positions: Int[torch.Tensor, " queries"]
    targets: Int[torch.Tensor, "heads queries top"]
    weights: Float[torch.Tensor, "heads queries top"]
    entropy: Float[torch.Tensor, "heads queries"]
    first: Float[torch.Tensor, "heads queries"]
    sink: Float[torch.Tensor, "heads queries"]

    __repr__ = brief


@dataclass(frozen=True, eq=False)
class RecordedAttention:
    """`AttentionSummary` in the compact form of files: 3 bytes for each target, and an entropy.

    Args:
        positions: positions of the query tokens, int64 [queries].
        indices: positions of the targets, uint16 [queries, heads, top], or uint32 if positions need it; the query's
            position + 1 stands for no target.
        shares: weights of the targets in units of 1/255, uint8 [queries, heads, top].
        entropies: entropy in nats of each head's weights, float16 [queries, heads].

    Raises:
        ValueError: the tensors have other shapes or dtypes.
    """

    positions: Int[torch.Tensor, " queries"]
    indices: torch.Tensor
    shares: torch.Tensor
    entropies: torch.Tensor

    def __post_init__(self) -> None:
        shape = self.indices.shape
        dtypes = self.indices.dtype in {torch.uint16, torch.uint32}, self.shares.dtype, self.entropies.dtype
        fits = len(shape) == 3 and self.shares.shape == shape and self.entropies.shape == shape[:2]
        if not fits or dtypes != (True, torch.uint8, torch.float16) or len(self.positions) != shape[0]:
            raise ValueError(f"recorded attention of {tuple(shape)}, {self.indices.dtype}, does not fit its rows")

    @staticmethod
    def of(summary: AttentionSummary) -> RecordedAttention:
        """Encode a summary; weights are rounded to 1/255, and the first token's and sink's weights are dropped."""
        targets = summary.targets.transpose(0, 1)
        own = summary.positions[:, None, None]
        indices = torch.where(targets < 0, own + 1, targets)
        wide = bool(len(own)) and int(own.max()) + 1 > torch.iinfo(torch.uint16).max
        shares = (summary.weights.transpose(0, 1) * 255).round().to(torch.uint8)
        whole = indices.to(torch.uint32 if wide else torch.uint16).contiguous()
        return RecordedAttention(summary.positions, whole, shares.contiguous(), summary.entropy.T.half().contiguous())

    @property
    def targets(self) -> Int[torch.Tensor, "heads queries top"]:
        """Positions of the targets, by weight descending, int64 [heads, queries, top]; -1 for none."""
        found = self.indices.to(torch.int64)
        return torch.where(found > self.positions[:, None, None], -1, found).transpose(0, 1)

    @property
    def weights(self) -> Float[torch.Tensor, "heads queries top"]:
        """Weights of the targets, float32 [heads, queries, top], each rounded by at most 1/510."""
        return (self.shares.float() / 255).transpose(0, 1)

    @property
    def entropy(self) -> Float[torch.Tensor, "heads queries"]:
        """Entropy in nats of each head's weights, float32 [heads, queries]."""
        return self.entropies.float().T

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Tensors by the names that files give them."""
        return {"indices": self.indices, "shares": self.shares, "entropies": self.entropies}


@dataclass(frozen=True, eq=False)
class Attending:
    """Queries and keys of one layer, with the positions of both and the layer's attention rule.

    Args:
        rule: the layer's attention rule, as returned by `AttentionRule.understood`.
        queries: [queries, heads, head_dim], any floating dtype.
        keys: [keys, kv_heads, head_dim], any floating dtype.
        query_positions: position of each query, int64 [queries].
        key_positions: position of each key, ascending, int64 [keys].

    Raises:
        InvalidRequest: the numbers of query heads, key heads and sinks do not fit each other.
        InvalidSelection: the key of a position that a query attends to is missing.
    """

    rule: AttentionRule
    queries: Float[torch.Tensor, "queries heads head_dim"]
    keys: Float[torch.Tensor, "keys kv_heads head_dim"]
    query_positions: Int[torch.Tensor, " queries"]
    key_positions: Int[torch.Tensor, " keys"]

    def __post_init__(self) -> None:
        heads, sinks = self.queries.shape[1], len(self.rule.sinks)
        if heads % self.keys.shape[1] or sinks not in {0, heads}:
            raise InvalidRequest(
                f"{heads} heads of queries, {self.keys.shape[1]} of keys and {sinks} sinks do not fit each other"
            )
        first, stop = self.seen
        lacking = (stop - first != self.query_positions - self._earliest + 1).nonzero().flatten()
        if len(lacking):
            at, earliest = int(self.query_positions[lacking[0]]), int(self._earliest[lacking[0]])
            raise InvalidSelection(
                f"attention at position {at} reads the keys of positions {earliest} to {at}, and "
                f"{int((stop - first)[lacking[0]])} of these {at - earliest + 1} were captured; capture 'q' and 'k' of "
                "all tokens, or ask for tokens= whose keys are there"
            )

    @property
    def _earliest(self) -> Int[torch.Tensor, " queries"]:
        """First position that each query can attend to, int64 [queries]."""
        window = self.rule.window
        return (
            torch.zeros_like(self.query_positions) if window is None else (self.query_positions - window + 1).clamp(0)
        )

    @property
    def seen(self) -> tuple[Int[torch.Tensor, " queries"], Int[torch.Tensor, " queries"]]:
        """Range [start, stop), of indices into the keys, that each query can attend to: two of int64 [queries]."""
        first = torch.searchsorted(self.key_positions, self._earliest)
        return first, torch.searchsorted(self.key_positions, self.query_positions, right=True)


class Weights(NamedTuple):
    """Attention weights of a slice of the queries over a slice of the keys that has all that they attend to.

    Args:
        queries, keys: slices into the queries and keys of `Attending`.
        logits: logits before the softmax, -inf for keys that a query cannot attend to.
        weights: weights after the softmax.
        sink: weight of each head's sink.
    """

    queries: slice
    keys: slice
    logits: Float[torch.Tensor, "heads queries keys"]
    weights: Float[torch.Tensor, "heads queries keys"]
    sink: Float[torch.Tensor, "heads queries"]


def weights_of(attending: Attending, chunk: int = CHUNK) -> Iterator[Weights]:
    """Yield the attention weights of all queries, in consecutive chunks of queries.

    Args:
        attending: queries and keys.
        chunk: maximum number of logits in a chunk, which has at least one query.
    """
    first, stop = (ends.tolist() for ends in attending.seen)
    heads = attending.queries.shape[1]
    begin = 0
    while begin < len(first):
        end, low, high = begin + 1, first[begin], stop[begin]
        while end < len(first):
            wider = min(low, first[end]), max(high, stop[end])
            if heads * (end + 1 - begin) * (wider[1] - wider[0]) > chunk:
                break
            end, (low, high) = end + 1, wider
        yield _weigh(attending, slice(begin, end), slice(low, high))
        begin = end


def _weigh(attending: Attending, queries: slice, keys: slice) -> Weights:
    rule = attending.rule
    asked, known = attending.queries[queries].float(), attending.keys[keys].float()
    grouped = asked.unflatten(1, (known.shape[1], -1))
    with exact_products():
        logits = torch.einsum("qkgd,nkd->kgqn", grouped, known).flatten(0, 1) * rule.scale
    if rule.soft_cap is not None:
        logits = rule.soft_cap * torch.tanh(logits / rule.soft_cap)
    logits = logits.masked_fill(~_visible(attending, queries, keys), -torch.inf)
    sinks = logits.new_tensor(rule.sinks).view(-1, 1, 1).expand(-1, logits.shape[1], 1)
    weights = (torch.cat([logits, sinks], dim=-1) if rule.sinks else logits).softmax(-1)
    sink = weights[..., -1] if rule.sinks else weights.new_zeros(weights.shape[:2])
    return Weights(queries, keys, logits, weights[..., : logits.shape[-1]], sink)


def _visible(attending: Attending, queries: slice, keys: slice) -> Bool[torch.Tensor, "queries keys"]:
    behind = attending.query_positions[queries, None] - attending.key_positions[None, keys]
    return (behind >= 0) & (behind < (attending.rule.window or torch.inf))


def summarised(attending: Attending, top: int) -> AttentionSummary:
    """Return the `top` most attended tokens of each head and query, with entropy, first-token and sink weights.

    Args:
        attending: queries and keys.
        top: number of targets for each head and query.
    """
    heads, count = attending.queries.shape[1], len(attending.query_positions)
    device = attending.queries.device
    targets = torch.full((heads, count, top), -1, dtype=torch.int64, device=device)
    strongest = torch.zeros(heads, count, top, dtype=torch.float32, device=device)
    entropy, first, sink = (torch.zeros(heads, count, dtype=torch.float32, device=device) for _ in range(3))
    for part in weights_of(attending):
        positions, queries = attending.key_positions[part.keys], part.queries
        logits, at = part.logits.topk(min(top, len(positions)), dim=-1)
        found, seen = slice(0, at.shape[-1]), logits > -torch.inf
        targets[:, queries, found] = torch.where(seen, positions[at], -1)
        strongest[:, queries, found] = part.weights.gather(-1, at)
        entropy[:, queries] = torch.special.entr(part.weights).sum(-1) + torch.special.entr(part.sink)
        first[:, queries] = part.weights[..., positions == 0].sum(-1)
        sink[:, queries] = part.sink
    return AttentionSummary(attending.query_positions, targets, strongest, entropy, first, sink)


def numbers_of(summary: AttentionSummary) -> Float[torch.Tensor, "queries numbers"]:
    """Flatten a summary to one row per query: for each head, targets, weights, `first`, `sink` and `entropy`."""
    others = torch.stack([summary.first, summary.sink, summary.entropy], dim=-1)
    return torch.cat([summary.targets.float(), summary.weights, others], dim=-1).transpose(0, 1).flatten(1)


def summary_of(
    numbers: Float[torch.Tensor, "queries heads numbers"], positions: Int[torch.Tensor, " queries"], top: int
) -> AttentionSummary:
    """Return the summary that `numbers_of` flattened, reduced to the `top` most attended targets."""
    heads = numbers.transpose(0, 1)
    kept = (heads.shape[-1] - 3) // 2
    targets, weights, others = heads.split([kept, kept, 3], dim=-1)
    first, sink, entropy = others.unbind(-1)
    return AttentionSummary(positions, targets[..., :top].long(), weights[..., :top], entropy, first, sink)


def pattern(attending: Attending, max_bytes: int) -> Float[torch.Tensor, "heads queries keys"]:
    """Return the weights of all queries over all keys, float32 [heads, queries, keys]; 0 for keys not attended to.

    Raises:
        InvalidRequest: the result would take more than `max_bytes`.
    """
    shape = attending.queries.shape[1], len(attending.query_positions), len(attending.key_positions)
    wanted = shape[0] * shape[1] * shape[2] * torch.float32.itemsize
    if wanted > max_bytes:
        raise InvalidRequest(
            f"a pattern of {shape[0]} heads, {shape[1]} queries and {shape[2]} keys takes {wanted:,} bytes, and "
            f"max_bytes is {max_bytes:,}; ask for fewer tokens=, raise max_bytes=, or take handle.attention(layer)"
        )
    found = torch.zeros(shape, dtype=torch.float32)
    for part in weights_of(attending):
        found[:, part.queries, part.keys] = part.weights
    return found
