"""Arguments of wrong types and values thrown at a live engine, beside requests that must not feel it.

For any engine with a context of 256 tokens and a byte-level vocabulary; see `wrong_types`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final

import numpy as np
import torch

from steercap.core.spec import CaptureSpec
from steercap.errors import SteercapError
from steercap.model import SteerModel
from steercap.steering.edits.add import Add
from steercap.testing.reference import Reference
from support.rows import GREEDY, flattened, hold, random_prompt, settled

#: Most seconds that any request of the driver may take.
PATIENCE: Final = 120.0
#: Most seconds that a wrong request may take to fail, on a machine shared with others.
QUICK: Final = 20.0
IDS: Final = random_prompt(12, 7)
NOT_UTF8: Final = "\ud800"


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def _endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


#: Values that are of no sensible type anywhere, or beyond what can be sent.
ANYTHING: Final[tuple[Any, ...]] = (
    2**64,
    -(10**30),
    float("nan"),
    float("inf"),
    NOT_UTF8,
    b"\xff",
    object(),
    {1, 2},
    {"a": object()},
    {(1, 2): 3},
    [None],
    [True],
    [[]],
    1j,
    torch.ones(3),
    torch.ones(300),
    np.ones(3),
    np.int64(3),
    ...,
)

#: Sampling parameters that must be refused whatever stands beside them, each with its culprit first.
WRONG_PARAMS: Final[tuple[dict[str, Any], ...]] = (
    {"ignore_eos": 1},
    {"ignore_eos": True, "structured_outputs": {"choice": ["yes", "no"]}},
    {"seed": 1.0},
    {"seed": 2**63},
    {"seed": "1"},
    {"seed": 2**63 - 1, "n": 2},
    {"seed": -3, "n": 3},
    {"min_tokens": 1.0},
    {"max_tokens": 5.0},
    {"max_tokens": True},
    {"max_tokens": "5"},
    {"max_tokens": 0},
    {"max_tokenz": 5},
    {"temperature": "hot"},
    {"temperature": float("nan")},
    {"temperature": None},
    {"top_p": 1.5},
    {"top_k": 2.5},
    {"n": 2.0},
    {"n": 0},
    {"stop": [3]},
    {"stop": [""]},
    {"stop": {"a": 1}},
    {"stop_token_ids": ["a"]},
    {"stop_token_ids": [True]},
    {"stop_token_ids": 5},
    {"bad_words": "abc"},
    {"bad_words": [3]},
    {"allowed_token_ids": [1.5]},
    {"allowed_token_ids": 3},
    {"logit_bias": {"5": 1.0}},
    {"logit_bias": {5: "x"}},
    {"logit_bias": {5: float("nan")}},
    {"logit_bias": {5: float("inf")}},
    {"logit_bias": [5]},
    {"logit_bias": {5: -float("inf")}, "allowed_token_ids": [5]},
    {"logprobs": 2.0},
    {"logprobs": -2},
    {"prompt_logprobs": "1"},
    {"logprob_token_ids": [1.5]},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 0.0},
    {"presence_penalty": "a"},
    {"extra_args": 5},
    {"extra_args": {1: 2}},
    {"extra_args": {"a": object()}},
    {"extra_args": {"a": torch.ones(3)}},
    {"extra_args": {"a": np.ones(300)}},
    {"extra_args": {"a": {1, 2}}},
    {"extra_args": {"a": _nested(60)}},
    {"extra_args": {"a": _nested(5000)}},
    {"extra_args": {"a": _endless()}},
    {"extra_args": {"a": 10**30}},
    {"extra_args": {"steercap": b""}},
    {"structured_outputs": 5},
    {"structured_outputs": {"choice": 5}},
    {"repetition_detection": 5},
    {"detokenize": 0},
    {"skip_special_tokens": None},
    {"output_kind": "all"},
    {"output_text_buffer_length": 10**30},
    {"_all_stop_token_ids": {10**9}},
    {"_eos_token_id": 1.5},
    {"skip_clone": True},
)

#: Sampling parameters that only the engine's own vocabulary, tokenizer or frames rule out.
WRONG_HERE: Final[tuple[dict[str, Any], ...]] = (
    {"max_tokens": 2**64},
    {"stop": NOT_UTF8},
    {"stop_token_ids": [10**9]},
    {"stop_token_ids": [-1]},
    {"bad_words": [NOT_UTF8]},
    {"allowed_token_ids": [10**9]},
    {"allowed_token_ids": []},
    {"logit_bias": {10**30: 1.0}},
    {"logprobs": 10**6},
    {"extra_args": {"a": NOT_UTF8}},
    {"extra_args": {"kv_transfer_params": 5}},
    {"structured_outputs": {"regex": "(("}},
    {"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [65, 66]},
    {"structured_outputs": {"json": "{"}},
    {"thinking_token_budget": 3},
    {"trace_decode_token_ids": [3]},
    {"routed_experts_prompt_start": 500},
)

#: Prompt dicts that must be refused.
WRONG_PROMPTS: Final[tuple[dict[Any, Any], ...]] = (
    {"prompt_token_ids": [True]},
    {"prompt_token_ids": [1.0]},
    {"prompt_token_ids": ["a"]},
    {"prompt_token_ids": [None]},
    {"prompt_token_ids": 5},
    {"prompt_token_ids": "abc"},
    {"prompt_token_ids": bytearray(b"abc")},
    {"prompt_token_ids": memoryview(b"abc")},
    {"prompt_token_ids": torch.tensor([3.0, 4.0])},
    {"prompt_token_ids": torch.tensor([True])},
    {"prompt_token_ids": np.array([True, False])},
    {"prompt_token_ids": IDS, "cache_salt": 5},
    {"prompt_token_ids": IDS, "cache_sult": "a"},
    {"prompt": "abc", "mm_processor_kwargs": 5},
    {"encoder_prompt": "a", "decoder_prompt": "b"},
    {5: 6},
)
#: Prompts that only the engine rules out.
WRONG_PROMPTS_HERE: Final[tuple[Any, ...]] = (
    {"prompt_token_ids": [10**30]},
    {"prompt_token_ids": [-1]},
    {"prompt_token_ids": None},
    {"prompt_token_ids": []},
    {"prompt_token_ids": IDS, "cache_salt": NOT_UTF8},
    {"prompt": 5},
    {"prompt": b"abc"},
    {"prompt": "abc", "multi_modal_data": {"image": 5}},
    {"prompt_embeds": torch.ones(3, 128)},
    {},
    f"a{NOT_UTF8}b",
)
#: Further arguments that must be refused.
WRONG_OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {"priority": "high"},
    {"priority": None},
    {"priority": 1.5},
    {"priority": True},
    {"priority": 2**70},
    {"lora_request": 5},
    {"lora_request": "adapter"},
)
#: Unusual, and right.
ODD_PARAMS: Final[tuple[dict[str, Any], ...]] = (
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"top_k": 2**40},
    {"min_p": 1.0},
    {"logit_bias": {3: -float("inf")}},
    {"logit_bias": {5: 1e30}},
    {"extra_args": {"a": [1, "b", b"c", None, {"d": 1.5}]}},
    {"stop": ("zz", "yy")},
    {"stop_token_ids": [5], "min_tokens": 3},
    {"allowed_token_ids": [65, 66]},
    {"bad_words": ["a", "bc"]},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"logprob_token_ids": [1, 2]},
    {"repetition_penalty": 1e30, "presence_penalty": -2.0},
    {"repetition_detection": {"max_pattern_size": 2**40, "min_count": 2}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"n": 3, "seed": 1},
    {"detokenize": False},
    {"max_tokens": None},
    {"max_tokens": np.int64(3)},
    {"stream_interval": 2**40},
)


async def wrong_types(
    model: SteerModel, reference: Reference | None = None, *, rng: random.Random, count: int, together: int = 24
) -> dict[str, int]:
    """Throw requests with wrong arguments at an engine, with right ones beside them.

    Each wrong one must be a SteercapError, quickly; each right one must give its text, and its rows those of the
    reference; none may hang; nothing may be left over.

    Args:
        model: an engine like those of `testing.rows`.
        reference: transformers on the same checkpoint, or None: rows are not compared.
        rng: draws what is asked.
        count: how many requests.
        together: how many of them at once.

    Returns:
        How many of each kind there were.
    """
    known = [(prompt, await model.generate(prompt, _right())) for prompt in (random_prompt(9, 1), random_prompt(90, 2))]
    handles: list[Any] = []
    counts: Counter[str] = Counter()

    async def right() -> None:
        prompt, text = rng.choice(known)
        found, handle = await model.generate(prompt, _right(), capture=CaptureSpec(layers=rng.randrange(4)))
        assert found == text, f"{found!r} in place of {text!r}"
        handles.append(handle)

    async def odd() -> None:
        params: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0}
        params |= rng.choice(ODD_PARAMS)
        await _asked(model, rng, random_prompt(rng.choice((3, 90)), rng.randrange(9)), params, {})

    async def wrong() -> None:
        prompt, params, options = _spoilt(rng)
        try:
            async with asyncio.timeout(QUICK):
                got = await _asked(model, rng, prompt, params, options)
        except SteercapError:
            return
        raise AssertionError(f"{prompt!r}, {params!r}, {options!r} gave {got!r}")

    kinds: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {"right": right, "odd": odd, "wrong": wrong}
    for start in range(0, count, together):
        names = rng.choices(list(kinds), weights=(2, 1, 5), k=min(together, count - start))
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(kinds[name]())
        counts.update(names)
        await model.fetch_captures_batch(handles)
        if reference is not None and handles:
            await asyncio.to_thread(hold, flattened(handles), reference)
        handles.clear()
    assert await settled(model) == (0, 0, 0)
    assert model.engine.get_num_unfinished_requests() == 0
    return dict(counts)


def _right() -> dict[str, Any]:
    return {"max_tokens": 8, **GREEDY}


def _spoilt(rng: random.Random) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A request with one thing that is wrong for certain, and odd ones beside it."""
    prompt: Any = {"prompt_token_ids": IDS}
    params: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, **rng.choice(({}, {}, *ODD_PARAMS))}
    options: dict[str, Any] = {}
    match rng.randrange(6):
        case 0:
            prompt = rng.choice((*WRONG_PROMPTS, *WRONG_PROMPTS_HERE))
        case 1:
            options = rng.choice(WRONG_OPTIONS)
        case 2:
            params |= rng.choice(WRONG_HERE)
        case _:
            params |= rng.choice(WRONG_PARAMS)
    return prompt, params, options


async def _asked(model: SteerModel, rng: random.Random, prompt: Any, params: Any, options: dict[str, Any]) -> Any:
    """Ask in one of the ways there are: whole or in chunks, with rows, with steering, or with neither."""
    asked: dict[str, Any] = dict(options)
    if rng.random() < 0.5:
        asked["capture"] = CaptureSpec(tokens=rng.choice(("all", "generated", "last_prompt")))
    if rng.random() < 0.3:
        asked["steering"] = Add(torch.ones(model.hidden_size), layer=rng.randrange(4), scale=0.1)
    if rng.random() < 0.2 and params.get("n", 1) == 1:
        return [chunk.text async for chunk in _chunks(model, prompt, params, asked)]
    return await model.generate(prompt, params, **asked)


async def _chunks(model: SteerModel, prompt: Any, params: Any, asked: dict[str, Any]) -> AsyncIterator[Any]:
    async with aclosing(model.stream(prompt, params, **asked)) as chunks:
        async for chunk in chunks:
            yield chunk
