"""Compilation of steering specs, and of directions to project rows on, for one engine, with checks against the model.

The result is the content of a slot of the workers. Vectors are sent once, identified by their SHA-256.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Final

import msgspec
import torch

from steercap.architectures.sites import SITES
from steercap.core.biases import MAX_ENTRIES, Bias
from steercap.core.plan import InSlot
from steercap.core.program import HOLE, MAX_REPLACEMENTS, MAX_SCOPES, NONE, Blob, Configuration, Entry, blob_digest
from steercap.core.schema import PointSchema
from steercap.core.spec import CaptureSpec, Point, check_armed, existing, resolve_layers
from steercap.core.tokens import Range, TokenSelection, selected
from steercap.errors import EmptySelection, InvalidSelection, InvalidSpec, InvalidVector, TooManyEdits
from steercap.steering.directions import DirectionSet
from steercap.steering.edits import Edit, RankOne
from steercap.steering.edits.inputs import Mark, marks_of
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import LogitBias, SteeringSpec


@dataclass(frozen=True, eq=False)
class CompiledProjection:
    """Directions to project rows on, compiled for one engine.

    Args:
        lowered: content of their slot on the workers.
        plan: their part of a request's plan, without the slot, which is granted later.
        points: points whose rows are projected, in the order of the vectors.
        names: names of the directions, in the order of a row's projections.
        marks: fingerprints of the directions by layer, in the order of `names`.
    """

    lowered: Lowered
    plan: InSlot
    points: tuple[Point, ...]
    names: tuple[str, ...]
    marks: Mapping[int, tuple[Mark, ...]]


def points_of(spec: CaptureSpec, num_layers: int) -> tuple[Point, ...]:
    """Return the points of a spec with `project`: all of the directions' layers, or those that `layers` names.

    Raises:
        InvalidSpec: `project` is of another type, is for another site, or has none for a layer asked for.
        LayerOutOfRange: the model does not have a layer.
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
) -> CompiledProjection:
    """Check the directions of `spec.project` against the model, and compile them.

    Args:
        spec: a capture spec with `project`, whose points are armed.
        armed: index of every armed point.
        schemas: shape and dtype of the rows at each armed point.
        num_layers: number of decoder layers of the model.
        points: points to project at; None for all of `points_of`.

    Raises:
        InvalidSpec: see `points_of`.
        InvalidVector: directions of another width than the rows, or a zero one.
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
    return CompiledProjection(lowered, InSlot(NONE, lowered.digest), tuple(points), tuple(directions), marks)


def read_by(vectors: torch.Tensor, points: Sequence[int]) -> Lowered:
    """Return a slot's content without edits: vectors by which workers encode rows (directions, probes, calibrations).

    Args:
        vectors: float32 [vectors, width], equally many for each point, point by point.
        points: indices into the engine's armed points, ascending.
    """
    data = vectors.contiguous().numpy().tobytes()
    blob = Blob(blob_digest(data, len(vectors)), len(vectors))
    configuration = Configuration((), (blob,), 0, 0, tuple(points))
    return Lowered(configuration, configuration.digest, {blob.digest: data}, (), (), changes_kv=False)


def _directions(spec: CaptureSpec) -> DirectionSet:
    """Return `spec.project` as a DirectionSet.

    Raises:
        InvalidSpec: it is neither a DirectionSet nor LayerVectors.
    """
    if isinstance(spec.project, LayerVectors):
        return DirectionSet({spec.project.name or "projection": spec.project})
    if not isinstance(spec.project, DirectionSet):
        raise InvalidSpec(f"project={spec.project!r}; give a DirectionSet, or LayerVectors for one direction")
    return spec.project


_FLOAT32: Final = torch.finfo(torch.float32)


@dataclass(frozen=True, eq=False)
class Lowered:
    """Steering spec compiled for one engine, independent of any prompt.

    Args:
        configuration: content of the slot on the workers.
        digest: digest of the configuration.
        vectors: bytes of each blob (float32 rows), as they are sent, by their digest.
        selections: token selection of each scope (distinct `tokens=` of edits).
        replaced: positions of each `Replace`, as the user wrote them.
        changes_kv: True if an edit can change cached keys or values.
        biased: token selection of each scope of logit biases.
        edits_digest: digest without biases, on which keys and values do not depend.
    """

    configuration: Configuration
    digest: bytes
    vectors: Mapping[bytes, bytes]
    selections: tuple[TokenSelection, ...]
    replaced: tuple[tuple[int, ...], ...]
    changes_kv: bool
    biased: tuple[TokenSelection, ...] = ()
    edits_digest: bytes = b""

    @property
    def described(self) -> dict[str, Any]:
        """Entries of a run's definition: the digest, and the tokens that are steered, which it does not depend on."""
        tokens = {
            "edits": [str(selection) for selection in self.selections],
            "replaced": self.replaced,
            "biases": [str(selection) for selection in self.biased],
        }
        return {"steering": self.digest.hex(), "steered_tokens": tokens}


def lower(
    spec: SteeringSpec,
    *,
    armed: Mapping[Point, int],
    schemas: Mapping[Point, PointSchema],
    num_layers: int,
    edits_per_point: int,
    exists: Callable[[Point], bool] = lambda _: True,
    refused: Mapping[str, str] = MappingProxyType({}),
    vocabulary: int | None = None,
) -> Lowered:
    """Check a steering spec against the model, and compile it.

    Args:
        spec: the steering spec.
        armed: index of every armed point.
        schemas: shape and dtype of the rows at each armed point.
        num_layers: number of decoder layers of the model.
        edits_per_point: maximum number of rank-one edits at one point.
        exists: function that returns True if the model has a point, see `existing`.
        refused: reasons why the model lacks a site, by site name; see `check_armed`.
        vocabulary: number of tokens in the model's logits; None if unknown.

    Raises:
        LayerOutOfRange, UnknownName, PointNotArmed: a point the engine does not have.
        InvalidSpec: an edit at a point that cannot be written, or one that needs whole rows of a point that is split; a
            bias of a token that the vocabulary lacks, or biases that add up to more than float32 holds.
        InvalidVector: a vector of another width than the rows.
        TooManyEdits: more edits at one point, or biases of logits, than the workers' tables hold.
    """
    lowering, biasing = _Lowering(), _Biasing()
    changes_kv = False
    for number, (edit, keeper) in enumerate(spec.segments()):
        if isinstance(edit, LogitBias):
            _check_vocabulary(edit, vocabulary)
            biasing.add(number, edit)
            continue
        points = existing(edit.points(num_layers), partial(_is_open, edit), exists)
        check_armed(points, armed, SITES, exists, refused)
        changes_kv |= any(schemas[point].changes_kv for point in points)
        for part in _parts(edit, points, schemas, keeps_norm=keeper is not None):
            for point in points:
                _check_fits(edit, part, point, schemas[point], keeps_norm=keeper is not None)
            lowering.add(number, edit, part, tuple(armed[point] for point in points), keeper)
    _check_counts(lowering.entries, lowering.scopes, lowering.replaced, edits_per_point)
    edits = lowering.configuration()
    configuration = msgspec.structs.replace(edits, biases=biasing.checked())
    return Lowered(
        configuration=configuration,
        digest=configuration.digest,
        vectors=lowering.vectors,
        selections=tuple(lowering.scopes),
        replaced=tuple(lowering.replaced),
        changes_kv=changes_kv,
        biased=tuple(biasing.scopes),
        edits_digest=edits.digest,
    )


def _is_open(edit: Edit, _point: Point) -> bool:
    """Return True if an edit's layers are "all", so that points that the model lacks are skipped."""
    return isinstance(edit.layers, str)


class _Lowering:
    """Edits of a configuration under construction; equal vectors, scopes and norms are stored once."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.vectors: dict[bytes, bytes] = {}
        self.scopes: dict[TokenSelection, int] = {}
        self.replaced: list[tuple[int, ...]] = []
        self._blobs: dict[bytes, int] = {}
        self._rows: list[int] = []
        self._keepers: dict[tuple[int, ...], int] = {}

    def add(
        self, number: int, edit: Edit, part: RankOne, points: tuple[int, ...], keeper: tuple[int, ...] | None
    ) -> None:
        """Add one rank-one part of an edit.

        Args:
            number: index of the edit in the spec.
            edit: the edit.
            part: one of the rank-one edits it consists of.
            points: indices of its points among the engine's armed ones.
            keeper: path to the spec around it that preserves norms (see `SteeringSpec.segments`), or None.
        """
        self.entries.append(
            Entry(
                edit=number,
                points=points,
                scope=self.scopes.setdefault(edit.selection, len(self.scopes)),
                write=self._blob(part.write),
                read=NONE if part.read is None else self._blob(part.read),
                response=part.response,
                joined=part.joined,
                replacement=len(self.replaced) if part.replaces else NONE,
                norm=NONE if keeper is None else self._keepers.setdefault(keeper, len(self._keepers)),
            )
        )
        if part.replaces:
            self.replaced.append(edit.replaced)

    def configuration(self) -> Configuration:
        """Return the configuration of all parts added so far."""
        blobs = tuple(map(Blob, self.vectors, self._rows))
        return Configuration(tuple(self.entries), blobs, len(self.scopes), len(self.replaced))

    def _blob(self, rows: torch.Tensor) -> int:
        data = rows.contiguous().numpy().tobytes()
        digest = blob_digest(data, len(rows))
        if digest not in self._blobs:
            self._blobs[digest] = len(self._blobs)
            self.vectors[digest] = data
            self._rows.append(len(rows))
        return self._blobs[digest]


class _Biasing:
    """Logit biases of a configuration under construction, and their scopes (distinct `tokens=`)."""

    def __init__(self) -> None:
        self.scopes: dict[TokenSelection, int] = {}
        self._biases: list[Bias] = []

    def add(self, number: int, bias: LogitBias) -> None:
        """Add a bias; `number` is its index among the spec's edits."""
        self._biases.append(bias.lower(number, self.scopes.setdefault(bias.selection, len(self.scopes))))

    def checked(self) -> tuple[Bias, ...]:
        """Return all biases added so far, after checking their numbers and sums.

        Raises:
            TooManyEdits: too many biased logits or token selections.
            InvalidSpec: the biases of a token add up to more than float32 holds.
        """
        total = sum(map(len, self._biases))
        if total > MAX_ENTRIES:
            raise TooManyEdits(f"this spec biases {total:,} logits of a position, and at most {MAX_ENTRIES:,} fit")
        if len(self.scopes) > MAX_SCOPES:
            raise TooManyEdits(
                f"the LogitBias of this spec have {len(self.scopes)} different tokens=, and at most {MAX_SCOPES} fit; "
                "merge some"
            )
        most: dict[int, float] = {}
        for bias in self._biases if len(self._biases) > 1 else ():
            for token, value in zip(*(one.tolist() for one in bias.entries), strict=True):
                most[token] = most.get(token, 0.0) + abs(value)
        if (token := max(most, key=lambda one: most[one], default=None)) is not None and most[token] > _FLOAT32.max:
            raise InvalidSpec(f"the LogitBias of token {token} add up to more than float32 holds; give smaller ones")
        return tuple(self._biases)


def _check_vocabulary(edit: LogitBias, vocabulary: int | None) -> None:
    """Raise InvalidSpec if a bias names tokens that the model's vocabulary does not have."""
    if vocabulary is None:
        return
    if edit.vocabulary not in {None, vocabulary}:
        raise InvalidSpec(f"{edit}: an array of {edit.vocabulary} biases, and this model's vocabulary has {vocabulary}")
    if (highest := int(edit.lower(0, 0).entries[0][-1])) >= vocabulary:
        raise InvalidSpec(f"{edit}: token {highest} is none of this model's vocabulary, 0 to {vocabulary - 1}")


def biased_by(lowered: Lowered, prompt_len: int, limit: int) -> tuple[tuple[Range, ...], ...]:
    """Return the positions of each scope of logit biases; `limit` is the maximum number of input tokens of the sample.

    Raises:
        InvalidSelection, EmptySelection: a selection that does not fit the prompt, or has no position with logits.
    """
    found = []
    for selection in lowered.biased:
        ranges = selection.ranges(prompt_len, limit)
        if not selected(ranges, limit)[prompt_len - 1 :].any():
            raise EmptySelection(
                f"LogitBias: tokens={selection} selects no position of this request whose logits are made: those are "
                f"{prompt_len - 1}, the last of its prompt, to {limit - 1}"
            )
        found.append(ranges)
    return tuple(found)


def scopes_of(
    lowered: Lowered, prompt_len: int, limit: int
) -> tuple[tuple[tuple[Range, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the positions of each scope of edits and of each `Replace`; arguments as for `biased_by`.

    Raises:
        InvalidSelection, EmptySelection: a selection that does not fit the prompt.
    """
    scopes = tuple(selection.ranges(prompt_len, limit) for selection in lowered.selections)
    replaced = tuple(
        tuple(position + prompt_len if position < 0 else position for position in positions)
        for positions in lowered.replaced
    )
    for positions in replaced:
        if len(set(positions)) < len(positions):
            raise InvalidSelection(
                f"Replace: positions {list(positions)} name one twice in a prompt of {prompt_len} tokens"
            )
    return scopes, replaced


def _parts(
    edit: Edit, points: Sequence[Point], schemas: Mapping[Point, PointSchema], *, keeps_norm: bool
) -> Sequence[RankOne]:
    """Return an edit as rank-one edits of whole rows, one set for each part that `edit.part` names.

    Raises:
        InvalidSpec: `part=` for rows without parts, with an index out of range, or with an edit that needs whole rows.
        InvalidVector: vectors of another width than a part.
    """
    lowered = edit.lower()
    if edit.part is None or not points:
        return lowered
    shapes = sorted({schemas[point].shape for point in points})
    named, (shape, *others) = f"{edit}: part={edit.part!r}", shapes
    if others or len(shape) == 1:
        found = " and ".join("×".join(map(str, one)) for one in shapes)
        raise InvalidSpec(
            f"{named} needs rows with several axes, of one shape at all points; those at {points[0].site} are {found}"
        )
    if keeps_norm or any(one.response.relative for one in lowered):
        raise InvalidSpec(
            f"{named} edits one part, while relative= and preserve_norm= need the norm of whole rows; leave part= out, "
            "and give flat vectors of the whole row's width"
        )
    count, width = shape[0], prod(shape[1:])
    if edit.part != "each" and not -count <= edit.part < count:
        raise InvalidSpec(f"{named}; rows at {points[0]} have {count} parts, 0 to {count - 1}, or 'each'")
    for vector in (vector for one in lowered for vector in (one.write, one.read) if vector is not None):
        if vector.shape[-1] != width:
            raise InvalidVector(
                f"{named}: the vector has width {vector.shape[-1]}, a part of the rows at {points[0]} has {width}"
            )
    chosen = range(count) if edit.part == "each" else [edit.part % count]
    return [_within(one, place * width, count * width) for place in chosen for one in lowered]


def _within(edit: RankOne, start: int, width: int) -> RankOne:
    """Pad a rank-one edit of a part of a row to rows of `width` elements, in which the part begins at `start`."""

    def padded(vector: torch.Tensor) -> torch.Tensor:
        fill = HOLE if edit.replaces else 0.0
        return torch.nn.functional.pad(vector, (start, width - start - vector.shape[-1]), value=fill)

    return edit._replace(write=padded(edit.write), read=None if edit.read is None else padded(edit.read))


def _check_fits(edit: Edit, part: RankOne, point: Point, schema: PointSchema, *, keeps_norm: bool) -> None:
    """Raise InvalidVector or InvalidSpec if one rank-one part of an edit cannot be applied at a point."""
    for vector in (part.write, part.read):
        if vector is not None and vector.shape[-1] != schema.width:
            several = len(schema.shape) > 1 and vector.shape[-1] == prod(schema.shape[1:])
            raise InvalidVector(
                f"{edit}: the vector has width {vector.shape[-1]}, the rows at {point} are {schema}; "
                + (
                    f"give part=, one of {schema.shape[0]} or 'each'"
                    if several
                    else "it was made for another model, or another site"
                )
            )
    if not schema.writable:
        raise InvalidSpec(f"{edit}: rows at {point} can be read but not changed")
    if schema.shards > 1 and (keeps_norm or part.response.relative or not _in_one_shard(part, schema)):
        raise InvalidSpec(
            f"{edit}: it needs whole rows at {point}, which are {schema}, and no rank has all of one; add, replace, or "
            "read and write within one rank's part, without relative= and preserve_norm=; or start with "
            "tensor_parallel_size=1"
        )


def _in_one_shard(part: RankOne, schema: PointSchema) -> bool:
    """Return True if a part of an edit works on split rows: it reads none, or reads and writes on one rank."""
    if part.read is None:
        return True
    shards = torch.stack([vector.reshape(schema.shards, -1).any(-1) for vector in (part.read, part.write)])
    return int(shards.any(0).sum()) <= 1


def _check_counts(entries: Sequence[Entry], scopes: Any, replaced: Any, edits_per_point: int) -> None:
    counts = Counter(point for entry in entries for point in entry.points)
    most = max(counts.values(), default=0)
    if most > edits_per_point:
        raise TooManyEdits(
            f"this spec has {most} rank-one edits at one point (a LowRank of rank k counts as k), and the engine holds "
            f"{edits_per_point}; raise SteerModel(..., edits_per_point=)"
        )
    if len(scopes) > MAX_SCOPES:
        raise TooManyEdits(f"this spec has {len(scopes)} different tokens=, and at most {MAX_SCOPES} fit; merge some")
    if len(replaced) > MAX_REPLACEMENTS:
        raise TooManyEdits(
            f"this spec has {len(replaced)} Replace edits, and at most {MAX_REPLACEMENTS} fit; "
            "put the positions of a layer into one"
        )
