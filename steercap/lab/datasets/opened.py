"""Shard opened for reading: tensors are memory-mapped, the index is read on first use."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from steercap.errors import InvalidFile
from steercap.lab.datasets.choosing import TokenChoice
from steercap.lab.datasets.definition import PointFormat
from steercap.lab.datasets.shards import INDEX, ROWS, Receipt, name_of
from steercap.lab.datasets.storage import Storage
from steercap.lab.datasets.tables import Index, decoded_index

Parts: TypeAlias = Mapping[str, torch.Tensor]

PAGE: Final = mmap.PAGESIZE
_LIBC: Final = ctypes.CDLL(None)


class OpenShard:
    """Shard opened for reading.

    Args:
        storage: storage of the folder.
        receipt: receipt of the shard.
        points: formats of the points to read.
        tokens: selection of tokens whose rows are read.

    Reading raises InvalidFile for a file that is missing, truncated, or differs from the definition.
    """

    def __init__(self, storage: Storage, receipt: Receipt, points: Sequence[PointFormat], tokens: TokenChoice) -> None:
        self._storage, self._receipt, self._tokens = storage, receipt, tokens
        self.path = storage.path(name_of(receipt.number, ROWS))
        self._points = points

    @cached_property
    def index(self) -> Index:
        """Index of all its rows, unselected ones included."""
        name = name_of(self._receipt.number, INDEX)
        found = decoded_index(self._storage.read(name), self._storage.path(name))
        if len(found) != self._receipt.rows:
            raise InvalidFile(
                f"{self._storage.path(name)} names {len(found)} rows, and its receipt {self._receipt.rows}"
            )
        return found

    @cached_property
    def offsets(self) -> NDArray[np.int64] | None:
        """Offsets of the selected rows, int64 [selected]; None for all rows."""
        return None if self._tokens.all else self._tokens.offsets(self.index)

    def __len__(self) -> int:
        """Return the number of selected rows."""
        return self._receipt.rows if self.offsets is None else len(self.offsets)

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the offsets, among all rows of the shard, of rows given by their indices among the selected ones."""
        return numbers if self.offsets is None else self.offsets[numbers]

    def rows(self, number: int, places: NDArray[np.int64]) -> torch.Tensor:
        """Return decoded rows of a point, copied: [places, *shape]."""
        known, parts, constants = self._mapped[number]
        at = torch.from_numpy(places)
        return known.rows_of({name: part.index_select(0, at) for name, part in parts.items()}, constants)

    def foresee(self, number: int, start: int, stop: int) -> None:
        """Ask the system to read the rows at [start, stop) of a point into its cache."""
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
                    return [self._tensors(file, known) for known in self._points]
        except (OSError, SafetensorError) as error:
            raise InvalidFile(f"{self.path} cannot be read: {error}; copy it again, or collect it again") from error

    def _check_size(self, local: Path) -> None:
        size, wanted = local.stat().st_size, self._receipt.files[ROWS].bytes
        if size != wanted:
            raise InvalidFile(f"{self.path} has {size:,} bytes, and its receipt says {wanted:,}; copy it again")

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
