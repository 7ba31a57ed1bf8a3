"""Reading of a data set: selection of points and rows, and memory-mapped shards."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from steercap.core.spec import At, Layers, parse_layers, parse_points, parse_sites, resolve_layers
from steercap.core.values import index_of, parts_of, shown
from steercap.errors import InvalidFile, InvalidRequest, InvalidSelection, InvalidSpec, LayerOutOfRange
from steercap.lab.datasets.definition import DatasetDefinition, PointFormat
from steercap.lab.datasets.shards import INDEX, ROWS, ShardReceipt, header_of, name_of, read_checked
from steercap.lab.datasets.storage import Storage
from steercap.lab.datasets.tables import Index, decoded_index

#: Form of rows of several points. dict: a tensor per point, by name. concatenate: a token's rows concatenated. mix:
#: each row of each point by itself.
Join: TypeAlias = Literal["dict", "concatenate", "mix"]
#: Function that selects rows: from an index to truth values, bool [rows].
Keep: TypeAlias = Callable[[Index], NDArray[np.bool_]]
Parts: TypeAlias = Mapping[str, torch.Tensor]
PAGE: Final = mmap.PAGESIZE
_LIBC: Final = ctypes.CDLL(None)


@dataclass(frozen=True)
class TokenChoice:
    """Selection of tokens whose rows are read; by default all.

    Args:
        first, end, step: slice of positions in the window; no end for None.
        without: ids of tokens whose rows are left out, such as the beginning-of-text token.
        keep: function from an index to truth values, bool [rows]; importable, if DataLoader workers are spawned.
    """

    first: int = 0
    end: int | None = None
    step: int = 1
    without: tuple[int, ...] = ()
    keep: Keep | None = None

    @staticmethod
    def parse(positions: Any, without: Any, keep: Keep | None) -> TokenChoice:
        """Return the selection for a user's `positions`, `without_tokens` and `keep`; None is no restriction.

        Raises:
            InvalidSelection: positions are not a forward slice from 0 on, token ids are not whole numbers, or `keep` is
                not a function.
        """
        given = slice(None) if positions is None else positions
        if isinstance(given, range):
            given = slice(given.start, given.stop, given.step)
        parts = [given.start, given.stop, given.step] if isinstance(given, slice) else [-1]
        if any(part is not None and (index_of(part) is None or part < 0) for part in parts) or parts[-1] == 0:
            raise InvalidSelection(f"positions={shown(positions)}; give a slice from 0 on, such as slice(1, None)")
        several = [] if without is None else parts_of(without, "without_tokens")
        tokens = [without] if several is None else several
        if any(index_of(token) is None for token in tokens):
            raise InvalidSelection(f"without_tokens={shown(without)}; give token ids")
        if keep is not None and not callable(keep):
            raise InvalidSelection(f"keep={shown(keep)}; give a function from an Index to a truth value for each row")
        return TokenChoice(given.start or 0, given.stop, given.step or 1, tuple(map(int, tokens)), keep)

    @property
    def all(self) -> bool:
        """True if no restriction is given, so that every row is selected."""
        return self == TokenChoice()

    def offsets(self, index: Index) -> NDArray[np.int64]:
        """Return the offsets, in a shard with this index, of the selected rows, ascending: int64 [chosen]."""
        chosen = np.ones(len(index), dtype=bool)
        position = index.position.astype(np.int64)
        chosen &= (position >= self.first) & ((position - self.first) % self.step == 0)
        if self.end is not None:
            chosen &= position < self.end
        if self.without:
            chosen &= ~np.isin(index.token, self.without)
        if self.keep is not None:
            kept = np.asarray(self.keep(index))
            if kept.dtype != np.bool_ or kept.shape != chosen.shape:
                raise InvalidSelection(
                    f"keep= gave {kept.dtype} {kept.shape} of {len(index)} rows; give a truth value each"
                )
            chosen &= kept
        return np.flatnonzero(chosen)


def points_of(
    definition: DatasetDefinition, layers: Layers = "all", sites: str | Sequence[str] | None = None, at: Any = None
) -> tuple[PointFormat, ...]:
    """Return the formats of the selected points of a data set, in the order of its definition.

    Args:
        definition: definition of the data set.
        layers: layers as in `CaptureSpec`; negative ones count from the model's last.
        sites: one site or several; None for all that were collected.
        at: points by name or by layer and site, instead of `layers` and `sites`.

    Raises:
        LayerOutOfRange: a selected point was not collected.
        InvalidSpec: layers or sites are given beside `at`, or negative layers of a model of unknown depth.
    """
    if at is not None:
        if layers != "all" or sites is not None:
            raise InvalidSpec("at= already names the points; leave layers= and sites= out")
        return _at(definition, at)
    wanted = None if sites is None else parse_sites(sites)
    known = {point.layer for point in definition.points}
    chosen = known if _is_all(layers) else set(resolve_layers(layers, _layers_of(definition, layers)))
    found = tuple(p for p in definition.points if p.layer in chosen and (wanted is None or p.site in wanted))
    asked = chosen if not _is_all(layers) else set()
    if not found or asked - {point.layer for point in found} or set(wanted or ()) - {point.site for point in found}:
        raise _lacking(definition, f"layers={shown(layers)}, sites={shown(sites)}")
    return found


def _is_all(layers: Layers) -> bool:
    return isinstance(layers, str) and parse_layers(layers) == "all"


def _layers_of(definition: DatasetDefinition, layers: Layers) -> int:
    if definition.num_layers:
        return definition.num_layers
    parts = parts_of(layers, "layers") or [layers]
    if any((index := index_of(part)) is None or index < 0 for part in parts):
        raise InvalidSpec(
            f"layers={shown(layers)}: the data set does not say how many layers the model has; give layers from 0"
        )
    return max(point.layer for point in definition.points) + 1


def _at(definition: DatasetDefinition, at: At | Sequence[At]) -> tuple[PointFormat, ...]:
    found = []
    for name in parse_points(at):
        layer = name.layer
        if layer is not None and layer < 0:
            layer += _layers_of(definition, layer)
        here = [p for p in definition.points if p.site == name.site and layer in {None, p.layer}]
        if not here:
            raise _lacking(definition, shown(at))
        found += here
    return tuple(dict.fromkeys(found))


def _lacking(definition: DatasetDefinition, wanted: str) -> LayerOutOfRange:
    return LayerOutOfRange(
        f"{wanted}: it was not collected; collected: {', '.join(str(p.point) for p in definition.points)}"
    )


def check_alike(points: Sequence[PointFormat], why: str) -> None:
    """Check that the rows of all points have one shape.

    Raises:
        InvalidRequest: the shapes differ; the message begins with `why`.
    """
    if len({point.shape for point in points}) > 1:
        shapes = ", ".join(f"{point.point} of {point.shape}" for point in points)
        raise InvalidRequest(
            f"{why} needs points of one shape, and these are {shapes}; choose some by layers= and sites="
        )


class OpenShard:
    """Shard of a data set, opened for reading; its files are read or mapped on first use.

    Methods raise InvalidFile for a file that is missing, truncated, or differs from the definition.
    """

    def __init__(
        self, storage: Storage, receipt: ShardReceipt, points: Sequence[PointFormat], tokens: TokenChoice
    ) -> None:
        self._storage, self._receipt, self._tokens = storage, receipt, tokens
        self.path = storage.path(name_of(receipt.number, ROWS))
        self._points = points

    @cached_property
    def index(self) -> Index:
        """Index of all rows of the shard, unselected ones included."""
        path = self._storage.path(name_of(self._receipt.number, INDEX))
        found = decoded_index(read_checked(self._storage, self._receipt, INDEX), path)
        if len(found) != self._receipt.rows:
            raise InvalidFile(f"{path} names {len(found)} rows, and its receipt {self._receipt.rows}")
        return found

    @cached_property
    def offsets(self) -> NDArray[np.int64] | None:
        """Offsets of the selected rows in the shard, ascending: int64 [selected]; None if all are selected."""
        return None if self._tokens.all else self._tokens.offsets(self.index)

    def __len__(self) -> int:
        """Return the number of selected rows."""
        return self._receipt.rows if self.offsets is None else len(self.offsets)

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the offsets, among all rows of the shard, of rows given by their indices among the selected ones."""
        return numbers if self.offsets is None else self.offsets[numbers]

    def rows(self, number: int, places: NDArray[np.int64]) -> torch.Tensor:
        """Return decoded rows of the `number`-th point, copied: [places, *shape]; `places` are offsets in the shard."""
        known, parts, constants = self._mapped[number]
        at = torch.from_numpy(places)
        return known.rows_of({name: part.index_select(0, at) for name, part in parts.items()}, constants)

    def foresee(self, number: int, start: int, stop: int) -> None:
        """Ask the operating system to read the rows at [start, stop) of the `number`-th point into its cache."""
        for part in self._mapped[number][1].values():
            whole = part[start:stop]
            first = whole.data_ptr() // PAGE * PAGE
            _LIBC.madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(whole.data_ptr() + whole.nbytes - first), mmap.MADV_WILLNEED
            )

    @cached_property
    def _mapped(self) -> list[tuple[PointFormat, Parts, Parts]]:
        name = name_of(self._receipt.number, ROWS)
        try:
            with self._storage.fetched(name) as local:
                self._check_size(local)
                with safe_open(local, framework="pt") as file:
                    self._check_header(file.metadata() or {})
                    return [self._tensors(file, known) for known in self._points]
        except (OSError, SafetensorError) as error:
            raise InvalidFile(f"{self.path} cannot be read: {error}; copy it again, or collect it again") from error

    def _check_size(self, local: Path) -> None:
        size, wanted = local.stat().st_size, self._receipt.files[ROWS].bytes
        if size != wanted:
            raise InvalidFile(f"{self.path} has {size:,} bytes, and its receipt says {wanted:,}; copy it again")

    def _check_header(self, metadata: Mapping[str, str]) -> None:
        if metadata.get("steercap") != header_of(self._receipt.definition, shard=self._receipt.number):
            raise InvalidFile(f"{self.path} holds the rows of another shard or data set; copy it again")

    def _tensors(self, file: Any, known: PointFormat) -> tuple[PointFormat, Parts, Parts]:
        parts = {part: file.get_tensor(f"{part}{known.end}") for part in known.tensors}
        constants = {name: file.get_tensor(f"{name}{known.end}") for name in known.constants}
        for part, (shape, dtype) in known.tensors.items():
            wanted, found = (self._receipt.rows, *shape), parts[part]
            if found.shape != wanted or found.dtype != dtype:
                raise InvalidFile(
                    f"{self.path} holds {part}{known.end} as {tuple(found.shape)} of {found.dtype}, and must hold "
                    f"{wanted} of {dtype}; collect it again"
                )
        return known, parts, constants
