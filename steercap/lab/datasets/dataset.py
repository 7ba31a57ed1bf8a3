"""Activation data set for torch: rows by index in any order, memory-mapped from the shards."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from steercap.core.schema import ATTENTION
from steercap.core.spec import Layers, Point
from steercap.core.values import index_of, shown
from steercap.errors import InvalidFile, InvalidRequest, InvalidSetting
from steercap.kernels.attention import AttentionSummary, summary_of
from steercap.lab.datasets.batches import ActivationBatches, Blocks, Order, ranks
from steercap.lab.datasets.definition import PointFormat
from steercap.lab.datasets.folder import DatasetFolder
from steercap.lab.datasets.reading import Join, Keep, OpenShard, TokenChoice, check_alike, points_of
from steercap.lab.datasets.remote import RemoteFolder
from steercap.lab.datasets.rows import (
    NORMALISE,
    Groups,
    Labelled,
    Normalisation,
    Normalise,
    Rows,
    at,
    groups_of,
    join_points,
    normalise_rows,
)
from steercap.lab.datasets.shards import ShardReceipt
from steercap.lab.datasets.statistics import PointStatistics
from steercap.lab.datasets.tables import COLUMNS

#: Maximum number of shards mapped at once. Shards behind a URL take local disk while mapped, so their maximum is what
#: two windows of rows that are shuffled together need.
MAPPED, MAPPED_REMOTE = 256, 4
#: Number of rows below which normalising by their statistics warns: a standard deviation is off by 7 % and more.
FEW: Final = 100


class ActivationDataset(Dataset["Rows | Labelled"]):
    """Map-style torch data set over a folder of activations; shards are memory-mapped, not read.

    `data[5]` is a row [*shape of the point], `data[5:9]` and `data[[5, 7]]` are rows [n, *shape]. With several points
    each is a dict by name, `{"resid_post[5]": ...}`, unless `join` says otherwise. Rows are in order of documents,
    windows and positions; `batches` shuffles them. A row of attention targets is [heads, 2k + 3]; see `attention`.

    Args:
        where: path or URL of the folder.
        layers: layers as in `CaptureSpec`, among those collected.
        sites: one site or several; None for all that were collected.
        at: points by name or by layer and site, instead of `layers` and `sites`.
        join: form of rows of several points: "dict", by name; "concatenate", [n, sum of widths]; "mix", each row of
            each point by itself, which multiplies the number of rows by that of points.
        positions: positions in the window to keep: `slice(1, None)` leaves out the first token of each.
        without_tokens: token ids whose rows are left out.
        keep: function from an `Index` to truth values, bool [rows]: True for rows to keep.
        normalise: normalisation by the stored statistics of each point, which are of the sampled rows
            (`statistics_every` of `collect`), whatever `positions`, `without_tokens` and `keep` say: "mean" moves rows
            so that their mean is 0, "standard" also scales each element to a variance of 1, "norm" scales rows so that
            their mean norm is the square root of their width.
        dtype: dtype of the rows; None for the model's, or float32 for rows decoded from a codec.
        labels: return rows as `Labelled`.
        partial: accept an incomplete data set, with the shards it has.
        storage_options: options of the URL's file system.

    Raises:
        InvalidFile: no such data set, a file that is missing or truncated, or a data set that is not complete.
        LayerOutOfRange: a point that was not collected.
        InvalidSetting, InvalidSelection, InvalidSpec: an invalid argument.
        InvalidRequest: points to be joined have different shapes, or there are no statistics to normalise by.
    """

    def __init__(
        self,
        where: str | Path,
        *,
        layers: Layers = "all",
        sites: str | Sequence[str] | None = None,
        at: Any = None,
        join: Join = "dict",
        positions: slice | range | None = None,
        without_tokens: Sequence[int] | int | None = None,
        keep: Keep | None = None,
        normalise: Normalise = "none",
        dtype: torch.dtype | None = torch.float32,
        labels: bool = False,
        partial: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if join not in get_args(Join):
            raise InvalidSetting(f"join={shown(join)}; use one of {', '.join(map(repr, get_args(Join)))}")
        if normalise not in NORMALISE:
            raise InvalidSetting(f"normalise={shown(normalise)}; use one of {', '.join(map(repr, NORMALISE))}")
        self.folder = DatasetFolder.open(where, **dict(storage_options or {}))
        self._receipts = _shards(self.folder, partial=partial)
        self._formats = points_of(self.folder.definition, layers, sites, at)
        if join == "mix":
            check_alike(self._formats, "join='mix'")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InvalidSetting(
                f"dtype={shown(dtype)}: rows are floating-point numbers; give a floating-point dtype, or None"
            )
        if self._attended and dtype not in {None, torch.float32, torch.float64}:
            raise InvalidSetting(f"dtype={dtype}: targets of attention are positions up to 65,535; give torch.float32")
        self._tokens = TokenChoice.parse(positions, without_tokens, keep)
        self._join, self._dtype, self._labels = join, dtype, labels
        self.normalisations = self._normalisations(normalise)
        self._mapped = MAPPED_REMOTE if self._is_remote else MAPPED
        self._prepare()
        self._kept = list[str]()
        counts = [self._count(number) for number in range(len(self._receipts))]
        self._edges = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    @property
    def points(self) -> tuple[str, ...]:
        """Names of the points whose rows are read, in order, such as "resid_post[5]"."""
        return tuple(str(known.point) for known in self._formats)

    @property
    def width(self) -> int:
        """Number of elements of a row; with `join="dict"`, of the first point's."""
        widths = [known.decoded_width for known in self._formats]
        return sum(widths) if self._join == "concatenate" else widths[0]

    def statistics(self, point: str | None = None) -> PointStatistics:
        """Return the statistics of a point's rows.

        They cover the rows sampled at collection (`statistics_every` of `collect`), regardless of `positions`,
        `without_tokens` and `keep`.

        Args:
            point: name of the point; None if only one is read.

        Raises:
            InvalidRequest: several points are read and none is named, or there are no statistics.
        """
        if point is None and len(self._formats) > 1:
            raise InvalidRequest(f"several points are read; name one of {', '.join(self.points)}")
        if point is not None and point not in self.points:
            raise InvalidRequest(f"{shown(point)} is not read here; name one of {', '.join(self.points)}")
        known = self._formats[0 if point is None else self.points.index(point)]
        return self._statistics([known])[known.point]

    def __len__(self) -> int:
        return int(self._edges[-1]) * self._each

    def __getitem__(self, which: Any) -> Rows | Labelled:
        """Return a row by its index, or rows by a slice or several indices; negative ones count from the end.

        Raises:
            IndexError: there is no such row.
        """
        found = self.gather(self._numbers(which))
        return found if index_of(which) is None else at(found, 0)

    def attention(self, which: Any, layer: int | None = None) -> AttentionSummary:
        """Return the tokens to which each head attends most, from a data set collected with `attention=`.

        Args:
            which: rows as in `data[which]`: a number, a slice or several numbers. With `labels=True`, `data[which]` has
                their documents, windows and token ids, in the same order.
            layer: index of the layer, negative from the last; None if the targets of one layer alone are read.

        Returns:
            A summary whose positions and targets count in each row's own window; weights are within 1/510 of the
            model's, the entropy within a 2,048th or 3e-8.

        Raises:
            IndexError: there is no such row.
            InvalidRequest: no targets of this layer are read, or points are joined by "mix".
        """
        places, index = self._attended, index_of(next(iter(self._attended), None) if layer is None else layer)
        if index is not None and index < 0:
            index += self.folder.definition.num_layers
        if index not in places or self._join == "mix" or (layer is None and len(places) > 1):
            known = ", ".join(map(str, places)) or "none; collect(attention=8) keeps them"
            other = ", and a join= other than 'mix'" if self._join == "mix" else ""
            raise InvalidRequest(f"attention(layer={shown(layer)}); give a layer with targets, {known}{other}")
        numbers = self._numbers(which)
        groups = groups_of(numbers, self._edges)
        rows = self._rows(places[index], groups, len(numbers))
        positions = self._labelled(rows, groups, np.zeros_like(numbers)).position
        return summary_of(rows.float(), positions, self._formats[places[index]].coding.k)

    def __getitems__(self, which: list[int]) -> list[Rows | Labelled]:
        """Return a list of rows by their indices, read together; called by a DataLoader."""
        found = self.gather(self._checked(np.asarray(which)))
        return [at(found, place) for place in range(len(which))]

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = True,
        buffer: int = 1 << 16,
        seed: int = 0,
        epochs: int = 1,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> ActivationBatches:
        """Return an iterable torch data set of shuffled batches, with each row once an epoch.

        Blocks of neighbouring rows come in a random order, and rows are shuffled among as many blocks as `buffer` rows
        make, so that disks read in sequence. The order follows from the seed, the epoch and these arguments; with a
        DataLoader it is the same for any number of workers, and ranks take turns at the batches.

        Args:
            batch_size: rows of a batch.
            shuffle: shuffle the rows; False for their stored order.
            buffer: number of rows shuffled together.
            seed: seed of the order, at least 0.
            epochs: number of passes over the rows, each in another order.
            drop_last: leave out batches at the end of an epoch that are short, or that not every rank would have.
            rank, world_size: share of the batches, every `world_size`-th from `rank` on; None for those of
                torch.distributed, where that is initialised.

        Raises:
            InvalidSetting: a number that is too small.
        """
        order = Order.checked(batch_size, shuffle, buffer, seed, epochs, drop_last, *ranks(rank, world_size))
        self._have_room(order.buffer)
        # Remote shards are fetched whole.
        return ActivationBatches(self, Blocks.of(self._edges * self._each, whole=self._is_remote), order)

    def gather(self, numbers: NDArray[np.int64]) -> Rows | Labelled:
        """Return rows by their indices, in that order, in the form that `join` and `labels` say.

        Args:
            numbers: row indices from 0 to `len(self) - 1`: int64 [n].
        """
        if self._join == "mix":
            return self._mixed(*np.divmod(numbers, self._each))
        groups = groups_of(numbers, self._edges)
        found = {str(k.point): self._rows(place, groups, len(numbers)) for place, k in enumerate(self._formats)}
        rows = join_points(found, self._join)
        if not self._labels:
            return rows
        return self._labelled(rows, groups, np.zeros_like(numbers))

    @cached_property
    def identity(self) -> str:
        """SHA-256, in hexadecimal, of all receipts and of the choice of rows: of which row has which index."""
        receipts, chosen = DatasetFolder.sum_of(self._receipts).sha256, self._tokens
        said = (receipts, chosen.first, chosen.end, chosen.step, sorted(chosen.without), *self._kept)
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def foresee(self, start: int, stop: int) -> None:
        """Ask the operating system to read rows [start, stop) ahead into its cache; none if they are behind a URL."""
        if self._is_remote:
            return
        first, last = start // self._each, -(-stop // self._each)
        number = int(np.searchsorted(self._edges, first, side="right")) - 1
        shard, base = self._shard(number), int(self._edges[number])
        places = shard.places(np.array([first, max(first, min(last, int(self._edges[number + 1])) - 1)]) - base)
        for point in range(len(self._formats)):
            shard.foresee(point, int(places[0]), int(places[1]) + 1)

    # Within

    @property
    def _each(self) -> int:
        """Number of indices per token: that of points with `join="mix"`, else 1."""
        return len(self._formats) if self._join == "mix" else 1

    def _prepare(self) -> None:
        self._shard = lru_cache(self._mapped)(self._opened)

    @property
    def _is_remote(self) -> bool:
        return isinstance(self.folder.storage, RemoteFolder)

    def _have_room(self, rows: int) -> None:
        """Raise the maximum of mapped shards to what two windows of `rows` rows need, if shards are behind a URL."""
        shards = MAPPED_REMOTE + 2 * rows * len(self._receipts) // max(1, len(self))
        if self._is_remote and shards > self._mapped:
            self._mapped = shards
            self._prepare()

    def _opened(self, number: int) -> OpenShard:
        return OpenShard(self.folder.storage, self._receipts[number], self._formats, self._tokens)

    def _count(self, number: int) -> int:
        """Return the number of selected rows of a shard; with `keep`, note the SHA-256 of their offsets."""
        shard = self._opened(number)
        if self._tokens.keep is not None and shard.offsets is not None:
            self._kept.append(hashlib.sha256(shard.offsets.tobytes()).hexdigest())
        return len(shard)

    def _statistics(self, formats: Sequence[PointFormat]) -> dict[Point, PointStatistics]:
        points = [known.point for known in formats]
        return self.folder.merged(points, self._receipts if self.folder.totals() is None else None)

    def _normalisations(self, kind: Normalise) -> dict[str, Normalisation]:
        """Return the normalisation of each point by its name; {} for kind "none"."""
        if kind == "none":
            return {}
        statistics = self._statistics(self._formats)
        seen = min(int(one.count) for one in statistics.values())
        if 0 < seen < FEW and self.folder.definition.statistics_every > 1:
            warnings.warn(
                f"normalise={kind!r} uses statistics of {seen} rows of {self.folder.storage}, those sampled while it "
                "was collected; collect with statistics_every=1 to use all rows",
                stacklevel=3,
            )
        return {str(point): Normalisation.of(kind, found) for point, found in statistics.items()}

    def _rows(self, point: int, groups: Groups, count: int) -> torch.Tensor:
        """Return `count` rows of the point at index `point`, normalised, in the requested order: [count, *shape]."""
        known = self._formats[point]
        found = torch.empty((count, *known.shape), dtype=self._dtype or known.dtype)
        for number, numbers, where in groups:
            shard = self._shard(number)
            rows = shard.rows(point, shard.places(numbers))
            normalise = self.normalisations.get(str(known.point))
            found.index_copy_(0, where, normalise_rows(rows, normalise, found.dtype))
        return found

    def _mixed(self, tokens: NDArray[np.int64], points: NDArray[np.int64]) -> Rows | Labelled:
        rows = torch.empty((len(tokens), *self._formats[0].shape), dtype=self._dtype or self._formats[0].dtype)
        for point in np.unique(points):
            (where,) = np.nonzero(points == point)
            groups = groups_of(tokens[where], self._edges)
            rows.index_copy_(0, torch.from_numpy(where), self._rows(int(point), groups, len(where)).to(rows.dtype))
        return self._labelled(rows, groups_of(tokens, self._edges), points) if self._labels else rows

    def _labelled(self, rows: Rows, groups: Groups, points: NDArray[np.int64]) -> Labelled:
        columns = {name: torch.empty(len(points), dtype=torch.int64) for name in COLUMNS}
        for number, numbers, where in groups:
            shard = self._shard(number)
            index = shard.index[shard.places(numbers)]
            for name, column in columns.items():
                column.index_copy_(0, where, torch.from_numpy(getattr(index, name)).long())
        return Labelled(rows, **columns, point=torch.from_numpy(points))

    @property
    def _attended(self) -> dict[int, int]:
        """Indices, among the points that are read, of those with attention targets, by layer."""
        places = enumerate(self._formats)
        return {known.layer: place for place, known in places if known.coding.encoding == ATTENTION}

    def _numbers(self, which: Any) -> NDArray[np.int64]:
        """Return the row indices, from 0, that an index, slice, mask or list names: int64 [n]."""
        if isinstance(which, slice):
            return np.arange(*which.indices(len(self)), dtype=np.int64)
        return self._checked(np.asarray(which if (index := index_of(which)) is None else [index]))

    def _checked(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        if numbers.dtype == np.bool_ and numbers.shape == (len(self),):
            numbers = np.flatnonzero(numbers)
        if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and len(numbers)):
            raise IndexError(
                "rows are indexed by an integer, a slice or a one-dimensional array of integers, not by "
                f"{shown(numbers)}"
            )
        if len(outside := numbers[(numbers < -len(self)) | (numbers >= len(self))]):
            raise IndexError(f"row {outside[0]} is outside this data set of {len(self)} rows")
        found = numbers.astype(np.int64)
        return np.where(found < 0, found + len(self), found)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without mapped shards, which each DataLoader worker maps for itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_shard"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def __repr__(self) -> str:
        return f"ActivationDataset({str(self.folder.storage)!r}: {len(self):,} rows of {', '.join(self.points)})"


def _shards(folder: DatasetFolder, *, partial: bool) -> list[ShardReceipt]:
    """Return the receipts of the shards to read, in order; an incomplete data set is refused unless `partial`."""
    receipts = list(folder.sound().values())
    if folder.totals() is not None:
        if why := folder.wrong_whole(receipts, content=False):
            raise InvalidFile(why)
    elif not partial:
        raise InvalidFile(
            f"{folder.storage} is not complete: it has {len(receipts)} shards and no dataset.json; resume collecting "
            "it, or open the shards that exist with partial=True"
        )
    return receipts
