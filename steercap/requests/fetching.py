"""Rows of any number of handles with one RPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from steercap.errors import CaptureIncomplete, CaptureNotFinite, InvalidRequest
from steercap.requests.lifecycle import Lifecycle, Stage


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
            one.source.engine.require_open()  # before a lock that belongs to its event loop
    async with AsyncExitStack() as turns:
        pending: list[Lifecycle] = []
        for one in sorted(dict.fromkeys(wanted), key=id):
            await turns.enter_async_context(one.turn)
            one.require_wanted()
            if one.stage is Stage.KEPT:
                pending.append(one)
        if not pending:
            return
        await _fetch_pending(pending)


async def _fetch_pending(pending: Sequence[Lifecycle]) -> None:
    """Fetch rows whose turn it is."""
    engines = {one.source.engine for one in pending if one.source is not None}
    if len(engines) != 1:
        raise InvalidRequest(f"these handles belong to {len(engines)} models; fetch the handles of one model at a time")
    for one in pending:
        one.require_wanted()  # it may have been released while this waited for other turns
    errors: list[CaptureIncomplete | CaptureNotFinite] = []
    try:
        for one in pending:
            one.fetch()
        deliveries = await engines.pop().collect([one.source.wanted for one in pending if one.source is not None])
        for one, delivery in zip(pending, deliveries, strict=True):
            try:
                one.arrive(delivery)
            except (CaptureIncomplete, CaptureNotFinite) as error:
                errors.append(error)
            await asyncio.sleep(0)  # a batch of thousands must not stop the loop
    finally:
        for one in pending:
            one.end_fetch()
    for one in pending:
        one.require_wanted()
    if errors:
        rest = f" (and {len(errors) - 1} other handles of this batch)" if len(errors) > 1 else ""
        raise type(errors[0])(f"{errors[0]}{rest}") from errors[0]
