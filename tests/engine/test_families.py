"""Every family × every site against transformers, float32, teacher-forced, by the worst row."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import product

import pytest
from conftest import opened

from steercap import SteerModel
from steercap.families import FAMILIES
from steercap.sites import SITES
from steercap.testing import Reference, tiny_checkpoint
from steercap.testing.agreement import EVERYTHING, edits_agree, rows_agree
from steercap.testing.rows import GREEDY, TINY_ENGINE, hold, random_prompt
from steercap.testing.specs import OPERATIONS, VARIANTS, spec


@pytest.fixture(scope="module", params=list(FAMILIES))
async def served(request) -> AsyncIterator[tuple[str, SteerModel, Reference]]:
    """One family: its name, its engine with all sites armed, and transformers on the same checkpoint."""
    path = tiny_checkpoint(request.param)
    async with opened(path, sites=tuple(SITES), **TINY_ENGINE) as model:
        yield request.param, model, Reference(path)


async def test_rows_are_those_of_transformers(served, record_property) -> None:
    """Whatever the family and the site, each row is the one transformers computes, prompt and generated."""
    family, model, reference = served
    for name, same in (await rows_agree(model, reference)).items():
        record_property(f"{family} {name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")


async def test_edits_are_those_of_transformers(served, record_property) -> None:
    """Whatever the family, the operation and the site, every row at every point is that of transformers with the edit
    made by a hook, in float64; all of them share one batch.
    """
    family, model, reference = served
    for name, same in (await edits_agree(model, reference)).items():
        record_property(f"{family} steered by {name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")


async def test_the_stream_is_the_sum_of_what_the_blocks_add(tiny) -> None:
    """resid_post = resid_pre + attn_out + mlp_out: the sites mean what their names say."""
    _, handle = await tiny.generate(random_prompt(30, 5), {"max_tokens": 5, **GREEDY}, capture=EVERYTHING)
    async with handle:
        for layer in range(tiny.num_layers):
            added = sum(handle.captures[layer, site] for site in ("resid_pre", "attn_out", "mlp_out"))
            difference = (added - handle.captures[layer, "resid_post"]).abs().max()
            assert difference < 1e-4 * handle.captures[layer, "resid_post"].norm(dim=-1).min()


async def test_compiled_rows_are_those_of_transformers(tiny_reference, record_property) -> None:
    """Through torch.compile's graph (inductor), taps at all sites fire, read and write the same rows as in eager mode."""
    prompts = [random_prompt(length, seed) for seed, length in enumerate((1, 40, 133))]
    arguments = {**TINY_ENGINE, "enforce_eager": False}
    names = list(product((*OPERATIONS, *VARIANTS), SITES))
    async with opened(tiny_checkpoint("qwen3"), sites=tuple(SITES), **arguments) as model:
        _, handles = await model.generate(prompts, {"max_tokens": 20, **GREEDY}, capture=EVERYTHING)
        specs = [spec(name, 128, seed=seed, layers=[0, 2], site=site) for seed, (name, site) in enumerate(names)]
        _, steered = await model.generate(
            [random_prompt(12, seed) for seed in range(len(specs))],
            {"max_tokens": 8, **GREEDY},
            capture=EVERYTHING,
            steering=specs,
        )
        await model.fetch_captures_batch([handles, steered])
    for kind, found in (("", hold(handles, tiny_reference)), ("steered ", hold(steered, tiny_reference, specs))):
        for name, same in found.items():
            record_property(f"compiled {kind}{name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")
