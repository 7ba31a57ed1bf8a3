"""Requests that steer wait here for a slot, and their vectors are sent to the workers, once.

Number 3 in the life of a request: the awaiting around `core.slots`, which decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from steercap.batching import Batcher
from steercap.core.messages import Equip, Equipped, Placed, Vectors
from steercap.core.slots import Grant, Slots
from steercap.errors import ModelClosed, SteeringSlotsFull, TooManyEdits, WorkerFailure

if TYPE_CHECKING:
    from steercap.config import Settings
    from steercap.steering import Lowered

#: Most bytes of vectors in one frame: vLLM's broadcast ring takes 16 MiB, and the engine stands still meanwhile.
FRAME_BYTES: Final = 8 << 20
#: Seconds between tries while a request that has ended leaves the engine, and how long that may take.
RETRY_SECONDS: Final = 0.002
PATIENCE_SECONDS: Final = 60.0


class Equipment:
    """The slots and the vector bank of an engine, with the queue before them.

    Args:
        slots: configurations held at once.
        rows: rows of the vector bank.
        settings: what to do when all are in use.
        ask: asks every worker.
    """

    def __init__(
        self,
        slots: int,
        rows: int,
        settings: Settings,
        ask: Callable[[Equip], Awaitable[Sequence[Equipped]]],
    ) -> None:
        self.slots = Slots(slots, rows)
        #: Raised when steering failed: keys and values written until then are not asked for again.
        self.epoch = 0
        self.bytes_sent = 0
        self._settings = settings
        self._ask = ask
        self._queue: dict[asyncio.Future[Grant], Lowered] = {}  # in order of arrival
        self._loading: dict[bytes, asyncio.Task[None]] = {}
        self._loads: Batcher[tuple[Grant, Lowered], bool] = Batcher(self._load_all)
        self._closed = False

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @asynccontextmanager
    async def holding(self, lowered: Lowered) -> AsyncIterator[Grant]:
        """Hold a slot whose configuration and vectors every worker has; in order of arrival.

        Raises:
            TooManyEdits: the vector bank is too small for it, whoever else uses it.
            SteeringSlotsFull: everything is in use and overflow="error".
            ModelClosed: the model was closed meanwhile.
        """
        grant = await self._claim(lowered)
        try:
            await self._load(grant, lowered)
            yield grant
        finally:
            self._release(grant)

    async def aclose(self) -> None:
        """Fail whoever waits. Idempotent."""
        self._closed = True
        for granted in self._queue:
            if not granted.done():
                granted.set_exception(ModelClosed("the model was closed while this request waited for a slot"))
        await self._loads.aclose()

    async def _claim(self, lowered: Lowered) -> Grant:
        if self._closed:
            raise ModelClosed("the model was closed before this request could be steered")
        if not self.slots.can_ever_hold(lowered.configuration):
            raise TooManyEdits(
                f"this spec has {lowered.configuration.rows} vectors and needs a slot; the engine holds "
                f"{self.slots.rows} vectors and {self.slots.slots} slots; raise SteerModel(..., vector_bytes=)"
            )
        grant = None if self._queue else self.slots.claim(lowered.configuration, lowered.digest)
        if grant is not None:
            return grant
        if self._settings.overflow == "error":
            raise SteeringSlotsFull(
                f"all {self.slots.slots} slots or all room for vectors is in use ({self.slots.slots_in_use} slots, "
                f"{self.slots.rows_in_use} of {self.slots.rows} vectors) and overflow='error'; "
                "raise SteerModel(..., steering_slots=, vector_bytes=), or let requests wait"
            )
        return await self._wait(lowered)

    async def _wait(self, lowered: Lowered) -> Grant:
        granted: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._queue[granted] = lowered
        try:
            return await granted
        except BaseException:
            if self._queue.pop(granted, None) is None and not granted.cancelled() and granted.exception() is None:
                self.slots.release(granted.result())
            self._admit()
            raise

    def _admit(self) -> None:
        """Give slots to the head of the queue while there are any."""
        while self._queue and not self._closed:
            granted, lowered = next(iter(self._queue.items()))
            if not granted.done():
                grant = self.slots.claim(lowered.configuration, lowered.digest)
                if grant is None:
                    return
                granted.set_result(grant)
            del self._queue[granted]

    def _release(self, grant: Grant) -> None:
        self.slots.release(grant)
        self._admit()

    async def _load(self, grant: Grant, lowered: Lowered) -> None:
        """Have the workers hold the configuration; requests of the same one wait for the same call."""
        if self.slots.unsent(grant) is None:
            return
        if grant.digest not in self._loading:
            task = asyncio.create_task(self._load_once(lowered), name="steercap load")
            task.add_done_callback(_heard)
            self._loading[grant.digest] = task
        await asyncio.shield(self._loading[grant.digest])

    async def _load_once(self, lowered: Lowered) -> None:
        # A claim of its own keeps the places, whoever gives up waiting.
        grant = self.slots.claim(lowered.configuration, lowered.digest)
        assert grant is not None
        waited = 0.0
        try:
            while not await self._loads.ask((grant, lowered)):
                if waited > PATIENCE_SECONDS:
                    raise WorkerFailure(f"requests that have ended have held their slots for {PATIENCE_SECONDS} s")
                await asyncio.sleep(RETRY_SECONDS)
                waited += RETRY_SECONDS
        finally:
            del self._loading[grant.digest]
            self._release(grant)

    async def _load_all(self, loads: Sequence[tuple[Grant, Lowered]]) -> Sequence[bool]:
        """Send what the workers lack; whether each configuration is in place afterwards."""
        vectors = {vector.digest: vector for load in loads for vector in self._unsent(*load)}
        for batch in _batches(list(vectors.values())):
            await self._ask(Equip(batch, ()))
        self.bytes_sent += sum(len(vector.data) for vector in vectors.values())
        placed = (Placed(grant.slot, grant.configuration, grant.places) for grant, _ in loads)
        answers = await self._ask(Equip((), tuple(placed)))
        refused = {digest for answer in answers for digest in answer.refused}
        for grant, _ in loads:
            if grant.digest not in refused:
                self.slots.confirm(grant)
        return [grant.digest not in refused for grant, _ in loads]

    def _unsent(self, grant: Grant, lowered: Lowered) -> Iterator[Vectors]:
        missing = self.slots.unsent(grant) or ()
        for blob, places in zip(grant.configuration.blobs, grant.places, strict=True):
            if blob in missing:
                yield Vectors(blob.digest, places, lowered.vectors[blob.digest])


def _heard(task: asyncio.Task[None]) -> None:
    """Take note of how a load ended, in case all who asked for it have left."""
    if not task.cancelled():
        task.exception()


def _batches(vectors: Sequence[Vectors]) -> Iterator[tuple[Vectors, ...]]:
    """Vectors in frames of bounded size; a blob larger than a frame travels alone."""
    batch: list[Vectors] = []
    size = 0
    for vector in vectors:
        if batch and size + len(vector.data) > FRAME_BYTES:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(vector)
        size += len(vector.data)
    if batch:
        yield tuple(batch)
