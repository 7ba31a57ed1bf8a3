"""vLLM's server over an open model, asked by OpenAI's own client: rows and texts are those of local requests."""

from __future__ import annotations

import asyncio
import base64
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import torch
from conftest import opened
from openai import APIError, APIStatusError, AsyncOpenAI, BadRequestError
from safetensors.torch import load
from support.rows import TINY_ENGINE, random_prompt, settled
from transformers import AutoTokenizer

from steercap import Add, CaptureHandle, CaptureSpec, LogitBias, SteeringSpec, SteerModel
from steercap.adapters import server
from steercap.captures.manifest import Manifest
from steercap.captures.recordings import Recordings
from steercap.captures.site_codecs import SiteCodecs
from steercap.client.uploads import encoded
from steercap.server.record_settings import RecordSettings
from steercap.server.recording import Recorder
from steercap.server.server import ServerSettings, application, opened_folder
from steercap.steering.layers import LayerVectors
from steercap.testing import tiny_checkpoint

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
FLAGS = ["--served-model-name", "tiny", "--api-key", "mine", "yours", "--chat-template", TEMPLATE]
MESSAGES: Any = [{"role": "user", "content": "Name a colour."}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
IGNORED = {"ignore_eos": True}


class Clients:
    """Clients of one server, by API key."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def http(self, key: str = "mine") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://test", headers=headers)

    def openai(self, key: str = "mine") -> AsyncOpenAI:
        return AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=self.http(key), max_retries=0)


@pytest.fixture(scope="module")
async def served(tiny: SteerModel, tmp_path_factory) -> Clients:
    """`calm` is the operator's, at layer 1; `tiny+calm` a model that is steered by it."""
    file = tmp_path_factory.mktemp("serve") / "calm.safetensors"
    CALM.save(file)
    settings = ServerSettings(vectors={"calm": file}, presets={"calm": {"op": "add", "vector": "calm", "scale": 4.0}})
    return Clients(await application(tiny, server.read_flags(tiny.serving.model, FLAGS), settings))


@pytest.fixture
async def delivering(tiny: SteerModel, tmp_path) -> AsyncIterator[Clients]:
    """A server with a folder, `tmp_path / "rows"`, to which a key may write some 100 KB."""
    settings = ServerSettings(folder=tmp_path / "rows", folder_bytes_of_a_key=100_000)
    with opened_folder(tiny.serving.model, settings) as folder:
        yield Clients(await application(tiny, server.read_flags(tiny.serving.model, FLAGS), settings, folder))


CALM = LayerVectors({1: torch.randn(128, generator=torch.Generator().manual_seed(1))}, name="calm")


async def fetched(http: httpx.AsyncClient, answer: Any, choice: int = 0) -> dict[str, torch.Tensor]:
    """The rows of one choice."""
    one = next(one for one in answer.model_extra["steercap"]["results"] if one["choice"] == choice)
    found = await http.get(one["capture"]["url"])
    assert found.status_code == 200
    assert len(found.content) == one["capture"]["bytes"]
    tensors: dict[str, torch.Tensor] = load(found.content)
    return tensors


async def local(tiny: SteerModel, prompt: list[int], spec: CaptureSpec, **asked: Any) -> tuple[str, CaptureHandle]:
    text, handle = await tiny.generate(prompt, {**GREEDY, **IGNORED}, capture=spec, **asked)
    await handle.fetch()
    return text, handle


async def test_rows_and_texts_are_those_of_local_requests(served: Clients, tiny: SteerModel) -> None:
    """Clean and steered, chat and text, fetched and within the answer."""
    client, http = served.openai(), served.http()
    prompt = random_prompt(40, 1)
    spec = {"layers": [0, 2], "sites": ["resid_post", "attn_out"]}
    for steering, own in ((None, None), ({"op": "add", "vector": "calm", "scale": 4.0}, Add(CALM[1], 4.0, layer=1))):
        text, handle = await local(tiny, prompt, CaptureSpec(**spec), steering=own)
        asked = {"capture": spec} | ({} if steering is None else {"steering": steering})
        answer = await client.completions.create(
            model="tiny", prompt=prompt, extra_body={"steercap": asked, **IGNORED}, **GREEDY
        )
        assert answer.choices[0].text == text
        tensors = await fetched(http, answer)
        for point, rows in handle.captures.items():
            torch.testing.assert_close(tensors[f"rows.{point.site}.{point.layer}"], rows, rtol=1e-5, atol=1e-5)
        assert tensors["output_token_ids"].tolist() == list(handle.output_token_ids)
        (one,) = answer.model_extra["steercap"]["results"]
        assert ("steering" in one) == (own is not None)
        if own is not None:
            assert one["steering"]["rows"] == list(handle.receipt.steering.rows) == [45]
            assert one["steering"]["digest"] == handle.receipt.steering.digest
        chat = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={"steercap": asked | {"deliver": "inline"}, **IGNORED}, **GREEDY
        )
        inline = load(base64.b64decode(chat.model_extra["steercap"]["results"][0]["capture"]["data"]))
        text, handle = await local(tiny, inline["prompt_token_ids"].tolist(), CaptureSpec(**spec), steering=own)
        assert chat.choices[0].message.content == text
        torch.testing.assert_close(inline["rows.attn_out.2"], handle.captures[2, "attn_out"], rtol=1e-5, atol=1e-5)


async def test_a_stream_ends_with_what_came_of_it(served: Clients, tiny: SteerModel) -> None:
    prompt = random_prompt(30, 2)
    text, handle = await local(tiny, prompt, CaptureSpec(layers=3), steering=Add(CALM[1], layer=1))
    asked = {"capture": {"layers": 3}, "steering": "calm"}
    chunks = await served.openai().completions.create(
        model="tiny", prompt=prompt, stream=True, extra_body={"steercap": asked, **IGNORED}, **GREEDY
    )
    found = [chunk async for chunk in chunks]
    assert "".join(choice.text for chunk in found for choice in chunk.choices) == text
    assert not found[-1].choices
    tensors = await fetched(served.http(), found[-1])
    torch.testing.assert_close(tensors["rows.resid_post.3"], handle.captures[3], rtol=1e-5, atol=1e-5)


async def test_many_prompts_and_samples_are_told_apart(served: Clients) -> None:
    prompts = [random_prompt(12, 3), random_prompt(25, 4)]
    answer = await served.openai().completions.create(
        model="tiny",
        prompt=prompts,
        n=2,
        max_tokens=5,
        seed=1,
        extra_body={"store_activations": True, "selectors": ["resid_post[1]"], **IGNORED},
    )
    results = answer.model_extra["steercap"]["results"]
    assert sorted(one["choice"] for one in results) == [0, 1, 2, 3]
    for choice in answer.choices:
        tensors = await fetched(served.http(), answer, choice.index)
        assert tensors["prompt_token_ids"].tolist() == prompts[choice.index // 2]
        assert len(tensors["rows.resid_post.1"]) == len(prompts[choice.index // 2]) + 4


async def test_activations_alone_come_with_logits(served: Clients, monkeypatch) -> None:
    """Their log probabilities are those that vLLM reports of the prompt's tokens; what is too large is said."""
    prompt = random_prompt(12, 33)
    body = {"model": "tiny", "prompt": prompt, "prompt_logprobs": 0, "store_activations": True, **GREEDY, **IGNORED}
    answer = (await served.http().post("/v1/completions", json=body)).raise_for_status().json()
    (choice,), (one,) = answer["choices"], answer["steercap"]["results"]
    logits = one["capture"]["_logits"]
    tensors = load((await served.http().get(logits["url"])).raise_for_status().content)
    found = tensors["_logits"]
    assert list(tensors) == ["_logits"]
    assert logits["shape"] == list(found.shape) == [1, 17, found.shape[2]]
    assert (logits["numel"], logits["size_mb"]) == (found.numel(), round(found.nbytes / 2**20, 2))
    assert (logits["dtype"], logits["data_included"]) == ("float32", False)
    known = torch.tensor(
        [said[str(token)]["logprob"] for token, said in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)]
    )
    mine = found[0, :11].log_softmax(-1)[range(11), prompt[1:]]
    torch.testing.assert_close(mine, known, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr("steercap.server.call.MOST_LOGITS", 17 * found.shape[2])
    answer = (await served.http().post("/v1/completions", json=body)).raise_for_status().json()
    logits = answer["steercap"]["results"][0]["capture"]["_logits"]
    assert (logits["shape"][1], logits["data_included"], "url" in logits) == (17, False, False)
    assert logits["note"].startswith(f"left out: they take {4 * found.numel():,} bytes, of at most {found.numel():,};")
    named = {**body, "selectors": ["model.layers[1].mlp.output"]}
    refused = await served.http().post("/v1/completions", json=named)
    assert (refused.status_code, "model.layers.1.mlp.output" in refused.text) == (400, True)


async def test_a_preset_is_a_model(served: Clients, tiny: SteerModel) -> None:
    client = served.openai()
    assert [model.id async for model in client.models.list()] == ["tiny", "tiny+calm"]
    prompt = random_prompt(20, 5)
    plain, steered = [
        (await client.completions.create(model=name, prompt=prompt, extra_body=IGNORED, **GREEDY)).choices[0].text
        for name in ("tiny", "tiny+calm")
    ]
    assert plain == await tiny.generate(prompt, {**GREEDY, **IGNORED})
    assert steered == await tiny.generate(prompt, {**GREEDY, **IGNORED}, steering=Add(CALM[1], 4.0, layer=1))
    assert plain != steered


async def test_logprobs_are_those_of_what_is_steered(served: Clients, tiny: SteerModel) -> None:
    prompt = random_prompt(20, 6)
    raw = await tiny.run(prompt, {**GREEDY, **IGNORED, "logprobs": 2}, steering=Add(CALM[1], layer=1))
    answer = await served.openai().completions.create(
        model="tiny", prompt=prompt, logprobs=2, extra_body={"steercap": {"steering": "calm"}, **IGNORED}, **GREEDY
    )
    known = [max(one.logprob for one in said.values()) for said in raw.output.outputs[0].logprobs]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(known, abs=1e-4)


async def test_captures_are_of_their_key(served: Clients) -> None:
    client = served.openai("mine")
    answer = await client.completions.create(
        model="tiny", prompt=[3, 4, 5], extra_body={"steercap": {"capture": True}}, **GREEDY
    )
    url = answer.model_extra["steercap"]["results"][0]["capture"]["url"]
    assert (await served.http("mine").get(url)).status_code == 200
    assert (await served.http("yours").get(url)).status_code == 404
    assert (await served.http("nobody's").get(url)).status_code == 401
    assert (await served.http("yours").delete(url)).status_code == 404
    assert (await served.http("mine").delete(url)).status_code == 200
    assert (await served.http("mine").get(url)).status_code == 404


async def test_without_keys_all_clients_are_one(tiny: SteerModel) -> None:
    """OpenAI's clients send a key that nobody asked for, and curl none: each fetches what the other captured."""
    flags = server.read_flags(tiny.serving.model, FLAGS[:2])
    clients = Clients(await application(tiny, flags, ServerSettings()))
    nobody = httpx.AsyncClient(transport=httpx.ASGITransport(clients._app), base_url="http://test")
    asking: dict[str, httpx.AsyncClient] = {
        "": nobody,
        "none": clients.http("none"),
        "another": clients.http("another"),
    }
    for asks, http in asking.items():
        body = {"model": "tiny", "prompt": [3, 4, 5], "steercap": {"capture": True}, **GREEDY}
        said = (await http.post("/v1/completions", json=body)).json()
        url = said["steercap"]["results"][0]["capture"]["url"]
        for fetches, other in asking.items():
            assert (await other.get(url)).status_code == 200, f"{asks!r} captured, {fetches!r} fetches"
            assert len((await other.get("/v1/steercap/captures")).json()["data"]) == 1
        assert (await nobody.delete(url)).status_code == 200
    put = await asking["none"].put("/v1/steercap/vectors/mine", content=encoded(CALM))
    assert put.status_code == 201
    body = {"model": "tiny", "prompt": [3, 4, 5], "steercap": {"steering": "mine"}, **GREEDY}
    assert (await nobody.post("/v1/completions", json=body)).status_code == 200


async def test_rows_written_to_the_folder_are_those_of_local_requests(delivering, tiny: SteerModel, tmp_path) -> None:
    """Clean and steered, streams and samples; the manifest says what answers say, while the server runs and afterwards."""
    client, prompt = delivering.openai(), random_prompt(20, 8)
    for edit, own in ((None, None), ({"op": "add", "vector": CALM[1].tolist(), "layer": 1}, Add(CALM[1], layer=1))):
        asked = {"capture": {"layers": [2]}, "deliver": "folder"} | ({} if edit is None else {"steering": edit})
        answer = await client.completions.create(
            model="tiny", prompt=prompt, extra_body={"steercap": asked, **IGNORED}, **GREEDY
        )
        text, handle = await local(tiny, prompt, CaptureSpec(layers=[2]), steering=own)
        (one,) = answer.model_extra["steercap"]["results"]
        said = one["capture"]
        assert answer.choices[0].text == text
        assert not {"url", "id", "data"} & set(said)
        (request,) = [found for found in Manifest.load(tmp_path / "rows").requests if found.file == said["file"]]
        assert (request.bytes, request.sha256) == (said["bytes"], said["sha256"])
        read = CaptureHandle.load(tmp_path / "rows" / said["file"])
        assert (read.text, read.output_token_ids) == (text, handle.output_token_ids)
        torch.testing.assert_close(read.captures[2], handle.captures[2], rtol=1e-5, atol=1e-5)
    chunks = await client.completions.create(
        model="tiny",
        prompt=prompt,
        n=2,
        stream=True,
        max_tokens=4,
        extra_body={"steercap": {"capture": {"layers": 1}, "deliver": "folder"}},
    )
    *_, last = [chunk async for chunk in chunks]
    files = [one["capture"]["file"] for one in last.model_extra["steercap"]["results"]]
    assert sorted(files) == ["000002.safetensors", "000003.safetensors"]
    manifest = Manifest.load(tmp_path / "rows")
    assert not [one.file for one in manifest.requests if manifest.wrong(one)]
    assert (await delivering.http().get("/v1/steercap/model")).json()["held"]["folder_bytes"] == sum(
        one.bytes for one in manifest.requests
    )
    assert await settled(tiny) == (0, 0, 0)


async def test_the_folder_lists_no_half_of_a_request(delivering, served, tiny: SteerModel, tmp_path) -> None:
    """Clients that give up, and keys that have written enough; a server without a folder says so before any token."""
    body = {"steercap": {"capture": {"layers": [1]}, "deliver": "folder"}, **IGNORED}

    async def asks(key: str, tokens: int, clients: Clients = delivering) -> Any:
        return await clients.openai(key).completions.create(
            model="tiny", prompt=random_prompt(30, 9), temperature=0.0, max_tokens=tokens, extra_body=body
        )

    for stream in (False, True):
        with pytest.raises(BadRequestError, match="this server has no folder"):
            await served.openai().completions.create(
                model="tiny", prompt=[3, 4], stream=stream, extra_body=body, **GREEDY
            )

    async def gives_up(seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asks("yours", 40)

    await asyncio.gather(*(gives_up(0.01 * number) for number in range(12)))
    codes = []
    for _ in range(5):
        try:
            await asks("mine", 30)
            codes.append(200)
        except APIStatusError as error:
            codes.append(error.status_code)
    assert codes == [200, 200, 200, 429, 429]  # 59 rows of 512 bytes, and labels
    assert await settled(tiny) == (0, 0, 0)
    manifest = Manifest.load(tmp_path / "rows")
    assert not [one.file for one in manifest.requests if manifest.wrong(one)]
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {
        "manifest.json",
        "manifest.journal",
        *(one.file for one in manifest.requests),
    }


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"steercap": {"capture": {"layers": 99}}}, "layer 99 is outside this model of 4 layers"),
        ({"steercap": {"capture": {"sites": "neurons"}}}, "neurons"),
        ({"steercap": {"steering": {"op": "add", "vector": [1.0, 2.0], "layer": 1}}}, "2"),
        ({"steercap": {"capture": {"tokens": [5000]}}}, "5000"),
        ({"steercap": {"nothing": 1}}, "unknown field 'nothing'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_fit_is_an_error_and_not_an_answer(served: Clients, asked, says, stream) -> None:
    async def answered() -> None:
        answer = await served.openai().completions.create(
            model="tiny", prompt=[3, 4, 5], stream=stream, extra_body=asked, **GREEDY
        )
        if stream:
            async for _ in answer:
                pass

    with pytest.raises(APIError if stream else BadRequestError, match=says):
        await answered()


async def test_a_key_that_holds_too_much_is_told_so(tiny: SteerModel) -> None:
    settings = ServerSettings(unfetched_bytes_of_a_key=20_000)
    clients = Clients(await application(tiny, server.read_flags(tiny.serving.model, FLAGS), settings))
    codes = []
    for _ in range(4):
        try:
            await clients.openai().completions.create(
                model="tiny", prompt=random_prompt(12, 7), extra_body={"steercap": {"capture": {"layers": 1}}}, **GREEDY
            )
            codes.append(200)
        except APIStatusError as error:
            codes.append(error.status_code)
    assert codes == [200, 200, 429, 429]
    assert await settled(tiny) == (0, 0, 0)


async def test_clients_that_cancel_fetch_or_forget_leave_nothing(served: Clients, tiny: SteerModel) -> None:
    """60 clients at once, each what chance says; rows of those who fetch are those of their own prompts."""
    draw = random.Random(7)

    async def one(number: int) -> None:
        client, prompt = served.openai(draw.choice(["mine", "yours"])), random_prompt(5 + number, number)
        kind = number % 4
        asked = {"capture": {"layers": [1, 2]}} | ({"steering": "calm"} if number % 3 == 0 else {})
        body = IGNORED if kind == 3 else {"steercap": asked, **IGNORED}
        coming = client.completions.create(
            model="tiny", prompt=prompt, extra_body=body, temperature=0.0, max_tokens=60 if kind == 1 else 12
        )
        if kind == 1:  # gives up
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(draw.uniform(0.0, 0.02)):
                    await coming
            return
        answer = await coming
        if kind == 0:
            key = client.api_key
            tensors = await fetched(served.http(key), answer)
            own = Add(CALM[1], layer=1) if number % 3 == 0 else None
            _, handle = await tiny.generate(
                prompt,
                {"temperature": 0.0, "max_tokens": 12, **IGNORED},
                capture=CaptureSpec(layers=[1, 2]),
                steering=own,
            )
            async with handle:
                torch.testing.assert_close(tensors["rows.resid_post.2"], handle.captures[2], rtol=1e-4, atol=1e-4)

    await asyncio.gather(*(one(number) for number in range(60)))
    assert await settled(tiny) == (0, 0, 0)


async def test_the_model_says_what_it_has(served: Clients) -> None:
    found = (await served.http().get("/v1/steercap/model")).json()
    assert (found["num_layers"], found["hidden_size"]) == (4, 128)
    (point,) = [one for one in found["points"] if (one["layer"], one["site"]) == (1, "resid_post")]
    assert (point["shape"], point["dtype"], point["shards"], point["writable"]) == ([128], "float32", 1, True)
    assert {"raw", "full8", "int4"} <= set(found["codecs"])
    assert found["presets"] == [*found["variants"]] == ["tiny+calm"]
    assert "chat_template" in found["identity"]["chat_flags"]
    assert (await served.http("nobody's").get("/v1/steercap/model")).status_code == 401
    assert (await served.http().get("/health")).status_code == 200


@pytest.mark.slow
async def test_a_reasoning_parser_divides_answers_that_are_steered_and_recorded(tmp_path) -> None:
    """The parts are vLLM's, in streams and out; rows, receipts and recordings are those of the whole answer."""
    path = shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "thinks")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(path)
    file = CALM.save(tmp_path / "calm.safetensors")
    flags = server.read_flags(str(path), [*FLAGS, "--reasoning-parser", "qwen3"])
    record = RecordSettings(folder=tmp_path / "recorded", codecs=SiteCodecs.parse(["resid_post"]), layers=[2])
    settings = ServerSettings(
        vectors={"calm": file}, presets={"calm": {"op": "add", "vector": "calm", "scale": 4.0}}, record=record
    )
    engine = {**TINY_ENGINE, **server.engine_arguments(flags)}
    async with opened(path, **engine) as model, Recorder.of(record, str(path)) as recorder:
        served = Clients(await application(model, flags, settings, recorder=recorder))
        http, chats = served.http(), served.openai().chat.completions
        prompt = (await http.post("/tokenize", json={"model": "tiny", "messages": MESSAGES})).json()["tokens"]
        ends = {"bias": {str(tokenizer.convert_tokens_to_ids("</think>")): 1e4}, "tokens": [len(prompt) + 1]}
        edits = [{"op": "add", "vector": "calm", "scale": 4.0}, {"op": "logit_bias", **ends}]
        steering = [
            Add(CALM[1], 4.0, layer=1),
            LogitBias({int(one): add for one, add in ends["bias"].items()}, tokens=ends["tokens"]),
        ]
        spec = CaptureSpec(layers=[2])
        text, known = await local(model, prompt, spec, steering=SteeringSpec(steering))
        thought, answer = text.split("</think>")
        assert thought
        assert answer
        asked = {"capture": {"layers": [2]}, "steering": {"edits": edits}}

        def body(**more: Any) -> dict[str, Any]:
            return {"model": "tiny", "messages": MESSAGES, **GREEDY, "extra_body": {**IGNORED, **more}}

        for included in (True, False):
            said = await chats.create(**body(steercap=asked, include_reasoning=included))
            message = said.choices[0].message
            assert (message.content, message.model_extra.get("reasoning")) == (answer, thought if included else None)
            (one,) = said.model_extra["steercap"]["results"]
            assert one["steering"]["digest"] == known.receipt.steering.digest
            rows = await fetched(http, said)
            torch.testing.assert_close(rows["rows.resid_post.2"], known.captures[2], rtol=1e-5, atol=1e-5)
            assert rows["output_token_ids"].tolist() == list(known.output_token_ids)
        events = [event async for event in await chats.create(**body(steercap=asked), stream=True)]
        deltas = [choice.delta for event in events for choice in event.choices]
        assert "".join(delta.content or "" for delta in deltas) == answer
        assert "".join((delta.model_extra or {}).get("reasoning") or "" for delta in deltas) == thought
        (one,) = events[-1].model_extra["steercap"]["results"]
        assert one["steering"]["digest"] == known.receipt.steering.digest

        for name, own in (("tiny", None), ("tiny+calm", steering[0])):
            text, known = await local(model, prompt, spec, steering=own)
            said = await chats.create(**{**body(), "model": name})
            message = said.choices[0].message
            assert (message.model_extra.get("reasoning") or "") + (message.content or "") == text
            async with asyncio.timeout(60):
                while recorder.recorded["requests"] < 1 + (own is not None):
                    await asyncio.sleep(0.01)
            (kept,) = Recordings.load(recorder.folder.path).requests[-1].handles()
            assert (kept.text, kept.output_token_ids) == (text, known.output_token_ids)
            torch.testing.assert_close(kept.captures[2], known.captures[2], rtol=1e-5, atol=1e-5)
        assert recorder.dropped == {"own_capture": 3}
