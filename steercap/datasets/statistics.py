"""What is known of the rows of a point without reading them all: moments of each element, norms, sparsity.

Per shard in float64, merged in the order of the shards, so that the same shards give the same bits.
Shape legend: `rows` = rows that were looked at, `width` = elements of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Final

import torch
from jaxtyping import Float, Integer

from steercap.encodings.coded import CodedRows, Whole

#: Rows that are looked at together.
BLOCK: Final = 512
#: An element is small if it is below this part of its row's root mean square.
SMALL: Final = 0.01
#: Norms are counted in classes of 2^(1/8), 9 % wide, from 2^-32 up to 2^32; what lies outside is in the outermost.
CLASSES_AN_OCTAVE: Final = 8
OCTAVES: Final = 64


@dataclass(frozen=True, eq=False)
class PointStatistics:
    """Of the rows of one point that were looked at. Of projections, of the numbers that are kept.

    Args:
        count: rows that were looked at and are finite: int64 [].
        nonfinite: rows with NaN or infinity, which count nowhere else: int64 [].
        mean: of each element: float64 [width].
        variance: of each element, divided by `count`: float64 [width].
        norm_mean, norm_min, norm_max: of the Euclidean norms of rows: float64 []; infinite minimum of no rows.
        norm_counts: rows by their norm; class i is from 2^((i - 256) / 8), see `norm_quantile`: int64 [512].
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

    @property
    def width(self) -> int:
        """Elements of a row."""
        return len(self.mean)

    @property
    def standard_deviation(self) -> Float[torch.Tensor, " width"]:
        """Of each element: float64 [width]."""
        return self.variance.sqrt()

    def norm_quantile(self, share: float) -> float:
        """A norm that so great a share of rows does not exceed, within 9 %; 0 of no rows.

        Args:
            share: from 0 to 1.
        """
        if not int(self.count):
            return 0.0
        below = self.norm_counts.cumsum(0) >= share * int(self.count)
        upper = float(below.to(torch.int8).argmax()) + 1
        norm = 2 ** (upper / CLASSES_AN_OCTAVE - OCTAVES / 2)
        return float(min(max(norm, float(self.norm_min)), float(self.norm_max)))

    def merged(self, other: PointStatistics) -> PointStatistics:
        """Of both.

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


def statistics_of(pieces: Iterable[Whole], width: int, every: int = 1) -> PointStatistics:
    """Statistics of rows that come in pieces; of every `every`-th of them, counted over all pieces from the first.

    Args:
        pieces: [rows, ...] each, or in a codec; those are decoded.
        width: elements of a row.
        every: 1 for all rows.
    """
    found = no_rows(width)
    for block in _blocks(pieces, every):
        found = found.merged(_of_block(block))
    return found


def no_rows(width: int) -> PointStatistics:
    """Statistics of no row."""
    zero, none = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    line = torch.zeros(width, dtype=torch.float64)
    counts = torch.zeros(CLASSES_AN_OCTAVE * OCTAVES, dtype=torch.int64)
    return PointStatistics(none, none, line, line, zero, zero + math.inf, zero, counts, zero, zero)


def _blocks(pieces: Iterable[Whole], every: int) -> Iterator[Float[torch.Tensor, "rows width"]]:
    """Blocks of BLOCK rows in float32, the last with what is left: they do not depend on how rows came in pieces."""
    waiting: list[torch.Tensor] = []
    held = skip = 0
    for piece in pieces:
        chosen = piece[skip::every]
        skip = (skip - len(piece)) % every
        for start in range(0, len(chosen), BLOCK):
            waiting.append(_plain(chosen[start : start + BLOCK]))
            held += len(waiting[-1])
            if held >= BLOCK:
                together = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
                yield together[:BLOCK]
                waiting, held = [together[BLOCK:]], held - BLOCK
    if held:
        yield torch.cat(waiting)


def _plain(rows: Whole) -> Float[torch.Tensor, "rows width"]:
    whole = rows.decoded() if isinstance(rows, CodedRows) else rows
    return whole.flatten(1).float()


def _of_block(rows: Float[torch.Tensor, "rows width"]) -> PointStatistics:
    finite = rows.isfinite().all(dim=1) if not bool(rows.sum().isfinite()) else None
    total = len(rows)
    rows = rows if finite is None else rows[finite]
    if not len(rows):
        nothing = no_rows(rows.shape[1])
        return PointStatistics(**{**_tensors(nothing), "nonfinite": torch.tensor(total)})
    count, width = rows.shape
    mean = rows.mean(0, dtype=torch.float64)
    # Deviations from the rounded mean, corrected for the rounding: exact where rows are far from the origin.
    centre = mean.float()
    squares = (rows - centre).square_().sum(0, dtype=torch.float64)
    variance = (squares / count - (mean - centre).square()).clamp_(min=0)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    classes = (norms.log2() + OCTAVES / 2).mul(CLASSES_AN_OCTAVE).floor().clamp(0, OCTAVES * CLASSES_AN_OCTAVE - 1)
    small = rows.abs() < (norms * (SMALL / math.sqrt(width))).float()[:, None]
    return PointStatistics(
        torch.tensor(count),
        torch.tensor(total - count),
        mean,
        variance,
        norms.mean(),
        norms.min(),
        norms.max(),
        torch.bincount(classes.long(), minlength=OCTAVES * CLASSES_AN_OCTAVE),
        (rows == 0).sum() / torch.tensor(count * width, dtype=torch.float64),
        (small | (rows == 0)).sum() / torch.tensor(count * width, dtype=torch.float64),
    )


def named_tensors(end: str, found: PointStatistics) -> dict[str, torch.Tensor]:
    """The tensors of a file, by their names there: "mean" and the end of the point's name."""
    return {f"{name}{end}": tensor for name, tensor in _tensors(found).items()}


def read_named(end: str, tensors: Mapping[str, torch.Tensor]) -> PointStatistics:
    """What `named_tensors` gave.

    Raises:
        KeyError: one is missing.
    """
    return PointStatistics(**{field.name: tensors[f"{field.name}{end}"] for field in fields(PointStatistics)})


def _tensors(found: PointStatistics) -> dict[str, torch.Tensor]:
    return {field.name: getattr(found, field.name) for field in fields(found)}
