"""The same names for people who do not await: each call runs on an event loop in a thread of its own. No logic here.

    from steercap.sync import SteerModel

    with SteerModel("Qwen/Qwen3-0.6B") as model:
        text, handle = model.generate("Hello", capture_layers=[4])
        rows = handle.fetch().captures[4]

In a notebook `await` works at the top level, and `steercap.SteerModel` is the better choice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from steercap import handle as _handle
from steercap import model as _model
from steercap.context import steered
from steercap.core.spec import Point
from steercap.errors import ModelClosed
from steercap.guard import require_main_guard
from steercap.stats import Stats
from steercap.steering import SteeringSpec
from steercap.stream import Chunk

Value = TypeVar("Value")

__all__ = ["CaptureHandle", "SteerModel"]


class _LoopThread:
    """An event loop that runs in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="steercap-sync", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine to its end; an interrupt cancels it."""
        if self.loop.is_closed():
            work.close()
            raise ModelClosed("the model was closed; rows that were not fetched are gone")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and its thread. Idempotent."""
        if self._thread.is_alive():
            self.run(_cancel_others())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


async def _cancel_others() -> None:
    """Let whatever still runs, such as a start that was interrupted, clean up after itself."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)


async def _call(work: Callable[[], Value]) -> Value:
    return work()


class CaptureHandle:
    """`steercap.CaptureHandle` without await: every other attribute is the handle's own."""

    def __init__(self, handle: _handle.CaptureHandle, thread: _LoopThread) -> None:
        self._handle = handle
        self._thread = thread

    def fetch(self) -> Self:
        """See `steercap.CaptureHandle.fetch`."""
        if not self._handle.fetched or not self._thread.loop.is_closed():
            self._thread.run(self._handle.fetch())
        return self

    load = staticmethod(_handle.CaptureHandle.load)

    def release(self) -> None:
        """See `steercap.CaptureHandle.release`."""
        if self._thread.loop.is_closed():
            self._handle.release()
        else:
            self._thread.run(_call(self._handle.release))

    def __enter__(self) -> Self:
        return self.fetch()

    def __exit__(self, *_exc: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def __repr__(self) -> str:
        return repr(self._handle)


class SteerModel:
    """`steercap.SteerModel` without await, a context manager; arguments are the same."""

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        self._model = _model.SteerModel(str(model), **arguments)
        self._thread: _LoopThread | None = None

    def start(self) -> Self:
        """See `steercap.SteerModel.start`."""
        require_main_guard()
        self._thread = self._thread or _LoopThread()
        try:
            self._thread.run(self._model.start())
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """See `steercap.SteerModel.aclose`. Idempotent."""
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

    def generate(self, prompts: Any, sampling_params: Any = None, **arguments: Any) -> Any:
        """See `steercap.SteerModel.generate`."""
        return self._wrapped(self._run(self._model.generate(prompts, sampling_params, **arguments)))

    def chat(self, messages: Any, sampling_params: Any = None, **arguments: Any) -> Any:
        """See `steercap.SteerModel.chat`."""
        return self._wrapped(self._run(self._model.chat(messages, sampling_params, **arguments)))

    def stream(self, prompt: Any, sampling_params: Any = None, **arguments: Any) -> Iterator[Chunk]:
        """See `steercap.SteerModel.stream`; closing the generator cancels the request."""
        return self._taken(self._model.stream(prompt, sampling_params, **arguments))

    def _taken(self, chunks: AsyncGenerator[Chunk, None]) -> Iterator[Chunk]:
        try:
            while (chunk := self._run(_after(chunks))) is not None:
                yield chunk
        finally:
            self._run(chunks.aclose())

    @contextmanager
    def steered(self, steering: Any) -> Iterator[SteeringSpec]:
        """See `steercap.SteerModel.steered`; for the calls of this thread."""
        with steered(self._model, steering) as spec:
            self._model._open_engine().lowered(spec)
            yield spec

    def fetch_captures_batch(self, handles: Any) -> None:
        """See `steercap.SteerModel.fetch_captures_batch`."""
        self._run(self._model.fetch_captures_batch(_unwrapped(handles)))

    def stats(self) -> Stats:
        """See `steercap.SteerModel.stats`."""
        return self._run(self._model.stats())

    @property
    def num_layers(self) -> int:
        """See `steercap.SteerModel.num_layers`."""
        return self._model.num_layers

    @property
    def hidden_size(self) -> int:
        """See `steercap.SteerModel.hidden_size`."""
        return self._model.hidden_size

    @property
    def points(self) -> tuple[Point, ...]:
        """See `steercap.SteerModel.points`."""
        return self._model.points

    @property
    def tokenizer(self) -> Any:
        """See `steercap.SteerModel.tokenizer`."""
        return self._model.tokenizer

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
        if isinstance(found, (list, tuple)):
            return type(found)(self._wrapped(item) for item in found)
        return found


async def _after(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)


def _unwrapped(handles: Any) -> Any:
    if isinstance(handles, CaptureHandle):
        return handles._handle
    return [_unwrapped(item) for item in handles] if isinstance(handles, (list, tuple)) else handles
