"""Collection on many engines: Ray starts actors on the machines of a cluster and gives each shard to one of them.

Arguments and results of actors' methods are bytes, numbers and documents; only the function that opens the model and
`CollectArguments`, which may have a predicate, are pickled by Ray.

A shard depends on its documents and the definition alone, so any actor may make it, and more than once: Ray restarts
lost actors and repeats their tasks, and existing shards are skipped. Documents are read in this process, once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from steercap.core.extras import extra, require
from steercap.core.hints import dataclass
from steercap.core.values import count_of
from steercap.errors import CollectionStopped, EngineFailure, InvalidSetting, RunDiffers, SteercapError, first_error
from steercap.files.folder import locked
from steercap.lab.datasets import DatasetFolder, ShardReceipt, storage_of
from steercap.lab.datasets.collecting.collection import (
    LOOKED_AT,
    Collected,
    chained,
    changed,
    definition_of,
    existing_definition,
    sound_shards,
    tell,
)
from steercap.lab.datasets.collecting.documents import CorpusDocument, digests
from steercap.lab.datasets.collecting.feeding import BATCH, feed
from steercap.lab.datasets.collecting.pipeline import blocks
from steercap.lab.datasets.collecting.reading import CollectArguments
from steercap.lab.datasets.collecting.shards import Sharder, check_same, stopping
from steercap.lab.datasets.collecting.sources import Corpus, DocumentSource, open_source
from steercap.lab.datasets.definition import DATASET, decode
from steercap.lab.datasets.shards import RECEIPT, name_of

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Document as a tuple: its place for messages, its contents, and the bytes of the corpus up to its end.
Given = tuple[str, Any, int | None]


class CollectingActor:
    """Class of Ray actors, each of which collects shards with its own engine.

    Args:
        opening: function that returns the model, not started.
        where: path or URL of the data set.
        arguments: arguments of the collection.
    """

    def __init__(self, opening: Callable[[], SteerModel], where: str, arguments: CollectArguments) -> None:
        self._opening, self._arguments = opening, arguments
        self._storage = storage_of(where, **arguments.storage_options)
        self._model: SteerModel | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the actor's engine, unless it runs."""
        await self._opened()

    async def close(self) -> None:
        """Close the actor's engine; `collect` starts another."""
        model, self._model = self._model, None
        if model is not None:
            await model.aclose()

    async def define(self, shard_documents: int | None, first: Sequence[Given]) -> bytes:
        """Return the definition of the data set that this actor's engine would make, as JSON.

        Args:
            shard_documents: number of documents in a shard; None to choose it from the first few documents.
            first: first documents of the corpus, if `shard_documents` is None.
        """
        model = await self._opened()
        arguments = replace(self._arguments, documents_per_shard=shard_documents)
        source = DocumentSource("the first documents", lambda: iter(first))
        return msgspec.json.encode(await definition_of(model, model.serving.here(), source, arguments))

    async def collect(self, definition: bytes, number: int, documents: Sequence[Given]) -> bytes:
        """Collect and write one shard, starting the engine if needed; return its receipt.

        Args:
            definition: definition of the data set, as JSON.
            number: number of the shard.
            documents: all documents of the shard, in order.

        Returns:
            Receipt of the shard, as JSON.

        Raises:
            RunDiffers: this actor's engine would make another data set, for example with other weights.
            EngineFailure: the engine was lost; the next call starts another.
        """
        model = await self._opened()
        try:
            return await self._make_shard(model, definition, number, documents)
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

    async def _make_shard(self, model: SteerModel, definition: bytes, number: int, documents: Sequence[Given]) -> bytes:
        folder = DatasetFolder(self._storage, decode(definition, str(self._storage)))
        each = folder.definition.documents_per_shard
        engine = model.serving.here()
        nothing = DocumentSource("nothing", lambda: iter(()))
        asked = replace(self._arguments, documents_per_shard=each)
        mine = await definition_of(model, engine, nothing, asked)
        if what := DATASET.differing(folder.definition, mine):
            raise RunDiffers(f"an actor's engine would make another data set than {self._storage}: {'; '.join(what)}")
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


Found = TypeVar("Found")

#: Seconds that actors have to close their engines before they are killed.
PATIENCE: Final = 20.0
#: Environment of actors: Ray must not kill their engines, which end with the actor and clean up themselves.
_ACTOR_ENV: Final = {"RAY_kill_child_processes_on_worker_exit": "false"}


@dataclass(frozen=True)
class RayActors:
    """Settings of the Ray actors that share a collection, each with its own engine.

    Args:
        count: number of actors.
        num_gpus, num_cpus, resources: resources reserved for each actor; as many GPUs as its engine has ranks.
        address: address of the cluster, as for `ray.init`; ignored if this process is connected to a cluster
            already.
        max_restarts: maximum restarts of a lost actor; -1 for no limit.
        max_task_retries: maximum retries of a shard whose actor or engine was lost; -1 for no limit.
        runtime_env: Ray runtime environment of the actors.

    Raises:
        InvalidSetting: a count below 1, or retries below -1.
    """

    count: int
    num_gpus: float = 0
    num_cpus: float = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    address: str | None = None
    max_restarts: int = -1
    max_task_retries: int = 3
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("max_restarts", -1), ("max_task_retries", -1)):
            count_of(getattr(self, name), name, least, wrong=InvalidSetting)

    @property
    def options(self) -> dict[str, Any]:
        """Options of each actor for Ray, by name."""
        own = dict(self.runtime_env)
        return {
            "num_gpus": self.num_gpus,
            "num_cpus": self.num_cpus,
            "resources": dict(self.resources),
            "max_restarts": self.max_restarts,
            "max_task_retries": self.max_task_retries,
            "runtime_env": {**own, "env_vars": {**_ACTOR_ENV, **own.get("env_vars", {})}},
        }


async def collect_on_actors(
    opening: Callable[[], SteerModel], corpus: Corpus, folder: str, arguments: CollectArguments, spread: RayActors
) -> Collected:
    """Read a corpus into a data set with many engines; see `steercap.lab.datasets.collecting.collect`.

    `opening` is called on each actor, and returns the model, not started; every machine must reach the folder.

    Raises:
        MissingExtra: Ray is not installed.
        CollectionStopped: the cluster cannot be reached, actors were lost more often than the limits allow, or nothing
            can be written.
    """
    require("ray")
    where = _absolute(folder)
    source = open_source(corpus)
    with locked(where):
        async with _actors(opening, where, replace(arguments, progress=None), spread) as actors:
            return await _Spread(actors, source, where, arguments).run()


def _absolute(folder: str) -> str:
    return folder if "://" in folder else os.path.abspath(folder)  # noqa: PTH100 -- as fsspec takes it


@asynccontextmanager
async def _actors(
    opening: Callable[[], SteerModel], where: str, arguments: CollectArguments, spread: RayActors
) -> AsyncIterator[list[Any]]:
    """Yield actors whose engines have started; close the engines, and kill the actors, at the end of the block."""
    with extra("ray"):
        import ray
    own = not ray.is_initialized()
    if own:
        try:
            await asyncio.to_thread(
                ray.init, address=spread.address, log_to_driver=False, logging_level=logging.WARNING
            )
        except ConnectionError as error:
            raise CollectionStopped(
                f"Ray: {error}; start that cluster, or give the address of another. Without an address Ray takes that "
                "of RAY_ADDRESS, then the one that was last started on this machine, which `ray stop` makes it forget"
            ) from error
    actors: list[Any] = []
    try:
        kind = ray.remote(CollectingActor).options(**spread.options)
        actors += [kind.remote(opening, where, arguments) for _ in range(spread.count)]
        await asyncio.gather(*(_answer(actor.start.remote()) for actor in actors))
        yield actors
    finally:
        ending = [asyncio.ensure_future(_answer(actor.close.remote())) for actor in actors]
        if ending:
            await asyncio.wait(ending, timeout=PATIENCE)
        for actor, end in zip(actors, ending, strict=True):
            end.cancelled() or (end.done() and end.exception())
            with suppress(Exception):  # it may be gone
                ray.kill(actor)
        if own:
            await asyncio.to_thread(ray.shutdown)


async def _answer(reference: Any) -> Any:
    """Wait for the result of a Ray task and return it.

    Raises:
        The task's own error, or CollectionStopped: its actor was lost more often than the limits allow.
    """
    with extra("ray"):
        from ray.exceptions import RayActorError, RayTaskError

    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, SteercapError) else error from None
    except RayActorError as error:
        raise CollectionStopped(
            f"an actor was lost more often than max_restarts and max_task_retries allow: {error}; shards that are "
            "written stay, and the same call resumes"
        ) from error


class _Spread:
    """One call of `collect_on_actors`, with its counts."""

    def __init__(self, actors: Sequence[Any], source: DocumentSource, where: str, arguments: CollectArguments) -> None:
        self._actors, self._source, self._arguments = actors, source, arguments
        self._storage = storage_of(where, **arguments.storage_options)
        self._documents = _documents(source)
        self._turn, self._began = asyncio.Lock(), time.monotonic()
        self._known: dict[int, ShardReceipt] = {}
        self._made: list[ShardReceipt] = []
        self._number = 0
        self._read_bytes = 0

    async def run(self) -> Collected:
        """Collect the corpus to its end; an actor makes two shards at a time, or one if `concurrency` is given."""
        folder = await self._begun()
        with stopping(self._storage):
            self._known, resumed, mended = await sound_shards(folder, self._arguments)
        # A shard ends while another begins, unless it was said how much is under way.
        depth = 2 if self._arguments.concurrency is None else 1
        try:
            async with asyncio.TaskGroup() as group:
                for actor in [*self._actors] * depth:
                    group.create_task(self._work(actor, folder))
        except BaseExceptionGroup as failed:
            error = first_error(failed)
            raise error from error.__cause__
        if beyond := [number for number in self._known if number >= self._number]:
            raise RunDiffers(
                f"{self._storage} holds shard {beyond[0]}, but the corpus ends before it: the corpus has changed"
            )
        with stopping(self._storage):
            totals = await changed(folder.complete)
        read, seconds = sum(one.tokens for one in self._made), time.monotonic() - self._began
        complaints = tuple(self._source.complaints)
        return Collected(str(self._storage), totals, self._source.skipped, complaints, resumed, mended, read, seconds)

    async def _begun(self) -> DatasetFolder:
        """Begin the folder, or resume it, with the definition that the first actor's engine makes of the arguments."""
        with stopping(self._storage):
            known = await asyncio.to_thread(existing_definition, self._storage)
        each = self._arguments.documents_per_shard or (known and known.documents_per_shard)
        first: list[CorpusDocument] = []
        if each is None:
            first = await _take_documents(self._documents, LOOKED_AT + BATCH)
            self._documents = chained(first, self._documents)
        found = await _answer(self._actors[0].define.remote(each, _as_tuples(first)))
        definition = decode(found, str(self._storage))
        with stopping(self._storage):
            return await changed(partial(DatasetFolder.begin, self._storage, definition))

    async def _work(self, actor: Any, folder: DatasetFolder) -> None:
        """Have an actor make one shard after another until none is missing."""
        definition = msgspec.json.encode(folder.definition)
        each = folder.definition.documents_per_shard
        ask = actor.collect.options(retry_exceptions=[EngineFailure])
        while (part := await self._next(each)) is not None:
            number, documents = part
            receipt = await _answer(ask.remote(definition, number, _as_tuples(documents)))
            self._made.append(msgspec.json.decode(receipt, type=ShardReceipt))
            self._tell(documents[-1])

    async def _next(self, shard_documents: int) -> tuple[int, list[CorpusDocument]] | None:
        """Return the number and documents of the next missing shard, checking existing ones before it; None at the end.

        Raises:
            RunDiffers: an existing shard is of other documents, or of fewer.
        """
        async with self._turn:
            while documents := await _take_documents(self._documents, shard_documents):
                number, self._number = self._number, self._number + 1
                receipt = self._known.get(number)
                if receipt is None:
                    return number, documents
                begun = await asyncio.to_thread(digests, documents[: receipt.documents])
                check_same(self._storage, receipt, len(documents), begun)
            return None

    def _tell(self, last: CorpusDocument) -> None:
        if last.bytes is not None:
            self._read_bytes = max(self._read_bytes, last.bytes)
        tell(
            self._arguments.progress,
            self._source,
            sum(one.documents for one in (*self._made, *self._known.values())),
            None if last.bytes is None else self._read_bytes,
            tokens=sum(one.tokens for one in self._made),
            written=sum(one.bytes for one in self._made),
            shards=len(self._made) + len(self._known),
            seconds=time.monotonic() - self._began,
        )


def _as_tuples(documents: Sequence[CorpusDocument]) -> list[tuple[str, Any, int | None]]:
    return [(one.where, one.content, one.bytes) for one in documents]


async def _documents(source: DocumentSource) -> AsyncGenerator[CorpusDocument, None]:
    items = source.begin()
    if isinstance(items, AsyncIterator):
        async for found in items:
            if (document := source.document(*found)) is not None:
                yield document
        return
    while several := await asyncio.to_thread(_next_documents, source, items):
        for document in several:
            yield document


def _next_documents(source: DocumentSource, items: Iterator[Any]) -> list[CorpusDocument]:
    return list(islice(source.documents(items), BATCH))


async def _take_documents(documents: AsyncIterator[CorpusDocument], most: int) -> list[CorpusDocument]:
    found: list[CorpusDocument] = []
    while len(found) < most:
        try:
            found.append(await anext(documents))
        except StopAsyncIteration:
            break
    return found
