"""Vectors read by name from files and folders, and their comparison in pairs of equal name and layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import msgspec

from steercap.core.display import brief
from steercap.core.values import choices, shown
from steercap.errors import InvalidFile, InvalidSpec, UnknownName
from steercap.files.tables import write_table
from steercap.steering.directions import DirectionSet
from steercap.steering.formats import load_personas, load_steering_vector
from steercap.steering.layers import LayerVectors

#: Vectors by name: a mapping; a `DirectionSet` in a file; a folder of NAME.pt, or of NAME/steering_vector.pt.
Vectors: TypeAlias = "Mapping[str, LayerVectors] | str | Path"


class VectorPair(msgspec.Struct, frozen=True):
    """Cosine and norms of two vectors that have the same name and layer.

    Args:
        name, layer: name and layer of both vectors.
        cosine: cosine of the vectors; None if one of them is zero.
        norm, other_norm: Euclidean norms of the first and of the second vector.
        norm_ratio: norm of the second divided by that of the first; None if that is 0.
    """

    name: str
    layer: int
    cosine: float | None
    norm: float
    other_norm: float
    norm_ratio: float | None


class TrainedComparison(msgspec.Struct, frozen=True):
    """Comparison, for one data set, of the trained vector, an averaged vector, and the system prompt.

    Args:
        dataset: name of the data set.
        averaged: name of the averaged vector.
        layer: layer of the trained vector, at which both vectors are added.
        cosine: cosine of the two vectors; None if one of them is zero.
        norm_trained, norm_averaged: Euclidean norms of the two vectors.
        lr: learning rate of the trained vector.
        tokens: number of held-out tokens of responses.
        loss_trained, loss_averaged, loss_prompted, loss_unsteered: mean loss of the held-out examples, in nats per
            token; `loss_prompted` is None if not all examples have a system prompt.
        perplexity_trained, perplexity_averaged, perplexity_prompted, perplexity_unsteered: perplexity of the held-out
            responses, over all tokens.
    """

    dataset: str
    averaged: str
    layer: int
    cosine: float | None
    norm_trained: float
    norm_averaged: float
    lr: float
    tokens: int
    loss_trained: float
    perplexity_trained: float
    loss_averaged: float
    perplexity_averaged: float
    loss_prompted: float | None
    perplexity_prompted: float | None
    loss_unsteered: float
    perplexity_unsteered: float


@dataclass(frozen=True)
class ComparedVectors:
    """Results of `compare_vectors` or `compare_trained`.

    Args:
        rows: a result for each name and layer, or for each data set.
        left_out: reasons, by name, why vectors were not compared; under "layers of NAME and 2 more", unpaired layers.
    """

    rows: Sequence[VectorPair] | Sequence[TrainedComparison]
    left_out: Mapping[str, str]

    __repr__ = brief

    def save(self, path: str | Path) -> Path:
        """Write the rows to a Parquet file, whose name must end in .parquet; return its path."""
        return write_table(path, list(self.rows))

    def __str__(self) -> str:
        cosines = [row.cosine for row in self.rows if row.cosine is not None]
        about = f"; cosine {min(cosines):.4f} at least, {median(cosines):.4f} in the middle" if cosines else ""
        zero = len(self.rows) - len(cosines)
        return f"{len(self.rows)} pairs{about}; {zero} with a vector of zeros; {len(self.left_out)} left out"


def read_vectors(vectors: Vectors, **reading: Any) -> tuple[Mapping[str, LayerVectors], dict[str, str]]:
    """Read vectors by name, each a direction with a vector per layer.

    Args:
        vectors: a mapping; a `DirectionSet` in a file; or a folder, of persona files `NAME.pt` or of trained vectors
            `NAME/steering_vector.pt`.
        **reading: for persona files, arguments of `load_personas`, such as `level` and `layers`.

    Returns:
        The vectors by name, and by file the reasons why files of a folder have none.

    Raises:
        InvalidSpec: a mapping is empty or has other values; or `reading` is given without a folder of persona files.
        InvalidFile: the file or folder holds no vectors, or is damaged.
        UnknownName: no persona file has the given level.
    """
    if isinstance(vectors, Mapping):
        if not vectors or not all(isinstance(one, LayerVectors) for one in vectors.values()):
            raise InvalidSpec(f"vectors={shown(vectors)}; give LayerVectors by name, one at least")
        return vectors, {}
    path = Path(vectors)
    if path.is_dir() and any(path.glob("*.pt")):
        personas = load_personas(path, **reading)
        return personas.directions, {f"{path}/{file}": reason for file, reason in personas.left_out.items()}
    if given := [f"{name}=" for name, value in reading.items() if value is not None]:
        raise InvalidSpec(f"{path} is not a folder of persona files NAME.pt; leave out {', '.join(given)}")
    if not path.is_dir():
        return DirectionSet.load(path), {}
    folders = sorted(file.parent for file in path.glob("*/steering_vector.pt"))
    found = {folder.name: load_steering_vector(folder)[0] for folder in folders}
    if not found:
        raise InvalidFile(f"{path} holds no vectors; give a folder of NAME.pt or of NAME/steering_vector.pt")
    return found, {}


def compare_vectors(first: Vectors, second: Vectors, **reading: Any) -> ComparedVectors:
    """Compare vectors of equal names, layer by layer, from any models, engines or dtypes.

    Args:
        first, second: vectors by name; see `read_vectors`.
        **reading: arguments of `load_personas`, for folders of persona files.

    Returns:
        A row for each name and layer that both have; `left_out` lists the names and layers that only one has.

    Raises:
        UnknownName: `first` and `second` have no name in common.
        InvalidSpec: two vectors of one name differ in site or width, or have no layer in common.
        The errors of `read_vectors`.
    """
    (ours, lacking), (theirs, also) = (read_vectors(one, **reading) for one in (first, second))
    common = [name for name in ours if name in theirs]
    if not common:
        raise UnknownName(f"no name in common: first has {choices('', ours)}; second {choices('', theirs)}")
    left_out = lacking | also | {name: "only in the first" for name in ours if name not in theirs}
    left_out |= {name: "only in the second" for name in theirs if name not in ours}
    rows = [row for name in common for row in pairs_of(name, ours[name], theirs[name])]
    alone: dict[str, list[str]] = {}
    for name in common:
        alone.setdefault(_unmatched(ours[name], theirs[name]), []).append(name)
    for said, (name, *more) in alone.items():
        if said:
            left_out[f"layers of {name}" + (f" and {len(more)} more" if more else "")] = said
    return ComparedVectors(rows, left_out)


def _unmatched(first: LayerVectors, second: LayerVectors) -> str:
    """Return a text of the layers that only one of two directions has; "" if both have the same layers."""
    sides = {"first": first.keys() - second.keys(), "second": second.keys() - first.keys()}
    return "; ".join(
        f"{len(layers)} only in the {side}, {min(layers)}" + (f" to {max(layers)}" if len(layers) > 1 else "")
        for side, layers in sides.items()
        if layers
    )


def pairs_of(name: str, first: LayerVectors, second: LayerVectors) -> list[VectorPair]:
    """Compare two directions at each layer that both have; return pairs in the order of the first's layers.

    Raises:
        InvalidSpec: the directions have no layer in common, or differ in site or width.
    """
    layers = [layer for layer in first if layer in second]
    if (first.site, first.width) != (second.site, second.width) or not layers:
        raise InvalidSpec(f"{name}: {first!r} and {second!r} differ in site, width, or have no layer in common")
    found = []
    for layer in layers:
        one, other = first[layer].double(), second[layer].double()
        norm, other_norm = float(one.norm()), float(other.norm())
        cosine = float(one @ other / norm / other_norm) if norm and other_norm else None
        ratio = other_norm / norm if norm else None
        bounded = None if cosine is None else min(max(cosine, -1.0), 1.0)
        found.append(VectorPair(name, layer, bounded, norm, other_norm, ratio))
    return found
