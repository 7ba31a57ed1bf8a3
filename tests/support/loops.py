"""Uses a real model from random event loops and threads at once: its own are answered, all others are told so."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from steercap.captures.stacking import flat
from steercap.errors import WrongEventLoop
from support.rows import GREEDY, random_prompt

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Seconds in which whoever is in the wrong place must know; nothing is computed for them.
SECONDS: Final = 30.0
_SHORT: Final = {"max_tokens": 4, **GREEDY}


async def loops(model: SteerModel, rng: random.Random, count: int) -> Counter[str]:
    """Use a model many times at once, from its own event loop and from others in threads.

    Args:
        model: an open model, in whose event loop this runs.
        rng: what decides.
        count: uses.

    Returns:
        How often what was done where.

    Raises:
        AssertionError: a use in the right place gave another text, or one in the wrong place gave anything but
            WrongEventLoop, or took long.
    """
    prompt = random_prompt(9, 1)
    text, given = await model.generate(prompt, _SHORT, capture_layers=[0])
    (handle,) = flat(given)
    stream = model.stream(prompt, {**_SHORT, "max_tokens": 100, "ignore_eos": True})
    await anext(stream)
    elsewhere: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "generate": lambda: model.generate(prompt, _SHORT),
        "chat": lambda: model.chat([{"role": "user", "content": "x"}], _SHORT),
        "stream": lambda: _first(model.stream(prompt, _SHORT)),
        "stats": model.stats,
        "fetch": handle.fetch,
        "fetch_captures_batch": lambda: model.fetch_captures_batch([handle]),
        "start": model.start,
    }
    found: Counter[str] = Counter()

    async def here() -> None:
        answer, given = await model.generate(prompt, _SHORT, capture_layers=[0])
        (taken,) = flat(given)
        assert answer == text, (answer, text)
        if rng.random() < 0.5:
            await taken.fetch()
        # A handle may be dropped anywhere.
        await asyncio.to_thread(taken.release) if rng.random() < 0.5 else taken.release()
        found["here"] += 1

    async def there(name: str) -> None:
        await asyncio.to_thread(asyncio.run, _refused(name, elsewhere[name]))
        found[f"{name} elsewhere"] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(here() if rng.random() < 0.5 else there(rng.choice(list(elsewhere))))
    await there("generate")
    assert (await anext(stream)).token_ids, "a stream did not go on"
    await stream.aclose()
    await handle.fetch()
    handle.release()
    return found


async def _first(chunks: Any) -> Any:
    return await anext(chunks)


async def _refused(name: str, use: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    try:
        async with asyncio.timeout(SECONDS):
            await use()
    except WrongEventLoop:
        return
    raise AssertionError(f"{name} in another event loop was not refused")
