"""The client's end of a running AsyncLLM: whether the engine lives, calls to its workers, and its end.

What it relies on: `AsyncLLM.errored`, `output_handler` and `shutdown`; of `engine_core`, `core_engines`,
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

from steercap.adapters.death import Processes
from steercap.adapters.watch import Watch
from steercap.errors import EngineDied, EngineFailure, ModelClosed, SteercapError, WorkerFailure

#: Seconds between looks at whether the engine that owes an answer still lives.
LIVENESS_SECONDS: Final = 0.1
#: Seconds after which it is clear that a call did not fail because the engine died.
DYING_SECONDS: Final = 0.5
#: What is asked of every worker when an engine is up.
_PLACE: Final = "steercap_place"


class Connection:
    """An AsyncLLM until it is released.

    Args:
        llm: the engine.
        folder: of its processes.
    """

    def __init__(self, llm: AsyncLLM, folder: Path) -> None:
        #: What to call when the engine has died, with the error.
        self.told: Callable[[EngineDied], object] | None = None
        self._processes = Processes(folder)
        self.watch: Final = Watch(llm, self._processes, self._tell)
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
        """Watch the processes of all workers from now on, as far as they are on this machine."""
        self._processes.watch(place for engine in await self.call_workers(_PLACE) for place in engine)

    async def call_workers(self, method: str, *args: Any, engine: int | None = None) -> list[list[Any]]:
        """Have every worker run a method of its extension, or those of one engine.

        `AsyncLLM.collective_rpc` asks all engines too, but gives only the first one's answers.

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
        """Check that a call did not fail because a worker was just about to end, which may show a moment later.

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
        """Why the engine is not there: it was closed, or it has died, of what may be known a moment later."""
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
        """Whether the engine has died, before it was closed."""
        if not self._dead and not self._closing and self._llm is not None:
            self.watch.look()
        return self._dead

    def _tell(self) -> None:
        if not self._closing:
            self._dead = True
            if self.told is not None:
                self.told(EngineDied(self.watch.found))

    async def quiesce(self) -> None:
        """Stop listening to the engine, or its end would be reported as a crash; in its event loop."""
        self._closing = True
        handler = self._llm.output_handler if self._llm is not None else None
        if handler is not None:
            handler.cancel()
            await asyncio.wait([handler])

    def let_go(self, kill: Callable[[], object]) -> None:
        """Let go of vLLM's side of the engine, whose processes `kill` kills meanwhile; from any thread. Idempotent.

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
        if (handler := llm.output_handler) is not None:  # which would complain, where nobody could quiesce
            with contextlib.suppress(RuntimeError):  # its loop is closed
                handler.get_loop().call_soon_threadsafe(handler.cancel)
        kill()
        llm.shutdown(0)
        hearing = resources.output_queue_task
        if hearing is not None and not hearing.get_loop().is_running():
            # vLLM leaves it to its loop to close them, and that loop may never run again.
            for name in ("output_socket", "input_socket", "first_req_send_socket", "first_req_rcv_socket"):
                if (socket := getattr(resources, name, None)) is not None and not socket.closed:
                    with contextlib.suppress(RuntimeError):  # the loop was closed at the same moment
                        socket.close(linger=0)


def _looked_at(answers: asyncio.Future[Any]) -> None:
    """Retrieve an error that comes when nobody waits any more, of which asyncio would complain."""
    if not answers.cancelled():
        answers.exception()
