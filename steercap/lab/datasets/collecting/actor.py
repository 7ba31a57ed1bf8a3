"""Ray actor that owns an engine and writes the shards it is given.

Arguments and answers are bytes, numbers and documents; only the function that opens the model and
`CollectArguments`, which may hold a predicate, are pickled by Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from steercap.errors import EngineFailure, RunDiffers
from steercap.lab.datasets import DatasetFolder, storage_of
from steercap.lab.datasets.collecting.collection import CollectArguments, definition_of
from steercap.lab.datasets.collecting.feeding import feed
from steercap.lab.datasets.collecting.pipeline import blocks
from steercap.lab.datasets.collecting.shards import Sharder
from steercap.lab.datasets.collecting.sources import DocumentSource
from steercap.lab.datasets.definition import decode
from steercap.lab.datasets.shards import RECEIPT, name_of

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: A document's place, its contents, and the bytes of the corpus up to its end.
Given = tuple[str, Any, int | None]


class CollectingActor:
    """Actor class given to Ray; collects shards with an engine of its own.

    Args:
        opening: function that returns a model that is not started.
        where: path or URL of the data set.
        asked: arguments of the collection.
    """

    def __init__(self, opening: Callable[[], SteerModel], where: str, asked: CollectArguments) -> None:
        self._opening, self._asked = opening, asked
        self._storage = storage_of(where, **asked.storage_options)
        self._model: SteerModel | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the engine, unless it runs."""
        await self._opened()

    async def close(self) -> None:
        """Close the engine."""
        model, self._model = self._model, None
        if model is not None:
            await model.aclose()

    async def define(self, each: int | None, first: Sequence[Given]) -> bytes:
        """Return the definition of the data set, as JSON.

        Args:
            each: number of documents in a shard; None to choose it from the first few documents.
            first: first documents of the corpus, if `each` is None.
        """
        model = await self._opened()
        asked = replace(self._asked, documents_per_shard=each)
        source = DocumentSource("the first documents", lambda: iter(first))
        return msgspec.json.encode(await definition_of(model, model.serving.here(), source, asked))

    async def collect(self, definition: bytes, number: int, documents: Sequence[Given]) -> bytes:
        """Collect one shard, and return its receipt.

        Args:
            definition: definition of the data set, as JSON.
            number: number of the shard.
            documents: all of its documents.

        Returns:
            Receipt of the shard, as JSON.

        Raises:
            RunDiffers: this engine would make another data set, for example of other weights.
            EngineFailure: the engine was lost; the next call starts another.
        """
        model = await self._opened()
        try:
            return await self._made(model, definition, number, documents)
        except EngineFailure:
            if model is self._model:
                with suppress(EngineFailure):
                    await self.close()
            raise

    async def _opened(self) -> SteerModel:
        async with self._turn:
            if self._model is None:
                model = self._opening()
                await model.start()
                self._model = model
            return self._model

    async def _made(self, model: SteerModel, definition: bytes, number: int, documents: Sequence[Given]) -> bytes:
        folder = DatasetFolder(self._storage, decode(definition, str(self._storage)))
        each = folder.definition.documents_per_shard
        engine = model.serving.here()
        nothing = DocumentSource("nothing", lambda: iter(()))
        asked = replace(self._asked, documents_per_shard=each)
        mine = await definition_of(model, engine, nothing, asked)
        if mine.digest != folder.definition.digest:
            raise RunDiffers(
                f"an actor's engine is not that of {self._storage}: {mine.model}, not {folder.definition.model}"
            )
        reading = asked.reading(model, engine)
        source = DocumentSource(f"shard {number}", lambda: iter(documents), first=number * each)
        sharder = Sharder(folder, reading.points, {}, asked.shard_bytes, first=number)
        try:
            async with aclosing(blocks(model, reading, feed(source, reading))) as found:
                async for block in found:
                    await sharder.add(block)
            await sharder.finish()
        finally:
            await sharder.aclose()
        return await asyncio.to_thread(self._storage.read, name_of(number, RECEIPT))
