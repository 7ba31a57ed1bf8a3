"""Tokens whose logits a vector raises and lowers, and tokens whose rows of the unembedding are nearest to it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float

from steercap.core.prompts import texts_of
from steercap.core.spec import Layers
from steercap.core.values import count_of, shown
from steercap.errors import InvalidSpec
from steercap.kernels.bits import exact_products
from steercap.lab.mechanism.analysis.given import Vectors, chosen_layers, in_stream, matrix, origin, units
from steercap.lab.mechanism.analysis.tables import once, table_of
from steercap.lab.mechanism.weights.model import ModelWeights

if TYPE_CHECKING:
    import pyarrow as pa

#: Treatment of the final norm before the unembedding; see `vector_lens`.
Norm: TypeAlias = Literal["folded", "applied", "none"]
#: Matrix whose rows a vector is compared with.
Rows: TypeAlias = Literal["unembedding", "embedding"]
#: Sort key of tokens.
By: TypeAlias = Literal["logit", "z"]
ENDS: Final = ("raised", "lowered")


@exact_products()
def vector_lens(
    vectors: Vectors,
    weights: ModelWeights,
    *,
    layers: Layers | None = None,
    top: int = 10,
    norm: Norm = "folded",
    by: By = "logit",
) -> pa.Table:
    """List the tokens whose logits a vector raises and lowers most, by the model's final norm and unembedding.

    Args:
        vectors: vectors in the basis of the residual stream.
        weights: weights of the vectors' model.
        layers: layers of the vectors; all by default.
        top: number of tokens for either end.
        norm: treatment of the final norm. "folded": its gain and any centring, without its scale, which depends on the
            row and is the same for all tokens, so logits are those of a row of root mean square 1. "applied": the norm
            itself, as if the vector were a whole row, with the model's constants and soft-capping; for a captured row,
            this is the logit lens. "none": the unembedding alone.
        by: sort key of tokens: "logit", as in the model; or "z", so that tokens whose logits any vector changes much do
            not come first.

    Returns:
        Columns `name`, `layer`, `end` ("raised" or "lowered"), `place` (from 0), `token_id`, `token`, `logit`, `z`: the
        logit in standard deviations of that token's logit under random vectors of the same norm, in closed form
        √hidden · cos(vector, the direction the token's logit reads). With norm="applied" logits are not linear, so `z`
        is that of norm="folded".

    Raises:
        InvalidSpec: the vectors have another width or basis, `norm` or `by` is unknown, or `top` is out of range.
        UnsupportedModel: the final norm cannot be folded.
        The errors of `cosines`.
    """
    directions = in_stream(vectors, weights)
    for said, given_word, words in (("norm", norm, get_args(Norm)), ("by", by, get_args(By))):
        if given_word not in words:
            raise InvalidSpec(f"{said}={shown(given_word)}; give one of {', '.join(words)}")
    head = weights.unembedding
    count = count_of(top, "top", 1, head.vocabulary)
    rows: list[dict[str, Any]] = []
    for layer in chosen_layers(directions, layers):
        given = matrix(directions, layer)
        folded = head.read(given)
        logits = {"folded": folded, "applied": head.logits(given), "none": given @ head.weight.T}[norm]
        lengths = head.weight.norm(dim=1) if norm == "none" else head.reading_lengths
        scores = z_of(logits if norm == "none" else folded, lengths, given)
        for at, name in enumerate(directions):
            for end, sign in zip(ENDS, (1, -1), strict=True):
                best = ((scores if by == "z" else logits)[at] * sign).topk(count).indices.tolist()
                rows += [
                    {"name": name, "layer": layer, "end": end, "place": place, "token_id": token,
                     "logit": float(logits[at, token]), "z": float(scores[at, token])}
                    for place, token in enumerate(best)
                ]  # fmt: skip
    made = origin(directions, norm=norm, by=by, compared=head.vocabulary, once=once(head.vocabulary))
    return _with_texts(rows, weights, ("name", "layer", "end", "place", "token_id", "token", "logit", "z"), made)


@exact_products()
def nearest_tokens(
    vectors: Vectors,
    weights: ModelWeights,
    *,
    layers: Layers | None = None,
    top: int = 10,
    of: Rows = "unembedding",
) -> pa.Table:
    """List the tokens whose rows of the unembedding, or of the embedding, have the greatest cosine with a vector.

    No norm is folded in: this is geometry; `vector_lens` has the model's logits.

    Args:
        vectors, weights, layers, top: arguments as for `vector_lens`; `top` of the greatest cosines.
        of: matrix to compare with, "unembedding" or "embedding".

    Returns:
        Columns `name`, `layer`, `place` (from 0), `token_id`, `token`, `cosine`, `z`: √hidden · cosine, standard normal
        for random vectors.

    Raises:
        InvalidSpec: as for `vector_lens`.
        UnsupportedModel, InvalidFile: as for `Unembedding.load`.
    """
    directions = in_stream(vectors, weights)
    if of not in get_args(Rows):
        raise InvalidSpec(f"of={shown(of)}; give one of {', '.join(get_args(Rows))}")
    table = weights.unembedding.weight if of == "unembedding" else weights.embedding
    count = count_of(top, "top", 1, len(table))
    lengths = table.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)  # of unused tokens, rows may be zero
    rows: list[dict[str, Any]] = []
    for layer in chosen_layers(directions, layers):
        found = (units(directions, layer) @ table.T / lengths).topk(count, dim=1)
        for name, values, tokens in zip(directions, found.values.tolist(), found.indices.tolist(), strict=True):
            rows += [
                {"name": name, "layer": layer, "place": place, "token_id": token, "cosine": value,
                 "z": value * math.sqrt(directions.width)}
                for place, (value, token) in enumerate(zip(values, tokens, strict=True))
            ]  # fmt: skip
    made = origin(directions, of=of, compared=len(table), once=once(len(table)))
    return _with_texts(rows, weights, ("name", "layer", "place", "token_id", "token", "cosine", "z"), made)


def z_of(
    values: Float[torch.Tensor, "names readers"],
    lengths: Float[torch.Tensor, " readers"],
    vectors: Float[torch.Tensor, "names hidden"],
) -> Float[torch.Tensor, "names readers"]:
    """Divide `values`, products of vectors with readers, by their standard deviation for random vectors of equal norm.

    A random vector is uniform on the sphere, so its product with a reader of norm `lengths` has mean 0 and standard
    deviation lengths · norm / √hidden, exactly; for widths that are not tiny it is normal.
    """
    spread = lengths * vectors.norm(dim=1, keepdim=True) / math.sqrt(vectors.shape[1])
    return torch.where(spread > 0, values / spread, 0.0)


def _with_texts(
    rows: list[dict[str, Any]], weights: ModelWeights, columns: tuple[str, ...], made: dict[str, Any]
) -> pa.Table:
    """Build a table of some columns from records, with the text of each `token_id` as `token`."""
    distinct = sorted({row["token_id"] for row in rows})
    known = dict(zip(distinct, texts_of(weights.tokenizer, distinct), strict=True))
    for row in rows:
        row["token"] = known[row["token_id"]]
    return table_of({name: [row[name] for row in rows] for name in columns}, **made)
