"""What a server must stand: clients that leave, bodies that no one should send, routes that know nothing of steercap.

`scripts/stress_server.py` and `scripts/fuzz_server.py` do the same to a server in a process of its own, for longer.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import fuzz_server
import httpx
import pytest
import torch
from support.rows import random_prompt, settled

from steercap import Add, SteerModel
from steercap.adapters import server
from steercap.server.call import CURRENT, SteercapField, SteercapRequest
from steercap.server.engine import ServedEngine
from steercap.server.folder import CaptureStore
from steercap.server.server import ServerSettings, application
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
FLAGS = ["--served-model-name", "tiny", "--api-key", *fuzz_server.KEYS, "--chat-template", TEMPLATE]
CALM = LayerVectors({1: torch.randn(128, generator=torch.Generator().manual_seed(1))}, name="calm")
STEERING: Any = {
    "op": "add",
    "vector": CALM[1].tolist(),
    "layer": 1,
    "scale": 4.0,
}  # fuzzed clients name theirs calm too
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
async def http(tiny: SteerModel, tmp_path_factory):
    file = CALM.save(tmp_path_factory.mktemp("attacks") / "calm.safetensors")
    settings = ServerSettings(vectors={"calm": file}, presets={"calm": STEERING})
    app = await application(tiny, server.read_flags(tiny.serving.model, FLAGS), settings)
    headers = {"authorization": f"Bearer {fuzz_server.KEYS[0]}"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test", headers=headers, timeout=60
    ) as found:
        yield found


async def test_fuzzed_bodies_are_done_or_refused(http: httpx.AsyncClient, tiny: SteerModel, tmp_path) -> None:
    """A few hundred: no 500, every 200 says by its receipts that all was done, and others are right meanwhile."""
    found = await fuzz_server.fuzz(http, tmp_path, count=250, seed=5, at_once=8)
    assert not found.findings
    assert found.seen["ordinary, right"] >= 2
    assert found.seen["/v1/completions 200"] > 10
    assert found.seen["/v1/completions 400"] > 10
    assert await settled(tiny) == (0, 0, 0)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions/batch"])
async def test_a_preset_steers_wherever_vllm_generates(http: httpx.AsyncClient, path: str) -> None:
    """What these routes say of a preset is what a chat says of it, and not what the plain model says."""
    message = [{"role": "user", "content": "Name a colour."}]

    async def said(route: str, model: str) -> str:
        body: dict[str, Any] = {"model": model, "temperature": 0.0, "max_tokens": 8}
        body |= {"input": message, "max_output_tokens": 8} if "responses" in route else {"messages": message}
        body |= {"messages": [message]} if "batch" in route else {}
        answer = (await http.post(route, json=body)).raise_for_status().json()
        if "output" in answer:
            return "".join(part["text"] for item in answer["output"] for part in item["content"])
        return str(answer["content"][0]["text"] if "content" in answer else answer["choices"][0]["message"]["content"])

    texts = [await said(route, model) for route in (path, "/v1/chat/completions") for model in ("tiny", "tiny+calm")]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_what_the_workers_would_take_for_a_plan_is_refused(http: httpx.AsyncClient, path: str) -> None:
    """The engine goes on, and the answer is no plain text; vLLM takes the header for the request's id."""
    talk = [{"role": "user", "content": "Hi"}]
    body = {"completions": {"prompt": "Hi"}, "responses": {"input": talk}}.get(path.split("/")[2], {"messages": talk})
    body |= {"model": "tiny", "max_tokens": 2, "vllm_xargs": {"steercap": "{}"}}
    answer = await http.post(path, json=body, headers={"X-Request-Id": "req_7"})
    assert answer.status_code == 400
    assert "vllm_xargs['steercap'] belongs to steercap" in answer.text
    del body["vllm_xargs"]
    assert (await http.post(path, json=body, headers={"X-Request-Id": "req_7"})).status_code == 200


@pytest.mark.parametrize("after", [0, 2])
async def test_a_steered_request_that_is_left_leaves_no_records(tiny: SteerModel, after: int) -> None:
    """It captures nothing, and the workers hold a record of its edits until they are told to let go."""
    call = SteercapRequest(SteercapField(steering=SteeringSpec([Add(CALM[1], layer=1)])), "somebody")
    engine, before = ServedEngine(tiny, CaptureStore(), server.translated), (await tiny.stats()).steps
    token = CURRENT.set(call)
    try:
        payload = await tiny.serving.here().vllm.render(random_prompt(30, 1))
        params = tiny.serving.here().vllm.sampling({**GREEDY, "max_tokens": 100})
        params.output_kind = type(params.output_kind).DELTA
        outputs = engine.generate(payload.payload, params, "name")
    finally:
        CURRENT.reset(token)

    async def read() -> None:
        count = 0
        async with aclosing(outputs):
            async for _ in outputs:
                count += 1
                if after and count == after:
                    return

    reading = asyncio.create_task(read())
    if not after:
        while (await tiny.stats()).steps <= before:
            await asyncio.sleep(0.01)
        reading.cancel()
    await asyncio.wait([reading])
    assert await settled(tiny) == (0, 0, 0)
    for _ in range(100):
        held = sum(count.steered for workers in await tiny.serving.here().workers.get_stats() for count in workers)
        if not held:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"workers hold records of {held} requests")


async def test_samples_of_a_stream_that_end_at_different_times_are_all_verified(http: httpx.AsyncClient) -> None:
    """Four samples, by stop tokens; each has its rows and its receipt, as long as it is."""
    prompt = random_prompt(20, 9)
    body = {
        "model": "tiny",
        "prompt": prompt,
        "n": 4,
        "seed": 3,
        "max_tokens": 40,
        "stream": True,
        "return_token_ids": True,
    }
    body |= {
        "stop_token_ids": list(range(60)),
        "steercap": {"capture": {"layers": [2]}, "steering": STEERING, "deliver": "inline"},
    }
    answer = await http.post("/v1/completions", json=body)
    lengths = dict.fromkeys(range(4), 0)
    results = fuzz_server._said(answer)
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in fuzz_server.json.loads(line[6:])["choices"]:
                lengths[choice["index"]] += len(choice["token_ids"])
    assert len(set(lengths.values())) > 1, "they end at different times"
    assert results is not None
    assert sorted(one["choice"] for one in results) == [0, 1, 2, 3]
    for one in results:
        total = len(prompt) + lengths[one["choice"]] - 1
        assert one["capture"]["rows"] == total
        assert one["steering"]["rows"] == [total]


async def test_answers_within_hold_no_more_than_they_may_together(http: httpx.AsyncClient, monkeypatch) -> None:
    """The limit is of the answer, not of each of its choices; of those that did not fit nothing waits."""
    asked = {"model": "tiny", "prompt": [5, 6, 7], "n": 3, "seed": 1, "max_tokens": 4}
    asked["steercap"] = {"capture": {"layers": [0]}, "deliver": "inline"}
    answer = (await http.post("/v1/completions", json=asked)).raise_for_status().json()
    size = sum(one["capture"]["bytes"] for one in answer["steercap"]["results"])
    monkeypatch.setattr("steercap.server.engine.MOST_INLINE", size - 1)
    refused = await http.post("/v1/completions", json=asked)
    assert (refused.status_code, "leave deliver= out" in refused.text) == (400, True)
    assert (await http.get("/v1/steercap/captures")).json()["data"] == []
