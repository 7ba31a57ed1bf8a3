"""Context variables with the steering of `async with model.steered(spec):` and the sketches of `model.sketch(...)`.

Calls made inside join them unless they pass their own steering. Tasks that run side by side do not see each other's.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from steercap.core.hints import Hinting
from steercap.core.prompts import CallArguments
from steercap.core.spec import CaptureSpec, Layers
from steercap.core.tokens import Tokens, TokenSelection
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


def effective_steering(model: object, steering: Any) -> Any:
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
        require_nested(other, sketch)
    token = _sketches.set((*_sketches.get(), (model, sketch)))
    try:
        yield
    finally:
        _sketches.reset(token)


class SketchBackend(Protocol):
    """Backend of `Sketched`: a local engine or a server."""

    async def open_sketch(self, kind: str, size: Any, spec: CaptureSpec) -> RunningSketch:
        """Open a sketch; errors as of `Sketched.sketch`."""


class Sketched(Hinting):
    """Open model whose calls can join sketches."""

    _backend: SketchBackend

    @asynccontextmanager
    async def sketch(
        self,
        kind: str = "moments",
        *,
        layers: Layers = "all",
        sites: str | Sequence[str] = ("resid_post",),
        tokens: Tokens | TokenSelection = "all",
        before_edits: bool = False,
        size: int | None = None,
    ) -> AsyncIterator[RunningSketch]:
        """Add the rows of every request inside to statistics, in the workers: `async with model.sketch(...) as s:`.

        Tasks started inside join it; other tasks do not see it. Calls join all nested sketches, which must be of the
        same tokens. A request inside that also captures for itself must keep the same tokens, at least the same points,
        and raw rows. The statistics are freed when the block ends: `fetch()` before.

        Args:
            kind: "moments" (mean and covariance), "variances" (mean and variance of each element), or
                "frequent_directions" (few rows that approximate all): a name in `steercap.kernels.sketches.SKETCHES`.
            layers, sites, tokens, before_edits: the rows to sketch, as for `CaptureSpec`.
            size: number of rows of "frequent_directions"; 64 if left out.

        Yields:
            A `RunningSketch`.

        Raises:
            UnknownName, InvalidSpec, InvalidSelection, PointNotArmed: something is asked for wrongly.
            PointSplit: the kind needs whole rows, and those of a point are split over tensor-parallel ranks.
            SketchMemoryFull: there is no room for it.
        """
        spec = CaptureSpec(layers=layers, sites=sites, tokens=tokens, codec="raw", before_edits=before_edits)
        running = await self._backend.open_sketch(kind, size, spec)
        try:
            with joining(self, running):
                yield running
        finally:
            await running.aclose()


def require_nested(outer: RunningSketch, inner: RunningSketch) -> None:
    """Check that one request can join both sketches.

    Raises:
        InvalidRequest: they select other tokens, or differ in `before_edits`.
    """
    if (outer.spec.selection, outer.spec.before_edits) != (inner.spec.selection, inner.spec.before_edits):
        raise InvalidRequest(
            "nested sketches must read the same tokens, and all before edits or all after them; these read "
            f"tokens={shown(str(outer.tokens))}, before_edits={outer.spec.before_edits} and "
            f"tokens={shown(str(inner.tokens))}, before_edits={inner.spec.before_edits}; make separate calls in each "
            "sketch"
        )


def sketches_in_force(model: object) -> tuple[RunningSketch, ...]:
    """Return the sketches that calls of this model join if made here, even if awaited elsewhere."""
    return tuple(sketch for owner, sketch in _sketches.get() if owner is model)


def in_context(model: object, call: CallArguments) -> CallArguments:
    """Return the call with the steering and sketches in force where it is made, wherever it is awaited."""
    steering = effective_steering(model, call.steering)
    return replace(call, steering=steering, sketches=sketches_in_force(model))
