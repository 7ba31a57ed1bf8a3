"""Logits on a real engine: log probabilities of requests that ask for different ones in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from conftest import opened

from steercap import SteerModel
from steercap.testing import tiny_checkpoint
from steercap.testing.rows import GREEDY, TINY_ENGINE, random_prompt

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
    raw = await model.generate(prompt, params, raw_output=True)
    (sample,) = raw.output.outputs
    return [{token: (one.rank, one.logprob) for token, one in at.items()} for at in sample.logprobs or []]


async def test_each_request_of_a_batch_gets_the_log_probabilities_it_asked_for(model) -> None:
    """Alone and together they are the same: of the most likely tokens, of those named, of all, of none."""
    alone = [await said(model, number, asked) for number, asked in enumerate(ASKED)]
    for _ in range(3):  # they come and go at other moments
        together = await asyncio.gather(*(said(model, number, asked) for number, asked in enumerate(ASKED)))
        for asked, expected, found in zip(ASKED, alone, together, strict=True):
            assert [list(at) for at in found] == [list(at) for at in expected], asked
            for at, other in zip(found, expected, strict=True):
                assert {token: rank for token, (rank, _) in at.items()} == {
                    token: rank for token, (rank, _) in other.items()
                }
                assert [value for _, value in at.values()] == pytest.approx(
                    [value for _, value in other.values()], abs=1e-5
                )
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
