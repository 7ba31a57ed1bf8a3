"""Plain requests to `steercap serve` and to `vllm serve`: answers byte for byte, and requests a second.

    python scripts/compare_servers.py [--model PATH] [--seconds 20] [--rounds 3] [--log /tmp/compare-servers]

Both run the same checkpoint with the same flags. All requests are at temperature 0 or seeded; ids and times are taken out
of both answers, and the fingerprint of vLLM's configuration; nothing else: bodies,
events of streams, headers, errors, models, tokens, names of metrics. Prompts are UTF-8: of others vLLM's text may begin
with that of the prompt, which adapters/detokenizer.py mends. Then 64
clients ask each in turn, and the last line says how many requests a second each answers.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from served import KEYS, Served, free_port, served, steercap_serve, vllm_serve

from steercap.testing import tiny_checkpoint

CLIENTS: Final = 64
#: What differs from one request to the next: ids, and seconds since 1970 beside them.
IDS: Final = re.compile(rb"(chatcmpl|cmpl|resp|msg|modelperm|chatcmpl-tool|call|rs|fc)[-_][0-9a-f-]{8,}")
FINGERPRINT: Final = re.compile(rb"vllm-[0-9.]+-[0-9a-f]{8}")
TIMES: Final = re.compile(rb'"(created|created_at|completed_at|server_load)": ?[0-9.]+')
#: Headers that say when, and nothing else.
UNCOMPARED: Final = {"date"}
TOOLS: Final = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
CHAT: Final[dict[str, Any]] = {"model": "tiny", "messages": [{"role": "user", "content": "Name a colour."}]}
TEXT: Final[dict[str, Any]] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
PAIR: Final = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]

#: Name, verb, path, and what is sent: a dict as JSON, bytes as they are.
REQUESTS: Final[list[tuple[str, str, str, Any]]] = [
    ("text", "POST", "/v1/completions", TEXT),
    ("text, ids", "POST", "/v1/completions", TEXT | {"prompt": [5, 6, 7, 8], "return_token_ids": True}),
    ("text, prompts", "POST", "/v1/completions", TEXT | {"prompt": ["a b c", "d e"], "n": 2, "seed": 3, "temperature": 1}),
    ("text, stream", "POST", "/v1/completions", TEXT | {"stream": True}),
    ("text, stream of two", "POST", "/v1/completions", TEXT | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("text, logprobs", "POST", "/v1/completions", TEXT | {"logprobs": 3, "echo": True}),
    ("text, prompt_logprobs", "POST", "/v1/completions", TEXT | {"prompt_logprobs": 2}),
    ("text, echo alone", "POST", "/v1/completions", TEXT | {"echo": True, "max_tokens": 0}),
    ("text, stop", "POST", "/v1/completions", TEXT | {"stop": ["e", "a"], "include_stop_str_in_output": True}),
    ("text, echo of the mark of the end", "POST", "/v1/completions", TEXT | {"prompt": "data: [DONE]\n\n", "echo": True, "stream": True}),
    ("text, beams", "POST", "/v1/completions", TEXT | {"use_beam_search": True, "n": 2, "max_tokens": 3}),
    ("text, priority", "POST", "/v1/completions", TEXT | {"priority": 3}),
    ("text, unknown field", "POST", "/v1/completions", TEXT | {"nothing": 1}),
    ("text, response format", "POST", "/v1/completions", TEXT | {"response_format": {"type": "json_object"}}),
    ("chat", "POST", "/v1/chat/completions", CHAT | {"max_tokens": 12, "temperature": 0}),
    ("chat, system", "POST", "/v1/chat/completions", CHAT | {"messages": PAIR, "max_tokens": 5, "temperature": 0}),
    ("chat, stream", "POST", "/v1/chat/completions", CHAT | {"max_tokens": 12, "temperature": 0, "stream": True}),
    ("chat, stream, usage", "POST", "/v1/chat/completions", CHAT | {"max_tokens": 5, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}),
    ("chat, logprobs", "POST", "/v1/chat/completions", CHAT | {"max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}),
    ("chat, two, seeded", "POST", "/v1/chat/completions", CHAT | {"max_tokens": 6, "temperature": 1, "n": 2, "seed": 5}),
    ("chat, two, stream", "POST", "/v1/chat/completions", CHAT | {"max_tokens": 1, "temperature": 1, "seed": 2, "n": 2, "stream": True}),
    ("chat, tools", "POST", "/v1/chat/completions", CHAT | {"max_tokens": 20, "temperature": 0, "tools": TOOLS}),
    ("chat, tools none", "POST", "/v1/chat/completions", CHAT | {"max_tokens": 5, "temperature": 0, "tools": TOOLS, "tool_choice": "none"}),
    ("chat, tool by name", "POST", "/v1/chat/completions", CHAT | {"max_tokens": 30, "temperature": 0, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    ("chat, tools, stream", "POST", "/v1/chat/completions", CHAT | {"max_tokens": 20, "temperature": 0, "tools": TOOLS, "stream": True}),
    ("chat, schema", "POST", "/v1/chat/completions", CHAT | {"max_tokens": 30, "temperature": 0, "response_format": {"type": "json_object"}}),
    ("responses", "POST", "/v1/responses", {"model": "tiny", "input": "Hi.", "max_output_tokens": 6, "temperature": 0}),
    ("messages", "POST", "/v1/messages", CHAT | {"max_tokens": 6, "temperature": 0}),
    ("messages, stream", "POST", "/v1/messages", CHAT | {"max_tokens": 6, "temperature": 0, "stream": True}),
    ("batch", "POST", "/v1/chat/completions/batch", CHAT | {"messages": [PAIR, PAIR], "max_tokens": 4, "temperature": 0}),
    ("invocations", "POST", "/invocations", TEXT),
    ("tokenize", "POST", "/tokenize", {"model": "tiny", "prompt": "Hello, world"}),
    ("tokenize, chat", "POST", "/tokenize", CHAT),
    ("detokenize", "POST", "/detokenize", {"model": "tiny", "tokens": [5, 6, 7]}),
    ("render", "POST", "/v1/completions/render", TEXT),
    ("models", "GET", "/v1/models", None),
    ("health", "GET", "/health", None),
    ("version", "GET", "/version", None),
    ("ping", "GET", "/ping", None),
    ("load", "GET", "/load", None),
    ("no such model", "POST", "/v1/completions", TEXT | {"model": "none"}),
    ("no such model, chat", "POST", "/v1/chat/completions", CHAT | {"model": "none"}),
    ("too long", "POST", "/v1/completions", TEXT | {"prompt": [5] * 5000}),
    ("too many tokens", "POST", "/v1/completions", TEXT | {"max_tokens": 100_000}),
    ("below zero", "POST", "/v1/completions", TEXT | {"temperature": -1}),
    ("of another type", "POST", "/v1/completions", TEXT | {"max_tokens": "many"}),
    ("no prompt", "POST", "/v1/completions", {"model": "tiny"}),
    ("no messages", "POST", "/v1/chat/completions", {"model": "tiny"}),
    ("empty prompt", "POST", "/v1/completions", TEXT | {"prompt": ""}),
    ("token beyond", "POST", "/v1/completions", TEXT | {"prompt": [10**7]}),
    ("NaN", "POST", "/v1/completions", b'{"model": "tiny", "prompt": "a", "temperature": NaN}'),
    ("half a pair", "POST", "/v1/completions", b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": 2, "temperature": 0}'),
    ("UTF-16", "POST", "/v1/completions", json.dumps(TEXT).encode("utf-16")),
    ("no JSON", "POST", "/v1/completions", b"{"),
    ("empty", "POST", "/v1/completions", b""),
    ("a list", "POST", "/v1/completions", b"[1]"),
    ("deep", "POST", "/v1/completions", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    ("no such route", "POST", "/v1/nothing", TEXT),
    ("another verb", "GET", "/v1/completions", None),
    ("preflight", "OPTIONS", "/v1/completions", None),
    ("wrong key", "POST", "/v1/completions?key", TEXT),
]  # fmt: skip


async def answers(server: Served) -> dict[str, tuple[int, list[tuple[str, str]], bytes]]:
    """Status, headers and body of each, without ids and times."""
    found = {}
    async with server.http() as http:
        for name, verb, path, sent in REQUESTS:
            headers = {"content-type": "application/json", "origin": "http://elsewhere"}
            headers |= {"authorization": "Bearer wrong"} if path.endswith("?key") else {}
            content = sent if isinstance(sent, bytes) or sent is None else json.dumps(sent).encode()
            answer = await http.request(verb, path.partition("?")[0], content=content, headers=headers)
            body = FINGERPRINT.sub(b"vllm", TIMES.sub(rb'"\1":0', IDS.sub(rb"\1-ID", answer.content)))
            kept = sorted((key, value) for key, value in answer.headers.items() if key not in UNCOMPARED)
            found[name] = (answer.status_code, kept, body)
        metrics = (await http.get("/metrics")).raise_for_status().text
        found["metrics"] = (
            200,
            [],
            "\n".join(sorted(set(re.findall("^# TYPE (.*)$", metrics, re.MULTILINE)))).encode(),
        )
    return found


async def rate(server: Served, seconds: float) -> float:
    """Plain requests a second, of `CLIENTS` clients at once."""
    done, until = 0, time.monotonic() + seconds

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal done
        while time.monotonic() < until:
            (await http.post("/v1/completions", json=TEXT | {"ignore_eos": True, "max_tokens": 16})).raise_for_status()
            done += 1

    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    async with server.http(limits=limits) as http, asyncio.TaskGroup() as group:
        started = time.monotonic()
        for _ in range(CLIENTS):
            group.create_task(client(http))
    return done / (time.monotonic() - started)


async def run(model: str, seconds: float, rounds: int, log: Path) -> None:
    log.mkdir(parents=True, exist_ok=True)
    flags = [word for key in KEYS for word in ("--api-key", key)]
    async with AsyncExitStack() as stack:
        ports = free_port(), free_port()
        own = steercap_serve(model, ports[0], *flags)
        ours = await stack.enter_async_context(served(own, ports[0], log / "steercap.log"))
        theirs = await stack.enter_async_context(
            served(vllm_serve(model, ports[1], "--api-key", *KEYS), ports[1], log / "vllm.log")
        )
        mine, known = await answers(ours), await answers(theirs)
        differ = [name for name in known if mine[name] != known[name]]
        for name in differ:
            print(f"DIFFERS {name}:\n  vllm     {known[name]}\n  steercap {mine[name]}")
        codes = sorted({status for status, _, _ in known.values()})
        print(f"{len(known) - len(differ)} of {len(known)} answers are the same, of status {codes}", flush=True)
        rates: list[tuple[float, float]] = []
        for number in range(rounds + 1):
            pair = [0.0, 0.0]
            for index in (0, 1) if number % 2 else (1, 0):
                pair[index] = await rate((ours, theirs)[index], seconds if number else 5)
            if number:  # the first warms up
                rates.append((pair[0], pair[1]))
                print(f"round {number}: steercap {pair[0]:.1f}/s, vllm {pair[1]:.1f}/s", flush=True)
        shares = [mine / known for mine, known in rates]
        print(f"{CLIENTS} at once: steercap answers {statistics.median(shares):.3f} of what vllm does ({shares})")
    assert not differ


def main(
    model: Annotated[str, typer.Option(help="Checkpoint; a tiny one if left out.")] = "",
    seconds: Annotated[float, typer.Option(help="Of each measurement.")] = 15,
    rounds: Annotated[int, typer.Option()] = 4,
    log: Annotated[Path, typer.Option(help="Folder of the servers' logs.")] = Path("/tmp/compare-servers"),
) -> None:
    """Run it; an AssertionError is a difference."""
    asyncio.run(run(model or str(tiny_checkpoint("qwen3")), seconds, rounds, log))


if __name__ == "__main__":
    typer.run(main)
