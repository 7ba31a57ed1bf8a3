"""What a fault is, and what several of them have in common: an engine, its processes, and what errors must be."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steercap.adapters import hardware
from steercap.captures.handle import CaptureHandle
from steercap.captures.stacking import flat
from steercap.core.extras import extra
from steercap.errors import SteercapError
from steercap.testing import tiny_checkpoint
from support.rows import TINY_ENGINE, random_prompt

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Seconds in which whoever waits must be told, on a machine that others use too.
BOUND: Final = 10.0
LONG: Final = {"max_tokens": 150, "temperature": 0.0, "ignore_eos": True}
#: Of a data set that is the same bit for bit whoever collects it: one window at a time, so that no row depends on what
#: else is in its batch.
COLLECTED: Final[dict[str, Any]] = {"layers": [1, 3], "documents_per_shard": 4, "concurrency": 1}
SHORT: Final = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Outcome:
    """What came of a fault to one of those that it met.

    Args:
        who: who that is.
        told: what they got: an error with its first line, or what else.
        seconds: from the fault until then; None where time says nothing.
    """

    who: str
    told: str
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        title: what happens.
        how: by what it is made to happen.
        must: what must come of it.
        inject: does it, in an empty folder, and says what came; anything else than what must come is an AssertionError.
        missing: why it cannot be injected on this machine, "" if it can.
        under: words of a command that the process must be started by, such as one that gives it mounts of its own.
    """

    title: str
    how: str
    must: str
    inject: Callable[[Path], Coroutine[Any, Any, list[Outcome]]]
    missing: Callable[[], str] = lambda: ""
    under: tuple[str, ...] = ()


def for_root() -> str:
    """Why a fault cannot be injected that only root can."""
    return "" if os.geteuid() == 0 else "only root can mount here"


def for_two_workers() -> str:
    """Why two workers of vLLM's for CPU have not a core each on this machine."""
    return "" if len(hardware.cores()) > 1 else "two workers need two cores"


@asynccontextmanager
async def opened(**arguments: Any) -> AsyncIterator[SteerModel]:
    """A tiny model in an engine of its own."""
    from steercap.model import SteerModel

    async with SteerModel(tiny_checkpoint("qwen3"), **{**TINY_ENGINE, **arguments}) as model:
        yield model


def prompts(count: int, length: int = 30, first: int = 0) -> list[list[int]]:
    """Prompts that differ."""
    return [random_prompt(length, seed) for seed in range(first, first + count)]


async def told(who: str, waiting: Awaitable[Any], began: float, kind: type[Exception], *says: str) -> Outcome:
    """What somebody is told, which must be an error of a kind, soon, that says something.

    Args:
        who: who that is.
        waiting: what they wait for.
        began: when the fault was.
        kind: of the error.
        *says: what it must say.
    """
    try:
        async with asyncio.timeout(10 * BOUND):
            given = await waiting
    except kind as error:
        took = time.monotonic() - began
        missing = [words for words in says if words not in str(error)]
        assert not missing, f"{who}: {error!r} does not say {missing}"
        assert took < BOUND, f"{who} was told after {took:.1f} s"
        return Outcome(who, said(error), took)
    raise AssertionError(f"{who} got {given!r:.80} in place of {kind.__name__}")


def said(error: BaseException) -> str:
    """An error in one line."""
    first = (str(error).strip() or "(no words)").splitlines()[0]
    return f"{type(error).__name__}: {first}"


def processes(model: SteerModel, role: str) -> list[int]:
    """The processes of a model's engine that play a role, "EngineCore" or "Worker"."""
    with extra("cpu", "cuda"):
        import psutil

    engine = model.serving.opened()
    (core,) = [
        one for one in psutil.Process().children() if one.name().startswith("VLLM::EngineCor") and _of(engine, one)
    ]
    if role == "EngineCore":
        return [core.pid]
    return sorted(one.pid for one in core.children() if one.name().startswith("VLLM::Worker"))


def _of(engine: Any, process: Any) -> bool:
    from steercap.adapters.reaper import MARK

    return bool(process.environ().get(MARK) == engine.vllm.launch.reaper.mark)


def kill(pid: int) -> float:
    """Kill a process; returns when that was."""
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


async def fetched(model: SteerModel, asked: Sequence[list[int]]) -> list[CaptureHandle]:
    """Handles of some prompts, with all layers, fetched."""
    _, given = await model.generate(asked, SHORT, capture_layers="all")
    handles: list[CaptureHandle] = flat(given)
    await model.fetch_captures_batch(handles)
    return handles


async def text_and_rows(model: SteerModel) -> str:
    """Check that a model answers, and gives rows; returns the text."""
    text, given = await model.generate(random_prompt(9, 1), SHORT, capture_layers=[0])
    (handle,) = flat(given)
    await handle.fetch()
    assert len(handle.positions) == 9 + 3
    handle.release()
    return str(text)


def refused(error: SteercapError) -> Outcome:
    """Of a request that is refused."""
    return Outcome("the request", said(error))
