"""Comparison of two checkpoints, such as base and instruct, on the same vectors, by weights alone and layer by layer.

No engine is needed. Each layer of both is read once; its tables are stored in a folder, so that a run can be resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steercap.core.extras import extra
from steercap.core.protocols import Count, ProgressCallback
from steercap.core.spec import parse_layers, resolve_layers
from steercap.core.values import shown
from steercap.errors import InvalidSpec, UnsupportedModel
from steercap.files.base import blame, write_whole
from steercap.lab.mechanism.analysis.components import explained_by, principal_rows
from steercap.lab.mechanism.analysis.given import LabelledRows, Vectors, labelled, named, random_units
from steercap.lab.mechanism.analysis.pictures.cosines import draw_comparison
from steercap.lab.mechanism.analysis.tables import described, save_table
from steercap.lab.mechanism.comparison.attention import RandomPairs, attention_deltas
from steercap.lab.mechanism.comparison.layers import (
    BlockOutputs,
    differences,
    reinforcement,
    susceptibility,
)
from steercap.lab.mechanism.comparison.settings import (
    FOLDER,
    CheckpointComparison,
    CompareSettings,
    ComparisonDefinition,
)
from steercap.lab.mechanism.comparison.summaries import (
    COMPONENTS,
    focus_layers,
    group_tests,
    partners,
    summed,
)
from steercap.lab.mechanism.weights.model import ModelWeights

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "CheckpointComparison",
    "CompareSettings",
    "compare",
    "draw_comparison",
    "focus_layers",
    "group_tests",
    "partners",
]

#: Name of the random vectors' group in the table "susceptibility".
RANDOM: Final = "random"
#: Default number of principal components that are compared in detail.
COUNT: Final = 10


class _Part(msgspec.Struct, frozen=True):
    """Record of a compared block of one layer: names of its tables, and parts left out, with the reasons."""

    tables: list[str]
    left_out: dict[str, str]


def compare(
    base: ModelWeights,
    instruct: ModelWeights,
    groups: Mapping[str, Vectors],
    layer: int,
    *,
    components: Vectors | None = None,
    settings: CompareSettings | None = None,
    folder: str | Path | None = None,
    progress: ProgressCallback | None = None,
) -> CheckpointComparison:
    """Compare two checkpoints of one architecture and size on vectors of one layer.

    All vectors are scaled to the mean of their lengths. In memory are one block of both models in float32, or one
    expert of a layer with experts, and the tables.

    Args:
        base, instruct: the checkpoints; differences are instruct − base.
        groups: vectors of the residual stream by group, such as {"roles": ..., "traits": ...}.
        layer: layer of the vectors.
        components: vectors to compare in detail; by default the first ten principal components of all vectors at their
            own lengths, or as many as there are.
        settings: settings, see `CompareSettings`; None for the defaults.
        folder: folder of the tables, in Parquet, from which an interrupted run is resumed; None to write nothing.
        progress: function called with a `Progress` whenever the work advances.

    Raises:
        InvalidSpec: no vectors, vectors of another width, site or basis, two checkpoints of different sizes, or
            settings out of range.
        UnsupportedModel, LayerOutOfRange, InvalidFile: as for `ModelWeights.attention`.
        RunDiffers: the folder has another comparison.
    """
    run = _ComparisonRun.of(
        (base, instruct), groups, layer, components, CompareSettings() if settings is None else settings
    )
    where = None if folder is None else Path(folder)
    if where is not None and FOLDER.open(where, run.definition) is None:
        FOLDER.write(where, run.definition)
    parts: dict[str, list[pa.Table]] = {}
    left_out: dict[str, str] = dict(run.left_out)
    steps = run.steps
    count = Count("layers", len(steps), 0, progress)
    for step in steps:
        tables, missing = run.step(*step, where)
        left_out |= missing
        for name, table in tables.items():
            parts.setdefault(name, []).append(table)
        count.add()
    found = run.summed(parts, left_out)
    for name, table in found.tables.items():
        if where is not None:
            save_table(table, where / f"{name}.parquet")
    return found


@dataclass(frozen=True, eq=False)
class _ComparisonRun:
    """Run of `compare`, with resolved and checked vectors and settings."""

    base: ModelWeights
    instruct: ModelWeights
    named: LabelledRows
    components: LabelledRows
    through: LabelledRows  # the vectors that go through the matrices
    explained: dict[str, float | None]
    length: float
    layer: int
    settings: CompareSettings  # its layers resolved
    left_out: dict[str, str]

    @classmethod
    def of(
        cls,
        models: tuple[ModelWeights, ModelWeights],
        groups: Mapping[str, Vectors],
        layer: int,
        components: Vectors | None,
        settings: CompareSettings,
    ) -> _ComparisonRun:
        """Check the arguments of `compare`, scale and draw the vectors, and return the run; errors as for `compare`."""
        base, instruct = models
        if not isinstance(settings, CompareSettings):
            raise InvalidSpec(f"settings={shown(settings)}; give CompareSettings")
        (layer,) = resolve_layers(parse_layers([layer]), base.layers)
        if not isinstance(instruct, ModelWeights):
            raise InvalidSpec(f"instruct={shown(instruct)}; give ModelWeights.open(checkpoint)")
        own = labelled(groups, base, layer, instruct)
        if taken := {COMPONENTS, RANDOM} & set(groups):
            raise InvalidSpec(f"a group has the name {', '.join(taken)}, which the tables use themselves; rename it")
        if (base.width, base.layers) != (instruct.width, instruct.layers):
            raise InvalidSpec(f"{base!r} and {instruct!r} differ in size; give two checkpoints of one architecture")
        for name, value in base.structure.items():
            if value != (other := instruct.structure[name]):
                raise UnsupportedModel(f"{name} {value} and {other}; give two checkpoints of one architecture and size")
        site = named(next(iter(groups.values()))).site
        if components is not None and (other := named(components).site) != site:
            raise InvalidSpec(f"the components are of {other}, and the groups of {site}; give vectors of one site")
        axes = (
            principal_rows(own, COMPONENTS, COUNT)
            if components is None
            else labelled({COMPONENTS: components}, base, layer, instruct)
        )
        length = float(own.rows.norm(dim=1).mean())
        given, followed = own.scaled(length), axes.scaled(length)
        through = given.sampled(settings.per_group, settings.seed)
        left_out = {
            f"{group} through matrices": f"{missing} of {given.groups.count(group)}; per_group=None takes all"
            for group in groups
            if (missing := given.groups.count(group) - through.groups.count(group))
        }
        return cls(
            base,
            instruct,
            given,
            followed,
            through + followed + _random_rows(base.width, length, settings),
            explained_by(own, axes),
            length,
            layer,
            settings.resolved(layer, base.layers),
            left_out,
        )

    @property
    def definition(self) -> ComparisonDefinition:
        """Definition of the comparison, by which its folder is recognised."""
        digest = hashlib.sha256(self.named.rows.numpy().tobytes() + self.components.rows.numpy().tobytes())
        digest.update(msgspec.json.encode([self.named.labels, self.components.labels]))
        base, instruct = ({"name": one.name, "weights": one.fingerprint} for one in (self.base, self.instruct))
        return ComparisonDefinition(base, instruct, digest.hexdigest(), self.layer, self.settings)

    @property
    def steps(self) -> list[tuple[str, int]]:
        """Blocks to compare, (name of the method of `ModelWeights`, layer), in order."""
        layers = self.settings.layers
        attention = [("attention_block", layer) for layer in layers]
        neurons = [("feed_forward", layer) for layer in {*layers, *self.settings.feed_forward_layers}]
        return sorted(attention + neurons, key=lambda step: (step[1], step[0]))

    def step(self, block: str, layer: int, folder: Path | None) -> tuple[dict[str, pa.Table], dict[str, str]]:
        """Compare a block of both models, or load a stored result; return tables by name, and parts left out."""
        file = None if folder is None else folder / "parts" / f"{block}-{layer:03}.json"
        if file is not None and (found := _read_tables(file)) is not None:
            return found
        tables, left_out = self._compared(block, layer)
        if file is not None:
            for name, table in tables.items():
                save_table(table, file.with_name(f"{file.stem}-{name}.parquet"))
            with write_whole(file) as scratch:  # last, so that it stands for all of them
                scratch.write_bytes(msgspec.json.encode(_Part(list(tables), left_out)))
        return tables, left_out

    def summed(self, parts: Mapping[str, list[pa.Table]], left_out: dict[str, str]) -> CheckpointComparison:
        """Join and summarise the tables of all layers, and store their origin in the tables' metadata."""
        every = list(dict.fromkeys(self.named.groups))
        groups = [group for group in every if self.named.groups.count(group) > 1]
        if len(groups) < 2:
            groups = []
        if len(groups) < len(every):
            alone = [group for group in every if group not in groups]
            left_out["tests"] = f"{', '.join(alone)}: a test needs two groups of at least two vectors"
        tables = summed(parts, groups, self.explained, self.settings.correction)
        about = {
            "base": self.base.name,
            "instruct": self.instruct.name,
            "layer": self.layer,
            "length": self.length,
            "focus": focus_layers(tables["feed_forward"]),
            "left_out": left_out,
            **msgspec.structs.asdict(self.settings),
        }
        made = {name: described(table, **about) for name, table in tables.items()}
        return CheckpointComparison(made, about["focus"], left_out)

    def _compared(self, block: str, layer: int) -> tuple[dict[str, pa.Table], dict[str, str]]:
        tables, left_out = dict[str, Any](), dict[str, str]()
        pair: Any = tuple(getattr(weights, block)(layer) for weights in (self.base, self.instruct))
        if layer in self.settings.layers and (pair[0].matrices or pair[1].matrices):
            tables |= {"susceptibility": susceptibility(pair, self.through), "matrices": differences(pair)}
        elif layer in self.settings.layers:
            left_out[f"gate and up of layer {layer}"] = (
                "it has experts, each with its own matrices; its whole block is compared"
            )
        if block == "attention_block":
            pairs = RandomPairs.drawn(self.settings.nulls, self.base.width, self.length, self.settings.seed)
            tables["attention"] = attention_deltas(pair, self.named, self.components, pairs)
            if all(one.is_odd for one in pair):
                left_out["opposite"] = "without biases a vector's numbers with its opposite are its own, negated, z too"
        elif layer in self.settings.feed_forward_layers:
            outputs = BlockOutputs.of(pair, self.named + self.components)
            tables["feed_forward"] = outputs.altered()
            tables["decomposition"] = outputs.tail(len(self.components)).decomposed(self.named, self.settings.top)
            tables["reinforcement"] = reinforcement(pair, self.components)
        return tables, left_out


def _read_tables(file: Path) -> tuple[dict[str, pa.Table], dict[str, str]] | None:
    """Read the tables of a stored block, by name, and the parts left out; None if one of its files is missing.

    Raises:
        InvalidFile: a file is damaged.
    """
    with extra("analysis"):
        from pyarrow import parquet

    if not file.exists():
        return None
    with blame(file):
        part = msgspec.json.decode(file.read_bytes(), type=_Part)
    named = {name: file.with_name(f"{file.stem}-{name}.parquet") for name in part.tables}
    if not all(path.exists() for path in named.values()):
        return None
    tables = {}
    for name, path in named.items():
        with blame(path):
            tables[name] = parquet.read_table(path)
    return tables, part.left_out


def _random_rows(width: int, length: float, settings: CompareSettings) -> LabelledRows:
    rows = random_units(settings.random, width, settings.seed) * length
    return LabelledRows((RANDOM,) * len(rows), tuple(f"{RANDOM} {at}" for at in range(len(rows))), rows)
