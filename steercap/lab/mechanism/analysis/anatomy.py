"""Anatomy of vectors at one layer from weights alone: a table for each part of the analysis, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from steercap.core.display import brief
from steercap.core.values import choices, shown
from steercap.errors import InvalidSpec, UnknownName, UnsupportedModel
from steercap.lab.mechanism.analysis.components import ends, scores, scree
from steercap.lab.mechanism.analysis.geometry import cosines, merges
from steercap.lab.mechanism.analysis.given import Block, Vectors, in_stream, named, readers, writers
from steercap.lab.mechanism.analysis.heads import RANDOM, ov_circuit
from steercap.lab.mechanism.analysis.neurons import nearest_features, neuron_reads, neuron_writes
from steercap.lab.mechanism.analysis.pictures.blocks import plot_heads, plot_neurons, plot_tokens
from steercap.lab.mechanism.analysis.pictures.cosines import plot_cosines, plot_scores, plot_scree
from steercap.lab.mechanism.analysis.tokens import nearest_tokens, vector_lens
from steercap.lab.mechanism.weights.model import ModelWeights
from steercap.saes.sae import SAE
from steercap.steering.directions import DirectionSet

if TYPE_CHECKING:
    import pyarrow as pa

#: Description of each part of an anatomy, by name.
PARTS: Final[Mapping[str, str]] = {
    "cosines": "the cosine of every two vectors",
    "tree": "which vectors belong together",
    "scree": "how much principal components explain",
    "scores": "where the vectors lie on the first two components",
    "ends": "the vectors at either end of the first two components",
    "tokens": "the tokens whose logits a vector raises and lowers",
    "nearest": "the tokens whose rows of the unembedding are nearest",
    "heads": "how much of a vector each head writes on",
    "reads": "the neurons that read a vector",
    "writes": "the neurons that write it",
    "features": "the features of an SAE that are nearest",
}
SEVERAL: Final = frozenset({"cosines", "tree", "scree", "scores", "ends"})
NEURONS: Final = frozenset({"reads", "writes"})


class Anatomy(NamedTuple):
    """Result of `anatomy`.

    Args:
        tables: tables by part.
        left_out: reason by part, for the parts that do not apply and were left out.
    """

    tables: dict[str, pa.Table]
    left_out: dict[str, str]

    def __repr__(self) -> str:
        return brief(self)


def anatomy(
    vectors: Vectors,
    weights: ModelWeights,
    layer: int,
    *,
    sae: SAE | None = None,
    parts: Iterable[str] | None = None,
    top: int = 10,
    random: int = RANDOM,
    seed: int = 0,
) -> Anatomy:
    """Compute every table of `steercap.lab.mechanism.analysis` that needs no engine, for vectors at one layer.

    Args:
        vectors: vectors in the basis of the residual stream.
        weights: weights of the vectors' model.
        layer: layer of the vectors.
        sae: SAE of the same point, for "features".
        parts: names in `PARTS`; by default all that apply to these vectors, the others being `left_out`.
        top: number of tokens, neurons and features of each vector.
        random: number of random vectors to compare heads with; a tenth as many for components.
        seed: seed of the random vectors.

    Raises:
        UnknownName: a part does not exist.
        InvalidSpec: the SAE is of another layer.
        The errors of the requested parts.
    """
    directions, left_out = in_stream(vectors, weights), {}
    if parts is None:
        left_out = dict(_without(directions, layer, weights, sae))
        wanted = [part for part in PARTS if part not in left_out]
    else:
        wanted = list(parts)
    how: dict[str, Callable[[], pa.Table]] = {
        "cosines": lambda: cosines(directions, layers=[layer]),
        "tree": lambda: merges(directions, layer),
        "scree": lambda: scree(directions, layer, random=max(random // 10, 2), seed=seed),
        "scores": lambda: scores(directions, layer, count=min(2, len(directions) - 1)),
        "ends": lambda: ends(directions, layer, count=min(2, len(directions) - 1)),
        "tokens": lambda: vector_lens(directions, weights, layers=[layer], top=top),
        "nearest": lambda: nearest_tokens(directions, weights, layers=[layer], top=top),
        "heads": lambda: ov_circuit(directions, weights, layer, random=random, seed=seed),
        "reads": lambda: neuron_reads(directions, weights, layer, top=top),
        "writes": lambda: neuron_writes(directions, weights, layer, top=top),
        "features": lambda: _features(directions, sae, layer, top),
    }
    if unknown := [part for part in wanted if part not in how]:
        raise UnknownName(f"unknown part {shown(unknown[0])}; {choices(unknown[0], PARTS)}")
    tables = {}
    for part in wanted:
        try:
            tables[part] = how[part]()
        except (InvalidSpec, UnsupportedModel) as error:  # of vectors on one line, or of a model with experts
            if parts is not None or part not in (SEVERAL if isinstance(error, InvalidSpec) else NEURONS):
                raise
            left_out[part] = str(error)
    return Anatomy(tables, left_out)


def draw_anatomy(tables: Mapping[str, pa.Table], folder: str | Path, *, suffix: str = ".png") -> list[Path]:
    """Draw a picture of each part that has one, into a folder.

    Args:
        tables: tables from `anatomy`, by part.
        folder: folder of the pictures; files are named after the parts.
        suffix: file suffix that sets the format, ".png", ".pdf" or ".svg".

    Returns:
        Paths of the files, in the order of the tables.
    """
    how: dict[str, Callable[[pa.Table, Path], Path]] = {
        "cosines": lambda table, path: plot_cosines(table, path, tree=tables.get("tree")),
        "scree": plot_scree,
        "scores": plot_scores,
        "tokens": plot_tokens,
        "heads": plot_heads,
        "reads": plot_neurons,
        "writes": plot_neurons,
    }
    drawn = {part: table for part, table in tables.items() if part in how}
    if "scores" in drawn and len(set(drawn["scores"]["component"].to_pylist())) < 2:
        del drawn["scores"]
    return [how[part](table, Path(folder) / f"{part}{suffix}") for part, table in drawn.items()]


def _features(directions: DirectionSet, sae: SAE | None, layer: int, top: int) -> pa.Table:
    """Return `nearest_features`, of `layer` alone; InvalidSpec for an SAE of another."""
    table = nearest_features(directions, sae, top=top)  # type: ignore[arg-type]
    if (at := table["layer"][0].as_py()) != layer:
        raise InvalidSpec(
            f"sae={sae!r} is of layer {at}, and the vectors are of layer {layer}; give an SAE of this layer, or "
            f"compare across layers by nearest_features(..., layer={layer})"
        )
    return table


def _without(directions: DirectionSet, layer: int, weights: ModelWeights, sae: SAE | None) -> Iterable[tuple[str, str]]:
    """Yield (part, reason) for each part that does not apply to the vectors."""
    if len(named(directions)) < 2:
        yield from ((part, "it needs at least two vectors") for part in PARTS if part in SEVERAL)
    blocks: tuple[tuple[str, Block], ...] = (("heads", "attention"), ("reads", "mlp"), ("writes", "mlp"))
    for part, block in blocks:
        try:
            (writers if part == "writes" else readers)(weights, directions.site, layer, block, None)
        except InvalidSpec as error:
            yield part, str(error)
    if sae is None:
        yield "features", "no SAE was given"
