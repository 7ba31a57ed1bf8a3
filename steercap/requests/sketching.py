"""Running sketches: the user's object, and the addition of finished requests to their statistics."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from steercap.captures.checks import Expected, check_labelled
from steercap.captures.sketch import Sketch, point_in, versions
from steercap.core.messages import Joining, Wanted
from steercap.core.protocols import NonCopyable
from steercap.core.receipt import check_points
from steercap.core.spec import CaptureSpec, Layers, Point, resolve_layers
from steercap.core.tokens import TokenSelection
from steercap.engine.fetching import shares_of
from steercap.engine.sketching import SketchRecord
from steercap.errors import CaptureIncomplete, CaptureNotFinite, EngineFailure, InvalidSpec, SketchIncomplete
from steercap.kernels.sketches import SKETCHES

if TYPE_CHECKING:
    import torch

    from steercap.engine.engine import Engine
    from steercap.steering.directions import DirectionSet

Value = TypeVar("Value")

#: Advice in the error message for an attempted copy.
INSTEAD: Final = "its statistics are in the workers; fetch() returns a Sketch, which can be saved and merged"


class SketchSource(Protocol):
    """Interface of what holds the statistics of running sketches: an engine's workers, or a server."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the model."""

    async def fetch(self, sketch: RunningSketch, points: Sequence[Point]) -> Sketch:
        """Return a snapshot of the statistics of some points; errors as of `RunningSketch.fetch`."""

    async def close(self, record: SketchRecord) -> None:
        """Free the statistics of a sketch. Idempotent."""


class RunningSketch(NonCopyable, instead=INSTEAD):
    """Statistics of the rows of every request made inside `SteerModel.sketch`, which yields this object.

    The rows never leave the workers. A request is added as a whole, once it has ended and its labels were checked;
    failed and cancelled ones are not. Each sample of `n` counts as a separate request, the rows of its prompt included.

    Attributes:
        kind: kind of the statistics; see `Sketch`.
        size: number of rows of a frequent directions sketch; 0 for other kinds.
        points: the sketched points, layer by layer.
    """

    def __init__(self, book: SketchRecord, spec: CaptureSpec, source: SketchSource) -> None:
        self.spec = spec
        self.kind: str = book.kind
        self.size: int = book.size
        self.points: tuple[Point, ...] = tuple(book.points)
        self.record = book
        self._source = source

    @property
    def tokens(self) -> TokenSelection:
        """Selection of the tokens whose rows are sketched."""
        return self.spec.selection

    @property
    def requests(self) -> int:
        """Number of requests that have been added."""
        return self.record.requests

    @property
    def rows(self) -> int:
        """Number of rows per point that have been added."""
        return self.record.rows

    async def mean(self, layer: int, site: str | None = None) -> torch.Tensor:
        """Return the current mean of the rows of a point: float64 [width]; see `Sketch.mean`."""
        return await self._of([self._point(layer, site)], lambda found: found.mean(layer, site))

    async def variance(self, layer: int, site: str | None = None) -> torch.Tensor:
        """Return the current variance of each element: float64 [width]; see `Sketch.variance`."""
        return await self._of([self._point(layer, site)], lambda found: found.variance(layer, site))

    async def covariance(self, layer: int, site: str | None = None) -> torch.Tensor:
        """Return the current covariance of the elements: float64 [width, width]; see `Sketch.covariance`."""
        return await self._of([self._point(layer, site)], lambda found: found.covariance(layer, site))

    async def principal_directions(self, layers: Layers, k: int, site: str | None = None) -> DirectionSet:
        """Return the current first k principal directions of one or more layers; see `Sketch.principal_directions`."""
        wanted = resolve_layers(layers, self._source.num_layers)
        points = [self._point(layer, site) for layer in wanted]
        return await self._of(points, lambda found: found.principal_directions(wanted, k, points[0].site))

    async def fetch(self) -> Sketch:
        """Return a snapshot of the statistics of all points, which can be read, saved, loaded and merged.

        The sketch goes on, and later requests are still added.

        Raises:
            SketchClosed: the `SteerModel.sketch` block has ended.
            SketchIncomplete: the workers' numbers of rows differ from those counted here.
            EngineFailure: the engine has died or was closed.
        """
        return await self._fetch(self.points)

    async def aclose(self) -> None:
        """Free the statistics in the workers; requests that still run in the sketch fail. Idempotent."""
        with contextlib.suppress(EngineFailure):  # a dead engine holds nothing
            await asyncio.shield(self._source.close(self.record))

    async def _of(self, points: Sequence[Point], work: Callable[[Sketch], Value]) -> Value:
        """Return the result of `work` on a snapshot of some points, on a thread, since a covariance is large."""
        found = await self._fetch(points)
        return await asyncio.to_thread(work, found)

    async def _fetch(self, points: Sequence[Point]) -> Sketch:
        self.record.require()
        return await self._source.fetch(self, points)

    def _point(self, layer: int, site: str | None) -> Point:
        return point_in(self.points, self._source.num_layers, layer, site)

    def __repr__(self) -> str:
        state = "closed" if self.record.closed else f"{self.rows} rows of {self.requests} requests"
        return f"RunningSketch({self.kind}, {len(self.points)} points, {state})"


@dataclass(frozen=True)
class EngineSketches:
    """Source of the sketches in the workers of a local engine."""

    engine: Engine

    @property
    def num_layers(self) -> int:
        return self.engine.vllm.num_layers

    async def fetch(self, sketch: RunningSketch, points: Sequence[Point]) -> Sketch:
        engine = self.engine
        engine.require_open()
        states, requests = await engine.sketching.states(sketch.record, points)
        return Sketch(
            kind=sketch.kind,
            size=sketch.size,
            states=states,
            model=engine.model_label,
            dtype=str(engine.vllm.llm.model_config.dtype).removeprefix("torch."),
            tokens=sketch.tokens,
            before_edits=sketch.spec.before_edits,
            num_layers=self.num_layers,
            requests=requests,
            versions=versions(),
        )

    async def close(self, record: SketchRecord) -> None:
        await self.engine.sketching.close(record)


async def open_sketch(engine: Engine, kind: str, size: Any, spec: CaptureSpec) -> RunningSketch:
    """Open a sketch and reserve its memory in the workers.

    Raises:
        UnknownName, InvalidSpec, PointNotArmed: an argument is invalid.
        PointSplit, SketchMemoryFull: see `Sketching.open`.
    """
    record = record_of(engine.new_key(), kind, size, {})
    record.points = {point: engine.armed[point] for point in engine.compiler.captured(spec)[0]}
    await engine.sketching.open(record)
    return RunningSketch(record, spec, EngineSketches(engine))


def record_of(name: str, kind: str, size: Any, points: dict[Point, int]) -> SketchRecord:
    """Create the record of a new sketch; `points` are indices among the engine's armed points, by point.

    Raises:
        UnknownName, InvalidSpec: there is no such kind, or `size` is not possible.
    """
    return SketchRecord(name, kind, SKETCHES[kind].checked_size(size), points)


def joint_capture(
    engine: Engine, own: CaptureSpec | None, sketches: Sequence[RunningSketch]
) -> tuple[CaptureSpec, tuple[Point, ...], tuple[int, ...]]:
    """Return the capture of a request in sketches: its own if it has one, else the one that the sketches need.

    Returns:
        The capture, its points, and their indices among the engine's armed points, ascending.

    Raises:
        InvalidSpec: the request's own capture is not of raw rows of the sketches' tokens at all of their points.
        SketchClosed, SketchIncomplete: a sketch is closed, or cannot be trusted.
    """
    for sketch in sketches:
        sketch.record.require()
    spec = sketches[0].spec
    wanted = sorted({point for sketch in sketches for point in sketch.points}, key=engine.armed.__getitem__)
    if own is None:
        return spec, tuple(wanted), tuple(engine.armed[point] for point in wanted)
    points, indices = engine.compiler.captured(own)
    names = ("layers", "sites", "codec", "codec_k", "codec_seed", "gather", "allow_nonfinite")
    same = {name: getattr(spec, name) for name in names}
    raw = own.attention is None and engine.compiler.coding(own) == engine.compiler.coding(
        spec
    )  # which may follow from settings
    if not raw or dataclasses.replace(own, **same) != spec or not set(wanted) <= set(points):
        raise InvalidSpec(
            "a request inside a sketch has one set of captured rows, so its capture must have raw rows, the tokens "
            f"{spec.selection} and at least the points of the sketch; {own} differs from {spec} of the sketch: capture "
            "these, or make the call outside"
        )
    return own, points, indices


async def enter(engine: Engine, sketches: Sequence[RunningSketch], samples: Sequence[tuple[Wanted, Expected]]) -> None:
    """Add all samples of a finished request to sketches, after each was checked.

    Args:
        engine: the engine that ran the request.
        sketches: the sketches that the request joins.
        samples: for each sample, the rows to request from the workers, and the expected ones.

    Raises:
        CaptureIncomplete: a worker failed, a row or a point is missing, or a label differs.
        CaptureNotFinite: rows hold NaN or infinity.
        SketchClosed, SketchIncomplete: a sketch has ended meanwhile, or cannot be trusted.
    """
    records = [sketch.record for sketch in sketches]
    names = tuple(record.name for record in records)
    points = tuple(dict.fromkeys(point for record in records for point in record.points))
    joining = [Joining(wanted, names) for wanted, _ in samples]

    def require() -> None:
        for record in records:
            record.require()

    for (_, expected), one in zip(samples, joining, strict=True):
        found = await engine.sketching.prepare(one)
        require()
        _check(engine, expected, points, found)
    require()
    added = await engine.sketching.commit(joining, records)
    require()
    if added < 0:
        raise SketchIncomplete(f"{samples[0][1].name}: the workers no longer have its rows, so it is in no sketch")


def _check(engine: Engine, expected: Expected, points: Sequence[Point], found: Any) -> None:
    """Check the workers' reply on a request's rows, `found`, against the expected rows at the sketches' points."""
    shares, failure = shares_of(found)
    if failure:
        raise CaptureIncomplete(f"{expected.name}: {failure}")
    armed = engine.vllm.points
    shares = [captured_rows for captured_rows in shares if captured_rows.points]
    check_labelled(expected, shares)
    captured = [armed[index] for captured_rows in shares for index in captured_rows.points]
    check_points(expected.name, points, captured)
    for point in points:
        if captured.count(point) != engine.schemas[point].shards:
            raise CaptureIncomplete(f"{expected.name}: {captured.count(point)} shards of {point} came")
    if not_finite := [captured_rows.nonfinite for captured_rows in shares if captured_rows.nonfinite]:
        position, index = min(not_finite)
        raise CaptureNotFinite(
            f"{expected.name}: the row of position {position} at {armed[index]} holds NaN or infinity, so the request "
            "is not in the sketch; generate outside of it, or sketch other tokens or layers"
        )
