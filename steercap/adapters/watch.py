"""Watch of a running engine: its processes live, and its threads listen and answer.

Processes are watched by `adapters.process_exit`. In the engine's process a thread reads requests and another writes
outputs; when an exception ends one of them, its sockets are closed, the process lives, `errored` stays False, and
requests wait for ever. libzmq reports the closed connection. It relies on `engine_core.resources`, its sockets and
`engine_dead`, and on `output_processor.propagate_error`. It can go when vLLM watches these threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final
from uuid import uuid4

import zmq
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from steercap.adapters.process_exit import WORD_SECONDS, Processes

#: Seconds between checks while requests run or wait: a check is two reads and a poll that find nothing, some 20 us.
LOOK_SECONDS: Final = 0.1
_LOG: Final = "its log, on this process's stderr, says more"
#: Thread that has ended when the connection of a socket is closed, by socket.
_THREADS: Final = {
    "input_socket": "its thread that reads requests has ended",
    "output_socket": "its thread that sends outputs has ended",
}


class ConnectionWatch:
    """Watch of the connections to an engine; must be closed before the engine's sockets.

    Args:
        llm: the engine.
        processes: its processes.
        told: function to call when something has died.
    """

    def __init__(self, llm: AsyncLLM, processes: Processes, told: Callable[[], object]) -> None:
        self._llm = llm
        self._processes = processes
        self._told = told
        self._monitors = [(_monitor(llm, name), thread) for name, thread in _THREADS.items()]
        self._running = 0
        self._since = 0.0
        self._thread = ""
        self._looking: asyncio.Task[None] | None = None
        #: Message about what has died, or None.
        self.found: str | None = None

    def look(self) -> str | None:
        """Return a message if the engine has died, else None; then all running requests end with EngineDeadError."""
        if self.found is None and self._is_wrong():
            manager = self._llm.engine_core.resources.engine_manager
            how = self._processes.how(manager.finished_procs() if hasattr(manager, "finished_procs") else {})
            if how or time.monotonic() > self._since + WORD_SECONDS:
                self._end(how or self._processes.which or self._thread)
        return self.found

    def _is_wrong(self) -> bool:
        """Check for signs that something has died; its name may be known only a moment later."""
        for monitor, thread in self._monitors:
            if not self._thread and _tells(monitor):
                self._thread = thread
        if not (self._thread or self._processes.ended() or self._llm.errored):
            return False
        self._since = self._since or time.monotonic()
        return True

    def _end(self, what: str) -> None:
        self.found = f"the vLLM engine has died{f': {what}' if what else ''}; {_LOG}"
        self._llm.engine_core.resources.engine_dead = True
        self._llm.output_processor.propagate_error(EngineDeadError())
        self._told()

    @contextmanager
    def over(self) -> Iterator[None]:
        """Check from time to time in the block, while a request runs or waits."""
        self._running += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._keep_looking(), name="steercap watch")
        try:
            yield
        finally:
            self._running -= 1
            if not self._running and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def _keep_looking(self) -> None:
        while not self.look():  # noqa: ASYNC110 -- libzmq sets no Event
            await asyncio.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        for monitor, _ in self._monitors:
            monitor.close(linger=0)
        self._monitors = []
        self._processes.close()
        if self._looking is not None:
            self._looking.cancel()


def _tells(monitor: zmq.Socket[bytes]) -> bool:
    with suppress(zmq.ZMQError):  # nothing to read, or the engine's context is gone, which others notice
        return bool(monitor.recv_multipart(zmq.NOBLOCK))
    return False


def _monitor(llm: AsyncLLM, name: str) -> zmq.Socket[bytes]:
    """Return a socket that receives a message when a peer of one of the engine's sockets is gone."""
    watched = getattr(llm.engine_core.resources, name)
    address = f"inproc://steercap-{name}-{uuid4().hex}"
    watched.monitor(address, zmq.EVENT_DISCONNECTED)
    # The engine's own context closes it too, if nothing else has.
    monitor: zmq.Socket[bytes] = llm.engine_core.resources.ctx.socket(zmq.PAIR)
    monitor.connect(address)
    return monitor
