"""Whatever is asked, an engine answers or refuses: wrong types, dead threads, seeds of chunked prompts, LoRA adapters,
structured outputs.

`STEERCAP_TEST_REQUESTS` is how many requests each random driver makes.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest
from conftest import opened
from safetensors.torch import load_file, save_file
from support.lora import LORA_ENGINE, adapters_agree, write_adapter
from support.rows import ALL_SITES, CRAMPED, GREEDY, random_prompt, settled
from support.structure import structured_outputs
from support.wrong import wrong_types
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequestType

from steercap import errors
from steercap.testing import tiny_checkpoint

REQUESTS = int(os.environ.get("STEERCAP_TEST_REQUESTS", "240"))
BASE = tiny_checkpoint("qwen3")


async def test_wrong_types_fail_alone(cramped, tiny_reference) -> None:
    """Hundreds of requests with wrong arguments: each fails at once, and none of those beside it feels it."""
    counts = await wrong_types(cramped, tiny_reference, rng=random.Random(REQUESTS), count=REQUESTS)
    assert min(counts[kind] for kind in ("right", "odd", "wrong")) > REQUESTS // 20


@pytest.mark.parametrize("capture", [None, "all"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"sampling_params": {"max_tokens": 5.0}}, "max_tokens: expected `int"),
        ({"sampling_params": {"extra_args": 5}}, "extra_args: expected"),
        ({"sampling_params": 5}, "sampling_params=5; give vLLM's SamplingParams"),
        ({"priority": "high"}, "priority: expected `int`, got `str`"),
        ({"lora_request": LoRARequest("a", 1, "/nowhere")}, r"SteerModel\(\.\.\., enable_lora=True\)"),
    ],
)
async def test_a_wrong_argument_is_named(tiny, arguments, says, capture) -> None:
    """With rows or without, before the engine hears of it."""
    with pytest.raises(errors.InvalidRequest, match=says):
        await tiny.generate([3, 4], capture_layers=capture, **arguments)


async def test_what_passed_does_not_excuse_what_comes_after(tiny) -> None:
    """A request after one that passed is let through where it asks for no more; each of the others is tried."""
    params = {"max_tokens": 2, **GREEDY}
    vocabulary, longest = tiny.engine.model_config.get_vocab_size(), 100
    for fits in ([3] * longest, [vocabulary - 1] * 3, [3, 4], [5]):
        await tiny.generate(fits, params)
    for wrong, says in (([3, vocabulary], "out of vocabulary"), ([3] * 5000, "maximum context length")):
        with pytest.raises(errors.InvalidRequest, match=says):
            await tiny.generate(wrong, params)
    for changed, says in (({"logprobs": 10**6}, "logprobs"), ({"logit_bias": {vocabulary: 1.0}}, "logit_bias")):
        with pytest.raises(errors.InvalidRequest, match=says):
            await tiny.generate([3, 4], {**params, **changed})
    scored = {**params, "prompt_logprobs": 0, "prompt_logprob_token_ids": [[5, 6]]}
    with pytest.raises(errors.InvalidRequest, match="prompt_logprob_token_ids"):
        await tiny.generate([3, 4], scored)
    with pytest.raises(errors.InvalidRequest, match="priority"):
        await tiny.generate([3, 4], params, priority=True)
    with pytest.raises(errors.InvalidRequest, match=r"priority=3: .* scheduling_policy='priority'"):
        await tiny.generate([3, 4], params, priority=3)
    await tiny.generate([3, 4], params)


@pytest.mark.parametrize("params", [None, {"temperature": 0.5}, {"seed": 5}])
async def test_prompts_of_one_call_are_tried_once(tiny, monkeypatch, params) -> None:
    """vLLM's preparation runs for the first of them alone, before it runs for each that is sent."""
    tried, real = [], tiny.engine.input_processor.process_inputs

    def process_inputs(request_id, *more, **options):
        tried.append(request_id)
        return real(request_id, *more, **options)

    monkeypatch.setattr(tiny.engine.input_processor, "process_inputs", process_inputs)
    await tiny.generate([[9, 3, 4], [5], [9, 9, 9], [2, 8]], params and {**params, "max_tokens": 2})
    assert tried.count("steercap") == 1
    assert len(tried) == 5


async def test_a_request_that_vllm_ends_early_is_no_answer(tiny) -> None:
    """A request that the engine aborts is an error, not a shorter text."""
    asked = asyncio.create_task(tiny.generate(random_prompt(20, 1), {"max_tokens": 230, **GREEDY}))
    while not (running := list(tiny.engine.output_processor.request_states)):
        assert not asked.done()
        await asyncio.sleep(0.001)
    await tiny.engine.abort(running, internal=True)
    with pytest.raises(errors.EngineFailure, match="aborted in the engine"):
        await asked


@pytest.mark.parametrize("thread", ["reads requests", "sends outputs"])
async def test_a_dead_thread_of_the_engine_ends_every_request(thread) -> None:
    """The engine's process lives, and vLLM's `errored` says nothing: all requests end with an error that says so, and
    so does whatever is asked next; closing the model works.
    """
    async with opened(BASE, **CRAMPED) as model:
        params = {"max_tokens": 150, **GREEDY}
        running = [asyncio.create_task(model.generate(random_prompt(30, seed), params)) for seed in range(20)]
        streamed = asyncio.create_task(anext(model.stream(random_prompt(100, 50), params, capture_layers="all")))
        core = model.engine.engine_core
        await asyncio.sleep(0.05)
        if thread == "reads requests":
            await core._send_input_message((EngineCoreRequestType.ADD.value, b"\xc1"), core.core_engine)
        else:  # the scheduler cannot be encoded
            killing = asyncio.create_task(core.call_utility_async("__getattribute__", "scheduler"))
        async with asyncio.timeout(20):
            ended = await asyncio.gather(*running, streamed, return_exceptions=True)
        assert any(isinstance(end, errors.EngineFailure) for end in ended)
        for end in ended:
            if isinstance(end, BaseException):  # the first may have been answered before
                assert isinstance(end, errors.EngineFailure), repr(end)
                assert thread in str(end)
        for ask in (model.generate([3, 4]), model.generate([3, 4], capture_layers=0), model.stats()):
            async with asyncio.timeout(20):
                with pytest.raises(errors.EngineFailure, match=thread):
                    await ask
        if thread == "sends outputs":
            killing.cancel()


async def test_seeds_of_chunked_prompts(cramped) -> None:
    """64 seeded prompts that are chunked and preempted: each text is the one it has alone, whatever ran beside it."""
    prompts = [random_prompt(100, seed) for seed in range(64)]
    params = [{"max_tokens": 20, "temperature": 1.0, "seed": seed % 7, "ignore_eos": True} for seed in range(64)]
    raws = await cramped.run(prompts, params)
    alone = [await cramped.run(prompts[place], params[place]) for place in range(0, 64, 9)]
    found = [raws[place].output.outputs[0].token_ids for place in range(0, 64, 9)]
    assert found == [one.output.outputs[0].token_ids for one in alone]
    assert len({tuple(raw.output.outputs[0].token_ids) for raw in raws}) > 50


async def test_structured_outputs(cramped) -> None:
    """What is generated under a choice, a regular expression or a schema is of it, whatever runs beside it."""
    counts = await structured_outputs(cramped, rng=random.Random(REQUESTS), count=REQUESTS)
    assert counts["whole"] > REQUESTS // 5


@pytest.fixture(scope="module")
async def lora():
    """An engine with room for two adapters of rank 16."""
    async with opened(BASE, sites=ALL_SITES, **CRAMPED, **LORA_ENGINE) as model:
        yield model


async def test_adapters_and_none_in_one_batch(lora, tmp_path) -> None:
    """Requests with three adapters and with none, steered and not, of the same prompts: every row is that of its own
    adapter's weights merged into the model, so neither a batch nor the prefix cache mixes them.
    """
    await adapters_agree(lora, BASE, tmp_path, LoRARequest)
    assert await settled(lora) == (0, 0, 0)


async def test_the_lens_takes_rows_of_any_adapter_behind_any_batch(lora, tmp_path) -> None:
    """LoRA's kernels have the rows of the last pass in mind, with their adapters; those of a lens are others."""
    adapters = [LoRARequest(f"a{n}", 30 + n, str(write_adapter(tmp_path / f"{n}", BASE, seed=n))) for n in range(2)]
    asked = {"max_tokens": 5, "logprobs": 4, **GREEDY}
    async with asyncio.TaskGroup() as group:
        done = [
            group.create_task(
                lora.run(
                    [random_prompt(length, length) for length in (4, 30, 9)],
                    asked,
                    capture_layers=[-1],
                    lora_request=adapter,
                )
            )
            for adapter in (None, *adapters)
        ]
    for raws, adapter in zip((one.result() for one in done), ("", "a0", "a1"), strict=True):
        handles = [raw.handle for raw in raws]
        assert {handle.adapter for handle in handles} == {adapter}
        await lora.fetch_captures_batch(handles)
        for raw, handle in zip(raws, handles, strict=True):
            found = await handle.lens(tokens=["last_prompt", "generated"], top=4)
            for row, said in enumerate(raw.output.outputs[0].logprobs):
                ours = dict(zip(found.token_ids[row].tolist(), found.log_probs[row].tolist(), strict=True))
                assert max(abs(ours[token] - said[token].logprob) for token in ours) < 1e-4


async def test_logprobs_of_prompts_are_refused_beside_adapters(lora) -> None:
    """vLLM has no adapter by row for them, with an adapter or without; the next request runs."""
    with pytest.raises(errors.InvalidRequest, match="prompt_logprobs on an engine with enable_lora=True"):
        await lora.generate([random_prompt(30, 1)] * 2, {"prompt_logprobs": 2})
    raws = await lora.run([random_prompt(30, 1)] * 2, {"logprobs": 2, "max_tokens": 2})
    assert [len(raw.output.outputs[0].logprobs) for raw in raws] == [2, 2]


BROKEN: dict[str, Any] = {
    "64 to 128 wide": lambda name, tensor: (name, tensor[:, :64].contiguous() if "lora_A" in name else tensor),
    "the model has no model.layers.9": lambda name, tensor: (name.replace("layers.3", "layers.9"), tensor),
    "w_proj": lambda name, tensor: (name.replace("q_proj", "w_proj"), tensor),
}


@pytest.mark.parametrize("says", BROKEN)
async def test_an_adapter_that_does_not_fit_is_refused(lora, tmp_path, says) -> None:
    """Weights of another width, of layers or modules that the model lacks: an error, and the next request runs."""
    folder = write_adapter(tmp_path / "broken", BASE, seed=1)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(dict(BROKEN[says](*item) for item in weights.items()), folder / "adapter_model.safetensors")
    with pytest.raises(errors.InvalidRequest, match=says):
        await lora.generate([3, 4], lora_request=LoRARequest("broken", 77, str(folder)))
    assert len(await lora.generate([[3, 4]], {"max_tokens": 2})) == 1


async def test_an_adapter_that_is_not_one_is_refused(lora, tmp_path, monkeypatch) -> None:
    """Missing, cut short, of settings that vLLM lacks, or under a name or number that is another's."""
    good = write_adapter(tmp_path / "good", BASE, seed=1)
    (cut := write_adapter(tmp_path / "cut", BASE, seed=1) / "adapter_model.safetensors").write_bytes(b"1234")
    wrong = {
        "is not there": LoRARequest("x", 90, "/nowhere"),
        "cannot be found": LoRARequest("x", 90, "no/where"),
        "adapter_config.json": LoRARequest("x", 90, str(BASE)),
        "cannot be loaded": LoRARequest("x", 90, str(cut.parent)),
        "max_lora_rank 16": LoRARequest("x", 90, str(write_adapter(tmp_path / "big", BASE, seed=1, rank=64))),
        "DoRA": LoRARequest("x", 90, str(write_adapter(tmp_path / "dora", BASE, seed=1, use_dora=True))),
        "lora_int_id: expected `int`": LoRARequest("x", 90.0, str(good)),
        "load_inplace=True": LoRARequest("x", 90, str(good), load_inplace=True),
        "lora_request=90": 90,
    }
    for says, request in wrong.items():
        with pytest.raises(errors.InvalidRequest, match=says):
            await lora.generate([3, 4], {"max_tokens": 2}, lora_request=request)
    monkeypatch.chdir(tmp_path)
    text = await lora.generate([3, 4], {"max_tokens": 4, **GREEDY}, lora_request=LoRARequest("good", 91, "good"))
    monkeypatch.chdir("/")
    again = LoRARequest("good", 91, str(good))
    assert await lora.generate([3, 4], {"max_tokens": 4, **GREEDY}, lora_request=again) == text
    for request in (LoRARequest("good", 92, str(cut.parent.parent / "big")), LoRARequest("other", 91, str(good))):
        with pytest.raises(errors.InvalidRequest, match=r"a name and number of its own|max_lora_rank"):
            await lora.generate([3, 4], lora_request=request)
    os.utime(good / "adapter_model.safetensors")
    with pytest.raises(errors.InvalidRequest, match="have changed since it was loaded"):
        await lora.generate([3, 4], lora_request=again)
