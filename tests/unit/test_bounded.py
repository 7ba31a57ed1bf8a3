"""Many things at once: no more than the limit, in order, the first error by itself, and nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from steercap.concurrency.loops import each_of
from steercap.errors import InvalidSetting


class Work:
    """Work that is done when it is told, or fails; and what was seen of it."""

    def __init__(self, wrong: int | None = None) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.now = self.most = 0
        self.go_on = asyncio.Event()
        self._wrong = wrong

    async def __call__(self, item: int) -> str:
        self.begun.append(item)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.go_on.wait()
            for _ in range(1 + item % 3):  # they do not end in the order in which they began
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(item)
            raise
        finally:
            self.now -= 1
        if item == self._wrong:
            raise LookupError(f"item {item}") from KeyError("why")
        return f"done {item}"


@pytest.mark.parametrize(("items", "limit", "most"), [(10, 3, 3), (10, 1, 1), (2, 5, 2), (0, 3, 0)])
async def test_no_more_than_the_limit_are_under_way(items, limit, most) -> None:
    """As many as may be, begun in order; what became of them comes in their order, whichever ended first."""
    work = Work()
    work.go_on.set()
    assert await each_of(range(items), work, limit) == [f"done {item}" for item in range(items)]
    assert (work.most, work.begun) == (most, list(range(items)))


async def test_a_limit_of_none_is_refused() -> None:
    """Nothing would ever be done."""
    with pytest.raises(InvalidSetting, match="0 items at once; give a limit of 1 or more"):
        await each_of(range(3), Work(), 0)


async def test_the_limit_is_held_while_nothing_ends() -> None:
    """The first of them begin at once, in order; the next one is taken only when it is begun."""
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(10):
            taken.append(item)
            yield item

    work = Work()
    task = asyncio.ensure_future(each_of(items(), work, 4))
    while len(work.begun) < 4:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert work.begun == taken == [0, 1, 2, 3]
    work.go_on.set()
    assert len(await task) == 10


async def test_the_first_error_is_raised_by_itself_with_its_cause() -> None:
    """In no group; the others are cancelled, and what had not begun does not begin."""
    work = Work(wrong=2)
    work.go_on.set()
    with pytest.raises(LookupError, match="item 2") as raised:
        await each_of(range(100), work, 3)
    assert isinstance(raised.value.__cause__, KeyError)
    assert raised.value.__suppress_context__
    assert len(work.begun) < 10
    assert work.now == 0


async def test_items_that_cannot_be_made_are_an_error_of_the_call() -> None:
    """Of several errors the first is raised; it may come from the items themselves."""

    def items() -> Iterator[int]:
        yield from range(5)
        raise ValueError("no sixth item")

    work = Work()
    work.go_on.set()
    with pytest.raises(ValueError, match="no sixth item"):
        await each_of(items(), work, 2)
    with pytest.raises(ValueError, match="no sixth item"):
        await each_of(items(), work, 100)
    assert work.now == 0


async def test_a_cancelled_call_leaves_nothing_running() -> None:
    """All that is under way is cancelled and has ended when the cancellation is raised."""
    work = Work()
    task = asyncio.ensure_future(each_of(range(100), work, 5))
    while len(work.begun) < 5:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(work.cancelled) == work.begun == [0, 1, 2, 3, 4]
    assert work.now == 0
