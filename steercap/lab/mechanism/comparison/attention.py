"""Attention of one layer in two checkpoints: scores between vectors, and outputs of attending to a vector.

Each number of two vectors is compared with that of random vectors through the same model with the same cosine: 1 for a
vector with itself, -1 with its opposite. The null distribution is a smooth function of their angle, so it is estimated
at some angles and interpolated between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float

from steercap.core.extras import extra
from steercap.errors import UnsupportedModel
from steercap.kernels.bits import exact_products
from steercap.lab.mechanism.analysis.given import LabelledRows, random_pairs
from steercap.lab.mechanism.analysis.tables import table_of
from steercap.lab.mechanism.comparison.layers import MODELS, AttentionPair, joined
from steercap.lab.mechanism.weights.applied import AttentionBlock

if TYPE_CHECKING:
    import pyarrow as pa

Floats = npt.NDArray[np.float64]

#: Number of angles from 0 to π at which a null is estimated; a cubic spline through these is within 1e-4 of its spread.
ANGLES: Final = 33
#: Names of the columns of the table of `attention_deltas`.
COLUMNS: Final = (
    "circuit", "layer", "relation", "source_group", "source", "target_group", "target", "cosine",
    "base", "instruct", "base_z", "instruct_z", "delta",
)  # fmt: skip


class RandomPairs(NamedTuple):
    """Pairs of orthogonal random vectors, of the same L2 norm as the vectors that are compared.

    Args:
        first, across: first and second vector of each pair, float32 [random, hidden].
    """

    first: Float[torch.Tensor, "random hidden"]
    across: Float[torch.Tensor, "random hidden"]

    @classmethod
    def drawn(cls, count: int, width: int, length: float, seed: int) -> RandomPairs:
        """Draw `count` pairs of vectors of `width` elements and L2 norm `length`, by a seed."""
        first, across = random_pairs(count, width, seed)
        return cls(first * length, across * length)

    def at(self, angle: float) -> Float[torch.Tensor, "random hidden"]:
        """Return, for each vector of `first`, one of the same norm at an angle to it, in radians."""
        return math.cos(angle) * self.first + math.sin(angle) * self.across


@dataclass(frozen=True, eq=False)
class RelationNull:
    """Mean and standard deviation of a function of two random vectors, by the angle between them.

    Args:
        mean, spread: functions from angles in radians, float64 [n], to the mean and standard deviation, [n].
    """

    mean: Callable[[Floats], Floats]
    spread: Callable[[Floats], Floats]

    @classmethod
    def drawn(cls, number: Callable[[torch.Tensor], torch.Tensor], pairs: RandomPairs, place: str) -> RelationNull:
        """Estimate the mean and standard deviation of a function of two vectors from random pairs.

        Args:
            number: function of the second vector of each pair, [random, hidden], that returns the number with the
                first, [random].
            pairs: random vectors.
            place: name of the block, for the error.

        Raises:
            UnsupportedModel: all pairs at some angle give the same number.
        """
        with extra("analysis"):
            from scipy.interpolate import CubicSpline

        angles = np.linspace(0, math.pi, ANGLES)
        drawn = torch.stack([number(pairs.at(angle)).double() for angle in angles])
        spreads = drawn.std(dim=1)
        if not bool((spreads > torch.finfo(torch.float32).eps * drawn.abs().max()).all()):
            raise UnsupportedModel(f"{place} gives all random vectors the same number, so nothing can be compared")
        return cls(CubicSpline(angles, drawn.mean(dim=1).numpy()), CubicSpline(angles, spreads.numpy()))

    def z(self, values: Floats, cosines: Floats) -> Floats:
        """Return z scores [n]: deviations of values [n] from the mean of random pairs of equal cosine [n]."""
        angles = np.arccos(np.clip(cosines, -1, 1))
        return (values - self.mean(angles)) / self.spread(angles)


@exact_products()
def scores(
    queries: Float[torch.Tensor, "n heads head_dim"], keys: Float[torch.Tensor, "m heads head_dim"]
) -> Float[torch.Tensor, "n m"]:
    """Return q · k / √head_dim of every query and every key, averaged over heads: [queries, keys]."""
    heads, head_dim = queries.shape[1:]
    return queries.flatten(1) @ keys.flatten(1).T / (heads * math.sqrt(head_dim))


def attention_deltas(
    pair: AttentionPair, named: LabelledRows, components: LabelledRows, pairs: RandomPairs
) -> pa.Table:
    """Compare the attention of one layer of both models on pairs of vectors, a source and a target.

    "qk" is the score of a source's query with a target's key: norm, q · k / √head_dim, mean over heads. "vo" is the
    cosine of a target with the output of attending to a source: norm, V, O, all heads together, the norm behind them.
    Rotary embedding is left out, as between two tokens at one position.

    Every vector is paired with itself ("same"), and with its opposite if a model has biases: without them the numbers
    are those of "same", negated. In "qk" the key is negated, in "vo" the source. Every component is paired with every
    named vector and every other component ("given"), in both orders.

    Args:
        pair: attention blocks of both models.
        named: vectors with names.
        components: components, which are paired with all vectors.
        pairs: random vectors of the nulls, the same for both models.

    Returns:
        Columns `circuit`, `layer`, `relation`, `source_group`, `source`, `target_group`, `target`, `cosine` (of source
        and target), `base` and `instruct` (score or cosine in each model), `base_z` and `instruct_z` (in standard
        deviations of random pairs of that cosine, through that model), `delta` (`instruct_z - base_z`).
    """
    everything = named + components
    first = range(len(named), len(everything))
    asked = [_PairSet("same", np.arange(len(everything)), np.arange(len(everything)))]
    if not all(block.is_odd for block in pair):
        asked.append(_PairSet("opposite", asked[0].sources, asked[0].targets))
    met = [(one, other) for one in first for other in range(len(everything)) if one != other]
    turned = [(other, one) for one, other in met if other < len(named)]
    for pairs_met in (met, turned):
        sources, targets = np.array(pairs_met, dtype=np.int64).reshape(-1, 2).T
        asked.append(_PairSet("given", sources, targets))
    tables = []
    for circuit, numbers in (("qk", _attention_scores), ("vo", _output_cosines)):
        found = [numbers(block, everything, asked, pairs) for block in pair]
        tables += [
            _columns(circuit, pair[0].layer, everything, one, each)
            for one, each in zip(asked, zip(*found, strict=True), strict=True)
        ]
    return table_of(joined(tables, COLUMNS))


class _PairSet(NamedTuple):
    """Pairs of vectors with one relation, by row index of the source and of the target: int64 [pairs] each."""

    relation: str
    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]

    @property
    def sign(self) -> int:
        return -1 if self.relation == "opposite" else 1

    def cosines(self, given: LabelledRows) -> Floats:
        """Return each pair's cosine, float64 [pairs]: exactly 1 or -1 for a row with itself or its opposite."""
        if self.relation != "given":
            return np.full(len(self.sources), float(self.sign))
        found: Floats = (given.units @ given.units.T).numpy()[self.sources, self.targets]
        return found


def _attention_scores(
    block: AttentionBlock, given: LabelledRows, sets: list[_PairSet], pairs: RandomPairs
) -> list[tuple[Floats, Floats]]:
    """Return the attention scores, and their z scores, of each set of pairs: float64 [pairs] each."""
    drawn = block.queries(pairs.first).flatten(1)
    scale = block.heads * math.sqrt(block.head_dim)

    def number(second: torch.Tensor) -> torch.Tensor:
        return (drawn * block.keys(second).flatten(1)).sum(1) / scale

    null = RelationNull.drawn(number, pairs, f"attention of layer {block.layer}")
    queries, keys = block.queries(given.rows), {1: block.keys(given.rows), -1: block.keys(-given.rows)}
    found = []
    for one in sets:
        values = scores(queries, keys[one.sign]).double().numpy()[one.sources, one.targets]
        found.append((values, null.z(values, one.cosines(given))))
    return found


def _output_cosines(
    block: AttentionBlock, given: LabelledRows, sets: list[_PairSet], pairs: RandomPairs
) -> list[tuple[Floats, Floats]]:
    """Return, for each set of pairs, cosines of the block's output for sources with targets, and z scores: [pairs].

    For "opposite" the source is negated: negating the target would only negate the result of "same".
    """
    drawn = torch.nn.functional.normalize(block.forward(pairs.first), dim=1)

    def number(second: torch.Tensor) -> torch.Tensor:
        return (drawn * torch.nn.functional.normalize(second, dim=1)).sum(1)

    null = RelationNull.drawn(number, pairs, f"attention of layer {block.layer}")
    outputs = {sign: block.forward(sign * given.rows).double() for sign in {one.sign for one in sets}}
    found = []
    for one in sets:
        cosines = torch.nn.functional.normalize(outputs[one.sign], dim=1) @ given.units.T
        values = cosines.numpy()[one.sources, one.targets]
        found.append((values, null.z(values, one.cosines(given))))
    return found


def _columns(
    circuit: str, layer: int, given: LabelledRows, pair_set: _PairSet, found: tuple[tuple[Floats, Floats], ...]
) -> dict[str, Any]:
    (base, base_z), (instruct, instruct_z) = found
    count, groups, names = len(pair_set.sources), np.array(given.groups), np.array(given.names)
    return {
        "circuit": np.full(count, circuit),
        "layer": np.full(count, layer),
        "relation": np.full(count, pair_set.relation),
        "source_group": groups[pair_set.sources],
        "source": names[pair_set.sources],
        "target_group": groups[pair_set.targets],
        "target": names[pair_set.targets],
        "cosine": pair_set.cosines(given),
        **dict(zip(MODELS, (base, instruct), strict=True)),
        "base_z": base_z,
        "instruct_z": instruct_z,
        "delta": instruct_z - base_z,
    }
