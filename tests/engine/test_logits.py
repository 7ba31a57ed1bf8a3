"""Logits on a real engine: biases of them, and log probabilities of requests that ask for different ones in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from conftest import opened
from drawn import ASKED as SAMPLED
from drawn import WITHOUT_DRAFTS, samplers_agree
from support.biases import VOCABULARY, biases_agree, positions_biased, varied
from support.rows import GREEDY, TINY_ENGINE, counter, random_prompt, settled
from support.specs import edit
from support.stress import Counts

from steercap import LogitBias, SteeringSpec, SteerModel
from steercap.errors import EmptySelection, InvalidRequest, InvalidSpec
from steercap.testing import tiny_checkpoint

#: What requests of one batch ask vLLM for.
ASKED: list[dict[str, Any]] = [
    {"logprobs": 5},
    {"logprob_token_ids": [7, 11, 200]},
    {},
    {"logprobs": -1},
    {"logprob_token_ids": [3]},
    {"logprobs": 0},
    {"logprobs": 2, "flat_logprobs": True},
    {"logprob_token_ids": list(range(40, 60)), "flat_logprobs": True},
]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
async def plain() -> AsyncIterator[SteerModel]:
    """Tiny qwen3 that gives the log probabilities of the whole vocabulary."""
    async with opened(tiny_checkpoint("qwen3"), max_logprobs=-1, **TINY_ENGINE) as model:
        yield model


@pytest.fixture(scope="module")
async def drafting() -> AsyncIterator[SteerModel]:
    """The same, with tokens drafted from the prompt."""
    engine = {**TINY_ENGINE, "speculative_config": DRAFTS}
    async with opened(tiny_checkpoint("qwen3"), max_logprobs=-1, **engine) as model:
        yield model


@pytest.fixture(params=["plain", "drafting"])
def model(request) -> SteerModel:
    """Both engines."""
    return request.getfixturevalue(request.param)


async def said(model: SteerModel, number: int, asked: dict[str, Any]) -> list[dict[int, tuple[int | None, float]]]:
    """The rank and log probability of each token that vLLM gives, position by position."""
    prompt = random_prompt(6, number) * 4  # from which there is something to draft
    params = {"max_tokens": 12, **GREEDY, **asked}
    raw = await model.run(prompt, params)
    (sample,) = raw.output.outputs
    return [{token: (one.rank, one.logprob) for token, one in at.items()} for at in sample.logprobs or []]


async def test_each_request_of_a_batch_gets_the_log_probabilities_it_asked_for(model) -> None:
    """Alone and together they are the same: of the most likely tokens, of those named, of all, of none."""
    alone = [await said(model, number, asked) for number, asked in enumerate(ASKED)]
    for _ in range(3):  # they come and go at other moments
        together = await asyncio.gather(*(said(model, number, asked) for number, asked in enumerate(ASKED)))
        for asked, expected, found in zip(ASKED, alone, together, strict=True):
            assert [at.keys() for at in found] == [at.keys() for at in expected], asked
            for at, other in zip(found, expected, strict=True):
                values = {token: value for token, (_, value) in at.items()}
                assert values == pytest.approx({token: value for token, (_, value) in other.items()}, abs=1e-5)
                for token, (rank, value) in at.items():  # two that are as likely as each other may change places
                    near = sum(abs(value - one) < 1e-5 for one in values.values()) - 1
                    assert abs(rank - other[token][0]) <= near
    for asked, found in zip(ASKED, alone, strict=True):
        assert len(found) == (12 if asked else 0)
        for at in found:
            assert set(asked.get("logprob_token_ids", ())) <= set(at)
            assert len(at) >= {-1: 259, 5: 5}.get(asked.get("logprobs", 0), 1)
            assert all(value > float("-inf") for _, value in at.values())


async def test_the_log_probabilities_of_named_tokens_are_those_of_the_whole_vocabulary(model) -> None:
    """With and without drafts, the numbers are those that logprobs=-1 gives."""
    named, everything = await asyncio.gather(
        said(model, 1, {"logprob_token_ids": [7, 11, 200]}), said(model, 1, {"logprobs": -1})
    )
    for at, whole in zip(named, everything, strict=True):
        for token, (_, value) in at.items():
            assert value == pytest.approx(whole[token][1], abs=1e-5)


# Sampling


async def test_tokens_are_drawn_from_the_distribution_of_transformers(model, tiny_reference) -> None:
    """Temperatures, top-k, top-p, penalties, bans and samples of a seed, beside greedy requests in one batch."""
    before = counter(model, "counter_spec_decode_num_accepted_tokens") if drafts(model) else 0
    await samplers_agree(model, tiny_reference, SAMPLED if drafts(model) else [*SAMPLED, *WITHOUT_DRAFTS])
    if drafts(model):
        assert counter(model, "counter_spec_decode_num_accepted_tokens") > before + 100


async def test_what_vllm_cannot_sample_with_drafts_is_refused(drafting) -> None:
    """By its name, before the engine sees it."""
    for asked in WITHOUT_DRAFTS:
        with pytest.raises(InvalidRequest, match=r"min_p and logit_bias .*speculative decoding"):
            await drafting.generate([5, 6, 7], {"max_tokens": 2, **asked})


# Biases


async def test_biased_logits_are_those_of_transformers_with_a_processor_of_its_own(model, tiny_reference) -> None:
    """Every scope, beside edits, in one batch: tokens, log probabilities, receipts."""
    before = counter(model, "counter_spec_decode_num_accepted_tokens") if drafts(model) else 0
    await biases_agree(model, tiny_reference)
    if drafts(model):
        assert counter(model, "counter_spec_decode_num_accepted_tokens") > before + 10


def drafts(model: SteerModel) -> bool:
    """Whether an engine drafts tokens."""
    return model.engine.vllm_config.speculative_config is not None


async def test_the_cache_is_shared_by_requests_that_differ_in_biases_alone(plain) -> None:
    """A bias reaches no key or value, so a prompt is computed once; beside an edit it is computed once per edit."""
    params = {"max_tokens": 2, **GREEDY}
    prompt = random_prompt(200, 99)
    change = edit("add", 128, layer=0)
    cached = []
    for spec in [None, LogitBias({3: 1.0}), LogitBias({4: 1.0}, tokens="last_prompt"), change]:
        raw = await plain.run(prompt, params, steering=spec)
        cached.append(raw.output.num_cached_tokens)
    for bias in (LogitBias({3: 1.0}), LogitBias(varied(1))):
        raw = await plain.run(prompt, params, steering=SteeringSpec([change, bias]))
        cached.append(raw.output.num_cached_tokens)
    assert cached[0] == cached[3] == 0
    assert min(cached[1], cached[2], cached[4], cached[5]) >= 128


async def test_chunks_preemption_and_the_prefix_cache_change_nothing(cramped, tiny_reference) -> None:
    """Where chunks of prompts have logits that nobody samples from, and requests are computed twice."""
    counts = Counts(cramped)
    specs = [
        LogitBias(varied(20 + number), tokens=["all", "generated", "last_prompt"][number % 3]) for number in range(16)
    ]
    prompts = [random_prompt(100 + number, 200 + number) for number in range(16)]
    params = {"max_tokens": 60, **GREEDY}
    raws = await asyncio.gather(
        *(cramped.run(prompt, params, steering=spec) for prompt, spec in zip(prompts, specs, strict=True))
    )
    assert counts.since()["preemptions"] > 0
    for prompt, spec, raw in zip(prompts, specs, raws, strict=True):
        assert list(raw.output.outputs[0].token_ids) == tiny_reference.greedy(prompt, 60, SteeringSpec([spec]))[0]
        assert raw.steering[0].rows == (positions_biased(spec, len(prompt), 60),)


async def test_stop_strings_samples_and_streams_have_receipts(plain) -> None:
    """Tokens past a stop string do not count; each sample is biased by itself; a stream that is left ends."""
    favoured = LogitBias(dict.fromkeys(plain.tokenizer.encode("ab"), 1e3))
    prompt = random_prompt(20, 3)
    stopped = await plain.run(
        prompt,
        {"max_tokens": 20, **GREEDY, "stop": ["aaa", "bbb", "aba", "bab", "aab", "bba", "abb", "baa"]},
        steering=favoured,
    )
    length = len(stopped.output.outputs[0].token_ids)
    assert length == 3
    assert stopped.steering[0].rows == (3,)
    sampled = await plain.run(
        prompt, {"max_tokens": 8, "n": 3, "temperature": 1.0, "ignore_eos": True}, steering=favoured
    )
    assert [receipt.rows for receipt in sampled.steering] == [(8,)] * 3
    for sample in sampled.output.outputs:
        assert set(sample.text) <= {"a", "b"}
    async for chunk in plain.stream(prompt, {"max_tokens": 20, **GREEDY}, steering=favoured):
        assert chunk.text
        break
    await settled(plain)


async def test_a_bias_decides_between_what_a_grammar_allows(plain) -> None:
    """A token that the grammar bans stays banned, however large its bias."""
    yes, no, other = plain.tokenizer.encode("ynq")
    params = {"max_tokens": 4, "temperature": 0.0, "structured_outputs": {"choice": ["yes", "no"]}}
    chosen = [
        await plain.generate("Well: ", params, steering=LogitBias({yes: y, no: -y, other: 1e4})) for y in (30.0, -30.0)
    ]
    assert [text[:1] for text in chosen] == ["y", "n"]


async def test_contexts_add_up(plain, tiny_reference) -> None:
    """A bias in force around one that is given, and around an edit."""
    prompt = random_prompt(24, 5)
    outer, inner = LogitBias(varied(1)), SteeringSpec([edit("add", 128, layer=1), LogitBias(varied(2))])
    async with plain.steered(outer), plain.steered(inner) as spec:
        raw = await plain.run(prompt, {"max_tokens": 10, **GREEDY})
    assert list(raw.output.outputs[0].token_ids) == tiny_reference.greedy(prompt, 10, spec)[0]
    assert raw.steering[0].rows == (10, 33, 10)


async def test_what_cannot_be_biased_is_refused(plain) -> None:
    """Tokens that the model does not have, positions without logits, log probabilities of the prompt."""
    prompt, params = random_prompt(24, 5), {"max_tokens": 10, **GREEDY}
    for wrong in (LogitBias({VOCABULARY: 1.0}), LogitBias(torch.ones(VOCABULARY + 1))):
        with pytest.raises(InvalidSpec, match="vocabulary"):
            await plain.generate(prompt, params, steering=wrong)
    with pytest.raises(EmptySelection, match="logits are made"):
        await plain.generate(prompt, params, steering=LogitBias({3: 1.0}, tokens=slice(0, 23)))
    scored = {**params, "prompt_logprobs": 2}
    with pytest.raises(InvalidSpec, match="prompt_logprobs"):
        await plain.generate(prompt, scored, steering=LogitBias({3: 1.0}))
    raw = await plain.run(prompt, scored, steering=LogitBias({3: 1.0}, tokens=["last_prompt", "generated"]))
    clean = await plain.run(prompt, scored)
    for found, expected in zip(raw.output.prompt_logprobs[1:], clean.output.prompt_logprobs[1:], strict=True):
        assert {token: one.logprob for token, one in found.items()} == pytest.approx(
            {token: one.logprob for token, one in expected.items()}, abs=1e-5
        )
