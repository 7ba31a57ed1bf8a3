"""Many clients of one `steercap serve` at once, over sockets, each what chance says; rows against transformers.

    python scripts/stress_server.py [--clients 200] [--rounds 16] [--seed 1] [--log /tmp/stress]

Half of them capture: at other layers, of other tokens, in other codecs, fetched whole or in ranges, within the answer,
in a stream or not, of two samples; some never fetch, some cancel in mid-stream or before the answer, some in
mid-fetch, some upload vectors and delete them. Others steer, ask for a preset, or nothing.

Rows are compared with those of transformers in float32 under hooks of this script's own, steered ones with the vector
added by a hook; every token that was generated must be of the greatest logit there, and plain texts must be those of
`vllm serve`, which runs before. After each round, once captures that nobody fetched are over their time, the server
must hold nothing; and the last quarter of the rounds must add no memory and no files.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import torch
import typer
from openai import AsyncOpenAI
from safetensors.torch import load
from served import FLAT, KEYS, Held, Served, free_port, served, steercap_serve, vllm_serve
from transformers import AutoModelForCausalLM

from steercap import CaptureHandle
from steercap.steering.layers import LayerVectors
from steercap.testing import tiny_checkpoint

LAYERS, WIDTH = 4, 128
#: Seconds that captures wait to be fetched.
SECONDS = 10
#: Of float32 on a CPU, see docs/mechanisms/proof.md.
MIN_COSINE, MAX_ERROR = 0.99999, 1e-4
#: Of rows in 8 bits: a part in 127 of a row's largest element, of which random rows have little more than 4 lengths.
MAX_ERROR_8 = 0.05
#: By how much a token's logit may be below the greatest: float32 sums in another order.
TIE = 1e-3
#: What the last quarter of the rounds may hold beyond the one before, each in its median, in bytes of memory of all
#: processes and of the arena that they share. Until then pages of caches and of the arena are touched for the first time;
#: from one round to the next the allocator's heap goes up and down by as much. One lost capture a client were 20 MiB.
GROWTH = 10 << 20


class Oracle:
    """transformers, read and steered by hooks."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._hooked = threading.Lock()  # hooks of one thread would see the rows of another

    def run(self, tokens: Sequence[int], edits: dict[int, torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Rows of all layers, [tokens, width], and logits, [tokens, vocabulary]; `edits` are added layer by layer."""
        with self._hooked:
            return self._run(tokens, edits)

    def _run(self, tokens: Sequence[int], edits: dict[int, torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        rows: list[torch.Tensor] = []

        def hook(layer: int) -> Callable[..., Any]:
            def keep(_module: Any, _given: Any, output: Any) -> Any:
                first = output[0] if isinstance(output, tuple) else output
                first = first + edits.get(layer, torch.zeros(WIDTH))
                rows.append(first[0].clone())
                return (first, *output[1:]) if isinstance(output, tuple) else first

            return keep

        hooks = [layer.register_forward_hook(hook(number)) for number, layer in enumerate(self._model.model.layers)]
        try:
            with torch.no_grad():
                logits = self._model(torch.tensor([tokens])).logits[0]
        finally:
            for one in hooks:
                one.remove()
        return rows, logits


@dataclass
class Ask:
    """One client.

    Args:
        number: which; its prompt is nobody else's.
        kind: what it does.
        key: its API key.
    """

    number: int
    kind: str
    key: str
    rng: random.Random

    def __post_init__(self) -> None:
        self.prompt = [self.rng.randrange(3, 250) for _ in range(self.rng.randrange(4, 60))]


@dataclass
class Stress:
    """A server under many clients."""

    server: Served
    oracle: Oracle
    calm: torch.Tensor
    texts: dict[tuple[int, ...], str]
    done: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    worst: float = 0.0

    @asynccontextmanager
    async def client(self, ask: Ask) -> AsyncIterator[tuple[AsyncOpenAI, httpx.AsyncClient]]:
        async with self.server.http(ask.key) as http:
            how: dict[str, Any] = {"http_client": http, "max_retries": 0}
            yield AsyncOpenAI(base_url=f"{self.server.url}/v1", api_key=ask.key, **how), http

    async def one(self, ask: Ask) -> None:
        async with self.client(ask) as (client, http):
            await KINDS[ask.kind](self, ask, client, http)
        self.done[ask.kind] += 1

    def check_tokens(self, prompt: Sequence[int], generated: Sequence[int], edits: dict[int, torch.Tensor]) -> None:
        _, logits = self.oracle.run([*prompt, *generated], edits)
        chosen = logits[len(prompt) - 1 : -1]
        below = chosen.max(-1).values - chosen.gather(1, torch.tensor(generated)[:, None])[:, 0]
        assert below.max() < TIE, f"a token is {below.max():.4f} below the greatest"

    def check_rows(
        self, content: bytes, asked: dict[str, Any], prompt: list[int], edits: dict[int, torch.Tensor]
    ) -> None:
        found = load(content)
        assert found["prompt_token_ids"].tolist() == prompt
        generated = found["output_token_ids"].tolist()
        tokens = [*prompt, *generated]
        total = len(tokens) - 1
        wanted = {"generated": range(len(prompt), total), "2:6": range(2, min(6, total)), "0:4": range(4)}.get(
            asked.get("tokens", ""), range(total)
        )
        assert found["positions"].tolist() == list(wanted), (asked, len(prompt), total)
        assert found["token_ids"].tolist() == [tokens[position] for position in wanted]
        rows, _ = self.oracle.run(tokens, edits)
        coded = asked.get("codec", "raw") != "raw"
        kept = _decoded(content) if coded else {layer: found[f"rows.resid_post.{layer}"] for layer in asked["layers"]}
        assert set(kept) == set(asked["layers"])
        for layer, mine in kept.items():
            theirs = rows[layer][list(wanted)]
            error = ((mine - theirs).norm(dim=1) / theirs.norm(dim=1)).max().item()
            cosine = torch.cosine_similarity(mine, theirs).min().item()
            assert error < (MAX_ERROR_8 if coded else MAX_ERROR), (asked, layer, error)
            assert coded or cosine > MIN_COSINE, (asked, layer, cosine)
            self.worst = self.worst if coded else max(self.worst, error)
            self.rows += len(mine)


def _decoded(content: bytes) -> dict[int, torch.Tensor]:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        Path(file.name).write_bytes(content)
        handle = CaptureHandle.load(Path(file.name))
        return {point.layer: handle.captures[point].float() for point in handle.points}


def _asked(rng: random.Random) -> dict[str, Any]:
    capture: dict[str, Any] = {"layers": sorted(rng.sample(range(LAYERS), rng.randint(1, LAYERS)))}
    if (tokens := rng.choice(["", "generated", "2:6", "0:4"])) != "":
        capture["tokens"] = tokens
    if rng.random() < 0.3:
        capture["codec"] = "full8"
    return capture


def _body(ask: Ask, steercap: dict[str, Any] | None, **other: Any) -> dict[str, Any]:
    extra = {"ignore_eos": True, "return_token_ids": True} | ({} if steercap is None else {"steercap": steercap})
    given = {"model": "tiny", "prompt": ask.prompt, "temperature": 0.0, "max_tokens": ask.rng.randrange(6, 20)}
    return given | {"extra_body": extra} | other


async def _content(http: httpx.AsyncClient, rng: random.Random, capture: dict[str, Any]) -> bytes:
    """The file, by the way that chance says."""
    if "data" in capture:
        return base64.b64decode(capture["data"])
    if rng.random() < 0.5:
        return (await http.get(capture["url"])).raise_for_status().content
    half, size = rng.randrange(1, capture["bytes"]), capture["bytes"]
    parts = [
        (await http.get(capture["url"], headers={"range": f"bytes={start}-{stop}"})).raise_for_status().content
        for start, stop in ((0, half - 1), (half, size))
    ]
    assert [len(part) for part in parts] == [half, size - half]
    return b"".join(parts)


async def _captured(
    stress: Stress,
    ask: Ask,
    client: AsyncOpenAI,
    http: httpx.AsyncClient,
    steering: Any = None,
    edits: dict[int, torch.Tensor] | None = None,
) -> list[dict[str, Any]]:
    """Capture, and compare: streamed or not, of one or two samples, in each codec."""
    capture, edits = _asked(ask.rng), edits or {}
    field: dict[str, Any] = {"capture": capture, "deliver": ask.rng.choice(["inline", "fetch"])}
    field |= {} if steering is None else {"steering": steering}
    samples = ask.rng.choice([1, 1, 2])
    body = _body(ask, field, n=samples, temperature=float(samples > 1), seed=ask.number)
    if ask.rng.random() < 0.5:
        chunks = [chunk async for chunk in await client.completions.create(stream=True, **body)]
        results = chunks[-1].model_extra["steercap"]["results"]
    else:
        results = (await client.completions.create(**body)).model_extra["steercap"]["results"]
    assert sorted(one["choice"] for one in results) == list(range(samples)), results
    for one in results:
        content = await _content(http, ask.rng, one["capture"])
        assert len(content) == one["capture"]["bytes"]
        await asyncio.to_thread(stress.check_rows, content, capture, ask.prompt, edits)
        if edits:
            total = len(ask.prompt) + body["max_tokens"] - 1
            assert one["steering"]["rows"] == [total], (one["steering"], total)
        if "id" in one["capture"] and ask.rng.random() < 0.5:
            (await http.delete(one["capture"]["url"])).raise_for_status()
    return list(results)


async def captures(stress: Stress, ask: Ask, client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    await _captured(stress, ask, client, http)


async def forgets(_stress: Stress, ask: Ask, client: AsyncOpenAI, _http: httpx.AsyncClient) -> None:
    """Never fetches."""
    answer = await client.completions.create(**_body(ask, {"capture": _asked(ask.rng)}))
    assert answer.model_extra["steercap"]["results"][0]["capture"]["id"]


async def leaves_a_stream(_stress: Stress, ask: Ask, client: AsyncOpenAI, _http: httpx.AsyncClient) -> None:
    """Cancels in mid-stream: capturing, steering, both."""
    asked: list[dict[str, Any]] = [{"capture": _asked(ask.rng)}, {"steering": "calm"}]
    field = ask.rng.choice(asked)
    body = _body(ask, field | ({"capture": {"layers": [0]}} if ask.rng.random() < 0.3 else {}), max_tokens=150)
    chunks = await client.completions.create(stream=True, **body)
    for _ in range(ask.rng.randrange(1, 5)):
        await anext(chunks)
    await chunks.close()


async def leaves(_stress: Stress, ask: Ask, client: AsyncOpenAI, _http: httpx.AsyncClient) -> None:
    """Goes before the answer comes."""
    asked: list[dict[str, Any]] = [{"capture": _asked(ask.rng)}, {"steering": "calm"}]
    field = ask.rng.choice([*asked, {"capture": True, "steering": "calm"}])
    body = _body(ask, field, max_tokens=150)
    try:
        async with asyncio.timeout(ask.rng.uniform(0.01, 3.0)):
            await client.completions.create(**body)
    except TimeoutError:
        pass


async def leaves_a_fetch(_stress: Stress, ask: Ask, client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    """Goes while the file comes."""
    answer = await client.completions.create(**_body(ask, {"capture": {"layers": [0, 1, 2, 3]}}, max_tokens=100))
    url = answer.model_extra["steercap"]["results"][0]["capture"]["url"]
    async with http.stream("GET", url) as coming:
        async for _ in coming.aiter_raw(1000):
            break


async def uploads(stress: Stress, ask: Ask, client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    """Uploads a vector of its own, steers by it, and deletes it; nobody else sees it."""
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(ask.number))
    layer, name = ask.rng.randrange(LAYERS), f"mine-{ask.number}"
    (await http.put(f"/v1/steercap/vectors/{name}", content=_file({layer: vector}))).raise_for_status()
    await _captured(stress, ask, client, http, name, {layer: vector})
    async with stress.server.http(next(key for key in KEYS if key != ask.key)) as other:
        assert (await other.get(f"/v1/steercap/vectors/{name}")).status_code == 404
        assert (await other.delete(f"/v1/steercap/vectors/{name}")).status_code == 404
    (await http.delete(f"/v1/steercap/vectors/{name}")).raise_for_status()


async def steers(stress: Stress, ask: Ask, client: AsyncOpenAI, _http: httpx.AsyncClient) -> None:
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(ask.number))
    layer = ask.rng.randrange(LAYERS)
    edit = {"op": "add", "vector": vector.tolist(), "layer": layer, "scale": 2.0}
    answer = await client.completions.create(**_body(ask, {"steering": edit}))
    assert answer.model_extra["steercap"]["results"][0]["steering"]["rows"] == [
        len(ask.prompt) + answer.usage.completion_tokens - 1
    ]
    generated = answer.choices[0].model_extra["token_ids"]
    await asyncio.to_thread(stress.check_tokens, ask.prompt, generated, {layer: 2 * vector})


async def preset(stress: Stress, ask: Ask, client: AsyncOpenAI, _http: httpx.AsyncClient) -> None:
    answer = await client.completions.create(**_body(ask, None, model="tiny+calm"))
    generated = answer.choices[0].model_extra["token_ids"]
    await asyncio.to_thread(stress.check_tokens, ask.prompt, generated, {1: 4 * stress.calm})


async def plain(stress: Stress, ask: Ask, client: AsyncOpenAI, _http: httpx.AsyncClient) -> None:
    known = ask.rng.choice(list(stress.texts))
    answer = await client.completions.create(**_body(ask, None, prompt=list(known), max_tokens=12))
    assert "steercap" not in answer.model_extra
    assert answer.choices[0].text == stress.texts[known], (answer.choices[0].text, stress.texts[known])
    generated = answer.choices[0].model_extra["token_ids"]
    await asyncio.to_thread(stress.check_tokens, known, generated, {})


Client = Callable[[Stress, Ask, AsyncOpenAI, httpx.AsyncClient], Awaitable[None]]
KINDS: dict[str, Client] = {
    one.__name__: one
    for one in (captures, forgets, leaves_a_stream, leaves, leaves_a_fetch, uploads, steers, preset, plain)
}
#: Of twenty clients; half of them capture.
SHARES = (["captures"] * 4) + (["forgets"] * 2) + (["leaves_a_stream"] * 2) + (["leaves"] * 2) + ["leaves_a_fetch"]
SHARES += (["uploads"] * 2) + (["steers"] * 2) + (["preset"] * 2) + (["plain"] * 3)


def _file(vectors: dict[int, torch.Tensor]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return LayerVectors(vectors, name="uploaded").save(Path(folder, "it.safetensors")).read_bytes()


async def plain_texts(model: str, log: Path, prompts: Sequence[Sequence[int]]) -> dict[tuple[int, ...], str]:
    """What `vllm serve` says."""
    port = free_port()
    async with served(vllm_serve(model, port), port, log) as server, server.http() as http:
        found = {}
        for prompt in prompts:
            body = {"model": "tiny", "prompt": prompt, "temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
            found[tuple(prompt)] = answer["choices"][0]["text"]
        return found


async def settled(server: Served) -> None:
    """Wait until nothing is held, of any key: captures that were not fetched go after their time."""
    limit = time.monotonic() + SECONDS + 30
    while True:
        left: dict[str, Any] = {}
        for key in KEYS:
            async with server.http(key) as http:
                said = (await http.get("/v1/steercap/model")).raise_for_status().json()
            engine = {
                name: said["engine"][name]
                for name in ("handles_held", "capture_bytes_claimed", "capture_bytes_in_use", "requests_waiting")
            }
            engine["steering_slots_in_use"] = said["engine"]["steering_slots_in_use"]
            found = engine | {f"{key} captures": said["held"]["unfetched_bytes"]}
            left |= {name: value for name, value in found.items() if value}
        if not left:
            return
        assert time.monotonic() < limit, f"still held: {left}"
        await asyncio.sleep(0.5)


async def _endless(server: Served, seed: float) -> None:
    """Capture and steer until the server goes."""
    ask = Ask(0, "", KEYS[0], random.Random(seed))
    body = {"model": "tiny", "prompt": ask.prompt, "max_tokens": 190, "stream": True, "ignore_eos": True}
    body |= {"steercap": {"capture": {"layers": [0, 1, 2, 3]}, "steering": "calm"}}
    async with server.http() as http:
        with contextlib.suppress(httpx.TransportError):
            while True:
                async with http.stream("POST", "/v1/completions", json=body) as coming:
                    async for _ in coming.aiter_raw():
                        pass


def grown(known: Sequence[Held]) -> float:
    """Bytes that the last quarter of the rounds holds beyond the one before, each in its median."""
    held, quarter = [one.memory + one.shared for one in known], len(known) // 4
    return statistics.median(held[-quarter:]) - statistics.median(held[-2 * quarter : -quarter])


async def run(clients: int, rounds: int, seed: int, log: Path) -> None:
    log.mkdir(parents=True, exist_ok=True)
    os.environ.update(FLAT)
    path = tiny_checkpoint("qwen3")
    rng = random.Random(seed)
    calm = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    file = log / "calm.safetensors"
    LayerVectors({1: calm}, name="calm").save(file)
    prompts = [
        [rng.randrange(3, 90) for _ in range(rng.randrange(4, 60))] for _ in range(20)
    ]  # ASCII, see compare_servers
    texts = await plain_texts(str(path), log / "vllm.log", prompts)
    print(f"vllm serve: {len(texts)} plain texts", flush=True)
    port = free_port()
    options = ["--unfetched-seconds", str(SECONDS), "--vectors", f"calm={file}"]
    options += ["--preset", 'calm={"op": "add", "vector": "calm", "scale": 4.0}']
    options += [word for key in KEYS for word in ("--api-key", key)]
    async with served(steercap_serve(str(path), port, *options), port, log / "steercap.log") as server:
        stress = Stress(server, Oracle(path), calm, texts)
        known: list[Held] = []
        for number in range(rounds):
            asks = [
                Ask(number * clients + one, SHARES[one % len(SHARES)], rng.choice(KEYS), random.Random(rng.random()))
                for one in range(clients)
            ]
            started = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for ask in asks:
                    group.create_task(stress.one(ask))
            took = time.monotonic() - started
            await settled(server)
            known.append(server.held())
            print(f"round {number}: {clients} clients in {took:.1f} s; {known[-1]}", flush=True)
        added = grown(known)
        print(f"the last quarter of the rounds added {added / 2**20:.1f} MiB", flush=True)
        assert added < GROWTH, "memory grows"
        assert known[-1].files <= known[rounds // 2].files + 4, "files stay open"
        running = [asyncio.create_task(_endless(server, rng.random())) for _ in range(20)]
        await asyncio.sleep(1.0)
        ended = time.monotonic()
    print(f"SIGTERM with {len(running)} requests in their midst: all over after {time.monotonic() - ended:.1f} s")
    await asyncio.wait(running)
    counts = ", ".join(f"{name} {count}" for name, count in stress.done.items())
    print(f"{counts}; {stress.rows:,} rows right, the worst {stress.worst:.1e} off; SIGTERM left nothing")


def main(
    clients: Annotated[int, typer.Option()] = 200,
    rounds: Annotated[int, typer.Option(min=8)] = 16,
    seed: Annotated[int, typer.Option()] = 1,
    log: Annotated[Path, typer.Option(help="Folder of the servers' logs.")] = Path("/tmp/stress-server"),
) -> None:
    """Run it; an AssertionError is a finding."""
    asyncio.run(run(clients, rounds, seed, log))


if __name__ == "__main__":
    typer.run(main)
