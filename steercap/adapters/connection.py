"""Client's connection to a running AsyncLLM: liveness checks, calls to its workers, and shutdown.

It relies on `AsyncLLM.errored`, `output_handler` and `shutdown`; and, of `engine_core`, on `core_engines`,
`_call_utility_async` and `resources`.

`ConnectionWatch` checks that the engine's processes live, by `adapters.process_exit`, and that the threads of its
sockets do. In the engine's process a thread reads requests and another writes outputs; when an exception ends one of
them, its socket is closed, but the process lives, `errored` stays False, and requests wait for ever. libzmq reports the
closed connection. It relies on `engine_core.resources`, its sockets and `engine_dead`, and on
`output_processor.propagate_error`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import zmq
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from steercap.adapters.process_exit import EXIT_CODE_SECONDS, Processes
from steercap.errors import EngineDied, EngineFailure, ModelClosed, SteercapError, WorkerFailure

#: Seconds between liveness checks while requests run or wait; a check takes some 20 us.
LOOK_SECONDS: Final = 0.1
#: Seconds for which the result of a liveness check is reused, for example by other requests of the same call.
FRESH_SECONDS: Final = 0.01
_LOG: Final = "its log, on stderr of this process, has details"
#: Words for the engine thread that has ended when a socket's connection is closed, by name of the socket.
_THREADS: Final = {
    "input_socket": "its thread that reads requests has ended",
    "output_socket": "its thread that sends outputs has ended",
}


class ConnectionWatch:
    """Liveness watch of an engine's processes and sockets; must be closed before the engine's sockets are.

    Args:
        llm: the engine.
        processes: the engine's processes.
        on_death: function without arguments, called once the engine has died.
    """

    def __init__(self, llm: AsyncLLM, processes: Processes, on_death: Callable[[], object]) -> None:
        self._llm = llm
        self._processes = processes
        self._on_death = on_death
        self._monitors = [(_monitor(llm, name), thread) for name, thread in _THREADS.items()]
        self._running = 0
        self._since = 0.0
        self._checked = 0.0
        self._thread = ""
        self._looking: asyncio.Task[None] | None = None
        #: Error message that says which process or thread has died; None while the engine lives.
        self.found: str | None = None

    def check_alive(self, fresh: float = 0.0) -> str | None:
        """Check that the engine lives; if it has died, end all requests with EngineDeadError and return a message.

        Args:
            fresh: maximum age in seconds of an earlier successful check that is reused.
        """
        now = time.monotonic()
        if self.found is None and now >= self._checked + fresh and self._is_wrong():
            manager = self._llm.engine_core.resources.engine_manager
            how = self._processes.exit_message(manager.finished_procs() if hasattr(manager, "finished_procs") else {})
            if how or now > self._since + EXIT_CODE_SECONDS:
                self.end(how or self._processes.first_exit_message or self._thread)
        return self.found

    def _is_wrong(self) -> bool:
        """Check for signs that something has died; the name of what died may be known only a moment later."""
        for monitor, thread in self._monitors:
            if not self._thread and _tells(monitor):
                self._thread = thread
        if not (self._thread or self._processes.ended() or self._llm.errored):
            self._checked = time.monotonic()
            return False
        self._since = self._since or time.monotonic()
        return True

    def end(self, reason: str) -> None:
        """End all running requests with EngineDeadError for `reason`, "" if unknown, and call `on_death`."""
        self.found = f"the vLLM engine has died{f': {reason}' if reason else ''}; {_LOG}"
        self._llm.engine_core.resources.engine_dead = True
        self._llm.output_processor.propagate_error(EngineDeadError())
        self._on_death()

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Check every `LOOK_SECONDS` that the engine lives, in a task that runs as long as any such block; nestable."""
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
        while not self.check_alive():  # noqa: ASYNC110 -- libzmq sets no Event
            await asyncio.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Close the monitoring sockets and the watch of processes, and cancel the checks. Idempotent."""
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
    """Return a socket that receives a message when the peer of the engine's socket named `name` disconnects."""
    watched = getattr(llm.engine_core.resources, name)
    address = f"inproc://steercap-{name}-{uuid4().hex}"
    watched.monitor(address, zmq.EVENT_DISCONNECTED)
    # The engine's own context closes it too, if nothing else has.
    monitor: zmq.Socket[bytes] = llm.engine_core.resources.ctx.socket(zmq.PAIR)
    monitor.connect(address)
    return monitor


#: Seconds between liveness checks while a worker's answer is awaited.
LIVENESS_SECONDS: Final = 0.1
#: Seconds for which a failed call waits for signs that the engine's death is the cause.
DYING_SECONDS: Final = 0.5
#: Name of the RPC that returns where a worker's process runs; see `process_exit.place`.
_PLACE: Final = "steercap_place"


class Connection:
    """Connection to a running AsyncLLM, until `let_go`; dying processes write exit codes and errors to `folder`."""

    def __init__(self, llm: AsyncLLM, folder: Path) -> None:
        #: Function called with the error when the engine dies; None for no call.
        self.on_death: Callable[[EngineDied], object] | None = None
        self._processes = Processes(folder)
        self.watch: Final = ConnectionWatch(llm, self._processes, self._report_death)
        self._dead = False
        self._llm: AsyncLLM | None = llm
        self._closing = False

    @property
    def llm(self) -> AsyncLLM:
        """The AsyncLLM of this connection.

        Raises:
            ModelClosed: the engine was shut down.
        """
        if self._llm is None:
            raise ModelClosed("the engine was shut down with its SteerModel")
        return self._llm

    async def watch_workers(self) -> None:
        """Ask all workers for their process ids, and watch those on this machine from now on."""
        self._processes.watch(place for engine in await self.call_workers(_PLACE) for place in engine)

    async def call_workers(self, method: str, *args: Any, engine: int | None = None) -> list[list[Any]]:
        """Call a method of `WorkerExtension` in every worker of all engines, or of the engine with index `engine`.

        `AsyncLLM.collective_rpc` asks all engines too, but returns only the first one's answers.

        Returns:
            One list for each engine called, with its workers' return values by rank.

        Raises:
            EngineFailure: the engine has died, or a worker failed.
            ModelClosed: the engine was shut down meanwhile.
        """
        core, call = self.llm.engine_core, ("collective_rpc", method, None, args, None)
        asked = core.core_engines if engine is None else [core.core_engines[engine]]
        ask = core._call_utility_async  # noqa: SLF001 -- a public name that asks all engines came with 0.32
        answers = asyncio.gather(*(ask(*call, engine=one) for one in asked))
        answers.add_done_callback(lambda done: done.cancelled() or done.exception())  # late errors are not reported
        try:
            # vLLM leaves a call unanswered for ever when its engine dies or is shut down under it.
            while not (await asyncio.wait({answers}, timeout=LIVENESS_SECONDS))[0]:
                self.require_alive()
            found: list[list[Any]] = answers.result()
        except EngineDeadError as error:
            raise await self.ended() from error
        except SteercapError:
            raise
        except Exception as error:
            if self._llm is None:
                raise ModelClosed("the model was closed while a call to its workers ran") from error
            await self._require_not_dying()
            raise WorkerFailure(f"a call to the workers failed: {error}") from error
        finally:
            answers.cancel()
        return found

    async def _require_not_dying(self) -> None:
        """Check for `DYING_SECONDS` that the engine lives, after a call failed whose cause may be the engine's death.

        Raises:
            EngineFailure: the engine has died.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + DYING_SECONDS
        while clock() < until:
            self.require_alive()
            await asyncio.sleep(LIVENESS_SECONDS)

    def require_alive(self, fresh: float = 0.0) -> None:
        """Check that the engine lives and is not closed; `fresh` as of `ConnectionWatch.check_alive`.

        Raises:
            EngineDied: the engine has died.
            ModelClosed: the engine was shut down.
        """
        if self._llm is None or self._closing:
            raise ModelClosed("the engine was shut down with its SteerModel")
        if said := self.watch.check_alive(fresh):
            raise EngineDied(said)

    async def ended(self) -> EngineFailure:
        """Return the error for an engine that is closed or dead; waits up to `DYING_SECONDS` for the cause."""
        clock = asyncio.get_running_loop().time
        until = clock() + DYING_SECONDS
        while not self._closing and self._llm is not None:
            if said := self.watch.check_alive():
                return EngineDied(said)
            if clock() > until:
                return EngineDied("the vLLM engine has died")
            await asyncio.sleep(LIVENESS_SECONDS / 5)
        return ModelClosed("the model was closed meanwhile")

    @property
    def died(self) -> bool:
        """True if the engine died before it was closed; checks now."""
        if not self._dead and not self._closing and self._llm is not None:
            self.watch.check_alive()
        return self._dead

    def _report_death(self) -> None:
        """Call `on_death` with the engine's death, unless the engine is being closed."""
        if not self._closing:
            self._dead = True
            if self.on_death is not None:
                self.on_death(EngineDied(self.watch.found))

    async def quiesce(self) -> None:
        """Stop listening to the engine without reporting its death, and end its requests; call in its event loop."""
        self._closing = True
        if self._llm is not None and (handler := self._llm.output_handler) is not None:
            handler.cancel()
            await asyncio.wait([handler])
            self.watch.end("it was closed")  # or a server's requests, and those to come, would wait for ever

    def let_go(self, kill: Callable[[], object]) -> None:
        """Close the engine's client while `kill` kills the engine's processes; callable from any thread. Idempotent.

        vLLM would stop the processes in order, which takes 5 s or, on a busy machine, its whole timeout, after which it
        kills them too. They hold nothing that must be saved.
        """
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self.watch.close()
        resources = llm.engine_core.resources
        resources.engine_dead = True  # expected: its watchers must not complain
        if resources.engine_manager is not None:
            resources.engine_manager.manager_stopped.set()
        if (handler := llm.output_handler) is not None:  # it would report an error if `quiesce` was not called
            with contextlib.suppress(RuntimeError):  # its loop is closed
                handler.get_loop().call_soon_threadsafe(handler.cancel)
        kill()
        llm.shutdown(0)
        hearing = resources.output_queue_task
        if hearing is not None and not hearing.get_loop().is_running():
            # vLLM leaves closing them to its loop, which may never run again.
            for name in ("output_socket", "input_socket", "first_req_send_socket", "first_req_rcv_socket"):
                if (socket := getattr(resources, name, None)) is not None and not socket.closed:
                    with contextlib.suppress(RuntimeError):  # the loop was closed at the same moment
                        socket.close(linger=0)
