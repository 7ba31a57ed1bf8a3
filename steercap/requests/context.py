"""Context variables with the steering of `async with model.steered(spec):` and the sketches of `model.sketch(...)`.

Calls made inside use them unless they pass their own steering. Concurrent tasks do not see each other's.
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
from steercap.core.prompts import CallArguments, capture_of_call
from steercap.core.spec import CaptureSpec, Layers
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import shown
from steercap.errors import InvalidRequest, InvalidSpec
from steercap.steering.spec import LogitBias, SteeringSpec, spec_of

if TYPE_CHECKING:
    from steercap.requests.sketching import RunningSketch


Value = TypeVar("Value")


class FromContext(enum.Enum):
    """Type of the default of `steering=`, which stands for the steering of the enclosing `model.steered`."""

    token = "what model.steered() says"  # noqa: S105 -- no secret

    def __repr__(self) -> str:
        """Return the name that signatures show in `help` and the reference."""
        return "FROM_CONTEXT"


FROM_CONTEXT: Final = FromContext.token


@dataclass(eq=False)
class _Entry(Generic[Value]):
    """Spec or sketch that a block puts in force for the calls of one model.

    Args:
        model: the model whose calls are affected.
        value: the block's own spec or sketch.
        outer: specs of the enclosing blocks, outermost first, with which `combined` was made.
        combined: `outer` and `value` as one spec, cached so that it is compiled only once; None before the first use.
        ended: True if the block was left in another context than the one it was entered in, where the entry remains.
    """

    model: object
    value: Value
    outer: Sequence[Value] = ()
    combined: Value | None = None
    ended: bool = False


_Entries: TypeAlias = ContextVar[tuple[_Entry[Value], ...]]


@contextmanager
def _entered(variable: _Entries[Value], model: object, value: Value) -> Iterator[None]:
    """Context manager that adds an entry to a context variable, and at the end removes only that entry.

    Blocks in asynchronous generators may overlap in the context of the code that iterates over them. A generator that
    is garbage-collected is closed in another context, where the entry cannot be removed.
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


#: Specs in force, innermost last, each for the calls of one model.
_steered: _Entries[SteeringSpec] = ContextVar("steercap steered", default=())


@contextmanager
def steered(model: object, steering: Any) -> Iterator[SteeringSpec]:
    """Context manager that steers the calls of one model; a nested spec's edits come after the outer ones.

    Yields:
        The combined spec of this block and the enclosing ones.

    Raises:
        InvalidSpec: `steering` is no spec or edit.
    """
    with _entered(_steered, model, spec_of(steering)):
        combined = in_force(model)
        assert combined is not None
        yield combined


def in_force(model: object) -> SteeringSpec | None:
    """Return the spec for calls of this model that pass no `steering`; None outside of `steered` blocks."""
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


#: Sketches that calls join, outermost first, each of one model.
_sketches: _Entries[RunningSketch] = ContextVar("steercap sketches", default=())


@contextmanager
def joining(model: object, sketch: RunningSketch) -> Iterator[None]:
    """Context manager in which the calls of one model join a sketch, besides those of enclosing blocks.

    Raises:
        InvalidRequest: the other sketches select other tokens, or differ in `before_edits`.
    """
    for other in sketches_in_force(model):
        require_nested(other, sketch)
    with _entered(_sketches, model, sketch):
        yield


class SketchBackend(Protocol):
    """Interface of what opens sketches: a local engine or a server."""

    async def open_sketch(self, kind: str, size: Any, spec: CaptureSpec) -> RunningSketch:
        """Open a sketch on the workers; errors as of `Sketched.sketch`."""


class Sketched(Hinting):
    """Base of open models whose calls can join sketches."""

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
        """Add the rows of every request inside to statistics in the workers: `async with model.sketch(...) as s:`.

        Tasks started inside join it; other tasks do not see it. Calls join all nested sketches, which must select the
        same tokens. A request inside with its own `capture=` must capture the same tokens, at least the same points,
        and raw rows. The statistics are freed when the block ends: `fetch()` before.

        Args:
            kind: "moments" (mean and covariance), "variances" (mean and variance of each element), or
                "frequent_directions" (few rows that approximate all): a name in `steercap.kernels.sketches.SKETCHES`.
            layers, sites, tokens, before_edits: the rows to sketch, as for `CaptureSpec`.
            size: number of rows of "frequent_directions"; None for 64.

        Yields:
            A `RunningSketch`.

        Raises:
            UnknownName, InvalidSpec, InvalidSelection, PointNotArmed: an argument is invalid.
            PointSplit: the kind needs whole rows, and those of a point are split over tensor-parallel ranks.
            SketchMemoryFull: the workers have no memory for the sketch.
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
    """Return the sketches that calls of this model join if they are made here, even if they are awaited elsewhere."""
    return tuple(one.value for one in _sketches.get() if one.model is model and not one.ended)


def _require_rows_edited(steering: Any) -> None:
    """Check that no steering given to `read` is of biases of logits alone, on which no row depends.

    Raises:
        InvalidSpec: it is.
    """
    for one in steering if isinstance(steering, (list, tuple)) else (steering,):
        if isinstance(one, (LogitBias, SteeringSpec)) and not spec_of(one).of_rows():
            raise InvalidSpec(f"steering={shown(one)} changes no row, and read() generates nothing; edit rows instead")


def in_context(model: object, call: CallArguments, layers: Layers | None) -> CallArguments:
    """Return a call with the steering and sketches in force here, where it is made, and the spec of `capture_layers`.

    Raises:
        InvalidSpec: layers and a capture are given, or `read` is steered by biases of logits alone.
    """
    if call.reading and not call.encoding:
        _require_rows_edited(call.steering)
    call = replace(call, spec=capture_of_call(layers, call.spec))
    steering = effective_steering(model, call.steering)
    return replace(call, steering=steering, sketches=sketches_in_force(model))
