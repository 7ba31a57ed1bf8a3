"""Rows in lossy codecs, out of a real engine: every codec at every site, in one batch, streams, samples, files."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from conftest import opened
from support.codecs import CODECS, codecs_agree, compare, spec_of
from support.rows import ALL_SITES, CRAMPED, GREEDY, points, random_prompt, settled
from support.specs import spec

from steercap import Add, Calibration, CaptureHandle, CaptureSpec, Point, Progress, errors
from steercap.lab.directions import calibrate
from steercap.lab.mechanism.codec_check import check_codecs
from steercap.steering import DirectionSet, LayerVectors
from steercap.testing import tiny_checkpoint

SIX = {"max_tokens": 6, **GREEDY}


async def test_every_codec_at_every_site_in_one_batch(tiny) -> None:
    """Raw rows beside each codec's of the same request, clean and steered: within the bounds of their own scales."""
    assert all(share <= 1 for share in (await codecs_agree(tiny)).values())
    added = spec("add", 128, seed=5, layers="all")
    assert all(share <= 1 for share in (await codecs_agree(tiny, steering=added)).values())


async def test_preempted_and_chunked_requests_keep_their_codes() -> None:
    """64 requests, 16 at once, in an engine so small that some are computed twice: the same bounds, nothing held."""
    async with opened(tiny_checkpoint("qwen3"), sites=ALL_SITES, **CRAMPED) as model:
        prompts = [random_prompt(100 + place, 200 + place) for place in range(16)]
        codings = [CODECS[place % len(CODECS)] for place in range(16)]
        params = {"max_tokens": 60, **GREEDY}
        _, raws = await model.generate(prompts, params, capture=CaptureSpec(sites=ALL_SITES))
        _, handles = await model.generate(prompts, params, capture=[spec_of(one, ALL_SITES) for one in codings])
        await model.fetch_captures_batch([*raws, *handles])
        assert sum(handle.receipt.writes - handle.receipt.rows for handle in handles) > 0
        for raw, handle, coding in zip(raws, handles, codings, strict=True):
            assert raw.output_token_ids == handle.output_token_ids
            assert compare(raw, handle, coding) <= 1
        assert await settled(model) == (0, 0, 0)


async def test_streams_samples_and_selections_have_codes_too(tiny) -> None:
    """Chunks of a stream together are the rows of a call; n = 3; last_prompt; rows before their edits."""
    prompt, wanted = random_prompt(20, 9), CaptureSpec(layers=[1], codec="rp16", codec_k=32, codec_seed=2)
    _, handle = await tiny.generate(prompt, SIX, capture=wanted)
    await handle.fetch()
    chunks = [chunk async for chunk in tiny.stream(prompt, SIX, capture=wanted)]
    streamed = torch.cat([chunk.captures[1] for chunk in chunks])
    assert torch.allclose(streamed, handle.captures[1], atol=1e-3)
    params = {"max_tokens": 6, "temperature": 0.8, "seed": 3, "n": 3}
    _, samples = await tiny.generate(prompt, params, capture=CaptureSpec(tokens="last_prompt", codec="int4"))
    await tiny.fetch_captures_batch(samples)
    assert all(len(sample.coded[0]) == 1 for sample in samples)
    edits = Add(torch.ones(128), 50.0, layers="all")
    before = CaptureSpec(layers=[1], codec="fp8", before_edits=True)
    _, clean = await tiny.generate(prompt, SIX, capture=CaptureSpec(layers=[0, 1], before_edits=True), steering=edits)
    _, codes = await tiny.generate(prompt, SIX, capture=before, steering=edits)
    await tiny.fetch_captures_batch([clean, codes])
    assert compare_one(clean, codes, 1)


def compare_one(raw: CaptureHandle, coded: CaptureHandle, layer: int) -> bool:
    off = (coded.captures[layer].double() - raw.captures[layer].double()).abs()
    return bool((off <= coded.coded[layer].error_bound() + 1e-4 * raw.captures[layer].norm(dim=1)[:, None]).all())


@pytest.mark.parametrize("coding", CODECS, ids=str)
async def test_a_file_gives_codes_back_bit_for_bit(tiny, tmp_path, coding) -> None:
    """Codec, parameters, schema and every part; what is decoded follows."""
    _, handle = await tiny.generate(random_prompt(9, 4), SIX, capture=spec_of(coding, ALL_SITES))
    await handle.fetch()
    loaded = CaptureHandle.load(handle.save(tmp_path / "rows.safetensors"))
    assert set(loaded.coded) == set(handle.coded) == set(points(range(4), *ALL_SITES))
    for point, mine in handle.coded.items():
        theirs = loaded.coded[point]
        assert (theirs.coding, theirs.schema) == (mine.coding, mine.schema) == (coding, tiny.points[point])
        assert theirs.parts.keys() == mine.parts.keys()
        for name, part in mine.parts.items():
            assert torch.equal(part.contiguous().view(torch.uint8), theirs.parts[name].contiguous().view(torch.uint8))
        assert torch.equal(loaded.captures[point], handle.captures[point])
        assert torch.equal(theirs.inner(), mine.inner())


async def test_projections_of_two_requests_estimate_their_scalar_products(tiny) -> None:
    """Seeds apart, estimates scatter about the product of the raw rows as their k says."""
    prompts = [random_prompt(12, 1), random_prompt(12, 2)]
    _, (first, second) = await tiny.generate(prompts, SIX, capture_layers=[2])
    specs = [CaptureSpec(layers=[2], codec="rp8", codec_k=64, codec_seed=seed) for seed in range(24)]
    calls = [tiny.generate(prompts, SIX, capture=spec) for spec in specs]
    found = [handles for _, handles in await asyncio.gather(*calls)]
    await tiny.fetch_captures_batch([first, second, *(handle for pair in found for handle in pair)])
    mine, theirs = first.captures[2].double(), second.captures[2].double()
    norms = mine.norm(dim=1)[:, None] * theirs.norm(dim=1)
    off = torch.stack([(one.coded[2].inner(other.coded[2]) - mine @ theirs.T) / norms for one, other in found])
    assert off.square().mean().sqrt() <= (2 / 64) ** 0.5
    assert (off.mean(dim=0).abs() <= 5 * off.std(dim=0) / 24**0.5 + 1e-3).all()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"codec": "rp8"}, "codec_k=512 keeps more numbers than the 128 of a row"),
        ({"codec": "full8", "codec_k": 8}, "codec_k=8 with codec='full8', which has no such parameter"),
        ({"codec": "raw", "codec_seed": 8}, "codec_seed=8 with codec='raw'"),
        ({"codec": "rp8", "codec_k": 0}, "codec_k=0; give an integer from 1"),
        ({"codec": "rp8", "codec_k": 4, "codec_seed": -1}, "codec_seed=-1; give an integer from 0"),
        ({"codec": "rp8", "codec_k": 4, "reduce": "mean"}, "reduce='mean' gives float32 numbers"),
        ({"codec_k": 4, "reduce": "mean"}, "reduce='mean' gives float32 numbers, which codec_k=4"),
        ({"codec": "lz4"}, "unknown codec 'lz4'"),
    ],
)
async def test_what_a_codec_cannot_do_is_said_before_anything_runs(tiny, asked, says) -> None:
    """Named parameters, ranges, and combinations."""
    with pytest.raises(errors.InvalidRequest, match=says):
        await tiny.generate([1, 2], SIX, capture=CaptureSpec(layers=[0], **asked))
    assert await settled(tiny) == (0, 0, 0)


async def test_rows_that_are_raw_have_no_codes(tiny) -> None:
    """And the message says where they are."""
    _, handle = await tiny.generate([1, 2], SIX, capture_layers=[0])
    await handle.fetch()
    assert not handle.coded
    with pytest.raises(errors.InvalidSpec, match=r"not in a lossy codec; captures\[...\] has them"):
        handle.coded[0]


# A step for each element


async def test_a_calibration_gives_each_element_its_own_step(tiny, tmp_path) -> None:
    """Means and spreads are those of the rows; sizes of elements that differ cost nothing; a file gives all back."""
    texts = [random_prompt(30, number) for number in range(8)]
    seen: list[Progress] = []
    sites = ("resid_post", "mlp_out")
    calibration = await calibrate(tiny, texts, layers=[1, 2], sites=sites, progress=seen.append)
    handles = await tiny.read(texts, capture=CaptureSpec(layers=[1, 2], sites=sites, tokens=slice(1, None)))
    await tiny.fetch_captures_batch(handles)
    assert calibration.points == tuple(points([1, 2], *sites))
    assert (calibration.rows, calibration.texts) == (8 * 29, 8)
    assert seen == [Progress("texts", done, 8) for done in (0, 8)]
    for point in calibration.points:
        rows = torch.cat([handle.captures[point] for handle in handles]).double()
        torch.testing.assert_close(calibration.means[point].double(), rows.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(calibration.spreads[point].double(), rows.std(0), rtol=1e-4, atol=1e-6)
    again = Calibration.load(calibration.save(tmp_path / "calibration.safetensors"))
    assert (again.points, again.prompts, again.tokens) == (calibration.points, calibration.prompts, "slice(1, None, 1)")

    prompt = random_prompt(40, 99)
    specs = [
        CaptureSpec(layers=[2], sites=sites),
        CaptureSpec(layers=[2], sites=sites, codec="full8", calibration=calibration),
        CaptureSpec(layers=[2], sites=sites, calibration=again),  # equal ones share what lies in the workers
    ]
    raw, first, second = await tiny.read([prompt] * 3, capture=specs)
    await tiny.fetch_captures_batch([raw, first, second])
    loaded = CaptureHandle.load(first.save(tmp_path / "rows.safetensors"))
    for point in raw.points:
        exact, bound = raw.captures[point].double(), first.coded[point].error_bound()
        assert ((first.captures[point].double() - exact).abs() <= bound + 1e-4 * exact.norm(dim=1)[:, None]).all()
        assert torch.equal(loaded.captures[point], first.captures[point])
        assert torch.equal(loaded.coded[point].error_bound(), bound)
        assert (first.coded[point].parts["q"].int() - second.coded[point].parts["q"].int()).abs().max() <= 1
    assert first.coded[2, "mlp_out"].nbytes == len(prompt) * (8 + 128)
    chunks = [chunk async for chunk in tiny.stream(prompt, SIX, capture=specs[1])]
    streamed = torch.cat([chunk.captures[2, "resid_post"] for chunk in chunks])[: len(prompt)]
    torch.testing.assert_close(streamed, first.captures[2, "resid_post"], rtol=1e-2, atol=0.05)
    assert await settled(tiny) == (0, 0, 0)


async def test_a_calibration_that_does_not_fit_is_said_before_anything_runs(tiny) -> None:
    """Points that it lacks, another model's width, another codec, something else; texts without two rows."""
    point = Point(0, "resid_post")
    narrow, fitting = (Calibration({point: torch.zeros(width)}, {point: torch.ones(width)}) for width in (8, 128))
    for asked, says in (
        (
            {"layers": [0, 1], "calibration": narrow},
            r"has no means and spreads at resid_post\[1\]; it was made at resid_post\[0\]",
        ),
        ({"layers": [0], "calibration": narrow}, r"8 elements at resid_post\[0\], and its rows are 128 of float32"),
        ({"layers": [0], "calibration": 3}, "give a Calibration"),
        ({"layers": [0], "calibration": narrow, "codec": "int4"}, "for codec='full8', not for codec='int4'"),
        ({"layers": [0], "calibration": fitting, "codec": "full8", "codec_k": 3}, "codec_k=3 with codec='full8'"),
        ({"layers": [0], "calibration": narrow, "reduce": "mean"}, "reduce=, project= or sae= keeps none"),
    ):
        with pytest.raises(errors.InvalidRequest, match=says):
            await tiny.generate([1, 2], SIX, capture=CaptureSpec(**asked))
    for texts, says in (([], "no texts"), ("word", "give several in a list"), ([[5, 6]], "have 1 rows")):
        with pytest.raises(errors.InvalidRequest, match=says):
            await calibrate(tiny, texts, layers=[0])
    assert await settled(tiny) == (0, 0, 0)


async def test_a_check_judges_the_codes_of_the_workers(tiny) -> None:
    """Cosines with a direction, of rows that the workers coded, correlate with those of raw rows as the check says."""
    texts = [random_prompt(40, seed) for seed in range(8)]
    way = torch.randn(128, generator=torch.Generator().manual_seed(0))
    directions = DirectionSet({"way": LayerVectors({1: way}, name="way", site="mlp_out")})
    codecs = {"topk8,k=16": 16, "int4": None}
    found = await check_codecs(tiny, texts, sites="mlp_out", candidates=list(codecs), directions=directions)
    cosines = {}
    for codec, k in {"raw": None, **codecs}.items():
        wanted = CaptureSpec(layers=1, sites="mlp_out", codec=codec.partition(",")[0], codec_k=k, tokens=slice(1, None))
        handles = await tiny.read([{"prompt_token_ids": text} for text in texts], capture=wanted)
        await tiny.fetch_captures_batch(handles)
        rows = torch.cat([handle.captures[1, "mlp_out"] for handle in handles])
        cosines[codec] = torch.nn.functional.cosine_similarity(rows.double(), way.double()[None]).numpy()
    measures = {one.codec: one.value for one in found.measures if one.measure == "direction"}
    for codec in codecs:
        assert measures[codec] == pytest.approx(np.corrcoef(cosines["raw"], cosines[codec])[0, 1], abs=1e-3)
    assert measures["topk8,k=16"] < measures["int4"] < measures["raw"] == 1
    assert (found.rows, found.texts) == (8 * 39, 8)
