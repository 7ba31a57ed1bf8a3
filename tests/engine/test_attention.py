"""What attention that is computed of captured rows is refused for, and where; weights: tests/engine/test_families.py."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
import torch
from conftest import opened
from support.attention import QUERIES_AND_KEYS, attention_agrees, hold_targets
from support.rows import GREEDY, TINY_ENGINE, hold, random_prompt
from support.specs import spec

from steercap import CaptureHandle, CaptureSpec, Point, SteerModel
from steercap.adapters import server
from steercap.captures.recordings import Recordings
from steercap.captures.site_codecs import SiteCodecs
from steercap.core.schema import PointSchema
from steercap.errors import (
    InvalidRequest,
    InvalidSelection,
    InvalidSetting,
    InvalidSpec,
    LayerOutOfRange,
    UnsupportedModel,
    UnsupportedRunner,
)
from steercap.lab.datasets import ActivationDataset
from steercap.lab.datasets.collecting import collect
from steercap.server.record_settings import RecordSettings
from steercap.server.recording import Recorder
from steercap.server.server import ServerSettings, application
from steercap.testing import Reference, tiny_checkpoint

SITES = ("q", "k", "v", "resid_post")


@pytest.fixture(scope="module")
async def gemma() -> AsyncIterator[SteerModel]:
    """Tiny Gemma 2: layers with a window of 24 and without, a soft cap, a scale of its own."""
    async with opened(tiny_checkpoint("gemma2"), sites=SITES, **TINY_ENGINE) as model:
        yield model


async def test_a_file_keeps_what_weights_need_and_a_wrong_rule_would_show(gemma: SteerModel, tmp_path) -> None:
    """A loaded handle gives the same weights; without its window, its cap or its own scale they would be others."""
    handle = await gemma.read(random_prompt(60, 1), capture=QUERIES_AND_KEYS)
    await handle.fetch()
    late = await gemma.read(random_prompt(60, 1), capture=CaptureSpec(sites=("q", "k"), tokens=slice(20, None)))
    await late.fetch()
    refused = {
        "reduced, by 'mean'": CaptureSpec(sites=("q", "k"), reduce="mean"),
        "kept as full8": CaptureSpec(sites=("q", "k"), codec="full8"),
        "before the edits": CaptureSpec(sites=("q", "k"), before_edits=True),
    }
    steered = spec("add", 128, seed=1, layers=[0], site="q")
    for says, asked in refused.items():
        _, other = await gemma.generate([1, 2, 3], {"max_tokens": 2, **GREEDY}, capture=asked, steering=steered)
        await other.fetch()
        with pytest.raises(InvalidRequest, match=says):
            other.attention(0)
    _, keys = await gemma.generate([1, 2, 3], {"max_tokens": 2, **GREEDY}, capture=CaptureSpec(sites="k"))
    await keys.fetch()
    with pytest.raises(LayerOutOfRange, match=r"q\[0\] was not captured"):
        keys.attention(0)
    again = CaptureHandle.load(handle.save(tmp_path / "rows.safetensors"))
    assert again.attention_rules == handle.attention_rules
    for layer in range(4):
        assert torch.equal(again.attention_pattern(layer), handle.attention_pattern(layer))
    true = handle.attention_pattern(-2)
    for wrong in ({"window": None}, {"scale": 32**-0.5}, {"soft_cap": None}):
        again.attention_rules[2] = msgspec.structs.replace(handle.attention_rules[2], **wrong)
        assert (again.attention_pattern(2) - true).abs().max() > 1e-3, f"{wrong} would not be noticed"
    # Of the tokens from 20 on: with a window of 24, those from 43 on have all their keys; without, none has.
    with pytest.raises(InvalidSelection, match=r"position 20 reads the keys of positions 0 to 20, and 1 of these 21"):
        late.attention(0)
    assert torch.allclose(
        late.attention_pattern(0, tokens=slice(43, None)), handle.attention_pattern(0)[:, 43:, 20:], atol=1e-6
    )
    with pytest.raises(InvalidSelection, match="reads the keys of positions 0 to 59"):
        late.attention(1, tokens=59)
    with pytest.raises(InvalidSelection, match="no row of position 3 was captured"):
        late.attention(0, tokens=3)
    with pytest.raises(InvalidRequest, match="takes 57,600 bytes, and max_bytes is 57,599"):
        handle.attention_pattern(0, max_bytes=57_599)


@pytest.mark.usefixtures("two_workers")
async def test_two_workers_share_heads() -> None:
    """At tensor parallel 2 each rank has half the heads; of one head of keys each has a copy, which is kept once."""
    path = tiny_checkpoint("gemma2", num_key_value_heads=1)
    async with opened(path, sites=SITES, **TINY_ENGINE, tensor_parallel_size=2) as model:
        assert model.points[Point(2, "q")] == PointSchema((4, 32), "float32", shards=2)
        assert model.points[Point(2, "k")] == PointSchema((1, 32), "float32")
        reference = Reference(path)
        await attention_agrees(model, reference)
        with pytest.raises(InvalidRequest, match="several tensor-parallel ranks share key heads"):
            await model.read([1, 2, 3], capture=CaptureSpec(attention=8))
        specs = [
            spec(name, model.points[0, site].width, seed=5, layers="all", site=site)
            for name in ("add", "replace")
            for site in ("q", "k", "v")
        ]
        _, handles = await model.generate(
            [random_prompt(40, 2)] * 6, {"max_tokens": 4, **GREEDY}, capture=CaptureSpec(sites=SITES), steering=specs
        )
        await model.fetch_captures_batch(handles)
    hold(handles, reference, specs)


async def test_heads_that_cannot_be_had_are_refused_before_anything_starts() -> None:
    """More ranks than heads of keys, and a family whose attention is not called as a module."""
    with pytest.raises(UnsupportedRunner, match="2 key heads, so that some of the 4 tensor-parallel ranks hold copies"):
        await SteerModel(str(tiny_checkpoint("llama")), sites=("k", "q"), tensor_parallel_size=4, **TINY_ENGINE).start()
    with pytest.raises(UnsupportedModel, match="this model has no q"):
        await SteerModel(str(tiny_checkpoint("olmo2")), sites=("q", "z"), **TINY_ENGINE).start()


async def test_workers_summarise_what_the_handle_would(gemma: SteerModel, tmp_path) -> None:
    """In chunks, with cached prefixes and after others: windows, caps and sinks as `handle.attention` has them."""
    prompt, params = random_prompt(60, 1), {"max_tokens": 8, **GREEDY}
    for asked in (CaptureSpec(attention=8), CaptureSpec(attention=3, layers=[1, -1], tokens=slice(0, 50))):
        raw = CaptureSpec(sites=("q", "k"), layers=asked.layers, tokens=asked.tokens)
        _, (kept, whole) = await gemma.generate([prompt] * 2, params, capture=[asked, raw])
        await whole.fetch()
        (all_of_it,) = [chunk async for chunk in kept.chunks(10)]  # a summary is not parted
        assert torch.equal(all_of_it.positions, whole.positions)
        again = CaptureHandle.load(kept.save(tmp_path / "kept.safetensors"))
        assert again.points == tuple(point for point in whole.points if point.site == "q")
        for layer in whole.captures.layers:
            found, wanted = again.attention(layer), whole.attention(layer, top=asked.attention)
            assert torch.equal(found.positions, wanted.positions)
            assert (found.targets != wanted.targets).float().mean() < 0.02  # of equal weights, after other batches
            for name in ("weights", "first", "sink"):
                torch.testing.assert_close(getattr(found, name), getattr(wanted, name), atol=0.5 / 255 + 1e-4, rtol=0)
            torch.testing.assert_close(found.entropy, wanted.entropy, atol=1e-4, rtol=2**-10)
    with pytest.raises(InvalidRequest, match="3 targets of each head and token were kept"):
        again.attention(1, top=4)
    with pytest.raises(InvalidSpec, match=r"targets of attention.*use handle.attention\(layer\)"):
        again.captures[1, "q"]
    with pytest.raises(InvalidRequest, match="and the weights of all tokens are computed from"):
        again.attention_pattern(1)


async def test_a_data_set_keeps_targets_of_each_window(gemma: SteerModel, tmp_path) -> None:
    """Those of transformers' weights, under the labels that rows have, in the bytes of a summary."""
    documents = [random_prompt(length, length) for length in (50, 1, 33)]
    found = await collect(gemma, documents, tmp_path, layers=[0, -1], attention=5, context=40, documents_per_shard=2)
    data, reference = ActivationDataset(tmp_path, labels=True), Reference(tiny_checkpoint("gemma2"))
    index = data[:]
    windows = [(d, w, ids[40 * w : 40 * w + 40]) for d, ids in enumerate(documents) for w in range(-(-len(ids) // 40))]
    for document, window, ids in windows:
        rows = torch.where((index.document == document) & (index.window == window))[0]
        assert index.token[rows].tolist() == ids
        for layer in (0, -1):
            hold_targets(data.attention(rows, layer), reference.attention(ids)[layer])
    assert torch.equal(data.attention(7, 0).targets, data.attention(slice(7, 8), 0).targets)
    assert found.totals.rows == len(data) == 84
    assert data.folder.definition.row_bytes == 2 * gemma.points[Point(0, "q")].shape[0] * (3 * 5 + 4)
    with pytest.raises(InvalidRequest, match=r"attention\(layer=1\); give a layer with targets, 0, 3$"):
        data.attention(0, 1)
    with pytest.raises(InvalidRequest, match="give a layer with targets, 0, 3, and a join= other than 'mix'"):
        ActivationDataset(tmp_path, join="mix").attention(0, 0)
    with pytest.raises(InvalidSetting, match=r"give torch\.float32"):
        ActivationDataset(tmp_path, dtype=torch.bfloat16)
    for asked in ({"codec": "rp8"}, {"attention": 128}, {"sites": "v"}):  # 128 take more bytes than queries and keys
        with pytest.raises(InvalidSpec):
            await collect(gemma, documents, tmp_path / "no", **{"attention": 5, **asked})


async def test_a_server_records_targets_alone(gemma: SteerModel, tmp_path) -> None:
    """Of an unmodified client's two samples: the workers summarise, and no queries or keys are written."""
    settings = RecordSettings(tmp_path, SiteCodecs.parse(["attention=4"]), layers=[1, 3])
    body = {"model": "tiny", "prompt": random_prompt(40, 8), "n": 2, "max_tokens": 4, "seed": 1, "ignore_eos": True}
    async with Recorder.of(settings, gemma.serving.model) as recorder:
        recorder.check(gemma)
        flags = server.read_flags(gemma.serving.model, ["--served-model-name", "tiny"])
        app = await application(gemma, flags, ServerSettings(record=settings), recorder=recorder)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    (request,) = Recordings.load(tmp_path).requests
    reference, kept = Reference(tiny_checkpoint("gemma2")), request.handles()
    assert [(one.points, len(one.positions)) for one in kept] == [((Point(1, "q"), Point(3, "q")), 43)] * 2
    for one in kept:
        weights = reference.attention([*one.prompt_token_ids, *one.output_token_ids][:-1])
        for layer in (1, 3):
            hold_targets(one.attention(layer), weights[layer])
    heads, files = gemma.points[Point(1, "q")].shape[0], list(tmp_path.rglob("*.safetensors"))
    assert sum(path.stat().st_size for path in files) < len(files) * (43 * 2 * heads * (3 * 4 + 4) + 4096)
