"""Statistics of the rows of a point, from a sample of them: moments of each element, norms, sparsity.

Computed per shard and merged in the order of shards in float64, so equal shards give equal bits. Deviations of elements
are rounded to float32 before they are added. Shape legend: `rows` = sampled rows, `width` = elements of a row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Integer
from numpy.typing import NDArray

from steercap.core.display import brief
from steercap.core.values import mixed, mixed_all
from steercap.files.tensors import as_numpy
from steercap.kernels.codecs.coded import CodedRows, Whole, decoded, parts_of

#: Elements processed at once by NumPy, which uses the calling thread alone and releases the GIL for others.
BLOCK_ELEMENTS: Final = 1 << 20
#: Fraction of its row's root mean square below which an element counts as small.
SMALL: Final = 0.01
#: Smallest float32 above 0.
LEAST: Final = np.finfo(np.float32).smallest_subnormal
#: Norm below which the squares of a row's deviations are finite in float32.
GREAT: Final = 2.0**60
#: Bins per doubling in the histogram of norms, 9 % wide each; it spans 2^-32 to 2^32, and its end bins all beyond.
CLASSES_AN_OCTAVE: Final = 8
OCTAVES: Final = 64


@dataclass(frozen=True, eq=False)
class PointStatistics:
    """Statistics of the sampled rows of one point; for projections, of the stored numbers.

    Args:
        count: number of sampled rows that are finite: int64 [].
        nonfinite: number of rows with NaN or infinity, excluded from all else: int64 [].
        mean: mean of each element: float64 [width].
        variance: population variance of each element: float64 [width].
        norm_mean, norm_min, norm_max: mean, minimum and maximum of the Euclidean norms of rows: float64 []; the minimum
            of no rows is infinite.
        norm_counts: histogram of norms; class i begins at 2^((i - 256) / 8), see `norm_quantile`: int64 [512].
        zeros: share of elements that are 0: float64 [].
        small: share of elements below `SMALL` of their row's root mean square, zeros included: float64 [].
    """

    count: Integer[torch.Tensor, ""]
    nonfinite: Integer[torch.Tensor, ""]
    mean: Float[torch.Tensor, " width"]
    variance: Float[torch.Tensor, " width"]
    norm_mean: Float[torch.Tensor, ""]
    norm_min: Float[torch.Tensor, ""]
    norm_max: Float[torch.Tensor, ""]
    norm_counts: Integer[torch.Tensor, " classes"]
    zeros: Float[torch.Tensor, ""]
    small: Float[torch.Tensor, ""]

    __repr__ = brief

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        return len(self.mean)

    @property
    def standard_deviation(self) -> Float[torch.Tensor, " width"]:
        """Standard deviation of each element: float64 [width]."""
        return self.variance.sqrt()

    def norm_quantile(self, share: float) -> float:
        """Return the quantile of the rows' norms, within 9 %; 0 if there are no rows.

        Args:
            share: share of rows at or below the quantile, 0 to 1.
        """
        if not int(self.count):
            return 0.0
        below = self.norm_counts.cumsum(0) >= share * int(self.count)
        upper = int(below.to(torch.int8).argmax()) + 1
        last = upper == len(self.norm_counts)  # which has no upper end
        norm = math.inf if last else 2 ** (upper / CLASSES_AN_OCTAVE - OCTAVES / 2)
        return float(min(max(norm, float(self.norm_min)), float(self.norm_max)))

    def merged(self, other: PointStatistics) -> PointStatistics:
        """Return the statistics of the rows of both together.

        Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances
        (1979).
        """
        mine, theirs = int(self.count), int(other.count)
        total = max(mine + theirs, 1)
        share = theirs / total
        apart = other.mean - self.mean
        spread = self.variance * (1 - share) + other.variance * share + apart.square() * (share * (1 - share))
        empty = not mine and not theirs
        return PointStatistics(
            self.count + other.count,
            self.nonfinite + other.nonfinite,
            self.mean + apart * share,
            self.variance if empty else spread,
            self.norm_mean + (other.norm_mean - self.norm_mean) * share,
            torch.minimum(self.norm_min, other.norm_min),
            torch.maximum(self.norm_max, other.norm_max),
            self.norm_counts + other.norm_counts,
            self.zeros + (other.zeros - self.zeros) * share,
            self.small + (other.small - self.small) * share,
        )


def statistics_of(pieces: Sequence[Whole], width: int, chosen: NDArray[np.int64] | None = None) -> PointStatistics:
    """Compute statistics of rows that come in pieces, [rows, ...] each; rows in a codec are decoded.

    `width` is the number of elements of a row. `chosen` holds the indices of the sampled rows over all pieces,
    ascending, see `drawn`; None for all.
    """
    running = _Running(width)
    looked_at = pieces if chosen is None else _picked(pieces, chosen)
    for block in _blocks(looked_at, max(1, BLOCK_ELEMENTS // width)):
        running.add(block)
    return running.statistics()


def drawn(rows: int, every: int, seed: int) -> NDArray[np.int64] | None:
    """Draw about one row in `every` at random, at least one; return the rows' indices, ascending: int64 [chosen].

    None, for `every` of 1, stands for all rows. Rows are drawn, not counted off: in windows of one length, counting
    would sample the same positions, and the first row of a window is unlike the others.
    """
    if every == 1:
        return None
    numbers = mixed_all(np.uint64(mixed(seed)) ^ np.arange(rows, dtype=np.uint64))
    chosen = np.flatnonzero(numbers % np.uint64(every) == 0)
    return np.array([numbers.argmin()]) if rows and not len(chosen) else chosen


def no_rows(width: int) -> PointStatistics:
    """Return the statistics of an empty sample of rows of `width` elements: zeros, and an infinite `norm_min`."""
    zero, none = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    line = torch.zeros(width, dtype=torch.float64)
    counts = torch.zeros(CLASSES_AN_OCTAVE * OCTAVES, dtype=torch.int64)
    return PointStatistics(none, none, line, line, zero, zero + math.inf, zero, counts, zero, zero)


def _picked(pieces: Sequence[Whole], chosen: NDArray[np.int64]) -> Iterator[Whole]:
    """Yield the chosen rows, piece by piece; `chosen` are row indices over all pieces, ascending."""
    ends = np.cumsum([0, *map(len, pieces)])
    edges = np.searchsorted(chosen, ends)
    for number, piece in enumerate(pieces):
        here = chosen[edges[number] : edges[number + 1]]
        if len(here):
            yield piece[torch.from_numpy(here - ends[number])]


def _blocks(pieces: Iterable[Whole], size: int) -> Iterator[NDArray[np.float32]]:
    """Yield decoded rows in blocks, float32 [size, width], the last one shorter, however rows were split in pieces."""
    waiting: deque[Whole] = deque()
    held = 0
    for piece in pieces:
        if len(piece):
            waiting.append(piece)
            held += len(piece)
        while held >= size:
            yield _take_rows(waiting, size)
            held -= size
    if held:
        yield _take_rows(waiting, held)


def _take_rows(waiting: deque[Whole], count: int) -> NDArray[np.float32]:
    """Remove the first `count` rows from the queue of pieces; return them decoded: float32 [count, width]."""
    found: list[Whole] = []
    while count:
        piece = waiting.popleft()
        if len(piece) > count:
            waiting.appendleft(piece[count:])
            piece = piece[:count]
        found.append(piece)
        count -= len(piece)
    return _decoded(_together(found))


def _together(pieces: Sequence[Whole]) -> Whole:
    """Concatenate pieces of one format; encoded rows stay encoded, to be decoded once."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if not isinstance(first, CodedRows):
        return _joined([parts_of(piece)["rows"] for piece in pieces])
    parts = {name: _joined([parts_of(piece)[name] for piece in pieces]) for name in first.parts}
    return replace(first, parts=parts)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of one dtype along their first axis, by NumPy, which releases the GIL."""
    return torch.from_numpy(np.concatenate([as_numpy(one) for one in tensors])).view(tensors[0].dtype)


def _decoded(rows: Whole) -> NDArray[np.float32]:
    """Return rows decoded and flattened: float32 [rows, width]."""
    flat = decoded(rows).flatten(1)
    if flat.dtype == torch.bfloat16:  # the upper half of a float32
        return (as_numpy(flat).astype(np.uint32) << 16).view(np.float32)
    return flat.numpy().astype(np.float32, copy=False)


class _Running:
    """Accumulator of the statistics of a point over blocks of rows.

    Elements are summed relative to the mean of the first block, so that rows far from the origin keep their variance.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = self.nonfinite = self.zeros = self.small = 0
        self.about: NDArray[np.float32] | None = None
        self.sums = np.zeros((2, width))
        self.norms, self.least, self.greatest = 0.0, math.inf, 0.0
        self.classes = np.zeros(CLASSES_AN_OCTAVE * OCTAVES, dtype=np.int64)

    def add(self, rows: NDArray[np.float32]) -> None:
        """Add a block of rows, float32 [rows, width]; rows with NaN or infinity are only counted."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
            if not math.isfinite(norms.sum()):
                good = np.isfinite(rows).all(axis=1)
                self.nonfinite += len(rows) - int(good.sum())
                rows, norms = rows[good], norms[good]
            if len(rows):
                self._add(rows, norms)

    def _add(self, rows: NDArray[np.float32], norms: NDArray[np.float64]) -> None:
        self.count += len(rows)
        self._add_norms(norms)
        limits = (norms * (SMALL / math.sqrt(self.width))).astype(np.float32)[:, None]
        limits = np.maximum(limits, LEAST)  # zeros are small in any row
        self.zeros += rows.size - int(np.count_nonzero(rows))
        self.small += int(np.count_nonzero(np.abs(rows) < limits))
        if self.about is None:
            self.about = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
        # Differences of the greatest numbers, and squares of great ones, are infinite in float32.
        apart = rows - (self.about if self.greatest < GREAT else self.about.astype(np.float64))
        self.sums[0] += apart.sum(axis=0, dtype=np.float64)
        self.sums[1] += np.square(apart, out=apart).sum(axis=0, dtype=np.float64)

    def _add_norms(self, norms: NDArray[np.float64]) -> None:
        self.norms += float(norms.sum())
        self.least, self.greatest = min(self.least, float(norms.min())), max(self.greatest, float(norms.max()))
        numbers = np.floor((np.log2(norms) + OCTAVES / 2) * CLASSES_AN_OCTAVE).clip(0, len(self.classes) - 1)
        self.classes += np.bincount(numbers.astype(np.int64), minlength=len(self.classes))

    def statistics(self) -> PointStatistics:
        """Return the statistics of all rows added so far."""
        if not self.count:
            return replace(no_rows(self.width), nonfinite=torch.tensor(self.nonfinite))
        assert self.about is not None
        apart, squares = self.sums / self.count
        elements = self.count * self.width
        return PointStatistics(
            torch.tensor(self.count),
            torch.tensor(self.nonfinite),
            torch.from_numpy(self.about + apart),
            torch.from_numpy((squares - apart**2).clip(min=0)),
            _number(self.norms / self.count),
            _number(self.least),
            _number(self.greatest),
            torch.from_numpy(self.classes),
            _number(self.zeros / elements),
            _number(self.small / elements),
        )


def _number(value: float) -> Float[torch.Tensor, ""]:
    return torch.tensor(value, dtype=torch.float64)


def named_tensors(end: str, statistics: PointStatistics) -> dict[str, torch.Tensor]:
    """Return the statistics as tensors by their names in a file: field name plus `end`, the point's suffix."""
    return {f"{field.name}{end}": getattr(statistics, field.name) for field in fields(statistics)}


def read_named(end: str, tensors: Mapping[str, torch.Tensor]) -> PointStatistics:
    """Read the statistics of the point with the suffix `end` from tensors named by `named_tensors`.

    Raises:
        KeyError: a tensor is missing.
    """
    return PointStatistics(**{field.name: tensors[f"{field.name}{end}"] for field in fields(PointStatistics)})
