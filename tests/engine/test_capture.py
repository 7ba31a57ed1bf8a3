"""What a user asks is what comes back: selections, reductions, samples, labels, files."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.rows import (
    ALL_SITES,
    GREEDY,
    MAX_ERROR,
    MIN_COSINE,
    flattened,
    parity,
    points,
    random_prompt,
    settled,
    worst,
)

from steercap import Add, CaptureHandle, CaptureSpec, errors, stack
from steercap.core.spec import REDUCTIONS
from steercap.testing import compare_rows

SIX = {"max_tokens": 6, **GREEDY}


def hold(found: dict[str, Any]) -> None:
    """Assert the float32 bounds for the worst row."""
    for name, same in found.items():
        assert same.cosine > MIN_COSINE, name
        assert same.error < MAX_ERROR, name


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("all", list(range(25))),
        ("prompt", list(range(20))),
        ("generated", list(range(20, 25))),
        ("last_prompt", [19]),
        (-1, [19]),
        ([0, -20, 7, -2], [0, 7, 18]),
        (slice(3, 8), [3, 4, 5, 6, 7]),
        (slice(-3, None), list(range(17, 25))),
        (slice(None, None, 9), [0, 9, 18]),
        (range(18, 22), [18, 19, 20, 21]),
        (["last_prompt", slice(21, 23), 0], [0, 19, 21, 22]),
    ],
)
async def test_a_selection_gives_those_rows_and_no_others(tiny, tiny_reference, tokens, expected) -> None:
    """`tokens=` selects positions exactly; each row is the one of its position."""
    prompt = random_prompt(20, 1)
    _, handle = await tiny.generate(prompt, SIX, capture=CaptureSpec(layers=[0, -1], tokens=tokens))
    await handle.fetch()
    assert handle.positions.tolist() == expected
    assert handle.receipt.rows == len(expected)
    hold(parity(handle, tiny_reference))


@pytest.mark.parametrize("layers", [2, -1, [0, -1], slice(1, None), range(0, 4, 2), "all", slice(None, None, -1)])
async def test_layers_are_those_asked_for(tiny, tiny_reference, layers) -> None:
    """Any way to write layers gives the same rows as transformers has there."""
    _, handle = await tiny.generate(random_prompt(9, 2), SIX, capture_layers=layers)
    await handle.fetch()
    every = range(4)
    wanted = every if layers == "all" else every[layers] if isinstance(layers, slice) else layers
    wanted = [wanted] if isinstance(wanted, int) else wanted
    assert handle.captures.layers == tuple(sorted({layer % 4 for layer in wanted}))
    hold(parity(handle, tiny_reference))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("tokens", ["all", "generated", [0, 3, -1]])
async def test_a_reduction_is_that_of_the_rows_in_float32(tiny, reduce, tokens) -> None:
    """A reduction in the worker equals the same reduction of the rows, and one row travels."""
    prompt = random_prompt(50, 3)
    spec = CaptureSpec(sites=ALL_SITES, tokens=tokens)
    _, (full, reduced) = await tiny.generate(
        [prompt, prompt], SIX, capture=[spec, CaptureSpec(sites=ALL_SITES, tokens=tokens, reduce=reduce)]
    )
    await tiny.fetch_captures_batch([full, reduced])
    assert reduced.positions.tolist() == full.positions.tolist()
    for point, rows in full.captures.items():
        by_hand = {
            "mean": rows.double().mean(0),
            "sum": rows.double().sum(0),
            "max": rows.double().amax(0),
            "last": rows.double()[-1],
        }[reduce]
        got = reduced.captures[point]
        assert got.dtype == torch.float32
        assert got.shape == (1, rows.shape[1])
        # Rounding of a float32 sum of 55 rows; the two requests were batched together, not bit-equal alone.
        torch.testing.assert_close(got[0].double(), by_hand, rtol=1e-5, atol=1e-4)


async def test_samples_of_one_prompt_are_told_apart(tiny, tiny_reference) -> None:
    """`n=4` gives four handles with the rows of their own tokens."""
    params = {"n": 4, "temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    texts, handles = await tiny.generate([random_prompt(12, 4), random_prompt(5, 5)], params, capture_layers="all")
    assert [len(group) for group in texts] == [len(group) for group in handles] == [4, 4]
    await tiny.fetch_captures_batch(handles)
    for group in handles:
        assert len({handle.output_token_ids for handle in group}) == 4
        assert len({handle.request_id for handle in group}) == 4
    hold(worst(parity(handle, tiny_reference) for handle in flattened(handles)))


async def test_a_stop_string_ends_the_rows_where_the_tokens_end(tiny, tiny_reference) -> None:
    """The engine may run on past a stop string that only the client sees; those rows are not handed over."""
    prompt = random_prompt(8, 6)
    full = await tiny.run(prompt, {"max_tokens": 40, **GREEDY})
    text = full.output.outputs[0].text
    stop = next(text[at : at + 2] for at in range(6, len(text) - 2) if text[at : at + 2].strip())
    raw = await tiny.run(prompt, {"max_tokens": 40, "stop": [stop], **GREEDY}, capture_layers="all")
    handle = await raw.handle.fetch()
    tokens = len(raw.output.outputs[0].token_ids)
    assert tokens < 40
    assert handle.receipt.rows == 8 + tokens - 1
    hold(parity(handle, tiny_reference))


async def test_each_prompt_may_have_its_own_spec_or_none(tiny, tiny_reference) -> None:
    """`capture=[a, None, b]` keeps what each asks and nothing for None."""
    specs = [CaptureSpec(layers=0), None, CaptureSpec(layers=[1, 2], sites=["mlp_out", "resid_pre"], tokens="prompt")]
    texts, handles = await tiny.generate([random_prompt(6, seed) for seed in range(3)], SIX, capture=specs)
    assert len(texts) == 3
    assert handles[1] is None
    await tiny.fetch_captures_batch(handles)
    assert tuple(handles[0].captures) == points([0], "resid_post")
    assert set(handles[2].captures) == set(points([1, 2], "mlp_out", "resid_pre"))
    hold(worst([parity(handles[0], tiny_reference), parity(handles[2], tiny_reference)]))


async def test_tokens_are_the_same_with_and_without_capture(tiny) -> None:
    """Capturing changes no token."""
    prompts = [random_prompt(length, length) for length in (1, 5, 60)]
    params = {"max_tokens": 30, **GREEDY}
    bare = await tiny.run(prompts, params)
    raws = await tiny.run(prompts, params, capture=CaptureSpec(sites=ALL_SITES))
    handles = [raw.handle for raw in raws]
    assert [raw.output.outputs[0].token_ids for raw in raws] == [raw.output.outputs[0].token_ids for raw in bare]
    assert [tuple(raw.output.outputs[0].token_ids) for raw in raws] == [handle.output_token_ids for handle in handles]


async def test_reading_gives_the_rows_of_every_token(tiny, tiny_reference, tmp_path) -> None:
    """`read` is a forward pass: a row for each token of each text, the last one too, and nothing generated."""
    prompts = [random_prompt(length, length) for length in (1, 7, 30)]
    handles = await tiny.read(prompts, capture=CaptureSpec(sites=ALL_SITES))
    await tiny.fetch_captures_batch(handles)
    for prompt, handle in zip(prompts, handles, strict=True):
        assert (handle.text, handle.output_token_ids, list(handle.prompt_token_ids)) == ("", (), prompt)
        assert handle.token_ids.tolist() == prompt
        known = tiny_reference.rows(prompt, handle.points)
        hold({str(point): compare_rows(handle.captures[point], known[point]) for point in handle.points})
    assert stack(handles, site="resid_post").shape == (3, 4, 128)
    assert torch.equal(stack(handles, -1, site="mlp_out")[1, 2], handles[1].captures[2, "mlp_out"][6])
    loaded = CaptureHandle.load(handles[1].save(tmp_path / "read.safetensors"))
    assert (loaded.text, loaded.output_token_ids) == ("", ())
    assert torch.equal(stack([loaded], site="resid_post"), stack(handles[1:2], site="resid_post"))
    one = await tiny.read(prompts[1])
    async with one:
        assert [point.site for point in one.points] == ["resid_post"] * 4
        torch.testing.assert_close(one.captures[2], handles[1].captures[2, "resid_post"], rtol=1e-4, atol=1e-4)


async def test_reading_takes_what_generating_takes(tiny) -> None:
    """One capture each, reductions, steering with its receipt; and what it cannot do is an error before it runs."""
    prompts = [random_prompt(5, 1), random_prompt(6, 2), random_prompt(7, 3)]
    specs = [CaptureSpec(layers=1), None, CaptureSpec(layers=[1, 2], reduce="mean")]
    edit = Add(torch.ones(128), layer=1, tokens="prompt")
    first, nothing, mean = await tiny.read(prompts, capture=specs, steering=[edit, None, None])
    await tiny.fetch_captures_batch([first, nothing, mean])
    assert nothing is None
    assert first.receipt.steering.rows == (5,)
    assert mean.captures[2].shape == (1, 128)
    plain = await (await tiny.read(prompts[0], capture_layers=1)).fetch()
    assert torch.allclose(first.captures[1], plain.captures[1] + 1, atol=1e-5)
    with pytest.raises(errors.EmptySelection, match="generated"):
        await tiny.read(prompts[0], capture=CaptureSpec(tokens="generated"))
    with pytest.raises(errors.InvalidPrompt, match="256 tokens"):
        await tiny.read(random_prompt(256, 4))
    assert await tiny.read(random_prompt(255, 4), capture_layers=0)


async def test_generated_rows_that_never_came_are_an_empty_tensor(tiny) -> None:
    """A reply of one token has no generated row: empty, with or without reduction, never made up."""
    prompt = random_prompt(10, 11)
    (first,) = (await tiny.run(prompt, {"max_tokens": 1, **GREEDY})).output.outputs[0].token_ids
    params = {"max_tokens": 8, "temperature": 0.0, "stop_token_ids": [first]}
    for reduce in (None, "mean"):
        raw = await tiny.run(prompt, params, capture=CaptureSpec(layers=1, tokens="generated", reduce=reduce))
        handle = await raw.handle.fetch()
        assert len(raw.output.outputs[0].token_ids) == 1
        assert handle.captures[1].shape == (0, 128)
        assert handle.positions.tolist() == []


async def test_fetch_is_lazy_idempotent_and_one_call_for_all(tiny, monkeypatch) -> None:
    """Nothing moves before `fetch`; a batch is one question; fetched rows are not fetched again."""
    calls = []
    ((channel,),) = tiny.serving.engine.workers._channels
    original = channel.ask

    def counted(frame: bytes) -> asyncio.Future[bytes]:
        calls.extend([frame] if b"Collect" in frame or b"Read" in frame else [])  # not the freeing of earlier rows
        return original(frame)

    monkeypatch.setattr(channel, "ask", counted)
    _, handles = await tiny.generate([random_prompt(10, seed) for seed in range(8)], SIX, capture_layers=[1])
    assert not calls
    await tiny.fetch_captures_batch(handles)
    assert len(calls) == 1
    rows = handles[0].captures[1]
    await tiny.fetch_captures_batch(handles)
    await handles[0].fetch()
    assert len(calls) == 1
    assert handles[0].captures[1] is rows


async def test_bytes_over_rpc_equal_shared_memory(tiny) -> None:
    """The wire gives the same rows as shared memory, bit for bit, in as many RPCs as their size asks for."""
    from steercap.worker import memory

    engine = tiny.serving.engine
    ((rank,),) = engine._ranks
    assert isinstance(rank.reader, memory.SharedReader)
    prompt = random_prompt(100, 12)
    _, handle = await tiny.generate(prompt, SIX, capture=CaptureSpec(sites=ALL_SITES))
    wire = memory.WireReader(engine.workers.line_source(0, rank.attached.nonce))
    (shared,) = await engine.collect([handle.lifecycle.source.wanted])
    engine._ranks = ((replace(rank, reader=wire),),)
    try:
        for size in (memory.WIRE_BYTES, 4096):
            memory.WIRE_BYTES, before = size, memory.WIRE_BYTES
            try:
                (sent,) = await engine.collect([handle.lifecycle.source.wanted])
            finally:
                memory.WIRE_BYTES = before
            assert shared.shards.keys() == sent.shards.keys()
            assert all(torch.equal(shared.shards[point][0], sent.shards[point][0]) for point in shared.shards)
        await handle.fetch()
    finally:
        engine._ranks = ((rank,),)
    assert handle.captures[3, "resid_post"].shape == (105, 128)


async def test_a_file_gives_the_handle_back(tiny, tmp_path) -> None:
    """`save` and `load` keep rows bit for bit, and all that the handle knows."""
    conversation = [{"role": "user", "content": "hi"}]
    spec = CaptureSpec(layers=[0, 3], sites=["resid_post", "attn_out"])
    template = {"chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"}
    _, handle = await tiny.chat(conversation, SIX, capture=spec, chat_template_kwargs=template)
    await handle.fetch()
    loaded = CaptureHandle.load(handle.save(tmp_path / "deep" / "rows.safetensors"))
    assert all(torch.equal(loaded.captures[point], rows) for point, rows in handle.captures.items())
    assert torch.equal(loaded.positions, handle.positions)
    assert torch.equal(loaded.token_ids, handle.token_ids)
    assert torch.equal(loaded.rows_of("user"), handle.rows_of("user"))
    for name in ("request_id", "model", "text", "prompt_token_ids", "output_token_ids", "points", "messages"):
        assert getattr(loaded, name) == getattr(handle, name), name
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rows.safetensors"]


async def test_run_takes_what_generate_and_chat_take(tiny) -> None:
    """Prompts and conversations in one list; each gives what the other calls do, and rows of its messages."""
    talk = [{"role": "user", "content": "hi"}]
    template = {"chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"}
    text, handle = await tiny.chat(talk, SIX, capture_layers=[1], chat_template_kwargs=template)
    told = await tiny.run(talk, SIX, capture_layers=[1], chat_template_kwargs=template)
    assert (told.text, told.handle.messages) == (text, handle.messages)
    assert told.output.outputs[0].text == text
    assert (told.steering, told.monitors) == (None, None)
    await tiny.fetch_captures_batch([handle, told.handles])
    assert torch.equal(told.handle.captures[1], handle.captures[1])
    plain = await tiny.generate("hi", SIX)
    alone, asked = await tiny.run(["hi", {"prompt": "hi"}], SIX, capture=[None, CaptureSpec(layers=1)])
    assert (alone.text, alone.handles, asked.text) == (plain, None, plain)
    assert list((await asked.handle.fetch()).captures) == [(1, "resid_post")]
    several = await tiny.run("hi", {**SIX, "n": 2, "temperature": 1.0}, capture_layers=[1])
    assert several.texts == tuple(one.text for one in several.handles)
    with pytest.raises(errors.InvalidRequest, match="use texts"):
        _ = several.text
    with pytest.raises(errors.InvalidPrompt, match="is a single message; give a list of"):
        await tiny.run(talk[0])
    with pytest.raises(TypeError, match="raw_output"):
        await tiny.generate("hi", raw_output=True)
    for one in several.handles:
        one.release()


async def test_numpy_has_the_same_rows(tiny) -> None:
    """`to_numpy` is the rows, by point."""
    _, handle = await tiny.generate(random_prompt(4, 8), SIX, capture_layers=[2])
    async with handle:
        arrays = handle.to_numpy()
        assert list(arrays) == [(2, "resid_post")]
        assert torch.equal(torch.from_numpy(arrays[2, "resid_post"]), handle.captures[2])


async def test_a_stream_brings_each_row_once(tiny, tiny_reference) -> None:
    """Chunks put together are the whole: text, tokens and rows; the first has the prompt's rows."""
    prompt = random_prompt(30, 9)
    params = {"max_tokens": 60, **GREEDY}
    raw = await tiny.run(prompt, params, capture=CaptureSpec(sites=ALL_SITES))
    whole = await raw.handle.fetch()
    chunks = [chunk async for chunk in tiny.stream(prompt, params, capture=CaptureSpec(sites=ALL_SITES))]
    assert len(chunks) > 1
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(raw.output.outputs[0].token_ids)
    assert torch.cat([chunk.positions for chunk in chunks]).tolist() == whole.positions.tolist()
    assert len(chunks[0].positions) >= 30
    known = tiny_reference.rows([*whole.prompt_token_ids, *whole.output_token_ids][:-1], whole.points)
    for point in whole.points:
        rows = torch.cat([chunk.captures[point] for chunk in chunks])
        same = compare_rows(rows, known[point])
        assert same.cosine > MIN_COSINE
        assert same.error < MAX_ERROR
    plain = [chunk async for chunk in tiny.stream(prompt, params)]
    assert "".join(chunk.text for chunk in plain) == whole.text
    assert plain[0].captures is None


async def test_a_mask_selects_what_is_true(tiny) -> None:
    """Of tokens over the prompt and over all inputs, of layers, and of edits: what positions select."""
    prompt, params = random_prompt(6, 40), {"max_tokens": 4, **GREEDY}
    short, long = torch.arange(6) % 3 == 1, torch.arange(9) % 4 == 0
    layers = [False, True, False, True]
    edit = torch.ones(tiny.hidden_size)
    for mask in (short, long):
        places = mask.nonzero().flatten()
        by_mask = CaptureSpec(layers=layers, tokens=mask)
        by_place = CaptureSpec(layers=[1, 3], tokens=places)
        steering = [Add(edit, layers=layers, tokens=mask), Add(edit, layers=[1, 3], tokens=places)]
        _, (found, known) = await tiny.generate([prompt] * 2, params, capture=[by_mask, by_place], steering=steering)
        await tiny.fetch_captures_batch([found, known])
        assert found.positions.tolist() == places.tolist()
        assert found.points == known.points == tuple(points([1, 3], "resid_post"))
        for point in found.points:
            torch.testing.assert_close(found.captures[point], known.captures[point], rtol=1e-4, atol=1e-4)
        assert found.receipt.steering.rows == known.receipt.steering.rows


async def test_leaving_a_stream_cancels_it_and_frees_its_rows(tiny) -> None:
    """Breaking out of the loop ends the request; nothing of it stays."""
    before = (await tiny.stats()).steps
    stream = tiny.stream(random_prompt(30, 9), {"max_tokens": 200, **GREEDY}, capture_layers="all")
    async for chunk in stream:
        assert len(chunk.positions)
        break
    await stream.aclose()
    assert await settled(tiny) == (0, 0, 0)
    assert (await tiny.stats()).steps - before < 195


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"prompt": "a", "capture": CaptureSpec(reduce="mean")}, "reduction"),
        ({"prompt": "a", "sampling_params": {"n": 2}}, "n=2"),
    ],
)
async def test_a_stream_is_one_sample_of_one_prompt(tiny, arguments, says) -> None:
    """What cannot be streamed is refused before it runs."""
    with pytest.raises(errors.InvalidRequest, match=says):
        await anext(tiny.stream(**arguments))
