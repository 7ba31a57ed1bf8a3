"""Bodies, files, addresses and connections that no client should send, against a real `steercap serve`.

    python scripts/fuzz_server.py [--count 10000] [--seed 1] [--log /tmp/fuzz-server]

Good bodies are changed at random: values of other types and sizes, missing and doubled keys, deep nesting, NaN, halves
of surrogate pairs, other encodings, bytes cut and flipped. Files are broken safetensors, GGUF and pickles. Connections
lie about lengths, send without end, or go. No answer may be a 500; one that is 200 must say that all was done that the
body asks, by its receipts; and requests between them must be right, and leave nothing behind.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import math
import os
import pickle
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import httpx
import torch
import typer
from safetensors.torch import load
from served import FLAT, KEYS, free_port, served, steercap_serve

from steercap import SteeringSpec
from steercap.steering.directions import DirectionSet
from steercap.steering.edits import EDITS
from steercap.steering.layers import LayerVectors
from steercap.testing import tiny_checkpoint

WIDTH: Final = 128
ASKS: Final = ("steercap", "store_activations", "selectors")
PATHS: Final = ("/v1/completions", "/v1/chat/completions")
OTHERS: Final = ("/v1/responses", "/v1/messages", "/v1/chat/completions/batch", "/invocations", "/tokenize")
VECTOR: Final = [0.5] * WIDTH
#: What the second half of the bodies may add, in bytes of memory of all processes.
GROWTH: Final = 24 << 20
CAPTURES: Final[list[Any]] = [
    True,
    {"layers": [0, 2]},
    {"layers": "1:3", "tokens": "-2:", "codec": "full8"},
    {"layers": "all", "tokens": ["generated", 0], "reduce": "mean"},
    {"at": ["resid_post[1]", [2, "resid_post"]]},
    {"layers": 3, "codec": "int4", "codec_seed": 7},
    {"layers": [1], "project": "calm"},
    {"layers": [1], "project": "traits"},
    {"layers": [1], "before_edits": True, "allow_nonfinite": True},
]
STEERING: Final[list[Any]] = [
    "calm",
    "both",
    "traits/warm",
    {"op": "add", "vector": "calm", "scale": 4.0, "layers": [1]},
    {"op": "add", "vector": VECTOR, "layer": 2, "tokens": "generated"},
    {"op": "ablate", "vector": VECTOR, "layer": 0},
    {"edits": [{"op": "add", "vector": "calm"}, "both"], "preserve_norm": True},
    [{"op": "logit_bias", "bias": {"7": 2.5}}, "calm"],
]
JUNK: Final[list[Any]] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**40, 0.0, -0.0, 1e-320, 1e308, math.nan, math.inf,
    -math.inf, "", "a", "calm", "traits", "../../etc/passwd", "/etc/passwd", "\x00", "\ud800", "é" * 300, "9" * 5000,
    "9" * 5000 + ":", "0:" + "9" * 30, "::0", "::-1", "-5:", "all", "generated", "nan", [], [[]], {}, {"": ""}, [None], [[0]],
    [1, "a"], {"op": "add"}, {"op": []}, {"edits": 1}, {"a": {"b": {"c": 1}}}, [math.nan] * WIDTH, VECTOR, [1e39] * WIDTH,
    [0.0] * WIDTH, ["x"] * 3, "x" * 20_000, list(range(3000)),
]  # fmt: skip
KEYS_OF_ALL: Final = (
    "steercap",
    "capture",
    "steering",
    "codec",
    "deliver",
    "layers",
    "sites",
    "at",
    "tokens",
    "reduce",
    "k",
    "seed",
)
KEYS_OF_MORE: Final = (
    "project",
    "op",
    "vector",
    "layer",
    "scale",
    "edits",
    "preserve_norm",
    "site",
    "elements",
    "probe",
    "bias",
)


def good(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A route, and a body that it answers."""
    path = rng.choice(PATHS)
    body: dict[str, Any] = {"model": rng.choice(["tiny", "tiny", "tiny+calm"]), "max_tokens": rng.randint(1, 4)}
    if path == PATHS[0]:
        ids = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 12))]
        body["prompt"] = rng.choice([ids, "Name a colour.", [ids, [5, 6]], ["a b", "c"]])
        body |= rng.choice([{}, {}, {"echo": True}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"suffix": None}])
    else:
        body["messages"] = [{"role": "user", "content": rng.choice(["hi", [{"type": "text", "text": "hi"}]])}]
        body |= rng.choice(
            [{}, {}, {"logprobs": True, "top_logprobs": 2}, {"tools": []}, {"response_format": {"type": "text"}}]
        )
    body |= rng.choice(
        [{}, {"temperature": 0}, {"n": 2, "seed": 1}, {"stop": ["x"]}, {"priority": 0}, {"ignore_eos": True}]
    )
    body |= rng.choice([{}, {}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
    field: dict[str, Any] = {}
    if rng.random() < 0.7:
        field["capture"] = rng.choice(CAPTURES)
    if rng.random() < 0.5:
        field["steering"] = rng.choice(STEERING)
    if "capture" in field and rng.random() < 0.3:
        field["deliver"] = rng.choice(["inline", "fetch"])
    if rng.random() < 0.1:
        body |= {"store_activations": True, "selectors": ["resid_post[1]"]}
    elif field:
        body["steercap"] = field
    return path, json.loads(json.dumps(body))


def changed(value: Any, rng: random.Random) -> Any:
    """A value with one thing in it that is another."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        if rng.random() < 0.35 and "steercap" in value:
            name = "steercap"
        found = dict(value)
        kind = rng.random()
        if kind < 0.1:
            del found[name]
        elif kind < 0.2:
            found[rng.choice([*KEYS_OF_ALL, *KEYS_OF_MORE, "x" * 3000, "\ud800", ""])] = rng.choice(JUNK)
        elif kind < 0.25 and "op" in found:
            found["op"] = rng.choice(list(EDITS))
        else:
            found[name] = _few(name, changed(found[name], rng))
        return found
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], changed(value[at], rng), *value[at + 1 :]]
    return rng.choice(JUNK)


def _few(name: str, value: Any) -> Any:
    """Numbers that ask for hours of work are not what is looked for."""
    heavy = name in {"n", "best_of", "max_tokens", "min_tokens"} and isinstance(value, (int, float)) and abs(value) > 8
    return 10**40 if heavy else value


def written(body: Any, rng: random.Random) -> bytes:  # noqa: PLR0911 -- one a way
    """A body as bytes, which may be those of another encoding, cut, flipped, doubled, or nested beyond reason."""
    text = json.dumps(body)
    kind = rng.randrange(14)
    if kind == 0:
        return text.encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "utf-16-be"]))
    if kind == 1:
        return text.encode()[: rng.randrange(len(text) + 1)]
    if kind == 2:
        data = bytearray(text.encode())
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    if kind == 3:  # a key twice: the last one counts, for Python's json and for ours
        return (
            text[:-1] + ', "steercap": ' + json.dumps(rng.choice([{"capture": True}, {"steering": "calm"}, 7])) + "}"
        ).encode()
    if kind == 4:
        depth = rng.choice([50, 400, 900, 100_000])
        opened, closed = rng.choice([("[", "]"), ('{"a":', "}")])
        name = rng.choice(["tokens", "layers", "at", "sites", "vector"])
        return (text[:-1] + f', "steercap": {{"capture": {{"{name}": {opened * depth}1{closed * depth}}}}}}}').encode()
    if kind == 5:
        return gzip.compress(text.encode())
    return text.encode()


def files(rng: random.Random, folder: Path) -> list[bytes]:
    """Files that are nearly what can be uploaded, and are not."""
    made = [
        LayerVectors({1: torch.tensor(VECTOR)}, name="x").save(folder / "a.safetensors").read_bytes(),
        DirectionSet({"warm": LayerVectors({1: torch.tensor(VECTOR)})}).save(folder / "b.safetensors").read_bytes(),
        SteeringSpec([EDITS["add"](torch.tensor(VECTOR), layer=1)]).save(folder / "c.safetensors").read_bytes(),
    ]
    broken = bytearray(rng.choice(made))
    for _ in range(rng.randint(1, 8)):
        broken[rng.randrange(min(len(broken), rng.choice([16, 300, len(broken)])))] = rng.randrange(256)
    header = json.dumps({"a": {"dtype": "F32", "shape": [rng.choice([0, 2**62, 4])], "data_offsets": [0, 16]}}).encode()
    text = rng.choice(made)
    size = struct.unpack("<Q", text[:8])[0]
    lines = changed(json.loads(text[8 : 8 + size]), rng)
    try:
        rewritten = json.dumps(lines).encode()
    except ValueError:
        rewritten = b"{}"
    gguf = b"GGUF" + struct.pack(
        "<IQQ", rng.choice([2, 3, 99]), rng.choice([0, 1, 2**63, 2**20]), rng.choice([0, 1, 2**40])
    )
    return [
        bytes(broken),
        rng.choice(made)[: rng.randrange(200)],
        struct.pack("<Q", rng.choice([0, len(header), 2**63, 2**40])) + header + b"\0" * 16,
        struct.pack("<Q", len(rewritten)) + rewritten + text[8 + size :],
        gguf + rng.randbytes(rng.randrange(200)),
        pickle.dumps({"a": [1.0] * 10}),
        rng.randbytes(rng.randrange(500)),
        b"PK\x03\x04" + rng.randbytes(100),
    ]


def names(rng: random.Random) -> str:
    """What could stand in an address."""
    return rng.choice(
        ["..", "../../etc/passwd", "%2e%2e%2fx", "..%2F..%2Fx", "%00", "a" * 65, "a" * 5000, "calm", ".x", "%ED%A0%80",
         "é", "a b", "-", "*", "cap-" + "0" * 32, "CON", "a%0d%0aset-cookie:x", ";", "a?b=c", "\\x", "con\u202e"]
    )  # fmt: skip


class Fuzz:
    """One server that is asked what it should not be.

    Args:
        http: asks it.
        seed: of what chance says.
        folder: for files of this side.
    """

    def __init__(self, http: httpx.AsyncClient, seed: int, folder: Path) -> None:
        self.http = http
        self.seed = seed
        self.number = 0
        self.rng = random.Random(seed)
        self.folder = folder
        self.seen: Counter[str] = Counter()
        self.findings: list[str] = []
        self._known: tuple[str, dict[str, torch.Tensor]] | None = None

    async def set_up(self) -> None:
        """Upload what bodies name."""
        calm = LayerVectors({1: torch.tensor(VECTOR), 2: torch.ones(WIDTH)}, name="calm")
        for name, value in (
            ("calm", calm),
            ("traits", DirectionSet({"warm": calm, "cold": -1 * calm})),
            (
                "both",
                SteeringSpec(
                    [EDITS["add"](torch.tensor(VECTOR), layer=1), EDITS["ablate"](torch.ones(WIDTH), layer=2)]
                ),
            ),
        ):
            data = value.save(self.folder / f"{name}.safetensors").read_bytes()
            (await self.http.put(f"/v1/steercap/vectors/{name}", content=data)).raise_for_status()

    def numbered(self, number: int) -> Fuzz:
        """Who makes one of the requests, which is the same however many run at once."""
        one = copy.copy(self)
        one.number, one.rng = number, random.Random(f"{self.seed}-{number}")
        return one

    async def one(self) -> None:
        """One request."""
        kinds: list[tuple[int, Callable[[], Any]]] = [
            (80, self.body), (6, self.elsewhere), (6, self.upload), (6, self.address), (2, self.ordinary)
        ]  # fmt: skip
        weights, calls = zip(*kinds, strict=True)
        (call,) = self.rng.choices(calls, weights)
        try:
            await call()
        except httpx.HTTPError as error:
            self.findings.append(f"{call.__name__}: {type(error).__name__} {error}")

    async def body(self) -> None:
        path, body = good(self.rng)
        for _ in range(self.rng.choice([0, 1, 1, 1, 2, 3])):
            body = changed(body, self.rng)
        data = written(body, self.rng)
        kind = self.rng.choice(["application/json"] * 9 + ["text/plain"])
        headers = {"content-type": kind} | ({"content-encoding": "gzip"} if data[:2] == b"\x1f\x8b" else {})
        answer = await self.http.post(path, content=data, headers=headers)
        self.judge(path, data, answer)

    async def elsewhere(self) -> None:
        path = self.rng.choice(OTHERS)
        _, body = good(self.rng)
        body |= {"input": "hi", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
        data = written(changed(body, self.rng), self.rng)
        answer = await self.http.post(path, content=data, headers={"content-type": "application/json"})
        self.count(path, answer)
        sent = json.loads(data) if answer.status_code == 200 else {}
        steered = sent.get("model") == "tiny+calm" and path == "/invocations"
        if steered or any(sent.get(name) is not None for name in ASKS):
            self.findings.append(f"{path} answered what it cannot do: {data[:400]!r}")

    async def upload(self) -> None:
        name = self.rng.choice([f"it{self.number}", names(self.rng)])
        data = self.rng.choice(files(self.rng, self.folder))
        answer = await self.http.put(f"/v1/steercap/vectors/{_path(name)}", content=data)
        self.count("upload", answer)
        if answer.status_code == 201:
            deleted = await self.http.delete(f"/v1/steercap/vectors/{answer.json()['name']}")
            if deleted.status_code != 404 or name == f"it{self.number}":  # or another has taken that name away
                deleted.raise_for_status()
        (await self.http.get("/v1/steercap/vectors")).raise_for_status()

    async def address(self) -> None:
        verb = self.rng.choice(["GET", "DELETE", "HEAD", "PUT", "POST", "PATCH", "OPTIONS"])
        what = self.rng.choice(["captures", "vectors"])
        name = names(self.rng)
        if (verb, what, name) == ("DELETE", "vectors", "calm"):
            return
        ranges = ["bytes=0-5", "bytes=-0", f"bytes={'9' * 5000}-", "bytes=5-1", "bytes=0-0,1-1", "x", "bytes=\u00b2-"]
        headers = {b"range": self.rng.choice(ranges).encode("latin-1")}
        answer = await self.http.request(verb, f"/v1/steercap/{what}/{_path(name)}", headers=headers)
        self.count(f"{verb} {what}", answer)

    async def ordinary(self) -> None:
        """A plain and a capturing request, which must be what they were."""
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": list(range(10, 30)),
            "temperature": 0,
            "max_tokens": 5,
            "ignore_eos": True,
        }
        text = (await self.http.post(PATHS[0], json=body)).raise_for_status().json()["choices"][0]["text"]
        answer = await self.http.post(PATHS[0], json=body | {"steercap": {"capture": {"layers": [0, 3]}}})
        assert answer.status_code == 200, answer.text
        (one,) = answer.json()["steercap"]["results"]
        rows = load((await self.http.get(one["capture"]["url"])).raise_for_status().content)
        (await self.http.delete(one["capture"]["url"])).raise_for_status()
        if self._known is None:
            self._known = (text, rows)
        assert text == self._known[0] == answer.json()["choices"][0]["text"]
        for name, known in self._known[1].items():
            torch.testing.assert_close(rows[name], known, rtol=1e-4, atol=1e-4)
        self.seen["ordinary, right"] += 1

    def count(self, what: str, answer: httpx.Response) -> None:
        self.seen[f"{what} {answer.status_code}"] += 1
        if answer.status_code >= 500 and answer.status_code != 501:
            self.findings.append(
                f"{what}: {answer.status_code} {answer.text[:300]} of {answer.request.content[:1500]!r}"
            )

    def judge(self, path: str, data: bytes, answer: httpx.Response) -> None:
        """What is answered by 200 must have been done."""
        self.count(path, answer)
        if answer.status_code != 200:
            return
        if broken := [one for one in _failures(answer) if one["code"] >= 500]:
            self.findings.append(f"{path}: {broken} in the stream of {data[:1500]!r}")
            return
        asks, said = _asks(data), _said(answer)
        if asks is None:
            self.findings.append(f"{path} answered what is no JSON: {data[:300]!r}")
        elif said is None:
            return  # a stream that ends by an error
        elif any(asks) != bool(said):
            self.findings.append(f"{path} asked {asks} and was told {str(said)[:200]}: {data[:600]!r}")
        for one in said or ():
            capture, steering = asks or (False, False)
            if ("capture" in one) != capture or ("steering" in one) != steering:
                self.findings.append(f"{path} asked {asks} and was told {sorted(one)}: {data[:600]!r}")
            if capture and not (one["capture"]["points"] and ("data" in one["capture"] or "url" in one["capture"])):
                self.findings.append(f"{path} no rows: {one}")

    async def clean(self) -> None:
        """Let go of all captures; what else is held must be nothing."""
        for one in (await self.http.get("/v1/steercap/captures")).raise_for_status().json()["data"]:
            await self.http.delete(f"/v1/steercap/captures/{one['id']}")
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            said = (await self.http.get("/v1/steercap/model")).raise_for_status().json()
            left = {name: said["engine"][name] for name in HELD if said["engine"][name]}
            if not left and not said["held"]["unfetched_bytes"]:
                return
            await asyncio.sleep(0.2)
        self.findings.append(f"left: {left} {said['held']}")


HELD: Final = (
    "handles_held",
    "capture_bytes_claimed",
    "capture_bytes_in_use",
    "requests_waiting",
    "steering_slots_in_use",
)


def _asks(data: bytes) -> tuple[bool, bool] | None:
    """Whether a body asks for rows and for steering; None where it is no JSON object."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    field = body.get("steercap")
    field = field if isinstance(field, dict) else {}
    capture = field.get("capture") is not None or body.get("store_activations") is True
    return capture, field.get("steering") is not None or body.get("model") == "tiny+calm"


def _said(answer: httpx.Response) -> list[dict[str, Any]] | None:
    """What an answer says of its choices; None for a stream that ends by an error."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return list(answer.json().get("steercap", {}).get("results", []))
    assert answer.text.endswith("data: [DONE]\n\n")
    found = [result for one in _events(answer) for result in one.get("steercap", {}).get("results", [])]
    return None if _failures(answer) else found


def _failures(answer: httpx.Response) -> list[dict[str, Any]]:
    """The errors of vLLM's that a stream ends by; none of a document."""
    return [one["error"] for one in _events(answer) if "error" in one]


def _events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; none of a document."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return []
    return [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]


def _path(name: str) -> str:
    """A name in an address, as it is where an address can have it."""
    return name if "%" in name or (not set(name) & set("? \\") and name.isascii()) else quote(name)


async def fuzz(http: httpx.AsyncClient, folder: Path, count: int, seed: int, at_once: int) -> Fuzz:
    """So many requests, some at once; findings are listed, and nothing may be left."""
    found = Fuzz(http, seed, folder)
    await found.set_up()
    await found.ordinary()
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await found.numbered(number).one()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(some())
    await found.ordinary()
    await found.clean()
    return found


async def raw(port: int, parts: Sequence[bytes], *, pause: float = 0.0, most: int = 64 << 20) -> bytes:
    """What a server answers to bytes of which it may take only some; empty where it just closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            sent += len(part)
            assert sent < most, "it reads without end"
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(4000), 20)
    except (ConnectionError, TimeoutError):
        return b""
    finally:
        writer.close()


async def connections(port: int) -> dict[str, str]:
    """What lying, endless, slow and leaving connections are answered: the first line of each."""

    def head(path: str, *lines: str, verb: str = "POST") -> bytes:
        kept = [
            f"{verb} {path} HTTP/1.1",
            "host: x",
            f"authorization: Bearer {KEYS[0]}",
            "content-type: application/json",
        ]
        return ("\r\n".join([*kept, *lines]) + "\r\n\r\n").encode()

    body = json.dumps({"model": "tiny", "prompt": [5, 6], "max_tokens": 2, "steercap": {"capture": True}}).encode()
    endless = [b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 8000
    chunked = "transfer-encoding: chunked"
    cases: dict[str, tuple[list[bytes], float]] = {
        "10 GB said": ([head("/v1/completions", "content-length: 10000000000"), b"{"], 0),
        "10 GB said, vectors": ([head("/v1/steercap/vectors/x", "content-length: 10000000000", verb="PUT"), b"{"], 0),
        "a length of 5,000 digits": ([head("/v1/completions", "content-length: " + "9" * 5000)], 0),
        "a length below zero": ([head("/v1/completions", "content-length: -5"), body], 0),
        "two lengths": ([head("/v1/completions", "content-length: 5", "content-length: 500"), body], 0),
        "shorter than said, then gone": ([head("/v1/completions", "content-length: 5000"), body], 0),
        "longer than said": ([head("/v1/completions", f"content-length: {len(body) - 5}"), body], 0),
        "chunked": ([head("/v1/completions", chunked), b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)], 0),
        "chunked, byte by byte": ([head("/v1/completions", chunked), *(b"1\r\n%c\r\n" % one for one in body), b"0\r\n\r\n"], 0),
        "broken chunks": ([head("/v1/completions", chunked), b"zz\r\n" + body], 0),
        "endless": ([head("/v1/completions", chunked), *endless], 0),
        "endless, vectors": ([head("/v1/steercap/vectors/x", chunked, verb="PUT"), *endless], 0),
        "slow": ([head("/v1/completions", f"content-length: {len(body)}"), *(body[at : at + 10] for at in range(0, len(body), 10))], 0.05),
        "no key": ([head("/v1/steercap/captures", verb="GET").replace(b"authorization", b"x-other")], 0),
        "key by Basic": ([head("/v1/steercap/captures", verb="GET").replace(b"Bearer", b"Basic")], 0),
        "preflight": ([b"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\norigin: http://evil\r\naccess-control-request-method: POST\r\n\r\n"], 0),
    }  # fmt: skip
    found = {}
    for name, (parts, pause) in cases.items():
        most = 300 << 20
        answer = await raw(port, parts, pause=0 if len(parts) > 1000 else pause, most=most)
        assert b"access-control-allow-origin" not in answer.lower(), name
        found[name] = answer.split(b"\r\n")[0].decode() or "closed"
        assert " 500 " not in found[name], (name, answer)
    return found


async def run(count: int, seed: int, log: Path, at_once: int) -> None:
    log.mkdir(parents=True, exist_ok=True)
    os.environ.update(FLAT)
    calm = log / "calm.safetensors"
    LayerVectors({1: torch.tensor(VECTOR)}, name="calm").save(calm)
    port = free_port()
    options = ["--vectors", f"calm={calm}", "--preset", "calm=calm", "--unfetched-seconds", "5"]
    options += [word for key in KEYS for word in ("--api-key", key)]
    async with served(
        steercap_serve(str(tiny_checkpoint("qwen3")), port, *options), port, log / "steercap.log"
    ) as server:
        async with server.http() as http:
            started = time.monotonic()
            halves = [await fuzz(http, log, count - count // 2, seed + 1, at_once)]
            before = server.held()  # caches and pools are full
            halves.append(await fuzz(http, log, count // 2, seed, at_once))
            took, after = time.monotonic() - started, server.held()
            for name, said in (await connections(port)).items():
                print(f"  {name}: {said}")
            await halves[1].ordinary()
            await halves[1].clean()
        print(f"before: {before}\nafter: {after}\nand connections: {server.held()}")
    for what, times in sorted((halves[0].seen + halves[1].seen).items()):
        print(f"  {what}: {times}")
    findings = [one for half in halves for one in half.findings]
    print(f"{count} requests in {took:.0f} s, {len(findings)} findings")
    for one in findings[:20]:
        print("FINDING", one)
    assert not findings
    assert after.memory - before.memory < GROWTH, "memory grows"
    assert after.files <= before.files + 4, "files stay open"


def main(
    count: Annotated[int, typer.Option()] = 10_000,
    seed: Annotated[int, typer.Option()] = 1,
    at_once: Annotated[int, typer.Option()] = 16,
    log: Annotated[Path, typer.Option(help="Folder of the server's log.")] = Path("/tmp/fuzz-server"),
) -> None:
    """Run it; an AssertionError is a finding."""
    asyncio.run(run(count, seed, log, at_once))


if __name__ == "__main__":
    typer.run(main)
