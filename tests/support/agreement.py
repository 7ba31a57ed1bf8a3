"""Whole engines against transformers: every site, every operation, several workers, bad requests beside good ones."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from itertools import product
from typing import Any, Final

import numpy as np
import torch

from steercap.captures.handle import CaptureHandle
from steercap.captures.stacking import flat
from steercap.core.spec import CaptureSpec, Point
from steercap.errors import InvalidSpec
from steercap.model import SteerModel
from steercap.steering.directions import DirectionSet
from steercap.steering.edits.replace import Ablate
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec
from steercap.testing.reference import PERFECT, Parity, Reference
from support.bad import BAD_REQUESTS, PROMPT, SIX, Bad
from support.rows import (
    ALL_SITES,
    GREEDY,
    MAX_ERROR,
    MIN_COSINE_16,
    by_part,
    hold,
    inputs_of,
    parity,
    random_prompt,
    steps,
    within,
    within_16,
    worst,
)
from support.specs import OPERATIONS, VARIANTS, spec

#: Every row of the residual stream and of what the blocks add to it.
EVERYTHING: Final = CaptureSpec(sites=ALL_SITES)
#: The worst row of an edited sequence against the clean reference: a hundred times beyond what parity allows.
CHANGED: Final = 0.999
#: Where vectors are added in models that round to fewer than 16 bits.
ADDED: Final = ("resid_post", "mlp_out")
LENGTHS: Final = (1, 7, 40, 133)
SEVEN: Final = {"max_tokens": 7, **GREEDY}


async def captured(
    model: SteerModel, lengths: Sequence[int] = LENGTHS, generated: int = 20, seed: int = 0, **asked: Any
) -> list[CaptureHandle]:
    """Random prompts of these lengths in one call, every row at every site of the engine, fetched."""
    prompts = [random_prompt(length, seed + place) for place, length in enumerate(lengths)]
    arguments = {"capture": CaptureSpec(sites=sites_of(model)), **asked}
    _, handles = await model.generate(prompts, {"max_tokens": generated, **GREEDY}, **arguments)
    await model.fetch_captures_batch(handles)
    assert [handle.receipt.rows for handle in handles] == [length + generated - 1 for length in lengths]
    found: list[CaptureHandle] = handles
    return found


async def rows_agree(
    model: SteerModel, reference: Reference, lengths: Sequence[int] = LENGTHS, generated: int = 20, seed: int = 0
) -> dict[str, Parity]:
    """Whatever the family and the site, each row is the one transformers computes, prompt and generated."""
    handles = await captured(model, lengths, generated, seed)
    found = await asyncio.to_thread(hold, handles, reference)
    assert set(found) == {f"{site} {part}" for site in sites_of(model) for part in ("prompt", "generated")}
    return found


async def layers_agree(model: SteerModel, reference: Reference) -> dict[str, Parity]:
    """In 16 bits, which drift from block to block: what each block makes of the rows captured before it is what
    transformers' block makes of them, prompt and generated.
    """
    handles = await captured(model)
    return within_16(
        await asyncio.to_thread(lambda: worst(parity(handle, reference, by_layer=True) for handle in handles))
    )


async def steps_agree(model: SteerModel, reference: Reference, least: float = MIN_COSINE_16) -> dict[str, Parity]:
    """In 16 bits, of modules or a cache in fewer, which no two implementations round alike from end to end of a layer:
    what each step from site to site makes of the rows captured before it is what transformers makes of them, prompt and
    generated, clean and with a vector added to the stream, or to what a block adds.
    """
    edits = [
        spec("relative", model.hidden_size, seed=turn, layer=turn, site=site) for turn, site in enumerate(ADDED, 1)
    ]
    clean = await captured(model)
    edited = await captured(model, (12, 40), 8, seed=9, steering=edits)
    assert all(sum(handle.receipt.steering.rows) > 0 for handle in edited if handle.receipt.steering)
    return within_16(await asyncio.to_thread(_steps, reference, clean, edited, edits, least), least)


def _steps(
    reference: Reference,
    clean: Sequence[CaptureHandle],
    edited: Sequence[CaptureHandle],
    edits: Sequence[SteeringSpec],
    least: float,
) -> dict[str, Parity]:
    found = worst(steps(handle, reference) for handle in clean)
    for site, handle, steering in zip(ADDED, edited, edits, strict=True):
        without = steps(handle, reference)[f"{site} prompt"].cosine
        assert without < least, f"an edit at {site} changed nothing to speak of: {without}"
        found[f"steered {site}"] = worst_of(steps(handle, reference, steering))
    return found


def sites_of(model: SteerModel) -> tuple[str, ...]:
    """The sites that an engine has."""
    return tuple(dict.fromkeys(point.site for point in model.points))


def places_of(model: SteerModel, site: str) -> tuple[list[int], int]:
    """Layers to edit at a site, two of those that have it, or the only one; and the width of its rows there."""
    layers = [point.layer for point in model.points if point.site == site]
    return layers[:3:2], model.points[Point(layers[0], site)].width


async def adds_up(model: SteerModel) -> float:
    """resid_post = resid_pre + attn_out + mlp_out: the sites mean what their names say.

    Returns the greatest difference, in row norms.
    """
    (handle,) = await captured(model, (30,), 5, seed=5)
    greatest = 0.0
    for layer in range(model.num_layers):
        before, attention, feed_forward, after = (
            handle.captures[layer, site].double() for site in ("resid_pre", "attn_out", "mlp_out", "resid_post")
        )
        assert (attention.norm(dim=-1) > 0).all()
        assert (feed_forward.norm(dim=-1) > 0).all()
        differences = (before + attention + feed_forward - after).norm(dim=-1) / after.norm(dim=-1)
        greatest = np.maximum(greatest, float(differences.max()))
    return greatest


async def edits_agree(model: SteerModel, reference: Reference, *, every: bool = True) -> dict[str, Parity]:
    """Every operation at every site, all in one batch: every row at every point is that of transformers with the edit
    made by a hook, in float64. Returns the worst row of each operation.

    Args:
        model: the engine.
        reference: transformers on the same checkpoint.
        every: or else every operation somewhere and every site somehow, a tenth of the work.
    """
    operations, sites = (*OPERATIONS, *VARIANTS), sites_of(model)
    most = max(len(operations), len(sites))
    some = [(operations[turn % len(operations)], sites[turn % len(sites)]) for turn in range(most)]
    asked = [
        (name, _surely(name, width, seed=number, layers=layers, site=site, tokens=tokens))
        for number, (name, site) in enumerate(product(operations, sites) if every else some)
        for layers, width in [places_of(model, site)]
        for tokens in [("all", [slice(5, None, 2), "last_prompt"])[number % 2]]
    ]
    handles = await captured(
        model, [12 + number % 5 for number in range(len(asked))], 8, steering=[one for _, one in asked]
    )
    return await asyncio.to_thread(_edits, asked, handles, reference)


def _surely(name: str, width: int, *, seed: int, **scope: Any) -> SteeringSpec:
    """A spec that changes rows: of a gate, which rows that are much alike may leave shut, several."""
    turns = range(4 if name.endswith("_if") else 1)
    return SteeringSpec([spec(name, width, seed=seed + 100 * turn, **scope) for turn in turns])


def _edits(
    asked: Sequence[tuple[str, SteeringSpec]], handles: Sequence[CaptureHandle], reference: Reference
) -> dict[str, Parity]:
    found: dict[str, Parity] = {}
    for (name, steering), handle in zip(asked, handles, strict=True):
        assert handle.receipt.steering is not None
        assert sum(handle.receipt.steering.rows) > 0
        clean = parity(handle, reference)
        assert min(same.cosine for same in clean.values()) < CHANGED, f"{name} changed nothing to speak of"
        found[name] = worst_of(parity(handle, reference, steering)).worse(found.get(name, PERFECT))
    return within(found)


def worst_of(found: dict[str, Parity]) -> Parity:
    """The worst of all sites and parts."""
    total = PERFECT
    for same in found.values():
        total = total.worse(same)
    return total


async def workers_agree(model: SteerModel, reference: Reference) -> tuple[dict[str, Parity], list[CaptureHandle]]:
    """Several workers: every row once, from the worker that has it, and right; every edit made on all of them.

    Returns the worst rows, and the handles of clean requests.
    """
    handles = await captured(model, (1, 20, 90), 7, seed=1)
    _, given = await model.generate(
        handles[1].prompt_token_ids, SEVEN, capture=CaptureSpec(layers=-1, reduce="mean"), steering=None
    )
    (last,) = flat(given)
    specs = [spec(name, 128, seed=7, layers="all", site=site) for name, site in product(OPERATIONS, ALL_SITES)]
    steered = await captured(model, [10] * len(specs), 7, seed=100, steering=specs)
    cached = await model.run(list(steered[0].prompt_token_ids), SEVEN, steering=specs[0])
    await last.fetch()
    found = await asyncio.to_thread(hold, handles, reference)
    edits = await asyncio.to_thread(hold, steered, reference, specs)
    assert steered[0].receipt.steering is not None
    assert cached.steering is not None
    assert steered[0].receipt.steering.rows == cached.steering[0].rows == (4 * 16,)
    full = handles[1].captures[3, "resid_post"]
    assert (last.captures[-1][0] - full.mean(0)).abs().max() < 1e-4
    return found | {f"steered {name}": same for name, same in edits.items()}, handles


async def shards_agree(model: SteerModel, reference: Reference) -> dict[str, Parity]:
    """Tensor parallel, points that are split: rows joined and as shards, reductions, projections, and edits that need
    no whole row are those of transformers; an edit that needs one is refused.
    """
    split = [site for site in sites_of(model) if model.points[Point(0, site)].shards > 1]
    assert split, "no point of this engine is split"
    handles = await captured(model, (1, 20, 90), 7, seed=31)
    found = await asyncio.to_thread(hold, handles, reference)
    apart = await captured(model, (1, 20, 90), 7, seed=31, capture=CaptureSpec(sites=split, gather=False))
    means = await captured(model, (20,), 7, seed=32, capture=CaptureSpec(sites=split, reduce="mean"))
    for whole, parts in zip(handles, apart, strict=True):
        for point in parts.points:
            shards = parts.captures.shards(*point)
            assert len(shards) == model.points[point].shards
            # Another run, which a GPU need not repeat bit for bit: the batches of a pass may be others.
            joined, known = torch.cat(shards, dim=1).flatten(1), whole.captures[point].flatten(1)
            assert joined.shape == known.shape, (point, joined.shape, known.shape)
            error = float(((joined - known).norm(dim=1) / known.norm(dim=1)).max())
            assert error < MAX_ERROR, f"{point}: shards and joined rows differ by {error:.1e} row norms"
    found |= await asyncio.to_thread(hold, means, reference)
    specs = []
    for number, site in enumerate(split):
        schema = model.points[Point(0, site)]
        specs += [spec(name, schema.width, seed=number, layers="all", site=site) for name in ("add", "replace")]
        vector = torch.zeros(schema.width)
        vector[-schema.shard_width // 2 :] = torch.randn(schema.shard_width // 2)  # of the last rank alone
        specs.append(SteeringSpec([Ablate(vector, layers="all", site=site)]))
        for refused in (
            spec("cap", schema.width, layers=0, site=site),
            spec("relative", schema.width, layers=0, site=site),
        ):
            await fails(model, Bad({"steering": refused}, InvalidSpec, f"needs whole rows at {site}"))
        await projections_agree(model, site)
    steered = await captured(model, [10] * len(specs), 7, seed=200, steering=specs)
    edits = await asyncio.to_thread(hold, steered, reference, specs)
    return found | {f"steered {name}": same for name, same in edits.items()}


async def same_tokens_elsewhere(handles: Sequence[CaptureHandle], other: SteerModel) -> dict[str, Parity]:
    """The worst of `handles`' rows against those that another engine gives for the same tokens as prompts.

    The other engine computes in one prefill pass what these may have computed token by token.
    """
    prompts = [{"prompt_token_ids": inputs_of(handle)} for handle in handles]
    sites = tuple(dict.fromkeys(point.site for handle in handles for point in handle.points))
    _, found = await other.generate(prompts, {"max_tokens": 1}, capture=CaptureSpec(sites=sites))
    await other.fetch_captures_batch(others := flat(found))
    return worst(
        by_part(handle, {point: known.captures[point][handle.positions] for point in handle.points})
        for handle, known in zip(handles, others, strict=True)
    )


async def bad_requests_fail_alone(model: SteerModel, reference: Reference) -> tuple[dict[str, Parity], int]:
    """While others run, each bad request raises its own error, and the others are right to the last row.

    Returns the worst rows of the others, and how many bad requests there were.
    """
    specs = [spec(OPERATIONS[place], 128, seed=place, layers="all") if place % 2 else None for place in range(8)]
    others = asyncio.create_task(captured(model, range(20, 28), 120, steering=specs))
    bad = 0
    try:
        while not others.done() or bad < len(BAD_REQUESTS):
            await fails(model, BAD_REQUESTS[bad % len(BAD_REQUESTS)])
            await asyncio.sleep(0)  # a refusal may come without a pause
            bad += 1
    finally:
        if not others.done():
            others.cancel()
    return await asyncio.to_thread(hold, await others, reference, specs), bad


async def fails(model: SteerModel, bad: Bad) -> None:
    """Assert that one bad request raises its error, with its words."""
    asked: dict[str, Any] = {"prompts": PROMPT, "sampling_params": SIX, **bad.arguments}
    try:
        await model.generate(**asked)
    except bad.error as error:
        assert re.search(bad.says, str(error)), (str(error), bad.says)
    else:
        raise AssertionError(f"{bad.arguments} was accepted")


async def projections_agree(model: SteerModel, site: str = "resid_post", bound: float = 1e-4) -> float:
    """What comes by `project=` is what whole rows give: chunks, edits, selections, sets of directions beside each
    other. Returns the greatest difference, in row norms.

    Args:
        model: one that decodes greedily to the same tokens twice.
        site: of the directions.
        bound: in row norms; two runs of float32 differ by a few roundings, those of TF32 by more.
    """
    width = model.points[Point(0, site)].width
    sets = [_some_directions(model, site, names, seed) for seed, names in enumerate(("abc", "d"))]
    selections: tuple[Any, ...] = ("all", "generated", [slice(3, None, 2), "last_prompt"])
    given = [sets[number % 2] for number in range(12)]
    asked: list[dict[str, Any]] = [
        {"tokens": selections[number % 3], "before_edits": number % 4 == 3} for number in range(12)
    ]
    edits = [None if number % 3 else spec("add", width, seed=number, layers=[0, 2], site=site) for number in range(12)]
    prompts = [random_prompt(9 + 17 * number, number) for number in range(12)]
    both = []
    for kept in (
        [CaptureSpec(project=one, **rest) for one, rest in zip(given, asked, strict=True)],
        [CaptureSpec(layers=one.layers, sites=site, **rest) for one, rest in zip(given, asked, strict=True)],
    ):
        _, handles = await model.generate(prompts, {"max_tokens": 9, **GREEDY}, capture=kept, steering=edits)
        await model.fetch_captures_batch(handles)
        both.append(handles)
    greatest = 0.0
    for projected, whole, one in zip(*both, given, strict=True):
        assert projected.output_token_ids == whole.output_token_ids, "two runs sampled other tokens"
        assert projected.positions.tolist() == whole.positions.tolist()
        assert projected.directions == tuple(one)
        for layer in one.layers:
            rows, numbers = whole.captures[layer, site].flatten(1), projected.captures[layer, site]
            known = one.project(rows, layer)
            assert numbers.shape == known.shape
            differences = (numbers - known).abs().amax(1) / rows.float().norm(dim=1)
            greatest = np.maximum(greatest, float(differences.max()))
    assert greatest < bound, greatest
    return greatest


def _some_directions(model: SteerModel, site: str, names: str, seed: int) -> DirectionSet:
    """Random directions at every other layer."""
    width = model.points[Point(0, site)].width
    drawn = torch.Generator().manual_seed(seed)
    return DirectionSet(
        {
            name: LayerVectors(
                {layer: torch.randn(width, generator=drawn) for layer in range(0, model.num_layers, 2)},
                site=site,
            )
            for name in names
        }
    )
