"""Prompts with pictures: rows, labels, steering, chunks and caches, against transformers' wrapper on the same pictures."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch
from conftest import opened
from support.agreement import rows_agree, sites_of
from support.images import picture
from support.multimodal import (
    BLIND,
    LONG,
    LONGEST,
    WRAPPERS,
    Looking,
    pictures_agree,
    prompt_of,
    runnable,
    wrapper_checkpoint,
)
from support.rows import CRAMPED, GREEDY, counter
from support.specs import vector

from steercap import Add, CaptureHandle, CaptureSpec, SteeringSpec, SteerModel
from steercap.errors import InvalidPrompt
from steercap.testing import Reference

#: Long prompts are read in chunks of 64 tokens.
ENGINE = {**CRAMPED, "max_model_len": LONGEST, "kv_cache_memory_bytes": 16 << 20}
EIGHT = {"max_tokens": 8, **GREEDY}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name not in runnable(),
                reason="this model's processor of videos needs torchvision, which has no build for this torch on CPU",
            ),
        )
        for name in WRAPPERS
        if name not in BLIND
    ],
)
async def served(request) -> AsyncIterator[tuple[str, SteerModel, Looking]]:
    """One wrapper: its name, its engine with all sites armed, and transformers on the same checkpoint."""
    arguments = {**ENGINE, **WRAPPERS[request.param].engine}
    async with opened(wrapper_checkpoint(request.param), sites="all", **arguments) as model:
        yield request.param, model, Looking(request.param)


async def test_rows_are_those_of_transformers(served, record_property) -> None:
    """At all sites, whatever else is in the batch, and wherever a chunk of the prompt ends."""
    name, model, looking = served
    for key, same in (await pictures_agree(model, looking)).items():
        record_property(f"{name} {key}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")


async def test_steering_reaches_the_rows_it_names(served, record_property) -> None:
    """An edit on the rows of the picture alone, on the text alone, and on all of them: each is transformers' with the
    edit made by a hook, and in all rows after it.
    """
    name, model, looking = served
    prompt = prompt_of(name, "a {} b c", picture(5, 70, 56))
    known = await model.read(prompt, capture_layers=0)
    await known.fetch()
    seen = known.positions[known.token_types == "image"].tolist()
    read = known.positions[known.token_types == "text"].tolist()
    push = vector(model.hidden_size, seed=1)
    specs = [
        SteeringSpec([Add(push, 2.0, layer=layer, tokens=tokens)])
        for layer in (0, 2)
        for tokens in (seen, [*read, "generated"], "all")
    ]
    _, handles = await model.generate(
        [prompt] * len(specs), EIGHT, capture=CaptureSpec(sites=sites_of(model)), steering=specs
    )
    await model.fetch_captures_batch(handles)
    for key, same in looking.hold(handles, [prompt] * len(specs), specs).items():
        record_property(f"{name} steered {key}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")
    assert [handle.receipt.steering.rows for handle in handles[:2]] == [(len(seen),), (len(read) + 7,)]


async def test_the_cache_tells_pictures_apart(served) -> None:
    """Prompts of the same tokens and other pictures share no keys and values that follow the picture; one of the same
    picture does.
    """
    name, model, looking = served
    prompts = [prompt_of(name, LONG + "{} " + LONG, picture(seed)) for seed in (6, 7, 6)]
    spec, handles, hits = CaptureSpec(sites=sites_of(model), tokens=["last_prompt", "generated"]), [], []
    for prompt in prompts:
        before = counter(model, "counter_prefix_cache_hits")
        _, handle = await model.generate(prompt, EIGHT, capture=spec)
        handles.append(await handle.fetch())
        hits.append(counter(model, "counter_prefix_cache_hits") - before)
    looking.hold(handles, prompts)
    first = handles[0].media[0].start
    assert hits[1] <= first < hits[2], hits
    assert not torch.equal(handles[0].captures[3, "resid_post"], handles[1].captures[3, "resid_post"])


async def test_labels_come_through_files_and_streams(served, tmp_path) -> None:
    """A file has where the pictures were; the rows of a stream, and what they are of, are those of the whole."""
    name, model, _ = served
    prompt = prompt_of(name, "a {} b", picture(8))
    _, handle = await model.generate(prompt, EIGHT, capture_layers=[1])
    await handle.fetch()
    loaded = CaptureHandle.load(handle.save(tmp_path / "rows.safetensors"))
    assert loaded.media == handle.media
    assert "image" in loaded.token_types.tolist()
    chunks = [chunk async for chunk in model.stream(prompt, EIGHT, capture=CaptureSpec(layers=1))]
    rows = torch.cat([chunk.captures[1] for chunk in chunks if chunk.captures is not None])
    torch.testing.assert_close(rows, handle.captures[1])
    types = [kind for chunk in chunks if chunk.token_types is not None for kind in chunk.token_types.tolist()]
    assert types == handle.token_types.tolist()


async def test_what_cannot_be_looked_at_is_refused(served) -> None:
    """Pictures without a place in the prompt, all or some of them, what is no picture, and pictures in a chat: an error
    each, and nothing is dropped; what is right is answered all the same.
    """
    name, model, _ = served
    wrong = [
        {**prompt_of(name, "a {} b", picture(1)), "prompt": "a b"},
        {**prompt_of(name, "a {} b", picture(1)), "multi_modal_data": {"image": [picture(1), picture(2)]}},
        {**prompt_of(name, "a {} b", picture(1)), "multi_modal_data": {"image": 5}},
        {**prompt_of(name, "a {} b", picture(1)), "multi_modal_data": {"image": None}},
        {**prompt_of(name, "a {} b", picture(1)), "multi_modal_data": {"sound": [1]}},
        {**prompt_of(name, "a {} b", picture(1)), "multi_modal_uuids": {"image": ["x"]}},
    ]
    for prompt in wrong:
        with pytest.raises(InvalidPrompt):
            await model.generate(prompt, EIGHT)
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(InvalidPrompt, match=r"give model\.generate"):
        await model.chat([{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}])
    async with await model.read(prompt_of(name, "a {} b", picture(1)), capture_layers=0) as handle:
        assert "image" in handle.token_types


@pytest.mark.skipif("qwen3_vl" in runnable(), reason="torchvision is installed")
async def test_text_alone_is_served_without_torchvision(record_property) -> None:
    """A model whose pictures need torchvision reads text as transformers does, and refuses a picture with the reason."""
    path = wrapper_checkpoint("qwen3_vl")
    async with opened(path, sites="all", **ENGINE) as model:
        for key, same in (await rows_agree(model, Reference(path))).items():
            record_property(key, f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")
        with pytest.raises(InvalidPrompt, match="of kind 'image', which this model prepares with torchvision"):
            await model.generate(prompt_of("qwen3_vl", "a {} b", picture(1)), EIGHT)
        assert (await model.generate("a b", EIGHT))[0]
