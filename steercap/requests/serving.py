"""Life of one model's engine, from start to close, and the work that runs on it.

A dead engine is restarted when it is next needed, if the settings enable restarts; see docs/mechanisms/engine.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from steercap.concurrency.loops import OwnerLoop, finished, on_thread, within
from steercap.config import Settings
from steercap.core.protocols import AWAITED
from steercap.engine.checkpoint import files_loaded, look_up, require_reachable, require_there
from steercap.engine.engine import Engine
from steercap.engine.guard import require_main_guard
from steercap.engine.memory import require_room
from steercap.errors import EngineDied, EngineFailure, ModelClosed, ModelNotProved
from steercap.requests.equations import Claim
from steercap.requests.probe import probe

if TYPE_CHECKING:
    from steercap.adapters.launch import Launch

Value = TypeVar("Value")

#: Seconds before each attempt to restart a dead engine: its memory, above all on a device, may take a moment to be
#: freed, and the cause of its death may persist.
BACKOFF: Final = (0.0, 2.0, 10.0)
#: Maximum number of engines that one piece of work may run on, so that work that kills its engine is not repeated for
#: ever.
LIVES: Final = 3


class Serving:
    """Owner of one model's engine in one event loop: starts it, restarts it if enabled, and closes it once.

    Args:
        model: path or name of the model.
        settings: steercap's own settings.
        engine_args: vLLM's engine arguments.
        cut: True if `max_model_len` may be reduced to the model's context length, since a preset gave it, not the user.

    Attributes:
        cut: the argument of the same name.
        engine: the engine, while it runs.
        running: tasks that run on the engine; they are cancelled when it is closed.
        call_style: call style, with or without `await`, in which messages show code.
        proof: claims that held when the engine started; see `probe`.
        restarts: number of restarts.
    """

    def __init__(self, model: str, settings: Settings, engine_args: Mapping[str, Any], *, cut: bool) -> None:
        self.model = model
        self.settings = settings
        self.engine_args = dict(engine_args)
        self.engine: Engine | None = None
        self.running: set[asyncio.Task[Any]] = set()
        self.call_style = AWAITED
        self.proof: tuple[Claim, ...] = ()
        self.restarts = 0
        self.cut = cut
        self._given_up: EngineDied | None = None
        self._closed = False
        self._home: OwnerLoop | None = None
        self._life = asyncio.Lock()
        self._starting: asyncio.Task[Engine] | None = None
        self._launch: Launch | None = None
        self._files = self._commit = ""

    async def start(self) -> None:
        """Start the engine and prove that its taps work; see `SteerModel.start`."""
        require_main_guard(self.call_style)
        if self._home is None:
            self._home, self._life = OwnerLoop("this model"), asyncio.Lock()
        self._require_not_closed()
        self._home.require()
        async with (life := self._life):
            if life is not self._life:  # the start that held it failed, and another one began with a new lock
                return await self.start()
            self._require_not_closed()
            if self.engine is None:
                self._home = self._home or OwnerLoop("this model")  # the previous holder of the lock may have failed
                self._starting = asyncio.ensure_future(self._start())
                try:
                    self.engine = await self._starting
                except asyncio.CancelledError:
                    started = self._starting
                    if started.done() and not started.cancelled() and started.exception() is None:
                        await started.result().aclose()
                    if self._closed and (task := asyncio.current_task()) and not task.cancelling():
                        self._require_not_closed()
                    raise
                finally:
                    if self.engine is None:
                        self._home = None
        return None

    async def _start(self) -> Engine:
        from steercap.adapters.launch import Launch

        if "hf_config_path" not in self.engine_args:
            require_there(self.model)  # before vLLM is imported, which takes long
            await asyncio.to_thread(require_reachable, self.model)
        arguments = dict(self.engine_args)
        if "max_model_len" in arguments and self.cut and (context := look_up(self.model).context):
            arguments["max_model_len"] = min(arguments["max_model_len"], context)
        first = self.engine is None
        if first:  # else the memory of a dead one may still be on its way back
            await asyncio.to_thread(require_room, self.model, arguments)
            self._files = await asyncio.to_thread(self._loaded)
        for candidate in count():
            self._launch = Launch()
            engine = await Engine.start(self.model, self.settings, arguments, self._launch, candidate)
            try:
                self.proof = await probe(engine)
            except BaseException as error:
                await engine.aclose()
                if not isinstance(error, ModelNotProved) or candidate + 1 >= engine.loaded.candidates:
                    raise
            else:
                break
        if first:
            self._commit = engine.vllm.commit
        return engine

    def _loaded(self) -> str:
        return files_loaded(self.model, self.engine_args.get("tokenizer")) if self.settings.restart else ""

    @property
    def stage(self) -> str:
        """Description of the current part of a start in progress; "" if none is."""
        if self._starting is None or self._starting.done():
            return ""
        return "looking up the model" if self._launch is None else self._launch.stage or "proving every tap"

    async def alive(self) -> Engine:
        """Return a live engine, after restarting a dead one if enabled; concurrent callers wait for the same start.

        Raises:
            EngineDied: the engine has died and cannot be restarted.
            ModelClosed: the model was closed, before or meanwhile.
            WrongEventLoop: the model was started in another event loop.
        """
        while self.outlives(engine := self.here()):
            if self._given_up is not None:
                raise EngineDied(str(self._given_up)) from self._given_up.__cause__
            if self._starting is None or self._starting.done():
                self._starting = asyncio.ensure_future(self._start_again(engine))
                self._starting.add_done_callback(_retrieve)
            try:
                await asyncio.shield(self._starting)
            except asyncio.CancelledError:
                if self._closed and (task := asyncio.current_task()) and not task.cancelling():
                    self._require_not_closed()
                raise
        return engine

    async def with_restart(self, work: Callable[[Engine], Awaitable[Value]], engine: Engine | None = None) -> Value:
        """Return the result of `work` on the engine; if that dies and restarts are on, run it again on the next one.

        Args:
            work: coroutine function of the engine; it must free all that it reserved if it fails.
            engine: the engine of the first attempt; None for the live one.

        Raises:
            EngineDied: the engine has died and is not restarted, or `LIVES` engines have died during the work.
            The errors of `work`.
        """
        for lives in reversed(range(LIVES)):
            asked = engine or await self.alive()
            try:
                return await work(asked)
            except EngineFailure as error:
                if not self.outlives(asked):
                    raise
                if not lives:
                    raise EngineDied(
                        f"{error}; {LIVES} engines have died during this call, so it is not tried again"
                    ) from error
            engine = None
        raise AssertionError

    def outlives(self, engine: Engine) -> bool:
        """Return whether an engine has died and another one replaces it, or will."""
        return self.settings.restart and not self._closed and engine.died

    async def _start_again(self, dead: Engine) -> Engine:
        """Replace a dead engine by a new one, in as many attempts as `BACKOFF` has entries."""
        async with self._life:
            await dead.aclose()
            for tries, seconds in enumerate(BACKOFF, 1):
                await asyncio.sleep(seconds)
                self._require_not_closed()
                try:
                    engine = await self._start()
                except (EngineFailure, OSError) as error:
                    if tries == len(BACKOFF):
                        self._given_up = EngineDied(f"{dead.death}; restarting it failed {tries} times: {error}")
                        self._given_up.__cause__ = error
                        raise self._given_up from error
                else:
                    await self._require_same(dead, engine)
                    engine.vllm.follow(dead.vllm)
                    self.engine = engine
                    self.restarts += 1
                    return engine
        raise AssertionError

    async def _require_same(self, dead: Engine, engine: Engine) -> None:
        """Check that a restarted engine has the files of the first one, so that requests can go on; else close it.

        Raises:
            EngineDied: weights, configuration or tokenizer differ.
        """
        try:
            same = (await asyncio.to_thread(self._loaded), engine.vllm.commit) == (self._files, self._commit)
        except OSError:  # one has just been removed
            same = False
        except BaseException:
            await engine.aclose()
            raise
        if not same:
            await engine.aclose()
            self._given_up = EngineDied(
                f"{dead.death}; the files of {self.model} have changed since it was started, so it is not started "
                "again: answers and rows would be of another model; open a new SteerModel for it"
            )
            raise self._given_up

    async def aclose(self) -> None:
        """Cancel running tasks and a start in progress, and stop the engine; see `SteerModel.aclose`."""
        self._closed = True
        home, launch = self._home, self._launch
        if home is not None and home.is_here:
            self._cancel_all()
            async with self._life:  # a start that was cancelled cleans up first
                pass
        elif home is not None:
            home.call(self._cancel_all)
            if launch is not None and self._starting is not None and not self._starting.done():
                await finished(on_thread(launch.give_up, "steercap end"))
        if self.engine is not None:
            await self.engine.aclose()
            self.engine = None

    def _cancel_all(self) -> None:
        for task in self.running:
            task.cancel()
        if self._starting is not None:
            self._starting.cancel()

    @property
    def state(self) -> str:
        """State in words: "not started", "starting", "open", "restarting", "closed", or the cause of death."""
        if self._closed:
            return "closed"
        if self._starting is not None and not self._starting.done():
            return "starting" if self.engine is None else "restarting"
        if self.engine is None:
            return "not started"
        return f"dead: {self.engine.death or 'its engine has ended'}" if self.engine.died else "open"

    def opened(self) -> Engine:
        """Return the engine, for reading attributes from any event loop.

        Raises:
            ModelClosed: the model was never started, or is closed.
        """
        self._require_not_closed()
        if self.engine is None:
            raise ModelClosed(
                "this SteerModel was never started; use it inside "
                f"`{self.call_style.manager} SteerModel(...) as model:`"
            )
        return self.engine

    def here(self) -> Engine:
        """Return the engine, after checking that this is its event loop, so that its methods may be awaited.

        Raises:
            ModelClosed: the model was never started, or is closed.
            WrongEventLoop: the model was started in another event loop.
        """
        engine = self.opened()
        engine.home.require()
        return engine

    async def run(self, work: Callable[[], Awaitable[Value]]) -> Value:
        """Return the result of `work`, awaited on the engine; closing the model cancels it.

        Raises:
            ModelClosed: the model was closed, before or meanwhile.
            WrongEventLoop: the model was started in another event loop.
        """
        if error := self._ended():
            raise error
        self.here()
        return await within(self.running, work, self._ended)

    def _ended(self) -> ModelClosed | None:
        return ModelClosed("the model was closed while this request ran") if self._closed else None

    def _require_not_closed(self) -> None:
        if self._closed:
            raise ModelClosed(
                f"this SteerModel is closed; use it inside `{self.call_style.manager} SteerModel(...) as model:`"
            )


def _retrieve(starting: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a start, so that Python does not warn when no caller waits for it."""
    if not starting.cancelled():
        starting.exception()
