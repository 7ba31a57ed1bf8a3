"""Sketches on engines: what the workers added up is what the rows themselves give, whoever asks at once and however it ends."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from conftest import opened
from support.rows import ALL_SITES, GREEDY, TINY_ENGINE, counter, random_prompt, settled
from support.sketching import moments_hold, rows_by_point, sketches_agree

from steercap import Add, CaptureSpec, Sketch, errors
from steercap.captures.stacking import flat
from steercap.testing import tiny_checkpoint

SIX = {"max_tokens": 6, **GREEDY}
LAYERS = [0, 3]


async def freed(model) -> None:
    """Nothing of a sketch, nor of what joined it, is left."""
    assert await settled(model) == (0, 0, 0)
    stats = await model.stats()
    assert (stats.sketches, stats.sketch_bytes_in_use) == (0, 0)


async def test_mean_and_covariance_of_requests_that_join(tiny, tmp_path) -> None:
    """Those of the rows that another run of the same prompts hands over, up to what two runs differ by."""
    prompts = [random_prompt(10 + seed, seed) for seed in range(6)]
    async with tiny.sketch("moments", layers=LAYERS, sites=["resid_post", "mlp_out"]) as sketch:
        texts = await tiny.generate(prompts, SIX)
        assert all(isinstance(text, str) for text in texts)
        assert (sketch.requests, sketch.rows) == (6, sum(15 + seed for seed in range(6)))
        stats = await tiny.stats()
        assert (stats.sketches, stats.sketch_bytes_in_use) == (1, 4 * (2 * 4 * 128 * 128 + 8 * 128))
        found = await sketch.fetch()
        mean, covariance = await sketch.mean(3, "mlp_out"), await sketch.covariance(-1, "mlp_out")
        first = await sketch.principal_directions([0, -1], 3, "resid_post")
    _, handles = await tiny.generate(prompts, SIX, capture=CaptureSpec(layers=LAYERS, sites=["resid_post", "mlp_out"]))
    await tiny.fetch_captures_batch(handles)
    moments_hold(found, rows_by_point(handles))
    assert torch.equal(mean, found.mean(3, "mlp_out"))
    assert torch.equal(covariance, found.covariance(3, "mlp_out"))
    assert first == found.principal_directions([0, 3], 3, "resid_post")
    assert np.allclose(first.at(3).norm(dim=1), 1)
    loaded = Sketch.load(found.save(tmp_path / "s.safetensors"))
    assert loaded.merge(found).rows == 2 * found.rows
    await freed(tiny)


async def test_two_sketches_of_the_same_requests_and_rows_beside_them(tiny) -> None:
    """Moments and frequent directions, of other points, and the rows of the very same run."""
    assert await sketches_agree(tiny) < 1e-6
    await freed(tiny)


@pytest.mark.parametrize("tokens", ["generated", "last_prompt", [0, -1, "generated"]])
async def test_tokens_and_samples(tiny, tokens) -> None:
    """The rows of a selection alone; each sample is a request, as it is a handle; read and stream join too."""
    spec = CaptureSpec(layers=2, tokens=tokens)
    four = {"max_tokens": 7, "n": 4, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    async with tiny.sketch("moments", layers=2, tokens=tokens) as sketch:
        _, handles = await tiny.generate(random_prompt(12, 1), four, capture=spec)
        chunks = [chunk async for chunk in tiny.stream(random_prompt(5, 2), SIX)]
        assert all(chunk.captures is None for chunk in chunks)
        if tokens == "generated":
            with pytest.raises(errors.EmptySelection):
                await tiny.read(random_prompt(8, 3))
        else:
            assert await tiny.read([random_prompt(8, 3)] * 2) == [None, None]
        assert sketch.requests == (5 if tokens == "generated" else 7)
        found = await sketch.fetch()
    _, streamed = await tiny.generate(random_prompt(5, 2), SIX, capture=spec)
    read = [] if tokens == "generated" else await tiny.read([random_prompt(8, 3)] * 2, capture=spec)
    everything = [*handles, streamed, *read]
    await tiny.fetch_captures_batch(everything)
    moments_hold(found, rows_by_point(everything))


async def test_what_a_request_captures_for_itself_must_hold_what_is_sketched(tiny) -> None:
    """At least its points, its tokens, and raw rows; the handle is like any other."""
    async with tiny.sketch("variances", layers=[1]) as sketch:
        _, handle = await tiny.generate(random_prompt(9, 1), SIX, capture=CaptureSpec(sites=ALL_SITES))
        async with handle:
            torch.testing.assert_close(await sketch.mean(1), handle.captures[1, "resid_post"].double().mean(0))
        for own in (
            CaptureSpec(layers=[0]),
            CaptureSpec(tokens="prompt"),
            CaptureSpec(reduce="mean"),
            CaptureSpec(codec="full8"),
            CaptureSpec(before_edits=True),
        ):
            with pytest.raises(errors.InvalidSpec, match="one set of captured rows"):
                await tiny.generate(random_prompt(9, 1), SIX, capture=own)
        assert sketch.requests == 1
    await freed(tiny)


async def test_a_request_that_fails_is_not_in_it(tiny) -> None:
    """Its neighbours are, and the error is its own."""
    wild = Add(torch.full((128,), 1e30), 1e8, layer=0, tokens="prompt")
    async with tiny.sketch("moments", layers=[3]) as sketch:
        kept = asyncio.create_task(tiny.generate([random_prompt(20, seed) for seed in range(4)], SIX))
        with pytest.raises(errors.SteeringNotApplied, match="overflows"):
            await tiny.generate(random_prompt(9, 1), SIX, steering=wild)
        with pytest.raises(errors.InvalidPrompt):
            await tiny.generate([], SIX)
        await kept
        assert (sketch.requests, sketch.rows) == (4, 100)
        assert (await sketch.fetch()).rows == 100
    await freed(tiny)


async def test_steered_rows_are_sketched_as_they_are(tiny) -> None:
    """After their edits by default, before them on request."""
    push, prompt = Add(torch.ones(128), 5.0, layer=2), random_prompt(9, 1)
    async with tiny.steered(push), tiny.sketch(layers=2) as after, tiny.sketch(layers=2) as again:
        await tiny.generate(prompt, SIX)
        assert torch.equal(await after.mean(2), await again.mean(2))
        with pytest.raises(errors.InvalidRequest, match="before edits"):
            async with tiny.sketch(layers=2, before_edits=True):
                pass
        mean = await after.mean(2)
    async with tiny.sketch(layers=2, before_edits=True) as before:
        await tiny.generate(prompt, SIX, steering=push)
        difference = mean - await before.mean(2)
    assert torch.allclose(difference, torch.full((128,), 5.0).double(), atol=1e-4)


async def test_sixty_four_requests_some_of_them_cancelled(cramped) -> None:
    """All that ended are in it, none of the others: in whatever phase they were."""
    async with cramped.sketch("moments", layers=LAYERS) as sketch:
        kept = [
            asyncio.create_task(
                cramped.generate(random_prompt(10 + seed, seed), SIX, capture=CaptureSpec(layers=LAYERS))
            )
            for seed in range(52)
        ]
        long = {"max_tokens": 150, **GREEDY}
        doomed = [asyncio.create_task(cramped.generate(random_prompt(90, 100 + seed), long)) for seed in range(12)]
        for number, task in enumerate(doomed):
            await kept[4 * number]
            assert not task.done()
            task.cancel()
        ended = await asyncio.gather(*doomed, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        handles = flat([(await task)[1] for task in kept])
        assert sketch.requests == 52
        found = await sketch.fetch()
    await cramped.fetch_captures_batch(handles)
    moments_hold(found, rows_by_point(handles))
    del handles, kept
    await freed(cramped)


async def test_preemption(cramped) -> None:
    """What is thrown out and computed again is counted once."""
    before = counter(cramped, "counter_num_preempted_reqs")
    async with cramped.sketch("moments", layers=LAYERS) as sketch:
        prompts = [random_prompt(100 + seed, seed) for seed in range(16)]
        _, handles = await cramped.generate(prompts, {"max_tokens": 60, **GREEDY}, capture=CaptureSpec(layers=LAYERS))
        found = await sketch.fetch()
    await cramped.fetch_captures_batch(handles)
    assert counter(cramped, "counter_num_preempted_reqs") > before
    assert found.rows == sum(len(prompt) + 59 for prompt in prompts)
    moments_hold(found, rows_by_point(handles))


async def test_more_rows_than_there_is_memory_for_go_through() -> None:
    """A call of many prompts, of which few fit at once: each makes room when it has entered. Closing the model inside a
    sketch frees it, and its end is quiet.
    """
    async with opened(tiny_checkpoint("qwen3"), capture_bytes=1 << 20, **TINY_ENGINE) as model:
        prompts = [random_prompt(200, seed) for seed in range(24)]
        async with model.sketch("variances") as sketch:
            await model.generate(prompts, {"max_tokens": 1, **GREEDY})
            assert sketch.rows == 24 * 200
            stats = await model.stats()
            assert 5 * stats.capture_bytes < 24 * 200 * 4 * 128 * 4
            await model.aclose()
            with pytest.raises(errors.ModelClosed):
                await sketch.fetch()


async def test_no_room_and_wrong_arguments(tiny) -> None:
    """Before anything runs."""
    with pytest.raises(errors.SketchMemoryFull, match=r"it needs [\d,]+ bytes.*sketch_bytes="):
        async with tiny.sketch("frequent_directions", size=10_000_000):
            pass
    for arguments, error in (
        ({"kind": "medians"}, errors.UnknownName),
        ({"size": 5}, errors.InvalidSpec),
        ({"kind": "frequent_directions", "size": 0}, errors.InvalidSpec),
        ({"layers": 9}, errors.LayerOutOfRange),
        ({"sites": "router"}, errors.PointNotArmed),
        ({"tokens": "none"}, errors.InvalidSelection),
    ):
        with pytest.raises(error):
            async with tiny.sketch(**arguments):
                pass
    await freed(tiny)


async def test_the_end_of_the_context_is_the_end(tiny) -> None:
    """What still runs in it fails, and says why; so does whoever reads it."""
    async with tiny.sketch("moments", layers=[1]) as sketch:
        late = asyncio.create_task(tiny.generate(random_prompt(9, 1), {"max_tokens": 100, **GREEDY}))
        await asyncio.sleep(0.05)
    with pytest.raises(errors.SketchClosed, match="its statistics are freed"):
        await late
    for read in (lambda: sketch.mean(1), sketch.fetch):
        with pytest.raises(errors.SketchClosed, match="its statistics are freed"):
            await read()
    assert "closed" in repr(sketch)
    assert isinstance(await tiny.generate(random_prompt(9, 1), SIX), str)
    await freed(tiny)
