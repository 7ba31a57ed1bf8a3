"""Attention weights computed from captured queries and keys, by the rule of the model's own layer.

Shape legend: heads = query heads; kv_heads = heads of keys, each shared by heads / kv_heads consecutive query heads;
queries, keys = tokens whose weights are wanted, and tokens that can be attended to.

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

#: Logits computed at once: 64 MiB of float32.
CHUNK: Final = 1 << 24


@dataclass(frozen=True, eq=False)
class AttentionSummary:
    """Most strongly attended tokens of each head of a layer, for each query token.

    Args:
        positions: positions of the query tokens, int64 [queries].
        targets: positions of the most strongly attended tokens, strongest first, int64 [heads, queries, top]; -1 where
            a token sees fewer.
        weights: their attention weights, float32 [heads, queries, top]; 0 at targets of -1.
        entropy: entropy of all weights of a head and token, that of a sink included, in nats: float32 [heads, queries].
        first: weight of the first token of the sequence, float32 [heads, queries]; 0 where it is outside of the window.
        sink: weight of the head's learned sink, which is no token, float32 [heads, queries]; 0 in models without.
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
    """Strongest targets of each head of a layer as files keep them: 3 bytes each, and an entropy.

    Args:
        positions: positions of the query tokens, int64 [queries].
        indices: positions of the targets, uint16 [queries, heads, top], uint32 where a sequence has more positions; one
            beyond the query's own stands for a target that is not there.
        shares: their weights in units of 1/255, uint8 [queries, heads, top].
        entropies: entropy of all weights, in nats, float16 [queries, heads].

    Raises:
        ValueError: tensors of other shapes or dtypes.
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
        """Encode a summary; weights are rounded to 1/255, and those of the first token and of a sink are left out."""
        targets = summary.targets.transpose(0, 1)
        own = summary.positions[:, None, None]
        indices = torch.where(targets < 0, own + 1, targets)
        wide = bool(len(own)) and int(own.max()) + 1 > torch.iinfo(torch.uint16).max
        shares = (summary.weights.transpose(0, 1) * 255).round().to(torch.uint8)
        whole = indices.to(torch.uint32 if wide else torch.uint16).contiguous()
        return RecordedAttention(summary.positions, whole, shares.contiguous(), summary.entropy.T.half().contiguous())

    @property
    def targets(self) -> Int[torch.Tensor, "heads queries top"]:
        """Positions of the targets, strongest first, int64 [heads, queries, top]; -1 where a token sees fewer."""
        found = self.indices.to(torch.int64)
        return torch.where(found > self.positions[:, None, None], -1, found).transpose(0, 1)

    @property
    def weights(self) -> Float[torch.Tensor, "heads queries top"]:
        """Weights of the targets, float32 [heads, queries, top], each within 1/510 of the model's."""
        return (self.shares.float() / 255).transpose(0, 1)

    @property
    def entropy(self) -> Float[torch.Tensor, "heads queries"]:
        """Entropy of all weights of a head and token, in nats, float32 [heads, queries]."""
        return self.entropies.float().T

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Tensors by their names in files."""
        return {"indices": self.indices, "shares": self.shares, "entropies": self.entropies}


@dataclass(frozen=True, eq=False)
class Attending:
    """Queries, the keys that they can see, and the attention rule of their layer.

    Args:
        rule: the layer's attention rule, understood.
        queries: [queries, heads, head_dim], any floating dtype.
        keys: [keys, kv_heads, head_dim].
        query_positions: position of each query, int64 [queries].
        key_positions: position of each key, ascending, int64 [keys].

    Raises:
        InvalidRequest: the heads of queries, keys and sinks do not fit each other.
        InvalidSelection: the key of a position that a query sees is missing.
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
        """First position that each query sees, int64 [queries]."""
        window = self.rule.window
        return (
            torch.zeros_like(self.query_positions) if window is None else (self.query_positions - window + 1).clamp(0)
        )

    @property
    def seen(self) -> tuple[Int[torch.Tensor, " queries"], Int[torch.Tensor, " queries"]]:
        """First and end index, among the keys, of those that each query sees: two of int64 [queries]."""
        first = torch.searchsorted(self.key_positions, self._earliest)
        return first, torch.searchsorted(self.key_positions, self.query_positions, right=True)


class Weights(NamedTuple):
    """Weights of some consecutive queries over consecutive keys, which include all that any of these queries sees.

    Args:
        queries, keys: slices of the queries and keys.
        logits: logits before the softmax, -inf for keys that a query does not see.
        weights: weights after the softmax.
        sink: weight of each head's sink.
    """

    queries: slice
    keys: slice
    logits: Float[torch.Tensor, "heads queries keys"]
    weights: Float[torch.Tensor, "heads queries keys"]
    sink: Float[torch.Tensor, "heads queries"]


def weights_of(attending: Attending, chunk: int = CHUNK) -> Iterator[Weights]:
    """Yield the weights of all queries, some queries at a time.

    Args:
        attending: queries and keys.
        chunk: maximum number of logits to compute at once; at least those of one query are computed.
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
    with torch.autocast(known.device.type, enabled=False):
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
    """Return the strongest targets of each head and query, and the entropy, first-token and sink weights.

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
    """Lay a summary out as a row for each query: for each head its targets, weights, `first`, `sink` and `entropy`."""
    others = torch.stack([summary.first, summary.sink, summary.entropy], dim=-1)
    return torch.cat([summary.targets.float(), summary.weights, others], dim=-1).transpose(0, 1).flatten(1)


def summary_of(
    numbers: Float[torch.Tensor, "queries heads numbers"], positions: Int[torch.Tensor, " queries"], top: int
) -> AttentionSummary:
    """Return the summary that `numbers_of` laid out, with the `top` strongest of its targets."""
    heads = numbers.transpose(0, 1)
    kept = (heads.shape[-1] - 3) // 2
    targets, weights, others = heads.split([kept, kept, 3], dim=-1)
    first, sink, entropy = others.unbind(-1)
    return AttentionSummary(positions, targets[..., :top].long(), weights[..., :top], entropy, first, sink)


def pattern(attending: Attending, max_bytes: int) -> Float[torch.Tensor, "heads queries keys"]:
    """Return the weights of all queries over all keys, 0 for keys that a query does not see.

    Raises:
        InvalidRequest: it takes more.
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
