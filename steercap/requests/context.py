"""Context variables with the steering of `async with model.steered(spec):` and the sketches of `model.sketch(...)`.

Calls made inside join them unless they pass their own steering. Tasks that run side by side do not see each other's.
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
    """Type of the default of `steering=`: use the steering of the enclosing `model.steered`."""

    token = "what model.steered() says"  # noqa: S105 -- no secret

    def __repr__(self) -> str:
        """Return the name that signatures show in `help` and the reference."""
        return "FROM_CONTEXT"


FROM_CONTEXT: Final = FromContext.token

#: The specs in force, innermost last, each for one model.
_steered: ContextVar[tuple[tuple[object, SteeringSpec], ...]] = ContextVar("steercap steered", default=())


@contextmanager
def steered(model: object, steering: Any) -> Iterator[SteeringSpec]:
    """Put a spec in force for the calls of one model; nested inside another, its edits come after the outer ones.

    Yields:
        The combined spec in force.

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
    """Return the spec that steers calls of this model which do not pass their own; None if there is none."""
    own = [spec for owner, spec in _steered.get() if owner is model]
    return own[-1] if own else None


def by_word_or_context(model: object, steering: Any) -> Any:
    """Return the steering of a call: `steering` if it was passed, else the spec in force where the call is made."""
    return in_force(model) if steering is FROM_CONTEXT else steering


#: The sketches that calls join, each of one model.
_sketches: ContextVar[tuple[tuple[object, RunningSketch], ...]] = ContextVar("steercap sketches", default=())


@contextmanager
def joining(model: object, sketch: RunningSketch) -> Iterator[None]:
    """Let the calls of one model join a sketch, beside those that they join already.

    Raises:
        InvalidRequest: the other sketches select other tokens, or differ in `before_edits`.
    """
    for other in sketches_in_force(model):
        if (other.spec.selection, other.spec.before_edits) != (sketch.spec.selection, sketch.spec.before_edits):
            raise InvalidRequest(
                "nested sketches must read the same tokens, and all before edits or all after them; these read "
                f"tokens={shown(str(other.tokens))}, before_edits={other.spec.before_edits} and "
                f"tokens={shown(str(sketch.tokens))}, before_edits={sketch.spec.before_edits}; make separate calls in "
                "each sketch"
            )
    token = _sketches.set((*_sketches.get(), (model, sketch)))
    try:
        yield
    finally:
        _sketches.reset(token)


def sketches_in_force(model: object) -> tuple[RunningSketch, ...]:
    """Return the sketches that calls of this model join if made here, even if awaited elsewhere."""
    return tuple(sketch for owner, sketch in _sketches.get() if owner is model)


def in_context(model: object, call: CallArguments) -> CallArguments:
    """Return the call with the steering and sketches in force where it is made, wherever it is awaited."""
    steering = by_word_or_context(model, call.steering)
    return replace(call, steering=steering, sketches=sketches_in_force(model))
