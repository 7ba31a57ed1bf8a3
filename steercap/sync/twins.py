"""Blocking twins of asynchronous functions and methods that take an open model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from steercap.errors import InvalidRequest
from steercap.requests.calls import Calls
from steercap.sync.bridge import Bridge, Life
from steercap.sync.handle import CaptureHandle

Value = TypeVar("Value")
Params = ParamSpec("Params")
Model_co = TypeVar("Model_co", bound=Life, covariant=True)


class Bridged(Generic[Model_co]):
    """Blocking model, whose calls run on an event loop of its own.

    Attributes:
        bridge: bridge to the asynchronous model.
    """

    bridge: Bridge[Model_co]


def blocking(
    work: Callable[Concatenate[Any, Params], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[Bridged[Any], Params], Value]:
    """Make the blocking twin of a coroutine function that takes an open model: same arguments and docstring.

    Args:
        work: function whose first argument is the model; it may take and return handles.
    """
    return _twin(work)


def calling(
    work: Callable[Concatenate[Calls[CaptureHandle], Params], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[Bridged[Any], Params], Value]:
    """Make the blocking twin of a method, overload by overload; it returns blocking handles."""
    return _twin(work)


def _twin(work: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    @functools.wraps(work)
    def call(*args: Any, **kwargs: Any) -> Any:
        bridge, rest = bridge_of(work, args, kwargs)
        return bridge.done(work, *rest, **kwargs)

    return call


def bridge_of(
    work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Bridge[Any], tuple[Any, ...]]:
    """Find the bridge of the model that a twin was called with, and the other positional arguments.

    Args:
        work: the function, which takes the model first.
        args, kwargs: arguments of the twin; a model given by name is removed from `kwargs`.

    Raises:
        InvalidRequest: the model is not a blocking one.
    """
    name = next(iter(inspect.signature(work).parameters))
    model, rest = (args[0], args[1:]) if args else (kwargs.pop(name, None), ())
    if not isinstance(model, Bridged):
        raise InvalidRequest(
            f"{work.__name__} of steercap.sync takes a steercap.sync.SteerModel, not {type(model).__name__}; "
            f"for a steercap.SteerModel there is {work.__module__}.{work.__qualname__}"
        )
    return model.bridge, rest


def iterating(
    work: Callable[Concatenate[Any, Params], AsyncGenerator[Value, None]],
) -> Callable[Concatenate[Bridged[Any], Params], Generator[Value, None, None]]:
    """Make the blocking twin of an asynchronous generator method; closing it closes the generator."""

    @functools.wraps(work)
    def call(*args: Any, **kwargs: Any) -> Any:
        model: Bridged[Any] = args[0]
        return model.bridge.taken(work(model.bridge.model, *args[1:], **kwargs))

    return call


def as_there(
    there: Callable[Params, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Params], None]]:
    """Make a decorator that copies signature and docstring from the constructor of another class."""

    def shown(here: Callable[..., None]) -> Callable[Concatenate[Any, Params], None]:
        return functools.wraps(there.__init__)(here)

    return shown
