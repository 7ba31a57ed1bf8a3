"""Batching of small questions: those asked during a call are sent together in the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from steercap.errors import ModelClosed

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Batcher of questions of one kind.

    Args:
        send: coroutine function that sends several questions and returns their answers in order.
    """

    def __init__(self, send: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]]) -> None:
        self._send = send
        self._pending: list[tuple[Item, asyncio.Future[Result]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, item: Item) -> Result:
        """Ask one question and return its answer; it is sent even if the caller stops waiting.

        Raises:
            ModelClosed: the batcher was closed meanwhile.
            Whatever `send` raises.
        """
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._pending.append((item, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain(), name="steercap batch")
        return await answer

    async def aclose(self) -> None:
        """Fail all waiting callers. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        closed = ModelClosed("the model was closed while a call to its workers ran")
        _fail([answer for _, answer in self._pending], closed)
        self._pending = []

    async def _drain(self) -> None:
        while self._pending:
            await asyncio.sleep(0)  # so that callers that are about to ask can join
            batch, self._pending = self._pending, []
            answers = [answer for _, answer in batch]
            try:
                results = await self._send([item for item, _ in batch])
                paired = list(zip(answers, results, strict=True))
            except Exception as error:  # noqa: BLE001 -- it is theirs who asked
                _fail(answers, error)
            except BaseException:
                _fail(answers, ModelClosed("the model was closed while a call to its workers ran"))
                raise
            else:
                for answer, result in paired:
                    if not answer.done():
                        answer.set_result(result)


def _fail(answers: Sequence[asyncio.Future[Result]], error: Exception) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(error)
