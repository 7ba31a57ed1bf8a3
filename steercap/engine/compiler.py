"""Compiler of capture and steering specs for one engine; results are cached, some of them for the last spec alone.

Hashing megabytes of vectors takes milliseconds, and compiling a spec that all requests of a large call share takes as
long as a request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from steercap.architectures.sites import SITES, placed
from steercap.config import Settings
from steercap.core.schema import ATTENTION, RAW, Coding, PointSchema
from steercap.core.spec import CaptureSpec, Point, check_armed, existing
from steercap.engine.ranks import Rank
from steercap.engine.sae_readers import Readers, compile_readers, read_points
from steercap.errors import InvalidRequest, InvalidSpec
from steercap.files.fingerprint import warn_of_other_model
from steercap.kernels.codecs import ENCODINGS, MOST_INDEXED, codec_of, record_of
from steercap.kernels.codecs.uniform import CALIBRATED
from steercap.steering.calibration import Calibrated, calibration_of, compile_calibration
from steercap.steering.lowering import CompiledProjection, Lowered, compile_projection, lower, points_of
from steercap.steering.monitor import Monitor, check_widths, compile_probes
from steercap.steering.spec import Steering, spec_of

if TYPE_CHECKING:
    from steercap.steering.calibration import Calibration


class Compiler:
    """Compiler of capture and steering specs for one engine, with checks against the model.

    Args:
        armed: index of every armed point, that is, one with a tap.
        schemas: shape and dtype of the rows at every armed point.
        ranks: capturing workers.
        num_layers: number of decoder layers of the model.
        settings: settings of the engine.
        exists: function that returns whether the model has a point.
        refused: reasons why the model lacks a site, by site name; see `Engine.refused`.
        vocabulary: number of tokens in the model's logits.
        names: names of the model, compared with the model that a vector or SAE was made for.
    """

    def __init__(
        self,
        armed: Mapping[Point, int],
        schemas: Mapping[Point, PointSchema],
        ranks: Sequence[Rank],
        *,
        num_layers: int,
        settings: Settings,
        exists: Callable[[Point], bool],
        refused: Mapping[str, str],
        vocabulary: int,
        names: Collection[str],
    ) -> None:
        self._armed, self._schemas, self._ranks = armed, schemas, ranks
        self._num_layers, self._settings, self._exists = num_layers, settings, exists
        self._refused, self._vocabulary, self._names = refused, vocabulary, names
        self._lowered: WeakKeyDictionary[Steering, Lowered] = WeakKeyDictionary()
        self._captured: tuple[CaptureSpec, tuple[Point, ...], tuple[int, ...]] | None = None  # the last one
        self._coded: tuple[CaptureSpec, Coding] | None = None  # likewise
        # Likewise, by weak references: an SAE is kept alive by its users alone, and the workers hold it as long.
        self._read: tuple[ref[CaptureSpec], ref[Readers]] | None = None
        # Compiled directions, by the points they were compiled for.
        self._projected: WeakKeyDictionary[Any, dict[tuple[Point, ...], CompiledProjection]] = WeakKeyDictionary()
        self._calibrated: WeakKeyDictionary[Calibration, dict[tuple[Point, ...], Calibrated]] = WeakKeyDictionary()

    def lowered(self, steering: Any) -> Lowered:
        """Compile what `steering=` takes; warn if a vector was made for another model.

        Raises:
            InvalidSpec, PointNotArmed: it is none of these, or does not fit the model; see `steering.lowering.lower`.
        """
        found = None
        with suppress(TypeError):  # of another type, of which `spec_of` says so
            found = self._lowered.get(steering)
        if found is None:
            spec = spec_of(steering)
            for model in sorted({edit.model for edit in spec.of_rows()}):
                warn_of_other_model("a vector of steering=", model, self._names)
            found = self._lowered[steering] = lower(
                spec,
                armed=self._armed,
                schemas=self._schemas,
                num_layers=self._num_layers,
                edits_per_point=self._settings.edits_per_point,
                exists=self._exists,
                refused=self._refused,
                vocabulary=self._vocabulary,
            )
        return found

    def captured(self, spec: CaptureSpec) -> tuple[tuple[Point, ...], tuple[int, ...]]:
        """Return the points of a spec, and their indices among the armed points, ascending.

        A point that the model lacks is left out if its layers were given as "all". The result for the last spec is
        cached, unless it has SAEs.

        Raises:
            LayerOutOfRange, InvalidSpec: see `CaptureSpec.points`.
            UnknownName, PointNotArmed: see `check_armed`.
        """
        if spec.saes:
            return self._armed_points(read_points(spec, self._num_layers))
        if self._captured is None or self._captured[0] is not spec:
            asked = spec.points(self._num_layers) if spec.project is None else points_of(spec, self._num_layers)
            is_open = partial(spec.is_open, num_layers=self._num_layers)
            points = existing(placed(asked, self._num_layers), is_open, self._exists)
            self._captured = spec, *self._armed_points(points)
        return self._captured[1:]

    def _armed_points(self, points: tuple[Point, ...]) -> tuple[tuple[Point, ...], tuple[int, ...]]:
        check_armed(points, self._armed, SITES, self._exists, self._refused)
        return points, tuple(sorted(self._armed[point] for point in points))

    def readers(self, spec: CaptureSpec) -> Readers | None:
        """Compile the SAEs of a capture spec, cached for the last spec; None for a spec without.

        Raises:
            InvalidSpec, PointSplit: see `sae_readers.compile_readers`.
        """
        if not spec.saes:
            return None
        known = self._read[1]() if self._read is not None and self._read[0]() is spec else None
        if known is not None:
            return known
        for sae in spec.saes:
            warn_of_other_model("sae=", sae.model, self._names, tuned=True)
        points, indices = self.captured(spec)
        found = compile_readers(spec, points, self._armed, self._schemas)
        self._check_records(indices, found.coding, "sae=")
        self._read = ref(spec), ref(found)
        return found

    def projected(self, spec: CaptureSpec) -> CompiledProjection | None:
        """Compile the directions that a capture spec projects rows on; None for a spec without `project`.

        Raises:
            InvalidSpec, InvalidVector: see `lowering.compile_projection`.
        """
        if spec.project is None:
            return None
        points, _ = self.captured(spec)
        known = self._projected.setdefault(spec.project, {})
        if points not in known:
            warn_of_other_model("project=", getattr(spec.project, "model", ""), self._names)
            found = compile_projection(spec, self._armed, self._schemas, num_layers=self._num_layers, points=points)
            coding = Coding("projected", len(found.names))
            self._check_records(found.lowered.configuration.reads, coding, "project=")
            known[points] = found
        return known[points]

    def probe_points(self, monitors: Sequence[Monitor]) -> tuple[Point, ...]:
        """Return the point of each monitor, in order.

        Raises:
            LayerOutOfRange, UnknownName, PointNotArmed: this engine has no such point.
            InvalidVector: a monitor's probe has another width than the rows.
        """
        for model in sorted({monitor.model for monitor in monitors}):
            warn_of_other_model("the probe of a monitor", model, self._names)
        points = tuple(monitor.point(self._num_layers) for monitor in monitors)
        check_armed(points, self._armed, SITES, self._exists, self._refused)
        check_widths(monitors, points, self._schemas)
        return points

    def probed(
        self, monitors: Sequence[Monitor], points: Sequence[Point]
    ) -> tuple[CompiledProjection, tuple[int, ...]]:
        """Compile the capture of monitors' scores, and each monitor's column in it; see `monitor.compile_probes`."""
        found, columns = compile_probes(monitors, points, self._armed)
        coding = Coding("projected", len(found.names))
        self._check_records(found.lowered.configuration.reads, coding, "monitors=")
        return found, columns

    def calibrated(self, spec: CaptureSpec) -> Calibrated | None:
        """Compile the calibration of a capture spec's codec; None for a spec without.

        Raises:
            InvalidSpec, InvalidVector: see `calibration.compile_calibration`.
        """
        calibration = calibration_of(spec)
        if calibration is None:
            return None
        points, _ = self.captured(spec)
        known = self._calibrated.setdefault(calibration, {})
        if points not in known:
            warn_of_other_model("calibration=", calibration.model, self._names)
            known[points] = compile_calibration(calibration, points, self._armed, self._schemas)
        return known[points]

    def coding(self, spec: CaptureSpec) -> Coding:
        """Return the encoding in which the rows of a capture spec are stored; cached for the last spec.

        Raises:
            UnknownName: a codec that does not exist.
            InvalidSpec: parameters that the codec does not have, or with which rows would be larger.
        """
        if (readers := self.readers(spec)) is not None:
            return readers.coding
        if self._coded is None or self._coded[0] is not spec:
            self._coded = spec, self._coding(spec)
        return self._coded[1]

    def _coding(self, spec: CaptureSpec) -> Coding:
        projected = self.projected(spec)
        if projected is not None:
            return Coding("projected", len(projected.names))
        if spec.attention is not None:
            self._check_summary(self.captured(spec)[0], Coding(ATTENTION, spec.attention))
            return RAW
        coding = codec_for(spec, self._settings)
        named = f"codec={coding.encoding!r}"
        if coding == RAW:
            return coding
        points, encoding = self.captured(spec)[0], ENCODINGS[coding.encoding]
        for point in points:
            schema = self._schemas[point]
            if coding.k > schema.width:
                raise InvalidSpec(
                    f"{named} with codec_k={coding.k} keeps more numbers than the {schema.width} of a row at "
                    f"{point}; give a smaller one"
                )
            if encoding.indexed and schema.shard_width > MOST_INDEXED:
                raise InvalidSpec(
                    f"{named} takes rows of at most {MOST_INDEXED:,} elements, and those at {point} are {schema}"
                )
        for rank in self._ranks:
            kept = rank.kept([self._armed[point] for point in points])
            _check_smaller(named, kept, kept, coding, "codec_k=")
        return coding

    def _check_summary(self, points: Sequence[Point], coding: Coding) -> None:
        """Check on each worker that queries have their keys, and that their summary takes no more room than both do."""
        for rank in self._ranks:
            own = [point for point in points if self._armed[point] in rank.schemas]
            queries = [self._armed[point] for point in own if point.site == "q"]
            if any(Point(point.layer, "k") not in own for point in own if point.site == "q"):
                raise InvalidRequest(
                    f"attention={coding.k}: several tensor-parallel ranks share key heads, which one of them keeps, so "
                    "the others cannot summarise attention; capture sites=('q', 'k'), and take handle.attention(layer)"
                )
            kept = rank.kept([self._armed[point] for point in own])
            _check_smaller(f"attention={coding.k}", kept, rank.kept(queries), coding, "attention=")

    def _check_records(self, points: Sequence[int], coding: Coding, argument: str) -> None:
        """Check that the values computed per token at `points` fit in a page of every worker's arena."""
        numbers = "directions" if coding.encoding == "projected" else "features"
        for rank in self._ranks:
            wanted = sum(record_of(rank.kept(points), coding).sizes)
            if wanted > rank.page.page_bytes:
                raise InvalidSpec(
                    f"{argument} asks for {wanted:,} bytes per token ({len(points)} points × {coding.k} {numbers}), "
                    f"and a page holds {rank.page.page_bytes:,}; use fewer {numbers} at once"
                )


def _check_smaller(
    named: str, raw: Sequence[PointSchema], stored: Sequence[PointSchema], coding: Coding, smaller: str
) -> None:
    """Check that one token's record takes no more arena lines as stored in `coding` than raw.

    The texts `named` and `smaller` name the argument, and the one to lower, in the error `InvalidSpec`.
    """
    computed, kept = record_of(raw).lines, record_of(stored, coding).lines
    if kept > computed:
        raise InvalidSpec(
            f"{named} takes more bytes for these rows than codec='raw', {kept} lines of 64 bytes instead of {computed}"
            + (f"; give a smaller {smaller}" if coding.k else "")
        )


def codec_for(spec: CaptureSpec, settings: Settings) -> Coding:
    """Return the codec of a spec with its parameters; those that the spec leaves open come from the settings.

    Raises:
        UnknownName: a codec that does not exist.
        InvalidSpec: parameters that the codec does not have.
    """
    name, k, seed = spec.codec_or(settings.codec), spec.codec_k, spec.codec_seed
    codec_of(name, k, seed)
    if spec.calibration is not None:
        return Coding(CALIBRATED)
    if k is None and ENCODINGS[name].default_k:
        k = settings.codec_k
    if seed is None and ENCODINGS[name].seeded:
        seed = settings.codec_seed
    return codec_of(name, k, seed)
