"""Client side of a running AsyncLLM: liveness checks, calls to its workers, and shutdown.

It relies on `AsyncLLM.errored`, `output_handler` and `shutdown`; and, of `engine_core`, on `core_engines`,
`_call_utility_async` and `resources`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from steercap.adapters.process_exit import Processes
from steercap.adapters.watch import ConnectionWatch
from steercap.errors import EngineDied, EngineFailure, ModelClosed, SteercapError, WorkerFailure

#: Seconds between liveness checks while an answer is awaited.
LIVENESS_SECONDS: Final = 0.1
#: Seconds after which a failed call is not attributed to the engine's death any more.
DYING_SECONDS: Final = 0.5
#: RPC that returns the place of a worker's process.
_PLACE: Final = "steercap_place"


class Connection:
    """Connection to an AsyncLLM until it is released.

    Args:
        llm: the engine.
        folder: folder of its processes.
    """

    def __init__(self, llm: AsyncLLM, folder: Path) -> None:
        #: Function to call with the error when the engine has died.
        self.told: Callable[[EngineDied], object] | None = None
        self._processes = Processes(folder)
        self.watch: Final = ConnectionWatch(llm, self._processes, self._tell)
        self._dead = False
        self._llm: AsyncLLM | None = llm
        self._closing = False

    @property
    def llm(self) -> AsyncLLM:
        """The AsyncLLM behind this.

        Raises:
            ModelClosed: it was shut down.
        """
        if self._llm is None:
            raise ModelClosed("the engine was shut down with its SteerModel")
        return self._llm

    async def watch_workers(self) -> None:
        """Watch the processes of all workers on this machine from now on."""
        self._processes.watch(place for engine in await self.call_workers(_PLACE) for place in engine)

    async def call_workers(self, method: str, *args: Any, engine: int | None = None) -> list[list[Any]]:
        """Call a method of the extension in every worker, or in those of one engine.

        `AsyncLLM.collective_rpc` asks all engines too, but returns only the first one's answers.

        Returns:
            Engine by engine, the answers of its workers in the order of their ranks.

        Raises:
            EngineFailure: the engine has died, or a worker failed.
            ModelClosed: the engine was shut down meanwhile.
        """
        core, call = self.llm.engine_core, ("collective_rpc", method, None, args, None)
        asked = core.core_engines if engine is None else [core.core_engines[engine]]
        ask = core._call_utility_async  # noqa: SLF001 -- a public name that asks all engines came with 0.32
        answers = asyncio.gather(*(ask(*call, engine=one) for one in asked))
        answers.add_done_callback(_looked_at)
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
                raise ModelClosed("the model was closed while the workers were asked") from error
            await self._require_not_dying()
            raise WorkerFailure(f"a call to the workers failed: {error}") from error
        finally:
            answers.cancel()
        return found

    async def _require_not_dying(self) -> None:
        """Check that a call did not fail because a worker was about to end, which may show a moment later.

        Raises:
            EngineFailure: it did.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + DYING_SECONDS
        while clock() < until:
            self.require_alive()
            await asyncio.sleep(LIVENESS_SECONDS)

    def require_alive(self) -> None:
        """Check that the engine lives.

        Raises:
            EngineFailure, ModelClosed: it has died, or was closed.
        """
        if self._llm is None:
            raise ModelClosed("the engine was shut down with its SteerModel")
        if said := self.watch.look():
            raise EngineDied(said)

    async def ended(self) -> EngineFailure:
        """Return the error of an engine that is closed or dead; the cause of death may show only after a moment."""
        clock = asyncio.get_running_loop().time
        until = clock() + DYING_SECONDS
        while not self._closing and self._llm is not None:
            if said := self.watch.look():
                return EngineDied(said)
            if clock() > until:
                return EngineDied("the vLLM engine has died")
            await asyncio.sleep(LIVENESS_SECONDS / 5)
        return ModelClosed("the model was closed meanwhile")

    @property
    def died(self) -> bool:
        """True if the engine has died before it was closed."""
        if not self._dead and not self._closing and self._llm is not None:
            self.watch.look()
        return self._dead

    def _tell(self) -> None:
        if not self._closing:
            self._dead = True
            if self.told is not None:
                self.told(EngineDied(self.watch.found))

    async def quiesce(self) -> None:
        """Stop listening to the engine, so that its end is not reported as a crash; call it in its event loop."""
        self._closing = True
        handler = self._llm.output_handler if self._llm is not None else None
        if handler is not None:
            handler.cancel()
            await asyncio.wait([handler])

    def let_go(self, kill: Callable[[], object]) -> None:
        """Release vLLM's side of the engine, while `kill` kills its processes; callable from any thread. Idempotent.

        vLLM would stop them in order, which takes 5 s or, on a busy machine, all of its patience, after which it kills
        them too. There is nothing in them to save.
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


def _looked_at(answers: asyncio.Future[Any]) -> None:
    """Retrieve an error that arrives after its caller has left, so that asyncio does not report it."""
    if not answers.cancelled():
        answers.exception()
