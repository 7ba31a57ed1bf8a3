"""SteerModel and CaptureHandle for callers that do not await: each call runs on an event loop in a thread of its own.

No logic here. What is asked, checked and answered is `steercap.SteerModel`'s.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from steercap import model as _model
from steercap.config import Settings
from steercap.core.idiom import BLOCKING
from steercap.core.ownership import Unshared
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.engine.guard import require_main_guard
from steercap.engine.stats import Stats
from steercap.errors import InvalidRequest, ModelClosed
from steercap.requests import handle as _handle
from steercap.requests.context import steered
from steercap.steering.spec import SteeringSpec
from steercap.sync.loop import LoopThread

if TYPE_CHECKING:
    import torch

    from steercap.adapters.types import AsyncLLM
    from steercap.core.chat import MessageSpan
    from steercap.core.receipt import Receipt
    from steercap.edits.base import Edit
    from steercap.requests.captures import Captures
    from steercap.requests.lifecycle import Lifecycle
    from steercap.vectors.directions import Mark

Value = TypeVar("Value")
Params = ParamSpec("Params")


def blocking(
    work: Callable[Concatenate[_model.SteerModel, Params], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[SteerModel, Params], Value]:
    """The twin of a coroutine function that takes an open model: same arguments and docstring, and no `await`.

    Args:
        work: takes the model first; may take and give back handles.
    """
    name = next(iter(inspect.signature(work).parameters))

    @functools.wraps(work)
    def call(*args: Any, **kwargs: Any) -> Any:
        model, rest = (args[0], args[1:]) if args else (kwargs.pop(name, None), ())
        if not isinstance(model, SteerModel):
            raise InvalidRequest(
                f"{work.__name__} of steercap.sync takes a steercap.sync.SteerModel, not {type(model).__name__}; "
                f"for a steercap.SteerModel there is {work.__module__}.{work.__qualname__}"
            )
        return model._done(work, *rest, **kwargs)

    return call


def iterating(
    work: Callable[Concatenate[_model.SteerModel, Params], AsyncGenerator[Value, None]],
) -> Callable[Concatenate[SteerModel, Params], Generator[Value, None, None]]:
    """The same for an asynchronous generator; closing its twin closes it."""

    @functools.wraps(work)
    def call(*args: Any, **kwargs: Any) -> Any:
        model: SteerModel = args[0]
        return model._taken(work(model._model, *args[1:], **kwargs))

    return call


def _as_there(
    there: Callable[Params, _model.SteerModel],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Params], None]]:
    """Show the arguments of another class."""

    def shown(here: Callable[..., None]) -> Callable[Concatenate[Any, Params], None]:
        return functools.wraps(there.__init__)(here)

    return shown


async def _call(work: Callable[[], Value]) -> Value:
    return work()


class CaptureHandle(Unshared):
    """`steercap.CaptureHandle` without `await`.

    `fetch()` returns when the rows are here, and `with handle:` fetches and frees. Everything else is the handle's own.
    """

    _instead = _handle.CaptureHandle._instead
    request_id: str
    model: str
    text: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    points: tuple[Point, ...]
    messages: tuple[MessageSpan, ...]
    num_layers: int
    directions: tuple[str, ...]
    marks: dict[int, tuple[Mark, ...]]
    lifecycle: Lifecycle
    fetched: bool
    captures: Captures
    receipt: Receipt
    positions: torch.Tensor
    token_ids: torch.Tensor

    def __init__(self, handle: _handle.CaptureHandle, thread: LoopThread | None) -> None:
        handle.lifecycle.idiom = BLOCKING
        self._handle = handle
        self._thread = thread

    def fetch(self) -> Self:
        """Bring the rows here, and free them in the worker. A second call does nothing.

        Returns:
            This handle, its `captures`, `positions`, `token_ids` and `receipt` readable.

        Raises:
            CaptureIncomplete: rows are missing or belong to another token.
            CaptureReleased: the handle was released before.
            EngineFailure: the engine has died or was closed.
        """
        if self._thread is not None and not self._handle.fetched:
            self._thread.run(self._handle.fetch())
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a handle that `save` wrote; it is fetched already.

        Raises:
            InvalidFile: the file is truncated, of another kind, or of a newer version.
        """
        return cls(_handle.CaptureHandle.load(path), None)

    def release(self) -> None:
        """Drop the rows, here and in the worker. Idempotent; nothing can be read afterwards."""
        self._handle.release()

    def __enter__(self) -> Self:
        return self.fetch()

    def __exit__(self, *_exc: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what is private is not passed on; a copy that is being made has no handle yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._handle, name)

    def __dir__(self) -> list[str]:
        """Its own names, and those of the handle."""
        return sorted({*super().__dir__(), *(name for name in dir(self._handle) if not name.startswith("_"))})

    def __repr__(self) -> str:
        return repr(self._handle)


class SteerModel(Unshared):
    """`steercap.SteerModel` without `await`, with the same arguments.

    Use it as a context manager, or `start()` and `close()`. Several threads may call it at once; vLLM batches what
    they ask.
    """

    _instead = _model.SteerModel._instead

    @_as_there(_model.SteerModel)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._model = _model.SteerModel(*args, **kwargs)
        self._model._idiom = BLOCKING
        self._thread: LoopThread | None = None
        self._life = threading.Lock()

    def start(self) -> Self:
        """Start the engine and prove that its taps work; takes half a minute or more.

        Raises:
            The errors of `steercap.SteerModel.start`.
        """
        require_main_guard(BLOCKING)
        with self._life:
            self._thread = self._thread or LoopThread()
        try:
            self._thread.run(self._model.start())
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Cancel what runs, free what is held, stop the engine. Idempotent."""
        with self._life:  # who comes second returns when it is closed
            thread, self._thread = self._thread, None
            if thread is not None:
                try:
                    thread.run(self._model.aclose())
                finally:
                    thread.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    generate = blocking(_model.SteerModel.generate)
    chat = blocking(_model.SteerModel.chat)
    read = blocking(_model.SteerModel.read)
    stream = iterating(_model.SteerModel.stream)
    fetch_captures_batch = blocking(_model.SteerModel.fetch_captures_batch)
    stats: Callable[[SteerModel], Stats] = blocking(_model.SteerModel.stats)

    @contextmanager
    def steered(self, steering: SteeringSpec | Edit) -> Iterator[SteeringSpec]:
        """Steer every call inside that does not pass `steering=` itself: `with model.steered(spec): ...`.

        When nested, its edits come after those of the outer one. It holds for the calls of this thread.

        Args:
            steering: a SteeringSpec, or one edit.

        Yields:
            The spec in force, outer ones included.

        Raises:
            InvalidSpec: not a spec, or one that does not fit the model.
        """
        with steered(self._model, steering) as spec:
            self._run(_call(lambda: self._model._open_engine().lowered(spec)))
            yield spec

    @property
    def model(self) -> str:
        """Path or name of the model."""
        return self._model.model

    @property
    def settings(self) -> Settings:
        """steercap's own settings."""
        return self._model.settings

    @property
    def engine(self) -> AsyncLLM:
        """The AsyncLLM that serves the model, vLLM's own; it runs on this facade's loop."""
        return self._model.engine

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return self._model.num_layers

    @property
    def hidden_size(self) -> int:
        """Elements of a row: the model's hidden size."""
        return self._model.hidden_size

    @property
    def points(self) -> Mapping[Point, PointSchema]:
        """Points that have a tap, layer by layer, and what the tensor at each of them is."""
        return self._model.points

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._model.tokenizer

    def _done(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """Run a coroutine function with the model behind this one, and with the handles behind those given."""
        arguments = [_unwrapped(argument) for argument in args]
        named = {name: _unwrapped(argument) for name, argument in kwargs.items()}
        return self._wrapped(self._run(work(self._model, *arguments, **named)))

    def _taken(self, chunks: AsyncGenerator[Value, None]) -> Generator[Value, None, None]:
        try:
            while (chunk := self._run(_after(chunks))) is not None:
                yield chunk
        finally:
            with suppress(ModelClosed):  # which has ended it
                self._run(chunks.aclose())

    def _run(self, work: Coroutine[Any, Any, Value]) -> Value:
        if self._thread is None:
            work.close()
            self._model._open_engine()  # says that it is closed, or was never started
            raise AssertionError
        return self._thread.run(work)

    def _wrapped(self, found: Any) -> Any:
        if isinstance(found, _handle.CaptureHandle):
            assert self._thread is not None
            return CaptureHandle(found, self._thread)
        if type(found) in {list, tuple}:
            return type(found)(self._wrapped(item) for item in found)
        return found


async def _after(chunks: AsyncGenerator[Value, None]) -> Value | None:
    return await anext(chunks, None)


def _unwrapped(handles: Any) -> Any:
    if isinstance(handles, CaptureHandle):
        return handles._handle
    return type(handles)(_unwrapped(item) for item in handles) if type(handles) in {list, tuple} else handles
