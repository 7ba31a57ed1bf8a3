"""Context variables with the steering of `async with model.steered(spec):` and the sketches of `model.sketch(...)`.

Calls made inside join them unless they pass their own steering. Tasks that run side by side do not see each other's.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar

from steercap.core.hints import Hinting
from steercap.core.prompts import CallArguments
from steercap.core.spec import CaptureSpec, Layers
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import shown
from steercap.errors import InvalidRequest
from steercap.steering.spec import SteeringSpec, spec_of

if TYPE_CHECKING:
    from steercap.requests.sketching import RunningSketch


Value = TypeVar("Value")


class FromContext(enum.Enum):
    """Type of the default of `steering=`: use the steering of the enclosing `model.steered`."""

    token = "what model.steered() says"  # noqa: S105 -- no secret

    def __repr__(self) -> str:
        """Return the name that signatures show in `help` and the reference."""
        return "FROM_CONTEXT"


FROM_CONTEXT: Final = FromContext.token


@dataclass(eq=False)
class _Entry(Generic[Value]):
    """Spec or sketch that a block puts in force for the calls of one model.

    Args:
        model: the model.
        value: the block's own spec or sketch.
        outer: specs of the blocks around it, outermost first, for which `combined` is kept.
        combined: `outer` and `value` as one spec, the same object for all calls: each spec is compiled once.
        ended: True if the block was left in another context than it was entered in, and so is still in that one.
    """

    model: object
    value: Value
    outer: Sequence[Value] = ()
    combined: Value | None = None
    ended: bool = False


_Entries: TypeAlias = ContextVar[tuple[_Entry[Value], ...]]


@contextmanager
def _entered(variable: _Entries[Value], model: object, value: Value) -> Iterator[None]:
    """Keep an entry in a context variable while a block runs; then remove it alone, whatever began meanwhile.

    Blocks of asynchronous generators overlap in the context of their reader. The event loop closes a generator that is
    dropped in another context, from where the entry cannot be removed.
    """
    entry = _Entry(model, value)
    token = variable.set((*(one for one in variable.get() if not one.ended), entry))
    try:
        yield
    finally:
        left = tuple(one for one in variable.get() if one is not entry)
        try:
            variable.reset(token)
        except ValueError:  # this is another context
            entry.ended = True
        else:
            variable.set(left)


#: The specs in force, innermost last, each for one model.
_steered: _Entries[SteeringSpec] = ContextVar("steercap steered", default=())


@contextmanager
def steered(model: object, steering: Any) -> Iterator[SteeringSpec]:
    """Put a spec in force for the calls of one model; nested inside another, its edits come after the outer ones.

    Yields:
        The combined spec in force.

    Raises:
        InvalidSpec: not a spec.
    """
    with _entered(_steered, model, spec_of(steering)):
        combined = in_force(model)
        assert combined is not None
        yield combined


def in_force(model: object) -> SteeringSpec | None:
    """Return the spec that steers calls of this model which do not pass their own; None if there is none."""
    own = [one for one in _steered.get() if one.model is model and not one.ended]
    if not own:
        return None
    outer, last = [one.value for one in own[:-1]], own[-1]
    if last.combined is None or last.outer != outer:
        last.outer, last.combined = outer, reduce(add, [*outer, last.value])
    return last.combined


def effective_steering(model: object, steering: Any) -> Any:
    """Return the steering of a call: `steering` if it was passed, else the spec in force where the call is made."""
    return in_force(model) if steering is FROM_CONTEXT else steering


#: The sketches that calls join, each of one model.
_sketches: _Entries[RunningSketch] = ContextVar("steercap sketches", default=())


@contextmanager
def joining(model: object, sketch: RunningSketch) -> Iterator[None]:
    """Let the calls of one model join a sketch, beside those that they join already.

    Raises:
        InvalidRequest: the other sketches select other tokens, or differ in `before_edits`.
    """
    for other in sketches_in_force(model):
        require_nested(other, sketch)
    with _entered(_sketches, model, sketch):
        yield


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
    return tuple(one.value for one in _sketches.get() if one.model is model and not one.ended)


def in_context(model: object, call: CallArguments) -> CallArguments:
    """Return the call with the steering and sketches in force where it is made, wherever it is awaited."""
    steering = effective_steering(model, call.steering)
    return replace(call, steering=steering, sketches=sketches_in_force(model))
