"""Edits that overflow, beside requests that do not: the first fail, and nothing else is any different."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final

import torch

from steercap.captures.handle import CaptureHandle
from steercap.captures.stacking import flat
from steercap.core.spec import CaptureSpec
from steercap.errors import SteeringNotApplied
from steercap.model import SteerModel
from steercap.steering.edits import Edit
from steercap.steering.edits.add import Add, AddIf, SAEFeature
from steercap.steering.edits.replace import Replace, SetProjection
from steercap.steering.spec import SteeringSpec
from steercap.testing.reference import compare_rows
from support.rows import GREEDY, flattened, random_prompt
from support.specs import vector

#: Least cosine of a row with itself in another batch. Rows of another token, or of poisoned keys, are far below.
SAME_ROW: Final = {torch.float32: 0.99999, torch.bfloat16: 0.99, torch.float16: 0.999}
#: Elements of edits; one of them is beyond every dtype's bound, or comes to be when the next layers add to it.
SIZES: Final = {
    torch.float16: (3e4, 4e4, 6.4e4, 6.549e4, 1e5, 1e30),
    torch.bfloat16: (5e11, 1e13, 1e30, 1e36, 3e38),
    torch.float32: (5e11, 1e13, 1e30, 1e36, 3e38),
}


def overflowing_edit(rng: random.Random, width: int, layers: int, sites: tuple[str, ...], size: float) -> Edit:
    """An edit with elements of about `size`, somewhere."""
    where: dict[str, Any] = {
        "layers": sorted(rng.sample(range(layers), rng.randint(1, layers))),
        "site": rng.choice(sites),
    }
    tokens = rng.choice(("all", "prompt", "generated", "last_prompt", [0], slice(1, None, 3)))
    signs = vector(width, seed=rng.randrange(1 << 20)).sign()
    match rng.randrange(6):
        case 0:
            return Add(signs, size, tokens=tokens, **where)
        case 1:
            return Add(signs, size, tokens=tokens, relative=True, **where)
        case 2:
            return AddIf(signs, signs.roll(1), threshold=-1e30, scale=size, tokens=tokens, **where)
        case 3:
            return SetProjection(signs, size, tokens=tokens, **where)
        case 4:
            return SAEFeature(signs / width, signs, size, tokens=tokens, **where)
    return Replace((signs * size)[None].expand(2, -1), [0, -1], **where)


async def overflowing_edits(
    model: SteerModel, rng: random.Random, *, rounds: int, capture: CaptureSpec, layers: int, sites: tuple[str, ...]
) -> dict[str, int]:
    """Rounds of requests whose edits may overflow, among clean ones; and clean ones after each round.

    A request either fails with the point at which it overflowed, or all its rows are finite. Each clean row is what it
    was before anything overflowed.

    Args:
        model: an engine in float32, float16 or bfloat16, with few blocks, so that they are soon used again.
        rng: what to draw from.
        rounds: how often.
        capture: whole rows.
        layers: edits are made at the first so many layers.
        sites: sites that edits are made at.

    Returns:
        Requests that overflowed, that were steered and did not, and that were clean.
    """
    prompts = [random_prompt(length, 700 + length) for length in (2, 5, 33, 64, 65, 90, 100, 120)]
    known = await _clean(model, prompts, capture)
    dtype = next(iter(known[0].captures.values())).dtype
    found = {"overflowed": 0, "steered": 0, "clean": len(prompts)}

    async def steered(number: int) -> None:
        sizes = [rng.choice((1.0, *SIZES[dtype])) for _ in range(rng.randint(1, 3))]
        spec = SteeringSpec([overflowing_edit(rng, model.hidden_size, layers, sites, size) for size in sizes])
        prompt = random_prompt(rng.choice((2, 31, 64, 100)), 800 + number)
        params = {"max_tokens": rng.randint(2, 12), **GREEDY}
        try:
            _, taken = await model.generate(prompt, params, capture=capture, steering=spec)
        except SteeringNotApplied as error:
            if " overflows at " not in str(error):
                raise
            found["overflowed"] += 1
            return
        (handle,) = flat(taken)
        async with handle:  # which raises CaptureNotFinite if a row is not
            found["steered"] += 1

    for _ in range(rounds):
        beside = asyncio.create_task(_clean(model, prompts, capture))
        await asyncio.gather(*(steered(number) for number in range(16)))
        for handles in (await beside, await _clean(model, prompts, capture)):
            found["clean"] += len(handles)
            for handle, before in zip(handles, known, strict=True):
                _same(handle, before, dtype)
    return found


async def _clean(model: SteerModel, prompts: list[list[int]], capture: CaptureSpec) -> list[CaptureHandle]:
    _, handles = await model.generate(prompts, {"max_tokens": 6, **GREEDY}, capture=capture)
    await model.fetch_captures_batch(handles)
    return flattened(handles)


def _same(handle: CaptureHandle, before: CaptureHandle, dtype: torch.dtype) -> None:
    """Rows of the prompt are those of before; a rounding may have changed what was generated."""
    count = len(handle.prompt_token_ids)
    for point in handle.points:
        same = compare_rows(handle.captures[point][:count], before.captures[point][:count].double())
        assert same.cosine >= SAME_ROW[dtype], f"{point} of a clean request: {same}"
