"""Rows of any number of handles at once: of workers with one RPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

from steercap.concurrency.bounded import each_of
from steercap.errors import (
    CaptureIncomplete,
    CaptureNotFinite,
    CaptureReleased,
    EngineFailure,
    InvalidRequest,
    SteercapError,
)
from steercap.requests.lifecycle import Lifecycle, Stage

#: Sequences that are read again at once.
AGAIN_AT_ONCE: Final = 64


async def fetch_all(wanted: Sequence[Lifecycle]) -> None:
    """Fetch rows of one model with one RPC; those that are here are left alone.

    Raises:
        CaptureIncomplete: some rows are missing or wrong; those of the other handles are fetched all the same.
        CaptureNotFinite: some rows hold NaN or infinity; likewise.
        CaptureReleased: some were released.
        InvalidRequest: rows of several models.
        ModelClosed, WrongEventLoop: the model is not open, or was started in another event loop.
    """
    for one in wanted:
        if one.stage in {Stage.KEPT, Stage.COMING} and one.source is not None:
            one.source.require_open()  # before a lock that belongs to its event loop
    async with AsyncExitStack() as turns:
        # In one order for all, or two fetches of the same handles could each wait for the other.
        for one in sorted(dict.fromkeys(wanted), key=id):
            await turns.enter_async_context(one.turn)
        for one in wanted:
            one.require_wanted()
        pending = [one for one in dict.fromkeys(wanted) if one.stage is Stage.KEPT]
        if pending:
            await _fetch(pending)


async def _collect(kept: Sequence[Lifecycle]) -> list[SteercapError]:
    """Have rows come that their workers have; returns what is wrong with some of them."""
    sources = [one.source for one in kept if one.source is not None]
    if not sources:
        return []
    errors: list[SteercapError] = []
    deliveries = await sources[0].collect(sources)
    for one, delivery in zip(kept, deliveries, strict=True):
        try:
            one.arrive(delivery)
        except (CaptureIncomplete, CaptureNotFinite, CaptureReleased) as error:
            errors.append(error)
        await asyncio.sleep(0)  # a batch of thousands must not stop the loop
    return errors


async def _computed_again(one: Lifecycle) -> SteercapError | None:
    """Have rows computed again that died with their engine; each is here, and takes no memory there, when it has come.

    Returns:
        Why that cannot be, or None.
    """
    again = None if one.source is None else one.source.again
    try:
        if again is not None:
            one.take(await again.rows())
    except SteercapError as error:
        return error
    return None


async def _fetch(pending: Sequence[Lifecycle]) -> None:
    """Fetch rows whose turn it is."""
    sources = [one.source for one in pending if one.source is not None]
    places = {source.place for source in sources}
    if len(places) != 1:
        raise InvalidRequest(f"these handles belong to {len(places)} models; fetch the handles of one model at a time")
    errors: list[SteercapError] = []
    try:
        for one in pending:
            one.fetch()
        kept = [one for one in pending if one.source is not None and one.source.again is None]
        try:
            errors += await _collect(kept)
        except EngineFailure:  # it died meanwhile
            if any(one.source is not None and one.source.again is None for one in kept):
                raise
        lost = [one for one in pending if one.stage is Stage.COMING]
        errors += filter(None, await each_of(lost, _computed_again, AGAIN_AT_ONCE))
    finally:
        for one in pending:
            one.end_fetch()
    for one in pending:
        one.require_wanted()  # it may have been released meanwhile
    if len(errors) > 1:
        raise type(errors[0])(f"{errors[0]} (and {len(errors) - 1} other handles of this batch)") from errors[0]
    if errors:
        raise errors[0]
