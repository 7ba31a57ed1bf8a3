"""Kills a process of a real engine in the middle of everything, and looks at what each who is met by it gets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Final

from steercap.captures.stacking import flat
from steercap.core.spec import CaptureSpec
from steercap.errors import EngineDied, SketchIncomplete
from support.faults.base import LONG, SHORT, Outcome, kill, processes, prompts, told
from support.rows import MAX_ERROR, hold, random_prompt, worst
from support.specs import spec

if TYPE_CHECKING:
    from steercap.model import SteerModel
    from steercap.testing.reference import Reference

#: What an error must say of a process that was killed.
KILLED: Final = ("died", "was killed by SIGKILL", "stderr")
#: Memory of captured rows, of which requests of `deaths` wait for their turn.
CROWDED: Final = {"capture_bytes": 2 << 20}
#: What must come of a death, without a restart and with one.
TOLD: Final = (
    "each is told at once, with `EngineDied`: which process, of which signal, where the log is; nothing is left"
)
SURVIVED: Final = (
    "requests are answered anew, rows that nobody had are computed again, both right; a stream that had begun, and the "
    "sketch, end with the cause"
)
_DRAWN: Final = {"max_tokens": 30, "temperature": 1.0, "ignore_eos": True}
#: Elements of a row of the tiny model.
_WIDTH: Final = 128


async def deaths(model: SteerModel, role: str) -> list[Outcome]:
    """Kill a process of an engine that is not started again: all are told at once of what it died.

    Args:
        model: open, and crowded: some requests wait for memory.
        role: of the process, "EngineCore" or "Worker".
    """
    _, given = await model.generate(random_prompt(9, 1), SHORT, capture_layers=[0])
    (held,) = flat(given)
    stream = model.stream(random_prompt(9, 2), LONG)
    await anext(stream)
    asked = [asyncio.create_task(model.generate(one, LONG, capture_layers="all")) for one in prompts(16)]
    while not (await model.stats()).requests_waiting:
        await asyncio.sleep(0.005)
    began = kill(processes(model, role)[-1])
    drained = asyncio.create_task(_drained(stream))
    first: dict[str, Sequence[Awaitable[Any]]] = {"who runs, or waits for memory": asked, "a stream": [drained]}
    found = [
        max([await told(who, one, began, EngineDied, *KILLED) for one in waiting], key=lambda one: one.seconds or 0.0)
        for who, waiting in first.items()
    ]
    for who, ask in {
        "a handle's fetch, afterwards": held.fetch,
        "generate, afterwards": lambda: model.generate([3, 4], SHORT),
        "stats, afterwards": model.stats,
    }.items():
        found.append(await told(who, ask(), time.monotonic(), EngineDied, *KILLED))
    began = time.monotonic()
    await model.aclose()
    return [*found, Outcome("closing the model", "closed", time.monotonic() - began)]


async def survived(model: SteerModel, role: str, reference: Reference) -> list[Outcome]:
    """Kill a process of an engine that is started again: all are answered, and rows are those of transformers.

    Args:
        model: open, with `restart=True`.
        role: of the process, "EngineCore" or "Worker".
        reference: transformers on the same checkpoint.
    """
    edits, before = spec("add", _WIDTH, layers=[1]), (await model.stats()).restarts
    _, plain = await model.generate(prompts(4), _DRAWN, capture_layers="all")
    _, steered = await model.generate(prompts(2, first=9), _DRAWN, capture_layers="all", steering=edits)
    _, samples = await model.generate(random_prompt(9, 5), {**_DRAWN, "n": 2}, capture=CaptureSpec(tokens="generated"))
    seeded = [await model.generate(one, {**_DRAWN, "seed": 7}) for one in prompts(2, first=20)]
    stream = model.stream(random_prompt(9, 6), {**LONG, "max_tokens": 240})
    await anext(stream)
    late = model.stream(random_prompt(9, 8), LONG)
    asked = [asyncio.create_task(model.generate(prompts(8), LONG, capture_layers="all")) for _ in range(2)]
    again = [asyncio.create_task(model.generate(one, {**_DRAWN, "seed": 7})) for one in prompts(2, first=20)]
    async with model.sketch() as sketch:
        await model.read(random_prompt(9, 7))
        await asyncio.sleep(0.05)
        began = kill(processes(model, role)[-1])
        (await asyncio.wait([*asked]))
        took = time.monotonic() - began
        sketched = [
            await told("a sketch", sketch.fetch(), time.monotonic(), SketchIncomplete, *KILLED),
            await told("a request in it", model.read([3, 4]), time.monotonic(), SketchIncomplete, *KILLED),
        ]
    handles = [handle for one in asked for handle in flat(one.result()[1])]
    await model.fetch_captures_batch(handles)
    hold(handles, reference)
    texts = await asyncio.gather(*again)
    assert texts == seeded, "a seeded request gave another text after the restart"
    begun = await told("a stream that had begun", _drained(stream), time.monotonic(), EngineDied, *KILLED)
    first = await anext(late)
    assert first.token_ids, "a stream that had given nothing does not begin"
    await late.aclose()
    rows = await _rows_again(model, [*plain, *flat(samples)], steered, edits, reference)
    stats = await model.stats()
    assert stats.restarts == before + 1, stats
    return [
        Outcome("16 requests under way", "answered anew, rows right against transformers", took),
        Outcome("2 requests with a seed", "the same texts as before the fault"),
        Outcome("8 handles not fetched", rows),
        begun,
        Outcome("a stream that had given nothing", "begins"),
        *sketched,
    ]


async def _rows_again(
    model: SteerModel, plain: Sequence[Any], steered: Sequence[Any], edits: Any, reference: Reference
) -> str:
    """Fetch handles whose engine has died, and compare their rows; says what came."""
    await model.fetch_captures_batch([*plain, *steered])
    assert all(handle.receipt.recomputed for handle in (*plain, *steered))
    same = worst([hold(plain, reference), hold(steered, reference, [edits] * len(steered))])
    error = max(one.error for one in same.values())
    assert error < MAX_ERROR
    return f"rows computed again, marked so, right against transformers (worst error {error:.0e})"


async def killed_in_a_row(model: SteerModel, times: int, reference: Reference) -> list[float]:
    """Kill an engine many times, each time in the middle of a batch; returns the seconds until it was answered."""
    took = []
    for number in range(times):
        asked = asyncio.create_task(model.generate(prompts(8, first=100 * number), LONG, capture_layers="all"))
        await asyncio.sleep(0.2)
        began = kill(processes(model, ("EngineCore", "Worker")[number % 2])[-1])
        _, handles = await asked
        took.append(time.monotonic() - began)
        await model.fetch_captures_batch(handles)
        hold(handles, reference)
    assert (await model.stats()).restarts == times
    return took


async def _drained(chunks: Any) -> None:
    async with contextlib.aclosing(chunks):
        async for _ in chunks:
            pass
