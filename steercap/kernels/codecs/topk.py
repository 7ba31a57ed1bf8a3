"""Codecs that store the strongest numbers alone: SAE features, elements of rows in 8 bits, targets of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from steercap.core.schema import LINE_BYTES
from steercap.kernels.bits import FULL8_STEPS, TOPK8_HEAD
from steercap.kernels.codecs import Codec, PointTables, RowEncoder, dtype_of, packed
from steercap.kernels.codecs.uniform import columns_of, floats, from_least, half_step, pack_scales, restored

if TYPE_CHECKING:
    from steercap.core.schema import Coding, PointSchema

#: Number of bytes before a row's indices: the number of nonzero elements, int32, and `rest`, float32.
HEAD: Final = 8
#: Maximum number of bytes of feature activations computed at once.
BLOCK_BYTES: Final = 64 << 20


class Features(Codec):
    """Encoding of the `k` strongest SAE features of a row (`CaptureSpec(sae=)`): float32 values with int32 indices.

    They are ordered by magnitude, descending; unused places have index -1. Also stored are `active`, the number of
    nonzero features, and `rest`, the maximum magnitude that was left out. A row with NaN or infinity has NaN values, no
    index, and -1 for `active`.
    """

    is_codec: ClassVar[bool] = False
    default_k: ClassVar[int] = 32

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return HEAD + 8 * coding.k

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        return strongest(rows, coding.k)

    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        numbers = stored.contiguous().view(torch.int32)
        values = stored.contiguous().view(torch.float32)
        first, middle = HEAD // 4, HEAD // 4 + coding.k
        return {
            "q": values[:, middle:].clone(),
            "indices": numbers[:, first:middle].clone(),
            "active": numbers[:, 0].clone(),
            "rest": values[:, 1].clone(),
        }

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        indices = parts["indices"]
        rows = parts["q"].new_zeros((len(indices), schema.shard_width))
        rows.scatter_add_(1, indices.clamp(min=0).long(), parts["q"].where(indices >= 0, 0.0))
        return rows.masked_fill_((parts["active"] < 0)[:, None], torch.nan).view(-1, *schema.shard_shape)

    def error_bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        most = parts["rest"].double()[:, None].repeat(1, schema.shard_width)
        kept = most.gather(1, parts["indices"].clamp(min=0).long())
        exact = kept.where(parts["indices"] < 0, 0.0)
        return most.scatter_reduce_(1, parts["indices"].clamp(min=0).long(), exact, "amin").view(
            -1, *schema.shard_shape
        )

    def invalid_reason(self, parts: Mapping[str, torch.Tensor], schema: PointSchema) -> str:
        indices, values = parts["indices"].long(), parts["q"]
        found = indices.sort(dim=1).values
        twice = (found.diff(dim=1) == 0) & (found[:, 1:] >= 0)
        if bool((indices < -1).any()) or bool((indices >= schema.shard_width).any()) or bool(twice.any()):
            return f"'indices' must differ, and lie from 0 to {schema.shard_width - 1}, or be -1"
        if bool(((indices < 0) & (values != 0) & ~values.isnan()).any()):
            return "'q' has values of no index"
        return ""

    def launch(self, ring: torch.Tensor, records: torch.Tensor, tables: PointTables, vectors: torch.Tensor) -> None:
        dtype, width = dtype_of(tables.schema), tables.schema.shard_width
        lines = -(-width * dtype.itemsize // LINE_BYTES)
        first = (records[:, :1] + tables.points[:, 0]).flatten()
        size = self.row_bytes(tables.schema, tables.coding)
        words, at = ring.view(-1).view(torch.int64), torch.arange(size // 8, device=ring.device)
        start = (records[:, 1:] * (LINE_BYTES // 8) + tables.points[:, 1] // 8).flatten()
        of_row = torch.arange(lines, device=ring.device)
        for own, to in zip(first.split(part := rows_at_once(tables.encoder, width)), start.split(part), strict=True):
            held = ring[own[:, None] + of_row].flatten(1)[:, : width * dtype.itemsize]
            stored = strongest_features(held.contiguous().view(dtype), tables.encoder, tables.coding.k)
            words[to[:, None] + at] = stored.view(torch.int64)


def rows_at_once(encoder: RowEncoder | None, width: int) -> int:
    """Return the maximum number of rows whose feature activations, or elements without an SAE, fit in `BLOCK_BYTES`."""
    return max(1, BLOCK_BYTES // (4 * (width if encoder is None else encoder.d_sae)))


def strongest_features(rows: torch.Tensor, encoder: RowEncoder | None, k: int) -> torch.Tensor:
    """Encode the `k` features of greatest magnitude of rows, or their elements without an encoder; see `strongest`."""
    return strongest(rows if encoder is None else encoder.activations(rows), k)


def strongest(rows: torch.Tensor, k: int) -> torch.Tensor:
    """Encode each row's `k` elements of greatest magnitude as `Features` does: uint8 [rows, row bytes], without a sync.

    Args:
        rows: [rows, elements], any floating dtype; a row with NaN or infinity is stored as NaN.
        k: number of elements stored per row; where fewer are nonzero, unused indices are -1.
    """
    rows = rows.float()
    good = rows.isfinite().all(dim=1)
    found = rows.abs().topk(min(k + 1, rows.shape[1]), dim=1)
    indices = found.indices[:, :k].to(torch.int32)
    values = rows.gather(1, found.indices[:, :k])
    rest = found.values[:, k] if rows.shape[1] > k else rows.new_zeros(len(rows))
    active = (rows != 0).sum(dim=1, dtype=torch.int32)
    indices = indices.where((values != 0) & good[:, None], -1)
    values, rest = values.where(good[:, None], torch.nan), rest.where(good, torch.nan)
    active = active.where(good, -1)
    if missing := k - indices.shape[1]:  # there are no more
        indices = torch.nn.functional.pad(indices, (0, missing), value=-1)
        values = torch.nn.functional.pad(values, (0, missing))
    columns = (active[:, None], rest[:, None].view(torch.int32), indices, values.contiguous().view(torch.int32))
    return torch.cat(columns, dim=1).view(torch.uint8)


class TopK8(Codec):
    """Codec of the `k` elements of greatest magnitude, with uint16 indices and uint8 codes, for sparse rows.

    `row[indices] = zero + scale × q`, indices ascending; all other elements are decoded as zero. Of elements of equal
    magnitude the first are stored. The error of a stored element is at most `scale / 2`, that of any other at most
    `rest`, the smallest stored magnitude.
    """

    default_k: ClassVar[int] = 64
    indexed: ClassVar[bool] = True

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return TOPK8_HEAD + 3 * self._kept(schema, coding)

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        order = rows.float().abs().sort(dim=1, descending=True, stable=True).indices
        indices = order[:, : self._kept(schema, coding)].sort(dim=1).values
        kept = rows.gather(1, indices)
        scale, zero, codes = from_least(kept, FULL8_STEPS)
        bad = ~rows.isfinite().all(dim=1)
        scale[bad] = torch.nan
        rest = kept.float().abs().amin(dim=1)
        where = indices.to(torch.uint16).view(torch.uint8)
        return torch.cat([pack_scales(scale, zero, rest), where, codes.to(torch.uint8)], dim=1)

    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        kept = self._kept(schema, coding)
        scale, zero, rest = columns_of(floats(stored, 0, 3))
        indices = packed(stored[:, TOPK8_HEAD : TOPK8_HEAD + 2 * kept]).view(torch.uint16)
        return {
            "q": packed(stored[:, TOPK8_HEAD + 2 * kept :]),
            "indices": indices,
            "scale": scale,
            "zero": zero,
            "rest": rest,
        }

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        values = restored(parts["q"], parts["scale"][:, None], parts["zero"][:, None])
        rows = values.new_zeros((len(values), schema.shard_width))
        rows.scatter_(1, parts["indices"].long(), values)
        return rows.view(-1, *schema.shard_shape)

    def error_bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        most = parts["rest"].double()[:, None].repeat(1, schema.shard_width)
        half = half_step(parts["scale"], FULL8_STEPS)[:, None].expand(parts["indices"].shape)
        return most.scatter_(1, parts["indices"].long(), half).view(-1, *schema.shard_shape)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, tables: PointTables, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_uniform import launch_topk8

        width, kept = tables.schema.shard_width, self._kept(tables.schema, tables.coding)
        launch_topk8(ring.view(dtype_of(tables.schema)), ring, records, tables.points, width, kept)

    @staticmethod
    def _kept(schema: PointSchema, coding: Coding) -> int:
        """Return the number of elements stored of a shard: `k`, which include all that the whole row would store."""
        return min(coding.k, schema.shard_width)


#: Maximum number of positions of a sequence; as an index, it stands for no target.
MOST_POSITIONS: Final = (1 << 16) - 1
#: Number of bytes for each target of a head and token, and for the rest of a head and token.
TARGET_BYTES, OTHER_BYTES = 3, 4
#: Code of the weight 1; codes of weights start at 0.
STEPS: Final = 255


class AttentionTargets(Codec):
    """Encoding of attention summaries, flattened by `numbers_of` to rows [rows, heads × (2k + 3)].

    A head and token takes 3k + 4 bytes: k targets of two bytes, the entropy as float16, and, in units of 1/255, the
    weights of the k targets, the first token and the sink.
    """

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

    def error_bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        entropy = parts["entropy"].double()
        above = parts["entropy"].nextafter(parts["entropy"].new_tensor(torch.inf)).double()
        found = entropy.new_full((*entropy.shape, 2 * coding.k + 3), 0.5 / STEPS)
        found[..., : coding.k], found[..., -1] = 0.0, (above - entropy) / 2
        return found

    def invalid_reason(self, parts: Mapping[str, torch.Tensor], schema: PointSchema) -> str:
        entropy = parts["entropy"]
        return "" if bool((entropy.isfinite() & (entropy >= 0)).all()) else "'entropy' must be finite, and not negative"


STRONGEST: Final = Features()
MEMBERS = {
    "features": STRONGEST,
    "topk8": TopK8(),
    "attention": AttentionTargets(),
}
