"""Settings of a comparison of two checkpoints, the definition of its folder, and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from steercap.core.display import brief
from steercap.core.spec import Layers, parse_layers, resolve_layers
from steercap.core.values import count_of
from steercap.files.folder import FolderKind
from steercap.lab.mechanism.comparison.summaries import Correction, check_correction

if TYPE_CHECKING:
    import pyarrow as pa

#: Minimum value of each setting that is a whole number.
LEAST: Final = {"nulls": 20, "random": 2, "top": 1, "per_group": 0, "seed": 0}


class CompareSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `compare`, a comparison of two checkpoints.

    Args:
        layers: layers whose matrices and attention are compared; by default five before the vectors' layer to five
            after it.
        feed_forward_layers: layers whose feed-forward blocks are compared; by default seven before to two after.
        per_group: number of vectors of each group that go through the matrices, drawn by the seed; None for all.
        random: number of random vectors that go through the matrices, 2 at least.
        nulls: number of random pairs with which attention scores are compared, 20 at least. With 20, the standard
            deviation of a z is 8 % too large, with 200 it is 0.8 %, as the pairs' mean and spread are estimates.
        seed: seed of all draws.
        top: number of projections of each output in the table "decomposition".
        correction: correction of p in the tests between groups, over all layers and groups of one measure.

    Raises:
        InvalidSpec: a count is too small.
        UnknownName: there is no such correction.
    """

    layers: Any = None
    feed_forward_layers: Any = None
    per_group: int | None = 5
    random: int = 20
    nulls: int = 200
    seed: int = 0
    top: int = 15
    correction: Correction = "holm"

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if (name, value) != ("per_group", None):
                msgspec.structs.force_setattr(self, name, count_of(value, name, least))
        check_correction(self.correction)

    def resolved(self, layer: int, count: int) -> CompareSettings:
        """Return the settings with layers as ascending lists, for vectors of `layer` in a model of `count` layers.

        Raises:
            InvalidSpec, LayerOutOfRange: the model does not have a layer.
        """
        return msgspec.structs.replace(
            self,
            layers=_resolved(self.layers, count, range(layer - 5, layer + 6)),
            feed_forward_layers=_resolved(self.feed_forward_layers, count, range(layer - 7, layer + 3)),
        )


class ComparisonDefinition(msgspec.Struct, frozen=True):
    """Definition of a comparison: everything that its tables depend on.

    Args:
        base, instruct: "name" of each checkpoint, and "weights", `ModelWeights.fingerprint`.
        vectors: SHA-256 of all vectors, their names and groups.
        layer: layer of the vectors.
        settings: settings, with resolved layers.
    """

    base: dict[str, str]
    instruct: dict[str, str]
    vectors: str
    layer: int
    settings: CompareSettings


FOLDER: Final = FolderKind("comparison.json", ComparisonDefinition, "comparison")


class CheckpointComparison(NamedTuple):
    """Result of `compare`.

    Args:
        tables: tables by name: "susceptibility", "matrices", "attention", "partners", "components", "feed_forward",
            "by_layer", "tests", "altered", "decomposition", "reinforcement".
        focus: layer at which the feed-forward blocks differ most on the components, by measure.
        left_out: reason by name of each part that was left out.
    """

    tables: dict[str, pa.Table]
    focus: dict[str, int]
    left_out: dict[str, str]

    def __repr__(self) -> str:
        return brief(self)


def _resolved(given: Layers | None, count: int, around: range) -> list[int]:
    """Return the given layers, or for None those of `around` that exist in a model of `count` layers, ascending."""
    if given is None:
        return [layer for layer in around if 0 <= layer < count]
    return sorted(resolve_layers(parse_layers(given), count))
