"""Compilation of the SAEs that encode a request's rows on the workers, with checks against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steercap.core.schema import Coding, PointSchema
from steercap.core.spec import CaptureSpec, Point
from steercap.core.values import shown
from steercap.errors import InvalidSpec, LayerOutOfRange, PointSplit
from steercap.kernels.codecs.coded import FEATURES
from steercap.kernels.codecs.topk import STRONGEST
from steercap.saes.encoder import Encoder
from steercap.saes.sae import SAE


@dataclass(frozen=True, eq=False)
class Readers:
    """SAEs of a request, compiled for one engine.

    Args:
        points: points whose rows they encode, with their indices among the armed points, ascending.
        encoders: encoder of each point, in the order of `points`.
        coding: encoding of the captured features: the k strongest of each row.
    """

    points: Mapping[Point, int]
    encoders: tuple[Encoder, ...]
    coding: Coding

    @property
    def schemas(self) -> dict[Point, PointSchema]:
        """Shape and dtype of what is captured at each point: float32 activations of the SAE's features."""
        found = zip(self.points, self.encoders, strict=True)
        return {point: PointSchema((encoder.d_sae,), "float32", writable=False) for point, encoder in found}


def saes_of(spec: CaptureSpec) -> tuple[SAE, ...]:
    """Return the SAEs of `spec.saes` after checking them.

    Raises:
        InvalidSpec: an item is not an SAE, or two read the same point.
    """
    for one in spec.saes:
        if not isinstance(one, SAE):
            raise InvalidSpec(f"sae={shown(one)}; give an SAE, as SAE.load reads it, or several in a list")
    found = tuple(one for one in spec.saes if isinstance(one, SAE))
    points = [one.input for one in found]
    if twice := next((point for point in points if points.count(point) > 1), None):
        raise InvalidSpec(
            f"sae= has two SAEs that read {twice}; a request takes one SAE per point, so make two requests"
        )
    return found


def read_points(spec: CaptureSpec, num_layers: int) -> tuple[Point, ...]:
    """Return the points that a spec's SAEs read, by ascending layer.

    Raises:
        InvalidSpec: see `saes_of`.
        LayerOutOfRange: the model does not have a layer.
    """
    points = sorted((one.input for one in saes_of(spec)), key=lambda point: point.layer)
    for point in points:
        if point.layer >= num_layers:
            raise LayerOutOfRange(
                f"sae= reads {point}, and this model has {num_layers} layers; is it of another model?"
            )
    return tuple(points)


def compile_readers(
    spec: CaptureSpec, points: Sequence[Point], armed: Mapping[Point, int], schemas: Mapping[Point, PointSchema]
) -> Readers:
    """Check the SAEs of a spec against the model, and compile them.

    Args:
        spec: a spec with `sae`.
        points: points that the SAEs read, all armed.
        armed: index of every armed point.
        schemas: shape and dtype of the rows at each armed point.

    Raises:
        InvalidSpec: an SAE reads rows of another width, or has fewer features than `sae_k`.
        PointSplit: the rows are split over ranks, and an SAE needs whole ones.
    """
    of, k = {one.input: one for one in saes_of(spec)}, spec.sae_k or STRONGEST.default_k
    for point in points:
        schema, sae = schemas[point], of[point]
        if schema.width != sae.d_in:
            raise InvalidSpec(
                f"{sae} reads rows of {sae.d_in} elements, and those at {point} are {schema}; it was made for another "
                "model, or another point"
            )
        if schema.shards > 1:
            raise PointSplit(
                f"the rows of {point} are split over {schema.shards} ranks, and an SAE needs whole ones; capture them, "
                "and read them with SAE.strongest, or start with tensor_parallel_size=1"
            )
        if k > sae.d_sae:
            raise InvalidSpec(f"sae_k={k}, and {sae} has {sae.d_sae} features; give a smaller one")
    ordered = sorted(points, key=lambda point: armed[point])
    encoders = tuple(of[point].encoder for point in ordered)
    return Readers({point: armed[point] for point in ordered}, encoders, Coding(FEATURES, k))
