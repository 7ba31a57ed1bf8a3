"""One model's engine from its start to its end, and the calls that run on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from steercap.concurrency.loops import Home, finished, on_thread, within
from steercap.config import Settings
from steercap.core.idiom import AWAITED
from steercap.engine.checkpoint import look_up, require_reachable, require_there
from steercap.engine.engine import Engine
from steercap.engine.guard import require_main_guard
from steercap.errors import ModelClosed, ModelNotProved
from steercap.requests.probe import probe
from steercap.requests.proof import Claim

if TYPE_CHECKING:
    from steercap.adapters.launch import Launch

Value = TypeVar("Value")


class Serving:
    """An engine that is started once and closed once, in one event loop.

    Args:
        model: path or name of the model.
        settings: steercap's own settings.
        engine_args: vLLM's.
        cut: whether `max_model_len` may be cut down to what the model can do: it is a preset's, not the user's.

    Attributes:
        cut: as given.
        engine: the engine, while it runs.
        running: what runs on it; cancelled when it is closed.
        idiom: how messages show code.
        proof: what was proved of the engine when it started.
    """

    def __init__(self, model: str, settings: Settings, engine_args: Mapping[str, Any], *, cut: bool) -> None:
        self.model = model
        self.settings = settings
        self.engine_args = dict(engine_args)
        self.engine: Engine | None = None
        self.running: set[asyncio.Task[Any]] = set()
        self.idiom = AWAITED
        self.proof: tuple[Claim, ...] = ()
        self.cut = cut
        self._closed = False
        self._home: Home | None = None
        self._life = asyncio.Lock()
        self._starting: asyncio.Task[Engine] | None = None
        self._launch: Launch | None = None

    async def start(self) -> None:
        """Start the engine and prove that its taps work; see `SteerModel.start`."""
        require_main_guard(self.idiom)
        if self._home is None:
            self._home, self._life = Home("this model"), asyncio.Lock()
        self._home.require()
        async with self._life:
            self._require_not_closed()
            if self.engine is None:
                self._home = self._home or Home("this model")  # the previous holder of the lock may have failed
                self._starting = asyncio.ensure_future(self._start())
                try:
                    self.engine = await self._starting
                except asyncio.CancelledError:
                    if self._closed and (task := asyncio.current_task()) and not task.cancelling():
                        self._require_not_closed()
                    raise
                finally:
                    if self.engine is None:
                        self._home = None

    async def _start(self) -> Engine:
        from steercap.adapters.launch import Launch

        if "hf_config_path" not in self.engine_args:
            require_there(self.model)  # before vLLM is imported, which takes long
            await asyncio.to_thread(require_reachable, self.model)
        arguments = dict(self.engine_args)
        if "max_model_len" in arguments and self.cut and (context := look_up(self.model).context):
            arguments["max_model_len"] = min(arguments["max_model_len"], context)
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
        return engine

    async def aclose(self) -> None:
        """Cancel what runs or starts, free what is held, stop the engine; see `SteerModel.aclose`."""
        self._closed = True
        home, launch = self._home, self._launch
        if home is not None and home.is_here:
            self._cancel_all()
            async with self._life:  # a start that was cancelled cleans up first
                pass
        elif home is not None:
            home.call(self._cancel_all)
            if self.engine is None and launch is not None:
                await finished(on_thread(launch.give_up, "steercap end"))
        if self.engine is not None:
            await self.engine.aclose()
            self.engine = None

    def _cancel_all(self) -> None:
        for task in self.running:
            task.cancel()
        if self._starting is not None:
            self._starting.cancel()

    def opened(self) -> Engine:
        """The engine, to read something of it.

        Raises:
            ModelClosed: it was never started, or is closed.
        """
        self._require_not_closed()
        if self.engine is None:
            raise ModelClosed(
                f"this SteerModel was never started; use it inside `{self.idiom.manager} SteerModel(...) as model:`"
            )
        return self.engine

    def here(self) -> Engine:
        """The engine, to await something of it.

        Raises:
            ModelClosed: it was never started, or is closed.
            WrongEventLoop: it was started in another event loop.
        """
        engine = self.opened()
        engine.home.require()
        return engine

    async def run(self, work: Callable[[], Awaitable[Value]]) -> Value:
        """Await something of the engine; closing the model ends the wait.

        Raises:
            ModelClosed: the model was closed, before or meanwhile.
            WrongEventLoop: it was started in another event loop.
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
                f"this SteerModel is closed; use it inside `{self.idiom.manager} SteerModel(...) as model:`"
            )
