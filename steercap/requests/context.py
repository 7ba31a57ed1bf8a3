"""The steering of calls inside `async with model.steered(spec):` that do not pass their own.

A context variable: tasks that run side by side do not see each other's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from steercap.steering.spec import SteeringSpec, spec_of


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
