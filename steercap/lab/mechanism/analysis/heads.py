"""Attention heads that read a vector in queries, keys and values, and their outputs for it.

From weights alone (Elhage et al. 2021, A Mathematical Framework for Transformer Circuits). The gains of norms are
folded in; their scales, which depend on the row, are left out: they multiply all numbers of a block equally, or of a
head where its queries and keys have norms of their own (Qwen 3, Gemma 3), so that only z compares heads there. Rotary
embedding is left out: scores are of a query and a key at one position. Biases are left out: they add the same to the
queries, keys, values and outputs of every vector. A score's terms of a bias and one vector are left out, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float

from steercap.core.prompts import texts_of
from steercap.core.spec import Layers
from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec
from steercap.kernels.bits import exact_products
from steercap.lab.mechanism.analysis.given import (
    Vectors,
    in_stream,
    matrix,
    origin,
    random_pairs,
    random_units,
    readers,
    units,
)
from steercap.lab.mechanism.analysis.tables import once, table_of
from steercap.lab.mechanism.analysis.tokens import z_of
from steercap.lab.mechanism.weights.blocks import AttentionWeights
from steercap.lab.mechanism.weights.model import ModelWeights

if TYPE_CHECKING:
    import pyarrow as pa

#: Default number of random vectors with which heads are compared; an estimated standard deviation has 2 % error.
RANDOM = 1000


@exact_products()
def head_reads(
    vectors: Vectors,
    weights: ModelWeights,
    layer: int,
    *,
    layers: Layers | None = None,
    random: int = RANDOM,
    seed: int = 0,
) -> pa.Table:
    """Measure how strongly each head's queries, keys and values read a vector.

    Args:
        vectors: vectors in the basis of the residual stream.
        weights: weights of the vectors' model.
        layer: layer of the vectors.
        layers: layers of the heads; by default all that read a vector added at the vectors' point.
        random: number of random vectors of the same norm, uniform on the sphere.
        seed: seed of the random vectors.

    Returns:
        Columns `name`, `layer`, `part` ("q", "k", "v"), `head` (for "k" and "v" a key head, which several query heads
        may share), `strength` (L2 norm of the vector's query, key or value, over the vector's), `z` (in standard
        deviations of the strengths of random vectors, from their mean).

    Raises:
        InvalidSpec: the vectors have another width or basis, no layer reads them, or `random` is below 2.
        UnsupportedModel, LayerOutOfRange: as for `ModelWeights.attention`.
    """
    directions, given, drawn = _sets(vectors, weights, layer, random, seed)
    rows: list[dict[str, Any]] = []
    for at in readers(weights, directions.site, layer, "attention", layers):
        attention = weights.attention(at)
        for part, read in (("q", attention.query), ("k", attention.key), ("v", attention.value)):
            strengths, known = (torch.einsum("kdh,nh->nkd", read.weight, one).norm(dim=2) for one in (given, drawn))
            scores = _standard(strengths, known)
            rows += _by_head(directions, at, strength=strengths, z=scores, part=part)
    made = origin(directions, at=layer, random=random, seed=seed)
    return _table(rows, ("name", "layer", "part", "head", "strength", "z"), made)


@exact_products()
def qk_circuit(
    vectors: Vectors,
    weights: ModelWeights,
    layer: int,
    *,
    layers: Layers | None = None,
    random: int = RANDOM,
    seed: int = 0,
) -> pa.Table:
    """Measure the contribution to a head's attention score of one vector in the query's row and another in the key's.

    The score is the product of the head's query of the first vector with its key of the second, both of length 1,
    before scaling, such as by 1/√head_dim.

    Args:
        vectors, weights, layer, layers, random, seed: as for `head_reads`.

    Returns:
        Columns `query`, `key` (names: every ordered pair, of equal names too), `layer`, `head`, `score`, `z`: the
        score's distance from the mean of random pairs, in their standard deviations. Random pairs are of unit vectors
        with the cosine of the two given ones, such as 1 if query and key are the same.

    Raises:
        The errors of `head_reads`.
    """
    directions, given, drawn = _sets(vectors, weights, layer, random, seed)
    _, across = random_pairs(random, weights.width, seed)
    cosines = (given @ given.T).clamp(-1, 1)[:, :, None]
    sines = (1 - cosines.square()).sqrt()
    names, rows = list(directions), []
    for at in readers(weights, directions.site, layer, "attention", layers):
        attention = weights.attention(at)
        scores = torch.einsum("ahd,bhd->abh", _queries(attention, given), _keys(attention, given))
        asked = _queries(attention, drawn)
        alike, apart = ((asked * _keys(attention, keys)).sum(2).double() for keys in (drawn, across))
        both = ((alike - alike.mean(0)) * (apart - apart.mean(0))).sum(0) / (random - 1)
        mean = cosines * alike.mean(0) + sines * apart.mean(0)
        spread = (cosines**2 * alike.var(0) + sines**2 * apart.var(0) + 2 * cosines * sines * both).clamp(min=0).sqrt()
        z = torch.where(spread > 0, (scores - mean) / spread, 0.0)
        rows += [
            {"query": query, "key": key, "layer": at, "head": head, "score": score, "z": z_score}
            for (one, query), (other, key) in product(enumerate(names), repeat=2)
            for head, (score, z_score) in enumerate(
                zip(scores[one, other].tolist(), z[one, other].tolist(), strict=True)
            )
        ]
    made = origin(directions, at=layer, random=random, seed=seed)
    return _table(rows, ("query", "key", "layer", "head", "score", "z"), made)


@exact_products()
def ov_circuit(
    vectors: Vectors,
    weights: ModelWeights,
    layer: int,
    *,
    layers: Layers | None = None,
    random: int = RANDOM,
    seed: int = 0,
) -> pa.Table:
    """Measure the output of each head that attends to a row with a vector: its strength, and its part along the vector.

    Args:
        vectors, weights, layer, layers, random, seed: as for `head_reads`.

    Returns:
        Columns `name`, `layer`, `head`, `strength` (L2 norm of the output, over the vector's), `strength_z`, `copied`
        (the output's component along the vector, over the vector's length: above 0 the head copies the vector, below 0
        it removes it), `copied_z`, `cosine` (of the output with the vector). Each z is in standard deviations from the
        mean of random vectors; that mean is above 0 for heads that copy everything.

    Raises:
        The errors of `head_reads`.
    """
    directions, given, drawn = _sets(vectors, weights, layer, random, seed)
    rows: list[dict[str, Any]] = []
    for at in readers(weights, directions.site, layer, "attention", layers):
        attention = weights.attention(at)
        (strength, copied), known = _written(attention, given), _written(attention, drawn)
        rows += _by_head(
            directions,
            at,
            strength=strength,
            strength_z=_standard(strength, known[0]),
            copied=copied,
            copied_z=_standard(copied, known[1]),
            cosine=copied / strength.clamp(min=torch.finfo(torch.float32).tiny),
        )
    columns = ("name", "layer", "head", "strength", "strength_z", "copied", "copied_z", "cosine")
    return _table(rows, columns, origin(directions, at=layer, random=random, seed=seed))


@exact_products()
def ov_tokens(
    vectors: Vectors, weights: ModelWeights, layer: int, heads: Sequence[tuple[int, int]], *, top: int = 10
) -> pa.Table:
    """List the tokens whose logits a head directly raises most when it attends to a row with a vector.

    Args:
        vectors, weights, layer: arguments as for `head_reads`.
        heads: (layer, head) of each head.
        top: number of tokens for each head.

    Returns:
        Columns `name`, `layer`, `head`, `place` (from 0), `token_id`, `token`, `logit` (of the head's output, as by
        `vector_lens`), `z` (the logit in standard deviations of that token's logit through that head for random vectors
        of the same norm, in closed form).

    Raises:
        InvalidSpec: a head is not a pair of indices that the model has, or `top` is out of range.
        The errors of `head_reads` and `vector_lens`.
    """
    directions = in_stream(vectors, weights)
    given, head_unembeds = matrix(directions, layer), weights.unembedding
    if index_of(top) is None or not 1 <= top <= head_unembeds.vocabulary:
        raise InvalidSpec(f"top={shown(top)}; give a number of tokens, from 1 to {head_unembeds.vocabulary:,}")
    rows: list[dict[str, Any]] = []
    for at, head in heads:
        attention = weights.attention(at)
        if index_of(head) is None or not 0 <= head < attention.heads:
            raise InvalidSpec(f"head {shown(head)} of layer {at}; there are heads 0 to {attention.heads - 1}")
        values = attention.value.weight[head // attention.group]
        through = head_unembeds.read(attention.output[head].T).T  # [vocabulary, head_dim]
        logits = given @ values.T @ through.T
        lengths = ((through @ (values @ values.T)) * through).sum(1).clamp(min=0).sqrt()
        scores = z_of(logits, lengths, given)
        best = logits.topk(top, dim=1).indices
        for number, name in enumerate(directions):
            rows += [
                {"name": name, "layer": attention.layer, "head": head, "place": place, "token_id": token,
                 "logit": float(logits[number, token]), "z": float(scores[number, token])}
                for place, token in enumerate(best[number].tolist())
            ]  # fmt: skip
    for row, text in zip(rows, texts_of(weights.tokenizer, [row["token_id"] for row in rows]), strict=True):
        row["token"] = text
    made = origin(directions, at=layer, compared=head_unembeds.vocabulary, once=once(head_unembeds.vocabulary))
    return _table(rows, ("name", "layer", "head", "place", "token_id", "token", "logit", "z"), made)


def _sets(
    vectors: Vectors, weights: ModelWeights, layer: int, random: int, seed: int
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the vectors as a DirectionSet, at length 1, [names, hidden], and random unit vectors [random, hidden]."""
    directions = in_stream(vectors, weights)
    return directions, units(directions, layer), random_units(random, weights.width, seed)


def _queries(attention: AttentionWeights, rows: torch.Tensor) -> Float[torch.Tensor, "rows heads head_dim"]:
    return torch.einsum("kdh,nh->nkd", attention.query.weight, rows)


def _keys(attention: AttentionWeights, rows: torch.Tensor) -> Float[torch.Tensor, "rows heads head_dim"]:
    """Return the keys of rows, repeated for each query head: [rows, heads, head_dim]."""
    return torch.einsum("kdh,nh->nkd", attention.key.weight, rows).repeat_interleave(attention.group, dim=1)


def _written(attention: AttentionWeights, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the length of each head's output for unit rows, and its component along the row: [rows, heads] each."""
    values = torch.einsum("kdh,nh->nkd", attention.value.weight, rows).repeat_interleave(attention.group, dim=1)
    products = torch.einsum("khd,khe->kde", attention.output, attention.output)
    strength = (torch.einsum("nkd,kde->nke", values, products) * values).sum(2).clamp(min=0).sqrt()
    return strength, (torch.einsum("nh,khd->nkd", rows, attention.output) * values).sum(2)


def _standard(found: Float[torch.Tensor, "names heads"], known: Float[torch.Tensor, "random heads"]) -> torch.Tensor:
    """Standardise values by each head's mean and standard deviation over random vectors; 0 if these do not vary."""
    spread = known.std(dim=0)
    return torch.where(spread > 0, (found - known.mean(dim=0)) / spread, 0.0)


def _by_head(directions: Any, layer: int, part: str = "", **columns: torch.Tensor) -> list[dict[str, Any]]:
    """Return a record for each name and head; columns are [names, heads]."""
    first = next(iter(columns.values()))
    return [
        {"name": name, "layer": layer, "part": part, "head": head}
        | {column: float(values[number, head]) for column, values in columns.items()}
        for number, name in enumerate(directions)
        for head in range(first.shape[1])
    ]


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...], made: dict[str, Any]) -> pa.Table:
    found = {name: [row[name] for row in rows] for name in columns}
    for column, key in (("z", "compared"), ("copied_z", "compared")):
        if column in found and key not in made:
            numbers = len({(row.get("part"), row["layer"], row["head"]) for row in rows})
            made = {**made, key: numbers, "once": once(numbers)}
    return table_of(found, **made)
