"""What belongs to one event loop is not awaited in another, and calls from threads end, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import steercap
from steercap.concurrency.loops import OwnerLoop, end_within, finished, on_thread, running_loop
from steercap.errors import ModelClosed, WrongEventLoop
from steercap.sync import twins
from steercap.sync.twins import LoopThread, StreamTwin


def made() -> tuple[OwnerLoop, asyncio.AbstractEventLoop]:
    """A home in a loop that does not run now."""
    loop = asyncio.new_event_loop()

    async def make() -> OwnerLoop:
        return OwnerLoop("this model")

    return loop.run_until_complete(make()), loop


def test_a_home_is_known_from_inside_alone() -> None:
    """Inside: nothing. In another loop, in none, after its end, in a fork: an error that says which."""
    home, loop = made()

    async def require() -> bool:
        home.require()
        return home.is_here

    assert loop.run_until_complete(require())
    with pytest.raises(WrongEventLoop, match=r"not in this one; use a model in one event loop.*steercap\.sync"):
        asyncio.run(require())
    with pytest.raises(WrongEventLoop, match="in another event loop"):
        home.require()
    assert not home.lives
    child = os.fork()
    if child == 0:
        try:
            loop.run_until_complete(require())
        except WrongEventLoop as error:
            os._exit(0 if "a fork of it" in str(error) else 1)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    loop.close()
    with pytest.raises(WrongEventLoop, match="has been closed since"):
        home.require()
    home.call(lambda: None)  # nobody is there to hear it
    assert running_loop() is None


async def test_a_loop_that_does_not_answer_holds_nobody_up() -> None:
    """`OwnerLoop.run` runs in the loop where it lives, and waits for no loop that is blocked or does not run."""
    ran = []

    async def work() -> None:
        ran.append(running_loop())

    thread = LoopThread()

    async def make() -> OwnerLoop:
        return OwnerLoop("this model")

    home = thread.run(make())
    await home.run(work, patience=30)
    assert ran == [thread.loop]
    free = threading.Event()
    thread.loop.call_soon_threadsafe(free.wait)
    began = time.monotonic()
    await home.run(work, patience=0.2)
    assert 0.2 <= time.monotonic() - began < 20
    assert len(ran) == 1
    free.set()
    thread.stop()
    late = len(ran)
    await home.run(work, patience=30)
    assert len(ran) == late


async def test_what_must_be_seen_to_its_end_is() -> None:
    """`finished` raises a cancellation when the call has ended, not before; `over` waits no longer than it is told."""
    go = threading.Event()
    call = on_thread(lambda: go.wait(60), "steercap test")
    waiting = asyncio.create_task(finished(call))
    await asyncio.sleep(0)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0.01)
        assert not waiting.done()
    await end_within(call, patience=0.01)
    assert not call.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await finished(call) is True

    def fail() -> None:
        raise ModelClosed("it failed")

    with pytest.raises(ModelClosed, match="it failed"):
        await finished(on_thread(fail, "steercap test"))
    await end_within(on_thread(fail, "steercap test"), patience=30)


def test_calls_from_many_threads_end_when_the_loop_is_stopped() -> None:
    """Whoever calls while it stops has an answer or ModelClosed; nobody waits for ever."""
    for _ in range(20):
        thread = LoopThread()

        def call(seconds: float, thread: LoopThread = thread) -> str:
            try:
                for _ in range(200):
                    thread.run(asyncio.sleep(seconds))
            except ModelClosed:
                return "closed"
            return "done"

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(call, seconds) for seconds in (0, 0, 0.001, 0.001, 600, 600, 600, 600)]
            time.sleep(0.01)
            stops = [pool.submit(thread.stop) for _ in range(2)]
            # 600 s would be the calls' own end.
            found = [call.result(timeout=60) for call in calls]
            for stop in stops:
                stop.result(timeout=60)
        assert found[4:] == ["closed"] * 4
        assert thread.loop.is_closed()
        assert not thread._thread.is_alive()
        with pytest.raises(ModelClosed, match="rows that were not fetched are gone"):
            thread.run(asyncio.sleep(0))


def test_a_call_that_goes_on_when_it_is_cancelled_ends_with_the_loop(monkeypatch) -> None:
    monkeypatch.setattr(twins, "STOP_SECONDS", 0.1)
    thread, begun = LoopThread(), threading.Event()

    async def stubborn() -> None:
        begun.set()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)

    call = on_thread(lambda: thread.run(stubborn()), "steercap test")
    assert begun.wait(60)
    thread.stop()
    with pytest.raises(ModelClosed, match="was closed while this call ran"):
        call.result(timeout=60)


def test_a_call_from_within_the_loop_does_not_wait_for_itself() -> None:
    """A callback that calls the synchronous facade is told so."""
    thread = LoopThread()

    async def call() -> None:
        thread.run(asyncio.sleep(0))

    with pytest.raises(WrongEventLoop, match="would wait for itself"):
        thread.run(call())
    thread.stop()


class Stream:
    """An endless stream of activations."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> int:
        return 1

    async def aclose(self) -> None:
        self.closed.set()


@pytest.fixture
def garbage() -> Iterator[tuple[LoopThread, Stream]]:
    """A loop, and a stream of it whose loop over batches nobody holds: the next collection of garbage ends it."""
    gc.disable()
    try:
        thread, stream = LoopThread(), Stream()
        batches: Any = iter(StreamTwin(stream, thread.run))  # type: ignore[arg-type]
        assert next(batches) == 1
        cycle = [batches]
        cycle.append(cycle)
        del batches, cycle
        yield thread, stream
    finally:
        gc.enable()


def test_garbage_is_collected_in_the_middle_of_a_call(garbage) -> None:
    """The end of a dropped generator is a call too, in the thread that begins another one."""
    thread, stream = garbage
    schedule = thread.loop.call_soon_threadsafe

    def collecting(*args: Any, **options: Any) -> asyncio.Handle:
        gc.collect()
        return schedule(*args, **options)

    thread.loop.call_soon_threadsafe = collecting
    call = on_thread(lambda: thread.run(asyncio.sleep(0, "answered")), "steercap test")
    assert call.result(timeout=60) == "answered"
    assert stream.closed.is_set()
    thread.stop()


def test_garbage_is_collected_while_a_call_waits(garbage, monkeypatch) -> None:
    """With no lock held that the loop takes to tell the call that it has ended."""
    thread, stream = garbage
    wait = threading.Condition.wait

    def collecting(condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is not threading.main_thread():
            gc.collect()
        return wait(condition, timeout)

    monkeypatch.setattr(threading.Condition, "wait", collecting)
    call = on_thread(lambda: thread.run(asyncio.sleep(0.01, "answered")), "steercap test")
    assert call.result(timeout=60) == "answered"
    monkeypatch.undo()
    gc.collect()
    assert stream.closed.wait(60)
    thread.stop()


def test_garbage_is_collected_in_the_loop_itself(garbage) -> None:
    """Nothing waits for itself, and the stream is closed."""
    thread, stream = garbage

    async def collect() -> None:
        gc.collect()

    thread.run(collect())
    assert stream.closed.wait(60)
    thread.stop()


def test_an_interpreter_ends_although_a_loop_still_runs() -> None:
    """A script that forgets to stop it ends at once, and quietly."""
    script = (
        "import asyncio, threading\n"
        "from steercap.sync.twins import LoopThread\n"
        "thread = LoopThread()\n"
        "asyncio.run_coroutine_threadsafe(asyncio.sleep(600), thread.loop)\n"
        "print(thread.run(asyncio.sleep(0, 'done')))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("done\n", "")


def test_nothing_waits_by_a_clock_that_can_be_set() -> None:
    """Whoever sets the machine's time must not end a wait, or keep one from its end.

    It is used for the age of a file, and for the time at which a recorded request ended.
    """
    root = Path(steercap.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|\bdatetime\b|from time import", path.read_text())
    }
    assert found == {"cli/up.py", "files/base.py", "server/library.py", "server/recording.py"}
