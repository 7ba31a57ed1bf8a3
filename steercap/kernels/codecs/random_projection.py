"""Random projections: `k` sums of a row's elements with random signs, divided by √k, stored as integers.

The matrix of signs, [k, width], is never sent: it has the bits of NumPy's Philox generator (4x64, ten rounds) with the
seed as key, little-endian, row by row. So the first numbers of a larger k equal those of a smaller k, except for the
factor. Scalar products of rows projected with one matrix are unbiased estimates of the rows' own, with a standard
deviation of at most √(2 / k) times the product of the norms, √(1 / k) for orthogonal rows. Numbers are coded in groups
of 128 with a scale each, `scale × q`; rounding is symmetric about zero, so it adds no bias.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch

from steercap.kernels.bits import GROUP, exact_products
from steercap.kernels.codecs import Codec, PointTables, added, dtype_of, packed
from steercap.kernels.codecs.uniform import about_zero, floats, groups_of, of_members, pack_scales, restored

if TYPE_CHECKING:
    from steercap.core.schema import Coding, PointSchema

#: Default maximum number of bytes of a `Matrices` cache.
MATRIX_BYTES: Final = 256 << 20


class Matrices:
    """Thread-safe LRU cache of tensors by key, of at most `most_bytes` or the one used last."""

    def __init__(self, most_bytes: int = MATRIX_BYTES) -> None:
        self._most_bytes = most_bytes
        self._known: dict[Hashable, torch.Tensor] = {}
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor of a key, from the cache or made by `make` and cached."""
        with self._lock:
            known = self._known.pop(key, None)
            if known is None:
                known = make()
            self._known[key] = known
            while len(self._known) > 1 and sum(one.nbytes for one in self._known.values()) > self._most_bytes:
                del self._known[next(iter(self._known))]
            return known


#: Name of the matrix's construction, written to files.
FAMILY: Final = "rademacher-philox4x64"


class RandomProjection(Codec):
    """Codec of random projections, as signed integer codes with a scale per group; decoded to float32 [rows, k].

    Args:
        bits: number of bits of a code, 8 or 16.
    """

    default_k: ClassVar[int] = 512
    seeded: ClassVar[bool] = True

    def __init__(self, bits: int) -> None:
        self._bytes = bits // 8
        self._steps = 2 ** (bits - 1) - 1

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return 4 * _groups(coding) + self._bytes * coding.k

    def matrix(self, width: int, coding: Coding) -> torch.Tensor:
        """Return the matrix of signs without its factor, float32 [k, width]; shared, so read-only."""
        return signs(coding.k, width, coding.seed)

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        assert vectors is not None, "rows are projected with a matrix"
        with exact_products():
            numbers = rows.float() @ vectors.T * coding.k**-0.5
        scale, codes = about_zero(groups_of(numbers, GROUP), self._steps)
        whole = codes.flatten(1)[:, : coding.k].to(self._dtype).contiguous()
        return torch.cat([pack_scales(scale), whole.view(torch.uint8)], dim=1)

    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        groups = _groups(coding)
        codes = packed(stored[:, 4 * groups :]).view(self._dtype)
        return {"q": codes, "scale": floats(stored, 0, groups)}

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        return restored(parts["q"], _of_numbers(parts["scale"], coding))

    def error_bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        return _of_numbers(parts["scale"], coding).double() / 2

    def joined(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add up the shards' projections, which gives those of whole rows."""
        return added(shards)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, tables: PointTables, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_rp import launch_rp

        rows, codes = ring.view(dtype_of(tables.schema)), ring.view(self._dtype)
        launch_rp(rows, codes, records, tables.points, vectors, self._steps)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.int8 if self._bytes == 1 else torch.int16


#: Codecs by name, with 8 and with 16 bits per number.
MEMBERS: Final = {
    "rp8": RandomProjection(8),
    "rp16": RandomProjection(16),
}

_SIGNS: Final = Matrices()


def signs(k: int, width: int, seed: int) -> torch.Tensor:
    """Return a seed's matrix of signs, 1 or -1, float32 [k, width]; cached and shared, so read-only."""
    return _SIGNS.get((k, width, seed), lambda: _drawn(k, width, seed))


def _drawn(k: int, width: int, seed: int) -> torch.Tensor:
    row = -(-width // 64)
    words = np.random.Philox(key=seed).random_raw(k * row).astype("<u8").reshape(k, row)
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=width, bitorder="little")
    return torch.from_numpy(bits).float().mul_(2).sub_(1)


def _groups(coding: Coding) -> int:
    return -(-coding.k // GROUP)


def _of_numbers(scales: torch.Tensor, coding: Coding) -> torch.Tensor:
    return of_members(scales, GROUP, coding.k)
