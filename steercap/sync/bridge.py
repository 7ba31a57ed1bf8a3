"""Bridge from blocking callers to the event loop of a model."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, cast

from steercap.captures.handle import CaptureHandle as Awaited
from steercap.core.hints import Hinting
from steercap.core.protocols import BLOCKING, CallStyle
from steercap.errors import InvalidRequest, ModelClosed, SteercapError
from steercap.requests.context import steered
from steercap.requests.sketching import RunningSketch
from steercap.steering.spec import SteeringSpec
from steercap.sync.objects import CaptureHandle
from steercap.sync.twins import HandleTwin, LoopThread, Run, run_end

if TYPE_CHECKING:
    from steercap.steering.edits import Edit
    from steercap.steering.spec import LogitBias

Value = TypeVar("Value")
Model_co = TypeVar("Model_co", covariant=True)


class Life(Protocol):
    """Interface of an asynchronous model that a blocking one drives: coroutines start and close it."""

    def start(self) -> Coroutine[Any, Any, Any]:
        """Start it."""

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Close it."""


class Opened(Protocol):
    """State that knows whether a model is open."""

    call_style: CallStyle

    def opened(self) -> Any:
        """Return the open connection or engine.

        Raises:
            ModelClosed: the model is not open.
        """


class Bridge:
    """Thread with the event loop of an asynchronous model.

    Args:
        model: the model; not started.
        state: knows whether the model is open.
    """

    def __init__(self, model: Life, state: Opened) -> None:
        state.call_style = BLOCKING
        self._model = model
        self._state = state
        self._thread: LoopThread | None = None
        self._life = threading.Lock()
        self._streams: set[AsyncGenerator[Any, None]] = set()

    def start(self) -> None:
        """Start the loop and the model; a start that fails can be tried again."""
        with self._life:
            thread = self._thread = self._thread or LoopThread()
        try:
            thread.run(self._model.start())
        except BaseException:
            try:
                self._state.opened()
            except ModelClosed:  # it holds nothing
                with self._life:
                    if self._thread is thread:
                        self._thread = None
                        thread.stop()
            else:
                self.close()
            raise

    def close(self) -> None:
        """Close the model and end the loop. Idempotent."""
        with self._life:  # a second caller returns once it is closed
            thread, self._thread = self._thread, None
            if thread is not None:
                try:
                    thread.run(self._model.aclose())
                    thread.run(self._closed_streams())
                finally:
                    thread.stop()

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine to its end.

        Raises:
            ModelClosed: the model is not open.
        """
        try:
            run = self._runner()
        except BaseException:
            work.close()
            raise
        return run(work)

    def done(self, work: Callable[..., Coroutine[Any, Any, Value]], *args: Any, **kwargs: Any) -> Value:
        """Call `work(*args, **kwargs)` in the model's loop, and return its result when it has ended.

        Blocking handles among the arguments are replaced by those behind them, and handles of the result by blocking
        ones.

        Raises:
            ModelClosed: the model is not open.
        """
        run = self._runner()  # kept, since another thread may close the model between the call's end and its return
        found: Value = _blocking(run(direct(work, *args, **kwargs)), run)
        return found

    def taken(self, chunks: AsyncGenerator[Value, None]) -> Generator[Value, None, None]:
        """Iterate over an asynchronous generator; closing this one closes it."""
        self._streams.add(chunks)
        try:
            while (chunk := self.run(self._after(chunks))) is not None:
                yield chunk
        finally:
            self._streams.discard(chunks)
            run_end(self.run, chunks.aclose)

    async def _after(self, chunks: AsyncGenerator[Value, None]) -> Value | None:
        """Return the next chunk, or None at the stream's own end."""
        chunk = await anext(chunks, None)
        if chunk is None and chunks not in self._streams:
            raise ModelClosed("the model was closed before the end of this stream")
        return chunk

    async def _closed_streams(self) -> None:
        """Close the streams between two chunks, the outer generators first; the end of the loop has no order."""
        for chunks in tuple(self._streams):
            self._streams.discard(chunks)
            with suppress(RuntimeError, SteercapError):  # its next chunk is on the way, and fails: the model is closed
                await chunks.aclose()

    def freed(self, sketch: RunningSketch) -> None:
        """Free a sketch, unless the model is closed, which has freed everything."""
        with suppress(ModelClosed):
            self.run(sketch.aclose())

    def _runner(self) -> Run:
        """Return the function that runs coroutines on the loop of the open model.

        Raises:
            ModelClosed: the model is not open.
        """
        thread = self._thread
        if thread is None:
            self._state.opened()  # raises an error: it was closed, or never started
            raise ModelClosed("the model was being closed when this call began")
        return thread.run


def _blocking(found: Any, run: Run) -> Any:
    """Return blocking handles for those in a result: in lists, and in the fields of a dataclass."""
    if isinstance(found, Awaited):
        return CaptureHandle(found, run)
    if type(found) in {list, tuple}:
        return type(found)(_blocking(item, run) for item in found)
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        holding = {name: _blocking(value, run) for name, value in values.items() if _has_handles(value)}
        return dataclasses.replace(found, **holding) if holding else found
    return found


def _has_handles(value: Any) -> bool:
    return isinstance(value, Awaited) or (type(value) in {list, tuple} and any(map(_has_handles, value)))


class Bridged(Hinting, Generic[Model_co]):
    """Blocking model, whose calls run on an event loop of its own. Use it as a context manager, or start and close it.

    Args:
        awaited: the asynchronous model; not started.
        state: knows whether the model is open.

    Attributes:
        awaited: the asynchronous model, which runs on a loop of this one.
        bridge: thread with that loop.
    """

    def __init__(self, awaited: Model_co, state: Opened) -> None:
        self.awaited: Model_co = awaited
        self.bridge: Bridge = Bridge(cast("Life", awaited), state)

    def start(self) -> Self:
        """Start the model.

        Raises:
            The errors of the asynchronous model's `start`.
        """
        self.bridge.start()
        return self

    def close(self) -> None:
        """Cancel running calls, free everything held, and close the model. Idempotent."""
        self.bridge.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @contextmanager
    def steered(self, steering: SteeringSpec | Edit | LogitBias) -> Iterator[SteeringSpec]:
        """Steer every call inside that does not pass `steering=` itself: `with model.steered(spec): ...`.

        When nested, its edits come after those of the outer one. It holds for the calls of this thread.

        Args:
            steering: a SteeringSpec, one edit, or a LogitBias.

        Yields:
            The spec in force, outer ones included.

        Raises:
            InvalidSpec: not a spec, or one that does not fit a model that is open here.
        """
        with steered(self.awaited, steering) as spec:
            self._check(spec)
            yield spec

    def _check(self, spec: SteeringSpec) -> None:
        """Check that the model is open, and that steering fits it."""
        raise NotImplementedError


def bridge_of(model: Bridged[Any], work: Callable[..., Any]) -> Bridge:
    """Return the bridge of the model that the twin of a function was called with.

    Raises:
        InvalidRequest: the model is not a blocking one.
    """
    if not isinstance(model, Bridged):
        raise InvalidRequest(
            f"{work.__name__} of steercap.sync takes a steercap.sync.SteerModel, not {type(model).__name__}; "
            f"for a steercap.SteerModel there is {work.__module__}.{work.__qualname__}"
        )
    return model.bridge


def forward(
    work: Callable[..., Coroutine[Any, Any, Value]], model: Bridged[Any], /, *args: Any, **kwargs: Any
) -> Value:
    """Call a coroutine function that takes an open model, and return its result when it has ended.

    Raises:
        InvalidRequest: the model is not a blocking one.
        ModelClosed: the model is not open.
    """
    return bridge_of(model, work).run(direct(work, model.awaited, *args, **kwargs))


def forward_made(
    twin: Callable[[Any, Run], Value], work: Callable[..., Any], model: Bridged[Any], /, *args: Any, **kwargs: Any
) -> Value:
    """Call a function that takes an open model, in the model's loop, and return the twin of the object that it makes.

    Args:
        twin: makes the twin of the object and of a function that runs coroutines.
        work: the function.
        model: the blocking model.
        *args: further arguments of the function.
        **kwargs: likewise.

    Raises:
        InvalidRequest: the model is not a blocking one.
        ModelClosed: the model is not open.
    """
    bridge = bridge_of(model, work)

    async def made() -> Any:
        return direct(work, model.awaited, *args, **kwargs)

    return twin(bridge.run(made()), bridge.run)


def direct(work: Callable[..., Value], /, *args: Any, **kwargs: Any) -> Value:
    """Call `work` in this thread, its blocking handles and models replaced by the asynchronous ones behind them."""
    return work(*map(unwrapped, args), **{name: unwrapped(argument) for name, argument in kwargs.items()})


def unwrapped(handles: Any) -> Any:
    """Return the asynchronous handles and models behind blocking ones, in lists of the same structure."""
    if isinstance(handles, (HandleTwin, Bridged)):
        return handles.awaited
    return type(handles)(unwrapped(item) for item in handles) if type(handles) in {list, tuple} else handles
