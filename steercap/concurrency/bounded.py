"""Many things at once, but not too many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain, islice
from typing import TypeVar

from steercap.errors import InvalidSetting, first_error

Item = TypeVar("Item")
Result = TypeVar("Result")


async def each_of(items: Iterable[Item], work: Callable[[Item], Awaitable[Result]], limit: int) -> list[Result]:
    """Do some work on each item, begun in their order; when this returns or raises, none of it is under way.

    Args:
        items: what is worked on; the next one is taken when it is begun.
        work: what is done.
        limit: how many are under way at once.

    Returns:
        What became of each item, in their order.

    Raises:
        InvalidSetting: a limit below 1.
        The first error that one of them raised, by itself rather than in a group; the others are cancelled.
    """
    if limit < 1:
        raise InvalidSetting(f"{limit} at once; give 1 or more")
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
