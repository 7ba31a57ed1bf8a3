"""Sharder that fills shards from blocks and writes them on threads; shards that exist are compared, not rewritten."""

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
from steercap.lab.datasets import DatasetFolder, Index, Shard, ShardReceipt
from steercap.lab.datasets.collecting.reading import Block, Ended
from steercap.lab.datasets.shards import RECEIPT, name_of
from steercap.lab.datasets.storage import Storage
from steercap.lab.datasets.tables import COLUMNS

#: Maximum shards written at once, each hashed and synced alone, beside the one being filled in memory. A
#: writer waits for the disk for more than half of its time.
WRITERS: Final = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
#: Maximum size of a shard, as a multiple of its target, if documents are longer than the first few.
MOST_TIMES: Final = 16


@dataclass
class _Filling:
    """Shard that is being filled.

    Args:
        number: number of the shard.
        digest: running SHA-256 over its documents.
        begun: the digest over as many documents as the existing shard has, in hexadecimal; "" while there are fewer.
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
    """Writer of a data set's shards, from blocks of rows in order.

    Args:
        folder: folder of the data set.
        points: points of its rows.
        receipts: receipts of existing shards, by number.
        shard_bytes: target size of a shard in bytes.
        first: number of the shard of the first document.

    Attributes:
        bytes: number of bytes written.
        written: number of existing shards.
    """

    def __init__(
        self,
        folder: DatasetFolder,
        points: Sequence[Point],
        receipts: Mapping[int, ShardReceipt],
        shard_bytes: int,
        first: int = 0,
    ) -> None:
        self._folder, self._points, self._receipts = folder, tuple(points), dict(receipts)
        self._most_bytes, self._row_bytes = MOST_TIMES * shard_bytes, folder.definition.row_bytes
        self._filling = _Filling(first)
        self._writing: list[Future[ShardReceipt]] = []
        self.bytes, self.written = 0, len(receipts)

    @property
    def _each(self) -> int:
        return self._folder.definition.documents_per_shard

    async def add(self, block: Block) -> None:
        """Add a block of rows, writing each shard that it fills in the background; wait while `WRITERS` are written.

        Raises:
            RunDiffers: an existing shard is of other documents.
            InvalidRequest: a shard gets far larger than its target.
            CollectionStopped: a shard could not be written.
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
        await self._collect_finished()

    def _take(self, block: Block, first: int, stop: int) -> None:
        """Add the rows [first, stop) of a block to the shard being filled."""
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
                f"shard {filling.number} has grown to {filling.bytes:,} bytes, more than {MOST_TIMES} times its "
                f"intended size: its {self._each:,} documents are longer than the first few, or more of their rows are "
                "kept; raise shard_bytes and make the same call again, or start in another folder with fewer "
                "documents_per_shard"
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
        """Write the last shard, and wait until all shards are written; raise RunDiffers if the folder has later ones.

        Raises:
            As `add`.
        """
        if self._filling.documents:
            await self._close()
        beyond = [number for number in self._receipts if number >= self._filling.number]
        if beyond:
            raise RunDiffers(
                f"{self._folder.storage} holds shard {beyond[0]}, but the corpus ends before it: the corpus has "
                "changed; give another folder, or the corpus it was begun with"
            )
        while self._writing:
            await self._collect_finished(least=1)

    async def aclose(self) -> None:
        """Wait until all pending writes have ended, so that the caller can release the folder to other writers.

        Their errors are dropped, since they were reported before; a cancellation meanwhile is raised at the end.
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
        """Start writing the current shard in the background; if it exists, compare its documents instead.

        The last shard may be partial.
        """
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
            await self._collect_finished(least=1)
        self._writing.append(on_thread(partial(self._folder.write, shard), "steercap shard"))

    async def _collect_finished(self, *, least: int = 0) -> None:
        """Count finished writes, and raise their errors; wait for at least one if `least` is not 0."""
        if least:
            waiting = [asyncio.wrap_future(future) for future in self._writing]
            for write in waiting:
                write.add_done_callback(_retrieve_exception)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        done = [future for future in self._writing if future.done()]
        self._writing = [future for future in self._writing if future not in done]
        for future in done:
            with stopping(self._folder.storage, self):
                receipt = future.result()
            self.bytes += receipt.bytes
            self.written += 1


def _retrieve_exception(future: asyncio.Future[ShardReceipt]) -> None:
    """Retrieve the error of a future, which other code raises, so that asyncio does not warn about it."""
    if not future.cancelled():
        future.exception()


def check_same(storage: Storage, receipt: ShardReceipt, documents: int, begun: str) -> None:
    """Check that an existing shard was made of the same documents as the corpus now has for it.

    Args:
        storage: folder of the shards.
        receipt: receipt of the existing shard.
        documents: number of the corpus's documents for this shard.
        begun: SHA-256, in hexadecimal, of the first of them, as many as the shard has; any text if there are fewer.

    Raises:
        RunDiffers: the documents differ, or there are more: the corpus has grown.
    """
    if begun != receipt.documents_sha256 or documents < receipt.documents:
        raise RunDiffers(
            f"{storage} holds shard {receipt.number} of other documents: this is another corpus, or it was changed; "
            "give another folder, or the corpus it was begun with. If it is the same, `steercap inspect --verify` says "
            "whether the folder was changed"
        )
    if documents > receipt.documents:
        raise RunDiffers(
            f"{storage} holds shard {receipt.number}, its last, of {receipt.documents:,} documents, and the corpus has "
            f"more after these: it has grown. Remove {storage.path(name_of(receipt.number, RECEIPT))}, and the same "
            "call collects that shard again and resumes"
        )


@contextmanager
def stopping(storage: object, sharder: Sharder | None = None) -> Iterator[None]:
    """Raise an OSError of the block as CollectionStopped; with `sharder`, its message has the number of shards.

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
            f"{storage} cannot be written to: {error}{there}: {what}, and the same call resumes"
        ) from error


def _joined(indices: Sequence[Index]) -> Index:
    empty = np.empty(0, dtype=np.int64)
    return Index(*(np.concatenate([empty, *(getattr(one, name) for one in indices)]) for name in COLUMNS))


def _cut(pieces: Sequence[Whole], first: int, stop: int) -> list[Whole]:
    """Return the rows [first, stop), numbered over all pieces, as a list of pieces."""
    found, at = [], 0
    for piece in pieces:
        low, high = max(0, first - at), min(len(piece), stop - at)
        if low < high:
            found.append(piece if (low, high) == (0, len(piece)) else piece[low:high])
        at += len(piece)
    return found
