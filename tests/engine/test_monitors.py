"""Numbers of tokens as they are generated, and monitors, locally and asked by OpenAI's client: each is what a local
capture gives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from openai import APIError, AsyncOpenAI, BadRequestError
from safetensors.torch import load
from support.rows import random_prompt, settled

from steercap import Add, CaptureSpec, Monitor, SteerModel
from steercap.errors import (
    CaptureIncomplete,
    InvalidSelection,
    InvalidSpec,
    PointNotArmed,
    SteeringNotApplied,
)
from steercap.server.server import ServerSettings, application
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
FLAGS = ["--served-model-name", "tiny", "--chat-template", TEMPLATE]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
IGNORED = {"ignore_eos": True}
LAYER = 3


def vectors(seed: int) -> LayerVectors:
    """Random ones, of no length in particular, at layers 1 and 3."""
    draw = torch.Generator().manual_seed(seed)
    return LayerVectors({1: torch.randn(128, generator=draw), 3: torch.randn(128, generator=draw)})


CALM, TRAITS = vectors(1), DirectionSet({"warm": vectors(2), "cold": vectors(3)})


@pytest.fixture(scope="module")
async def served(tiny: SteerModel, tmp_path_factory) -> AsyncOpenAI:
    """OpenAI's client of a server that knows `calm` and `traits`."""
    from steercap.adapters import server  # vLLM, and Triton with it, which other tests want to import first

    folder = tmp_path_factory.mktemp("monitors")
    files = {"calm": CALM.save(folder / "calm.safetensors"), "traits": TRAITS.save(folder / "traits.safetensors")}
    app = await application(tiny, server.read_flags(tiny.serving.model, FLAGS), ServerSettings(vectors=files))
    headers = {"authorization": "Bearer none"}
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers)
    return AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


# Numbers in streams


async def live(chunks: Any) -> tuple[list[Any], list[dict[str, Any]], dict[str, Any]]:
    """All chunks of a stream, the numbers that came with them, and what came of it."""
    found = [chunk async for chunk in chunks]
    fields = [(chunk.model_extra or {}).get("steercap", {}) for chunk in found]
    return found, fields, fields[-1]


def together(fields: Sequence[dict[str, Any]], choice: int, point: str) -> tuple[list[int], torch.Tensor]:
    """Positions and numbers of one choice, float32 [rows, directions]."""
    mine = [one for field in fields for one in field.get("scores", []) if one["choice"] == choice]
    positions = [position for one in mine for position in one["positions"]]
    columns = [torch.tensor([one["scores"][point][name] for name in TRAITS]).T for one in mine]
    return positions, torch.cat(columns)


async def test_projections_come_with_the_tokens(served: AsyncOpenAI, tiny: SteerModel) -> None:
    """Each row's numbers come by the event of the token that follows, and are those of a local capture."""
    prompt = random_prompt(40, 1)
    text, handle = await tiny.generate(prompt, {**GREEDY, **IGNORED}, capture=CaptureSpec(project=TRAITS))
    async with handle:
        asked = {"capture": {"project": "traits"}}
        chunks = await served.completions.create(
            model="tiny",
            prompt=prompt,
            stream=True,
            extra_body={"steercap": asked, "return_token_ids": True, **IGNORED},
            **GREEDY,
        )
        found, fields, last = await live(chunks)
        assert "".join(choice.text for chunk in found for choice in chunk.choices) == text
        for layer in (1, 3):
            positions, numbers = together(fields, 0, f"resid_post[{layer}]")
            assert positions == handle.positions.tolist() == list(range(40 + 23))
            torch.testing.assert_close(numbers, handle.captures[layer], rtol=1e-5, atol=1e-5)
        tokens, reached = 0, 0
        events = 0
        for chunk, field in zip(found, fields, strict=True):
            tokens += sum(len(choice.model_extra["token_ids"] or ()) for choice in chunk.choices)
            for one in field.get("scores", []):
                reached, events = one["positions"][-1], events + 1
            assert reached <= 40 + tokens - 2  # the newest token has no row
        assert events >= 3
        content = await fetched(served, last["results"][0])
        positions, numbers = together(fields, 0, "resid_post[3]")
        assert torch.equal(numbers, content["rows.resid_post.3"])
    assert await settled(tiny) == (0, 0, 0)


async def fetched(client: AsyncOpenAI, result: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The rows of one choice."""
    http = client._client
    rows: dict[str, torch.Tensor] = load((await http.get(result["capture"]["url"])).content)
    await http.delete(result["capture"]["url"])
    return rows


async def test_numbers_of_samples_and_prompts_are_their_own(served: AsyncOpenAI) -> None:
    """Two prompts of two samples each: the numbers of each choice are those of the file that it gives at the end."""
    prompts = [random_prompt(12, 3), random_prompt(31, 4)]
    chunks = await served.completions.create(
        model="tiny",
        prompt=prompts,
        n=2,
        max_tokens=9,
        seed=1,
        stream=True,
        extra_body={"steercap": {"capture": {"project": "traits", "layers": [3]}}, **IGNORED},
    )
    _, fields, last = await live(chunks)
    seen = []
    for result in last["results"]:
        rows = await fetched(served, result)
        positions, numbers = together(fields, result["choice"], "resid_post[3]")
        assert positions == rows["positions"].tolist()
        assert torch.equal(numbers, rows["rows.resid_post.3"])
        assert rows["prompt_token_ids"].tolist() == prompts[result["choice"] // 2]
        seen.append(numbers[-1])
    assert len({tuple(one.tolist()) for one in seen}) == 4


async def test_a_chat_of_some_tokens_has_their_numbers(served: AsyncOpenAI) -> None:
    """Tokens that are not selected have none; the last one has none either."""
    chunks = await served.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Name a colour."}],
        stream=True,
        extra_body={"steercap": {"capture": {"project": "traits/warm", "layers": 1, "tokens": "generated"}}, **IGNORED},
        **GREEDY,
    )
    _, fields, last = await live(chunks)
    rows = await fetched(served, last["results"][0])
    mine = [one for field in fields for one in field.get("scores", [])]
    (name,) = mine[0]["scores"]["resid_post[1]"]
    numbers = [number for one in mine for number in one["scores"]["resid_post[1]"][name]]
    assert torch.equal(torch.tensor(numbers)[:, None], rows["rows.resid_post.1"])
    assert len(numbers) == 23


# Monitors


class Run(NamedTuple):
    """A local run that nothing watches: its tokens, its text, and the score of each generated token but the last."""

    prompt: list[int]
    tokens: list[int]
    text: str
    scores: list[float]

    def threshold(self, token: int) -> float:
        """One that the score of no token before `token` exceeds, and its own does."""
        before = max(self.scores[:token], default=-1e9)
        assert self.scores[token] > before
        return (self.scores[token] + before) / 2 if token else self.scores[0] - 1.0

    @property
    def records(self) -> list[int]:
        """Tokens whose scores exceed those of all before them by a margin."""
        return [
            number for number in range(1, len(self.scores)) if self.scores[number] > max(self.scores[:number]) + 1e-3
        ]


async def run_of(tiny: SteerModel, seed: int, steering: Any = None) -> Run:
    """A run whose scores exceed themselves at some token."""
    prompt = random_prompt(20 + seed % 7, seed)
    spec = CaptureSpec(layers=LAYER, tokens="generated")
    text, handle = await tiny.generate(prompt, {**GREEDY, **IGNORED}, capture=spec, steering=steering)
    async with handle:
        scores = (handle.captures[LAYER].double() @ CALM[LAYER].double()).tolist()
        return Run(prompt, list(handle.output_token_ids), text, scores)


async def text_of(tiny: SteerModel, run: Run, tokens: int, steering: Any = None) -> str:
    """The text of its first tokens, as an engine gives it that may make no more."""
    return await tiny.generate(run.prompt, {**GREEDY, **IGNORED, "max_tokens": tokens}, steering=steering)


def close(found: Sequence[dict[str, Any]], run: Run, tokens: Sequence[int]) -> None:
    """Crossings are at these tokens, with their scores."""
    assert [one["index"] for one in found] == list(tokens)
    assert [one["position"] for one in found] == [len(run.prompt) + token for token in tokens]
    assert [one["score"] for one in found] == pytest.approx([run.scores[token] for token in tokens], abs=1e-3)


async def answered(
    client: AsyncOpenAI, run: Run, asked: dict[str, Any], *, stream: bool, **more: Any
) -> tuple[str, str, dict[str, Any], list[dict[str, Any]], int]:
    """Text, reason of its end, result, crossings that came in the stream, and tokens counted."""
    given = {**GREEDY, **more}
    body = {"steercap": asked, **IGNORED}
    if not stream:
        answer = await client.completions.create(model="tiny", prompt=run.prompt, extra_body=body, **given)
        (choice,), (result,) = answer.choices, answer.model_extra["steercap"]["results"]
        return choice.text, choice.finish_reason, result, [], answer.usage.completion_tokens
    chunks = await client.completions.create(
        model="tiny",
        prompt=run.prompt,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=body,
        **given,
    )
    found, fields, last = await live(chunks)
    choices = [choice for chunk in found for choice in chunk.choices]
    crossings = [one for field in fields for one in field.get("crossings", [])]
    (reason,) = (choice.finish_reason for choice in choices if choice.finish_reason)
    usage = next(chunk.usage for chunk in found if getattr(chunk, "usage", None))
    return "".join(one.text for one in choices), reason, last["results"][0], crossings, usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_ends_with_the_token_that_a_probe_picks(served: AsyncOpenAI, tiny: SteerModel, stream) -> None:
    """The token is the last of the text and counted; its score is reported; the engine's request is gone."""
    run = await run_of(tiny, 11)
    token = run.records[0]
    assert token < 20
    asked = {"monitors": [{"probe": "calm", "layer": LAYER, "threshold": run.threshold(token), "do": "stop"}]}
    text, reason, result, crossings, counted = await answered(served, run, asked, stream=stream, max_tokens=150)
    assert (reason, counted) == ("steercap_probe", token + 1)
    assert text == await text_of(tiny, run, token + 1)
    (report,) = result["monitors"]
    close(report["crossings"], run, [token])
    assert (report["monitor"], report["scored"], report["stopped"]) == ("calm", token + 1, True)
    if stream:
        close(crossings, run, [token])
    assert tiny.engine.output_processor.get_num_unfinished_requests() == 0
    assert await settled(tiny) == (0, 0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_only_annotates_changes_nothing(served: AsyncOpenAI, tiny: SteerModel, stream) -> None:
    """Every crossing is reported, above or below; one that never fires says how many rows it has scored."""
    run = await run_of(tiny, 12)
    middle = sorted(run.scores)[len(run.scores) // 2] + 1e-4
    one = {"probe": "calm", "layer": LAYER, "threshold": middle}
    asked = {"monitors": [one, {**one, "above": False, "name": "below"}, {**one, "threshold": 1e6, "name": "never"}]}
    text, reason, result, crossings, counted = await answered(served, run, asked, stream=stream)
    assert (text, reason, counted) == (run.text, "length", 24)
    above, below, never = result["monitors"]
    over = [number for number, score in enumerate(run.scores) if score > middle]
    under = [number for number, score in enumerate(run.scores) if score < middle]
    close(above["crossings"], run, over)
    close(below["crossings"], run, under)
    assert over
    assert under
    assert (never["crossings"], never["scored"], never["stopped"]) == ([], 23, False)
    if stream:
        close([one for one in crossings if one["monitor"] == "calm"], run, over)
        assert [one["position"] for one in crossings] == sorted(one["position"] for one in crossings)


@pytest.mark.parametrize("capture", [{"layers": [1, LAYER]}, {"project": DirectionSet({"calm": CALM})}])
async def test_a_capture_beside_it_ends_with_the_text(tiny: SteerModel, capture) -> None:
    """Rows are those of a run that makes no more tokens; steering counts to the same token."""
    steering = Add(TRAITS["warm"][1], 2.0, layer=1)
    run = await run_of(tiny, 13, steering)
    token = run.records[0]
    monitor = Monitor(CALM[LAYER], threshold=run.threshold(token), layer=LAYER, do="stop")
    spec = CaptureSpec(**capture)
    raw = await tiny.run(run.prompt, {**GREEDY, **IGNORED}, capture=spec, steering=steering, monitors=[monitor])
    handle = raw.handle
    short = {**GREEDY, **IGNORED, "max_tokens": token + 1}
    text, other = await tiny.generate(run.prompt, short, capture=spec, steering=steering)
    async with handle, other:
        assert handle.text == text == raw.output.outputs[0].text
        assert handle.output_token_ids == other.output_token_ids == tuple(run.tokens[: token + 1])
        assert handle.positions.tolist() == list(range(len(run.prompt) + token))
        torch.testing.assert_close(handle.captures[LAYER], other.captures[LAYER], rtol=1e-4, atol=1e-4)
        assert raw.steering[0].rows == other.receipt.steering.rows == (len(run.prompt) + token,)
    assert raw.output.outputs[0].finish_reason == "steercap_probe"
    assert raw.output.outputs[0].stop_reason == "0"
    assert await settled(tiny) == (0, 0, 0)


async def test_samples_end_each_for_itself(tiny: SteerModel) -> None:
    """Of four samples some are stopped: their texts are beginnings of what they would be, the others are whole."""
    prompt, params = random_prompt(22, 14), {"max_tokens": 24, "seed": 5, "n": 4, "logprobs": 1, **IGNORED}
    spec = CaptureSpec(layers=LAYER, tokens="generated")
    raw = await tiny.run(prompt, params, capture=spec)
    handles = raw.handles
    await tiny.fetch_captures_batch(handles)
    scores = [(handle.captures[LAYER].double() @ CALM[LAYER].double()).tolist() for handle in handles]
    tops = sorted(max(one) for one in scores)
    threshold = (tops[1] + tops[2]) / 2  # two of them reach it
    watched = await tiny.run(
        prompt, params, monitors=[Monitor(CALM[LAYER], threshold=threshold, layer=LAYER, do="stop")]
    )
    assert watched.monitors is not None
    whole = {one.index: one for one in raw.output.outputs}
    reasons = []
    for sample, own, (report,) in zip(watched.output.outputs, scores, watched.monitors, strict=True):
        first = next((number for number, score in enumerate(own) if score > threshold), None)
        assert [one.index for one in report.crossings] == ([] if first is None else [first])
        kept = 24 if first is None else first + 1
        full = whole[sample.index]
        assert list(sample.token_ids) == list(full.token_ids[:kept])
        assert full.text.startswith(sample.text)
        assert len(sample.logprobs) == kept
        total = sum(full.logprobs[number][token].logprob for number, token in enumerate(sample.token_ids))
        assert sample.cumulative_logprob == pytest.approx(total, abs=1e-4)
        reasons.append(sample.finish_reason)
    assert sorted(reasons) == ["length", "length", "steercap_probe", "steercap_probe"]
    for handle in handles:
        handle.release()
    assert await settled(tiny) == (0, 0, 0)


async def test_a_local_stream_says_where_it_fires(tiny: SteerModel) -> None:
    """Crossings come in chunks as they are found; the last chunk has the reports and the reason."""
    run = await run_of(tiny, 15)
    token = run.records[0]
    watching = [
        Monitor(CALM[LAYER], threshold=run.threshold(token), layer=LAYER, do="stop", name="calm"),
        Monitor(CALM[LAYER], threshold=-1e6, layer=LAYER, name="all"),
    ]
    chunks = [chunk async for chunk in tiny.stream(run.prompt, {**GREEDY, **IGNORED}, monitors=watching)]
    assert "".join(chunk.text for chunk in chunks) == await text_of(tiny, run, token + 1)
    assert [one for chunk in chunks for one in chunk.token_ids] == run.tokens[: token + 1]
    found = [one for chunk in chunks for one in chunk.crossings]
    assert [one.index for one in found if one.monitor == "all"] == list(range(token + 1))
    assert chunks[-1].finish_reason == "steercap_probe"
    calm, everything = chunks[-1].monitors
    assert (calm.stopped, calm.scored, everything.scored) == (True, token + 1, token + 1)
    assert all(chunk.finish_reason is None and not chunk.monitors for chunk in chunks[:-1])
    assert all(chunk.captures is None for chunk in chunks)


async def test_many_at_once_are_told_apart(served: AsyncOpenAI, tiny: SteerModel) -> None:
    """16 clients, each with thresholds of its own, streaming or not: each text ends at its own token or not at all."""
    runs = [await run_of(tiny, 30 + number) for number in range(16)]

    async def one(number: int, run: Run) -> str:
        token = run.records[number % len(run.records)] if run.records and number % 4 else None
        threshold = 1e6 if token is None else run.threshold(token)
        asked: dict[str, Any] = {
            "monitors": [{"probe": CALM[LAYER].tolist(), "layer": LAYER, "threshold": threshold, "do": "stop"}]
        }
        if number % 3 == 0:
            asked["capture"] = {"layers": [LAYER]}
        text, reason, result, _, _ = await answered(served, run, asked, stream=bool(number % 2))
        if token is None:
            assert (text, reason) == (run.text, "length")
            assert result["monitors"][0]["scored"] == 23
        else:
            assert (text, reason) == (await text_of(tiny, run, token + 1), "steercap_probe")
            close(result["monitors"][0]["crossings"], run, [token])
        if number % 3 == 0:
            rows = await fetched(served, result)
            assert rows["prompt_token_ids"].tolist() == run.prompt
            scores = rows["rows.resid_post.3"].double()[len(run.prompt) :] @ CALM[LAYER].double()
            assert scores.tolist() == pytest.approx(run.scores[: len(scores)], abs=1e-3)
        return reason

    reasons = await asyncio.gather(*(one(number, run) for number, run in enumerate(runs)))
    assert set(reasons) == {"length", "steercap_probe"}
    assert await settled(tiny) == (0, 0, 0)


async def test_steering_begins_where_a_probe_says(tiny: SteerModel) -> None:
    """Rows before the position that is reported are those of a run that nothing watches, rows from there on those of
    the same tokens read with the edit from there; the receipt counts these alone, and nobody else's cache has them.
    """
    run = await run_of(tiny, 17)
    token = run.records[0]
    push = TRAITS["warm"][1] * 4
    monitor = Monitor(
        CALM[LAYER], threshold=run.threshold(token), layer=LAYER, do="steer", steering=Add(push, layer=1), name="calm"
    )
    spec = CaptureSpec(layers=[1, LAYER])
    params = {**GREEDY, **IGNORED, "max_tokens": 200}
    raw = await tiny.run(run.prompt, params, capture=spec, monitors=[monitor])
    handle = raw.handle
    plain, other = await tiny.generate(run.prompt, params, capture=spec)
    ((report,),) = raw.monitors
    start = report.steered_from
    assert report.crossings[0].index == token
    assert len(run.prompt) + token < start < len(run.prompt) + 190
    inputs = [*handle.prompt_token_ids, *handle.output_token_ids[:-1]]
    known = await tiny.read(inputs, capture=spec, steering=Add(push, layer=1, tokens=slice(start, None)))
    async with handle, other, known:
        for layer in (1, LAYER):
            torch.testing.assert_close(
                handle.captures[layer][:start], other.captures[layer][:start], rtol=1e-4, atol=1e-4
            )
            torch.testing.assert_close(handle.captures[layer], known.captures[layer], rtol=1e-4, atol=1e-4)
            assert not torch.allclose(handle.captures[layer][start], other.captures[layer][start], atol=1e-2)
        assert raw.steering[0].rows == (len(inputs) - start,)
    assert raw.output.outputs[0].text != plain
    assert await tiny.generate(run.prompt, params) == plain
    assert await settled(tiny) == (0, 0, 0)


async def test_samples_are_steered_or_say_that_they_were_not(tiny: SteerModel) -> None:
    """Of sixteen short texts whose probe fires at once, the receipt of each counts the rows that its report names."""
    prompt = random_prompt(20, 19)
    monitor = Monitor(
        CALM[LAYER], threshold=-1e6, layer=LAYER, do="steer", steering=Add(TRAITS["warm"][1], layer=1), name="calm"
    )
    for length in (2, 24):
        params = {"max_tokens": length, "seed": 5, "n": 16, **IGNORED}
        raw = await tiny.run(prompt, params, monitors=[monitor])
        inputs = len(prompt) + length - 1
        for receipt, (report,) in zip(raw.steering, raw.monitors, strict=True):
            assert report.crossings[0].position == len(prompt)
            assert report.late == (report.steered_from is None)
            assert receipt.rows == (0 if report.late else inputs - report.steered_from,)
        assert length > 2 or all(report.late for (report,) in raw.monitors)
    assert await settled(tiny) == (0, 0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_steers_from_a_token_on(served: AsyncOpenAI, tiny: SteerModel, stream) -> None:
    """One whose probe never fires is as if nothing had been asked."""
    run = await run_of(tiny, 18)
    token = run.records[0]
    steer = {"probe": "calm", "layer": LAYER, "do": "steer", "steering": {"op": "add", "vector": "traits/warm"}}
    for threshold, fires in ((run.threshold(token), True), (1e6, False)):
        asked = {"monitors": [{**steer, "threshold": threshold}]}
        text, reason, result, _, counted = await answered(served, run, asked, stream=stream, max_tokens=200)
        (report,), rows = result["monitors"], result["steering"]["rows"]
        assert (reason, counted) == ("length", 200)
        if fires:
            assert report["crossings"][0]["index"] == token
            assert rows == [len(run.prompt) + 199 - report["steered_from"]] * 2
        else:
            assert (report["steered_from"], rows) == (None, [0, 0])
            assert text == await text_of(tiny, run, 200)


async def test_a_stop_string_and_a_probe_each_end_what_they_reach_first(tiny: SteerModel) -> None:
    """Text that vLLM holds back for a stop string is handed over where a probe ends it."""
    run = await run_of(tiny, 16)
    token = run.records[0]
    params = {**GREEDY, **IGNORED, "stop": ["this never comes, and holds text back"]}
    monitor = Monitor(CALM[LAYER], threshold=run.threshold(token), layer=LAYER, do="stop")
    chunks = [chunk async for chunk in tiny.stream(run.prompt, params, monitors=[monitor])]
    assert "".join(chunk.text for chunk in chunks) == await text_of(tiny, run, token + 1)
    for before, after in pairwise(chunks):
        assert after.finished or not before.finished


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_is_stopped_with_its_logprobs(served: AsyncOpenAI, stream) -> None:
    """By a probe that always fires: one token is left, with its log probability."""
    asked = {"monitors": [{"probe": "calm", "layer": LAYER, "threshold": -1e6, "do": "stop"}]}
    answer = await served.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Name a colour."}],
        stream=stream,
        logprobs=True,
        extra_body={"steercap": asked, **IGNORED},
        **GREEDY,
    )
    if not stream:
        (choice,) = answer.choices
        assert (choice.finish_reason, len(choice.logprobs.content)) == ("steercap_probe", 1)
        return
    choices = [choice async for chunk in answer for choice in chunk.choices]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["steercap_probe"]
    assert sum(len(choice.logprobs.content) for choice in choices if choice.logprobs) == 1


async def test_a_probe_is_read_of_projections_on_it(served: AsyncOpenAI) -> None:
    """Scores are the numbers of the stream, times the probe's length."""
    asked = {
        "capture": {"project": "traits", "layers": [LAYER]},
        "monitors": [{"probe": "traits/cold", "layer": LAYER, "threshold": -1e6, "bias": 1.5}],
    }
    chunks = await served.completions.create(
        model="tiny",
        prompt=random_prompt(20, 60),
        stream=True,
        extra_body={"steercap": asked, **IGNORED},
        **GREEDY,
    )
    _, fields, last = await live(chunks)
    (report,) = last["results"][0]["monitors"]
    positions, numbers = together(fields, 0, f"resid_post[{LAYER}]")
    known = numbers[20:, 1].double() * TRAITS["cold"][LAYER].double().norm() + 1.5
    assert [one["position"] for one in report["crossings"]] == positions[20:] == list(range(20, 43))
    assert [one["score"] for one in report["crossings"]] == pytest.approx(known.tolist(), rel=1e-6)
    await fetched(served, last["results"][0])


async def test_rows_that_cannot_be_trusted_have_no_scores(tiny: SteerModel) -> None:
    """Steering that overflows fails the request, watched or not, and no other."""
    wild = Add(torch.full((128,), 3e38), 3.0, layer=1, tokens="generated")
    monitor = Monitor(CALM[LAYER], threshold=1e30, layer=LAYER)
    with pytest.raises((CaptureIncomplete, SteeringNotApplied), match="overflows"):
        await tiny.run(random_prompt(9, 61), GREEDY, steering=wild, monitors=[monitor])
    run = await run_of(tiny, 19)
    assert await text_of(tiny, run, 24) == run.text
    assert await settled(tiny) == (0, 0, 0)


async def test_a_client_that_leaves_ends_what_is_watched(served: AsyncOpenAI, tiny: SteerModel) -> None:
    """Nothing of it is left in the engine."""
    chunks = await served.completions.create(
        model="tiny",
        prompt=random_prompt(30, 50),
        stream=True,
        max_tokens=150,
        extra_body={
            "steercap": {"monitors": [{"probe": "calm", "layer": LAYER, "threshold": 0.0}], "capture": {"layers": 3}},
            **IGNORED,
        },
    )
    await chunks.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await tiny.run(
                random_prompt(30, 51),
                {"max_tokens": 200, **IGNORED},
                monitors=[Monitor(CALM[LAYER], threshold=0.0, layer=LAYER)],
            )
    assert await settled(tiny) == (0, 0, 0)


# What does not fit

MONITOR = {"probe": "calm", "layer": LAYER, "threshold": 0.5}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"monitors": [{**MONITOR, "do": "steer"}]}, "go together"),
    ({"monitors": [{**MONITOR, "steering": "calm"}]}, "go together"),
    ({"monitors": [{**MONITOR, "do": "steer", "steering": "calm"}], "steering": "calm"}, "steering=, not both"),
    (
        {"monitors": [{**MONITOR, "do": "steer", "steering": {"op": "logit_bias", "bias": {"3": 1.0}}}]},
        "leave LogitBias and Replace out",
    ),
    ({"monitors": [{**MONITOR, "threshold": "high"}]}, "give a finite number"),
    ({"monitors": [{**MONITOR, "probe": [1.0, 2.0]}]}, "width 2"),
    ({"monitors": [{**MONITOR, "probe": "nothing"}]}, "no vector or steering is called"),
    ({"monitors": [{**MONITOR, "layer": 2}]}, "it has them for layers"),
    ({"monitors": [{**MONITOR, "sight": "resid_post"}]}, "unknown field 'sight'"),
    ({"monitors": [{**MONITOR, "do": "stop", "tokens": "all"}]}, "only at a generated token"),
    ({"monitors": [MONITOR, MONITOR]}, "a name= of its own"),
    ({"monitors": [{"probe": "calm", "layer": LAYER}]}, "threshold"),
    ({"monitors": MONITOR}, "give a list"),
    ({"monitors": [MONITOR], "capture": {"layers": [1]}}, "cannot be computed from"),
    ({"monitors": [MONITOR], "capture": {"layers": [3], "codec": "full8"}}, "cannot be computed from"),
    ({"monitors": [MONITOR], "capture": {"project": "traits"}}, "cannot be computed from"),
    ({"monitors": [MONITOR], "capture": {"layers": [3], "tokens": "prompt"}}, "captures rows of fewer"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_fit_is_an_error_before_any_token(served: AsyncOpenAI, tiny: SteerModel, stream) -> None:
    async def asking(asked: dict[str, Any]) -> None:
        body = {"steercap": asked}
        answer = await served.completions.create(
            model="tiny", prompt=[3, 4, 5], stream=stream, extra_body=body, **GREEDY
        )
        if stream:
            async for _ in answer:
                pass

    for asked, says in WRONG:
        with pytest.raises(APIError if stream else BadRequestError, match=says):
            await asking(asked)
    assert await settled(tiny) == (0, 0, 0)


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"monitors": [Monitor(CALM[3], threshold=0.0, layer=3, site="k")]}, PointNotArmed, "k"),
        ({"monitors": [Monitor(CALM[3], threshold=0.0, layer=9)]}, InvalidSpec, "layer 9"),
        ({"monitors": "calm"}, InvalidSpec, "a list of Monitor"),
        ({"monitors": [Monitor(CALM[3], threshold=0.0, layer=3, tokens=[900])]}, InvalidSelection, "900"),
    ],
)
async def test_a_local_call_refuses_what_does_not_fit(tiny: SteerModel, asked, error, says) -> None:
    with pytest.raises(error, match=says):
        await tiny.run([3, 4, 5], GREEDY, **asked)


async def test_sketches_have_no_monitors(tiny: SteerModel) -> None:
    async with tiny.sketch(layers=[1]):
        with pytest.raises(InvalidSpec, match="monitors= cannot be used inside"):
            await tiny.run([3, 4, 5], GREEDY, monitors=[Monitor(CALM[3], threshold=0.0, layer=3)])
