"""Equations between captured rows that must hold for the model's family, beside those of `equations`.

The inputs and outputs of the stream operators are captured separately; these equations connect them:

- behind a block, each stream is the sum of the streams before it, mixed by the residual mix, and of the block's output
  times its post mix; the streams behind a layer are those before the next, and behind the last the final ones;
- the residual mix sends from one stream to another, so the weights into each stream add up to 1 (last Sinkhorn step).

They do not check that a block reads the collapsed streams, since the collapse weights are no point. An edit of the
streams shows it, since the block then adds another row.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import torch

from steercap.config import ADDED
from steercap.core.spec import Point
from steercap.requests.equations import PROJECTED, Claim, attends, equations, norm_of, projected, relative

if TYPE_CHECKING:
    from steercap.engine.engine import Engine

#: Sites of a layer's two blocks: streams before the block, post mix, residual mix, block output.
BLOCKS: Final = (
    ("mhc_streams_pre_attn", "mhc_attn_post_mix", "mhc_attn_res_mix", "attn_out"),
    ("mhc_streams_pre_mlp", "mhc_ffn_post_mix", "mhc_ffn_res_mix", "mlp_out"),
)
#: All of these sites, and that of the final streams.
STREAMS: Final = (*BLOCKS[0], *BLOCKS[1], "mhc_streams_final")
#: Roundings to the rows' dtype in a mixed stream: of the block's output, of the streams, and of their sum.
_MIXED: Final = 4.0
#: Allowed distance from 1 of the weights into a stream: each Sinkhorn step adds an epsilon of 1e-6 to its divisor.
_STOCHASTIC: Final = 1e-4


def mixes(
    rows: Mapping[Point, torch.Tensor], end: Point, edit: tuple[Point, torch.Tensor] | None = None
) -> Iterator[Claim]:
    """Yield the claims that must hold among rows of one forward pass, for the points that are present.

    Args:
        rows: rows of each point, [n, *shape of the point].
        end: the point of the final streams.
        edit: the edited point and the vectors added to each of its rows, [n, width]; None without an edit.
    """
    named = f", with an edit at {edit[0]}" if edit else ""
    layers = sorted({point.layer for point in rows})
    for layer in layers:
        for (before, *terms), following in zip(BLOCKS, (Point(layer, BLOCKS[1][0]), _behind(layer, end)), strict=True):
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


def _behind(layer: int, end: Point) -> Point:
    return end if layer == end.layer else Point(layer + 1, BLOCKS[0][0])


def of_rows(
    engine: Engine, rows: Mapping[Point, torch.Tensor], edit: tuple[Point, torch.Tensor] | None = None
) -> Iterator[Claim]:
    """Yield the equations that must hold among rows of one forward pass, for the loaded model's family."""
    family = engine.family
    if family.mhc:
        yield from mixes(rows, engine.end, edit)
    blocks = {Point(layer, site) for layer in range(engine.vllm.num_layers) for site in ADDED}
    absent = {point for point in blocks if family.single and not engine.exists(point)}
    yield from equations(rows, family.factor(engine.vllm.config), edit, absent, normed=bool(family.norms))
    if not family.gated:
        for layer, rule in engine.attention.items():
            yield from attends(layer, rows, rule, edit)


async def of_projections(engine: Engine, number: int, rows: Mapping[Point, torch.Tensor]) -> AsyncIterator[Claim]:
    """Yield claims that each block's output equals its last projection of the rows that the projection reads."""
    family = engine.family
    pairs = [(point, Point(point.layer, PROJECTED[point.site])) for point in rows if point.site in PROJECTED]
    for point, block in pairs:
        neurons = point.site == "neurons"
        if block in rows and not (neurons and _experts(engine, point.layer)):
            made = await engine.workers.project(point.layer, point.site, rows[point], number)
            scaled = family.scaled(engine.vllm.config) * made if neurons else made
            yield projected(point, block, rows[block], scaled)


async def of_norms(engine: Engine, number: int, rows: Mapping[Point, torch.Tensor]) -> AsyncIterator[Claim]:
    """Yield claims that rows behind a norm of a sum equal the model's own norm of that sum.

    Families without such norms yield none.
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
    """Return True if a layer has a router, so that experts may add to the output of its neurons.

    Derived neurons are those of a layer without experts.
    """
    return not engine.family.derived and engine.exists(Point(layer, "router"))
