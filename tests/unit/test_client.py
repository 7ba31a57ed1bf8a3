"""What a client makes of specs, parameters and answers, without an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from handles import a_handle
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import steercap
from steercap import (
    Ablate,
    Add,
    AddIf,
    Cap,
    CaptureHandle,
    CaptureSpec,
    LogitBias,
    LowRank,
    Replace,
    SetProjection,
    SteeringSpec,
)
from steercap.captures import files
from steercap.client import RemoteModel
from steercap.client.asks import MOST_NUMBERS, NotAsJSON, capture_json, require_specs, steering_json
from steercap.client.connection import ERROR_HEADER
from steercap.client.model import LACKING
from steercap.client.sampling import DEFAULTS, sampling_json
from steercap.client.uploads import encoded
from steercap.core.attention import AttentionRule
from steercap.errors import (
    CaptureIncomplete,
    CaptureMemoryFull,
    InvalidPrompt,
    InvalidRequest,
    InvalidSetting,
    InvalidSpec,
    LayerOutOfRange,
    ModelClosed,
    ServerFailure,
    SteeringNotApplied,
    WrongEventLoop,
)
from steercap.server.asks import capture_of, steering_of
from steercap.server.call import described
from steercap.server.folder import owner_of
from steercap.server.library import Library, read
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors
from steercap.sync import RemoteModel as Blocking
from steercap.testing import tiny_checkpoint

ME = owner_of("Bearer me")
CALM = LayerVectors({3: torch.randn(8), 5: torch.randn(8)})

# Specs


def told(value: Any) -> Any:
    """What a server reads of what a client says."""
    return json.loads(json.dumps(value, allow_nan=False))


def meant(value: Any) -> Any:
    """A range is said as its layers."""
    return tuple(value) if isinstance(value, range) else value


def alike(one: SteeringSpec, other: SteeringSpec) -> None:
    """Two specs hold the same edits, to the last bit."""
    assert one.preserve_norm == other.preserve_norm
    assert len(one.flat()) == len(other.flat())
    for here, there in zip(one.flat(), other.flat(), strict=True):
        assert type(here) is type(there)
        for field in dataclasses.fields(here):
            left, right = meant(getattr(here, field.name)), getattr(there, field.name)
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right, field.name
    assert [place for _, place in one.segments()] == [place for _, place in other.segments()]


layers = st.one_of(
    st.just("all"),
    st.integers(-9, 9),
    st.lists(st.integers(0, 9), min_size=1),
    st.builds(slice, st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9), st.none() | st.integers(1, 3)),
    st.builds(range, st.integers(0, 3), st.integers(4, 9), st.integers(1, 3)),
    st.lists(st.booleans(), min_size=1).filter(any),
)
term = st.one_of(
    st.sampled_from(["all", "prompt", "generated", "last_prompt"]),
    st.integers(-20, 20),
    st.builds(slice, st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9), st.none() | st.integers(1, 3)),
    st.lists(st.booleans(), min_size=1).filter(any),
)
tokens = term | st.lists(term, min_size=1, max_size=3).filter(lambda found: not all(isinstance(x, bool) for x in found))
rows = {
    "tokens": tokens,
    "allow_nonfinite": st.booleans(),
    "before_edits": st.booleans(),
}
sites = st.sampled_from(["resid_post", ["z", "attn_out"], "hook_resid_pre", "model.layers.*.mlp.input"])
points = st.lists(
    st.sampled_from(["resid_post[5]", "resid_mid", (-1, "z"), "blocks.2.attn.hook_z", "model.layers.3.mlp.output"]),
    min_size=1,
)
captures = st.one_of(
    st.builds(CaptureSpec, layers=layers, sites=sites, codec=st.sampled_from([None, "raw", "full8", "int4"]), **rows),
    st.builds(
        CaptureSpec,
        at=points,
        codec_k=st.none() | st.integers(1, 99),
        codec=st.just("rp8"),
        codec_seed=st.integers(0, 9),
        **rows,
    ),
    st.builds(CaptureSpec, layers=layers, reduce=st.sampled_from(["mean", "sum", "max", "last"]), tokens=tokens),
    st.builds(CaptureSpec, layers=layers, attention=st.integers(1, 128), tokens=st.sampled_from(["all", slice(0, 9)])),
)


@given(captures)
def test_a_capture_is_read_as_what_was_said(spec) -> None:
    found = capture_of(told(capture_json(spec, None)), Library(), ME)
    assert found == (spec if spec.at is not None else dataclasses.replace(spec, layers=meant(spec.layers)))


def vectors(width: int = 8) -> st.SearchStrategy[list[float]]:
    return st.lists(
        st.floats(width=32, min_value=-(2.0**90), max_value=2.0**90), min_size=width, max_size=width
    ).filter(any)


number = st.floats(-1e6, 1e6).map(lambda value: value or 1.0)
scope = {
    "layers": layers,
    "tokens": tokens,
    "site": st.sampled_from(["resid_post", "z"]),
    "part": st.none() | st.just(2),
}
edits = st.one_of(
    st.builds(Add, vectors(), number, relative=st.booleans(), **scope),
    st.builds(AddIf, vectors(), vectors(), threshold=number, scale=number, **scope),
    st.builds(Ablate, vectors(), **scope),
    st.builds(Cap, vectors(), low=st.none(), high=number, **scope),
    st.builds(SetProjection, vectors(), number, **scope),
    st.builds(LowRank, st.tuples(vectors(), vectors()), st.tuples(vectors(), vectors()), scale=number, **scope),
    st.builds(
        Replace,
        st.tuples(vectors(), vectors()),
        st.just([3, -1]),
        elements=st.none() | st.just(slice(1, 4)),
        layer=st.just(1),
    ),
    st.builds(LogitBias, st.dictionaries(st.integers(0, 99), number, min_size=1), tokens),
)


@given(st.lists(edits, min_size=1, max_size=3), st.booleans())
def test_steering_is_read_as_what_was_said(given_, keeps) -> None:
    """As JSON, and as a file."""
    spec = SteeringSpec(given_, preserve_norm=keeps and not all(isinstance(edit, LogitBias) for edit in given_))
    alike(spec, steering_of(told(steering_json(spec)), Library(), ME))


@pytest.mark.parametrize("far", [10**9, 2**31, sys.maxsize, 10**30])
def test_slices_reach_as_far_as_they_do_here(far) -> None:
    """Bounds beyond every sequence and model, as `slice(0, sys.maxsize)`, are those of an ordinary slice."""
    for part in (slice(0, far), slice(-far, None), slice(None, None, far)):
        for spec in (CaptureSpec(layers=part), CaptureSpec(layers=[1], tokens=[part, 3])):
            assert capture_of(told(capture_json(spec, None)), Library(), ME) == spec
        spec = SteeringSpec([Add(torch.ones(4), layers=part, tokens=part), LogitBias({3: 1.0}, part)])
        alike(spec, steering_of(told(steering_json(spec)), Library(), ME))
        rows = SteeringSpec([Replace(torch.ones(2, 4), [3, 1], elements=part, layer=1)])
        alike(rows, steering_of(told(steering_json(rows)), Library(), ME))


def test_what_json_does_not_hold_is_a_file() -> None:
    """Long vectors, norms kept by a part of a spec, bounds of infinity: the server reads the same from it."""
    nested = SteeringSpec(
        [SteeringSpec([Add(torch.randn(8), layer=1)], preserve_norm=True), Ablate(torch.randn(8), layer=2)]
    )
    for spec in (
        nested,
        SteeringSpec([Add(torch.randn(MOST_NUMBERS + 1), layer=1)]),
        SteeringSpec([LogitBias(torch.randn(9))]),
    ):
        with pytest.raises(NotAsJSON):
            steering_json(spec)
        alike(spec, read(encoded(spec)))
    flat = SteeringSpec(
        [SteeringSpec([Add(torch.randn(8), layer=1)]), Ablate(torch.randn(8), layer=2)], preserve_norm=True
    )
    assert len(steering_json(flat)["edits"]) == 2
    for content in (CALM, DirectionSet({"warm": CALM, "cold": -1 * CALM})):
        assert type(read(encoded(content))) is type(content)
    with pytest.raises(InvalidSpec, match="cannot be uploaded"):
        encoded({"a": 1})


def test_what_a_server_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"CaptureSpec\(gather=\) cannot be sent to a server"):
        require_specs(CaptureSpec(gather=False))
    with pytest.raises(InvalidRequest, match=r"CaptureSpec\(sae=\) .* SAE.encode"):
        require_specs(CaptureSpec(sae=object()))
    with pytest.raises(InvalidRequest, match=r"CaptureSpec\(calibration=\)"):
        require_specs(CaptureSpec(calibration=object()))
    with pytest.raises(InvalidSpec, match="capture='all'; give a CaptureSpec"):
        require_specs("all")


def test_each_field_of_a_capture_is_said_or_refused() -> None:
    """A field that a CaptureSpec gets later is not left out in silence: it is said, and the server reads or refuses it."""
    fields = {field.name for field in dataclasses.fields(CaptureSpec)}
    from steercap.client.asks import _REFUSED
    from steercap.server.asks import CAPTURE

    by_name = {"sae"}  # over HTTP an SAE is the name of one of the operator's; here it is the SAE itself
    assert fields - set(_REFUSED) == set(CAPTURE) - by_name


# Sampling parameters


def test_parameters_left_out_are_vllms_own() -> None:
    from vllm import SamplingParams

    assert sampling_json(None) == DEFAULTS
    plain = SamplingParams()
    assert {name: getattr(plain, name) for name in DEFAULTS} == DEFAULTS
    assert sampling_json(SamplingParams()) == DEFAULTS
    asked = sampling_json(SamplingParams(temperature=0.5, stop=["a"], logit_bias={3: 1.5}, n=2, seed=4))
    assert {name: value for name, value in asked.items() if DEFAULTS.get(name) != value} == {
        "temperature": 0.5,
        "stop": ["a"],
        "logit_bias": {3: 1.5},
        "n": 2,
        "seed": 4,
    }
    assert sampling_json({"max_tokens": None})["max_tokens"] is None
    for wrong, says in (
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"extra_args": {}}, "'extra_args' cannot be sent to a server"),
        ({"detokenize": False}, "'detokenize' cannot be sent to a server"),
        (SamplingParams(detokenize=False), "'detokenize' cannot be sent to a server"),
        (3, "give vLLM's SamplingParams, or a dict"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            sampling_json(wrong)


def test_what_vllm_itself_sets_is_not_refused() -> None:
    """With `prompt_logprobs` it sets `skip_reading_prefix_cache`, which nobody can send."""
    from vllm import SamplingParams

    assert sampling_json(SamplingParams(prompt_logprobs=1)) == sampling_json({"prompt_logprobs": 1})
    with pytest.raises(InvalidRequest, match="skip_reading_prefix_cache"):
        sampling_json(SamplingParams(skip_reading_prefix_cache=True))


def test_a_bias_that_a_server_would_bound_is_refused() -> None:
    """vLLM's server makes 500 and -inf of `logit_bias` 100 and -100; the engine itself takes them as they are."""
    from vllm import SamplingParams

    assert SamplingParams.from_optional(logit_bias={3: 500.0, 4: -math.inf}).logit_bias == {3: 100.0, 4: -100.0}
    assert sampling_json({"logit_bias": {3: 100, 4: -100.0}})["logit_bias"] == {3: 100, 4: -100.0}
    for wrong in (100.5, -500, math.inf, -math.inf, math.nan, np.float32(1e6)):
        for given_ in ({"logit_bias": {3: 1.0, 7: wrong}}, SamplingParams(logit_bias={3: 1.0, 7: wrong})):
            with pytest.raises(InvalidRequest, match=r"logit_bias\[7\]=.*steering=LogitBias"):
                sampling_json(given_)


# Answers


DESCRIBED = {
    "model": "there/m",
    "revision": "",
    "dtype": "float32",
    "num_layers": 2,
    "identity": {"name": "m"},
    "hidden_size": 8,
    "points": [{"layer": 1, "site": "resid_post", "shape": [8], "dtype": "float32", "shards": 1}],
}


def model_of(
    answer: Any = None,
    *,
    says: Any = DESCRIBED,
    routes: Sequence[Route] = (),
    context: int | None = None,
    **arguments: Any,
) -> RemoteModel:
    """A connection to a server that says `answer` to completions."""
    card = {"max_model_len": context}

    async def completions(request: Any) -> Any:
        seen.append(await request.json())
        return answer

    async def models(_request: Any) -> Any:
        return JSONResponse({"data": [{"id": "m", **card}, {"id": "m+calm", **card}, {"id": "lora", "parent": "m"}]})

    async def model(_request: Any) -> Any:
        return JSONResponse(says) if says is not None else JSONResponse({"detail": "Not Found"}, 404)

    seen: list[Any] = []
    routes = [
        *routes,
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/steercap/model", model),
    ]
    transport = httpx.ASGITransport(Starlette(routes=routes))
    found = RemoteModel("http://there/v1", transport=transport, **arguments)
    found.seen = seen
    return found


def choice(**others: Any) -> dict[str, Any]:
    return {"index": 0, "text": "a", "token_ids": [1], "prompt_token_ids": [3], **others}


async def test_a_connection_says_what_the_server_has() -> None:
    async with model_of(model="m+calm") as model:
        assert (model.url, model.served_name, model.model) == ("http://there", "m+calm", "there/m")
        assert [str(point) for point in model.points] == ["resid_post[1]"]
        assert re.fullmatch(
            r"RemoteModel\(http://there, 'm\+calm', open: \d+ layers × \d+, \w*; taps at layer 1 of resid_post\)",
            repr(model),
        )
        for name in LACKING:
            with pytest.raises(
                AttributeError, match=f"'RemoteModel' object has no attribute '{name}'; {re.escape(LACKING[name])}"
            ):
                getattr(model, name)
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = model.nothing
        await model.start()
    with pytest.raises(ModelClosed):
        _ = model.points


async def test_a_text_is_read_as_the_model_reads_it_there() -> None:
    """Where vLLM adds no special tokens, token ids are sent, which its completions leave as they are."""

    async def tokenize(request: Any) -> Any:
        asked.append(await request.json())
        return JSONResponse({"tokens": [7]})

    asked: list[dict[str, Any]] = []
    route = Route("/tokenize", tokenize, methods=["POST"])
    answer = JSONResponse({"choices": [choice()]})
    says = DESCRIBED | {"texts": {"add_special_tokens": False, "do_lower_case": True}}
    async with model_of(answer, says=says, routes=[route]) as model:
        await model.tokenize("A")
        await model.tokenize("A", add_special_tokens=True)
        await model.generate("A")
        await model.generate("A", add_special_tokens=True)
        assert [one["prompt"] for one in model.seen] == [[7], [7]]
        assert [(one["prompt"], one["add_special_tokens"]) for one in asked] == [("a", False), ("a", True)] * 2
    async with model_of(answer, routes=[route]) as model:
        await model.generate("A")
        assert [one["prompt"] for one in model.seen] == ["A"]
        assert await model.tokenize("A") == [7]
        assert asked[-1]["add_special_tokens"] is True


@pytest.mark.parametrize(
    ("says", "variants"),
    [
        ({"presets": ["m+calm"], "variants": {"m+calm": "f0", "lora": "a1"}}, {"m+calm": "f0", "lora": "a1"}),
        ({"presets": ["m+calm"], "variants": {"m+calm": "f0"}}, {"m+calm": "f0", "lora": "lora"}),
        ({"presets": ["m+calm"]}, {"m+calm": "m+calm", "lora": "lora"}),
    ],
    ids=["all at the start", "an adapter loaded later", "an older server"],
)
async def test_a_preset_and_an_adapter_are_other_models(says, variants) -> None:
    """A run over one does not go on over the other, or over the plain model, whose identity is that of before."""
    for name in (None, "m", "m+calm", "lora"):
        async with model_of(model=name, says={**DESCRIBED, **says}) as model:
            variant = {"variant": variants[name]} if name in variants else {}
            assert model.identity() == {"name": "m", **variant}


@pytest.mark.parametrize("name", ["calm#2", "calm?x", "calm%41", "..", "a/b", "", ".a", "a b", "é", "a" * 65, "a\n", 5])
async def test_a_name_that_a_url_would_cut_is_refused(name) -> None:
    """Such as "calm#2", which would replace "calm"."""
    async with model_of() as model:
        for call in (
            model.upload_vectors(name, SteeringSpec([Add(torch.ones(8), layer=1)])),
            model.delete_vectors(name),
        ):
            with pytest.raises(InvalidSpec, match="letters, digits, dots"):
                await call


async def test_what_a_server_does_not_say_is_an_error(tmp_path) -> None:
    """How it reads specs, and its tokenizer, unless the files here make the same one."""
    async with model_of() as model:
        with pytest.raises(ServerFailure, match="does not say how it reads specs; use one version on both sides"):
            model.check_capture(CaptureSpec())
        with pytest.raises(ServerFailure, match="names no tokenizer; give token ids"):
            _ = model.tokenizer
    there = {"name": str(tiny_checkpoint("qwen3")), "revision": "", "digest": "another", "template": ""}
    for said, says in ((there, "is not that of"), ({**there, "name": str(tmp_path)}, "cannot be read on this machine")):
        async with model_of(says={**DESCRIBED, "tokenizer": said}) as model:
            with pytest.raises(ServerFailure, match=says):
                _ = model.tokenizer


async def test_what_is_no_server_of_ours_is_refused() -> None:
    with pytest.raises(ServerFailure, match="not one of steercap: it can neither capture nor steer"):
        await model_of(says=None).start()
    with pytest.raises(ServerFailure, match="same version"):
        await model_of(says={"model": "m"}).start()
    with pytest.raises(InvalidRequest, match="no model 'other'; known: 'm', 'm\\+calm'"):
        await model_of(model="other").start()
    with pytest.raises(
        ServerFailure, match=r"http://127.0.0.1:9 cannot be reached, or the connection broke: ConnectError"
    ):
        await RemoteModel("http://127.0.0.1:9").start()
    for wrong in ("there:8000", "", None, "ftp://there"):
        with pytest.raises(InvalidSetting, match="give that of a server"):
            RemoteModel(wrong)


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (
            JSONResponse({"error": {"message": "layer 9"}}, 400, {ERROR_HEADER: "LayerOutOfRange"}),
            LayerOutOfRange,
            "layer 9",
        ),
        (JSONResponse({"error": {"message": "no (parameter=steercap)"}}, 400), InvalidRequest, "no$"),
        (JSONResponse({"error": {"message": "no"}}, 400, {ERROR_HEADER: "SystemExit"}), InvalidRequest, "no"),
        (
            JSONResponse({"error": {"message": "no"}}, 500, {ERROR_HEADER: "SteeringNotApplied"}),
            SteeringNotApplied,
            "no",
        ),
        (JSONResponse({"error": {"message": "full"}}, 429), CaptureMemoryFull, "full"),
        (JSONResponse({"error": "Unauthorized"}, 401), ServerFailure, "refuses the API key"),
        (JSONResponse("what?", 503), ServerFailure, "answered 503: what"),
        (JSONResponse({"choices": [choice()]}), SteeringNotApplied, "does not confirm that the edits"),
        (
            JSONResponse({"choices": [choice()], "steercap": {"results": []}}),
            SteeringNotApplied,
            "confirm that the edits",
        ),
        (
            JSONResponse({"choices": [choice()], "steercap": {"results": [{"choice": 1, "steering": {}}]}}),
            SteeringNotApplied,
            "does not confirm that the edits",
        ),
        (JSONResponse({"nothing": 1}), ServerFailure, "does not answer as this version of steercap expects"),
        (JSONResponse([]), ServerFailure, "does not answer as this version"),
    ],
)
async def test_an_answer_that_is_none_is_an_error(answer, kind, says) -> None:
    """Steering that the server says nothing of did not happen, whatever the text."""
    async with model_of(answer) as model:
        with pytest.raises(kind, match=says) as raised:
            await model.generate("a", steering=Add(torch.ones(8), layer=1))
        assert type(raised.value) is kind


async def test_a_capture_that_does_not_come_is_an_error() -> None:
    async with model_of(JSONResponse({"choices": [choice()]})) as model:
        with pytest.raises(ServerFailure, match="does not answer"):
            await model.generate("a", capture_layers=[1])
        assert await model.generate("a") == "a"
        assert model.seen[0]["steercap"] == {"capture": {"layers": [1]}}
        assert "steercap" not in model.seen[1], "a plain request asks nothing of steercap"


@pytest.mark.parametrize(
    ("asked", "reason", "warns"),
    [
        ({"max_tokens": 2}, "length", True),
        ({"max_tokens": None}, "length", True),
        ({"max_tokens": 2}, "stop", False),
        ({"max_tokens": 1}, "length", False),
        ({"max_tokens": None}, "full", False),
    ],
)
@pytest.mark.parametrize("name", ["m", "lora"])
async def test_a_text_that_the_server_ends_by_its_own_settings_is_warned_of(name, asked, reason, warns) -> None:
    """Its `max_new_tokens` bounds every `max_tokens`; a text as long as asked, or as the context, is whole."""
    context = 2 if reason == "full" else 8
    done = choice(finish_reason="stop" if reason == "stop" else "length")
    event = b"data: " + json.dumps({"choices": [done]}).encode() + b"\n\ndata: [DONE]\n\n"
    says = pytest.warns(UserWarning, match="ends texts after 1 tokens") if warns else nullcontext()
    async with model_of(JSONResponse({"choices": [done]}), context=context, model=name) as model:
        with says:
            assert await model.generate([3], asked) == "a"
        assert model.seen[0]["max_tokens"] == (asked["max_tokens"] or context - 1)
    says = pytest.warns(UserWarning, match="ends texts after 1 tokens") if warns else nullcontext()
    stream = StreamingResponse(iter([event]), media_type="text/event-stream")
    async with model_of(stream, context=context, model=name) as model:
        with says:
            assert [chunk.text async for chunk in model.stream([3], asked)] == ["a", ""]


async def test_a_text_that_no_monitor_watched_is_withheld() -> None:
    """A server that knows no monitors answers as if none had been asked for."""
    async with model_of(JSONResponse({"choices": [choice()]})) as model:
        with pytest.raises(ServerFailure, match="does not report the monitors"):
            await model.run("a", monitors=[steercap.Monitor(torch.ones(4), threshold=1.0, layer=0)])


async def test_arguments_that_a_server_does_not_take_are_refused_by_name() -> None:
    async with model_of(JSONResponse({"choices": [choice()]})) as model:
        with pytest.raises(ServerFailure, match="does not say how it reads specs"):
            await model.encode("a")
        with pytest.raises(InvalidRequest, match="lora_request= cannot be sent"):
            await model.generate("a", lora_request=object())
        with pytest.raises(InvalidPrompt, match="'multi_modal_data' cannot be sent to a server"):
            await model.generate({"prompt": "a", "multi_modal_data": {}})
        with pytest.raises(InvalidRequest, match="takes one prompt"):
            _ = [chunk async for chunk in model.stream(["a", "b"])]
        with pytest.raises(InvalidRequest, match="2 entries for 1 prompts"):
            await model.generate(["a"], steering=[None, None])
        with pytest.raises(InvalidSpec, match="steering=5"):
            await model.generate("a", steering=5)
        assert model.seen == []
        await model.generate("a", priority=3)
        assert model.seen[0]["priority"] == 3


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    """No text without its end."""
    events = [
        b'data: {"choices": [{"index": 0, "text": "a", "token_ids": [1], "prompt_token_ids": [3]}]}\n\n',
        b'data: {"error": {"message": "layer 9", "code": 400}}\n\n',
        b'data: {"steercap": {"error": "LayerOutOfRange"}}\n\n',
        b"data: [DONE]\n\n",
    ]

    async def streamed(kept: list[int]) -> list[str]:
        answer = StreamingResponse(iter([events[index] for index in kept]), media_type="text/event-stream")
        async with model_of(answer) as model:
            return [chunk.text async for chunk in model.stream("a", steering=None)]

    assert await streamed([0, 3]) == ["a", ""]
    with pytest.raises(ServerFailure, match="broke off before its end"):
        await streamed([0])
    with pytest.raises(InvalidRequest, match="layer 9"):
        await streamed([0, 1, 3])
    with pytest.raises(LayerOutOfRange, match="layer 9"):
        await streamed([0, 1, 2, 3])


#: Characters at which Python's `str.splitlines` ends a line, and JSON does not.
BREAKS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


async def test_a_stream_may_hold_any_text() -> None:
    """Separators of lines and paragraphs stand in JSON as they are; parts of the answer end anywhere."""
    event = {"choices": [{"index": 0, "text": f"a{BREAKS}\nb", "token_ids": [1], "prompt_token_ids": [3]}]}
    whole = f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\ndata: [DONE]\n\n".encode()
    answer = StreamingResponse((whole[at : at + 1] for at in range(len(whole))), media_type="text/event-stream")
    async with model_of(answer) as model:
        assert [chunk.text async for chunk in model.stream("a", steering=None)] == [f"a{BREAKS}\nb", ""]


def test_it_belongs_to_its_event_loop() -> None:
    model = model_of(JSONResponse({"choices": [choice()]}))
    with pytest.raises(ModelClosed, match="never started"):
        asyncio.run(model.stats())
    asyncio.run(begun(model))
    with pytest.raises(WrongEventLoop, match="this connection was started in another event loop"):
        asyncio.run(model.stats())
    asyncio.run(model.aclose())
    gc.collect()


async def begun(model: RemoteModel) -> None:
    await model.start()


def test_a_start_that_failed_can_be_tried_again() -> None:
    """In another event loop too, and without await; a model that was closed stays closed."""
    says: dict[str, Any] = {}
    model = model_of(says=says)
    blocking = Blocking("http://there/v1", transport=model.connection._transport)
    for start in (lambda: asyncio.run(model.start()), blocking.start) * 2:
        with pytest.raises(ServerFailure, match="does not answer as"):
            start()
    says.update(json.loads(json.dumps(DESCRIBED)))

    async def whole() -> str:
        async with model:
            return model.model

    with blocking:
        assert asyncio.run(whole()) == blocking.model == "there/m"
    for start in (lambda: asyncio.run(model.start()), blocking.start):
        with pytest.raises(ModelClosed, match="is closed"):
            start()


def test_the_twin_has_what_is_awaited() -> None:
    """Every public name of `RemoteModel`, described."""
    for name in (name for name in dir(RemoteModel) if not name.startswith("_")):
        there, here = getattr(RemoteModel, name), getattr(Blocking, {"aclose": "close"}.get(name, name), None)
        if name == "openai_arguments":
            continue
        assert here.__doc__, name
        assert not asyncio.iscoroutinefunction(here)
        assert isinstance(there, property) == isinstance(here, property)


def test_a_client_needs_no_vllm() -> None:
    """Neither vLLM nor what it brings is there, and the client is made and says so of a server that is not."""
    code = """
import sys
for library in ("vllm", "transformers", "fastapi", "starlette", "zmq", "tokenizers"):
    sys.modules[library] = None
from steercap.sync import SteerModel
from steercap.errors import ServerFailure
try:
    SteerModel.connect("http://127.0.0.1:9").start()
except ServerFailure as error:
    print(type(error).__name__)
sys.modules["httpx"] = None
from steercap.errors import MissingExtra
try:
    SteerModel.connect("http://127.0.0.1:9").start()
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "ServerFailure",
        "this needs httpx, which is not installed: pip install 'steercap[client]'",
    ], done.stderr
    assert "client" in dir(steercap)


def answered_with(handle: CaptureHandle, content: bytes, **others: Any) -> tuple[JSONResponse, Route]:
    """What a server of ours says of a capture, and the route where it waits."""
    saved = json.loads(
        msgspec.json.encode(described(handle, {"url": "/v1/steercap/captures/c", "bytes": len(content)}))
    )
    one = choice(token_ids=handle.output_token_ids, prompt_token_ids=handle.prompt_token_ids)
    answer = JSONResponse({"choices": [one], "steercap": {"results": [{"choice": 0, "capture": saved | others}]}})
    return answer, Route("/v1/steercap/captures/c", lambda _request: Response(content), methods=["GET"])


async def test_a_handle_is_what_the_server_holds() -> None:
    """What a capture says of itself before its rows are there, attention's rules among it; then rows, as they are kept."""
    kept = a_handle(sites=("q", "k"), attention_rules={0: AttentionRule(0.5)})
    answer, route = answered_with(kept, files.encode(kept.as_saved()))
    async with model_of(answer, routes=[route]) as model:
        _, handle = await model.generate([5, 6, 7], capture_layers=[0])
        assert not handle.fetched
        assert (handle.points, handle.attention_rules, handle.model) == (kept.points, kept.attention_rules, "m")
        await handle.fetch()
        assert torch.equal(handle.captures[0, "q"], kept.captures[0, "q"])
        assert torch.equal(handle.attention_pattern(0), kept.attention_pattern(0))


@pytest.mark.parametrize("wrong", ["another", "cut", "elsewhere"])
async def test_rows_of_another_request_are_refused(wrong) -> None:
    """A file of other tokens, one that is cut off, and one that is not at the server."""
    kept = a_handle()
    content = files.encode((a_handle(output=(8, 1)) if wrong == "another" else kept).as_saved())
    said = {"url": "http://elsewhere/c"} if wrong == "elsewhere" else {"bytes": len(content) + (wrong == "cut")}
    answer, route = answered_with(kept, content, **said)
    async with model_of(answer, routes=[route]) as model:
        if wrong == "elsewhere":
            with pytest.raises(ServerFailure, match="which is not an address of that server"):
                await model.generate([5, 6, 7], capture_layers=[0])
            return
        _, handle = await model.generate([5, 6, 7], capture_layers=[0])
        with pytest.raises(
            CaptureIncomplete,
            match="the server sent the capture of" if wrong == "another" else "bytes came; fetch again",
        ):
            await handle.fetch()
        assert not handle.fetched
