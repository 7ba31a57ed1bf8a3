"""What a server makes of bodies, files and captures, without an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import pickle
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import torch
from conftest import listening
from handles import a_handle
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from support.lora import write_adapter
from transformers import AutoTokenizer

from steercap import Ablate, Add, Cap, CaptureSpec, LogitBias, SteeringSpec
from steercap.adapters import server
from steercap.captures.files import encode
from steercap.captures.site_codecs import SiteCodecs
from steercap.client.chats import tokenizer_here
from steercap.client.connection import ERROR_HEADER
from steercap.core.prompts import tokens_of
from steercap.core.spec import Point
from steercap.errors import CaptureMemoryFull, InvalidFile, InvalidRequest, InvalidSpec, SketchClosed
from steercap.files.fingerprint import template_digest, tokenizer_digest
from steercap.requests.sketching import EngineSketches, RunningSketch, record_of
from steercap.requests.stats import Stats
from steercap.server.asks import capture_of, parsed_field, ranges, steering_of
from steercap.server.call import CURRENT, described, logits_of
from steercap.server.folder import CaptureStore, owner_of
from steercap.server.inspect_routes import InspectRoutes
from steercap.server.library import OPERATOR, Library
from steercap.server.middleware import SteercapRoute, misplaced
from steercap.server.passthrough_routes import AT_REST, STEERED, PassthroughRoute, Presets
from steercap.server.pooling_routes import PoolingRoutes
from steercap.server.routes import Routes
from steercap.server.server import Names, ServerSettings
from steercap.server.sketch_store import SketchStore
from steercap.server.statistics_routes import SketchRoutes, _SketchFile
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors
from steercap.testing import tiny_checkpoint

WIDTH = 8
ME, OTHER = owner_of("Bearer me"), owner_of("Bearer other")


def content(value: Any, tmp_path) -> bytes:
    return value.save(tmp_path / "file.safetensors").read_bytes()


@pytest.fixture
def library(tmp_path) -> Library:
    """`calm`, of two layers; `traits`, two directions; `single`, one; `both`, two edits; all the operator's, and one of
    mine.
    """
    found = Library()
    calm = LayerVectors({3: torch.ones(WIDTH), 5: 2 * torch.ones(WIDTH)}, name="calm")
    found.add("calm", OPERATOR, content(calm, tmp_path))
    found.add("traits", OPERATOR, content(DirectionSet({"warm": calm, "cold": -1 * calm}), tmp_path))
    found.add(
        "both",
        OPERATOR,
        content(SteeringSpec([Add(torch.ones(WIDTH), layer=1), Ablate(torch.ones(WIDTH), layer=2)]), tmp_path),
    )
    found.add("mine", ME, content(calm, tmp_path))
    found.add("single", OPERATOR, content(DirectionSet({"formal": calm}), tmp_path))
    return found


# What is asked


def test_a_capture_is_read_as_it_is_written(library) -> None:
    spec = capture_of(
        {"layers": "2:9:2", "sites": ["attn_out"], "tokens": ["generated", "0:4"], "codec": "full8"}, library, ME
    )
    assert (spec.layers, spec.sites, spec.codec) == (slice(2, 9, 2), ("attn_out",), "full8")
    assert spec.tokens == CaptureSpec(tokens=["generated", slice(0, 4)]).tokens
    assert capture_of(True, library, ME) == CaptureSpec()
    assert capture_of({"at": ["blocks.5.hook_resid_post", [2, "z"]]}, library, ME).at is not None
    assert set(capture_of({"project": "traits"}, library, ME).project) == {"warm", "cold"}
    assert ranges(["::2", -1, ":"]) == [slice(None, None, 2), -1, slice(None)]


def test_steering_is_edits_or_names(library) -> None:
    (edit,) = steering_of({"op": "add", "vector": [1.0] * WIDTH, "layer": 4, "scale": 2}, library, ME).flat()
    assert (type(edit), edit.layer, edit.scale) == (Add, 4, 2.0)
    calm = steering_of("calm", library, ME).flat()
    assert [(edit.layer, float(edit.vector[0])) for edit in calm] == [(3, 1.0), (5, 2.0)]
    (one,) = steering_of(
        {"edits": [{"op": "ablate", "vector": "traits/cold", "layers": [5]}], "preserve_norm": True}, library, ME
    ).flat()
    assert (type(one), one.layer, float(one.vector[0])) == (Ablate, 5, -2.0)
    assert [type(edit) for edit in steering_of(["both", "mine"], library, ME).flat()] == [Add, Ablate, Add, Add]


def test_a_layer_named_twice_is_steered_once(library) -> None:
    """Of a named vector, which makes an edit for each layer."""
    steering = steering_of({"op": "add", "vector": "calm", "layers": [5, 3, 5]}, library, ME)
    assert [edit.layer for edit in steering.flat()] == [5, 3]


@pytest.mark.parametrize("vector", ["calm", [1.0] * WIDTH])
def test_one_layer_and_several_together_are_refused(vector, library) -> None:
    with pytest.raises(InvalidSpec, match="not both"):
        steering_of({"op": "add", "vector": vector, "layer": 3, "layers": [5]}, library, ME)


@pytest.mark.parametrize(("place", "note"), [("data", "in `data`"), ("url", "at `url`"), ("file", "server's folder")])
def test_each_tensor_is_described(place, note) -> None:
    """Mebibytes have two decimals, of the bytes that are stored: 151,936 rows of two elements of bfloat16 take 607,744."""
    handle = a_handle((2,), prompt=tuple(range(151_935)), dtype=torch.bfloat16)
    (one,) = described(handle, {place: "x"})["points"]
    assert note in one.pop("note")
    assert one == {
        "layer": 2,
        "site": "resid_post",
        "selector": "resid_post[2]",
        "codec": "raw",
        "dtype": "bfloat16",
        "shape": [151_936, 2],
        "numel": 303_872,
        "size_mb": 0.58,
        "data_included": place == "data",
    }


async def test_logits_are_not_made_of_rounded_rows() -> None:
    """A server whose rows are in a codec by default says so, and delivers nothing."""
    handle = SiteCodecs.parse(["resid_post=full8", "z"]).parted(a_handle(sites=("resid_post", "z")))[0]
    said = await logits_of(handle, 10, lambda _: {"url": "x"})
    assert said["note"].startswith("left out: the server keeps rows in full8")
    assert (said["shape"], said["data_included"], "url" in said) == ([1, 4, 10], False, False)


async def test_logits_that_cannot_be_made_are_left_out_with_the_reason() -> None:
    """A lens that refuses the rows, here those of a file, does not lose the answer."""
    said = await logits_of(a_handle((3,)), 10, lambda _: {"url": "x"})
    assert said["note"].startswith("left out: lens: the handle is from a file")
    assert "url" not in said


#: Every place of a request where vectors stand by name.
PLACES: dict[str, Any] = {
    "steering": lambda name: name,
    "steering, in a list": lambda name: ["both", name],
    "steering.edits": lambda name: {"edits": [name], "preserve_norm": True},
    "vector": lambda name: {"op": "add", "vector": name, "layers": [3]},
    "probe": lambda name: {"op": "add_if", "vector": [1.0] * WIDTH, "probe": name, "threshold": 0.5, "layers": [3]},
    "monitors": lambda name: [{"probe": name, "layer": 3, "threshold": 1.0}],
    "monitors.steering": lambda name: [
        {"probe": "calm", "layer": 3, "threshold": 1.0, "do": "steer", "steering": name}
    ],
    "project": lambda name: {"project": name},
}


@pytest.mark.parametrize("name", ["calm", "mine", "single", "single/formal", "traits/warm", "traits/cold"])
@pytest.mark.parametrize("place", PLACES)
def test_a_name_of_one_direction_stands_wherever_a_name_does(place, name, library) -> None:
    """A file of one direction answers to its own name, and each direction to `name/direction`."""
    sign = -1.0 if name == "traits/cold" else 1.0
    field = place.partition(".")[0].partition(",")[0]
    said = PLACES[place](name)
    body = {"capture" if field == "project" else field if field == "monitors" else "steering": said}
    found = parsed_field(body, library, ME)
    if field == "project":
        assert found.capture is not None
        project = found.capture.project
        vectors = project if isinstance(project, LayerVectors) else project["formal"]
        assert float(vectors[5][0]) == 2.0 * sign
    elif place == "monitors":
        assert float(found.monitors[0].probe[0]) == sign
    else:
        steering = found.monitors[0].steering if field == "monitors" else found.steering
        last = steering.flat()[-1]
        assert float((last.probe if place == "probe" else last.vector)[0]) == sign * (1.0 if last.layer == 3 else 2.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("traits", "'traits' is not a vector: it holds directions warm, cold; give one of them, such as 'traits/warm'"),
        ("traits/calm", "'traits' has no direction 'calm'; give one of them, such as 'traits/warm'"),
        ("single/calm", "'single' has no direction 'calm'; give one of them, such as 'single/formal'"),
        ("calm/calm", "'calm' holds one vector for each layer, and no directions by name; give 'calm'"),
        ("both/calm", "'both' holds steering"),
        ("none/calm", "no vector or steering is called 'none'; known: 'both', 'calm', 'mine', 'single', 'traits'"),
    ],
)
@pytest.mark.parametrize("place", ["steering", "vector", "monitors"])
def test_a_name_that_means_no_vector_is_told_what_would(place, name, says, library) -> None:
    body = {"monitors" if place == "monitors" else "steering": PLACES[place](name)}
    with pytest.raises(InvalidSpec, match=re.escape(says)):
        parsed_field(body, library, ME)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (5, "steercap=5; give an object"),
        (
            {"captures": {}},
            r"unknown field 'captures'; did you mean 'capture'\? known: 'capture', 'steering', 'monitors', 'codec', 'deliver'",
        ),
        ({"capture": {"layer": 3}}, "steercap.capture has an unknown field 'layer'"),
        ({"capture": {"sae": "x"}}, "no SAE is called 'x'; known: none"),
        ({"capture": {"sae": ["x"]}}, "no SAE is called 'x'; known: none"),
        ({"capture": {"sae": {}}}, "no SAE is called {}; known: none"),
        ({"capture": {"sae": []}}, "sae=\\[\\] reads nothing"),
        ({"capture": {"reduce": "median"}}, "unknown reduce="),
        ({"codec": "full8"}, "steercap.codec is for rows"),
        ({"deliver": "/etc"}, "give 'fetch' or 'inline' or 'folder'"),
        ({"deliver": "folder"}, "this server has no folder; `serve --folder` gives it one"),
        ({"deliver": "inline", "steering": "calm"}, "give it beside capture="),
        (
            {"steering": "nothing"},
            "no vector or steering is called 'nothing'; known: 'both', 'calm', 'mine', 'single', 'traits'",
        ),
        ({"steering": {"op": "__class__"}}, "op='__class__'; known: .*'logit_bias'"),
        ({"steering": {"op": "logit_bais"}}, "op='logit_bais'; did you mean 'logit_bias'"),
        ({"steering": {"op": "add", "vector": "both"}}, "'both' holds steering"),
        ({"steering": {"op": "add", "vector": "traits"}}, "'traits' is not a vector: it holds directions warm, cold"),
        (
            {"steering": {"op": "add", "vector": "calm", "layer": 40}},
            r"Add: vector 'calm' has no vector for layer=40; .* layers \[3, 5\]; the nearest is 5",
        ),
        (
            {"steering": {"op": "add", "vector": "calm", "layers": [3, "x"]}},
            r"Add: layers=\[3, 'x'\]; give some of \[3, 5\]",
        ),
        ({"monitors": [{"probe": "calm", "threshold": 1}]}, "vectors for layers 3, 5; give layer="),
        (
            {"monitors": [{"probe": "calm", "threshold": 1, "layer": -4}]},
            "Monitor: probe 'calm' has no vector for layer=-4; .* count from 0 here",
        ),
        ({"steering": {"op": "add", "vector": [1.0, None], "layer": 4}}, "is not made of real numbers"),
        ({"steering": {"op": "add", "layer": 4}}, "Add: .*vector"),
        ({"steering": {"op": "add", "vector": [1.0], "layer": 4, "__init__": 1}}, "unknown field '__init__'"),
        ({"steering": []}, "changes nothing"),
        ({"steering": {"edits": "calm"}}, "give a list"),
    ],
)
def test_what_means_nothing_is_refused_by_name(body, says, library) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parsed_field(body, library, ME)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
known = st.sampled_from(
    [
        "capture",
        "steering",
        "codec",
        "deliver",
        "layers",
        "sites",
        "at",
        "tokens",
        "op",
        "vector",
        "edits",
        "layer",
        "project",
        "monitors",
        "probe",
        "threshold",
        "do",
    ]
)
bodies = st.recursive(
    json_values | st.sampled_from(["add", "calm", "traits/warm", "4:", "all"]),
    lambda inner: st.dictionaries(known, inner, max_size=5) | st.lists(inner, max_size=3),
    max_leaves=15,
)


def test_a_bias_of_logits_has_its_tokens_as_json_has_them(library) -> None:
    (bias,) = steering_of({"op": "logit_bias", "bias": {"7": 2.5}, "tokens": "last_prompt"}, library, ME).flat()
    assert isinstance(bias, LogitBias)
    assert bias.bias == {7: 2.5}
    for wrong in ({"x": 1.0}, {"9" * 5000: 1.0}, None, {}, {"7": "much"}):
        with pytest.raises(InvalidRequest):
            steering_of({"op": "logit_bias", "bias": wrong}, library, ME)


@given(bodies)
def test_no_body_is_an_error_of_ours(body) -> None:
    """Whatever is asked is a request, or one of the errors that clients are told of."""
    library = Library()
    try:
        parsed_field(body, library, ME)
    except InvalidRequest as error:
        assert len(str(error)) < 2000


# What has names


def test_each_key_sees_its_own(library, tmp_path) -> None:
    assert {one.name for one in library.of(ME)} == {"calm", "traits", "single", "both", "mine"}
    assert {one.name for one in library.of(OTHER)} == {"calm", "traits", "single", "both"}
    with pytest.raises(InvalidSpec, match="no vector or steering is called 'mine'"):
        library.get("mine", OTHER)
    library.add("calm", ME, content(LayerVectors({0: torch.zeros(WIDTH) + 7}), tmp_path))
    assert list(library.get("calm", ME).content) == [0]
    assert list(library.get("calm", OTHER).content) == [3, 5]
    assert not library.remove("traits", ME), "it is the operator's"
    assert library.remove("calm", ME)
    assert list(library.get("calm", ME).content) == [3, 5]
    described = library.get("traits", ME).described()
    assert described["directions"] == ["warm", "cold"]
    assert json.loads(json.dumps(described))["provenance"]["prompts"] == dict(
        library.get("traits", ME).content.provenance.prompts
    )


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was run",))


def test_files_are_vectors_and_nothing_is_run(library, tmp_path) -> None:
    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    for data in (b"", b"GGUF", b"x" * 100, pickle.dumps(Evil()), (tmp_path / "evil.pt").read_bytes()):
        with pytest.raises(InvalidFile, match="the file cannot be used") as failed:
            library.add("bad", ME, data)
        assert "/" not in str(failed.value).replace("and/or", ""), "a path of the server's"
    for name in ("", "../x", "a/b", "a" * 65, ".hidden", "é"):
        with pytest.raises(InvalidSpec, match="give letters"):
            library.add(name, ME, b"")
    small = Library(most_of_a_key=100)
    with pytest.raises(CaptureMemoryFull, match="of at most 100"):
        small.add("calm", ME, content(LayerVectors({0: torch.ones(WIDTH)}), tmp_path))


# Whose it is


@pytest.mark.parametrize(
    ("flags", "variable", "apart"),
    [
        ([], None, False),
        ([], "key", True),
        ([], "", False),
        (["--api-key", "one", "two"], None, True),
        (["--middleware", "json.loads"], None, True),
    ],
)
def test_keys_are_told_apart_where_the_server_asks_for_them(flags, variable, apart, monkeypatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    assert server.tells_clients_apart(server.read_flags("m", flags)) is apart


# What waits


def test_presets_are_known_by_what_they_do() -> None:
    """Of every name of the model; a preset of one name may be another after the next start."""
    one, other = (
        Presets(["m", "n"], {"calm": SteeringSpec([Cap(torch.ones(4), layer=1, high=high)])}) for high in (1, 2)
    )
    assert one.variants.keys() == {"m+calm", "n+calm"}
    assert one.variants["m+calm"] == one.variants["n+calm"] != other.variants["m+calm"]


def test_flags_of_conversations_are_part_of_a_servers_identity(tmp_path) -> None:
    """A template by its content, in a file or not; vLLM's defaults and flags of other things are none."""
    file, checkpoint = tmp_path / "chat.jinja", str(tiny_checkpoint("qwen3"))

    def said(*flags: str) -> str:
        return server.chat_flags(server.read_flags(checkpoint, flags))

    assert said() == said("--port", "1", "--reasoning-parser", "qwen3") == ""
    file.write_text("{{ messages }}")
    first = said("--chat-template", str(file))
    assert first == said("--chat-template", "{{ messages }}")
    file.write_text("{{ messages }} ")
    kwargs = said("--default-chat-template-kwargs", '{"enable_thinking": false}')
    assert len({first, said("--chat-template", str(file)), kwargs}) == 3
    assert kwargs == '{"default_chat_template_kwargs": {"enable_thinking": false}}'


OWN = "  {% if thinks %}think{% endif %}\n{% for one in messages %}[{{ one['content'] }}]{% endfor %}\n"
CHAT = [{"role": "user", "content": "Hi"}]


def tokenizer_over(flags: Sequence[str], own: Any) -> tuple[Any, Any]:
    """A client's tokenizer of a server with these flags, whose model has a chat template of its own; and a plain one."""
    name = str(tiny_checkpoint("qwen3"))
    plain = AutoTokenizer.from_pretrained(name)
    there = {"name": name, "revision": "", "digest": tokenizer_digest(plain), "template": template_digest(plain)}
    chats = server.chat_template(server.read_flags(name, flags), own)
    return tokenizer_here(there if chats is None else {**there, "chats": chats}, "http://there"), plain


@pytest.mark.parametrize(
    ("flags", "own", "template", "arguments"),
    [
        (["--chat-template", "({{ messages[0]['content'] }})"], OWN, "({{ messages[0]['content'] }})", {}),
        (["--default-chat-template-kwargs", '{"thinks": true, "no name": 1}'], OWN, OWN, {"thinks": True}),
        (
            ["--chat-template", f"\n{OWN}", "--default-chat-template-kwargs", '{"thinks": [1, null, "\\n\'"]}'],
            None,
            f"\n{OWN}",
            {"thinks": [1, None, "\n'"]},
        ),
    ],
)
def test_clients_render_chats_as_their_server(flags, own, template, arguments) -> None:
    """By its template and default arguments; those of a call come first."""
    found, plain = tokenizer_over(flags, own)
    render = partial(plain.apply_chat_template, CHAT, tokenize=False, chat_template=template)
    assert found.apply_chat_template(CHAT, tokenize=False) == render(**arguments)
    assert found.apply_chat_template(CHAT, tokenize=False, thinks=False) == render(thinks=False)


@pytest.mark.parametrize(
    "flags", [["--chat-template", "template_chatml.jinja"], ["--default-chat-template-kwargs", '{"a": 1}']]
)
def test_clients_render_no_chats_by_a_template_that_they_do_not_know(flags) -> None:
    """One that comes with vLLM, or one of several that the tokenizer has; texts are tokenised as ever."""
    found, plain = tokenizer_over(flags, {"default": OWN})
    with pytest.raises(InvalidRequest, match="clients do not know the chat template of this server; give token ids"):
        tokens_of(found, CHAT, special=False)
    assert tokens_of(found, "Hi", special=True) == tokens_of(plain, "Hi", special=True)


@pytest.mark.parametrize("own", [OWN, {"default": OWN}, None])
def test_clients_render_by_their_own_template_where_a_server_names_no_other(own) -> None:
    """Whatever form it gives contents."""
    found, plain = tokenizer_over(["--chat-template-content-format", "string"], own)
    assert found.chat_template == plain.chat_template


def test_adapters_are_known_by_what_is_loaded_of_them(tmp_path) -> None:
    """A copy is the same, whenever it was made and whatever lies beside it; other weights or settings are another."""
    checkpoint = Path(tiny_checkpoint("qwen3"))
    first, copy = tmp_path / "first", tmp_path / "copy"
    write_adapter(first, checkpoint, seed=0)
    shutil.copytree(first, copy, copy_function=shutil.copyfile)
    (copy / "README.md").write_text("A copy.")
    weights, config = copy / "adapter_model.safetensors", copy / "adapter_config.json"
    os.utime(weights, (1, 1))

    def said() -> dict[str, str]:
        modules = ["--enable-lora", "--lora-modules", f"first={first}", f"copy={copy}"]
        return server.adapters(server.read_flags(str(checkpoint), modules))

    found = [said()["first"], said()["copy"]]
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    found.append(said()["copy"])
    config.write_text(config.read_text() + " ")
    found.append(said()["copy"])
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_captures_have_an_owner_a_limit_and_an_end() -> None:
    now = [100.0]
    store = CaptureStore(time_to_live=60, most_bytes=30, most_of_a_key=20, clock=lambda: now[0])
    one = store.put(b"x" * 15, ME)
    assert store.get(one.name, OTHER) is None
    assert not store.remove(one.name, OTHER)
    assert store.get(one.name, ME) is one
    with pytest.raises(CaptureMemoryFull, match="15 bytes of your captures"):
        store.put(b"x" * 6, ME)
    store.put(b"x" * 15, OTHER)
    with pytest.raises(CaptureMemoryFull, match="30 bytes of captures wait on this server"):
        store.put(b"x", owner_of("Bearer third"))
    now[0] += 59
    assert store.expires_in(one) == 1
    now[0] += 2
    assert store.waiting_bytes() == 0, "also where nobody asks for it"
    assert store.get(one.name, ME) is None
    two = store.put(b"y", ME)
    assert store.remove(two.name, ME)
    assert not store.remove(two.name, ME)
    assert one.name != two.name


# Between the server and the network


class Inner:
    """A route that says what it was given, as a document or as events."""

    def __init__(self, *, events: bool = False) -> None:
        self.events = events
        self.seen: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        call = CURRENT.get()
        self.seen.append(json.loads(body))
        assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()
        if call is not None:
            call.results.append({"choice": 0})
        kind = b"text/event-stream" if self.events else b"application/json"
        parts = (
            [b'data: {"a": 1}\n', b'\ndata: {"a": 2}\n\ndata: [DO', b"NE]\n\n"] if self.events else [b'{"id', b'": 7}']
        )
        length = [] if self.events else [(b"content-length", str(sum(map(len, parts))).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *length]})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def post(
    inner: Inner, body: bytes, library: Library, presets: Presets | None = None, most: int = 10_000
) -> httpx.Response:
    app = SteercapRoute(inner, library, presets or Presets([], {}), most)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.post("/v1/chat/completions", content=body)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steering": "calm"}, "'steering' beside 'steercap'; give {'steercap': {'steering': ...}}"),
        ({"capture": True, "steercap": {}}, "'capture' beside 'steercap'"),
        ({"extra_body": {"steercap": {"steering": "calm"}}}, "'extra_body', which OpenAI's clients"),
        ({"extra_body": {"store_activations": True}}, "'extra_body', which OpenAI's clients"),
        ({"extra_body": {"steering": "calm"}}, "'extra_body', which OpenAI's clients"),
        ({"steer_cap": {"steering": "calm"}}, "unknown field 'steer_cap'; did you mean 'steercap'?"),
        ({"Steercap": {"steering": "calm"}}, "unknown field 'Steercap'; did you mean 'steercap'?"),
        ({"stearcap": {}, "stream": True}, "unknown field 'stearcap'; did you mean 'steercap'?"),
    ],
)
async def test_a_misspelt_or_misplaced_field_is_refused(wrong, said, library) -> None:
    """vLLM would ignore it and answer unsteered; on routes that take no such field too."""
    inner = Inner()
    answer = await post(inner, json.dumps({"model": "m", **wrong}).encode(), library)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    app = PassthroughRoute(inner, Presets(["m"], {}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        refused = await client.post("/v1/responses", json={"model": "m", **wrong})
    assert refused.status_code == 400
    assert not inner.seen


@pytest.mark.slow  # imports vLLM
def test_names_of_vllm_pass() -> None:
    """Every field of vLLM's requests, and names that no field has."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for kind in (ChatCompletionRequest, CompletionRequest):
        body = {name: {} for name in [*kind.model_fields, "user_id", "tags", "scope", "steps"]}
        assert misplaced(body) == ""
    assert misplaced({"steering": None, "extra_body": {"top_k": 5}}) == ""


async def test_a_plain_body_passes_as_it_is(library) -> None:
    inner = Inner()
    body = b'{"model":  "m", "messages": []}'
    answer = await post(inner, body, library)
    assert answer.json() == {"id": 7}
    assert inner.seen == [{"model": "m", "messages": []}]
    # What vLLM says of half a surrogate pair is vLLM's to say.
    assert (await post(inner, b'{"cache_salt": "\\ud800"}', library)).json() == {"id": 7}
    assert inner.seen[1:] == [{"cache_salt": "\ud800"}]


async def test_what_is_asked_is_taken_out_and_what_came_is_put_in(library) -> None:
    inner = Inner()
    answer = await post(inner, json.dumps({"model": "m", "steercap": {"capture": True}}).encode(), library)
    assert answer.json() == {"id": 7, "steercap": {"results": [{"choice": 0}]}}
    assert inner.seen == [{"model": "m"}]
    # A name that is escaped is the same name.
    answer = await post(inner, b'{"model": "m", "\\u0073teercap": {"capture": true}}', library)
    assert "steercap" in answer.json()


async def test_events_get_one_more_before_the_last(library) -> None:
    answer = await post(Inner(events=True), b'{"stream": true, "steercap": {"steering": "calm"}}', library)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[0] == '{"a": 1}'
    assert events[1] == '{"a": 2}'
    assert msgspec.json.decode(events[2])["steercap"] == {"results": [{"choice": 0}]}
    assert events[3:] == ["[DONE]"]


@pytest.mark.parametrize("events", [False, True])
async def test_an_error_of_ours_says_its_class(library, events) -> None:
    """In a header, before the answer; of a stream, which has begun, in an event of ours before its end."""

    class Failing(Inner):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            CURRENT.get().error = "LayerOutOfRange"
            if events:
                await super().__call__(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

    answer = await post(Failing(events=events), b'{"stream": true, "steercap": {"capture": true}}', library)
    if events:
        assert json.loads(answer.text.split("data: ")[-2])["steercap"] == {"error": "LayerOutOfRange"}
    else:
        assert answer.headers[ERROR_HEADER] == "LayerOutOfRange"
    refused = await post(Inner(), b'{"steercap": {"capture": {"sites": "attn.hook_q"}}}', library)
    assert (refused.status_code, refused.headers[ERROR_HEADER]) == (400, "UnknownName")


def test_a_preset_of_many_layers_is_said_at_the_start(tmp_path, caplog) -> None:
    """Added at every layer at an ordinary scale, a vector breaks texts."""
    file = tmp_path / "calm.safetensors"
    LayerVectors({3: torch.ones(WIDTH), 5: torch.ones(WIDTH)}).save(file)
    one = {"op": "add", "vector": "calm", "layers": [5]}
    Names.of(ServerSettings(vectors={"calm": file}, presets={"one": one}))
    assert not caplog.records
    Names.of(ServerSettings(vectors={"calm": file}, presets={"every": "calm", "one": one}))
    (record,) = caplog.records
    assert "preset 'every' adds at layers 3, 5" in record.getMessage()
    caplog.clear()
    edits = [{"op": "add", "vector": "layers"}]
    Names.of(
        ServerSettings(vectors={"layers": file}, presets={"one": one | {"vector": "layers"}, "all": {"edits": edits}})
    )
    (record,) = caplog.records
    assert "preset 'all'" in record.getMessage()


async def test_a_preset_steers_those_who_do_not_ask(library) -> None:
    presets = Presets(["m"], {"calm": steering_of("calm", library, OPERATOR)})
    assert presets.aliases == ("m+calm",)
    inner = Inner()
    assert "steercap" in (await post(inner, b'{"model": "m+calm"}', library, presets)).json()
    assert "steercap" not in (await post(inner, b'{"model": "m"}', library, presets)).json()


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"steercap": {"x": 1}}, 400, "unknown field"),
        ({"store_activations": "yes"}, 400, "give true or false"),
        ({"selectors": ["resid_post[3]"]}, 400, "store_activations: true"),
        ({"store_activations": True, "steercap": {"capture": True}}, 400, "give one of them"),
        ({"use_beam_search": True, "steercap": {"capture": True}}, 400, "each beam of a beam search"),
        ({"cache_salt": "\ud800", "steercap": {"capture": True}}, 400, "surrogate"),
        ({"prompt": ["a", {"\udfff": 1}], "model": "m+calm"}, 400, "surrogate"),
        ({"steercap": {"capture": True, "deliver": "\udc00"}}, 400, "surrogate"),
        ({"messages": "x" * 20_000}, 413, "longer than 10,000 bytes"),
    ],
)
async def test_what_cannot_be_done_is_said_before_the_engine_hears_of_it(body, status, says, library) -> None:
    inner = Inner()
    presets = Presets(["m"], {"calm": steering_of("calm", library, OPERATOR)})
    answer = await post(inner, json.dumps(body).encode(), library, presets)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert not inner.seen


@given(
    st.binary(max_size=200)
    | bodies.map(lambda body: json.dumps(body).encode())
    | bodies.map(lambda body: json.dumps({"steercap": body}).encode())
)
async def test_no_body_is_a_failure_of_the_server(body) -> None:
    class Quiet(Inner):
        async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": b"{}"})

    assert (await post(Quiet(), body, Library())).status_code in {200, 400, 413}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "temperature": NaN, "steercap": {"capture": true}}',
        b'{"model": "m", "top_p": 1e999, "steercap": {"capture": true}}',
        '{"model": "m", "steercap": {"capture": true}}'.encode("utf-16"),
        '{"model": "m", "steercap": {"capture": true}}'.encode("utf-8-sig"),
        '{"model": "m", "steercap": {"capture": true}}'.encode("utf-32-le"),
    ],
)
async def test_whatever_vllm_can_read_is_read_here(body, library) -> None:
    """vLLM would answer these as plain requests: the rows would be asked for, and missing."""
    inner = Inner()
    assert "steercap" in (await post(inner, body, library)).json()
    (seen,) = inner.seen
    wanted = json.loads(body)
    wanted.pop("steercap")
    assert repr(seen) == repr(wanted), "it is what was sent; repr, as NaN differs from itself"
    preset = Presets(["m"], {"calm": steering_of("calm", library, OPERATOR)})
    steered = body.decode(json.detect_encoding(body)).replace('"m"', '"m+calm"').replace('"steercap"', '"other"')
    assert "steercap" in (await post(Inner(), steered.encode("utf-8", "surrogatepass"), library, preset)).json()


async def test_a_vector_of_nan_is_refused(library) -> None:
    body = b'{"model": "m", "steercap": {"steering": {"op": "add", "vector": [NaN, 1.0], "layer": 0}}}'
    inner = Inner()
    assert (await post(inner, body, library)).status_code == 400
    assert not inner.seen


@pytest.mark.parametrize(
    "asked",
    [
        b'{"capture": {"tokens": %s7%s}}' % (b"[" * 900, b"]" * 900),
        b'{"capture": {"layers": "%s:"}}' % (b"9" * 5000),
        b'{"capture": {"layers": "::0"}}',
    ],
)
async def test_what_is_nested_or_long_is_refused(asked, library) -> None:
    inner = Inner()
    assert (await post(inner, b'{"steercap": %s}' % asked, library)).status_code == 400
    assert not inner.seen


async def test_an_event_that_holds_the_mark_of_the_end_is_left_alone(library) -> None:
    class Echo(Inner):
        async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
            found = CURRENT.get()
            assert found is not None
            found.results.append({"choice": 0})
            start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            await send(start)
            for part in (
                b'data: {"text": "data: [DONE]"}\n\n',
                b'data: {"text": "\\n\\ndata: [DONE]"}\n\n',
                b"data: [DO",  # an event in parts, of which none is complete
                b"NE]\n\n",
            ):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    answer = await post(Echo(), b'{"stream": true, "steercap": {"steering": "calm"}}', library)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert [json.loads(one).get("text") for one in events[:2]] == ["data: [DONE]", "\n\ndata: [DONE]"]
    assert json.loads(events[2])["steercap"] == {"results": [{"choice": 0}]}
    assert events[3:] == ["[DONE]"]


@pytest.mark.parametrize(("said", "kept"), [(b'{"id": 7}', 1), (b"null", 0)])
async def test_captures_that_nobody_was_told_of_go_at_once(said, kept, library) -> None:
    """vLLM's own answer is null where the client has gone."""
    store = CaptureStore()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        call = CURRENT.get()
        assert call is not None
        one = store.put(b"rows", call.owner)
        call.unsaid.append(lambda: store.remove(one.name, call.owner))
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        await send(start)
        await send({"type": "http.response.body", "body": said})

    answer = await post(app, b'{"steercap": {"capture": true}}', library)  # type: ignore[arg-type]
    assert answer.status_code == 200
    assert store.waiting_bytes() == 4 * kept


async def test_a_client_that_goes_in_the_middle_of_its_body_asks_nothing(library) -> None:
    inner = Inner()
    messages = [{"type": "http.request", "body": b'{"model": "m"}', "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(_message: Any) -> None:
        pytest.fail("nobody is there")

    await SteercapRoute(inner, library, Presets([], {}))({"type": "http", "headers": []}, receive, send)
    assert not inner.seen


@pytest.mark.parametrize("path", [*STEERED, *AT_REST, "/invocations", "/v1/chat/completions/render"])
async def test_other_routes_steer_by_presets_or_refuse(path, library) -> None:
    """A preset is never answered by the plain model, and a field of ours never without being done."""
    inner = Inner()
    app = PassthroughRoute(inner, Presets(["m"], {"calm": steering_of("calm", library, OPERATOR)}))
    steered: list[Any] = []

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        steered.append(CURRENT.get())
        await inner(scope, receive, send)

    app._app = watched
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.post(path, json={"model": "m"})).status_code == 200
        assert steered == [None]
        status = (await client.post(path, json={"model": "m+calm"})).status_code
        assert status == (200 if path in STEERED + AT_REST else 400)
        assert [one is not None and one.asked.steering is not None for one in steered[1:]] == (
            [path in STEERED] if status == 200 else []
        )
        halves = b'{"model": "m+calm", "cache_salt": "\\ud800"}'
        assert (await client.post(path, content=halves)).status_code == (200 if path in AT_REST else 400)
        for field in ({"steercap": {"capture": True}}, {"store_activations": True}):
            refused = await client.post(path, json={"model": "m", **field})
            assert refused.status_code == 400
            assert "/v1/chat/completions" in refused.json()["error"]["message"]


async def test_forms_are_read_for_presets_and_fields_of_ours(library) -> None:
    """The speech routes take forms: a preset, or a field of ours, in one is refused, and all else passes as it is."""
    seen: list[bytes] = []

    async def inner(_scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    app = PassthroughRoute(inner, Presets(["m"], {"calm": steering_of("calm", library, OPERATOR)}))
    sound = {"file": ("m+calm.wav", b'RIFF\r\n\r\nm+calm\r\nname="other"', "audio/wav")}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for data, status in (
            ({"model": "m+calm"}, 400),
            ({"language": "en", "model": "m+calm"}, 400),
            ({"model": "m", "steercap": '{"capture": true}'}, 400),
            ({"model": "m", "prompt": "m+calm"}, 200),
        ):
            found = await client.post("/v1/audio/transcriptions", data=data, files=sound)
            assert found.status_code == status, data
        typed = {**sound, "model": (None, "m+calm", "text/plain; charset=utf-8")}
        assert (await client.post("/v1/audio/transcriptions", files=typed)).status_code == 400
    (body,) = seen
    assert sound["file"][1] in body


@pytest.mark.parametrize(
    "line",
    [
        b"Content-Disposition: form-data; name=a\r\n",
        b"\r\n--0" + (b"\r\nContent-Disposition: form-data; name=" + b"a" * 190) * 9,
        b"\r\n--0\r\n",
        b"\r\n-",
    ],
)
async def test_a_form_is_read_in_a_moment_whatever_it_holds(line) -> None:
    """Other requests wait meanwhile: a search for fields through this body took 30 s."""
    passed: list[bytes] = []

    async def inner(_scope: Any, receive: Any, send: Any) -> None:
        passed.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    app = PassthroughRoute(inner, Presets(["m"], {}))
    body = b'--0\r\ncontent-disposition: form-data; name="file"\r\n\r\n' + line * ((25 << 20) // len(line))
    kinds = {"content-type": 'Multipart/form-data; charset=utf-8; boundary="0"'}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        begun = time.process_time()
        assert (await client.post("/v1/audio/transcriptions", content=body, headers=kinds)).status_code == 200
        assert time.process_time() - begun < 3
        asked = body[:60] + b"\r\n--0\r\nX: y\r\ncontent-disposition: form-data; name=steercap\r\n\r\n{}"
        assert (await client.post("/v1/audio/transcriptions", content=asked, headers=kinds)).status_code == 400
    assert passed == [body]


async def test_a_body_that_a_route_cannot_unfold_is_the_clients_doing() -> None:
    async def unfolds(_scope: Any, receive: Any, _send: Any) -> None:
        json.loads((await receive())["body"])

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(PassthroughRoute(unfolds, Presets([], {}))), base_url="http://test"
    ) as client:
        assert (await client.post("/invocations", content=b"[" * 100_000)).status_code == 400


def test_a_key_has_one_owner_however_its_scheme_is_written() -> None:
    assert owner_of("Bearer me") == owner_of("bEARER me")
    assert len({owner_of(one) for one in ("Bearer me", "Bearer Me", "Basic me", "", "Bearer  me")}) == 5


# Our own routes


@pytest.fixture
async def client(library):
    store = CaptureStore()
    app = Starlette(routes=Routes(None, store, library, (), identity={}).routes)  # type: ignore[arg-type]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test/v1/steercap", headers={"authorization": "Bearer me"}
    ) as found:
        yield found, store


class Endless:
    """A model, and its engine, whose work goes on until it is cancelled."""

    def __init__(self) -> None:
        self.began, self.cancelled, self.end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.serving = SimpleNamespace(here=lambda: self)
        self.sketching = SimpleNamespace(open=self.encode, states=self.encode)
        self.compiler = SimpleNamespace(captured=lambda _spec: ((), ()))
        self.armed: dict[Any, int] = {}

    def new_key(self) -> str:
        return "new"

    def require_open(self) -> None:
        pass

    async def encode(self, *_given: Any, **_options: Any) -> Any:
        self.began.set()
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    unembed = tokenize = encode


@pytest.mark.parametrize(
    ("asks", "body"),
    [
        ("POST /v1/steercap/encode", {"prompt": "Hello"}),
        ("POST /v1/steercap/captures/{capture}/lens", {}),
        ("POST /v1/steercap/vectors/new", {"more": ["good"], "less": ["bad"]}),
        ("POST /v1/steercap/sketches", {}),
        ("GET /v1/steercap/sketches/{sketch}", None),
    ],
)
async def test_work_ends_when_its_client_has_gone(asks, body, library) -> None:
    """Nobody waits for it, and it takes room and time from others."""
    model: Any = Endless()
    store, sketches = CaptureStore(), SketchStore()
    running = RunningSketch(record_of("one", "moments", None, {}), CaptureSpec(), EngineSketches(model))
    names = {
        "capture": store.put(encode(a_handle().as_saved()), owner_of("")).name,
        "sketch": sketches.keep(running, owner_of("")).name,
    }
    served = (
        InspectRoutes(model, store, library),
        PoolingRoutes(model, store, library, Presets([], {}), sketches, failures=Counter()),
        SketchRoutes(model, library, sketches),
    )
    sent = b"" if body is None else json.dumps(body).encode()
    head = f"{asks.format(**names)} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    async with listening(Starlette(routes=[route for one in served for route in one.routes])) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(head.encode() + sent)
        answered, began = asyncio.ensure_future(reader.read()), asyncio.ensure_future(model.began.wait())
        await asyncio.wait([answered, began], return_when=asyncio.FIRST_COMPLETED)
        assert began.done(), answered.result()
        writer.close()
        try:
            async with asyncio.timeout(10):
                await model.cancelled.wait()
        finally:
            model.end.set()
            await asyncio.wait([answered])
            await writer.wait_closed()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_page_of_another_origin_changes_nothing(kind, library) -> None:
    """A browser asks a server before it sends application/json across origins, and sends these without asking."""
    routes = InspectRoutes(Endless(), CaptureStore(), library).routes  # type: ignore[arg-type]
    async with listening(Starlette(routes=routes)) as url, httpx.AsyncClient(base_url=url) as client:
        headers = {"content-type": kind, "origin": "http://elsewhere.test"}
        body = b'{"more": ["good"], "less": ["bad"]}'
        answer = await client.post("/v1/steercap/vectors/new", content=body, headers=headers)
    assert answer.status_code == 400
    assert "send JSON as application/json" in answer.text


@pytest.mark.parametrize("asked", [{"layers": []}, {"positions": []}, {"layers": [], "positions": []}])
async def test_the_lens_of_no_rows_is_empty(asked, library) -> None:
    """The model is not asked, and would not answer."""
    store, handle = CaptureStore(), a_handle()
    name = store.put(encode(handle.as_saved()), owner_of("")).name
    routes = InspectRoutes(Endless(), store, library).routes  # type: ignore[arg-type]
    transport = httpx.ASGITransport(Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.post(f"/v1/steercap/captures/{name}/lens", json=asked)
    default = {"layers": [0, 1], "positions": handle.positions.tolist()}
    assert (answer.status_code, answer.json()) == (200, {**default, **asked, "top": []})


@pytest.mark.parametrize(
    ("asks", "status", "says"),
    [
        ("POST /captures/{capture}/lens", 413, "longer than 1,048,576 bytes"),
        ("GET /sketches/{sketch}?points=0,0", 400, "the sketch has 1 points"),
        ("GET /sketches/{sketch}?points=1", 400, "the sketch has no point '1'"),
    ],
)
async def test_what_our_routes_cannot_take_is_refused(asks, status, says, library) -> None:
    """A body that is too long has the status of vLLM's routes; no index of a point is left out."""
    model: Any = Endless()
    store, sketches = CaptureStore(), SketchStore()
    running = RunningSketch(
        record_of("one", "moments", None, {Point(0, "resid_post"): 0}), CaptureSpec(), EngineSketches(model)
    )
    capture = store.put(encode(a_handle().as_saved()), owner_of("")).name
    routes = [*InspectRoutes(model, store, library).routes, *SketchRoutes(model, library, sketches).routes]
    method, path = asks.format(capture=capture, sketch=sketches.keep(running, owner_of("")).name).split()
    transport = httpx.ASGITransport(Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://test/v1/steercap") as http:
        answer = await http.request(method, path, json={"layers": [0] * (1 << 20)} if method == "POST" else None)
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text


def leaving(gone: asyncio.Event) -> Any:
    """The messages of a client that sends an empty object and leaves at an event."""
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


async def test_a_sketch_is_free_after_a_client_that_goes_as_its_file_is_made(library, monkeypatch) -> None:
    """Others may read it, and it expires."""
    model: Any = Endless()
    sketches, gone = SketchStore(), asyncio.Event()
    running = RunningSketch(record_of("one", "moments", None, {}), CaptureSpec(), EngineSketches(model))
    one = sketches.keep(running, owner_of(""))

    class Ready(_SketchFile):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            gone.set()

    async def fetched(*_given: Any) -> Any:
        return SimpleNamespace(save=lambda path: path.write_bytes(b"rows") and path)

    monkeypatch.setattr(EngineSketches, "fetch", fetched)
    monkeypatch.setattr("steercap.server.statistics_routes._SketchFile", Ready)
    route = SketchRoutes(model, library, sketches).routes[1]
    scope = {"type": "http", "method": "GET", "headers": [], "query_string": b"", "path_params": {"name": one.name}}
    assert (await route.endpoint(Request(scope, leaving(gone)))).status_code == 400
    assert (one.users, one.turn.locked()) == (0, False)


async def test_nothing_is_kept_for_a_client_that_goes_as_its_answer_is_made(library, monkeypatch) -> None:
    """Both are known in the same turn of the event loop."""
    model: Any = Endless()
    sketches, gone = SketchStore(), asyncio.Event()

    async def opened(*_given: Any) -> RunningSketch:
        gone.set()
        return RunningSketch(record_of("one", "moments", None, {}), CaptureSpec(), EngineSketches(model))

    async def closed(record: Any) -> None:
        record.closed = True

    model.sketching.close = closed
    monkeypatch.setattr("steercap.server.statistics_routes.open_sketch", opened)
    (route, *_) = SketchRoutes(model, library, sketches).routes
    request = Request({"type": "http", "method": "POST", "headers": []}, leaving(gone))
    assert (await route.endpoint(request)).status_code == 400
    assert not sketches._held


async def test_the_identity_is_of_the_start(library) -> None:
    """Not of files that were changed since."""

    async def stats() -> Any:
        return Stats(**dict.fromkeys((one.name for one in dataclasses.fields(Stats)), 0))

    served = SimpleNamespace(
        stats=stats, identity=lambda: {"weights": "changed"}, points={}, origin={}, num_layers=1, hidden_size=WIDTH
    )
    served.serving = SimpleNamespace(model="org/name")
    routes = Routes(served, CaptureStore(), library, (), identity={"weights": "loaded"}).routes  # type: ignore[arg-type]
    transport = httpx.ASGITransport(Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as asked:
        assert (await asked.get("/v1/steercap/model")).json()["identity"] == {"weights": "loaded"}


async def test_captures_are_fetched_whole_or_in_parts_by_their_owner(client) -> None:
    http, store = client
    one = store.put(bytes(range(100)), ME)
    whole = await http.get(f"/captures/{one.name}")
    assert (whole.status_code, whole.content) == (200, bytes(range(100)))
    for asked, expected in (
        ("bytes=0-9", range(10)),
        ("bytes=95-", range(95, 100)),
        ("bytes=-3", range(97, 100)),
        ("bytes=90-400", range(90, 100)),
    ):
        part = await http.get(f"/captures/{one.name}", headers={"range": asked})
        assert (part.status_code, part.content) == (206, bytes(expected))
        assert part.headers["content-range"] == f"bytes {expected[0]}-{expected[-1]}/100"
    for asked in ("bytes=100-", "bytes=5-4", "bytes=-", "bytes=a-b"):
        assert (await http.get(f"/captures/{one.name}", headers={"range": asked})).status_code == 416
    tag = whole.headers["etag"]
    same = await http.get(f"/captures/{one.name}", headers={"range": "Bytes=0-9", "if-range": tag})
    assert (same.status_code, same.content) == (206, bytes(range(10)))
    for headers in ({"range": "lines=1-2"}, {"range": "bytes=0-1,4-5"}, {"range": "bytes=0-9", "if-range": '"other"'}):
        ignored = await http.get(f"/captures/{one.name}", headers=headers)
        assert (ignored.status_code, ignored.content) == (200, bytes(range(100)))
    head = await http.head(f"/captures/{one.name}", headers={"range": "bytes=0-9"})
    assert (head.status_code, head.headers["content-length"]) == (200, "100")
    other = {"authorization": "Bearer other"}
    assert (await http.get(f"/captures/{one.name}", headers=other)).status_code == 404
    assert (await http.delete(f"/captures/{one.name}", headers=other)).status_code == 404
    assert [found["id"] for found in (await http.get("/captures")).json()["data"]] == [one.name]
    assert (await http.get("/captures", headers=other)).json()["data"] == []
    assert (await http.delete(f"/captures/{one.name}")).json()["deleted"] is True
    assert (await http.get(f"/captures/{one.name}")).status_code == 404


async def test_vectors_are_put_listed_and_deleted(client, tmp_path) -> None:
    http, _ = client
    data = content(LayerVectors({2: torch.ones(WIDTH)}, name="joy", model="m"), tmp_path)
    assert (await http.put("/vectors/joy", content=data)).status_code == 201
    assert (await http.get("/vectors/joy")).json()["layers"] == [2]
    assert (await http.get("/vectors/joy", headers={"authorization": "Bearer other"})).status_code == 404
    assert {one["name"] for one in (await http.get("/vectors")).json()["data"]} >= {"joy", "calm"}
    assert (await http.put("/vectors/..%2Fx", content=data)).status_code in {400, 404}
    assert (await http.put("/vectors/junk", content=b"junk")).status_code == 400
    assert (await http.delete("/vectors/calm")).status_code == 404
    assert (await http.delete("/vectors/joy")).status_code == 200


async def test_files_that_come_count_with_those_that_are_kept(client, library, tmp_path) -> None:
    http, _ = client
    library.most_of_a_key = 200_000
    with library.receiving("first", ME) as came:
        came(100_000)
        data = content(LayerVectors({2: torch.ones(WIDTH)}), tmp_path)
        refused = await http.put("/vectors/second", content=data)
        assert (refused.status_code, "of at most" in refused.text) == (429, True)
    assert (await http.put("/vectors/second", content=data)).status_code == 201
    small = Library(most_of_all=100_000)
    small.add("calm", ME, data)
    with pytest.raises(CaptureMemoryFull, match="this server keeps at most 100,000 bytes"):
        small.add("calm", OTHER, data)


async def test_numbers_of_a_header_are_not_read_without_end(client) -> None:
    http, store = client
    one = store.put(b"x" * 10, ME)
    asked = {"range": f"bytes=0-{'9' * 5000}"}
    assert (await http.get(f"/captures/{one.name}", headers=asked)).status_code == 416
    for length in ("9" * 5000, "10000000000"):
        headers = {"content-length": length}
        assert (await http.put("/vectors/long", content=b"x", headers=headers)).status_code == 413


async def test_a_long_file_is_not_read_to_its_end(client, library) -> None:
    http, _ = client
    library.most_bytes = 1000
    read = 0

    async def endless():
        nonlocal read
        while True:
            read += 100
            yield b"x" * 100

    assert (await http.put("/vectors/long", content=endless())).status_code == 413
    assert read < 5000


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # vLLM leaves its socket open
def test_a_port_in_use_names_its_option() -> None:
    """At once, before anything is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        flags = server.read_flags(str(tiny_checkpoint("llama")), ["--host", "127.0.0.1", "--port", str(port)])
        with pytest.raises(OSError, match=f"in use: --host 127.0.0.1 --port {port}; give another"):
            server.listening(flags)


def test_warnings_are_said_beside_a_library_that_silences_the_root_logger() -> None:
    """`build_app` of vLLM imports one that does: drops of a recorder were counted, and never logged."""
    before = logging.getLogger().level
    try:
        logging.getLogger().setLevel(logging.ERROR)
        assert logging.getLogger("steercap.server.recording").isEnabledFor(logging.WARNING)
    finally:
        logging.getLogger().setLevel(before)


class Counting:
    """What a store needs of a running sketch: tokens, and its end."""

    def __init__(self, tokens: str = "all") -> None:
        self.spec = CaptureSpec(tokens=tokens, codec="raw")
        self.tokens = self.spec.selection
        self.closed = False

    async def aclose(self) -> None:
        self.closed = True


async def test_a_sketch_that_nothing_uses_is_freed() -> None:
    """Not while a request uses it; it belongs to its key, and requests join sketches of one selection of tokens."""
    now = [0.0]
    store = SketchStore(10.0, clock=lambda: now[0])
    made: list[Any] = [Counting(), Counting(), Counting("prompt")]
    first, second, other = (store.keep(one, ME) for one in made)
    with pytest.raises(SketchClosed, match="it is not yours"):
        store.get(first.name, "somebody")
    with pytest.raises(InvalidRequest, match="must read the same tokens"), store.joined([first.name, other.name], ME):
        raise AssertionError
    with store.joined([first.name], ME) as joined:
        assert joined == (made[0],)
        now[0] = 11.0
        store.sweep()
        await asyncio.sleep(0)
        assert [one.closed for one in made] == [False, True, True]
    now[0] = 20.0
    store.sweep()
    assert store.get(first.name, ME).running is made[0]
    now[0] = 22.0
    store.sweep()
    await asyncio.sleep(0)
    assert made[0].closed
    with pytest.raises(SketchClosed, match="nothing used it for 10 s"), store.joined([second.name], ME):
        raise AssertionError
