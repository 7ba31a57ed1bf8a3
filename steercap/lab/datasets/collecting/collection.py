"""Collection of a corpus shard by shard into a folder; resumable after any interruption."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec

from steercap.concurrency.loops import finished, on_thread
from steercap.core.extras import require
from steercap.core.protocols import Progress, ProgressCallback
from steercap.core.tokens import selected
from steercap.files.fingerprint import tokenizer_digest
from steercap.files.folder import locked
from steercap.lab.datasets import DatasetDefinition, DatasetFolder, ShardReceipt, Totals, define, storage_of
from steercap.lab.datasets import definition as definitions
from steercap.lab.datasets.collecting.feeding import Fed, cancelled_elsewhere, feed
from steercap.lab.datasets.collecting.pipeline import blocks
from steercap.lab.datasets.collecting.reading import Block, CollectArguments, Reading
from steercap.lab.datasets.collecting.shards import Sharder, stopping
from steercap.lab.datasets.collecting.sources import Corpus, DocumentSource, open_source
from steercap.lab.datasets.storage import Storage

if TYPE_CHECKING:
    from steercap.client import RemoteModel
    from steercap.client.compiling import RemoteEngine
    from steercap.engine.engine import Engine
    from steercap.model import SteerModel

Batches: TypeAlias = AsyncGenerator[list[Fed], None]
Value = TypeVar("Value")

#: Number of the corpus's first documents from which the number of documents in a shard is chosen.
LOOKED_AT: Final = 256
#: Maximum documents of a shard, unless given: the first few may have no rows at all, and later ones many.
MOST_DOCUMENTS: Final = 1 << 14


@dataclass(frozen=True)
class Collected:
    """Summary of a completed data set.

    Args:
        folder: path or URL; `steercap.lab.datasets` opens it.
        totals: totals of the data set.
        skipped: number of corpus items that were not documents, with `bad="skip"`.
        complaints: places and reasons of the first few skipped items.
        resumed: number of shards that existed before.
        mended: number of the existing shards that were damaged, and collected again.
        tokens: number of tokens that the model read in this call.
        seconds: duration of this call.
    """

    folder: str
    totals: Totals
    skipped: int
    complaints: tuple[str, ...]
    resumed: int
    mended: int
    tokens: int
    seconds: float


async def run_collection(
    model: SteerModel | RemoteModel,
    engine: Engine | RemoteEngine,
    corpus: Corpus,
    folder: str | Path,
    arguments: CollectArguments,
) -> Collected:
    """Read a corpus into a data set, keeping the folder locked; see `steercap.lab.datasets.collecting.collect`."""
    require("datasets")
    reading = arguments.reading(model, engine)
    source = open_source(corpus)
    storage = storage_of(folder, **arguments.storage_options)
    with locked(folder):
        return await _Collection(model, reading, source, storage, arguments).run()


def tell(
    progress: ProgressCallback | None,
    source: DocumentSource,
    documents: int,
    read: int | None,
    *,
    tokens: int,
    written: int,
    shards: int,
    seconds: float,
) -> None:
    """Report the progress of a collection: in bytes of the corpus if they are known, else in documents.

    Args:
        progress, source: callback of the call, and source of the documents.
        documents, read: number of documents, and of bytes of the corpus, read so far.
        tokens, written, seconds: tokens read, bytes of shards written, and seconds, all since the call began.
        shards: number of existing shards, those of earlier calls included.
    """
    if progress is None:
        return
    size, seconds = written / 1e6, max(seconds, 1e-9)
    details: dict[str, float] = {"documents": documents, "shards": shards}
    details |= {"tokens": tokens, "tokens/s": tokens / seconds, "MB": size, "MB/s": size / seconds}
    if source.bytes and read is not None:
        progress(Progress("bytes of the corpus", min(read, source.bytes), source.bytes, details))
    else:
        progress(Progress("documents", documents, source.count, details))


class _Collection:
    """One call of `run_collection`, with its counts."""

    def __init__(
        self,
        model: SteerModel | RemoteModel,
        reading: Reading,
        source: DocumentSource,
        storage: Any,
        arguments: CollectArguments,
    ) -> None:
        self._model, self._reading, self._source, self._arguments = model, reading, source, arguments
        self._storage = storage
        self._began = time.monotonic()
        self._read_bytes: int | None = 0
        self._documents = self._tokens = self._resumed = self._mended = 0

    async def run(self) -> Collected:
        """Collect the corpus to its end, after the shards that the folder already has.

        Raises:
            CollectionStopped: the folder cannot be read or written; while it is filled, the error has the number of
                existing shards. Other errors are raised as they are; shards that were written stay.
        """
        with stopping(self._storage):
            known = await asyncio.to_thread(existing_definition, self._storage)
        if known is None:
            batches, per_shard = await self._looked_at()
            async with aclosing(batches):
                folder = await self._begun(per_shard)
                return await self._collected(folder, batches)
        folder = await self._begun(known.documents_per_shard)
        return await self._collected(folder, None)

    async def _begun(self, per_shard: int) -> DatasetFolder:
        with stopping(self._storage):
            return await changed(partial(DatasetFolder.begin, self._storage, self._define(per_shard)))

    async def _collected(self, folder: DatasetFolder, batches: Batches | None) -> Collected:
        with stopping(self._storage):
            receipts, self._resumed, self._mended = await sound_shards(folder, self._arguments)
        sharder = Sharder(folder, self._reading.points, receipts, self._arguments.shard_bytes)
        each = folder.definition.documents_per_shard
        if batches is None:
            batches = feed(self._source, self._reading, lambda number: number // each not in receipts)
        await self._gather(sharder, batches)
        with stopping(self._storage, sharder):
            totals = await changed(folder.complete)
        source = self._source
        seconds = time.monotonic() - self._began
        complaints = tuple(source.complaints)
        return Collected(
            str(self._storage), totals, source.skipped, complaints, self._resumed, self._mended, self._tokens, seconds
        )

    async def _gather(self, sharder: Sharder, batches: Batches) -> None:
        try:
            async with aclosing(blocks(self._model, self._reading, batches)) as found:
                async for block in found:
                    await sharder.add(block)
                    self._count(block)
                    tell(
                        self._arguments.progress,
                        self._source,
                        self._documents,
                        self._read_bytes,
                        tokens=self._tokens,
                        written=sharder.bytes,
                        shards=sharder.written,
                        seconds=time.monotonic() - self._began,
                    )
            await sharder.finish()
        finally:
            await sharder.aclose()

    def _count(self, block: Block) -> None:
        if block.ended:
            self._documents, self._read_bytes = block.ended[-1].number + 1, block.ended[-1].bytes
        self._tokens += sum(one.read for one in block.ended)

    async def _looked_at(self) -> tuple[Batches, int]:
        """Return an iterator of all document batches, of which the first are read already, and documents per shard."""
        batches = feed(self._source, self._reading)
        if self._arguments.documents_per_shard is not None:
            return batches, self._arguments.documents_per_shard
        first: list[list[Fed]] = []
        try:
            async for batch in batches:
                first.append(batch)
                if sum(map(len, first)) >= LOOKED_AT:
                    break
        except asyncio.CancelledError as error:
            raise cancelled_elsewhere(error) from error
        fed = [one for batch in first for one in batch]
        rows = sum(self._rows_of(one) for one in fed) / max(1, len(fed))
        bytes_each = max(1.0, rows * self._reading.row_bytes)
        return chained(first, batches), max(1, min(MOST_DOCUMENTS, int(self._arguments.shard_bytes / bytes_each)))

    def _rows_of(self, fed: Fed) -> int:
        """Return the number of tokens of a document whose rows are requested."""
        found = 0
        for window, tokens in fed.windows or ():
            if tokens is not None:
                length = len(window.token_ids)
                limit = self._reading.limit(length)
                found += int(selected(tokens.ranges(length, limit), limit).sum())
        return found

    def _define(self, per_shard: int) -> DatasetDefinition:
        given, every = self._arguments.documents_per_shard, self._arguments.statistics_every
        reading = self._reading
        tokenizer = self._model.tokenizer if reading.engine.vllm.tokenizes else None
        if every is None:
            every = 0 if reading.spec.attention else definitions.EVERY * len(reading.points)
        return define(
            {**self._model.identity(), "tokenizer": tokenizer_digest(tokenizer)},
            {point: reading.engine.schemas[point] for point in reading.points},
            coding=reading.coding,
            documents_per_shard=per_shard if given is None else given,
            asked=msgspec.json.decode(msgspec.json.encode(reading.described())),
            statistics_every=every,
            num_layers=reading.engine.vllm.num_layers,
        )


async def chained(first: Sequence[Value], rest: AsyncGenerator[Value, None]) -> AsyncGenerator[Value, None]:
    """Yield the values in `first`, then those of the generator `rest`, which is closed at the end."""
    async with aclosing(rest) as left:
        for value in first:
            yield value
        async for value in left:
            yield value


async def definition_of(
    model: SteerModel | RemoteModel, engine: Engine | RemoteEngine, source: DocumentSource, arguments: CollectArguments
) -> DatasetDefinition:
    """Return the definition of the data set that `source` would give; reads its first documents, to size shards."""
    collection = _Collection(model, arguments.reading(model, engine), source, None, arguments)
    batches, per_shard = await collection._looked_at()  # noqa: SLF001 -- of this module
    async with aclosing(batches):
        return collection._define(per_shard)  # noqa: SLF001


def existing_definition(storage: Storage) -> DatasetDefinition | None:
    """Return the definition of the data set in a folder; None if there is none.

    Raises:
        InvalidFile: the definition cannot be read.
    """
    if definitions.FILE not in storage.sizes():
        return None
    return definitions.decode(storage.read(definitions.FILE), storage.path(definitions.FILE))


async def sound_shards(folder: DatasetFolder, arguments: CollectArguments) -> tuple[dict[int, ShardReceipt], int, int]:
    """Check existing shards and remove damaged ones; return sound receipts, and numbers of existing and removed shards.

    Raises:
        InvalidFile: a receipt is of another version, or of another data set.
    """

    def looked() -> tuple[dict[int, ShardReceipt], dict[int, str]]:
        receipts, unreadable = folder.readable_receipts()
        content = arguments.verify or folder.altered(receipts.values())
        return receipts, unreadable | folder.wrong(receipts.values(), content=content)

    def discard() -> None:
        for number in wrong:
            folder.discard(number)

    receipts, wrong = await asyncio.to_thread(looked)
    await changed(discard)
    whole = {number: one for number, one in receipts.items() if number not in wrong}
    return whole, len(receipts.keys() | wrong), len(wrong)


async def changed(work: Callable[[], Value]) -> Value:
    """Run `work`, which changes a folder, on a thread; return its result, waiting for its end even if cancelled.

    So the caller holds the folder's lock until nothing is being written any more.
    """
    return await finished(on_thread(work, "steercap folder"))
