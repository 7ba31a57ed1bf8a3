"""From what is awaited to what is not: functions and methods that take an open model."""

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
    """A model whose calls run on a loop of its own.

    Attributes:
        bridge: to the one that is awaited there.
    """

    bridge: Bridge[Model_co]


def blocking(
    work: Callable[Concatenate[Any, Params], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[Bridged[Any], Params], Value]:
    """The twin of a coroutine function that takes an open model: same arguments and docstring, and no `await`.

    Args:
        work: takes the model first; may take and give back handles.
    """
    return _twin(work)


def calling(
    work: Callable[Concatenate[Calls[CaptureHandle], Params], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[Bridged[Any], Params], Value]:
    """The same for a method, overload by overload: what it gives holds handles of this facade."""
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
    """The bridge of the model that the twin of a function was given, and the other arguments by position.

    Args:
        work: the function, which takes the model first.
        args, kwargs: of the twin; a model by name is taken out of them.

    Raises:
        InvalidRequest: it is no model of this facade.
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
    """The same for an asynchronous generator; closing its twin closes it."""

    @functools.wraps(work)
    def call(*args: Any, **kwargs: Any) -> Any:
        model: Bridged[Any] = args[0]
        return model.bridge.taken(work(model.bridge.model, *args[1:], **kwargs))

    return call


def as_there(
    there: Callable[Params, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Params], None]]:
    """Show the arguments of another class."""

    def shown(here: Callable[..., None]) -> Callable[Concatenate[Any, Params], None]:
        return functools.wraps(there.__init__)(here)

    return shown
