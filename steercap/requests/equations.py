"""Equations that the captured rows of any correctly tapped model must satisfy, and those of its family.

A tap that fires once a pass and reads finite rows may still read something other than its name says: a stream counted
twice, a part of a sum, a norm's input for its output. These equations need no second implementation of the model:

- the end of a layer is the beginning of the next;
- the stream grows by the outputs of the layer's blocks, times the family's factor if it has one; each block is checked
  by itself where there is a row between them;
- in layers that norm their sums, the row behind a norm is the model's own norm of the sum;
- the heads' outputs are the values weighed by attention, from the queries and keys that were read;
- a block's output is its last projection of the heads' outputs, or of the neurons;
- an edit changes the row of its own point by exactly what was added, and these equations hold of the edited rows too;
- the lens closes: the model's own final norm and unembedding, applied to the last row of the stream, return the logits
  that the engine reports, with an edit of that row as well as without. Without an edit, a norm would hide any factor.
  The same holds for the unembedding alone, applied to the row behind the norm. For a pooling model, the pooler replaces
  the unembedding, and the engine's pooled output for each token the logits.

With several residual streams (mHC), equations connect the inputs and outputs of the stream operators:

- behind a block, each stream is the sum of the streams before it, mixed by the residual mix, and of the block's output
  times its post mix; the streams behind a layer are those before the next, and behind the last the final ones;
- the residual mix distributes streams over streams, so the weights into each stream add up to 1 (last Sinkhorn step).

These do not check that a block reads the collapsed streams, since the collapse weights are no point. An edit of the
streams shows it, since the block then adds another row.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from steercap.config import ADDED
from steercap.core.attention import AttentionRule
from steercap.core.spec import Point
from steercap.kernels.attention import Attending, weights_of

if TYPE_CHECKING:
    from steercap.engine.engine import Engine

#: Sites of a layer's two blocks, in models with several streams: streams before the block, post mix, residual mix,
#: block output.
BLOCKS: Final = (
    ("mhc_streams_pre_attn", "mhc_attn_post_mix", "mhc_attn_res_mix", "attn_out"),
    ("mhc_streams_pre_mlp", "mhc_ffn_post_mix", "mhc_ffn_res_mix", "mlp_out"),
)
#: All sites of models with several streams: those of the blocks, and the final streams.
STREAMS: Final = (*BLOCKS[0], *BLOCKS[1], "mhc_streams_final")
#: Roundings, in epsilons of the rows' dtype, of a mixed stream: of the block's output, of the streams, of their sum.
_MIXED: Final = 4.0
#: Allowed distance from 1 of the sum of weights into a stream: each Sinkhorn step adds 1e-6 to its divisor.
_STOCHASTIC: Final = 1e-4


def mixes(
    rows: Mapping[Point, torch.Tensor], end: Point, edit: tuple[Point, torch.Tensor] | None = None
) -> Iterator[Claim]:
    """Yield the claims on mixed residual streams that rows of one forward pass must satisfy, for the points present.

    Args:
        rows: rows of each point, [n, *shape of the point].
        end: point of the final streams.
        edit: the edited point and the vectors added to each of its rows, [n, width]; None without an edit.
    """
    named = f", with an edit at {edit[0]}" if edit else ""
    layers = sorted({point.layer for point in rows})
    for layer in layers:
        after = end if layer == end.layer else Point(layer + 1, BLOCKS[0][0])
        for (before, *terms), following in zip(BLOCKS, (Point(layer, BLOCKS[1][0]), after), strict=True):
            found = [rows.get(Point(layer, site)) for site in (before, *terms)]
            streams, post, res, added = found
            if res is not None:
                missed = (res.double().sum(1) - 1).abs().max()
                yield Claim(f"what {terms[1]}[{layer}] sends to a stream is 1{named}", float(missed), _STOCHASTIC)
            if streams is None or post is None or res is None or added is None or following not in rows:
                continue
            parts = torch.einsum("nij,nid->nijd", res.double(), streams.double())
            given = torch.einsum("nj,nd->njd", post.double(), added.double())
            own = [edit[1].view_as(given)] if edit and edit[0] == following else []
            error = relative([rows[following]], [*parts.unbind(1), given, *own])
            name = f"{following} is {before}, mixed, and {terms[2]}{named}"
            yield Claim(name, error, _MIXED * torch.finfo(rows[following].dtype).eps)


def of_rows(
    engine: Engine, rows: Mapping[Point, torch.Tensor], edit: tuple[Point, torch.Tensor] | None = None
) -> Iterator[Claim]:
    """Yield the claims that rows of one forward pass must satisfy, by the model's family; see `equations`."""
    family = engine.family
    if family.mhc:
        yield from mixes(rows, engine.end, edit)
    blocks = {Point(layer, site) for layer in range(engine.vllm.num_layers) for site in ADDED}
    absent = {point for point in blocks if family.single and not engine.exists(point)}
    yield from equations(rows, family.factor(engine.vllm.config), edit, absent, normed=bool(family.norms))
    if not family.gated:
        for layer, rule in engine.attention.items():
            yield from attends(layer, rows, rule, edit)


async def of_projections(
    engine: Engine, number: int, rows: Mapping[Point, torch.Tensor], edit: Point | None = None
) -> AsyncIterator[Claim]:
    """Yield claims that each block's output equals its last projection of the rows that the projection reads.

    Workers of data-parallel engine `number` project `rows`, [n, *shape of the point] by point; if there is an edited
    point, `edit`, of that point alone.
    """
    family = engine.family
    read = rows if edit is None else (edit,)
    pairs = [(point, Point(point.layer, PROJECTED[point.site])) for point in read if point.site in PROJECTED]
    for point, block in pairs:
        neurons = point.site == "neurons"
        if block in rows and not (neurons and _experts(engine, point.layer)):
            made = await engine.workers.project(point.layer, point.site, rows[point], number)
            scaled = family.scaled(engine.vllm.config) * made if neurons else made
            yield projected(point, block, rows[block], scaled, edited=edit is not None)


async def of_norms(engine: Engine, number: int, rows: Mapping[Point, torch.Tensor]) -> AsyncIterator[Claim]:
    """Yield claims that rows behind a norm equal the model's own norm of the sum before it.

    Yields:
        A claim for each norm whose points are in `rows`, computed by data-parallel engine `number`.
    """
    family = engine.family
    if not family.norms:
        return
    for layer in range(engine.vllm.num_layers):
        middle, inside, added, end = (Point(layer, site) for site in ("resid_mid", "mlp_in", "mlp_out", "resid_post"))
        if inside in rows and middle in rows:
            made = await engine.workers.project(layer, "resid_mid", rows[middle], number)
            yield norm_of(inside, "resid_mid", rows[inside], made)
        if inside in rows and added in rows and end in rows:
            made = await engine.workers.project(layer, "mlp_out", rows[inside] + rows[added], number)
            yield norm_of(end, "mlp_in + mlp_out", rows[end], made)


def _experts(engine: Engine, layer: int) -> bool:
    """Return whether a layer has a router, so that experts may add to the output of its neurons.

    Sites of neurons that were derived from the code are those of a layer without experts.
    """
    return not engine.family.derived and engine.exists(Point(layer, "router"))


#: Sites of the residual stream and of the blocks' outputs.
EQUATION_SITES: Final = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
#: Sites of attention's inputs, and of its output.
ATTENTION: Final = ("q", "k", "v", "z")
#: Site of the output of each block's last projection, by the site of the projection's input.
PROJECTED: Final = {"z": "attn_out", "neurons": "mlp_out"}
#: Roundings, of half an epsilon of the rows' dtype each: in an edited row, and in a sum of rounded rows with the stream
#: between the blocks.
_ROW: Final = 2.0
_SUM: Final = 4.0
#: The same for logits.
_LOGIT: Final = 2.0
#: Relative error of attention's product of a query and a key: on CUDA, Triton rounds both to TF32.
_PRODUCT: Final = 2.0**-9
#: Allowed relative difference of rows and logits computed in batches of other sizes: in float32, and in 16 bits.
_COMPUTED: Final = {torch.float32: 1e-3, torch.float64: 1e-3}
_COMPUTED_16: Final = 0.1
#: The same for edited rows in 16 bits where more than rounding differs: a router chooses another of two close experts,
#: or a layer multiplies rounding errors.
_EDITED_16: Final = 0.5


@dataclass(frozen=True)
class Claim:
    """Equation that the proof at an engine's start has evaluated on captured rows.

    Args:
        name: the equation in words.
        error: difference of the two sides, relative to their size.
        allowed: greatest error that rounding explains.
        sites: sites that are dropped if the claim fails, where sites were derived from code; () for the stream itself.
    """

    name: str
    error: float
    allowed: float
    sites: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """True if the error is at most what rounding allows; False for NaN."""
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
    """Yield the claims on the residual stream that rows of one forward pass must satisfy, for the points present.

    Args:
        rows: rows of each point, [n, hidden].
        factor: factor of the blocks' outputs before they are added; None if layers do more than add them, so that only
            `resid_mid`, where there is one, is the stream before plus the attention block's output.
        edit: the edited point and the vectors added to each of its rows, [n, hidden]; None without an edit.
        absent: block outputs that layers with a single block do not have.
        normed: True if layers norm their sums, so that `resid_post` is no plain sum; see `norm_of`.
    """
    named = _named(edit)

    def claim(name: str, at: Point, terms: Sequence[torch.Tensor], rounded: float, sites: Iterable[str] = ()) -> Claim:
        added = [edit[1]] if edit and edit[0] == at else []  # the row of a point is the edited one
        allowed = rounded * torch.finfo(rows[at].dtype).eps
        return Claim(name + named, relative([rows[at]], [*terms, *added]), allowed, tuple(sites))

    def total(at: Point, before: str, blocks: Sequence[Point]) -> Iterator[Claim]:
        terms = [Point(at.layer, before), *(block for block in blocks if block not in absent)]
        scale = 1.0 if factor is None and at.site == "resid_mid" else factor
        if scale is None or len(terms) == 1 or not all(term in rows for term in terms):
            return
        times = "" if scale == 1 else f"{scale:.4g} × "
        added = " + ".join(block.site for block in terms[1:])
        name = f"{at} is {before} + {times}{f'({added})' if len(terms) > 2 else added}"
        whole = (before, at.site) == ("resid_pre", "resid_post")
        between = [edit[1]] if whole and edit and edit[0] == Point(at.layer, "resid_mid") else []
        summed = [rows[terms[0]], *(scale * rows[block].double() for block in terms[1:]), *between]
        about = sorted({at.site, *(term.site for term in terms)} - {"resid_pre", "resid_post"})
        yield claim(name, at, summed, _SUM, about)

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
    """Yield the claim that attention's output follows from its queries, keys and values.

    Nothing is yielded if one of these points is missing or the attention rule is unknown.

    Args:
        layer: index of the layer.
        rows: rows of each point for a sequence's first tokens: [n, heads, head_dim].
        rule: the layer's attention rule.
        edit: as for `equations`.
    """
    q, k, v, z = (rows.get(Point(layer, site)) for site in ATTENTION)
    if q is None or k is None or v is None or z is None or rule.unknown:
        return
    name = f"z[{layer}] is the values, weighed by attention{_named(edit)}"
    if v.shape[2] != z.shape[2] or q.shape[1] != z.shape[1]:
        shapes = [tuple(one.shape[1:]) for one in (q, v, z)]
        yield Claim(
            "{}, where queries, values and z are {}, {} and {}".format(name, *shapes), math.inf, 0.0, ("q", "k", "v")
        )
        return
    positions = torch.arange(len(q))
    (found,) = weights_of(Attending(rule, q, k, positions, positions))
    heads = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    weighed = torch.einsum("hqk,khd->qhd", found.weights.double(), heads)
    added = [edit[1].view_as(z)] if edit and edit[0] == Point(layer, "z") else []
    sharp = float(found.logits.where(found.logits > -torch.inf, 0.0).abs().max())
    yield Claim(name, relative([z], [weighed, *added]), computed(z.dtype) + _PRODUCT * sharp, ("q", "k", "v"))


def projected(point: Point, block: Point, rows: torch.Tensor, made: torch.Tensor, *, edited: bool = False) -> Claim:
    """Return the claim that a block's output is its last projection of the rows that the projection reads.

    Args:
        point: point of the projection's input.
        block: point of the block's output.
        rows: captured rows of the block's output, [n, hidden].
        made: the model's projection of the rows at `point`, [n, hidden].
        edited: True if the rows at `point` are edited ones.
    """
    named = f"{block} is what is projected of {point}{', with an edit there' if edited else ''}"
    return Claim(named, relative([rows], [made]), computed(rows.dtype), (point.site,))


def norm_of(point: Point, named: str, rows: torch.Tensor, made: torch.Tensor) -> Claim:
    """Return the claim that the rows behind a norm are that norm of a sum.

    Args:
        point: point behind the norm.
        named: name of the sum.
        rows: captured rows at the point, [n, hidden].
        made: the model's own norm of the sum, [n, hidden].
    """
    return Claim(f"{point} is the norm of {named}", relative([rows], [made]), computed(rows.dtype))


def edited(
    point: Point, clean: torch.Tensor, rows: torch.Tensor, added: torch.Tensor, dtype: torch.dtype, *, alone: bool
) -> Claim:
    """Return the claim that an edit changes the rows of its point by exactly the added vectors, [n, width] each.

    Args:
        point: the edited point.
        clean: rows of the point without the edit.
        rows: rows of the point with the edit.
        added: vector added to each row.
        dtype: the model's dtype; rows of a router are computed in it too, though they are float32.
        alone: True if the edited request ran alone, as the clean one did, so that both were computed alike.
    """
    named = f"{point} grows by what is added there"
    error, allowed = relative([rows], [clean, added]), computed(dtype)
    if error > allowed and dtype.itemsize == 2 and not alone:
        # Roundings are about orthogonal to a random vector: along it, rows must grow by 1, to a quarter.
        vector, change = added.double().flatten(), (rows.double() - clean.double()).flatten()
        strength = float(change @ vector / (vector @ vector))
        error, allowed = max(error, 2 * abs(strength - 1)), _EDITED_16
    return Claim(named, error, allowed, (point.site,))


def lens_claim(
    named: str,
    reported: Sequence[float],
    logits: Sequence[float],
    *,
    most: float,
    spread: float,
    total: float,
    size: float,
    dtype: torch.dtype,
) -> Claim:
    """Return the claim that the logits of the logit lens for one row equal those that the engine reports.

    Args:
        named: description of the row, for the claim's name.
        reported: the engine's values for the most probable tokens: logits, or log probabilities.
        logits: the lens's logits for the same tokens.
        most: greatest of the lens's logits of all tokens.
        spread: standard deviation of the lens's logits of all tokens.
        total: logarithm of the sum of exponentials of the lens's logits of all tokens.
        size: greatest magnitude of the lens's logits of all tokens.
        dtype: dtype of the rows.
    """
    ours, theirs = torch.tensor(logits).double(), torch.tensor(reported).double()
    # Log probabilities are logits less their total; the row's greatest logit must belong to one of the reported tokens.
    error = min(float((ours - less - theirs).abs().max()) for less in (0.0, total))
    error = max(error, most - float(ours.max()))
    unit = max(spread, 1e-30)
    resolved = _LOGIT * torch.finfo(dtype).eps * max(size, float(theirs.abs().max())) / unit
    return Claim(f"the lens closes {named}", error / unit, computed(dtype) + resolved)


def pools(named: str, reported: torch.Tensor, pooled: torch.Tensor, dtype: torch.dtype) -> Claim:
    """Return the claim that a pooling model's output for each token is its norm and pooler applied to the token's row.

    Args:
        named: description of the rows, for the claim's name.
        reported: the engine's pooled output, [n, width].
        pooled: pooled output computed from the rows through the model's own norm and pooler, [n, width].
        dtype: dtype of the rows.
    """
    return Claim(f"the pooler closes {named}", relative([reported], [pooled]), computed(dtype))


def computed(dtype: torch.dtype) -> float:
    """Return the largest relative difference expected between rows computed in batches of different sizes."""
    return _COMPUTED.get(dtype, _COMPUTED_16)


def worst(claims: Iterable[Claim]) -> Claim | None:
    """Return the failed claim with the largest error relative to what it allows; None if all hold."""
    wrong = [claim for claim in claims if not claim.holds]
    return max(wrong, key=lambda claim: claim.error / max(claim.allowed, 1e-30), default=None)


def _named(edit: tuple[Point, torch.Tensor] | None) -> str:
    return f", with an edit at {edit[0]}" if edit else ""


def relative(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """Return the greatest distance of two sums of terms, [n, width] each, over rows, relative to the largest term."""
    terms = torch.stack([term.double().flatten(1) for term in (*left, *right)])
    apart = terms[: len(left)].sum(0) - terms[len(left) :].sum(0)
    return float((apart.norm(dim=1) / terms.norm(dim=2).amax(0).clamp(min=1e-30)).max())
