"""Every family × every site against transformers, float32, teacher-forced, by the worst row."""

from __future__ import annotations

import pytest
from conftest import ALL_SITES, MAX_ERROR, MIN_COSINE, TINY_ENGINE, opened
from rows import GREEDY, parity, random_prompt, worst

from steercap import CaptureSpec
from steercap.families import FAMILIES
from steercap.sites import SITES
from steercap.testing import Reference, tiny_checkpoint


@pytest.mark.parametrize("family", list(FAMILIES))
async def test_rows_are_those_of_transformers(family: str, record_property) -> None:
    """Whatever the family and the site, each row is the one transformers computes, prompt and generated."""
    path = tiny_checkpoint(family)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((1, 7, 40, 133))]
    async with opened(path, sites=tuple(SITES), **TINY_ENGINE) as model:
        _, handles = await model.generate(
            prompts, {"max_tokens": 20, **GREEDY}, capture=CaptureSpec(sites=tuple(SITES))
        )
        await model.fetch_captures_batch(handles)
    reference = Reference(path)
    found = worst(parity(handle, reference) for handle in handles)
    assert set(found) == {f"{site} {part}" for site in SITES for part in ("prompt", "generated")}
    for name, same in found.items():
        record_property(f"{family} {name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")
        assert same.cosine > MIN_COSINE, name
        assert same.error < MAX_ERROR, name
    for handle in handles:
        assert [len(rows) for rows in handle.captures.values()] == [len(handle.prompt_token_ids) + 19] * (
            4 * len(SITES)
        )


async def test_the_stream_is_the_sum_of_what_the_blocks_add(tiny) -> None:
    """resid_post = resid_pre + attn_out + mlp_out: the sites mean what their names say."""
    _, handle = await tiny.generate(
        random_prompt(30, 5), {"max_tokens": 5, **GREEDY}, capture=CaptureSpec(sites=ALL_SITES)
    )
    async with handle:
        for layer in range(tiny.num_layers):
            added = sum(handle.captures[layer, site] for site in ("resid_pre", "attn_out", "mlp_out"))
            difference = (added - handle.captures[layer, "resid_post"]).abs().max()
            assert difference < 1e-4 * handle.captures[layer, "resid_post"].norm(dim=-1).min()


async def test_compiled_rows_are_those_of_transformers(tiny_reference, record_property) -> None:
    """Through torch.compile's graph (inductor), taps at all sites fire and read the same rows as in eager mode."""
    prompts = [random_prompt(length, seed) for seed, length in enumerate((1, 40, 133))]
    arguments = {**TINY_ENGINE, "enforce_eager": False}
    async with opened(tiny_checkpoint("qwen3"), sites=tuple(SITES), **arguments) as model:
        _, handles = await model.generate(
            prompts, {"max_tokens": 20, **GREEDY}, capture=CaptureSpec(sites=tuple(SITES))
        )
        await model.fetch_captures_batch(handles)
    for name, same in worst(parity(handle, tiny_reference) for handle in handles).items():
        record_property(f"compiled {name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")
        assert same.cosine > MIN_COSINE, name
        assert same.error < MAX_ERROR, name
