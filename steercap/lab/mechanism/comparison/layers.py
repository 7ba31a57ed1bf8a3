"""Comparison of one layer of two checkpoints on the same vectors: matrices, and the whole feed-forward block.

Tables have a row for each vector, labelled by `group` and `name`. Differences are instruct − base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from jaxtyping import Float

from steercap.core.display import brief
from steercap.errors import InvalidFile, InvalidVector, UnsupportedModel
from steercap.kernels.bits import exact_products
from steercap.lab.mechanism.analysis.given import LabelledRows
from steercap.lab.mechanism.analysis.tables import table_of
from steercap.lab.mechanism.weights.applied import AttentionBlock, FeedForward

if TYPE_CHECKING:
    import pyarrow as pa

#: The same block of the base checkpoint, and of the instruct checkpoint.
AttentionPair: TypeAlias = "tuple[AttentionBlock, AttentionBlock]"
FeedForwardPair: TypeAlias = "tuple[FeedForward, FeedForward]"
#: Names of the checkpoints, in the order of a pair.
MODELS: Final = ("base", "instruct")
#: Bytes of a matrix that are compared at once, as float64.
BLOCK_BYTES: Final = 64 << 20
#: Number of components of which `reinforcement` measures both signs.
REINFORCED: Final = 5


@exact_products()
def susceptibility(pair: AttentionPair | FeedForwardPair, given: LabelledRows) -> pa.Table:
    """Measure the angle between two models' images of each vector under each matrix that reads the residual stream.

    Each model norms a vector of `given` by its own input norm and applies its unfolded matrix, without bias.

    Returns:
        Columns `group`, `name`, `layer`, `matrix` ("q", "k", "v", or "gate", "up"), `distance`: 1 − cosine of the two
        images.

    Raises:
        UnsupportedModel: the two checkpoints have matrices of different shapes.
        InvalidVector: a matrix maps a vector to zero, so that there is no angle.
    """
    base, instruct = (block.normed(given.rows) for block in pair)
    tables = [
        {
            **given.labels,
            "layer": [pair[0].layer] * len(given),
            "matrix": [matrix] * len(given),
            "distance": _turned(base @ one.T, instruct @ other.T, given, f"{matrix} of layer {pair[0].layer}").numpy(),
        }
        for matrix, one, other in _matrices(pair)
    ]
    return table_of(joined(tables, ("group", "name", "layer", "matrix", "distance")))


def differences(pair: AttentionPair | FeedForwardPair) -> pa.Table:
    """Compare the matrices of one block that read the residual stream, base with instruct, in float64.

    Returns:
        Columns `layer`, `matrix`, `frobenius` (norm of the difference), `relative` (the same over the norm of the base
        matrix), `cosine` (of both matrices flattened).

    Raises:
        UnsupportedModel: as for `susceptibility`.
    """
    rows = []
    for matrix, one, other in _matrices(pair):
        size = max(1, BLOCK_BYTES // (8 * one.shape[1]))
        apart, ours, theirs, product = (torch.zeros((), dtype=torch.float64) for _ in range(4))
        for mine, yours in zip(one.split(size), other.split(size), strict=True):
            first, second = mine.double(), yours.double()
            apart += (second - first).square().sum()
            ours, theirs = ours + first.square().sum(), theirs + second.square().sum()
            product += (first * second).sum()
        cosine = product / (ours * theirs).sqrt()
        _check_finite(cosine, f"{matrix} of layer {pair[0].layer}")
        rows.append((pair[0].layer, matrix, float(apart.sqrt()), float((apart / ours).sqrt()), float(cosine)))
    names = ("layer", "matrix", "frobenius", "relative", "cosine")
    return table_of({name: [row[at] for row in rows] for at, name in enumerate(names)})


@dataclass(frozen=True, eq=False)
class BlockOutputs:
    """Outputs of one layer's feed-forward block in both models, for the same vectors.

    Args:
        layer: index of the layer.
        given: input vectors.
        base, instruct: outputs of each model, without the residual, float64 [rows, hidden].

    Raises:
        InvalidFile: an output is not finite.
    """

    layer: int
    given: LabelledRows
    base: Float[torch.Tensor, "rows hidden"]
    instruct: Float[torch.Tensor, "rows hidden"]

    __repr__ = brief

    def __post_init__(self) -> None:
        for outputs in (self.base, self.instruct):
            _check_finite(outputs, f"the feed-forward block of layer {self.layer}")

    @classmethod
    def of(cls, pair: FeedForwardPair, given: LabelledRows) -> BlockOutputs:
        """Apply the block of each model to the vectors; the outputs do not include the residual."""
        base, instruct = (block.forward(given.rows).double() for block in pair)
        return cls(pair[0].layer, given, base, instruct)

    def tail(self, count: int) -> BlockOutputs:
        """Return the outputs for the last `count` vectors."""
        first = len(self.given) - count
        given = self.given.where(range(first, len(self.given)))
        return BlockOutputs(self.layer, given, self.base[first:], self.instruct[first:])

    def altered(self) -> pa.Table:
        """Measure the difference between both models' outputs for each vector.

        Returns:
            Columns `group`, `name`, `layer`, `absolute` (L2 norm of the outputs' difference), `angular` (1 − cosine of
            the outputs), `base_norm` and `instruct_norm` (of the outputs).

        Raises:
            InvalidVector: an output is zero.
        """
        turned = _turned(self.base, self.instruct, self.given, f"the feed-forward block of layer {self.layer}")
        columns = {
            **self.given.labels,
            "layer": np.full(len(self.given), self.layer),
            "absolute": (self.instruct - self.base).norm(dim=1).numpy(),
            "angular": turned.numpy(),
            "base_norm": self.base.norm(dim=1).numpy(),
            "instruct_norm": self.instruct.norm(dim=1).numpy(),
        }
        return table_of(columns)

    def decomposed(self, named: LabelledRows, top: int) -> pa.Table:
        """List the `top` named vectors with the greatest absolute projections of each output, and of their change.

        Returns:
            Columns `layer`, `name` (of the input vector), `output` ("base", "instruct", "change"), `place` (from 0),
            `target_group`, `target`, `projection` (on the target's unit vector, in the stream's units), `cosine`.
        """
        units, rows = named.units, list[dict[str, Any]]()
        outputs = {"base": self.base, "instruct": self.instruct, "change": self.instruct - self.base}
        for output, values in outputs.items():
            projections = values @ units.T
            best = projections.abs().topk(min(top, len(named)), dim=1).indices.tolist()
            lengths = values.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)  # a change may be zero
            cosines = projections / lengths[:, None]
            rows += [
                {"layer": self.layer, "name": name, "output": output, "place": place,
                 "target_group": named.groups[target], "target": named.names[target],
                 "projection": float(projections[at, target]), "cosine": float(cosines[at, target])}
                for at, name in enumerate(self.given.names)
                for place, target in enumerate(best[at])
            ]  # fmt: skip
        return table_of({name: [row[name] for row in rows] for name in rows[0]})


def reinforcement(pair: FeedForwardPair, components: LabelledRows) -> pa.Table:
    """Measure the output of a block for each component, and its negative, along the input and orthogonal to it.

    Args:
        pair: feed-forward blocks of both models.
        components: components of vectors; the first five are used.

    Returns:
        Columns `name`, `sign` (1, -1), `layer`, `model` ("base", "instruct"), `along` (projection of the output on the
        signed input: above 0 the block reinforces it), `across` (length of the orthogonal rest).
    """
    first = components.where(range(min(REINFORCED, len(components))))
    signed = LabelledRows(first.groups * 2, first.names * 2, torch.cat([first.rows, -first.rows]))
    found = BlockOutputs.of(pair, signed)
    tables = []
    for model, outputs in zip(MODELS, (found.base, found.instruct), strict=True):
        along = (outputs * signed.units).sum(1)
        across = (outputs - along[:, None] * signed.units).norm(dim=1)
        tables.append(
            {
                "name": list(signed.names),
                "sign": np.repeat([1, -1], len(first)),
                "layer": [found.layer] * len(signed),
                "model": [model] * len(signed),
                "along": along.numpy(),
                "across": across.numpy(),
            }
        )
    return table_of(joined(tables, tuple(tables[0])))


def joined(tables: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Concatenate several tables, mappings of columns; return the columns `names`, which each table has."""
    return {name: np.concatenate([np.asarray(table[name]) for table in tables]) for name in names}


def _matrices(pair: AttentionPair | FeedForwardPair) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return (name, base matrix, instruct matrix) of each matrix of a block that reads the residual stream.

    Raises:
        UnsupportedModel: the names or shapes of the two blocks' matrices differ.
    """
    base, instruct = ({name: tuple(one.shape) for name, one in block.matrices.items()} for block in pair)
    if base != instruct:
        raise UnsupportedModel(
            f"layer {pair[0].layer} has the matrices {base} in one checkpoint and {instruct} in the other; "
            "give two checkpoints of one architecture and size"
        )
    return [(name, one, pair[1].matrices[name]) for name, one in pair[0].matrices.items()]


def _turned(
    one: Float[torch.Tensor, "rows width"], other: Float[torch.Tensor, "rows width"], given: LabelledRows, place: str
) -> Float[torch.Tensor, " rows"]:
    """Return 1 − cosine of each row of `one` with that of `other`, float64 [rows].

    It is half the squared distance of the unit rows, which is exact to rounding for nearly equal rows. `given` names
    the rows and `place` the block in errors: InvalidVector for a row of zeros, InvalidFile for one that is not finite.
    """
    first, second = one.double(), other.double()
    for rows in (first, second):
        _check_finite(rows, place)
        if zero := [name for name, row in zip(given.names, rows, strict=True) if not row.any()]:
            raise InvalidVector(f"{place} makes zero of {', '.join(zero[:5])}, so there is no angle to compare")
    apart = torch.nn.functional.normalize(first, dim=1) - torch.nn.functional.normalize(second, dim=1)
    return apart.square().sum(1) / 2


def _check_finite(values: torch.Tensor, place: str) -> None:
    if not bool(values.isfinite().all()):
        raise InvalidFile(f"{place} gives numbers that are not finite; is the checkpoint damaged?")
