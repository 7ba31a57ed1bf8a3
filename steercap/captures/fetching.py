"""Batch fetch of the rows of many handles: from the workers with one RPC, and from disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Final

from steercap.captures.lifecycle import Lifecycle, Stage
from steercap.concurrency.bounded import each_of
from steercap.errors import (
    CaptureIncomplete,
    CaptureNotFinite,
    CaptureReleased,
    EngineFailure,
    InvalidRequest,
    ModelClosed,
    SteercapError,
)

#: Maximum number of handles that are read from disk at once.
READS: Final = 8
#: Maximum number of sequences that are recomputed at once.
AGAIN: Final = 64


async def fetch_all(wanted: Sequence[Lifecycle]) -> None:
    """Fetch the rows of handles of one model with one RPC, except for those fetched already.

    Raises:
        CaptureIncomplete: some rows are missing or wrong; those of the other handles are fetched all the same.
        CaptureNotFinite: some rows hold NaN or infinity; likewise.
        CaptureReleased: some were released.
        InvalidRequest: rows of several models.
        ModelClosed, WrongEventLoop: the model is not open, or was started in another event loop.
    """
    for one in wanted:
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
