"""A model at a server, over a socket: each verb gives what the same call of the local model gives."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import listening
from support.rows import random_prompt, settled

from steercap import (
    Ablate,
    Add,
    Cap,
    CaptureHandle,
    CaptureSpec,
    LogitBias,
    Monitor,
    MonitorReport,
    Progress,
    Replace,
    SteeringSpec,
    SteerModel,
    errors,
)
from steercap.adapters import server
from steercap.captures.sketch import Sketch
from steercap.cli.doctor import examine_server
from steercap.client import RemoteModel
from steercap.core.prompts import tokens_of
from steercap.lab.datasets import ActivationDataset
from steercap.lab.datasets.collecting import activations, collect
from steercap.lab.directions import Exchange, calibrate, extract
from steercap.lab.studies.sweeps import Sweep, run_sweep
from steercap.server.metrics import IDLE, IdleClock
from steercap.server.server import ServerSettings, application
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors
from steercap.sync import SteerModel as Blocking
from steercap.sync import calibrate as blocking_calibrate

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FLAGS = ["--served-model-name", "tiny", "--api-key", "mine", "yours", "--chat-template", TEMPLATE]
RENDERING = {"chat_flags": server.chat_flags(server.read_flags("tiny", FLAGS))}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
WIDTH = 128


def vector(seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


CALM = LayerVectors({1: vector(1)}, name="calm")
TRAITS = DirectionSet({name: LayerVectors({1: vector(k), 2: vector(k + 9)}) for k, name in enumerate(("warm", "cold"))})


@pytest.fixture(scope="module")
async def url(tiny: SteerModel, tmp_path_factory) -> AsyncIterator[str]:
    """`calm` is the operator's; `tiny+calm` a model that is steered by it."""
    file = tmp_path_factory.mktemp("client") / "calm.safetensors"
    CALM.save(file)
    settings = ServerSettings(vectors={"calm": file}, presets={"calm": {"op": "add", "vector": "calm", "scale": 4.0}})
    app = await application(tiny, server.read_flags(tiny.serving.model, FLAGS), settings)
    async with listening(app) as found:
        yield found


@pytest.fixture(scope="module")
async def remote(url: str) -> AsyncIterator[RemoteModel]:
    async with SteerModel.connect(url, api_key="mine") as model:
        yield model


def same(here: CaptureHandle, there: CaptureHandle) -> None:
    """Two fetched handles are of the same request: texts and labels alike, rows as far as other batches let them."""
    for name in ("text", "prompt_token_ids", "output_token_ids", "points", "messages", "num_layers", "directions"):
        assert getattr(there, name) == getattr(here, name), name
    assert there.marks == here.marks
    assert there.attention_rules == here.attention_rules
    assert torch.equal(there.positions, here.positions)
    assert torch.equal(there.token_ids, here.token_ids)
    assert there.receipt.reduce == here.receipt.reduce
    assert (there.receipt.steering is None) == (here.receipt.steering is None)
    if here.receipt.steering is not None:
        assert there.receipt.steering.rows == here.receipt.steering.rows
        assert there.receipt.steering.digest == here.receipt.steering.digest
    for point, rows in here.captures.items():
        other = there.captures[point]
        assert other.dtype == rows.dtype
        torch.testing.assert_close(other, rows, rtol=1e-4, atol=1e-4)  # what runs beside it moves last bits


NO_PROMPTS: dict[str, Any] = {
    "no token": "",
    "no token id": {"prompt_token_ids": []},
    "too long": {"prompt_token_ids": [5] * 300},
    "as long as the context": {"prompt_token_ids": [5] * 256},
    "a long text": "a b c d " * 256,
    "a number": {"prompt": 5},
    "nothing": {"prompt": None},
    "no ids": {"prompt_token_ids": None},
    "a text for ids": {"prompt_token_ids": "abc"},
    "fractions": {"prompt_token_ids": [1.5]},
    "truth values": {"prompt_token_ids": [True]},
    "lists of ids": {"prompt_token_ids": [[5]]},
    "two axes": {"prompt_token_ids": torch.zeros(2, 2, dtype=torch.long)},
    "half of a pair": "a\ud800b",
    "a salt": {"prompt": "a", "cache_salt": 5},
    "another key": {"prompt": "a", "text": "b"},
}


@pytest.mark.parametrize("prompt", NO_PROMPTS.values(), ids=NO_PROMPTS)
async def test_a_wrong_prompt_is_one_error_by_every_way(remote: RemoteModel, tiny: SteerModel, prompt: Any) -> None:
    """In process and over a connection, whole and streamed, with and without special tokens."""

    async def streamed(model: Any) -> list[Any]:
        return [chunk async for chunk in model.stream(prompt, GREEDY)]

    for model in (tiny, remote):
        for call in (
            lambda model: model.generate(prompt, GREEDY),
            lambda model: model.generate(["a", prompt], GREEDY, capture_layers=[1]),
            lambda model: model.generate(prompt, GREEDY, add_special_tokens=False),
            lambda model: model.run(prompt, GREEDY, steering=Add(vector(3), layer=1)),
            lambda model: model.read(prompt, capture_layers=[1]),
            streamed,
        ):
            with pytest.raises(errors.SteercapError) as raised:
                await call(model)
            assert type(raised.value) is errors.InvalidPrompt, (model, raised.value)


async def test_a_conversation_that_does_not_fit_is_one_error(remote: RemoteModel, tiny: SteerModel) -> None:
    long, half = ([{"role": "user", "content": text}] for text in ("a b " * 256, "a\ud800b"))
    own = {"chat_template_kwargs": {"chat_template": TEMPLATE}}
    for model, arguments in ((tiny, own), (remote, {})):
        with pytest.raises(errors.InvalidPrompt):
            await model.chat(long, GREEDY, **arguments)
        with pytest.raises(errors.InvalidRequest):
            await model.chat(half, GREEDY, **arguments)
    for text in ({}, b"abc", {1, 2}, None, 5):
        for model in (tiny, remote):
            with pytest.raises(errors.InvalidSpec):
                await model.tokenize(text)
    for model in (tiny, remote):
        with pytest.raises(errors.InvalidPrompt, match="half of a surrogate pair"):
            await model.tokenize("a\ud800b")
        with pytest.raises(errors.InvalidRequest):
            await model.generate("a", {"temperature": float("nan")})


CAPTURES: list[CaptureSpec] = [
    CaptureSpec(),
    CaptureSpec(layers=slice(1, None, 2), sites=["resid_post", "attn_out"], tokens="generated"),
    CaptureSpec(layers=[True, False, False, True], tokens=[slice(-3, None), 0]),
    CaptureSpec(at=["resid_post[2]", (-1, "attn_out")], tokens=slice(2, 9)),
    CaptureSpec(layers=range(3), reduce="mean"),
    CaptureSpec(layers=1, sites="mlp_out", allow_nonfinite=True),
    CaptureSpec(layers=2, codec="full8"),
    CaptureSpec(layers=2, codec="rp8", codec_k=64, codec_seed=5, tokens="last_prompt"),
    CaptureSpec(layers=1, before_edits=True),
    CaptureSpec(project=TRAITS),
    CaptureSpec(project=CALM, tokens="prompt"),
]
STEERING: list[Any] = [
    None,
    Add(vector(3), 2.5, layer=1, tokens="generated"),
    SteeringSpec([Cap(vector(4), layers=[0, 2], low=-0.3), Ablate(vector(5), layers="all")], preserve_norm=True),
    SteeringSpec([SteeringSpec([Add(vector(6), layer=2)], preserve_norm=True), Add(vector(7), 0.1, layer=3)]),
    Replace([vector(8).tolist(), vector(9).tolist()], [3, -1], elements=slice(0, 7), layer=1),
    SteeringSpec([LogitBias({7: 3.25, 9: -100.0}), Add(vector(3), layer=0, relative=True)]),
]


@pytest.mark.parametrize("number", range(len(CAPTURES)))
async def test_a_spec_means_the_same_on_both_sides(remote: RemoteModel, tiny: SteerModel, number: int) -> None:
    """Every kind of capture, with one of every kind of steering: said as JSON, or uploaded."""
    spec, steering = CAPTURES[number], STEERING[number % len(STEERING)]
    prompt = random_prompt(20 + number, number)
    text, here = await tiny.generate(prompt, GREEDY, capture=spec, steering=steering)
    other, there = await remote.generate(prompt, GREEDY, capture=spec, steering=steering)
    assert isinstance(there, CaptureHandle)
    assert other == text
    assert not there.fetched
    assert there.points == here.points
    with pytest.raises(errors.CaptureNotFetched):
        _ = there.captures
    await here.fetch()
    assert await there.fetch() is there
    same(here, there)


async def test_codes_and_files_are_the_local_ones(remote: RemoteModel, tiny: SteerModel, tmp_path) -> None:
    prompt = random_prompt(20, 50)
    spec = CaptureSpec(layers=2, codec="full8")
    _, here = await tiny.generate(prompt, GREEDY, capture=spec)
    _, there = await remote.generate(prompt, GREEDY, capture=spec)
    await asyncio.gather(here.fetch(), there.fetch())
    assert there.coded[2].codec == here.coded[2].codec == "full8"
    same(here, CaptureHandle.load(there.save(tmp_path / "rows.safetensors")))
    with pytest.raises(errors.InvalidRequest, match="from a server"):
        await there.lens(2)
    with pytest.raises(errors.InvalidRequest, match="from a server"):
        await there.experts(2)


async def test_many_at_once_each_with_specs_of_its_own(remote: RemoteModel, tiny: SteerModel) -> None:
    """32 requests side by side, of other layers, steering and lengths; then the same in one call with lists."""
    prompts = [random_prompt(4 + number, 100 + number) for number in range(32)]
    specs = [CaptureSpec(layers=[number % 4], sites=("resid_post", "mlp_out")[number % 2]) for number in range(32)]
    edits = [None if number % 3 == 0 else Add(vector(number), 1.5, layer=number % 4) for number in range(32)]

    async def one(number: int) -> tuple[str, CaptureHandle]:
        text, handle = await remote.generate(prompts[number], GREEDY, capture=specs[number], steering=edits[number])
        return text, await handle.fetch()

    there = await asyncio.gather(*map(one, range(32)))
    texts, handles = await tiny.generate(prompts, GREEDY, capture=specs, steering=edits)
    await tiny.fetch_captures_batch(handles)
    again, listed = await remote.generate(prompts, GREEDY, capture=specs, steering=edits)
    await remote.fetch_captures_batch([listed, None])
    assert [text for text, _ in there] == texts == again
    for here, (_, one_by_one), together in zip(handles, there, listed, strict=True):
        same(here, one_by_one)
        same(here, together)


@pytest.mark.slow
async def test_texts_prompts_and_samples_come_as_they_do_locally(remote: RemoteModel, tiny: SteerModel) -> None:
    params = {"temperature": 0.9, "seed": 3, "max_tokens": 4, "n": 2, "top_k": 20}
    prompt = random_prompt(9, 7)
    texts, here = await tiny.generate({"prompt_token_ids": prompt}, params, capture_layers=[1])
    other, there = await remote.generate({"prompt_token_ids": prompt}, params, capture_layers=[1])
    assert other == texts
    for one, two in zip(here, there, strict=True):
        await asyncio.gather(one.fetch(), two.fetch())
        same(one, two)
    from vllm import SamplingParams

    given = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, stop_token_ids=[2], min_tokens=1)
    words = ["a b c", {"prompt": "d e"}]
    assert await remote.generate(words, given) == await tiny.generate(words, given)
    for most in (None, 240, 400):  # as many as the context holds, whatever the server makes of it
        greedy = {"temperature": 0.0, "max_tokens": most, "ignore_eos": True}
        prompts = ["a b c" * 5, random_prompt(30, 60)]
        with pytest.warns(UserWarning, match=f"max_tokens={most}") if most else nullcontext():
            assert await remote.generate(prompts, greedy) == await tiny.generate(prompts, greedy)
    raw = await remote.run(prompt, {**GREEDY, "logprobs": 2}, steering=Add(vector(2), layer=1))
    known = await tiny.run(prompt, {**GREEDY, "logprobs": 2}, steering=Add(vector(2), layer=1))
    assert raw.output.choices[0].text == known.output.outputs[0].text
    assert raw.steering[0].rows == known.steering[0].rows
    assert raw.output.choices[0].logprobs.token_logprobs == pytest.approx(
        [max(one.logprob for one in said.values()) for said in known.output.outputs[0].logprobs], abs=1e-4
    )
    vocabulary = list(range(0, 512, 4))  # of bytes that are no character by themselves, whose texts are alike
    asked = {"temperature": 0.0, "max_tokens": 1, "logprob_token_ids": vocabulary}
    raw, known = await remote.run(prompt, asked), await tiny.run(prompt, asked)
    (said,), (right,) = raw.output.choices[0].logprobs.top_logprobs, known.output.outputs[0].logprobs
    assert said == pytest.approx({f"token_id:{token}": one.logprob for token, one in right.items()}, abs=1e-4)


async def test_read_gives_rows_and_no_text(remote: RemoteModel, tiny: SteerModel) -> None:
    prompts = [random_prompt(9, 8), random_prompt(14, 9)]
    here = await tiny.read(prompts, capture_layers=[0, 3])
    there = await remote.read(prompts, capture_layers=[0, 3])
    await tiny.fetch_captures_batch(here)
    await remote.fetch_captures_batch(there)
    for one, two in zip(here, there, strict=True):
        same(one, two)
    assert there[0].text == ""
    assert (await remote.read(prompts[0])).points == (await tiny.read(prompts[0])).points
    with pytest.raises(errors.EmptySelection):
        await remote.read(prompts[0], capture=CaptureSpec(tokens="generated"))


async def test_a_corpus_is_collected_through_a_server(remote: RemoteModel, tiny: SteerModel, tmp_path) -> None:
    """The data set is the local one, and so are its rows; a stream has the same.

    The server was given a chat template, so that it does not go on with a data set of the model without it.
    """
    documents = [random_prompt(length, seed) for seed, length in enumerate([30, 75, 0, 1, 40, 12])]
    asked: dict[str, Any] = {"capture": CaptureSpec(layers=[1, 3], codec="full8"), "context": 32, "concurrency": 1}
    asked |= {"steering": Add(CALM[1], 2.0, layer=1)}
    here = await collect(tiny, documents, tmp_path / "here", documents_per_shard=2, **asked)
    there = await collect(remote, documents, tmp_path / "there", documents_per_shard=2, **asked)
    assert there.totals.rows == here.totals.rows == sum(map(len, documents))
    assert (await collect(remote, documents, tmp_path / "there", **asked)).resumed == here.totals.shards
    with pytest.raises(errors.RunDiffers, match=r"model\.chat_flags was not set"):
        await collect(remote, documents, tmp_path / "here", **asked)
    for one, two in zip(*(ActivationDataset(tmp_path / name).batches(1000) for name in ("here", "there")), strict=True):
        for point, rows in one.items():
            torch.testing.assert_close(two[point], rows, rtol=1e-4, atol=1e-2)

    texts = ["Hello there", "My day was long"]
    grown = {"layers": [2], "sampling_params": {"max_tokens": 4, "ignore_eos": True, "temperature": 1.0}, "seed": 3}
    counts = [
        (await collect(model, texts, tmp_path / name, **grown)).totals
        for name, model in (("local", tiny), ("remote", remote))
    ]
    assert counts[0].tokens == counts[1].tokens
    async with activations(remote, documents, layers=[2], context=32, batch_size=256, buffer=256) as stream:
        assert sum([len(rows) async for rows in stream]) == here.totals.rows
    with pytest.raises(errors.PointNotArmed):
        await collect(remote, documents, tmp_path / "none", sites="router")
    with pytest.raises(errors.InvalidRequest, match="calibration"):
        await collect(remote, documents, tmp_path / "none", capture=CaptureSpec(calibration=object()))


async def test_specs_are_compiled_here_as_there(remote: RemoteModel, tiny: SteerModel) -> None:
    """Points, codecs and digests of plans are the engine's own; so are the tokenizer and the generation defaults."""
    here, there = tiny.serving.here(), remote.serving.here()
    for spec in (*CAPTURES, CaptureSpec(sites=["resid_pre", "mlp_out"], layers=[-1, 0])):
        assert there.compiler.captured(spec) == here.compiler.captured(spec)
        assert there.compiler.coding(spec) == here.compiler.coding(spec)
        assert remote.check_capture(spec) == tiny.check_capture(spec)
    for wrong in (CaptureSpec(sites="router"), CaptureSpec(layers=[9]), CaptureSpec(attention=2)):
        with pytest.raises(errors.InvalidRequest) as expected:
            tiny.check_capture(wrong)
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            remote.check_capture(wrong)
    for edit in (Add(CALM[1], layer=1), Ablate(CALM[1], layers="all"), Cap(CALM[1], layers=[2], high=1.0)):
        assert there.compiler.lowered(edit).digest == here.compiler.lowered(edit).digest
    assert remote.tokenizer.encode("Hello there") == tiny.tokenizer.encode("Hello there")
    assert dict(remote.generation_config) == dict(tiny.generation_config)
    assert remote.identity() == {**tiny.identity(), **RENDERING}


async def test_chats_know_their_messages(remote: RemoteModel, tiny: SteerModel) -> None:
    """By the server's template; the same rendered here gives the same tokens and spans."""
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "“Why? Why?”"},
        {"role": "assistant", "content": "Because."},
        {"role": "user", "content": "é"},
    ]
    text, there = await remote.chat(talk, GREEDY, capture_layers=[1], steering=Add(vector(1), layer=0))
    other, here = await tiny.chat(
        talk,
        GREEDY,
        capture_layers=[1],
        steering=Add(vector(1), layer=0),
        chat_template_kwargs={"chat_template": TEMPLATE},
    )
    assert text == other
    await asyncio.gather(here.fetch(), there.fetch())
    same(here, there)
    assert [span.role for span in there.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "generation_prompt",
        "assistant",
    ]
    assert torch.equal(there.rows_of("assistant"), here.rows_of("assistant"))
    words = tiny.tokenizer.decode(there.token_ids[there.rows_of(1)].tolist())
    assert words == "“Why? Why?”"
    both = await remote.chat([talk[:2], talk], GREEDY)
    assert both[1] == await tiny.chat(talk, GREEDY, chat_template_kwargs={"chat_template": TEMPLATE})
    with pytest.raises(errors.InvalidPrompt, match="text alone"):
        await remote.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


async def test_a_stream_gives_texts_as_they_come_and_rows_at_the_end(remote: RemoteModel, tiny: SteerModel) -> None:
    prompt, edit = random_prompt(15, 11), Add(vector(3), 2.0, layer=1)
    params = {**GREEDY, "max_tokens": 60}
    text, here = await tiny.generate(prompt, params, capture_layers=[3], steering=edit)
    await here.fetch()
    chunks = [chunk async for chunk in remote.stream(prompt, params, capture_layers=[3], steering=edit)]
    assert "".join(chunk.text for chunk in chunks) == text
    assert sum((chunk.token_ids for chunk in chunks), ()) == here.output_token_ids
    assert len(chunks) > 4, "it came in one piece"
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    torch.testing.assert_close(last.captures[3], here.captures[3], rtol=1e-4, atol=1e-4)
    assert torch.equal(last.positions, here.positions)
    assert last.steering.rows == here.receipt.steering.rows
    plain = [chunk async for chunk in remote.stream(prompt, GREEDY)]
    assert plain[-1].captures is None
    assert plain[-1].steering is None
    with pytest.raises(errors.LayerOutOfRange, match="layer 99"):
        _ = [chunk async for chunk in remote.stream(prompt, GREEDY, capture_layers=[99])]
    with pytest.raises(errors.InvalidRequest, match="not n=2"):
        _ = [chunk async for chunk in remote.stream(prompt, {"n": 2})]


def noticed(reports: Any) -> list[Any]:
    """What monitors found, but for the scores, which other batches move a little."""
    return [(one.monitor, one.scored, one.stopped, fired_at(one.crossings)) for one in reports]


def fired_at(crossings: Any) -> list[Any]:
    return [(at.monitor, at.index, at.position) for at in crossings]


async def middling(tiny: SteerModel, prompt: list[int], tokens: int) -> float:
    """A threshold between the scores of the generated tokens."""
    spec = CaptureSpec(layers=3, tokens="generated")
    _, handle = await tiny.generate(prompt, {**GREEDY, "max_tokens": tokens}, capture=spec)
    async with handle:
        scores = sorted((handle.captures[3].double() @ vector(20).double()).tolist())
        return (scores[-5] + scores[-6]) / 2


@pytest.mark.parametrize("kind", ["annotate", "stop"])
async def test_monitors_are_asked_and_answered_as_here(
    remote: RemoteModel, tiny: SteerModel, kind: Any, monkeypatch
) -> None:
    """The same calls of both models: texts, ends and reports are alike, whole and in a stream; probes that a body does
    not hold go up first.
    """
    monkeypatch.setattr("steercap.client.asks.MOST_NUMBERS", 0 if kind == "stop" else 4096)
    prompt, params = random_prompt(21, 70), {**GREEDY, "max_tokens": 24}
    threshold = await middling(tiny, prompt, 24)
    monitors = [
        Monitor(vector(20), threshold=threshold, layer=-1, do=kind, name="over"),
        Monitor(vector(20), threshold=threshold, layer=3, above=False, bias=0.5, tokens=[slice(18, 26), 0]),
        Monitor(vector(21), threshold=1e6, layer=1, site="mlp_out", tokens="all", name="never"),
    ]
    spec = CaptureSpec(layers=[1, 3], sites=["resid_post", "mlp_out"])
    asked: dict[str, Any] = {"monitors": monitors, "capture": spec, "steering": Add(vector(3), 0.01, layer=0)}

    async def notebook(model: Any) -> tuple[Any, CaptureHandle, list[Any]]:
        raw = await model.run(prompt, params, **asked)
        return raw, await raw.handle.fetch(), [chunk async for chunk in model.stream(prompt, params, **asked)]

    (raw, here, chunks), (other, there, events) = await notebook(tiny), await notebook(remote)
    same(here, there)
    (known,), (said,) = raw.monitors, other.monitors
    assert isinstance(said[0], MonitorReport)
    assert noticed(said) == noticed(known) == noticed(events[-1].monitors) == noticed(chunks[-1].monitors)
    assert known[0].crossings, "none fires, so nothing is shown"
    scores, others = ([at.score for one in reports for at in one.crossings] for reports in (known, said))
    assert others == pytest.approx(scores, abs=1e-3)
    assert known[0].stopped == (kind == "stop")
    (sample,), (choice,) = raw.output.outputs, other.output.choices
    assert (choice.finish_reason, choice.stop_reason) == (sample.finish_reason, sample.stop_reason)
    assert choice.finish_reason == ("steercap_probe" if kind == "stop" else "length")
    assert other.steering[0].rows == raw.steering[0].rows == events[-1].steering.rows == chunks[-1].steering.rows
    assert "".join(one.text for one in events) == "".join(one.text for one in chunks) == sample.text
    for name in ("token_ids", "crossings"):
        first, second = ([part for one in many for part in getattr(one, name)] for many in (chunks, events))
        assert second == first if name == "token_ids" else fired_at(second) == fired_at(first)
    assert events[-1].finish_reason == chunks[-1].finish_reason == choice.finish_reason
    assert [chunk.monitors for chunk in events[:-1]] == [()] * (len(events) - 1)
    if kind == "annotate":  # one that stops soon may come at once
        assert len([chunk for chunk in events if chunk.crossings]) > 1, "they come as they are found"


@pytest.mark.parametrize("held", [True, False])
async def test_a_monitor_steers_from_where_it_says(remote: RemoteModel, tiny: SteerModel, held: bool) -> None:
    """Rows are those of the same tokens read with the edit from there, on both sides; steering that a body does not
    hold goes up first.
    """
    prompt, params = random_prompt(21, 70), {**GREEDY, "max_tokens": 200}
    add = Add(vector(6), 6.0, layer=1)
    steering: Any = SteeringSpec([SteeringSpec([add], preserve_norm=True)]) if held else add
    monitor = Monitor(
        vector(20), threshold=await middling(tiny, prompt, 12), layer=3, do="steer", steering=steering, name="begins"
    )
    for model in (tiny, remote):
        asked: dict[str, Any] = {"capture": CaptureSpec(layers=3), "monitors": [monitor]}
        raw = await model.run(prompt, params, **asked)
        handle = raw.handle
        (report,) = raw.monitors[0]
        start, inputs = report.steered_from, [*handle.prompt_token_ids, *handle.output_token_ids[:-1]]
        assert start is not None
        assert report.crossings[0].position < start
        assert raw.steering[0].rows == (len(inputs) - start,)
        later = Add(vector(6), 6.0, layer=1, tokens=slice(start, None))
        spec = SteeringSpec([SteeringSpec([later], preserve_norm=True)]) if held else later
        known = await tiny.read(inputs, capture=CaptureSpec(layers=3), steering=spec)
        async with known:
            await handle.fetch()
            torch.testing.assert_close(handle.captures[3], known.captures[3], rtol=1e-4, atol=1e-4)


async def test_each_sample_has_reports_of_its_own(remote: RemoteModel, tiny: SteerModel) -> None:
    """Of several prompts and samples; what a monitor asks wrongly is refused as here."""
    params = {"max_tokens": 9, "seed": 5, "n": 2, "ignore_eos": True}
    prompts = [random_prompt(12, 71), random_prompt(9, 72)]
    monitors = [
        Monitor(vector(20), threshold=0.0, layer=3),
        Monitor(vector(20), threshold=8.0, layer=3, do="stop", name="ends"),
    ]
    here = await tiny.run(prompts, params, monitors=monitors)
    there = await remote.run(prompts, params, monitors=monitors)
    for one, other in zip(here, there, strict=True):
        assert [noticed(many) for many in other.monitors] == [noticed(many) for many in one.monitors]
        assert [choice.text for choice in other.output.choices] == [sample.text for sample in one.output.outputs]
    wrong: list[tuple[type[Exception], list[Any]]] = [
        (errors.LayerOutOfRange, [Monitor(vector(20), threshold=0.0, layer=99)]),
        (errors.InvalidVector, [Monitor(vector(20)[:64], threshold=0.0, layer=1)]),
        (
            errors.InvalidSpec,
            [
                Monitor(vector(20), threshold=0.0, layer=1, name="a"),
                Monitor(vector(20), threshold=0.0, layer=2, name="a"),
            ],
        ),
        (errors.InvalidSelection, [Monitor(vector(20), threshold=0.0, layer=1, tokens="prompt", do="stop")]),
    ]
    for kind, asked in wrong:
        for model in (tiny, remote):
            with pytest.raises(kind):
                await model.run(prompts[0], params, monitors=asked)
    assert await settled(tiny) == (0, 0, 0)


@pytest.mark.slow
async def test_a_direction_extracted_over_the_connection_is_the_local_one(
    remote: RemoteModel, tiny: SteerModel
) -> None:
    """Of every kind of text that `extract` reads: text, token ids, and exchanges of each with each; with the provenance."""
    draw = random.Random(11)
    words = ["red", "blue", "Ünder", "über 7", "one\ntwo", "  cat", "dog ", "3.14"]

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(3, 8)))

    kinds: list[Any] = [
        text,
        lambda: random_prompt(draw.randint(3, 9), draw.randint(0, 999)),
        lambda: Exchange(text(), text()),
        lambda: Exchange(random_prompt(5, draw.randint(0, 999)), text()),
        lambda: Exchange(text(), random_prompt(4, draw.randint(0, 999))),
    ]
    for method, count in (("difference", 10), ("pca", 5), ("difference", 70)):
        more, less = ([draw.choice(kinds)() for _ in range(count)] for _ in range(2))
        here = await extract(tiny, more, less, name="kind", method=method, layers=[1, 3])
        there = await extract(remote, more, less, name="kind", method=method, layers=[1, 3])
        assert (there.model, there.provenance.prompts) == (here.model, here.provenance.prompts)
        assert (there.provenance.revision, there.provenance.dtype) == ("", "float32")
        assert (there.provenance.rows, there.provenance.tokens) == (here.provenance.rows, here.provenance.tokens)
        for layer, known in here["kind"].items():
            torch.testing.assert_close(there["kind"][layer], known, rtol=1e-3, atol=1e-3)
    for wrong in ([3], [Exchange("a", "")], [{"a": 1}, 5]):
        for model in (tiny, remote):
            with pytest.raises(errors.InvalidRequest):
                await extract(model, wrong * 2, wrong * 2, name="kind", held_out=0.0)
    chat: Any = [{"role": "user", "content": "Hello"}]
    assert await remote.tokenize(chat) == list(
        (await remote.chat(chat, GREEDY, capture_layers=[1]))[1].prompt_token_ids
    )
    assert tokens_of(remote.tokenizer, chat, special=False) == await remote.tokenize(chat)
    for special in (True, False):
        assert await remote.tokenize("Hello there", add_special_tokens=special) == await tiny.tokenize(
            "Hello there", add_special_tokens=special
        )


async def test_what_the_server_says_of_the_model(remote: RemoteModel, tiny: SteerModel, url: str) -> None:
    assert dict(remote.points) == dict(tiny.points)
    assert (remote.num_layers, remote.hidden_size, remote.model) == (tiny.num_layers, tiny.hidden_size, tiny.model)
    assert (remote.served_name, remote.url) == ("tiny", url)
    here, there = await tiny.stats(), await remote.stats()
    limits = ("capture_bytes", "steering_slots", "sae_bytes")  # what is held of these goes on its own time
    assert [getattr(there, name) for name in limits] == [getattr(here, name) for name in limits]
    async with remote.openai as client:
        assert [one.id async for one in client.models.list()] == ["tiny", "tiny+calm"]
    prompt = random_prompt(8, 12)
    async with SteerModel.connect(f"{url}/v1/", api_key="mine", model="tiny+calm") as preset:
        raw = await preset.run(prompt, GREEDY)
        known = await tiny.run(prompt, GREEDY, steering=Add(CALM[1], 4.0, layer=1))
        assert raw.output.choices[0].text == known.output.outputs[0].text
        assert raw.steering[0].digest == known.steering[0].digest


@pytest.mark.slow
async def test_over_a_unix_socket(tiny: SteerModel, tmp_path) -> None:
    """As a warm engine is asked: rows, OpenAI's client, and a sweep whose folder either kind of model goes on with."""
    flags = server.read_flags(tiny.serving.model, FLAGS[:2])
    app = await application(tiny, flags, ServerSettings())
    clock = IdleClock(app.router.middleware_stack, 60.0)
    app.router.middleware_stack = clock
    prompts, sampling = [random_prompt(7, seed) for seed in range(2)], {"temperature": 0.0, "max_tokens": 4}
    sweep = Sweep(
        vectors={"calm": CALM},
        layers=[(1,)],
        scales=(4.0,),
        random=1,
        prompts=["red dog", "two"],
        sampling_params=sampling,
    )
    measures = ["length", "perplexity"]
    with tempfile.TemporaryDirectory(prefix="up") as folder:
        async with listening(app, Path(folder) / "sock") as url, SteerModel.connect(url) as model:
            assert model.identity() == tiny.identity()
            assert (await model.connection.ask("GET", IDLE))["running"] == 0
            before = clock.seconds
            texts, handles = await model.generate(prompts, GREEDY, capture_layers=[2])
            assert clock.seconds < before
            known = await tiny.generate(prompts, GREEDY, capture_layers=[2])
            assert texts == known[0]
            await model.fetch_captures_batch(handles)
            async with model.openai as client:
                assert [one.id async for one in client.models.list()] == ["tiny"]
            there = await run_sweep(model, sweep, out=tmp_path / "there", measures=measures)
            for handle in (*handles, *known[1]):
                handle.release()
    here = await run_sweep(tiny, sweep, out=tmp_path / "here", measures=measures)
    assert there.records == here.records
    assert there.values["length"] == here.values["length"]
    assert there.values["perplexity"] == pytest.approx(here.values["perplexity"], rel=1e-3)
    again = await run_sweep(tiny, sweep, out=tmp_path / "there", measures=measures)
    assert again.values == there.values
    assert await settled(tiny) == (0, 0, 0)


async def test_steering_in_force_and_by_name(remote: RemoteModel, tiny: SteerModel) -> None:
    prompt, edit = random_prompt(9, 13), Add(vector(5), 3.0, layer=2)
    plain, steered = await tiny.generate(prompt, GREEDY), await tiny.generate(prompt, GREEDY, steering=edit)
    assert plain != steered
    async with remote.steered(edit) as spec:
        assert spec.flat() == (edit,)
        assert await remote.generate(prompt, GREEDY) == steered
        assert await remote.generate(prompt, GREEDY, steering=None) == plain
    assert await remote.generate(prompt, GREEDY) == plain
    said = await remote.upload_vectors("mine", SteeringSpec([edit]))
    assert said["kind"] == "steering"
    assert await remote.generate(prompt, GREEDY, steering="mine") == steered
    assert {one["name"] for one in await remote.list_vectors()} >= {"mine", "calm"}
    await remote.delete_vectors("mine")
    with pytest.raises(errors.InvalidSpec, match="no vector or steering is called 'mine'"):
        await remote.generate(prompt, GREEDY, steering="mine")
    with pytest.raises(errors.InvalidRequest, match="you have no vector or steering"):
        await remote.delete_vectors("mine")
    with pytest.raises(errors.InvalidSpec, match="give letters"):
        await remote.upload_vectors("a b", CALM)


@pytest.mark.parametrize(
    ("asked", "kind", "says"),
    [
        ({"capture_layers": [99]}, errors.LayerOutOfRange, "layer 99 is outside this model of 4 layers"),
        ({"capture": CaptureSpec(sites="nothing")}, errors.UnknownName, "nothing"),
        ({"capture": CaptureSpec(tokens=[5000])}, errors.InvalidSelection, "5000"),
        ({"steering": Add([1.0, 2.0], layer=1)}, errors.InvalidVector, "2"),
        ({"steering": Add(torch.ones(5000), layer=1)}, errors.InvalidVector, "5000"),
        ({"sampling_params": {"temperature": -1.0}}, errors.InvalidRequest, "temperature"),
    ],
)
async def test_errors_are_those_of_a_local_model(remote: RemoteModel, tiny: SteerModel, asked, kind, says) -> None:
    for model in (tiny, remote):
        with pytest.raises(kind, match=says) as raised:
            await model.generate([[3, 4, 5], [6, 7]], **asked)
        assert type(raised.value) is kind
    assert await settled(tiny) == (0, 0, 0)


async def test_another_key_cannot_fetch(remote: RemoteModel, url: str) -> None:
    _, handle = await remote.generate([3, 4, 5], GREEDY, capture_layers=[1])
    path = handle.lifecycle.source.path
    async with SteerModel.connect(url, api_key="yours") as other:
        with pytest.raises(errors.InvalidRequest, match="not yours"):
            await other.connection.ask("GET", path)
    for key in (None, "nobody's"):
        with pytest.raises(errors.ServerFailure, match="refuses the API key") as raised:
            await SteerModel.connect(url, api_key=key).start()
        assert "nobody" not in str(raised.value)
    await handle.fetch()


async def waiting(remote: RemoteModel) -> int:
    """How many captures wait at the server."""
    await remote.connection.freed()
    return len((await remote.connection.ask("GET", "/v1/steercap/captures"))["data"])


async def test_rows_are_freed_when_they_are_fetched_released_or_dropped(remote: RemoteModel) -> None:
    assert await waiting(remote) == 0
    _, handles = await remote.generate([[3, 4, 5]] * 4, GREEDY, capture_layers=[1])
    assert await waiting(remote) == 4
    await handles[0].fetch()
    assert await waiting(remote) == 3
    handles[1].release()
    handles[1].release()
    assert await waiting(remote) == 2
    with pytest.raises(errors.CaptureReleased):
        await handles[1].fetch()
    async with handles[2] as fetched:
        assert len(fetched.captures[1]) == 8
    with pytest.raises(errors.CaptureReleased):
        _ = handles[2].captures
    del handles
    gc.collect()
    assert await waiting(remote) == 0


async def test_a_capture_whose_time_is_over_says_so(remote: RemoteModel) -> None:
    _, handles = await remote.generate([[3, 4, 5]] * 2, GREEDY, capture_layers=[1])
    await remote.connection.ask("DELETE", handles[0].lifecycle.source.path)
    with pytest.raises(errors.CaptureReleased, match=r"the server no longer has its rows .*it has expired"):
        await remote.fetch_captures_batch(handles)
    assert handles[1].fetched, "the others come all the same"


async def test_a_client_that_gives_up_leaves_nothing(remote: RemoteModel, tiny: SteerModel) -> None:
    """Calls cancelled at any moment, streams left half-way, a call of which one prompt fails."""
    draw = random.Random(3)
    long = {"temperature": 0.0, "max_tokens": 230, "ignore_eos": True}

    async def gives_up(number: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(draw.uniform(0.0, 0.2)):
                await remote.generate(
                    [random_prompt(5 + number, number)] * 2,
                    long,
                    capture_layers=[1],
                    steering=Add(vector(number), layer=1),
                )
                pytest.fail("230 tokens came in a fifth of a second")

    async def leaves(number: int) -> None:
        async for chunk in remote.stream(random_prompt(5, number), long, capture_layers=[2]):
            if chunk.text:
                break

    await asyncio.gather(*map(gives_up, range(12)), *map(leaves, range(4)))
    with pytest.raises(errors.LayerOutOfRange):
        await remote.generate(
            [[3, 4, 5]] * 3, GREEDY, capture=[CaptureSpec(layers=[1])] * 2 + [CaptureSpec(layers=[9])]
        )
    assert await settled(tiny) == (0, 0, 0)
    gc.collect()
    assert await waiting(remote) == 0


async def test_closing_frees_what_is_held_and_ends_what_runs(tiny: SteerModel, url: str) -> None:
    model = await SteerModel.connect(url, api_key="yours").start()
    _, handle = await model.generate(
        [3, 4, 5], GREEDY, capture=CaptureSpec(project=TRAITS), steering=Add(vector(2), layer=1)
    )
    running = asyncio.create_task(model.generate([3, 4], {"max_tokens": 900, "ignore_eos": True}, capture_layers=[1]))
    await asyncio.sleep(0.2)
    assert len(await model.list_vectors()) == 2
    await model.aclose()
    await model.aclose()
    with pytest.raises(errors.ModelClosed):
        await running
    for call in (handle.fetch, model.stats, model.start):
        with pytest.raises(errors.ModelClosed):
            await call()
    async with SteerModel.connect(url, api_key="yours") as other:
        assert await waiting(other) == 0
        assert [one["name"] for one in await other.list_vectors()] == ["calm"]
    assert await settled(tiny) == (0, 0, 0)


async def test_vectors_go_up_once(remote: RemoteModel, tiny: SteerModel) -> None:
    """Long specs are uploaded by their digest; what somebody deleted there goes up again with the next call."""
    spec = SteeringSpec([Add(vector(layer), layer=layer % 4) for layer in range(40)])
    asked = {"prompts": [[3, 4, 5]] * 5, "sampling_params": GREEDY, "steering": spec}
    before = {one["name"] for one in await remote.list_vectors()}
    known = await tiny.generate(**asked)
    assert await remote.generate(**asked) == known
    (name,) = {one["name"] for one in await remote.list_vectors()} - before
    assert await remote.generate(**asked) == known
    assert len(await remote.list_vectors()) == len(before) + 1
    await remote.delete_vectors(name)
    with pytest.raises(errors.InvalidSpec, match=name):
        await remote.generate(**asked)
    assert await remote.generate(**asked) == known


async def test_without_await(tiny: SteerModel, url: str) -> None:
    """`steercap.sync.SteerModel.connect`, from a thread, as a notebook without a loop has it."""
    prompt, edit = random_prompt(12, 30), Add(vector(3), layer=1)
    text, here = await tiny.generate(prompt, GREEDY, capture_layers=[1], steering=edit)
    await here.fetch()

    def notebook() -> None:
        with Blocking.connect(url, api_key="mine") as model:
            assert (model.num_layers, model.url) == (4, url)
            other, there = model.generate(prompt, GREEDY, capture_layers=[1], steering=edit)
            assert other == text
            same(here, there.fetch().awaited)
            with model.steered(edit):
                handles = model.read([prompt, prompt], capture_layers=[2])
                model.fetch_captures_batch(handles)
                assert handles[0].captures[2].shape == (12, WIDTH)
            chunks = list(model.stream(prompt, GREEDY, capture_layers=[1], steering=edit))
            assert "".join(chunk.text for chunk in chunks) == text
            assert model.chat([{"role": "user", "content": "a"}], GREEDY)
            raw = model.run(prompt, GREEDY, monitors=[Monitor(vector(20), threshold=-1e6, layer=3)])
            assert [at.index for at in raw.monitors[0][0].crossings] == [0, 1, 2, 3, 4]
            assert model.stats().capture_bytes > 0
            with model.openai as client:
                assert client.models.list().data[0].id == "tiny"
            with pytest.raises(errors.CaptureNotFetched, match=r"`handle\.fetch"):
                _ = model.read(prompt).captures
        with pytest.raises(errors.ModelClosed, match=r"`with SteerModel\.connect"):
            model.generate("x")

    await asyncio.to_thread(notebook)
    assert await settled(tiny) == (0, 0, 0)


def same_sketch(here: Sketch, there: Sketch) -> None:
    """Two sketches are of the same rows: all that names them alike, statistics as far as other batches let them."""
    for name in (
        "kind",
        "size",
        "points",
        "rows",
        "requests",
        "model",
        "dtype",
        "tokens",
        "before_edits",
        "num_layers",
    ):
        assert getattr(there, name) == getattr(here, name), name
    assert there.versions == here.versions
    assert {state.rows for state in there.states.values()} == {here.rows}
    for point in here.points:
        if here.kind == "frequent_directions":  # which depends on the order in which requests ended
            (mine, bound), (others, other_bound) = here.frequent_directions(*point), there.frequent_directions(*point)
            apart = torch.linalg.matrix_norm(mine.T @ mine - others.T @ others, 2)
            assert apart <= bound + other_bound + 1e-3
        elif here.kind == "moments":
            torch.testing.assert_close(there.covariance(*point), here.covariance(*point), rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(there.variance(*point), here.variance(*point), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.mean(*point), here.mean(*point), rtol=1e-4, atol=1e-4)


SKETCHED: list[dict[str, Any]] = [
    {"kind": "moments", "layers": [1, -1], "sites": ["resid_post", "mlp_out"]},
    {"kind": "variances", "tokens": slice(1, None), "layers": slice(None, None, 2)},
    {"kind": "frequent_directions", "layers": 2, "size": 16, "before_edits": True, "tokens": "prompt"},
]


@pytest.mark.parametrize("number", range(len(SKETCHED)))
async def test_a_sketch_is_that_of_a_local_model(remote: RemoteModel, tiny: SteerModel, number: int) -> None:
    """Of every kind: whatever joins it, also requests that capture, are steered, are read, or come in a stream."""
    asked, edit = SKETCHED[number], Add(vector(3), 2.0, layer=1)
    found = []
    for model in (tiny, remote):
        async with model.sketch(**asked) as running:
            await model.generate([random_prompt(12 + k, k) for k in range(5)], GREEDY, steering=edit)
            await model.generate(random_prompt(9, 9), {**GREEDY, "n": 3, "temperature": 1.0, "seed": 5})
            assert await model.read([random_prompt(30, 30), random_prompt(31, 31)]) == [None, None]
            same_rows = {name: asked[name] for name in ("tokens", "before_edits") if name in asked}
            spec = CaptureSpec(sites=["resid_post", "mlp_out"], **same_rows)
            handle = await model.read(random_prompt(20, 20), capture=spec)
            assert await handle.fetch() is handle
            async for _ in model.stream(random_prompt(8, 8), GREEDY):
                pass
            found.append(await running.fetch())
            assert (running.requests, running.rows) == (found[-1].requests, found[-1].rows)
            assert running.requests == 5 + 3 + 2 + 1 + 1
            first = running.points[0]
            torch.testing.assert_close(await running.mean(*first), found[-1].mean(*first))
        with pytest.raises(errors.SketchClosed, match="fetch"):
            await running.fetch()
        assert "closed" in repr(running)
    same_sketch(*found)
    assert (await tiny.stats()).sketches == 0


async def test_a_calibration_is_that_of_a_local_model(remote: RemoteModel, tiny: SteerModel) -> None:
    """Its points, its vectors, and all that it says of its texts."""
    texts = ["Hello there", "My day was long", "And one of more tokens than the others have."]
    seen: list[Progress] = []
    there = await calibrate(remote, texts, layers=[0, 2], sites=["resid_post", "mlp_out"], progress=seen.append)
    here = await calibrate(tiny, texts, layers=[0, 2], sites=["resid_post", "mlp_out"])
    assert seen[-1] == Progress("texts", len(texts), len(texts))
    for name in ("points", "model", "revision", "dtype", "tokens", "prompts", "texts", "rows"):
        assert getattr(there, name) == getattr(here, name), name
    for point in here.points:
        torch.testing.assert_close(there.means[point], here.means[point], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.spreads[point], here.spreads[point], rtol=1e-4, atol=1e-4)


async def test_a_sketch_says_what_a_local_model_says(remote: RemoteModel, tiny: SteerModel) -> None:
    """The same errors, with the same words, whether they are found here or at the server."""

    async def said(model: Any, work: Any) -> str:
        with pytest.raises(errors.SteercapError) as raised:
            await work(model)
        return f"{type(raised.value).__name__}: {raised.value}"

    def opening(**arguments: Any) -> Any:
        async def work(model: Any) -> None:
            async with model.sketch(**arguments):
                raise AssertionError

        return work

    async def other_tokens(model: Any) -> None:
        async with model.sketch(layers=1), model.sketch(layers=1, tokens="prompt"):
            raise AssertionError

    async def other_rows(model: Any) -> None:
        async with model.sketch(layers=1):
            await model.generate(random_prompt(9, 1), GREEDY, capture=CaptureSpec(layers=2))

    async def watched(model: Any) -> None:
        async with model.sketch(layers=1):
            await model.run(random_prompt(9, 1), GREEDY, monitors=[Monitor(vector(1), threshold=1.0, layer=1)])

    async def too_few(model: Any) -> None:
        async with model.sketch(layers=1) as running:
            await running.variance(1)

    works = [
        opening(kind="moment"),
        opening(kind="moments", size=4),
        opening(kind="frequent_directions", size=0),
        opening(kind="frequent_directions", size=10_000_000),
        opening(layers=99),
        opening(sites="neuron"),
        opening(tokens="genrated"),
        other_tokens,
        other_rows,
        watched,
        too_few,
    ]
    for work in works:
        here, there = await said(tiny, work), await said(remote, work)
        assert re.sub(r"[\d,]+ bytes", "bytes", there) == re.sub(r"[\d,]+ bytes", "bytes", here)
    assert (await tiny.stats()).sketches == 0


async def test_a_sketch_belongs_to_its_key_and_goes_with_its_connection(url: str, tiny: SteerModel) -> None:
    """Nobody else joins, reads or closes it; a request that ran when it was closed fails; a lost client's is freed."""
    async with SteerModel.connect(url, api_key="mine") as mine, SteerModel.connect(url, api_key="yours") as yours:
        async with mine.sketch(layers=1) as running, yours.sketch(layers=1) as other:
            name, other.record.name = other.record.name, running.record.name
            with pytest.raises(errors.SketchClosed, match="it is not yours"):
                await yours.generate("Hello", GREEDY)
            for method in ("GET", "DELETE"):
                with pytest.raises(errors.SketchClosed, match="it is not yours"):
                    await yours.connection.ask(method, f"/v1/steercap/sketches/{running.record.name}")
            other.record.name = name
            late = asyncio.ensure_future(mine.generate("Hello", {**GREEDY, "max_tokens": 200}))
            while not (await tiny.stats()).handles_held:
                await asyncio.sleep(0.01)
        with pytest.raises(errors.SketchClosed):
            await late
        await mine._backend.open_sketch(
            "moments", None, CaptureSpec(layers=1, codec="raw")
        )  # as if its block never ended
        assert (await tiny.stats()).sketches == 1
    assert (await tiny.stats()).sketches == 0


async def test_a_sketch_without_await(tiny: SteerModel, url: str) -> None:
    """The blocking twins of sketches and of `calibrate`, from a thread."""
    async with tiny.sketch(layers=1) as running:
        await tiny.generate(["Hello there", "My day"], GREEDY)
        here = await running.fetch()
    made = await calibrate(tiny, ["Hello there", "My day was long"])

    def notebook() -> None:
        with Blocking.connect(url, api_key="mine") as model:
            with model.sketch(layers=1) as sketch:
                model.generate(["Hello there", "My day"], GREEDY)
                same_sketch(here, sketch.fetch())
                assert sketch.requests == 2
                torch.testing.assert_close(sketch.mean(1), here.mean(1), rtol=1e-4, atol=1e-4)
            with pytest.raises(errors.SketchClosed):
                sketch.fetch()
            found = blocking_calibrate(model, ["Hello there", "My day was long"])
            assert (found.points, found.prompts, found.rows) == (made.points, made.prompts, made.rows)

    await asyncio.to_thread(notebook)
    assert await settled(tiny) == (0, 0, 0)
    assert (await tiny.stats()).sketches == 0


async def test_a_running_server_is_checked_by_a_captured_chat(url: str, tiny: SteerModel) -> None:
    """With the key of a client, by a preset's name, and with a wrong key or name, which is said."""
    for key, name, last in (
        ("mine", None, "captured chat ok"),
        ("yours", "tiny+calm", "captured chat ok"),
        ("nobody's", None, "models problem ServerFailure"),
        ("mine", "tinny", "models problem InvalidRequest"),
    ):
        found = await examine_server(f"{url}/v1", key=key, model=name, seconds=60)
        assert found[0].state == "ok"
        assert f"{found[-1].name} {found[-1].state} {found[-1].found}".startswith(last)
        assert last.startswith("models") or re.search(r" (\d+) rows of .* for \1 tokens", found[-1].found)
    await settled(tiny)
