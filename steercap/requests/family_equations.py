"""Equations between captured rows that must hold for the model's family, as `equations` checks them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from steercap.config import ADDED
from steercap.core.spec import Point
from steercap.requests.equations import PROJECTED, Claim, attends, equations, norm_of, projected
from steercap.requests.stream_equations import mixes

if TYPE_CHECKING:
    from steercap.engine.engine import Engine


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
            made = await engine.project(point.layer, point.site, rows[point], number)
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
            made = await engine.project(layer, "resid_mid", rows[middle], number)
            yield norm_of(inside, "resid_mid", rows[inside], made)
        if inside in rows and added in rows and end in rows:
            made = await engine.project(layer, "mlp_out", rows[inside] + rows[added], number)
            yield norm_of(end, "mlp_in + mlp_out", rows[end], made)


def _experts(engine: Engine, layer: int) -> bool:
    """Return True if a layer has a router, so that experts may add to the output of its neurons.

    Derived neurons are those of a layer without experts.
    """
    return not engine.family.derived and engine.exists(Point(layer, "router"))
