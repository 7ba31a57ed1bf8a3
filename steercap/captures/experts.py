"""Experts that a layer chose, computed by the layer's own router on the workers from logits captured at `router`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Float, Int

from steercap.core.spec import Point
from steercap.core.values import index_of, shown
from steercap.errors import InvalidRequest
from steercap.kernels.codecs.coded import CodedRows

if TYPE_CHECKING:
    from steercap.captures.lifecycle import Source
    from steercap.captures.rows import Captures
    from steercap.engine.engine import Engine

#: Maximum bytes of rows in one call to the workers, during which no other pass of the model runs.
_FRAME_BYTES: Final = 8 << 20


@dataclass(frozen=True, eq=False, repr=False)
class Experts:
    """Experts that a layer chose for each row, with their weights, in descending order of weight.

    Weights are those that vLLM multiplies the experts' outputs by: after softmax or sigmoid, renormalisation and a
    scaling factor where the model has them. DeepSeek V2 and V3, GLM-4.5, A.X K1 and Nemotron-H apply their
    `routed_scaling_factor` behind the router, others within; weights include it in both cases, as transformers' do. In
    float16, DeepSeek's layers divide the stream by it instead, and weights do not include it. Llama 4 multiplies an
    expert's input by its weight, not its output. Shared experts are not included.

    Args:
        positions: positions of the rows in their sequence, int64 [rows].
        ids: ids of the experts as the model numbers them, before any copies that balance load, int64 [rows, k].
        weights: weights of these experts, float32 [rows, k].
    """

    positions: Int[torch.Tensor, " rows"]
    ids: Int[torch.Tensor, "rows k"]
    weights: Float[torch.Tensor, "rows k"]

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        return f"Experts({len(self)} rows, {self.ids.shape[1]} each)"


def logits_of(source: Source, captures: Captures, layer: int, num_layers: int) -> tuple[int, torch.Tensor]:
    """Return the index of a layer, and the logits by which it chose its experts, float32 [rows, experts].

    Args:
        source: the open model and the request that the rows are from.
        captures: the fetched rows, not reduced and not projected.
        layer: the layer as the user gave it.
        num_layers: decoder layers of the model.

    Raises:
        InvalidRequest: there is no such layer or no `router` row, or the rows are not the logits that it chose by.
    """
    index = index_of(layer)
    if index is None or not -num_layers <= index < num_layers:
        raise InvalidRequest(f"experts: layer={shown(layer)}; the model has layers 0 to {num_layers - 1}")
    point = Point(index % num_layers, "router")
    if point not in captures:
        had = "was not captured" if source.engine.exists(point) else "is not in this model, whose layer has no experts"
        raise InvalidRequest(f"experts: {point} {had}; captured: {', '.join(map(str, captures))}")
    kept = source.expected.plan.capture
    if kept is not None and kept.before_edits and source.expected.steering is not None:
        raise InvalidRequest(f"experts: rows of {point} are from before its edits; capture without before_edits=")
    rows = captures.whole(point)
    if isinstance(rows, CodedRows):
        raise InvalidRequest(
            f"experts: rows of {point} are {rows}, from which a router may choose other experts; capture without a "
            "codec"
        )
    if not bool(rows.isfinite().all()):
        raise InvalidRequest(f"experts: rows of {point} are not all finite")
    return point.layer, rows


async def experts(engine: Engine, layer: int, rows: torch.Tensor, positions: torch.Tensor) -> Experts:
    """Return the experts that a layer chooses for router logits, asking the workers.

    Args:
        engine: the engine of the model.
        layer: index of the layer.
        rows: router logits, float32 [rows, experts].
        positions: position of each row, int64 [rows].

    Raises:
        InvalidRequest: there are no rows, or the layer's choice of experts does not depend on logits alone.
        EngineFailure: the engine has died or was closed.
    """
    if not len(rows):
        raise InvalidRequest("experts: no rows were selected")
    size = max(1, _FRAME_BYTES // (rows.shape[1] * 4))
    found = [await engine.workers.choose(layer, some) for some in rows.split(size)]
    if refused := next((one.refused for one in found if one.refused), ""):
        raise InvalidRequest(f"experts: layer {layer}: {refused}")
    ids, weights = (
        torch.cat([torch.frombuffer(bytearray(part), dtype=dtype) for part in parts]).view(len(rows), -1)
        for parts, dtype in (
            ([one.ids for one in found], torch.int64),
            ([one.weights for one in found], torch.float32),
        )
    )
    order = weights.sort(dim=1, descending=True, stable=True).indices
    return Experts(positions, ids.gather(1, order), weights.gather(1, order))
