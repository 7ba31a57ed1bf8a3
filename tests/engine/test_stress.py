"""Rows stay right while everything that moves requests about happens, alone and together.

A 4-layer qwen3 in the cramped engine of conftest: chunks, preemption, 16 requests at once. The scenarios are those of
`support.stress`; here they must have happened.
"""

from __future__ import annotations

import pytest
from support import stress


def recorded(record_property, shown: stress.Shown, title: str = "") -> None:
    for name, same in shown.worst.items():
        record_property(f"{title}{name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")


async def test_a_prompt_longer_than_a_step(cramped, tiny_reference) -> None:
    """A prompt computed in chunks gives the rows of the whole."""
    shown = await stress.a_prompt_longer_than_a_step(cramped, tiny_reference)
    assert shown.facts["steps"] == 4 + 9


async def test_prefix_cache_hits(cramped, tiny_reference) -> None:
    """The same prompt with and without capture, in any order: captured rows are all there; others use the cache."""
    await stress.prefix_cache_hits(cramped, tiny_reference)


@pytest.mark.parametrize("scenario", [stress.preemption, stress.steered_preemption, stress.reductions_along])
async def test_preemption(cramped, tiny_reference, scenario) -> None:
    """Requests that are thrown out and recomputed have each row once, and right; steered, they are each time."""
    shown = await scenario(cramped, tiny_reference)
    assert shown.facts["preemptions"] > 0
    assert shown.facts["rows written again"] > 0


async def test_one_token_prompts(cramped, tiny_reference) -> None:
    """The shortest prompt there is, many at once."""
    await stress.one_token_prompts(cramped, tiny_reference)


async def test_passes_of_no_request(cramped, tiny_reference) -> None:
    """A rank's passes while others work, between those of captured and steered requests, change nothing."""
    shown = await stress.passes_of_no_request(cramped, tiny_reference)
    assert shown.facts["passes"] >= 10


async def test_cancelled_neighbours(cramped, tiny_reference) -> None:
    """Requests cancelled in any phase leave their neighbours' rows right, and nothing of their own."""
    shown = await stress.cancelled_neighbours(cramped, tiny_reference)
    assert shown.facts["cancelled"] >= 6


async def test_everything_at_once(cramped, tiny_reference, record_property) -> None:
    """64 requests that differ in all they can, with repeated prompts, cancelled neighbours, chunks and preemption."""
    shown = await stress.everything_at_once(cramped, tiny_reference)
    assert shown.facts["preemptions"] > 0
    assert shown.facts["cached tokens"] > 0
    assert shown.facts["captures"] > 40
    recorded(record_property, shown)


async def test_steered_requests_at_once(cramped, tiny_reference, record_property) -> None:
    """64 requests with 40 different specs, and some with none: every row of each is that of its own spec alone."""
    shown = await stress.steered_requests_at_once(cramped, tiny_reference)
    assert shown.facts["preemptions"] > 0
    assert shown.facts["cached tokens"] > 0
    assert shown.facts["steered from the cache"] > 0
    assert shown.facts["captures"] > 60
    recorded(record_property, shown, "steered ")
