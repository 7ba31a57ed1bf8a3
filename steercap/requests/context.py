"""The steering of calls inside `async with model.steered(spec):` that do not pass their own, and the sketches that they
join inside `async with model.sketch(...)`.

A context variable: tasks that run side by side do not see each other's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from steercap.core.prompts import CallArguments
from steercap.core.values import shown
from steercap.errors import InvalidRequest
from steercap.steering.spec import SteeringSpec, spec_of

if TYPE_CHECKING:
    from steercap.requests.sketching import RunningSketch


class FromContext(enum.Enum):
    """The default of `steering=`: what `model.steered` says around the call."""

    token = "what model.steered() says"  # noqa: S105 -- no secret

    def __repr__(self) -> str:
        """For signatures, as `help` and the reference show them."""
        return "FROM_CONTEXT"


FROM_CONTEXT: Final = FromContext.token

#: The specs in force, innermost last, each for one model.
_steered: ContextVar[tuple[tuple[object, SteeringSpec], ...]] = ContextVar("steercap steered", default=())


@contextmanager
def steered(model: object, steering: Any) -> Iterator[SteeringSpec]:
    """Put a spec in force for the calls of one model; inside another, its edits come after those of the other.

    Yields:
        All that is in force.

    Raises:
        InvalidSpec: not a spec.
    """
    spec = spec_of(steering)
    outer = in_force(model)
    combined = spec if outer is None else outer + spec
    token = _steered.set((*_steered.get(), (model, combined)))
    try:
        yield combined
    finally:
        _steered.reset(token)


def in_force(model: object) -> SteeringSpec | None:
    """The steering of calls of this model that do not pass their own."""
    own = [spec for owner, spec in _steered.get() if owner is model]
    return own[-1] if own else None


def by_word_or_context(model: object, steering: Any) -> Any:
    """What a call is steered by: its own argument, or what is in force where it is called, wherever it is awaited."""
    return in_force(model) if steering is FROM_CONTEXT else steering


#: The sketches that calls join, each of one model.
_sketches: ContextVar[tuple[tuple[object, RunningSketch], ...]] = ContextVar("steercap sketches", default=())


@contextmanager
def joining(model: object, sketch: RunningSketch) -> Iterator[None]:
    """Let the calls of one model join a sketch, beside those that they join already.

    Raises:
        InvalidRequest: the others are of other tokens, or of rows before edits where this one is not.
    """
    for other in sketches_in_force(model):
        if (other.spec.selection, other.spec.before_edits) != (sketch.spec.selection, sketch.spec.before_edits):
            raise InvalidRequest(
                f"a request keeps rows once: sketches inside each other are of the same tokens, and these are of "
                f"{shown(str(other.tokens))} and {shown(str(sketch.tokens))}, or of rows before edits and after; "
                "make the calls one after the other"
            )
    token = _sketches.set((*_sketches.get(), (model, sketch)))
    try:
        yield
    finally:
        _sketches.reset(token)


def sketches_in_force(model: object) -> tuple[RunningSketch, ...]:
    """The sketches that calls of this model join where they are made, wherever they are awaited."""
    return tuple(sketch for owner, sketch in _sketches.get() if owner is model)


def in_context(model: object, call: CallArguments) -> CallArguments:
    """A call with what is in force where it is made, wherever it is awaited."""
    steering = by_word_or_context(model, call.steering)
    return replace(call, steering=steering, sketches=sketches_in_force(model))
