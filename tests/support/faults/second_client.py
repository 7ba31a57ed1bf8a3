"""There is a second client."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from steercap.errors import WrongEventLoop
from steercap.testing import tiny_checkpoint
from support.faults.base import BOUND, LONG, SHORT, Fault, Outcome, kill, opened, processes, prompts, said


async def inject(_folder: Path) -> list[Outcome]:
    """A second engine of the same model, a fork of the client, and a server on a port that is taken."""
    async with opened() as model:
        text = await model.generate(prompts(1)[0], LONG)
        async with opened() as other:
            assert await other.generate(prompts(1)[0], LONG) == text
            asked = asyncio.create_task(model.generate(prompts(8), LONG))
            await asyncio.sleep(0.05)
            kill(processes(other, "EngineCore")[0])
            texts = await asked
        assert await model.generate(prompts(8), LONG) == texts
        forked = await asyncio.to_thread(_forked, model)
        assert await model.generate(prompts(1)[0], LONG) == text
        port = await _port()
    return [Outcome("a second engine of the same model, killed", "the first one answers on, alike"), forked, port]


def _forked(model: Any) -> Outcome:
    """Use the model in a fork of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            asyncio.run(model.generate([3, 4], SHORT))
            told = "it answered"
        except BaseException as error:
            told = said(error)
        os.write(writing, told.encode())
        os.kill(os.getpid(), signal.SIGKILL)  # without the end of a process that it is a copy of
    os.close(writing)
    with os.fdopen(reading) as lines:
        told = lines.read()
    os.waitpid(child, 0)
    assert told.startswith(WrongEventLoop.__name__), told
    return Outcome("a fork of the client that uses its model", told)


async def _port() -> Outcome:
    """Serve on a port that is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ["serve", str(tiny_checkpoint("qwen3")), "--port", str(taken.getsockname()[1])]
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "steercap", *words, stdout=-1, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), 600)
    took, lines = time.monotonic() - began, output.decode().strip().splitlines()
    told = next((line for line in reversed(lines) if "in use" in line), "")
    assert process.returncode, "it served"
    assert told, "\n".join(lines[-20:])
    assert took < 10 * BOUND, took
    return Outcome("`steercap serve` on a port that is taken", f"exit code {process.returncode}: {told.strip()}", took)


MEMBER = Fault(
    title="a second client",
    how="another engine of the same model in the same process, killed; a fork of the client; `steercap serve` on a "
    "port that is taken",
    must="the first is not disturbed; the fork is refused, with the reason; so is the port, before an engine starts",
    inject=inject,
)
