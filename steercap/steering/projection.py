"""Compilation of the directions that rows are projected on, checked against the model before anything runs.

Directions are sent like steering vectors: held in a slot, identified by their SHA-256, sent once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from steercap.core.plan import InSlot
from steercap.core.program import NONE, Blob, Configuration, blob_digest
from steercap.core.schema import PointSchema
from steercap.core.spec import CaptureSpec, Point, resolve_layers
from steercap.errors import InvalidSpec, InvalidVector
from steercap.steering.directions import DirectionSet, Mark, marks_of
from steercap.steering.layers import LayerVectors
from steercap.steering.lowering import Lowered


@dataclass(frozen=True, eq=False)
class Projected:
    """Projection directions compiled for one engine.

    Args:
        lowered: content of their slot.
        plan: their part of a request's plan; the slot is not known yet.
        points: points at which rows are projected, in the order of the vectors.
        names: names of the directions, in the order of the projected numbers.
        marks: fingerprints of the directions, by layer, in the same order.
    """

    lowered: Lowered
    plan: InSlot
    points: tuple[Point, ...]
    names: tuple[str, ...]
    marks: Mapping[int, tuple[Mark, ...]]


def points_of(spec: CaptureSpec, num_layers: int) -> tuple[Point, ...]:
    """Return the points of a spec with `project`: all of the directions, or those that `layers` names.

    Raises:
        InvalidSpec: `project` does not hold directions, is for another site, or has none for a layer asked for.
        LayerOutOfRange: a layer this model does not have.
    """
    directions = _directions(spec)
    if spec.sites not in (("resid_post",), (directions.site,)):
        raise InvalidSpec(f"sites={spec.sites!r}, but the directions are for {directions.site!r}; leave sites= out")
    wanted = resolve_layers(list(directions.layers) if spec.layers == "all" else spec.layers, num_layers)
    if missing := [layer for layer in wanted if layer not in directions.layers]:
        raise InvalidSpec(f"project= has no directions for layers {missing}; it has them for {list(directions.layers)}")
    return tuple(Point(layer, directions.site) for layer in wanted)


def compile_projection(
    spec: CaptureSpec,
    armed: Mapping[Point, int],
    schemas: Mapping[Point, PointSchema],
    *,
    num_layers: int,
    points: Iterable[Point] | None = None,
) -> Projected:
    """Check the directions that rows are projected on, and compile them.

    Args:
        spec: a spec with `project`, whose points are armed.
        armed: index of every armed point.
        schemas: shape and dtype of the rows at each armed point.
        num_layers: decoder layers of the model.
        points: its points, those of `points_of` that the model has; None for all of them.

    Raises:
        InvalidSpec: see `points_of`.
        InvalidVector: directions of another width, or a zero one.
    """
    directions = _directions(spec)
    points = points_of(spec, num_layers) if points is None else points
    points = sorted(points, key=lambda point: armed[point])
    for point in points:
        if directions.width != schemas[point].width:
            raise InvalidVector(
                f"project= has directions of width {directions.width}, the rows at {point} are {schemas[point]}; they "
                "were made for another model, or another site"
            )
    units = {layer: directions.units(layer) for layer in {point.layer for point in points}}
    lowered = read_by(torch.cat([units[point.layer] for point in points]), [armed[point] for point in points])
    marks = {layer: marks_of(own) for layer, own in units.items()}
    return Projected(lowered, InSlot(NONE, lowered.digest), tuple(points), tuple(directions), marks)


def read_by(vectors: torch.Tensor, points: Sequence[int]) -> Lowered:
    """Return a slot's content that edits nothing: vectors that workers use to store rows.

    Args:
        vectors: float32 [vectors, width], equally many for each point, point by point.
        points: indices into the engine's armed points, ascending.
    """
    data = vectors.contiguous().numpy().tobytes()
    blob = Blob(blob_digest(data, len(vectors)), len(vectors))
    configuration = Configuration((), (blob,), 0, 0, tuple(points))
    return Lowered(configuration, configuration.digest, {blob.digest: data}, (), (), changes_kv=False)


def _directions(spec: CaptureSpec) -> DirectionSet:
    """Return the user's directions as a set.

    Raises:
        InvalidSpec: neither a DirectionSet nor LayerVectors.
    """
    if isinstance(spec.project, LayerVectors):
        return DirectionSet({spec.project.name or "projection": spec.project})
    if not isinstance(spec.project, DirectionSet):
        raise InvalidSpec(f"project={spec.project!r}; give a DirectionSet, or LayerVectors for one direction")
    return spec.project
