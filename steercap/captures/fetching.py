"""Fetching of rows: of many handles in one call, from the workers or from disk, and of requests that still run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from steercap.captures.checks import Expected, parts_of, received
from steercap.captures.lifecycle import Lifecycle, Source, Stage
from steercap.captures.rows import Captures, Found
from steercap.concurrency.loops import each_of
from steercap.core.messages import Owner, Wanted
from steercap.core.rows import Ints
from steercap.errors import (
    CaptureIncomplete,
    CaptureMemoryFull,
    CaptureNotFinite,
    CaptureReleased,
    EngineFailure,
    InvalidRequest,
    ModelClosed,
    SteercapError,
)

if TYPE_CHECKING:
    from steercap.engine.engine import Engine

#: Maximum number of handles that are read from disk at once.
READS: Final = 8
#: Maximum number of sequences that are recomputed at once.
RECOMPUTED_AT_ONCE: Final = 64


async def fetch_all(lifecycles: Sequence[Lifecycle]) -> None:
    """Fetch the rows of handles of one model in one call; handles that were fetched before are skipped.

    Raises:
        CaptureIncomplete: some rows are missing or wrong; those of the other handles are fetched all the same.
        CaptureNotFinite: some rows hold NaN or infinity; the other handles are fetched all the same.
        CaptureReleased: a handle was released; the others are fetched all the same, if that was during the call.
        InvalidRequest: the handles belong to several models, or one of them is being read in chunks.
        ModelClosed, WrongEventLoop: the model is not open, or was started in another event loop.
    """
    for lifecycle in lifecycles:
        _require_whole(lifecycle)
        if lifecycle.stage not in {Stage.HERE, Stage.LEAVING, Stage.GONE} and lifecycle.source is not None:
            lifecycle.source.require_open()  # before a lock that belongs to its event loop
    async with AsyncExitStack() as turns:
        # In one order for all, or two fetches of the same handles could each wait for the other.
        for lifecycle in sorted(dict.fromkeys(lifecycles), key=id):
            await turns.enter_async_context(lifecycle.turn)
        while moving := [lifecycle for lifecycle in lifecycles if lifecycle.stage is Stage.SPILLING]:
            await moving[0].wait_for_move()
        for lifecycle in lifecycles:
            lifecycle.require_wanted()
        pending = [
            lifecycle for lifecycle in dict.fromkeys(lifecycles) if lifecycle.stage in {Stage.KEPT, Stage.SPILLED}
        ]
        if pending:
            await _fetch(pending)


async def fetched_in_parts(lifecycle: Lifecycle, rows: int) -> AsyncGenerator[Found, None]:
    """Yield the rows of a handle in order, at most `rows` at a time; the worker keeps the rows.

    Rows that were fetched before, are on the client's disk, or are reduced or summarised come in one part, and the
    handle keeps them.

    Raises:
        The errors of `fetch_all`; every part is checked before it is yielded.
    """
    if lifecycle.stage is Stage.KEPT and lifecycle.source is not None:
        lifecycle.source.require_open()
    _require_whole(lifecycle)
    async with lifecycle.turn:
        await lifecycle.wait_for_move()
        lifecycle.require_wanted()
        source = lifecycle.source
        kept = lifecycle.stage is Stage.KEPT and lifecycle.recompute is None
        if kept and isinstance(source, Source) and source.divisible:
            lifecycle.fetch()
            lifecycle.in_chunks = True
            try:
                for part in (replace(source, expected=each) for each in parts_of(source.expected, rows)):
                    (delivery,) = await part.collect([part])
                    yield part.checked(delivery)
                    lifecycle.require_wanted()
            finally:
                lifecycle.in_chunks = False
                lifecycle.end_fetch()
            return
    await fetch_all([lifecycle])
    yield lifecycle.require_here()


def _require_whole(lifecycle: Lifecycle) -> None:
    if lifecycle.in_chunks:
        raise InvalidRequest(f"{lifecycle.name}: its rows are handed out in chunks; end that loop before you fetch")


async def _fetch(pending: Sequence[Lifecycle]) -> None:
    """Fetch the rows of handles whose `turn` locks are held: from workers, from disk, or by recomputing."""
    sources = [lifecycle.source for lifecycle in pending if lifecycle.source is not None]
    places = {source.place for source in sources}
    if len(places) != 1:
        raise InvalidRequest(f"these handles belong to {len(places)} models; fetch the handles of one model at a time")
    errors: list[SteercapError] = []
    lost = dict.fromkeys(lifecycle for lifecycle in pending if lifecycle.recompute is not None)
    spilled = [lifecycle for lifecycle in pending if lifecycle.stage is Stage.SPILLED and lifecycle not in lost]
    kept = [lifecycle for lifecycle in pending if lifecycle.stage is Stage.KEPT and lifecycle not in lost]
    try:
        for lifecycle in pending:
            lifecycle.fetch()
        try:
            await _collect(errors, kept)
        except EngineFailure:
            if any(lifecycle.recompute is None for lifecycle in kept):
                raise
            lost |= dict.fromkeys(kept)  # it died meanwhile
        await each_of(spilled, partial(_read_back, errors), READS)
        later: list[Lifecycle] = []
        await each_of(lost, partial(_recompute, errors, later=later), RECOMPUTED_AT_ONCE)
        for lifecycle in later:
            await _recompute(errors, lifecycle)
    finally:
        for lifecycle in pending:
            lifecycle.end_fetch()
    for lifecycle in pending:
        lifecycle.require_wanted()  # it may have been released meanwhile
    if len(errors) > 1:
        raise type(errors[0])(f"{errors[0]} (and {len(errors) - 1} other handles of this batch)") from errors[0]
    if errors:
        raise errors[0]


async def _collect(errors: list[SteercapError], kept: Sequence[Lifecycle]) -> None:
    """Collect rows of handles from the workers; errors about one handle's rows are appended to `errors`."""
    sources = [lifecycle.source for lifecycle in kept if lifecycle.source is not None]
    if not sources:
        return
    deliveries = await sources[0].collect(sources)
    for lifecycle, delivery in zip(kept, deliveries, strict=True):
        with _noted(errors):
            lifecycle.arrive(delivery)
        await asyncio.sleep(0)  # a batch of thousands must not stop the loop


async def _recompute(errors: list[SteercapError], lifecycle: Lifecycle, later: list[Lifecycle] | None = None) -> None:
    """Recompute the rows of one handle; if others leave it no room in the arena, append it to `later`, unless None."""
    try:
        if (recompute := lifecycle.recompute) is not None:
            lifecycle.take(await recompute.rows())
    except SteercapError as error:
        if later is not None and isinstance(error, CaptureMemoryFull):
            later.append(lifecycle)
        else:
            errors.append(error)


async def _read_back(errors: list[SteercapError], lifecycle: Lifecycle) -> None:
    try:
        with _noted(errors):
            await lifecycle.read_back()
    except ModelClosed:  # with its engine, which has died meanwhile
        if lifecycle.recompute is None:
            raise
        await _recompute(errors, lifecycle)


@contextmanager
def _noted(errors: list[SteercapError]) -> Iterator[None]:
    """Context manager that appends errors about one handle's rows to `errors`, so that the others are still fetched."""
    try:
        yield
    except (CaptureIncomplete, CaptureNotFinite, CaptureReleased) as error:
        errors.append(error)


@dataclass(frozen=True)
class Arrived:
    """New rows of a running request, with their positions, int64 [rows]."""

    captures: Captures
    positions: Ints


async def arrived(engine: Engine, wanted: Sequence[tuple[Owner, Expected]]) -> list[Arrived]:
    """Fetch and check the new rows of running samples, in their order, in one call that concurrent callers share.

    Args:
        engine: the engine that runs them.
        wanted: owner of each sample, and the expected rows: the tokens up to one that has no row yet, and the number of
            rows fetched before.

    Raises:
        CaptureIncomplete, CaptureNotFinite: see `received`.
        EngineFailure: the engine has died, or a worker cannot answer.
    """
    asked = [Wanted(owner, len(expected.tokens) - 1, expected.first) for owner, expected in wanted]
    deliveries = await engine.collect(asked, growing=True)
    found = []
    for (_, expected), delivery in zip(wanted, deliveries, strict=True):
        rows, receipt = received(expected, delivery, engine.vllm.points)
        found.append(Arrived(Captures(rows, engine.vllm.num_layers), receipt.positions))
    return found
