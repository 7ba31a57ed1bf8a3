"""Strongest targets of attention, and further numbers of each head: what the workers make of queries and keys.

A head of a token takes 3k + 4 bytes: k targets of two bytes, the entropy as float16, and in units of 1/255 the k
weights of the targets and those of the first token and of a sink.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from steercap.kernels.codecs import Codec, packed

if TYPE_CHECKING:
    from steercap.core.schema import Coding, PointSchema

#: Maximum number of positions of a sequence; the last of 16 bits stands for a target that is not there.
MOST_POSITIONS: Final = (1 << 16) - 1
#: Bytes of a head of a token for each target, and besides them.
TARGET_BYTES, OTHER_BYTES = 3, 4
#: Steps of a weight between 0 and 1.
STEPS: Final = 255


class AttentionTargets(Codec):
    """Encoding of summaries, which `kernels.attention.numbers_of` lays out as rows [rows, heads × (2k + 3)]."""

    is_codec: ClassVar[bool] = False
    default_k: ClassVar[int] = 8

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return schema.shard_shape[0] * (TARGET_BYTES * coding.k + OTHER_BYTES)

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        heads = rows.view(len(rows), schema.shard_shape[0], -1)
        targets, weights, others, entropy = heads.split([coding.k, coding.k, 2, 1], dim=-1)
        indices = targets.where(targets >= 0, float(MOST_POSITIONS)).to(torch.int32).to(torch.uint16)
        shares = ((part * STEPS).round().to(torch.uint8) for part in (weights, others))
        parts = (indices, entropy.half(), *shares)
        return torch.cat([part.contiguous().view(torch.uint8).flatten(1) for part in parts], dim=1)

    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        heads, k = schema.shard_shape[0], coding.k
        each = stored.split([heads * size for size in (2 * k, 2, k, 2)], dim=1)
        indices, entropy, weights, others = map(packed, each)
        rows = len(stored)
        return {
            "q": weights.view(rows, heads, k),
            "indices": indices.view(torch.uint16).view(rows, heads, k),
            "entropy": entropy.view(torch.float16).view(rows, heads),
            "first": others.view(rows, heads, 2)[..., 0].clone(),
            "sink": others.view(rows, heads, 2)[..., 1].clone(),
        }

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        indices = parts["indices"].float()
        targets = indices.where(indices < MOST_POSITIONS, -1.0)
        weights, first, sink = (parts[name].float() / STEPS for name in ("q", "first", "sink"))
        others = first[..., None], sink[..., None], parts["entropy"].float()[..., None]
        return torch.cat([targets, weights, *others], dim=-1)

    def bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        entropy = parts["entropy"].double()
        above = parts["entropy"].nextafter(parts["entropy"].new_tensor(torch.inf)).double()
        found = entropy.new_full((*entropy.shape, 2 * coding.k + 3), 0.5 / STEPS)
        found[..., : coding.k], found[..., -1] = 0.0, (above - entropy) / 2
        return found

    def damage(self, parts: Mapping[str, torch.Tensor], schema: PointSchema) -> str:
        entropy = parts["entropy"]
        return "" if bool((entropy.isfinite() & (entropy >= 0)).all()) else "'entropy' must be finite, and not negative"


MEMBER = AttentionTargets()
