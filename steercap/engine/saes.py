"""SAEs on the workers: loaded when a request first needs one, and freed once no request can ask for it again.

An encoder stays loaded until its SAE is garbage-collected on the client, or another needs the room; one that a request
uses stays. Encoders are loaded one after the other. The transfer to the workers is in `worker.saes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from steercap.core.messages import CloseSAE, OpenSAE, SAEOpened
from steercap.errors import EngineFailure, MemoryNotShared, SAEMemoryFull, WorkerFailure
from steercap.saes.encoder import image_bytes
from steercap.worker.memory import HEADER_BYTES, SharedSegment

if TYPE_CHECKING:
    from steercap.engine.sae_readers import Readers
    from steercap.engine.workers import Workers
    from steercap.saes.encoder import Encoder
    from steercap.worker.saes import Key

#: Seconds between polls of the workers while an encoder is loaded.
LOOK_SECONDS: Final = 0.01


@dataclass
class _Entry:
    """An encoder that the workers have loaded, or are to load.

    Args:
        nbytes: bytes it takes on a worker.
        users: number of requests that use it or wait for it.
        wanted: living encoders on the client with equal weights; while there is one, a request may need it again.
        there: True if all workers have loaded it.
    """

    nbytes: int
    users: int = 0
    wanted: weakref.WeakSet[Encoder] = field(default_factory=weakref.WeakSet)
    there: bool = False


class Dictionaries:
    """SAE encoders loaded on an engine's workers.

    Args:
        workers: connection to the workers.
        most_bytes: maximum bytes of all encoders on a worker.
    """

    def __init__(self, workers: Workers, most_bytes: int) -> None:
        self._workers, self._most_bytes = workers, most_bytes
        self._entries: dict[Key, _Entry] = {}  # least recently used first
        self._digests: weakref.WeakKeyDictionary[Encoder, tuple[tuple[int, ...], bytes]] = weakref.WeakKeyDictionary()
        self._turn = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def holding(self, readers: Readers | None) -> AsyncIterator[tuple[bytes, ...]]:
        """Keep a request's SAEs loaded on the workers in the block; yield their encoders' digests, point by point.

        Raises:
            SAEMemoryFull: there is no room for one beside those that other requests use.
            MemoryNotShared: a worker cannot read this process's memory, such as one on another machine.
            WorkerFailure: a worker cannot load one for another reason.
        """
        if readers is None:
            yield ()
            return
        keys: list[Key] = []
        try:
            for point, encoder in zip(readers.points.values(), readers.encoders, strict=True):
                key = await self._digest(encoder), point
                entry = self._entries.setdefault(key, _Entry(image_bytes(encoder.shape)))
                entry.users += 1
                keys.append(key)
                if encoder not in entry.wanted:
                    entry.wanted.add(encoder)
                    weakref.finalize(encoder, _gone, weakref.ref(self), key).atexit = False
                await self._ensure(key, entry, encoder)
            yield tuple(digest for digest, _ in keys)
        finally:
            for key in keys:
                self._entries[key].users -= 1
                self._let_go(key)

    async def aclose(self) -> None:
        """Cancel tasks that are freeing encoders. Idempotent."""
        for task in self._closing:
            task.cancel()
        if self._closing:
            await asyncio.wait(self._closing)

    async def _digest(self, encoder: Encoder) -> bytes:
        versions = tuple(0 if one.is_inference() else one._version for one in encoder.tensors)  # noqa: SLF001 -- no other name
        known = self._digests.get(encoder)
        if known is None or known[0] != versions:
            known = self._digests[encoder] = versions, await asyncio.to_thread(encoder.digest)
        return known[1]

    async def _ensure(self, key: Key, entry: _Entry, encoder: Encoder) -> None:
        async with self._turn:
            if not entry.there:
                try:
                    await self._load(key, entry, encoder)
                except BaseException:
                    if not self._workers.closed:
                        await asyncio.shield(self._close(key))  # some workers may hold it
                    raise
            self._entries[key] = self._entries.pop(key)

    async def _load(self, key: Key, entry: _Entry, encoder: Encoder) -> None:
        """Load an encoder on all workers, unloading unused ones to make room, the least recently used first.

        Raises:
            SAEMemoryFull: there is no room even after all unused encoders were unloaded.
        """
        while self._held + entry.nbytes > self._most_bytes:
            if not await self._displace():
                raise SAEMemoryFull(_no_room(encoder, f"{self._held:,} of {self._most_bytes:,} bytes are in use"))
        segment = await asyncio.to_thread(_shared, encoder)
        asked = OpenSAE(*key, encoder.shape, segment.path, segment.nonce, self._most_bytes)
        try:
            while True:
                answers = [one for ranks in await self._workers.ask(asked, SAEOpened) for one in ranks]
                _check(answers)
                full = next((one.full for one in answers if one.full), None)
                if full and not await self._displace():
                    raise SAEMemoryFull(_no_room(encoder, full))
                if not full and not any(one.coming for one in answers):
                    entry.there = True
                    return
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            segment.close()

    @property
    def _held(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values() if entry.there)

    async def _displace(self) -> bool:
        """Free the least recently used encoder that no request uses; return False if there is none."""
        found = next((key for key, entry in self._entries.items() if entry.there and not entry.users), None)
        if found is None:
            return False
        await self._close(found)
        return True

    async def _close(self, key: Key) -> None:
        """Free an encoder on the workers, and forget its entry if no request uses it."""
        entry = self._entries[key]
        entry.there = False
        await self._workers.ask(CloseSAE(*key), SAEOpened)
        if not entry.users and not entry.there:
            self._entries.pop(key, None)

    def gone(self, key: Key) -> None:
        """Schedule the release of an encoder after its garbage collection; safe from any thread, at any moment."""
        if not self._workers.closed:
            self._workers.home.call(partial(self._let_go, key))

    def _let_go(self, key: Key) -> None:
        """Schedule the release of an encoder that no request uses and no living SAE needs; else do nothing."""
        entry = self._entries.get(key)
        if entry is None or entry.users or len(entry.wanted) or self._workers.closed:
            return
        task = self._workers.home.loop.create_task(self._free(key), name="steercap SAE")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _free(self, key: Key) -> None:
        async with self._turn:
            entry = self._entries.get(key)
            if entry is None or entry.users or len(entry.wanted) or self._workers.closed:
                return
            if not entry.there:
                del self._entries[key]
                return
            with contextlib.suppress(EngineFailure):  # a dead engine holds nothing; its next caller is told
                await self._close(key)


def _gone(held: weakref.ref[Dictionaries], key: Key) -> None:
    """Call `Dictionaries.gone`; the weak reference keeps an encoder's finalizer from keeping the engine alive."""
    if (dictionaries := held()) is not None:
        dictionaries.gone(key)


def _check(answers: Sequence[SAEOpened]) -> None:
    """Check that no worker reports a problem other than a lack of room.

    Raises:
        MemoryNotShared, WorkerFailure: a worker reports one.
    """
    for one in answers:
        if one.unreachable:
            raise MemoryNotShared(
                "a worker cannot read an SAE out of this process's memory, as it is on another machine or in another "
                f"container: {one.unreachable}; capture rows, and read them with SAE.strongest"
            )
        if one.refused:
            raise WorkerFailure(f"a worker cannot load an SAE: {one.refused}")


def _no_room(encoder: Encoder, reason: str) -> str:
    return (
        f"there is no room for an SAE of {encoder.d_sae:,} features of {encoder.d_in} elements, "
        f"{image_bytes(encoder.shape):,} bytes: {reason}; raise SteerModel(..., sae_bytes=), lower "
        "gpu_memory_utilization=, or use fewer SAEs at once"
    )


def _shared(encoder: Encoder) -> SharedSegment:
    """Copy an encoder's weights to a new shared-memory segment that other processes of this machine can read."""
    wanted = image_bytes(encoder.shape)
    segment = SharedSegment.create(wanted)
    encoder.write(torch.frombuffer(segment.memory, dtype=torch.uint8, count=wanted, offset=HEADER_BYTES))
    return segment
