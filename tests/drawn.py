"""Sampled tokens beside the distribution that transformers' processors make of its own logits."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from scipy.stats import kstest
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from steercap import SteerModel
from steercap.testing import Reference

#: Tokens of a text, and texts of each way of sampling.
TOKENS, TEXTS = 12, 24
#: The chance that right tokens of one way of sampling are taken for wrong ones. With so many tokens, those of a
#: temperature a third too high, of no penalty or of one top-k too many are below it.
LEAST = 1e-6
#: Tokens of prompts, and of most texts: so few that there is much to draft, and that penalties matter.
FEW = list(range(20, 32))
AMONG_FEW: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1.5},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.4},
    {"temperature": 0.7, "presence_penalty": 1.0},
    {"temperature": 0.7, "frequency_penalty": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.0, "frequency_penalty": 0.9},
    {"temperature": 0.0, "presence_penalty": 1.0},
)
ASKED: Sequence[Mapping[str, Any]] = (
    *({**asked, "allowed_token_ids": FEW} for asked in AMONG_FEW),
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.3, "top_k": 5},
    {"temperature": 0.7, "bad_words": ["a"]},
    {"temperature": 0.7, "min_tokens": TOKENS, "stop_token_ids": list(range(60, 180))},
)
#: What vLLM refuses beside drafts.
WITHOUT_DRAFTS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 0.7, "logit_bias": {7: 2.0, 11: -3.0, 40: 3.0}},
)


async def texts_of(
    model: SteerModel, asked: Mapping[str, Any], prompt: Sequence[int], *, seeded: bool
) -> list[list[int]]:
    """Token ids of the texts: of requests of their own, or, of a seed, of one request (which vLLM refuses if greedy)."""
    params = {"max_tokens": TOKENS, "ignore_eos": True, **asked}
    if seeded and asked["temperature"]:
        raw = await model.run(list(prompt), {**params, "seed": 5, "n": TEXTS})
        return [list(sample.token_ids) for sample in raw.output.outputs]
    raws: Any = await asyncio.gather(*(model.run(list(prompt), params) for _ in range(TEXTS)))
    return [list(raw.output.outputs[0].token_ids) for raw in raws]


def probabilities(
    logits: torch.Tensor, prompt: torch.Tensor, drawn: torch.Tensor, asked: Mapping[str, Any], banned: Sequence[int]
) -> torch.Tensor:
    """How likely each token comes next: float64 [texts, vocabulary].

    Args:
        logits: of the next token, float32 [texts, vocabulary].
        prompt: int64 [texts, tokens].
        drawn: tokens drawn so far, int64 [texts, tokens].
        asked: sampling parameters.
        banned: tokens that must not come.
    """
    counts = torch.nn.functional.one_hot(drawn, logits.shape[1]).sum(1)
    scores = logits.clone()
    for token, bias in asked.get("logit_bias", {}).items():
        scores[:, token] += bias
    scores[:, list(banned)] = -math.inf
    if (factor := asked.get("repetition_penalty")) is not None:
        scores = RepetitionPenaltyLogitsProcessor(factor)(torch.cat((prompt, drawn), 1), scores)
    scores = scores - asked.get("frequency_penalty", 0.0) * counts - asked.get("presence_penalty", 0.0) * (counts > 0)
    if asked["temperature"] == 0:
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[1]).double()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(asked["temperature"])])
    for name, warper in (("min_p", MinPLogitsWarper), ("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper)):
        if name in asked:
            warpers.append(warper(asked[name]))
    return warpers(None, scores).double().softmax(-1)


def check_drawn(
    reference: Reference,
    prompt: Sequence[int],
    texts: Sequence[Sequence[int]],
    asked: Mapping[str, Any],
    banned: Sequence[int],
) -> None:
    """Check that texts can come, and that they come as often as they should.

    Each token is a number from 0 to 1: the probability of all tokens before it, and a random part of its own, in an
    order in which those that the text has already come first (drafts, and what penalties are about), and the likeliest
    of them before the others. These numbers are uniform and independent, whatever came before, if tokens are drawn from
    what is expected.

    Raises:
        AssertionError: a token that cannot come, or numbers that are not uniform (Kolmogorov and Smirnov).
    """
    drawn, given = torch.tensor(texts), torch.tensor([list(prompt)] * len(texts))
    with torch.inference_mode():
        logits = reference.model(torch.cat((given, drawn), 1), use_cache=False).logits.float()[:, len(prompt) - 1 : -1]
    numbers = []
    chance = torch.Generator().manual_seed(0)
    for place in range(drawn.shape[1]):
        expected = probabilities(logits[:, place], given, drawn[:, :place], asked, banned)
        own, chosen = drawn[:, place : place + 1], torch.cat((given, drawn[:, :place]), 1)
        order = expected + 2.0 * (torch.nn.functional.one_hot(chosen, expected.shape[1]).sum(1) > 0)
        before, own = (expected * (order > order.gather(1, own))).sum(1), expected.gather(1, own)
        assert (own > 0).all(), f"{asked}: tokens that cannot come, at place {place}: {drawn[:, place].tolist()}"
        part = torch.rand(len(own), generator=chance, dtype=torch.float64)
        numbers.append((before + part * own[:, 0])[expected.amax(1) < 1])
    found = torch.cat(numbers).numpy()
    assert len(found) == 0 or kstest(found, "uniform").pvalue > LEAST, f"{asked}: drawn from another distribution"


async def samplers_agree(model: SteerModel, reference: Reference, every: Sequence[Mapping[str, Any]]) -> None:
    """All ways of sampling in one batch, half of them of a seed, against transformers.

    Raises:
        AssertionError: as of `check_drawn`, or a seed gives other texts when it is asked again.
    """
    prompts = [random.Random(number).sample(FEW, len(FEW)) * 3 for number in range(len(every))]

    async def run(count: int, *, seeded: bool) -> list[list[list[int]]]:
        pairs = zip(every[:count], prompts[:count], strict=True)
        return await asyncio.gather(*(texts_of(model, asked, prompt, seeded=seeded) for asked, prompt in pairs))

    both = [await run(len(every), seeded=seeded) for seeded in (False, True)]
    assert await run(2, seeded=True) == both[1][:2]  # whatever is beside them
    for asked, prompt, free, seeded in zip(every, prompts, *both, strict=True):
        vocabulary = range(reference.model.config.vocab_size)
        allowed = set(asked.get("allowed_token_ids", vocabulary)) - set(asked.get("stop_token_ids", ()))
        allowed -= {model.tokenizer.encode(word)[0] for word in asked.get("bad_words", ())}
        if "min_tokens" in asked:
            allowed -= {reference.model.config.eos_token_id}
        check_drawn(reference, prompt, [*free, *seeded], asked, sorted({*vocabulary} - allowed))
