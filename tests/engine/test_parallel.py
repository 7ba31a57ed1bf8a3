"""Several workers, on CPU with gloo: every row once, from the worker that has it, and right."""

from __future__ import annotations

import pytest
import torch
from conftest import opened
from support.agreement import projections_agree, shards_agree, workers_agree
from support.attention import attention_agrees
from support.biases import biases_agree
from support.codecs import codecs_agree, coded_rows, same_codes
from support.rows import ALL_SITES, GREEDY, TINY_ENGINE, hold, points, random_prompt, settled
from support.sketching import rows_by_point, sketches_agree
from support.specs import spec

from steercap import CaptureSpec, Point, SteerModel, errors, save_run
from steercap.core.schema import PointSchema
from steercap.testing import tiny_checkpoint

SIX_STEPS = {"max_tokens": 6, "temperature": 0.8, "seed": 3}
SEVEN = {"max_tokens": 7, **GREEDY}

pytestmark = pytest.mark.usefixtures("two_workers")


async def steered_log_probs(model: SteerModel) -> list[dict[int, float]]:
    """Float32 log probabilities of the ten likeliest tokens at each step, by token, all layers steered."""
    steering, params = spec("add", 128, seed=7, layers="all"), {"max_tokens": 6, "logprobs": 10, **GREEDY}
    plain, found = [await model.run(random_prompt(20, 5), params, steering=one) for one in (None, steering)]
    steps = [
        [{token: one.logprob for token, one in step.items()} for step in run.output.outputs[0].logprobs]
        for run in (plain, found)
    ]
    assert steps[0] != steps[1], "steering changed nothing"
    return steps[1]


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.slow
async def test_two_workers_give_the_rows_of_transformers(layout, tiny, tiny_reference) -> None:
    """Tensor parallel: one rank captures the full rows, both edit. Pipeline parallel: each stage captures and edits its
    layers, and projects their rows; the client merges rows and receipts. In codecs they are those of one worker. Of
    biases every rank that samples has a receipt. Log probabilities of steered tokens are those of one worker.
    """
    spawned = layout == "tensor_parallel_size"  # whose workers have the cores that steercap names
    async with opened(
        tiny_checkpoint("qwen3"), spawned=spawned, sites=ALL_SITES, **TINY_ENGINE, **{layout: 2}
    ) as model:
        _, handles = await workers_agree(model, tiny_reference)
        await projections_agree(model)
        await biases_agree(model, tiny_reference)
        assert all(share <= 1 for share in (await codecs_agree(model)).values())
        assert same_codes(await coded_rows(model, ALL_SITES), await coded_rows(tiny, ALL_SITES)) > 0.99
        await sketches_agree(model)
        for ours, known in zip(await steered_log_probs(model), await steered_log_probs(tiny), strict=True):
            assert ours == pytest.approx(known, abs=1e-4)
        assert await settled(model) == (0, 0, 0)
        assert len(model.serving.engine._all_ranks) == (1 if layout.startswith("tensor") else 2)
    assert set(handles[0].captures) == set(points(range(4), *ALL_SITES))


async def test_points_are_split_alike_where_modules_take_adapters(tiny_reference) -> None:
    """vLLM puts a module around each that a LoRA adapter may change; what is split is split all the same, and every row
    without an adapter is that of the model.
    """
    sites, lora = (*ALL_SITES, "neurons", "q", "k", "v", "z"), {"enable_lora": True, "max_lora_rank": 8}
    async with opened(tiny_checkpoint("qwen3"), sites=sites, **TINY_ENGINE, **lora, tensor_parallel_size=2) as model:
        assert model.points[Point(2, "z")] == PointSchema((4, 32), "float32", shards=2)
        assert model.points[Point(2, "neurons")] == PointSchema((256,), "float32", shards=2)
        assert any("projected of z[2]" in claim.name for claim in model.proof)
        await shards_agree(model, tiny_reference)


async def test_split_points_are_joined_from_the_ranks_that_have_them(tiny_reference, tmp_path) -> None:
    """neurons and heads at tensor parallel 2: each rank keeps and edits its shard, and the client joins them. On disk
    they are as they were handed over, and the manifest says how.
    """
    sites = ("resid_post", "neurons", "q", "k", "v", "z")
    async with opened(tiny_checkpoint("qwen3"), sites=sites, **TINY_ENGINE, tensor_parallel_size=2) as model:
        assert model.points[Point(2, "z")] == PointSchema((4, 32), "float32", shards=2)
        assert model.points[Point(2, "k")] == PointSchema((2, 32), "float32", shards=2)
        await shards_agree(model, tiny_reference)
        specs = [
            CaptureSpec(sites=sites),
            CaptureSpec(sites=sites, gather=False),
            CaptureSpec(sites=sites, reduce="sum"),
        ]
        handles = await model.read([random_prompt(9, 1)] * 3, capture=specs)
        await model.fetch_captures_batch(handles)
        manifest = save_run(tmp_path, handles)
        for known, found in zip(handles, manifest.handles(), strict=True):
            for point in known.points:
                pairs = zip(known.captures.shards(*point), found.captures.shards(*point), strict=True)
                assert all(torch.equal(one, other) for one, other in pairs)
        layouts = manifest.document.layouts
        assert [layout.returned for layout in layouts] == ["gathered", "sharded", "summary"]
        assert [{p.site: p.shards for p in layout.points} for layout in layouts[:2]] == [
            dict.fromkeys(sites, 0),
            {site: 2 * (site != "resid_post") for site in sites},
        ]
        assert all(share <= 1 for share in (await codecs_agree(model)).values())
        await attention_agrees(model, tiny_reference)
        with pytest.raises(errors.PointSplit, match=r"z\[0\] are split over 2 ranks.*'variances'"):
            async with model.sketch("moments", sites="z"):
                pass
        async with model.sketch("variances", sites=sites) as sketch:
            _, handle = await model.generate(random_prompt(20, 1), SEVEN, capture=CaptureSpec(sites=sites))
            found = await sketch.fetch()
        await handle.fetch()
        for point, rows in rows_by_point([handle]).items():
            torch.testing.assert_close(found.mean(*point), rows.mean(0))
            torch.testing.assert_close(found.variance(*point), rows.var(0))
        assert await settled(model) == (0, 0, 0)
        assert len(model.serving.opened()._all_ranks) == 2


async def test_two_engines_give_the_rows_of_transformers(tiny_reference) -> None:
    """Data parallel: requests land on either engine, are captured and steered there, and the
    other engine's ignorance is not a failure; memory for rows is that of both.
    """
    prompts = [random_prompt(length, length) for length in range(1, 25)]
    added = spec("add", 128, seed=7, layers="all")
    async with opened(tiny_checkpoint("qwen3"), sites=ALL_SITES, **TINY_ENGINE, data_parallel_size=2) as model:
        assert model.serving.engine.engines == 2
        both = CaptureSpec(sites=ALL_SITES)
        _, handles = await model.generate(prompts, SEVEN, capture=both)
        held = [workers[0].requests for workers in await model.serving.engine.workers.get_stats()]
        assert sum(held) == 24
        assert min(held) >= 1  # each request goes to the engine that has less to do just then
        _, samples = await model.generate(prompts[9], {**SIX_STEPS, "n": 4}, capture=both, steering=added)
        alone = await model.run(prompts, {**SIX_STEPS, "n": 3}, steering=added)
        _, steered = await model.generate(prompts, SEVEN, capture=both, steering=added)
        await sketches_agree(model)
        chunks = [one async for one in model.stream(prompts[5], SEVEN, capture=both, steering=added)]
        await model.fetch_captures_batch([*handles, *samples, *steered])
        assert await settled(model) == (0, 0, 0)
    hold(handles, tiny_reference)
    hold(samples, tiny_reference, [added] * 4)
    hold(steered, tiny_reference, [added] * len(prompts))
    assert all(len(one.steering) == 3 for one in alone)
    assert chunks[-1].steering is not None
    full = torch.cat([one.captures[3, "resid_post"] for one in chunks])
    assert torch.allclose(full, steered[5].captures[3, "resid_post"], atol=1e-4)
