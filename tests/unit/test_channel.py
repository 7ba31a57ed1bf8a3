"""Channels between client and worker: real sockets, threads and processes, without a model."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import uvloop
from workers import batch, some_runtime

from steercap.core.messages import Call, GetStats, decode_answer, encode
from steercap.core.plan import Plan
from steercap.engine.workers import Workers
from steercap.worker.channel import Channel, Listener

CPU = torch.device("cpu")


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A worker that returns each frame reversed, the longer the later."""

    def answer(frame: bytes) -> bytes:
        time.sleep(len(frame) / 1e9)
        return frame[::-1]

    return Listener(answer, CPU)


async def test_answers_come_in_the_order_of_their_questions(listener) -> None:
    """Short ones behind one of 8 MB, from many tasks at once; a caller that has left takes nobody else's answer."""
    channel = Channel.open(listener.address)
    frames = [os.urandom(1 << 23), *(os.urandom(1 + number) for number in range(300))]
    asked = [channel.ask(frame) for frame in frames]
    for number in range(0, 300, 7):
        asked[number].cancel()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for number, (frame, answer) in enumerate(zip(frames, answers, strict=True)):
        if number % 7 or number == 300:
            assert answer == frame[::-1]
        else:
            assert isinstance(answer, asyncio.CancelledError)
    channel.close()
    channel.close()
    with pytest.raises(ConnectionError):
        await channel.ask(b"too late")


async def test_every_client_is_heard(listener) -> None:
    """Beside others, and after some that left in the middle of a frame or announced one that nothing could hold."""
    first = Channel.open(listener.address)
    for size in (100, 1 << 31, 1 << 60):
        with socket.socket(socket.AF_UNIX) as rude:
            rude.connect(f"\0{listener.address}")
            rude.sendall(struct.pack("<Q", size) + b"half")
            rude.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert not rude.recv(1)
    channels = [first, *[Channel.open(listener.address) for _ in range(3)]]
    for channel in channels:
        assert await channel.ask(b"abc") == b"cba"
        assert not channel.is_closed
    for channel in channels:
        channel.close()


def test_a_channel_of_uvloop_answers(listener) -> None:
    """The loop of vLLM's server, whose transports are of no class of asyncio's."""

    async def asked() -> list[bytes]:
        channel = Channel.open(listener.address)
        found = await asyncio.gather(*(channel.ask(b"ab" * size) for size in (1, 1 << 20, 3)))
        channel.close()
        assert channel.is_closed
        return list(found)

    assert uvloop.run(asked()) == [b"ba" * size for size in (1, 1 << 20, 3)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_processes_of_another_user_are_not_answered(listener) -> None:
    """The worker hangs up on them, and the client on a worker of theirs."""
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(20)\n"
        "s.connect('\\0' + sys.argv[1])\n"
        "try:\n    s.sendall(b'\\3' + bytes(7) + b'abc')\n    print(s.recv(99))\n"
        "except ConnectionError:\n    print(b'')"
    )
    said = subprocess.run([sys.executable, "-c", code, listener.address], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "b''"
    name = f"steercap-test-{os.getpid()}"  # another run on this machine has another
    code = (
        f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.bind('\\0{name}');"
        "s.listen(); print('up', flush=True); s.accept(); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as other:
        other.stdout.readline()
        with pytest.raises(PermissionError, match="65534"):
            Channel.open(name)
        other.kill()


async def test_a_worker_that_ends_fails_its_questions() -> None:
    """Those that wait, at once, and those to come."""
    code = (
        "import sys, time, torch; from steercap.worker.channel import Listener;"
        "print(Listener(lambda frame: time.sleep(60), torch.device('cpu')).address, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1) as worker:  # noqa: ASYNC220 -- it is short
        channel = Channel.open(worker.stdout.readline().decode().strip())
        asked = channel.ask(b"abc")
        await asyncio.sleep(0.1)
        worker.kill()
        with pytest.raises(ConnectionError):
            await asked
        with pytest.raises(ConnectionError):
            await channel.ask(b"abc")
    with pytest.raises(ConnectionRefusedError):
        Channel.open("steercap-nobody")


async def test_an_answer_waits_for_the_step_of_the_runner() -> None:
    """Nothing is answered, nor freed, between the beginning and the end of a step, which hold the turn."""
    runtime = some_runtime()
    channel = Channel.open(runtime._listen())
    assert runtime._listen() == runtime._listen()
    frame = encode(Call((), GetStats()))
    plan = Plan("steercap-1-0", 3, 5, capture=None)
    with runtime.turn:
        asked = channel.ask(frame)
        runtime.register(plan.key, plan.encode(), 0)
        runtime.begin_step(batch("host", [plan.key], [0], [3], np.arange(3), np.arange(3)))
        await asyncio.sleep(0.2)
        assert not asked.done()
        runtime.end_step()
    assert type(decode_answer(await asked)) is type(decode_answer(runtime.answer(frame)))
    channel.close()


async def test_a_call_that_is_cancelled_leaves_no_word_of_it() -> None:
    """asyncio reports exceptions that nobody looks at, as of a fetch within `asyncio.wait_for`."""
    said: list[str] = []
    loop = asyncio.get_running_loop()
    workers = Workers(SimpleNamespace(died=False))
    workers._channels = [[SimpleNamespace(is_closed=False, ask=lambda _: asyncio.sleep(60))]]
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: said.append(context["message"]))
    try:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(workers._send(b"x"), 0.01)
            await asyncio.sleep(0.01)
            gc.collect()
    finally:
        loop.set_exception_handler(before)
    assert not [message for message in said if "_GatheringFuture" in message]
