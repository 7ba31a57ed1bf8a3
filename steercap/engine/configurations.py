"""Queue of requests that steer or project, which wait for a slot: workers' room for one compiled configuration.

Vectors are sent to the workers once. This module awaits; `core.slots` decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from steercap.core.framing import in_batches
from steercap.core.messages import Configure, Configured, Placed, Vectors
from steercap.core.program import Configuration
from steercap.core.slots import Grant, Slots
from steercap.engine.workers import Batcher
from steercap.errors import EngineFailure, ModelClosed, SteeringSlotsFull, TooManyEdits, WorkerFailure

if TYPE_CHECKING:
    from steercap.config import Settings
    from steercap.steering.lowering import Lowered

#: Maximum bytes of vectors in one message: vLLM's broadcast ring takes 16 MiB, and no pass runs meanwhile.
FRAME_BYTES: Final = 8 << 20
#: Seconds between tries to fill a slot that the workers still use for a request that has ended, and their maximum sum.
RETRY_SECONDS: Final = 0.002
PATIENCE_SECONDS: Final = 60.0


#: Compiled configurations that one request needs, by their digests.
Needed: TypeAlias = "Mapping[bytes, Configuration]"


class Configurations:
    """Slots and vector bank (the vectors on the workers) of an engine, and the queue of requests that wait for them.

    Args:
        slots: number of configurations that the workers store at once.
        rows: number of vectors that the bank has room for.
        settings: settings with `overflow`, the policy when all slots or rows are in use.
        ask: coroutine function that sends a `Configure` to every worker and returns their answers.
    """

    def __init__(
        self,
        slots: int,
        rows: int,
        settings: Settings,
        ask: Callable[[Configure], Awaitable[Sequence[Configured]]],
    ) -> None:
        self.slots = Slots(slots, rows)
        #: Number of failures of steering, part of the cache salt: keys and values written before one are not reused.
        self.epoch = 0
        self.bytes_sent = 0
        self._settings = settings
        self._ask = ask
        self._queue: dict[asyncio.Future[list[Grant]], Needed] = {}  # in order of arrival
        self._loading: dict[bytes, asyncio.Task[None]] = {}
        self._loads: Batcher[tuple[Grant, Lowered], bool] = Batcher(self._load_all)
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._queue)

    @asynccontextmanager
    async def holding(self, *wanted: Lowered) -> AsyncIterator[list[Grant]]:
        """Occupy a slot per configuration in the block; yield the grants once all workers have the configurations.

        Requests are served in order of arrival and get all slots at once: one that held a slot and waited for another
        could deadlock with one that does the same.

        Raises:
            TooManyEdits: the request needs more slots or vectors than the engine has in all.
            SteeringSlotsFull: no slots or rows are free and overflow="error".
            ModelClosed: the model was closed meanwhile.
        """
        if not wanted:
            yield []
            return
        configurations = {lowered.digest: lowered.configuration for lowered in wanted}
        grants = await self._claim(configurations)
        try:
            for lowered in wanted:
                await self._load(next(grant for grant in grants if grant.digest == lowered.digest), lowered)
            yield grants
        finally:
            self._release(*grants)

    async def aclose(self) -> None:
        """Fail all waiting requests, with `ModelClosed`. Idempotent."""
        self._closed = True
        self.fail(ModelClosed("the model was closed while this request waited for a slot"))
        await self._loads.aclose()

    def fail(self, error: EngineFailure) -> None:
        """Fail all waiting requests, each with a new error of the type and message of `error`."""
        for granted in self._queue:
            if not granted.done():
                granted.set_exception(type(error)(str(error)))

    async def _claim(self, wanted: Needed) -> list[Grant]:
        if self._closed:
            raise ModelClosed("the model was closed before this request could be steered")
        grants = None if self._queue else self.slots.claim_all(wanted)
        if grants is not None:
            return grants
        if not self.slots.can_ever_hold(wanted):
            rows = sum(configuration.rows for configuration in wanted.values())
            raise TooManyEdits(
                f"this request has {rows} vectors and needs {len(wanted)} slots; the engine holds "
                f"{self.slots.rows} vectors and {self.slots.slots} slots; raise SteerModel(..., vector_bytes=)"
            )
        if self._settings.overflow == "error":
            raise SteeringSlotsFull(
                f"all {self.slots.slots} slots or all room for vectors is in use ({self.slots.slots_in_use} slots, "
                f"{self.slots.rows_in_use} of {self.slots.rows} vectors) and overflow='error'; "
                "raise SteerModel(..., steering_slots=, vector_bytes=), or let requests wait"
            )
        return await self._wait(wanted)

    async def _wait(self, wanted: Needed) -> list[Grant]:
        granted: asyncio.Future[list[Grant]] = asyncio.get_running_loop().create_future()
        self._queue[granted] = wanted
        try:
            return await granted
        except BaseException:
            if self._queue.pop(granted, None) is None and not granted.cancelled() and granted.exception() is None:
                for grant in granted.result():
                    self.slots.release(grant)
            self._admit()
            raise

    def _admit(self) -> None:
        """Grant slots to the requests at the head of the queue, until one does not fit."""
        while self._queue and not self._closed:
            granted, wanted = next(iter(self._queue.items()))
            if not granted.done():
                grants = self.slots.claim_all(wanted)
                if grants is None:
                    return
                granted.set_result(grants)
            del self._queue[granted]

    def _release(self, *grants: Grant) -> None:
        for grant in grants:
            self.slots.release(grant)
        self._admit()

    async def _load(self, grant: Grant, lowered: Lowered) -> None:
        """Send a configuration and its vectors to the workers if they lack it; concurrent callers share a transfer."""
        if self.slots.unsent(grant) is None:
            return
        if grant.digest not in self._loading:
            task = asyncio.create_task(self._load_once(lowered), name="steercap load")
            task.add_done_callback(_retrieve)
            self._loading[grant.digest] = task
        await asyncio.shield(self._loading[grant.digest])

    async def _load_once(self, lowered: Lowered) -> None:
        # A claim of its own keeps the slot and the bank rows, even if all who wait give up.
        grant = self.slots.claim(lowered.configuration, lowered.digest)
        assert grant is not None
        clock, refused = asyncio.get_running_loop().time, None
        try:
            while not await self._loads.ask((grant, lowered)):
                refused = refused or clock()
                if clock() - refused > PATIENCE_SECONDS:
                    raise WorkerFailure(f"slots of requests that have ended were not freed within {PATIENCE_SECONDS} s")
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            del self._loading[grant.digest]
            self._release(grant)

    async def _load_all(self, loads: Sequence[tuple[Grant, Lowered]]) -> Sequence[bool]:
        """Send what the workers lack of configurations and vectors; return for each, in order, if they accepted it."""
        vectors = {vector.digest: vector for load in loads for vector in self._unsent(*load)}
        for batch in in_batches(vectors.values(), lambda one: len(one.data), FRAME_BYTES):
            await self._ask(Configure(batch, ()))
        self.bytes_sent += sum(len(vector.data) for vector in vectors.values())
        placed = [Placed(grant.slot, grant.configuration, grant.bank_rows) for grant, _ in loads]
        refused: set[bytes] = set()
        for frame in in_batches(placed, lambda one: one.configuration.bias_bytes, FRAME_BYTES):
            answers = await self._ask(Configure((), frame))
            refused |= {digest for answer in answers for digest in answer.refused}
        for grant, _ in loads:
            if grant.digest not in refused:
                self.slots.confirm(grant)
        return [grant.digest not in refused for grant, _ in loads]

    def _unsent(self, grant: Grant, lowered: Lowered) -> Iterator[Vectors]:
        missing = self.slots.unsent(grant) or ()
        for blob, rows in zip(grant.configuration.blobs, grant.bank_rows, strict=True):
            if blob in missing:
                yield Vectors(blob.digest, rows, lowered.vectors[blob.digest])


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a finished load, so that asyncio does not report it if all its callers have left."""
    if not task.cancelled():
        task.exception()
