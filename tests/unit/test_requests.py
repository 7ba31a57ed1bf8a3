"""What is sent to vLLM is what its engine can read, or an error that names the argument; no engine is started.

The oracle is vLLM's own encoder and typed decoder, and for texts and adapters a computation of our own.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.wrong import ANYTHING, WRONG_PARAMS, WRONG_PROMPTS
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoTokenizer
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms import current_platform
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from steercap.adapters import cpu, detokenizer, hardware, hooks
from steercap.adapters.arguments import read_arguments
from steercap.adapters.engine import VllmEngine
from steercap.adapters.hooks import class_of, wrap
from steercap.adapters.parameters import ParamsReader, read_params
from steercap.adapters.prompts import prompt_dict, render
from steercap.adapters.wire import Wire, is_plain_options, is_plain_params, plain_ids
from steercap.captures.handle import CaptureHandle
from steercap.core.prompts import CallArguments
from steercap.core.spec import CaptureSpec
from steercap.errors import InvalidPrompt, InvalidRequest, InvalidSpec
from steercap.requests.answers import _tokenized
from steercap.requests.call_types import Generation
from steercap.requests.calls import Calls
from steercap.requests.context import steered
from steercap.steering.edits.add import Add
from steercap.steering.spec import LogitBias, SteeringSpec
from steercap.testing import tiny_checkpoint


def request_of(params: SamplingParams, prompt: list[int] | None = None) -> EngineCoreRequest:
    return EngineCoreRequest("a", prompt or [1], None, params, None, 0.0, None, None, None)


@pytest.mark.parametrize("wrong", WRONG_PARAMS, ids=lambda wrong: next(iter(wrong)))
def test_a_wrong_sampling_parameter_is_named(wrong) -> None:
    """The message has the name of the parameter that is wrong, whatever is right beside it."""
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        read_params({"max_tokens": 4, "temperature": 1.0, **wrong})


@given(
    st.dictionaries(
        st.sampled_from([name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.text(max_size=3),
            st.lists(st.integers(), max_size=2),
            st.lists(st.floats(), max_size=2),
            st.lists(st.text(max_size=3), max_size=2),
            st.dictionaries(st.integers(), st.floats(), max_size=2),
            st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
            st.sampled_from(ANYTHING),
        ),
        max_size=4,
    )
)
def test_whatever_passes_can_be_read(fields) -> None:
    """Of any values, those that are let through come out of the engine's decoder as they went in, or cannot even be
    encoded, which the client hears of.
    """
    try:
        params = read_params(fields)
        frames = MsgpackEncoder().encode(request_of(params))
    except (InvalidRequest, OverflowError, UnicodeEncodeError):
        return
    read = MsgpackDecoder(EngineCoreRequest).decode(frames).sampling_params
    assert repr(read) == repr(params)


def test_params_are_our_own() -> None:
    """Nothing is shared with what was given, `skip_clone` or not; what vLLM derives is derived again."""
    stop, extra = ["a"], {"mine": [1]}
    theirs = SamplingParams(stop=stop, extra_args=extra, stop_token_ids=[5], skip_clone=True)
    theirs._all_stop_token_ids.add(10**9)
    ours = read_params(theirs)
    theirs.stop.append("b")
    extra["mine"].append(2)
    assert ours.stop == ["a"]
    assert ours.extra_args == {"mine": [1]}
    assert ours._all_stop_token_ids == {5}
    assert ours.skip_clone, "they are our own: vLLM need not copy them again"


def test_sensible_forms_are_taken() -> None:
    """NumPy's numbers, tuples, whole numbers for floats, and structured outputs as a dict."""
    params = read_params(
        {
            "max_tokens": np.int64(4),
            "temperature": 1,
            "top_p": np.float32(0.5),
            "stop": ("a", "b"),
            "structured_outputs": {"choice": ["x"]},
            "output_kind": RequestOutputKind.DELTA,
            "seed": -1,
            "prompt_logprob_token_ids": [[1, 2], [3, 4]],
        }
    )
    assert (params.max_tokens, params.temperature, params.top_p, params.stop) == (4, 1.0, 0.5, ["a", "b"])
    assert params.structured_outputs.choice == ["x"]
    assert params.seed is None
    assert params.prompt_logprob_token_ids.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("wrong", WRONG_PROMPTS, ids=lambda wrong: repr(wrong).partition(" at 0x")[0][:60])
def test_a_wrong_prompt_dict_says_what_is_wrong(wrong) -> None:
    """Keys that would be ignored, and ids that are not whole numbers, bools among them."""
    with pytest.raises(InvalidPrompt, match=r"give|would be ignored"):
        prompt_dict(wrong)


@pytest.mark.parametrize("ids", [(3, 4), np.array([3, 4]), torch.tensor([3, 4]), [np.int32(3), 4], range(3, 5)])
def test_whole_numbers_of_any_kind_are_token_ids(ids) -> None:
    """They become plain ints in a list of their own."""
    found = prompt_dict({"prompt_token_ids": ids, "cache_salt": "a"})
    assert found == {"prompt_token_ids": [3, 4], "cache_salt": "a"}
    assert all(type(one) is int for one in found["prompt_token_ids"])


@given(st.binary(max_size=12), st.text(max_size=6))
def test_a_prompt_that_ends_within_a_character_stays_out_of_the_text(tail, reply) -> None:
    """Whatever bytes a prompt ends with, the text is what the generated tokens say by themselves."""
    detokenizer.patch()
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3"))
    prompt = tokenizer.encode("Hello ") + [byte_ids(tokenizer)[byte] for byte in tail]
    generated = tokenizer.encode(reply)
    stream = FastIncrementalDetokenizer(tokenizer, request_of(SamplingParams(max_tokens=99), prompt))
    stream.update(generated, False)
    assert stream.get_next_output_text(finished=True, delta=False) == reply


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reasoning_parser_kwargs": {"chat_template_kwargs": {}}, "reasoning_ended": None}, ""),
        ({"reasoning_ended": True, "priority": 2}, ""),
        ({"reasoning_ended": 5}, "reasoning_ended: expected .*bool"),
        ({"reasoning_parser_kwargs": [1]}, "reasoning_parser_kwargs: expected .*object"),
        ({"reasoning": True}, "vLLM refuses this request: .*'reasoning'"),
    ],
    ids=["parser", "ended", "wrong flag", "wrong keywords", "unknown"],
)
async def test_what_a_reasoning_parser_adds_is_sent(options, says, preparing) -> None:
    """vLLM's chat route gives `generate` options that its preparation of a request does not take."""
    checked = Wire(preparing).check({"type": "token", "prompt_token_ids": [1]}, SamplingParams(max_tokens=4), options)
    with pytest.raises(InvalidRequest, match=says) if says else nullcontext():
        await checked


@pytest.fixture(scope="module")
def preparing() -> SimpleNamespace:
    """What the trial of a request uses of an AsyncLLM: vLLM's own preparation, without an engine."""
    config = read_arguments(str(tiny_checkpoint("qwen3")), {"dtype": "float32"}).create_engine_config()

    async def tasks() -> tuple[str, ...]:
        return ("generate",)

    return SimpleNamespace(input_processor=InputProcessor(config), get_supported_tasks=tasks)


def byte_ids(tokenizer) -> list[int]:
    """The token id of each byte of a byte-level tokenizer."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = bytes_to_unicode()
    return [tokenizer.convert_tokens_to_ids(characters[byte]) for byte in range(256)]


@pytest.mark.parametrize("module", [lora_ops, punica_cpu])
@pytest.mark.parametrize("indices", [[-1, 0, 1, -1], [-1, -1], [1, 1, 0]])
def test_a_row_without_adapter_has_none_added(module, indices) -> None:
    """On CPU, index -1 is no adapter, not the last one: by shrinking, and by expanding as embeddings do."""
    cpu.hook()
    draw = torch.Generator().manual_seed(1)
    rows, rank, wide, where = len(indices), 3, 5, torch.tensor(indices)
    down, up = (torch.randn(2, 1, *shape, generator=draw) for shape in ((rank, wide), (wide, rank)))
    given = torch.randn(rows, wide, generator=draw)
    narrow, output = torch.ones(rows, rank), torch.zeros(rows, wide)
    module.bgmv_shrink(given, down, narrow, where, 2.0)
    module.bgmv_expand(narrow, up, output, where, add_inputs=True)
    expected = [
        torch.zeros(wide) if index < 0 else up[index, 0] @ (2.0 * down[index, 0] @ row)
        for index, row in zip(indices, given, strict=True)
    ]
    torch.testing.assert_close(output, torch.stack(expected))
    module.bgmv_expand(torch.ones(rows, rank), up, embedded := torch.zeros(rows, wide), where, add_inputs=True)
    assert [bool(row.any()) for row in embedded] == [index >= 0 for index in indices]


def sliced(tokens: int, channels: int) -> torch.Tensor:
    """Inputs of a convolution, [channels, tokens], as Qwen 3.5 slices them from a wider tensor."""
    draw = torch.Generator().manual_seed(2)
    wide = torch.randn(tokens, 3 * channels, generator=draw, dtype=torch.float32).bfloat16()
    return wide[:, :channels].contiguous().T


@pytest.mark.skipif(bool(hardware.unfit(["DeepseekV4ForCausalLM"], {})), reason="no AVX-512 with BF16")
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_prompt_of_one_token_is_convolved(tokens) -> None:
    """On CPU, as each longer one: by torch's own convolution of as many zeros before it as its kernel reaches back."""
    cpu.hook()
    current_platform.import_kernels()
    x, weight = sliced(tokens, 128), torch.randn(128, 4, generator=torch.Generator().manual_seed(3)).bfloat16()
    states = torch.ones(2, 3, 128, dtype=torch.bfloat16).transpose(1, 2)
    got = _custom_ops.causal_conv1d_fwd_cpu(
        x=x,
        weight=_custom_ops.causal_conv1d_weight_pack(weight),
        bias=None,
        conv_states=states,
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        cache_indices=torch.tensor([1], dtype=torch.int32),
        has_initial_state=torch.tensor([False]),
        silu_activation=True,
        is_weight_packed=True,
    )
    before = torch.nn.functional.pad(x.float(), (3, 0))
    known = torch.nn.functional.conv1d(before[None], weight.float()[:, None], groups=128)[0]
    torch.testing.assert_close(got.float(), torch.nn.functional.silu(known), atol=0.05, rtol=0.02)
    torch.testing.assert_close(states[1].float(), before[:, -3:])


def test_inputs_of_one_token_are_strided_as_those_of_more() -> None:
    """On CPU, vLLM's convolution refuses any other stride between tokens than the number of channels."""
    for tokens in (1, 2):
        x = sliced(tokens, 128)
        given = cpu.for_single_tokens(lambda *, x: x)(x=x)
        assert given.stride() == (1, 128)
        assert torch.equal(given, x)


def test_a_class_that_a_release_lacks_is_none(tmp_path, monkeypatch) -> None:
    """Neither its module nor its name need be there; a module that is broken is an error."""
    assert class_of("vllm.config", "VllmConfig") is not None
    for module, name in (("vllm.config", "Absent"), ("vllm.absent", "One"), ("vllm.absent.deeper", "One")):
        assert class_of(module, name) is None
    (tmp_path / "wants_another.py").write_text("import nothing_of_that_name")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        class_of("wants_another", "One")


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_router_without_groups_chooses_by_biased_scores(scores) -> None:
    """On CPU, vLLM's leaves the bias of softmax out, and refuses sigmoids."""
    routers = pytest.importorskip("vllm.model_executor.layers.fused_moe.router.cpu_router")
    wrap(routers.CPURouter, "__init__", cpu._in_one_group)
    logits, bias = torch.randn(50, 8), torch.randn(8)
    router = routers.CPURouter(2, 8, scoring_func=scores, e_score_correction_bias=bias)
    weights, ids = router._compute_routing(torch.zeros(50, 4), logits, None)
    known = logits.softmax(1) if scores == "softmax" else logits.sigmoid()
    chosen = (known + bias).topk(2).indices
    assert torch.equal(ids.long().sort(dim=1).values, chosen.sort(dim=1).values)
    assert not torch.equal(chosen.sort(dim=1).values, known.topk(2).indices.sort(dim=1).values)
    picked = known.gather(1, ids.long())
    assert torch.allclose(weights, picked / picked.sum(1, keepdim=True))
    plain = routers.CPURouter(2, 8)
    assert not plain.use_grouped_topk


def test_attention_is_made_that_is_told_of_no_chunks() -> None:
    """vLLM tells it so for RNJ-1, and its backend for CPU does not take the argument; nor does it attend in chunks."""
    made = cpu_attn.CPUAttentionBackendImpl
    wrap(made, "__init__", cpu._in_no_chunks)
    given = 4, 32, 0.2, 2, None, None, "auto"
    with set_current_vllm_config(EngineArgs(str(tiny_checkpoint("gemma3"))).create_engine_config()):
        assert vars(made(*given, chunk_lookback=-1)) == vars(made(*given))
        with pytest.raises(TypeError, match="chunk_lookback"):
            made(*given, chunk_lookback=1)


def test_a_joint_convolution_is_loaded_by_parts() -> None:
    """vLLM's loader of OLMo Hybrid wants the number of a part, which its caller sets on the weights."""
    module = pytest.importorskip("vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn")
    wrap(module, "_make_fused_conv1d_weight_loader", hooks._by_part)
    load = module._make_fused_conv1d_weight_loader([2, 2, 3], 1, 0)
    joint, whole = nn.Parameter(torch.zeros(7, 1, 4)), torch.randn(7, 1, 4)
    for part, weights in enumerate(whole.split([2, 2, 3])):
        weights.shard_id = part
        load(joint, weights)
    assert torch.equal(joint, whole)
    load(joint, whole[5:], 0)
    assert torch.equal(joint[:2], whole[5:])


#: vLLM's attention in bfloat16 on 40 tokens, by the instructions that it would choose here, and torch's.
ATTENDS = """
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.renderers import renderer_from_config
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from steercap.adapters import cpu
current_platform.import_kernels()
cpu.hook()
isa = _get_attn_isa(torch.bfloat16, 32, 32)
query, keys, values = (torch.randn(40, 4, 32).bfloat16() for _ in range(3))
pages = torch.zeros(2, 8, 4, 32, 32, dtype=torch.bfloat16)
ops.cpu_attn_reshape_and_cache(keys, values, *pages, torch.arange(32, 72), isa)
begin, length = torch.tensor([0, 40], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
plan = ops.cpu_attn_get_scheduler_metadata(1, 4, 4, 32, length, torch.bfloat16, begin, True, -1, isa, False)
got, table = torch.zeros_like(query), torch.tensor([[1, 2]], dtype=torch.int32)
ops.cpu_attention_with_kv_cache(query, *pages, got, begin, length, 0.2, True, None, -1, table, 0.0, plan, None)
each = (one.float().transpose(0, 1) for one in (query, keys, values))
known = torch.nn.functional.scaled_dot_product_attention(*each, is_causal=True, scale=0.2).transpose(0, 1)
torch.testing.assert_close(got.float(), known, atol=0.02, rtol=0.02)
"""


def test_attention_in_16_bits_ends_no_worker() -> None:
    """On CPU, also where the processor has AMX, which a process must ask for."""
    subprocess.run([sys.executable, "-c", ATTENDS], check=True, timeout=300)


@pytest.mark.parametrize(
    ("payload", "fields", "options", "plain"),
    [
        ({}, {}, {}, True),
        (
            {"cache_salt": "mine"},
            {"seed": 2**62, "n": 3, "max_tokens": None, "temperature": 0.5},
            {"priority": 7},
            True,
        ),
        ({}, {}, {"lora_request": None, "trace_headers": None}, True),
        ({"type": "multimodal"}, {}, {}, False),
        ({"prompt_token_ids": [3, 4.5]}, {}, {}, False),
        ({"prompt_token_ids": [3, True]}, {}, {}, False),
        ({"prompt_token_ids": [3, 2**31]}, {}, {}, False),
        ({"prompt_token_ids": [3, -1]}, {}, {}, False),
        ({"cache_salt": "\ud800"}, {}, {}, False),
        ({"cache_salt": np.str_("a")}, {}, {}, False),
        ({}, {"max_tokens": 2**40}, {}, False),
        ({}, {"stop": ["\ud800"]}, {}, False),
        ({}, {"logprobs": 2}, {}, False),
        ({}, {"allowed_token_ids": [5]}, {}, False),
        ({}, {"extra_args": {"a": 1}}, {}, False),
        ({}, {}, {"priority": "high"}, False),
        ({}, {}, {"priority": True}, False),
        ({}, {}, {"priority": None}, False),
        ({}, {}, {"data_parallel_rank": 7}, False),
        ({}, {}, {"trace_headers": 5}, False),
        ({}, {}, {"session_id": 5}, False),
        ({}, {}, {"lora_request": object()}, False),
    ],
)
def test_only_plain_requests_are_not_decoded_first(payload, fields, options, plain) -> None:
    """Token ids and numbers that every decoder takes; with anything else a request is decoded as the engine will."""
    prompt = {"type": "token", "prompt_token_ids": [3, 4], **payload}
    found = plain_ids(prompt) is not None and is_plain_options(options) and is_plain_params(read_params(fields))
    assert found is plain


@pytest.fixture(scope="module")
def beginning(tmp_path_factory) -> AsyncLLM:
    """The part of vLLM's engine that reads prompts, of a tokenizer that puts <bos> before every text."""
    path = tmp_path_factory.mktemp("beginning") / "model"
    shutil.copytree(tiny_checkpoint("llama"), path)
    made = AutoTokenizer.from_pretrained(path)
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    made.save_pretrained(path)
    config = EngineArgs(model=str(path), enforce_eager=True).create_engine_config()
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.vllm_config, llm.model_config, llm.renderer = config, config.model_config, renderer_from_config(config)
    return llm


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("lower", [True, False])
async def test_token_ids_are_those_that_vllm_reads(adds, lower, beginning, monkeypatch) -> None:
    """Where vLLM adds no special tokens (Gemma 4 with pictures), or lowers texts; a call may say otherwise."""
    plain = beginning.renderer.default_cmpl_tok_params
    how = replace(plain, add_special_tokens=adds, do_lower_case=lower)
    monkeypatch.setitem(vars(beginning.renderer), "default_cmpl_tok_params", how)
    engine = VllmEngine.__new__(VllmEngine)
    engine._connection = SimpleNamespace(llm=beginning)
    words = "hello" if lower else "Hello"
    none = beginning.renderer.get_tokenizer().encode(words, add_special_tokens=False)

    async def alive() -> SimpleNamespace:
        return SimpleNamespace(vllm=engine)

    for special, begins in ((None, adds), (True, True), (False, False)):
        expected = [*([1] if begins else []), *none]
        assert engine.text_ids("Hello", special) == expected
        for prompt in ("Hello", {"prompt": "Hello"}):
            call = CallArguments("generate", None, None, None, {}, add_special_tokens=special)
            given = await _tokenized(SimpleNamespace(alive=alive), prompt, call)
            assert [*(await render(beginning, given)).token_ids] == expected


class Recorder:
    """Backend that keeps the prompts and arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], CallArguments]] = []

    async def run(self, prompts: list[Any], call: CallArguments) -> list[Generation]:
        self.calls.append((prompts, call))
        return [Generation(None, ("",), ((),)) for _ in prompts]


class Recorded(Calls[CaptureHandle]):
    """Model whose calls are recorded."""

    def __init__(self) -> None:
        self._backend = Recorder()

    @property
    def calls(self) -> list[tuple[list[Any], CallArguments]]:
        return self._backend.calls


IDS, BUFFER, VECTOR = [5], np.array([5]), torch.tensor([5])
TALK = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
CHANGED_LATER = {
    "ids in a dict": ({"prompt_token_ids": IDS}, lambda: IDS.append(6)),
    "ids in a tuple": (([1], IDS), lambda: IDS.append(6)),
    "ids after a text": (["x", IDS], lambda: IDS.append(6)),
    "a conversation after a text": (["x", TALK], lambda: TALK.append(TALK[0])),
    "a part of a message": (TALK, lambda: TALK[0]["content"][0].update(text="other")),
    "NumPy's ids": ({"prompt_token_ids": BUFFER}, lambda: BUFFER.fill(6)),
    "torch's ids": ([{"prompt_token_ids": VECTOR}], lambda: VECTOR.fill_(6)),
    "pictures": ({"prompt": "x", "multi_modal_data": {"image": IDS}}, lambda: IDS.append(6)),
}


@pytest.mark.parametrize("kind", CHANGED_LATER)
async def test_a_prompt_that_changes_after_the_call_is_read_as_it_was(kind) -> None:
    """However deep the change is."""
    (prompts, change), model = CHANGED_LATER[kind], Recorded()
    await model.run(copy.deepcopy(prompts))
    coming = model.run(prompts)
    change()
    await coming
    (expected, _), (found, _) = model.calls
    assert repr(found) == repr(expected)


async def test_arguments_that_change_after_the_call_are_those_of_the_call() -> None:
    """Lists in vLLM's parameters, arrays of layers, and layers that can be read once; pictures themselves are shared."""
    model, params, layers = Recorded(), SamplingParams(stop=["a"], logit_bias={1: 1.0}), np.array([3])
    kwargs, picture = {"tools": [{"name": "f"}]}, np.zeros((2, 2, 3), np.uint8)
    coming = [
        model.generate("x", params, capture_layers=layers),
        model.generate("x", [params], capture_layers=(one for one in [3])),
        model.chat(TALK, chat_template_kwargs=kwargs),
        model.generate({"prompt": "x", "multi_modal_data": {"image": picture}}),
    ]
    params.stop.append("b")
    params.logit_bias[2] = 1.0
    params._all_stop_token_ids.add(7)
    layers[0] = 4
    kwargs["tools"][0]["name"] = "g"
    for one in coming:
        await one
    first, second, chat, pictured = model.calls
    for asked in (first[1].sampling_params, *second[1].sampling_params):
        assert (asked.stop, asked.logit_bias, asked._all_stop_token_ids) == (["a"], {1: 1.0}, set())
    assert first[1].spec == second[1].spec == CaptureSpec(layers=[3])
    assert chat[1].template_kwargs == {"tools": [{"name": "f"}]}
    assert pictured[0][0]["multi_modal_data"]["image"] is picture


async def test_biases_of_logits_are_no_steering_of_what_is_read() -> None:
    """No row depends on them; beside edits, and in `model.steered`, whose other calls generate, they stay."""
    model, bias, edit = Recorded(), LogitBias({3: 1.0}), Add(torch.ones(4), layer=1)
    for wrong in (bias, SteeringSpec([bias]), [None, SteeringSpec([bias, bias])]):
        with pytest.raises(InvalidSpec, match="changes no row"):
            await model.read(["x", "y"], steering=wrong)
    with steered(model, bias):
        await model.read("x")
    for right in (SteeringSpec([bias, edit]), None, "named", [edit, None]):
        await model.read(["x", "y"], steering=right)
    await model.generate("x", steering=bias)


@pytest.mark.parametrize("kind", [dict, SamplingParams])
def test_parameters_that_change_are_read_again(kind) -> None:
    """The same object twice is read once, and its copies are apart; whatever is changed in it counts, types too."""
    reader, given = ParamsReader(), kind(max_tokens=5, temperature=0.5)
    first, second = reader.read(given), reader.read(given)
    assert (first, first is second, first.skip_clone) == (second, False, True)
    first.output_kind, first.extra_args = RequestOutputKind.FINAL_ONLY, {"a": 1}
    assert reader.read(given) == second

    def change(name: str, value: object) -> None:
        given.__setitem__(name, value) if isinstance(given, dict) else setattr(given, name, value)

    change("max_tokens", 6)
    assert reader.read(given).max_tokens == 6
    stops = ["x"]
    change("stop", stops)
    assert reader.read(given).stop == ["x"]
    stops.append("y")
    assert reader.read(given).stop == ["x", "y"]
    change("stop", [])
    assert reader.read(given).stop == []
    change("max_tokens", 6.0)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        reader.read(given)
    change("max_tokens", 7)
    assert reader.read(given).max_tokens == 7
    assert reader.read(kind(max_tokens=7, temperature=0.25)).temperature == 0.25
    assert reader.read(None).max_tokens == SamplingParams().max_tokens
