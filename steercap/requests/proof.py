"""What must hold of the rows of a model whose layers are read rightly, whatever the model is.

A tap that fires once a pass and reads finite rows may still read something else than its name says: a stream counted
twice, a part of a sum, a norm's input for its output. These equations need no second implementation of the model:

- the end of a layer is the beginning of the next;
- what a layer's blocks add is what the stream grows by, times the family's factor if it has one, each by itself where
  there is a row between them;
- in layers that norm their sums, what stands behind a norm is what the model's own norm makes of the sum;
- what the heads give is the values weighed by attention, of the queries and keys that were read;
- what a block adds is what its last projection makes of what the heads, or the neurons, give it;
- an edit changes the row of its own point by exactly what was added, and both equations hold of the edited rows;
- the lens closes: the model's own final norm and unembedding, given the last row of the stream, give the logits that
  the engine reports, with an edit of that row as well as without. Without, a norm would hide any factor. So does the
  unembedding alone, given the row behind the norm. Of a pooling model, the pooler stands for the unembedding, and what
  the engine pools of each token for the logits.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from steercap.captures.attention import Attending, weights_of
from steercap.core.attention import AttentionRule
from steercap.core.spec import Point

#: Where blocks read the stream and add to it.
STREAM: Final = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
#: What attention reads, and what it gives.
ATTENTION: Final = ("q", "k", "v", "z")
#: Where what the last projection of a block reads is read, and where what it adds.
PROJECTED: Final = {"z": "attn_out", "neurons": "mlp_out"}
#: Roundings to the rows' dtype, each of half an epsilon at most, in a row and in what is written of an edit; and in a
#: sum of rows of which each was rounded, and the stream between the blocks too.
_ROW: Final = 2.0
_SUM: Final = 4.0
#: The same for logits.
_LOGIT: Final = 2.0
#: What attention may make of a product of a query and a key, relative to it: on CUDA, Triton rounds both to TF32.
_PRODUCT: Final = 2.0**-9
#: How far rows and logits may differ that were computed in batches of other sizes: in float32, and in 16 bits.
_COMPUTED: Final = {torch.float32: 1e-3, torch.float64: 1e-3}
_COMPUTED_16: Final = 0.1


@dataclass(frozen=True)
class Claim:
    """One equation of the proof at start.

    Args:
        name: what must be what.
        error: by how much it is not, relative to the size of what is compared.
        allowed: how much may come of rounding.
    """

    name: str
    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether it is so."""
        return self.error <= self.allowed  # and not for NaN

    def __str__(self) -> str:
        return f"{self.name}: off by {self.error:.2g}, at most {self.allowed:.2g} can be rounding"


def equations(
    rows: Mapping[Point, torch.Tensor],
    factor: float | None,
    edit: tuple[Point, torch.Tensor] | None = None,
    absent: Container[Point] = frozenset(),
    *,
    normed: bool = False,
) -> Iterator[Claim]:
    """What must hold among rows of the same pass, as far as the points are there.

    Args:
        rows: of each point, [n, hidden].
        factor: what blocks' outputs are multiplied by before they are added; None where layers do more than add them.
        edit: where rows were edited, and what was added to each, [n, hidden]; None for nowhere.
        absent: what blocks would add in layers that are one block, and have no other.
        normed: whether layers norm their sums, so that `resid_post` is none; see `norm_of`.
    """
    named = _named(edit)

    def claim(name: str, at: Point, terms: Sequence[torch.Tensor], rounded: float) -> Claim:
        added = [edit[1]] if edit and edit[0] == at else []  # the row of a point is the edited one
        allowed = rounded * torch.finfo(rows[at].dtype).eps
        return Claim(name + named, relative([rows[at]], [*terms, *added]), allowed)

    def total(at: Point, before: str, blocks: Sequence[Point]) -> Iterator[Claim]:
        terms = [Point(at.layer, before), *(block for block in blocks if block not in absent)]
        if factor is None or len(terms) == 1 or not all(term in rows for term in terms):
            return
        times = "" if factor == 1 else f"{factor:.4g} × "
        added = " + ".join(block.site for block in terms[1:])
        name = f"{at} is {before} + {times}{f'({added})' if len(terms) > 2 else added}"
        whole = (before, at.site) == ("resid_pre", "resid_post")
        between = [edit[1]] if whole and edit and edit[0] == Point(at.layer, "resid_mid") else []
        yield claim(name, at, [rows[terms[0]], *(factor * rows[block].double() for block in terms[1:]), *between], _SUM)

    for point in rows:
        attention, feed_forward = Point(point.layer, "attn_out"), Point(point.layer, "mlp_out")
        if point.site == "resid_mid":
            yield from total(point, "resid_pre", [attention])
        if point.site != "resid_post":
            continue
        following = Point(point.layer + 1, "resid_pre")
        if following in rows:
            yield claim(f"{following} is {point}", following, [rows[point]], _ROW)
        if normed:
            continue
        yield from total(point, "resid_pre", [attention, feed_forward])
        yield from total(point, "resid_mid", [feed_forward])
    if (embedded := Point(0, "embed")) in rows and (first := Point(0, "resid_pre")) in rows:
        yield claim(f"{first} is {embedded}", first, [rows[embedded]], _ROW)


def attends(
    layer: int,
    rows: Mapping[Point, torch.Tensor],
    rule: AttentionRule,
    edit: tuple[Point, torch.Tensor] | None = None,
) -> Iterator[Claim]:
    """What must hold among what attention reads and gives, if all of it is there, and its rule is understood.

    Args:
        layer: whose.
        rows: of each point, those of a sequence's first tokens: [n, heads, head_dim].
        rule: how the layer weighs keys.
        edit: as for `equations`.
    """
    q, k, v, z = (rows.get(Point(layer, site)) for site in ATTENTION)
    if q is None or k is None or v is None or z is None or rule.unknown:
        return
    name = f"z[{layer}] is the values, weighed by attention{_named(edit)}"
    if v.shape[2] != z.shape[2] or q.shape[1] != z.shape[1]:
        shapes = [tuple(one.shape[1:]) for one in (q, v, z)]
        yield Claim("{}, where queries, values and z are {}, {} and {}".format(name, *shapes), math.inf, 0.0)
        return
    positions = torch.arange(len(q))
    (found,) = weights_of(Attending(rule, q, k, positions, positions))
    heads = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    weighed = torch.einsum("hqk,khd->qhd", found.weights.double(), heads)
    added = [edit[1].view_as(z)] if edit and edit[0] == Point(layer, "z") else []
    sharp = float(found.logits.where(found.logits > -torch.inf, 0.0).abs().max())
    yield Claim(name, relative([z], [weighed, *added]), computed(z.dtype) + _PRODUCT * sharp)


def projected(point: Point, block: Point, found: torch.Tensor, made: torch.Tensor) -> Claim:
    """What a block adds is what its last projection makes of what it reads.

    Args:
        point: where that is read.
        block: where what the block adds is read.
        found: its rows, [n, hidden].
        made: what the model makes of the rows at `point`, [n, hidden].
    """
    return Claim(f"{block} is what is projected of {point}", relative([found], [made]), computed(found.dtype))


def norm_of(point: Point, named: str, found: torch.Tensor, made: torch.Tensor) -> Claim:
    """What stands behind a norm is what the norm makes of a sum.

    Args:
        point: behind the norm.
        named: the sum.
        found: the rows at the point, [n, hidden].
        made: what the model's own norm makes of the sum, [n, hidden].
    """
    return Claim(f"{point} is the norm of {named}", relative([found], [made]), computed(found.dtype))


def edited(point: Point, clean: torch.Tensor, found: torch.Tensor, added: torch.Tensor, dtype: torch.dtype) -> Claim:
    """An edit changes the row of its point by what was added, [n, width] each.

    Args:
        point: where.
        clean: its rows without the edit.
        found: those with it.
        added: what was added to each.
        dtype: the model's, in which rows of a router are computed too, though they are float32.
    """
    return Claim(f"{point} grows by what is added there", relative([found], [clean, added]), computed(dtype))


def closes(
    named: str,
    reported: Sequence[float],
    found: Sequence[float],
    *,
    most: float,
    spread: float,
    total: float,
    size: float,
    dtype: torch.dtype,
) -> Claim:
    """The lens closes at one row.

    Args:
        named: where the row is read.
        reported: what the engine says of the most probable tokens: logits, or log probabilities.
        found: logits that the row gives for them.
        most: the greatest logit of all tokens that the row gives.
        spread: standard deviation of the logits of all tokens.
        total: the logarithm of the sum of their exponentials.
        size: the greatest magnitude among them.
        dtype: of the rows.
    """
    ours, theirs = torch.tensor(found).double(), torch.tensor(reported).double()
    # Logarithms of probabilities are logits less their total; a row's greatest logit must be among those of the best.
    error = min(float((ours - less - theirs).abs().max()) for less in (0.0, total))
    error = max(error, most - float(ours.max()))
    unit = max(spread, 1e-30)
    resolved = _LOGIT * torch.finfo(dtype).eps * max(size, float(theirs.abs().max())) / unit
    return Claim(f"the lens closes {named}", error / unit, computed(dtype) + resolved)


def pools(named: str, reported: torch.Tensor, found: torch.Tensor, dtype: torch.dtype) -> Claim:
    """What a pooling model gives for each token is what it makes of the token's row.

    Args:
        named: where the rows are read.
        reported: what the engine pooled, [n, width].
        found: what rows give, through the model's own norm and pooler, [n, width].
        dtype: of the rows.
    """
    return Claim(f"the pooler closes {named}", relative([reported], [found]), computed(dtype))


def computed(dtype: torch.dtype) -> float:
    """How far rows may differ, relative to their size, that were computed in batches of other sizes."""
    return _COMPUTED.get(dtype, _COMPUTED_16)


def worst(claims: Iterable[Claim]) -> Claim | None:
    """The claim that is furthest from holding, of those that do not."""
    wrong = [claim for claim in claims if not claim.holds]
    return max(wrong, key=lambda claim: claim.error / max(claim.allowed, 1e-30), default=None)


def _named(edit: tuple[Point, torch.Tensor] | None) -> str:
    return f", with an edit at {edit[0]}" if edit else ""


def relative(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """How far the sums of terms, [n, width] each, are apart: the worst row, relative to its greatest term."""
    terms = torch.stack([term.double().flatten(1) for term in (*left, *right)])
    apart = terms[: len(left)].sum(0) - terms[len(left) :].sum(0)
    return float((apart.norm(dim=1) / terms.norm(dim=2).amax(0).clamp(min=1e-30)).max())
