"""Showing that a pooling model's rows, edits and embeddings are transformers', in batches of prompts of all lengths."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from steercap.core.spec import CaptureSpec, Point
from steercap.testing.reference import Parity, Reference, compare_rows
from support.rows import flattened, random_prompt, within, worst
from support.specs import spec

if TYPE_CHECKING:
    from steercap.model import SteerModel


async def embeddings_agree(model: SteerModel, reference: Reference, count: int = 50) -> dict[str, Parity]:
    """Prompts of 1 to 200 tokens at once, of which half keep all rows, and every fifth is steered.

    Args:
        model: opened to embed, by the last token.
        reference: transformers on the same checkpoint.
        count: prompts.

    Returns:
        The worst row of each site, clean and steered, and the worst embedding.
    """
    prompts = [random_prompt(1 + number * 199 // (count - 1), seed=number) for number in range(count)]
    points = list(model.points)
    sites = sorted({point.site for point in points})
    keep = [CaptureSpec(sites=sites) if number % 2 else None for number in range(count)]
    edit = spec("add", model.hidden_size, layer=1, tokens="all")
    steering = [edit if number % 5 == 3 else None for number in range(count)]
    encoded, handles = await model.encode(prompts, capture=keep, steering=steering)
    await model.fetch_captures_batch(handles)
    end = Point(model.num_layers - 1, "final_norm")
    found: list[dict[str, Parity]] = []
    for number, (ids, one, handle) in enumerate(zip(prompts, encoded, handles, strict=True)):
        by = steering[number]
        rows = await asyncio.to_thread(reference.rows, ids, [*points, end], steering=by, prompt_len=len(ids))
        who = "clean" if by is None else "steered"
        expected = torch.nn.functional.normalize(rows[end][-1:], dim=1)
        found.append({f"{who} embedding": compare_rows(one.embedding[None].float(), expected)})
        assert (one.steering is None) == (by is None)
        for kept in flattened([handle] if handle else []):
            assert kept.token_ids.tolist() == ids
            found += [
                {f"{who} {point.site}": compare_rows(kept.captures[point].flatten(1), rows[point])} for point in points
            ]
            kept.release()
    return within(worst(found))
