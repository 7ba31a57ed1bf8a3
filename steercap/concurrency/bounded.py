"""Concurrent work with an upper limit on the number of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain, islice
from typing import TypeVar

from steercap.errors import InvalidSetting, first_error

Item = TypeVar("Item")
Result = TypeVar("Result")


async def each_of(items: Iterable[Item], work: Callable[[Item], Awaitable[Result]], limit: int) -> list[Result]:
    """Await `work(item)` for each item, at most `limit` at a time, and return the results in the items' order.

    Items are started in order. When this returns or raises, no task is still running.

    Args:
        items: items to work on; each is taken from the iterable only when its work starts.
        work: coroutine function called with each item.
        limit: maximum number of items in progress at once, 1 or more.

    Returns:
        The result for each item, in the order of `items`.

    Raises:
        InvalidSetting: a limit below 1.
        The first error that one of them raised, by itself rather than in a group; the others are cancelled.
    """
    if limit < 1:
        raise InvalidSetting(f"{limit} items at once; give a limit of 1 or more")
    left, results = enumerate(items), dict[int, Result]()

    async def work_off(first: tuple[int, Item]) -> None:
        for index, item in chain([first], left):
            results[index] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for first in islice(left, limit):
                group.create_task(work_off(first))
    except BaseExceptionGroup as failed:
        error = first_error(failed)
        raise error from error.__cause__  # it keeps its own cause, which the group is not
    return [results[index] for index in range(len(results))]
