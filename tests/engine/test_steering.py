"""Steering on a real engine: exact scope, isolation, receipts, contexts, slots, and what cannot be asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from conftest import opened
from support.rows import (
    ALL_SITES,
    GREEDY,
    TINY_ENGINE,
    flattened,
    hold,
    parity,
    points,
    random_prompt,
    settled,
)
from support.specs import edit, spec, vector

import steercap.sync
from steercap import Ablate, Add, Cap, CaptureHandle, CaptureSpec, Replace, SteeringSpec
from steercap.errors import (
    ModelClosed,
    SteeringNotApplied,
    SteeringSlotsFull,
    TooManyEdits,
)
from steercap.testing import tiny_checkpoint

WIDTH = 128
EVERYTHING = CaptureSpec(sites=ALL_SITES)
PARAMS: dict[str, Any] = {"max_tokens": 10, **GREEDY}


def touched(handle, clean, point) -> list[int]:
    """Positions whose row at a point differs from that of the clean reference, fed the same tokens."""
    difference = (handle.captures[point] - clean[point][handle.positions]).abs().amax(-1)
    return handle.positions[difference > 1e-3].tolist()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, [0]),
        ("last_prompt", [19]),
        ("generated", list(range(20, 29))),
        (slice(15, 24, 2), [15, 17, 19, 21, 23]),
        (-1, [19]),
        ([slice(0, 3), "last_prompt", 25], [0, 1, 2, 19, 25]),
        ("prompt", list(range(20))),
    ],
)
async def test_the_rows_touched_are_those_and_no_others(tiny, tiny_reference, tokens, expected) -> None:
    """Read from captures at the edited point itself: rows before and between are those of the clean model."""
    (point,) = points([2], "mlp_out")
    steering = SteeringSpec([Add(vector(WIDTH, seed=1), 3.0, layer=2, site="mlp_out", tokens=tokens)])
    _, handle = await tiny.generate(random_prompt(20, 1), PARAMS, capture=EVERYTHING, steering=steering)
    await handle.fetch()
    inputs = [*handle.prompt_token_ids, *handle.output_token_ids][:-1]
    assert touched(handle, tiny_reference.rows(inputs, handle.points), point) == expected
    assert handle.receipt.steering.rows == (len(expected),)
    assert (handle.receipt.steering.computed, handle.receipt.steering.cached) == (29, 0)
    hold([handle], tiny_reference, [steering])


async def test_a_slice_across_a_chunk_border(cramped, tiny_reference) -> None:
    """Steps of 64 tokens: positions 60 to 70, and the last of a prompt of four chunks."""
    steering = SteeringSpec(
        [Add(vector(WIDTH, seed=1), 3.0, layer=2, site="mlp_out", tokens=[slice(60, 70), "last_prompt"])]
    )
    _, handle = await cramped.generate(random_prompt(230, 3), PARAMS, capture=EVERYTHING, steering=steering)
    await handle.fetch()
    inputs = [*handle.prompt_token_ids, *handle.output_token_ids][:-1]
    (point,) = points([2], "mlp_out")
    assert touched(handle, tiny_reference.rows(inputs, handle.points), point) == [*range(60, 70), 229]
    hold([handle], tiny_reference, [steering])


async def test_requests_of_one_batch_do_not_touch_each_other(tiny, tiny_reference) -> None:
    """One spec each, None included, in one call; every row of every request is that of its own spec."""
    specs = [spec("add", WIDTH, seed=1, layer=0), None, spec("relative", WIDTH, seed=2, layers="all"), None]
    prompt = random_prompt(15, 4)
    texts, handles = await tiny.generate([prompt] * 4, PARAMS, capture=EVERYTHING, steering=specs)
    await tiny.fetch_captures_batch(handles)
    hold(handles, tiny_reference, specs)
    assert texts[1] == texts[3]
    assert len(set(texts)) == 3
    assert handles[1].receipt.steering is None


async def test_a_steered_prefix_is_read_by_its_equals_alone(cramped) -> None:
    """Clean after steered and steered after clean reuse nothing; an equal spec does, whoever made it; a slot apart."""
    prompt, one = random_prompt(200, 5005), lambda: spec("add", WIDTH, seed=1, layer=0)

    async def cached(steering, tokens=prompt, **fields) -> int:
        given = {"prompt_token_ids": tokens, **fields}
        raw = await cramped.run(given, PARAMS, steering=steering)
        if raw.steering:
            assert raw.steering[0].cached == raw.output.num_cached_tokens
        return raw.output.num_cached_tokens

    assert [await cached(one()), await cached(None)] == [0, 0]
    assert [await cached(one()), await cached(None)] == [192, 192]
    assert await cached(spec("add", WIDTH, seed=2, layer=0)) == 0
    assert await cached(spec("add", WIDTH, seed=1, layer=1)) == 0
    assert await cached(SteeringSpec([edit("add", WIDTH, seed=1, layer=0, tokens="generated")])) == 0
    assert await cached(SteeringSpec([edit("add", WIDTH, seed=1, layer=0, tokens="generated")])) == 192
    assert [await cached(one(), cache_salt="mine"), await cached(one(), cache_salt="mine")] == [0, 192]
    # What comes after the last attention reaches no key and no value: the clean prefix is the right one.
    await cached(None)  # the cache of this engine holds few prompts
    assert await cached(spec("add", WIDTH, seed=1, layer=3)) == 192
    # "all" means the same positions for a longer prompt, "prompt" does not.
    longer = [*prompt, *random_prompt(20, 6)]
    await cached(one())
    assert await cached(one(), longer) == 192
    prompt_only = SteeringSpec([edit("add", WIDTH, seed=7, layer=0, tokens="prompt")])
    assert [await cached(prompt_only), await cached(prompt_only, longer), await cached(prompt_only)] == [0, 0, 192]


async def test_cached_and_computed_prefixes_give_the_same_rows(cramped, tiny_reference) -> None:
    """A request that reads an equally steered prefix has the rows of one that computed it."""
    steering = spec("low_rank", WIDTH, seed=3, layers=[0, 1])
    capture = CaptureSpec(sites=ALL_SITES, tokens=["last_prompt", "generated"])
    handles = []
    for _ in range(2):
        _, handle = await cramped.generate(random_prompt(150, 8), PARAMS, capture=capture, steering=steering)
        handles.append(handle)
    raw = await cramped.run(random_prompt(150, 8), PARAMS, capture=capture)
    clean = raw.handle
    await cramped.fetch_captures_batch([*handles, clean])
    assert [handle.receipt.steering.cached for handle in handles] == [0, 128]
    assert raw.output.num_cached_tokens == 0
    hold([*handles, clean], tiny_reference, [steering, steering, None])


async def test_rows_before_their_edits(tiny, tiny_reference) -> None:
    """`before_edits` gives the row the edit found; by default it is the row the model goes on with."""
    prompt = random_prompt(12, 9)
    direction = vector(WIDTH, seed=4)
    steering = SteeringSpec([Ablate(direction, layers="all")])
    _, handles = await tiny.generate(
        [prompt, prompt], PARAMS, capture=[CaptureSpec(), CaptureSpec(before_edits=True)], steering=steering
    )
    await tiny.fetch_captures_batch(handles)
    after, before = handles
    assert after.output_token_ids == before.output_token_ids
    unit = direction / direction.norm()
    for layer in range(tiny.num_layers):
        projection = before.captures[layer] @ unit
        assert projection.abs().max() > 0.1
        known = before.captures[layer] - projection[:, None] * unit
        torch.testing.assert_close(after.captures[layer], known, rtol=1e-4, atol=1e-4)
        assert (after.captures[layer] @ unit).abs().max() < 1e-4
    hold([after], tiny_reference, [steering])


async def test_patching_rows_of_another_request(tiny, tiny_reference, tmp_path) -> None:
    """Rows captured from one prompt, put into another at one layer, carry its answer over."""
    source, target = random_prompt(14, 10), random_prompt(14, 11)
    _, handles = await tiny.generate([source, target], PARAMS, capture=CaptureSpec())
    await tiny.fetch_captures_batch(handles)
    last = tiny.num_layers - 1
    patch = SteeringSpec([Replace(handles[0].captures[last][:14], range(14), layer=last)])
    _, patched = await tiny.generate(target, PARAMS, capture=CaptureSpec(), steering=patch)
    await patched.fetch()
    assert torch.equal(patched.captures[last][:14], handles[0].captures[last][:14])
    assert patched.output_token_ids[0] == handles[0].output_token_ids[0] != handles[1].output_token_ids[0]
    hold([patched], tiny_reference, [patch])
    loaded = CaptureHandle.load(patched.save(tmp_path / "patched.safetensors"))
    assert loaded.receipt.steering == patched.receipt.steering


async def test_samples_of_one_prompt_are_all_steered(tiny, tiny_reference) -> None:
    """`n=3`: three handles, three receipts, each sample's rows its own."""
    steering = spec("set_projection", WIDTH, seed=5, layers=[1, 2])
    _, handles = await tiny.generate(
        random_prompt(9, 12),
        {"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 8, "ignore_eos": True},
        capture=EVERYTHING,
        steering=steering,
    )
    await tiny.fetch_captures_batch(handles)
    assert [handle.receipt.steering.rows for handle in handles] == [(2 * 16,)] * 3
    assert len({handle.output_token_ids for handle in handles}) > 1
    hold(handles, tiny_reference, [steering] * 3)


async def test_steered_contexts_nest_and_stay_apart(tiny) -> None:
    """Calls inside have the context's edits, inner after outer; `steering=` of a call replaces them; tasks beside see none."""
    prompt = random_prompt(10, 13)
    a, b = spec("add", WIDTH, seed=1, layer=0), spec("relative", WIDTH, seed=2, layer=1)
    clean, only_a, only_b, a_then_b = await tiny.generate([prompt] * 4, PARAMS, steering=[None, a, b, a + b])
    assert len({clean, only_a, only_b, a_then_b}) == 4
    entered = asyncio.Event()

    async def inside() -> list[str]:
        async with tiny.steered(a):
            entered.set()
            found = [await tiny.generate(prompt, PARAMS)]
            async with tiny.steered(b):
                found.append(await tiny.generate(prompt, PARAMS))
                found.append(await tiny.generate(prompt, PARAMS, steering=None))
                found.append(await tiny.generate(prompt, PARAMS, steering=b))
                found += await tiny.generate([prompt, prompt], PARAMS, steering=[a, None])
            return [*found, await tiny.generate(prompt, PARAMS)]

    async def beside() -> str:
        await entered.wait()
        return await tiny.generate(prompt, PARAMS)

    found, other = await asyncio.gather(inside(), beside())
    assert found == [only_a, a_then_b, clean, only_b, only_a, clean, only_a]
    async with tiny.steered(a):
        made_inside, stream_made_inside = tiny.generate(prompt, PARAMS), tiny.stream(prompt, PARAMS)
    made_outside = tiny.generate(prompt, PARAMS)
    async with tiny.steered(b):
        assert await made_outside == clean
    assert await made_inside == only_a
    assert "".join([chunk.text async for chunk in stream_made_inside]) == only_a
    assert other == clean == await tiny.generate(prompt, PARAMS)


async def test_chat_and_stream_are_steered_too(smol) -> None:
    """The other two verbs take the same argument; a stream's last chunk brings the receipt."""
    steering = SteeringSpec([Add(vector(smol.hidden_size, seed=1), 0.8, relative=True, layers=range(8, 16))])
    message = [{"role": "user", "content": "Name a colour."}]
    clean = await smol.chat(message, PARAMS)
    steered, handle = await smol.chat(message, PARAMS, steering=steering, capture_layers=[12])
    assert clean != steered
    async with handle:
        total = len(handle.prompt_token_ids) + 9
        assert handle.receipt.steering.rows == (8 * total,)
    prompt = {"prompt_token_ids": list(handle.prompt_token_ids)}
    chunks = [chunk async for chunk in smol.stream(prompt, PARAMS, steering=steering)]
    assert "".join(chunk.text for chunk in chunks) == steered
    assert [chunk.steering for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].steering.rows == (8 * total,)


async def test_random_vectors_do_not_do_what_a_vector_does(tiny) -> None:
    """The direction that writes a token makes that token come; norm-matched random directions do not."""
    weights = {}
    from safetensors.torch import load_file

    for file in tiny_checkpoint("qwen3").glob("*.safetensors"):
        weights |= load_file(file)
    head, norm = weights["lm_head.weight"], weights["model.norm.weight"]
    wanted = 65
    direction = head[wanted] * norm
    prompt = random_prompt(10, 14)
    specs = [
        SteeringSpec([Add(v, 6.0, relative=True, layer=3, tokens=["last_prompt", "generated"])])
        for v in (direction, *(vector(WIDTH, seed=50 + number) for number in range(20)))
    ]
    outputs = await tiny.run([prompt] * 21, PARAMS, steering=specs)
    said = [set(raw.output.outputs[0].token_ids) for raw in outputs]
    assert said[0] == {wanted}
    assert sum(wanted in one for one in said[1:]) == 0


async def test_a_worker_that_does_not_edit_is_found_out(tiny) -> None:
    """A slot that holds something else: no text, and what was written meanwhile is never read again."""
    steering = spec("add", WIDTH, seed=77, layer=0)
    prompt = random_prompt(140, 15)
    engine = tiny.serving.engine
    await tiny.generate(prompt, PARAMS, steering=steering)
    held = engine.configurations.slots._slots.contents[engine.compiler.lowered(steering).configuration.digest]
    right = held.places
    held.places = ((right[0] + 9) % 256,)  # the client is made to believe in another slot
    with pytest.raises(SteeringNotApplied, match="does not hold this request's configuration"):
        await tiny.generate(prompt, PARAMS, steering=steering)
    held.places = right
    raw = await tiny.run(prompt, PARAMS, steering=steering)
    assert raw.output.num_cached_tokens == 0
    assert raw.steering[0].rows == (149,)
    await settled(tiny)
    assert (await engine.workers.get_stats())[0][0].steered == 0


async def test_a_steered_request_that_is_cancelled_leaves_nothing(tiny) -> None:
    """Neither a slot nor a record."""
    task = asyncio.create_task(
        tiny.generate(random_prompt(9, 1), {"max_tokens": 200, **GREEDY}, steering=spec("add", WIDTH, layer=1))
    )
    while (await tiny.stats()).steering_slots_in_use == 0:
        assert not task.done()
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await settled(tiny)
    stats = await tiny.stats()
    assert (stats.steering_slots_in_use, stats.vector_bytes_in_use) == (0, 0)
    assert (await tiny.serving.engine.workers.get_stats())[0][0].steered == 0


async def test_a_stop_string_ends_the_count(tiny, tiny_reference) -> None:
    """The engine runs on for a moment past a stop string; text, rows and receipt end where the text does."""
    steering = spec("relative", WIDTH, seed=21, layers="all")
    prompt = random_prompt(12, 17)
    whole = await tiny.run(prompt, {"max_tokens": 60, **GREEDY}, steering=steering)
    ids = list(whole.output.outputs[0].token_ids)
    stop = tiny.tokenizer.decode([next(token for token in ids[8:] if token < 128)])
    raws = await tiny.run(
        [prompt] * 8,
        {"max_tokens": 60, "stop": [stop], **GREEDY},
        capture=EVERYTHING,
        steering=steering,
    )
    handles = [raw.handle for raw in raws]
    await tiny.fetch_captures_batch(handles)
    assert raws[0].output.outputs[0].finish_reason == "stop"
    total = len(prompt) + len(handles[0].output_token_ids) - 1
    assert total < len(prompt) + 59
    assert all(handle.receipt.steering.rows == (4 * total,) for handle in handles)
    hold(handles, tiny_reference, [steering] * 8)


async def test_a_stream_left_early_gives_its_slot_back(tiny) -> None:
    """Closing the generator cancels the request, and nothing of it stays."""
    stream = tiny.stream(random_prompt(9, 18), {"max_tokens": 200, **GREEDY}, steering=spec("add", WIDTH, layer=1))
    async for _ in stream:
        assert (await tiny.stats()).steering_slots_in_use == 1
        break
    await stream.aclose()
    await settled(tiny)
    assert (await tiny.stats()).steering_slots_in_use == 0
    assert (await tiny.serving.engine.workers.get_stats())[0][0].steered == 0


async def test_vectors_are_sent_once(tiny) -> None:
    """Equal vectors of different specs and calls are one; a spec used again sends nothing."""
    v = vector(WIDTH, seed=99)
    before = (await tiny.stats()).vector_bytes_sent
    for scale in (1.0, 2.0, 3.0):
        await tiny.generate([random_prompt(5, 1)] * 3, PARAMS, steering=Add(v, scale, layers="all"))
    assert (await tiny.stats()).vector_bytes_sent - before == WIDTH * 4


async def test_full_slots_make_requests_wait_in_order(tiny_reference) -> None:
    """2 slots and 4 vectors for 24 different specs: all finish, each with its own rows, and stats shows the queue."""
    arguments = {**TINY_ENGINE, "steering_slots": 2, "vector_bytes": 4 * WIDTH * 4}
    async with opened(tiny_checkpoint("qwen3"), sites=ALL_SITES, **arguments) as model:
        specs = [spec("add_if", WIDTH, seed=seed, layers=[0, 2]) for seed in range(24)]
        ended: list[int] = []

        async def one(number: int) -> Any:
            found = await model.generate(random_prompt(20, number), PARAMS, capture=EVERYTHING, steering=specs[number])
            ended.append(number)
            return found

        tasks = [asyncio.create_task(one(number)) for number in range(24)]
        most_used = most_waiting = 0
        while not all(task.done() for task in tasks):
            stats = await model.stats()
            most_used = max(most_used, stats.steering_slots_in_use)
            most_waiting = max(most_waiting, stats.requests_waiting)
        handles = flattened([task.result()[1] for task in tasks])
        await model.fetch_captures_batch(handles)
        hold(handles, tiny_reference, specs)
        assert most_used == 2
        assert most_waiting > 15
        assert all(abs(place - number) <= 1 for place, number in enumerate(ended)), ended
        with pytest.raises(TooManyEdits, match="vector_bytes"):
            await model.generate(random_prompt(5, 1), PARAMS, steering=spec("low_rank", WIDTH, layer=1))
        doomed = [
            asyncio.create_task(model.generate(random_prompt(5, 1), {"max_tokens": 100}, steering=one))
            for one in specs[:5]
        ]
        await asyncio.sleep(0.05)
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        assert await model.generate(random_prompt(5, 1), PARAMS, steering=specs[7])
        assert (await model.stats()).steering_slots_in_use == 0
        await a_loop_over_a_stream_may_steer_others(model, specs)
        cut_off = [
            asyncio.create_task(model.generate(random_prompt(5, 1), {"max_tokens": 200, **GREEDY}, steering=one))
            for one in specs[:6]
        ]
        await asyncio.sleep(0.1)
        await model.aclose()
        ended = await asyncio.gather(*cut_off, return_exceptions=True)
        assert all(isinstance(end, ModelClosed) for end in ended), ended


async def a_loop_over_a_stream_may_steer_others(model, specs) -> None:
    """Two streams have both slots; what their readers ask gets one when the streams' requests end, read or not."""
    first = model.stream(random_prompt(5, 1), {"max_tokens": 120, **GREEDY}, steering=specs[0])
    second = model.stream(random_prompt(5, 2), {"max_tokens": 120, **GREEDY}, steering=specs[1])
    chunks = 0
    async for _, _ in zipped(first, second):
        if not chunks:
            async with asyncio.timeout(60):
                assert await model.generate(random_prompt(5, 3), PARAMS, steering=specs[2])
        chunks += 1
    assert chunks > 1


async def zipped(*streams) -> Any:
    """Chunks of several streams, side by side, as long as all have some."""
    while None not in (both := [await anext(stream, None) for stream in streams]):
        yield both
    for stream in streams:
        await stream.aclose()


async def test_overflow_error_says_so() -> None:
    """With overflow='error' a request that finds no slot fails at once, and its neighbours do not."""
    arguments = {**TINY_ENGINE, "steering_slots": 1, "overflow": "error"}
    async with opened(tiny_checkpoint("qwen3"), **arguments) as model:
        running = asyncio.create_task(
            model.generate(random_prompt(9, 1), {"max_tokens": 100, **GREEDY}, steering=spec("add", WIDTH, layer=1))
        )
        while (await model.stats()).steering_slots_in_use == 0:
            assert not running.done()
            await asyncio.sleep(0.01)
        with pytest.raises(SteeringSlotsFull, match="steering_slots"):
            await model.generate(random_prompt(9, 1), PARAMS, steering=spec("cap", WIDTH, layer=1))
        assert await running


def test_the_sync_names_steer_too() -> None:
    """`with model.steered(spec)` steers the calls of its thread."""
    with steercap.sync.SteerModel(str(tiny_checkpoint("qwen3")), **TINY_ENGINE) as model:
        prompt, steering = random_prompt(8, 1), spec("add", WIDTH, layer=1)
        clean = model.generate(prompt, PARAMS)
        with model.steered(steering):
            steered = model.generate(prompt, PARAMS)
            assert model.generate(prompt, PARAMS, steering=None) == clean
        assert steered == model.generate(prompt, PARAMS, steering=steering) != clean
        assert model.generate(prompt, PARAMS) == clean


async def test_steered_by_nothing_is_clean(tiny, tiny_reference) -> None:
    """Edits of scale zero run through the whole machinery and give the tokens and rows of no steering, bit for bit."""
    prompt = random_prompt(30, 16)
    nothing = SteeringSpec(
        [Add(vector(WIDTH, seed=1), 0.0, layers="all"), Cap(vector(WIDTH, seed=2), high=1e9, layers="all")]
    )
    _, handles = await tiny.generate([prompt], PARAMS, capture=EVERYTHING)
    _, others = await tiny.generate([prompt], PARAMS, capture=EVERYTHING, steering=nothing)
    await tiny.fetch_captures_batch([handles, others])
    assert handles[0].output_token_ids == others[0].output_token_ids
    assert all(torch.equal(handles[0].captures[point], others[0].captures[point]) for point in handles[0].points)
    assert parity(others[0], tiny_reference)
