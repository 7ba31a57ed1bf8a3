"""Fetch of rows: of many handles in a batch, by one question or from disk, and of requests that still run."""

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
AGAIN: Final = 64


async def fetch_all(wanted: Sequence[Lifecycle]) -> None:
    """Fetch the rows of handles of one model with one question, except for those fetched already.

    Raises:
        CaptureIncomplete: some rows are missing or wrong; those of the other handles are fetched all the same.
        CaptureNotFinite: some rows hold NaN or infinity; likewise.
        CaptureReleased: some were released.
        InvalidRequest: rows of several models, or rows that are handed out in parts at this moment.
        ModelClosed, WrongEventLoop: the model is not open, or was started in another event loop.
    """
    for one in wanted:
        _require_whole(one)
        if one.stage not in {Stage.HERE, Stage.LEAVING, Stage.GONE} and one.source is not None:
            one.source.require_open()  # before a lock that belongs to its event loop
    async with AsyncExitStack() as turns:
        # In one order for all, or two fetches of the same handles could each wait for the other.
        for one in sorted(dict.fromkeys(wanted), key=id):
            await turns.enter_async_context(one.turn)
        while moving := [one for one in wanted if one.stage is Stage.SPILLING]:
            await moving[0].rested()
        for one in wanted:
            one.require_wanted()
        pending = [one for one in dict.fromkeys(wanted) if one.stage in {Stage.KEPT, Stage.SPILLED}]
        if pending:
            await _fetch(pending)


async def fetched_in_parts(one: Lifecycle, rows: int) -> AsyncGenerator[Found, None]:
    """Yield the rows of a handle in order, at most `rows` at a time, and leave them in the worker.

    Rows that are here already, on the client's disk, reduced to one, or summarised, come in one part, and stay here.

    Raises:
        As `fetch_all`; a part that was yielded is right.
    """
    if one.stage is Stage.KEPT and one.source is not None:
        one.source.require_open()
    _require_whole(one)
    async with one.turn:
        await one.rested()
        one.require_wanted()
        source = one.source
        if one.stage is Stage.KEPT and isinstance(source, Source) and source.again is None and source.divisible:
            one.fetch()
            one.handed_out = True
            try:
                for part in (replace(source, expected=each) for each in parts_of(source.expected, rows)):
                    (delivery,) = await part.collect([part])
                    yield part.found(delivery)
                    one.require_wanted()
            finally:
                one.handed_out = False
                one.end_fetch()
            return
    await fetch_all([one])
    yield one.require_here()


def _require_whole(one: Lifecycle) -> None:
    if one.handed_out:
        raise InvalidRequest(f"{one.name}: its rows are handed out in chunks; end that loop before you fetch")


async def _fetch(pending: Sequence[Lifecycle]) -> None:
    """Fetch the rows of handles whose `turn` locks are held."""
    sources = [one.source for one in pending if one.source is not None]
    places = {source.place for source in sources}
    if len(places) != 1:
        raise InvalidRequest(f"these handles belong to {len(places)} models; fetch the handles of one model at a time")
    errors: list[SteercapError] = []
    lost = dict.fromkeys(one for one in pending if one.again is not None)
    spilled = [one for one in pending if one.stage is Stage.SPILLED and one not in lost]
    kept = [one for one in pending if one.stage is Stage.KEPT and one not in lost]
    try:
        for one in pending:
            one.fetch()
        try:
            await _collect(errors, kept)
        except EngineFailure:
            if any(one.again is None for one in kept):
                raise
            lost |= dict.fromkeys(kept)  # it died meanwhile
        await each_of(spilled, partial(_come_back, errors), READS)
        await each_of(lost, partial(_computed_again, errors), AGAIN)
    finally:
        for one in pending:
            one.end_fetch()
    for one in pending:
        one.require_wanted()  # it may have been released meanwhile
    if len(errors) > 1:
        raise type(errors[0])(f"{errors[0]} (and {len(errors) - 1} other handles of this batch)") from errors[0]
    if errors:
        raise errors[0]


async def _collect(errors: list[SteercapError], kept: Sequence[Lifecycle]) -> None:
    """Collect rows from the workers."""
    sources = [one.source for one in kept if one.source is not None]
    if not sources:
        return
    deliveries = await sources[0].collect(sources)
    for one, delivery in zip(kept, deliveries, strict=True):
        with _noted(errors):
            one.arrive(delivery)
        await asyncio.sleep(0)  # a batch of thousands must not stop the loop


async def _computed_again(errors: list[SteercapError], one: Lifecycle) -> None:
    """Recompute the rows of one handle; each takes no worker memory once it is here, so a batch cannot fill it."""
    try:
        if (again := one.again) is not None:
            one.take(await again.rows())
    except SteercapError as error:
        errors.append(error)


async def _come_back(errors: list[SteercapError], one: Lifecycle) -> None:
    try:
        with _noted(errors):
            await one.come_back()
    except ModelClosed:  # with its engine, which has died meanwhile
        if one.again is None:
            raise
        await _computed_again(errors, one)


@contextmanager
def _noted(errors: list[SteercapError]) -> Iterator[None]:
    """Collect errors about one handle's rows, so that the other handles are still fetched."""
    try:
        yield
    except (CaptureIncomplete, CaptureNotFinite, CaptureReleased) as error:
        errors.append(error)


@dataclass(frozen=True)
class Arrived:
    """New rows of a running request.

    Args:
        captures: rows by point.
        positions: position of each row, int64 [rows].
    """

    captures: Captures
    positions: Ints


async def arrived(engine: Engine, wanted: Sequence[tuple[Owner, Expected]]) -> list[Arrived]:
    """Fetch and check the rows of samples so far, with one question, shared with requests that ask at the same time.

    Args:
        engine: the engine that runs them.
        wanted: owner of each sample, and what must have come: tokens up to one that has no row yet, and the number of
            rows that came before.

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
