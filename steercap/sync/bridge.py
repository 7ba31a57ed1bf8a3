"""Bridge from blocking callers to the event loop of a model."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from steercap.captures.handle import CaptureHandle as Awaited
from steercap.core.call_style import BLOCKING, Idiom
from steercap.errors import ModelClosed
from steercap.requests.call_types import Generation
from steercap.requests.sketching import RunningSketch
from steercap.sync.handle import CaptureHandle
from steercap.sync.loop import LoopThread

Value = TypeVar("Value")


class Life(Protocol):
    """Interface of an asynchronous model that a blocking one drives: coroutines start and close it."""

    def start(self) -> Coroutine[Any, Any, Any]:
        """Start it."""

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Close it."""


class Opened(Protocol):
    """State that knows whether a model is open."""

    idiom: Idiom

    def opened(self) -> Any:
        """Return the open connection or engine.

        Raises:
            ModelClosed: the model is not open.
        """


Model_co = TypeVar("Model_co", bound=Life, covariant=True)


class Bridge(Generic[Model_co]):
    """Asynchronous model, with the thread of its event loop.

    Args:
        model: the model; not started.
        state: knows whether the model is open.
    """

    def __init__(self, model: Model_co, state: Opened) -> None:
        state.idiom = BLOCKING
        self.model = model
        self._state = state
        self._thread: LoopThread | None = None
        self._life = threading.Lock()

    def start(self) -> None:
        """Start the loop and the model."""
        with self._life:
            self._thread = self._thread or LoopThread()
        try:
            self._thread.run(self.model.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the model and end the loop. Idempotent."""
        with self._life:  # a second caller returns once it is closed
            thread, self._thread = self._thread, None
            if thread is not None:
                try:
                    thread.run(self.model.aclose())
                finally:
                    thread.stop()

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine to its end.

        Raises:
            ModelClosed: the model is not open.
        """
        if self._thread is None:
            work.close()
            self._state.opened()  # raises an error: it was closed, or never started
            raise AssertionError
        return self._thread.run(work)

    def done(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """Call `work(model, *args, **kwargs)` in the model's loop, and return its result when it has ended.

        Blocking handles among the arguments are replaced by those behind them, and handles of the result by blocking
        ones.

        Raises:
            ModelClosed: the model is not open.
        """
        arguments = [unwrapped(argument) for argument in args]
        named = {name: unwrapped(argument) for name, argument in kwargs.items()}
        return self._wrapped(self.run(work(self.model, *arguments, **named)))

    def taken(self, chunks: AsyncGenerator[Value, None]) -> Generator[Value, None, None]:
        """Iterate over an asynchronous generator; closing this one closes it."""
        try:
            while (chunk := self.run(_after(chunks))) is not None:
                yield chunk
        finally:
            with suppress(ModelClosed):  # closing the model has ended it
                self.run(chunks.aclose())

    def freed(self, sketch: RunningSketch) -> None:
        """Free a sketch, unless the model is closed, which has freed everything."""
        if self._thread is not None:
            with suppress(ModelClosed):
                self._thread.run(sketch.aclose())

    def _wrapped(self, found: Any) -> Any:
        if isinstance(found, Awaited):
            assert self._thread is not None
            return CaptureHandle(found, self._thread)
        if isinstance(found, Generation):
            return replace(found, handles=self._wrapped(found.handles))
        if type(found) in {list, tuple}:
            return type(found)(self._wrapped(item) for item in found)
        return found


async def _after(chunks: AsyncGenerator[Value, None]) -> Value | None:
    return await anext(chunks, None)


def unwrapped(handles: Any) -> Any:
    """Return the asynchronous handles behind blocking ones, in lists of the same structure."""
    if isinstance(handles, CaptureHandle):
        return handles.awaited
    return type(handles)(unwrapped(item) for item in handles) if type(handles) in {list, tuple} else handles
