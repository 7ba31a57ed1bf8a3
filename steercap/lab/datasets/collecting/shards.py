"""Blocks become shards, which threads write while the model goes on; those that are there are compared and left."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from steercap.concurrency.loops import finished, on_thread
from steercap.core.spec import Point
from steercap.errors import CollectionStopped, InvalidRequest, RunDiffers
from steercap.kernels.codecs.coded import Whole
from steercap.lab.datasets import DatasetFolder, Index, Receipt, Shard
from steercap.lab.datasets.collecting.pipeline import Block, Ended
from steercap.lab.datasets.shards import RECEIPT, name_of
from steercap.lab.datasets.storage import Storage

#: Shards that are written at once, each hashed and synced by itself; the one that is filled is in memory beside them. A
#: writer waits for the disk for more than half of its time.
WRITERS: Final = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
#: How much larger than it should be a shard may get, where documents are longer than the first few.
MOST_TIMES: Final = 16


@dataclass
class _Filling:
    """A shard that is being filled.

    Args:
        number: of it.
        digest: SHA-256 over its documents so far.
        begun: that of as many as the shard has that is there, in hexadecimal; "" of fewer.
    """

    number: int
    digest: Any = field(default_factory=hashlib.sha256)
    begun: str = ""
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    indices: list[Index] = field(default_factory=list)
    rows: dict[Point, list[Whole]] = field(default_factory=dict)


class Sharder:
    """Writes the shards of one folder.

    Args:
        folder: of the data set.
        points: what its rows are of.
        receipts: the shards that are there.
        shard_bytes: that a shard should have.
        first: number of the shard that the first document is of.

    Attributes:
        bytes: written.
        written: shards that are there.
    """

    def __init__(
        self,
        folder: DatasetFolder,
        points: Sequence[Point],
        receipts: Mapping[int, Receipt],
        shard_bytes: int,
        first: int = 0,
    ) -> None:
        self._folder, self._points, self._receipts = folder, tuple(points), dict(receipts)
        self._most_bytes, self._row_bytes = MOST_TIMES * shard_bytes, folder.definition.row_bytes
        self._filling = _Filling(first)
        self._writing: list[Future[Receipt]] = []
        self.bytes, self.written = 0, len(receipts)

    @property
    def _each(self) -> int:
        return self._folder.definition.documents_per_shard

    async def add(self, block: Block) -> None:
        """Take a block; waits while too much is unwritten.

        Raises:
            RunDiffers: documents of a shard that is there are others.
            InvalidRequest: a shard gets far larger than it should be.
            CollectionStopped: one could not be written.
        """
        first, ended = 0, block.ended
        while first < len(block.index) or ended:
            number = self._filling.number
            stop = int(np.searchsorted(block.index.document, (number + 1) * self._each))
            mine = [one for one in ended if one.number < (number + 1) * self._each]
            self._take(block, first, stop)
            self._enter(mine)
            if first == stop and not mine:
                break
            first, ended = stop, ended[len(mine) :]
            if self._filling.documents == self._each:
                await self._close()
        await self._look()

    def _take(self, block: Block, first: int, stop: int) -> None:
        """Keep the rows [first, stop) of a block."""
        if first == stop:
            return
        filling = self._filling
        whole = (first, stop) == (0, len(block.index))
        filling.indices.append(block.index if whole else block.index[first:stop])
        for point in self._points:
            pieces = block.rows[point] if whole else _cut(block.rows[point], first, stop)
            filling.rows.setdefault(point, []).extend(pieces)
        filling.bytes += (stop - first) * self._row_bytes
        if filling.bytes > self._most_bytes:
            raise InvalidRequest(
                f"shard {filling.number} has come to {filling.bytes:,} bytes, {MOST_TIMES} times what it should: its "
                f"{self._each:,} documents are longer, or more of their rows are kept, than of the first few; give a "
                "greater shard_bytes, and the same call goes on; or another folder, with fewer documents_per_shard"
            )

    def _enter(self, documents: Sequence[Ended]) -> None:
        filling = self._filling
        there = self._receipts.get(filling.number)
        for one in documents:
            filling.digest.update(one.digest)
            filling.documents += 1
            filling.tokens += one.read
            if there is not None and filling.documents == there.documents:
                filling.begun = filling.digest.hexdigest()

    async def finish(self) -> None:
        """Write what is left, and wait until all is written.

        Raises:
            As `add`.
        """
        if self._filling.documents:
            await self._close()
        beyond = [number for number in self._receipts if number >= self._filling.number]
        if beyond:
            raise RunDiffers(
                f"{self._folder.storage} holds shard {beyond[0]}, and the corpus ends before it: it is another one; "
                "give another folder, or the corpus it was begun with"
            )
        while self._writing:
            await self._look(least=1)

    async def aclose(self) -> None:
        """Wait for what is being written, however it ends; a cancellation is raised when it has ended.

        Whoever waits for this gives the folder to others then.
        """
        cancelled: asyncio.CancelledError | None = None
        while self._writing:
            try:
                await finished(self._writing.pop())
            except asyncio.CancelledError as error:
                cancelled = error
            except Exception:  # noqa: BLE001, S110 -- why it could not be written, somebody was told, or the call failed before
                pass
        if cancelled is not None:
            raise cancelled

    async def _close(self) -> None:
        """The shard is full: write it, or compare it with the one that is there."""
        filling, self._filling = self._filling, _Filling(self._filling.number + 1)
        there = self._receipts.get(filling.number)
        if there is not None:
            check_same(self._folder.storage, there, filling.documents, filling.begun)
            return
        rows: dict[Point, Sequence[Whole]] = {point: filling.rows.get(point, []) for point in self._points}
        index = _joined(filling.indices)
        digest = filling.digest.hexdigest()
        shard = Shard(filling.number, filling.documents, digest, filling.tokens, index, rows)
        while len(self._writing) >= WRITERS:
            await self._look(least=1)
        self._writing.append(on_thread(partial(self._folder.write, shard), "steercap shard"))

    async def _look(self, *, least: int = 0) -> None:
        """See what has been written; wait for one at least if asked to."""
        if least:
            waiting = [asyncio.wrap_future(future) for future in self._writing]
            for one in waiting:
                one.add_done_callback(_seen)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        done = [future for future in self._writing if future.done()]
        self._writing = [future for future in self._writing if future not in done]
        for future in done:
            with stopping(self._folder.storage, self):
                receipt = future.result()
            self.bytes += receipt.bytes
            self.written += 1


def _seen(future: asyncio.Future[Receipt]) -> None:
    """Retrieve an error that is raised elsewhere, of which asyncio would complain."""
    if not future.cancelled():
        future.exception()


def check_same(storage: Storage, there: Receipt, documents: int, begun: str) -> None:
    """Check that a shard that is there is of the documents that the corpus has in its place.

    Args:
        storage: of the data set.
        there: the shard's receipt.
        documents: of the corpus, in the shard's place.
        begun: SHA-256 over as many of these as the shard has, in hexadecimal; anything else if there are fewer.

    Raises:
        RunDiffers: they are others, or more: the corpus has grown.
    """
    if begun != there.documents_sha256 or documents < there.documents:
        raise RunDiffers(
            f"{storage} holds shard {there.number} of other documents: the corpus is another one, or was changed; "
            "give another folder, or the corpus it was begun with. If it is the same, `steercap inspect --verify` says "
            "whether the folder was changed"
        )
    if documents > there.documents:
        raise RunDiffers(
            f"{storage} holds shard {there.number}, its last, of {there.documents:,} documents, and the corpus has "
            f"more behind these: it has grown. Remove {storage.path(name_of(there.number, RECEIPT))}, and the same "
            "call collects that shard again, and goes on"
        )


@contextmanager
def stopping(storage: object, sharder: Sharder | None = None) -> Iterator[None]:
    """Say of a folder that cannot be written to how far it is.

    Raises:
        CollectionStopped: the block raised an OSError.
    """
    try:
        yield
    except CollectionStopped:
        raise
    except OSError as error:
        there = "" if sharder is None else f"; {sharder.written} shards are there, and stay"
        what = "make room" if error.errno in {errno.ENOSPC, errno.EDQUOT} else "mend that"
        raise CollectionStopped(
            f"{storage} cannot be written to: {error}{there}: {what}, and the same call goes on"
        ) from error


def _joined(indices: Sequence[Index]) -> Index:
    names = ("document", "window", "position", "token")
    empty = np.empty(0, dtype=np.int64)
    return Index(*(np.concatenate([empty, *(getattr(one, name) for one in indices)]) for name in names))


def _cut(pieces: Sequence[Whole], first: int, stop: int) -> list[Whole]:
    """The rows [first, stop) of pieces."""
    found, at = [], 0
    for piece in pieces:
        low, high = max(0, first - at), min(len(piece), stop - at)
        if low < high:
            found.append(piece if (low, high) == (0, len(piece)) else piece[low:high])
        at += len(piece)
    return found
