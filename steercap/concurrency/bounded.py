"""Many things at once, but not too many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from steercap.errors import SteercapError, first_error

Item = TypeVar("Item")


async def each_of(items: Sequence[Item], work: Callable[[Item], Awaitable[None]], limit: int) -> None:
    """Do some work on each item, begun in their order.

    Args:
        items: what is worked on.
        work: what is done.
        limit: how many are under way at once.

    Raises:
        SteercapError: the first that one of them raised; the others are cancelled.
    """
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(items))):
                group.create_task(worker())
    except* SteercapError as failed:
        raise first_error(failed) from None
