"""A task is cancelled, wherever it waits."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steercap.captures.saving import save_run
from steercap.captures.stacking import flat
from steercap.core.spec import CaptureSpec
from support.cancelling import cancelled_everywhere
from support.faults.base import SHORT, Fault, Outcome, opened, prompts
from support.specs import spec

if TYPE_CHECKING:
    from steercap.model import SteerModel


def works(model: SteerModel) -> dict[str, Callable[[], Coroutine[Any, Any, Any]]]:
    """What a user awaits of a model, of each kind something short."""
    two = prompts(2, 9)

    async def generated() -> None:
        _, handles = await model.generate(two, SHORT, capture_layers="all")
        await model.fetch_captures_batch(handles)

    async def reduced() -> None:
        _, given = await model.generate(two[0], SHORT, capture=CaptureSpec(reduce="mean"))
        await model.fetch_captures_batch(flat(given))

    async def streamed() -> None:
        async for _ in model.stream(two[0], SHORT, capture_layers=[0]):
            pass

    async def steered() -> None:
        async with model.steered(spec("add", 128, layers=[1])):
            await model.generate(two, SHORT)

    async def sketched() -> None:
        async with model.sketch(layers=[0]) as sketch:
            await model.read(two[0])
            await sketch.fetch()

    async def saved() -> None:
        handle = await model.read(two[0], capture_layers=[0])
        await handle.fetch()
        with tempfile.TemporaryDirectory() as folder:
            await asyncio.to_thread(save_run, folder, [handle])

    known = (generated, reduced, streamed, steered, sketched, saved)
    return {work.__name__: work for work in known}


async def everywhere(model: SteerModel) -> dict[str, int]:
    """Cancel each of `works` at every place; returns how many places each has."""
    prompt = prompts(1, 9, 77)[0]
    text = await model.generate(prompt, SHORT)

    async def check() -> None:
        assert await model.generate(prompt, SHORT) == text

    return {name: await cancelled_everywhere(model, work, check) for name, work in works(model).items()}


async def inject(_folder: Path) -> list[Outcome]:
    """Cancel everywhere."""
    async with opened() as model:
        found = await everywhere(model)
    says = "places: nothing held, the next is right"
    return [Outcome(name, f"cancelled at {places} {says}") for name, places in found.items()]


MEMBER = Fault(
    title="a task cancelled at each await",
    how="each task that the call starts is stepped by hand, and the call is cancelled at the k-th wait of all of "
    "them, for k = 0, 1, ... until it is done before",
    must="CancelledError; `stats()` shows nothing held, and the next request is right",
    inject=inject,
)
