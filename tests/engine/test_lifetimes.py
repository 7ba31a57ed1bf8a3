"""A model's life: which event loops may use it, how it is closed, and what remains of a client that is killed: nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from conftest import Leftovers
from support.kills import Kill, Report, end_one, kills
from support.loops import loops
from support.rows import GREEDY, TINY_ENGINE, random_prompt
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from steercap import SteerModel, errors
from steercap.concurrency.heartbeat import watching
from steercap.sync import SteerModel as Sync
from steercap.testing import tiny_checkpoint

PROMPT = random_prompt(9, 1)
#: Stages of a start, in order; short ones may pass between two looks.
STAGES = (
    *("looking up the model", "importing vLLM", "reading the configuration", "starting processes", "loading weights"),
    *("warming up", "proving every tap"),
)
SHORT = {"max_tokens": 4, **GREEDY}
LONG = {"max_tokens": 200, "ignore_eos": True, **GREEDY}
#: Idle, a client is gone within 3 s, most of it Python's own end with torch in it; here two cores may be shared by six.
PATIENT = 60.0


def seed() -> int:
    """Another one each time, printed for a test that fails; STEERCAP_TEST_SEED repeats it."""
    found = int(os.environ.get("STEERCAP_TEST_SEED", "0")) or random.randrange(1, 1 << 30)
    print("seed", found)
    return found


Work = Callable[[], Coroutine[Any, Any, Any]]


async def steer(model: SteerModel) -> None:
    async with model.steered(None):
        pass


def uses(model: SteerModel, handle: Any, stream: Any) -> dict[str, Work]:
    """Everything that can be awaited of a model, a handle and a stream."""
    return {
        "start": model.start,
        "generate": lambda: model.generate(PROMPT, SHORT),
        "chat": lambda: model.chat([{"role": "user", "content": "x"}], SHORT),
        "stats": model.stats,
        "steered": lambda: steer(model),
        "stream": lambda: anext(model.stream(PROMPT, SHORT)),
        "fetch": handle.fetch,
        "fetch_captures_batch": lambda: model.fetch_captures_batch([handle]),
        "a stream that has begun": lambda: anext(stream),
    }


async def refused(works: dict[str, Work], error: type[errors.SteercapError]) -> None:
    """Each raises this, and at once: nothing is asked of the engine."""
    for name, work in works.items():
        try:
            async with asyncio.timeout(PATIENT):
                await work()
        except error:
            continue
        pytest.fail(f"{name} was not refused")


def test_a_model_lives_in_one_event_loop_and_is_closed_from_any() -> None:
    """Another loop, beside or after its own, gets WrongEventLoop; the model goes on, and closing leaves nothing."""
    before = Leftovers()
    model = SteerModel(tiny_checkpoint("qwen3"), **TINY_ENGINE)

    stages: list[str] = []

    async def first() -> Any:
        async with watching(lambda: model.serving.stage, lambda stage, _: stages.append(stage)):
            await model.start()
        assert [stage for stage in STAGES if stage in stages] == list(dict.fromkeys(stages))
        assert {"starting processes", "proving every tap"} <= {*stages}
        assert model.serving.stage == ""
        _, (unread, read) = await model.generate([PROMPT] * 2, SHORT, capture_layers="all")
        await read.fetch()
        stream = model.stream(PROMPT, LONG)
        await anext(stream)

        async def elsewhere() -> None:
            await refused(uses(model, unread, stream), errors.WrongEventLoop)
            await read.fetch()
            unread.release()

        await asyncio.to_thread(asyncio.run, elsewhere())
        text = await model.generate(PROMPT, SHORT)
        assert text == read.text
        found = await loops(model, random.Random(seed()), 40)
        assert found["here"]
        _, (mine, dropped) = await model.generate([PROMPT] * 2, SHORT, capture_layers="all")
        await asyncio.to_thread(dropped.release)
        while (await model.stats()).handles_held > 1:
            await asyncio.sleep(0.01)
        return mine, model.stream(PROMPT, SHORT)

    async def second(handle: Any, stream: Any) -> None:
        await refused(uses(model, handle, stream), errors.WrongEventLoop)
        handle.release()
        await asyncio.gather(model.aclose(), model.aclose())
        await model.aclose()
        closed = uses(model, handle, stream)
        del closed["a stream that has begun"]  # the refusal above was its end
        await refused(closed, errors.SteercapError)
        with pytest.raises(errors.ModelClosed):
            await model.generate(PROMPT, SHORT)

    asyncio.run(second(*asyncio.run(first())))
    assert not before.new()


@pytest.mark.spawned
async def test_a_thread_closes_a_model_that_generates_and_one_that_starts() -> None:
    """Whoever waits in the model's own loop gets ModelClosed, soon; nothing is left."""
    before = Leftovers()
    model = SteerModel(tiny_checkpoint("qwen3"), **TINY_ENGINE)
    starting = asyncio.create_task(model.start())
    while not before.new().get("processes"):
        await asyncio.sleep(0.05)
    await asyncio.to_thread(lambda: asyncio.run(model.aclose()))
    with pytest.raises(errors.ModelClosed):
        await starting
    model = await SteerModel(tiny_checkpoint("qwen3"), **TINY_ENGINE).start()
    running = asyncio.create_task(model.generate([PROMPT] * 8, LONG, capture_layers="all"))

    async def served(name: str) -> None:
        """Ask the engine as a server does, behind the model's back."""
        async for _ in model.engine.generate({"prompt_token_ids": PROMPT}, SamplingParams(**LONG), name):
            pass

    asked = asyncio.create_task(served("early"))
    steps = (await model.stats()).steps
    while (await model.stats()).steps < steps + 3:
        assert not running.done()
        assert not asked.done()
    await asyncio.to_thread(lambda: asyncio.run(model.aclose()))
    with pytest.raises(errors.ModelClosed):
        await running
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(asked, PATIENT)
    await asyncio.sleep(0)  # vLLM leaves its sockets to its loop
    assert not before.new()


def test_threads_share_a_synchronous_model_and_one_closes_it() -> None:
    """Calls from many threads are answered; when one closes, the others get ModelClosed, and nothing is left."""
    before = Leftovers()
    with Sync(tiny_checkpoint("qwen3"), **TINY_ENGINE) as model:
        expected, found = model.generate(PROMPT, SHORT), []

        def work() -> None:
            try:
                while True:
                    text, handle = model.generate(PROMPT, SHORT, capture_layers=[1])
                    handle.fetch().release()
                    found.append(text)
            except errors.ModelClosed as error:
                found.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(found) < 12:
            time.sleep(0.01)
        closing = [threading.Thread(target=model.close) for _ in range(2)]
        for thread in closing:
            thread.start()
        for thread in [*threads, *closing]:
            thread.join(PATIENT)
            assert not thread.is_alive()
    assert {text for text in found if isinstance(text, str)} == {expected}
    assert sum(isinstance(one, errors.ModelClosed) for one in found) == 4
    assert not before.new()


NOTEBOOK = """
import asyncio, os, signal, sys
from steercap import SteerModel
from steercap.testing import tiny_checkpoint
from support.loops import loops
from support.rows import TINY_ENGINE, random_prompt

async def main():
    model = await SteerModel(tiny_checkpoint("qwen3"), **TINY_ENGINE).start()
    prompt, params = random_prompt(9, 1), {"max_tokens": 4, "temperature": 0}
    text = await model.generate(prompt, params)
    cell = asyncio.ensure_future(model.generate([prompt] * 8, {**params, "max_tokens": 200, "ignore_eos": True}))
    # What Jupyter does to interrupt a cell: a signal to the kernel's process group, which cancels what the cell awaits.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, cell.cancel)
    await asyncio.sleep(0.2)
    os.killpg(os.getpgrp(), signal.SIGINT)
    await asyncio.wait([cell])
    assert cell.cancelled()
    assert await model.generate(prompt, params) == text
    print("goes on", flush=True)
    # And it ends without having been closed.

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_an_interrupted_cell_leaves_the_model_usable_and_an_unclosed_one_ends_with_its_process(tmp_path) -> None:
    """The engine does not hear the interrupt; a script that ends without closing leaves nothing, and says so."""
    before = Leftovers()
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    process = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=500, start_new_session=True, check=False
    )
    assert (process.returncode, process.stdout) == (0, "goes on\n"), process.stderr
    assert "Traceback" not in process.stderr
    assert not before.new()


@pytest.mark.parametrize(
    "kill",
    [
        Kill(command=False, phase="generates", delay=0.5, signals=(signal.SIGKILL,), everybody=False),
        Kill(command=True, phase="starts", delay=8.0, signals=(signal.SIGINT,), everybody=True),
        *(
            pytest.param(kill, marks=pytest.mark.extended)
            for kill in (
                Kill(command=False, phase="starts", delay=8.0, signals=(signal.SIGKILL,), everybody=False),
                Kill(command=False, phase="generates", delay=0.5, signals=(signal.SIGINT,), everybody=True),
                Kill(command=False, phase="starts", delay=4.0, signals=(signal.SIGINT,), everybody=True),
                Kill(command=False, phase="closes", delay=0.05, signals=(signal.SIGINT,), everybody=True),
            )
        ),
    ],
    ids=str,
)
def test_nothing_is_left_of_a_client_that_is_killed(kill) -> None:
    """Whatever it was about to do: no process, no shared memory, and the exit code that a shell expects."""
    report = Report()
    end_one(kill, report, bound=PATIENT)
    assert sum(report.ends.values()) == 1


@pytest.mark.extended
def test_random_kills_leave_nothing() -> None:
    """Three more, at random moments; `python -m support.kills 1000` goes on."""
    assert sum(kills(random.Random(seed()), 3, bound=PATIENT).ends.values()) == 3
