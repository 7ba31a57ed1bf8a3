"""Handles with known rows, for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from steercap import CaptureHandle
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.rows import Captures, Found
from steercap.core.receipt import Receipt
from steercap.core.spec import Point


def a_handle(
    layers: Sequence[int] = (0, 1),
    *,
    prompt: tuple[int, ...] = (5, 6, 7),
    output: tuple[int, ...] = (8, 9),
    reduce: Any = None,
    dtype: torch.dtype = torch.float32,
    model: str = "m",
    sites: Sequence[str] | None = None,
    **others: Any,
) -> CaptureHandle:
    """A fetched handle whose rows are `100 layer + position` of width 2; at `sites`, of 2 heads of width 1."""
    points = [Point(layer, site) for layer in layers for site in sites or ("resid_post",)]
    total = len(prompt) + max(len(output) - 1, 0)
    rows = 1 if reduce else total
    positions = torch.arange(total).numpy()
    token_ids = torch.tensor([*prompt, *output][:total]).numpy()
    values = {p: (100.0 * p.layer + torch.arange(rows))[:, None].repeat(1, 2).to(dtype) for p in points}
    values = {p: rows[..., None] if sites else rows for p, rows in values.items()}
    receipt = Receipt(tuple(points), positions, token_ids, total * len(points), reduce)
    return CaptureHandle(
        request_id="r",
        model=model,
        text="",
        prompt_token_ids=prompt,
        output_token_ids=output,
        points=points,
        num_layers=4,
        lifecycle=Lifecycle("r", found=Found(Captures(values, 4), receipt)),
        **others,
    )
