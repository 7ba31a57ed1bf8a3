"""Comparing what was captured with what transformers computes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import torch
from conftest import MAX_ERROR, MIN_COSINE

from steercap import SteeringSpec, SteerModel
from steercap.core.spec import Point
from steercap.handle import CaptureHandle
from steercap.testing import Parity, Reference, compare_rows
from steercap.testing.parity import PERFECT

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def random_prompt(length: int, seed: int, vocabulary: int = 250) -> list[int]:
    """Token ids that no other seed gives."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (length,), generator=generator).tolist()


def parity(
    handle: CaptureHandle, reference: Reference, steering: SteeringSpec | None = None, *, by_layer: bool = False
) -> dict[str, Parity]:
    """The worst row of each site, prompt and generated rows apart, e.g. `resid_post prompt`.

    With `by_layer` the reference's layers get the captured `resid_pre` as their input, so each is compared by itself.
    """
    inputs = [*handle.prompt_token_ids, *handle.output_token_ids][:-1]
    given = {layer: handle.captures[layer, "resid_pre"] for layer in handle.captures.layers} if by_layer else None
    prompt_len = len(handle.prompt_token_ids)
    known = reference.rows(inputs, handle.points, given, steering=steering, prompt_len=prompt_len)
    assert handle.token_ids.tolist() == [inputs[position] for position in handle.positions.tolist()]
    prompt = handle.positions < len(handle.prompt_token_ids)
    found: dict[str, Parity] = {}
    for point in handle.points:
        for part, chosen in (("prompt", prompt), ("generated", ~prompt)):
            if chosen.any():
                name = f"{point.site} {part}"
                same = compare_rows(handle.captures[point][chosen], known[point][handle.positions[chosen]])
                found[name] = found.get(name, PERFECT).worse(same)
    return found


def worst(found: Iterable[dict[str, Parity]]) -> dict[str, Parity]:
    """The worst of several."""
    total: dict[str, Parity] = {}
    for one in found:
        for name, same in one.items():
            total[name] = total.get(name, PERFECT).worse(same)
    return total


def flattened(handles: Any) -> list[CaptureHandle]:
    """Handles out of nested lists."""
    return (
        [handles]
        if isinstance(handles, CaptureHandle)
        else [handle for group in handles for handle in flattened(group)]
    )


def points(layers: Iterable[int], *sites: str) -> tuple[Point, ...]:
    """Points of all `layers` and `sites`."""
    return tuple(Point(layer, site) for layer in layers for site in sites)


async def settled(model: SteerModel) -> tuple[int, int, int]:
    """Handles held, bytes claimed and bytes in use once what was given back has been freed."""
    for _ in range(3):  # aborted requests leave the engine, then the client hears of them, then gives back
        await asyncio.sleep(0.1)
        stats = await model.stats()
    return stats.handles_held, stats.capture_bytes_claimed, stats.capture_bytes_in_use


def counter(model: SteerModel, name: str) -> float:
    """A counter of one engine of vLLM's, by its attribute: the registry forgets an engine when another starts."""
    (prometheus,) = (one for one in model.engine.logger_manager.stat_loggers if hasattr(one, name))
    return sum(child._value.get() for child in getattr(prometheus, name).values())


def hold(handles: Any, reference: Reference, specs: Iterable[SteeringSpec | None] | None = None) -> dict[str, Parity]:
    """Assert the float32 bounds for the worst row of all handles, each steered by its own spec."""
    given = flattened(handles)
    known = [None] * len(given) if specs is None else list(specs)
    found = worst(parity(handle, reference, spec) for handle, spec in zip(given, known, strict=True))
    for name, same in found.items():
        assert same.cosine > MIN_COSINE, (name, same)
        assert same.error < MAX_ERROR, (name, same)
    return found
