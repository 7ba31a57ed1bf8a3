"""Structured outputs under all that moves requests about: chunks, preemption, samples, seeds, steering, cancellation.

For an engine like `rows.CRAMPED` that serves a tiny model with a byte-level tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from steercap.core.spec import CaptureSpec
from steercap.model import SteerModel
from steercap.steering.edits.add import Add
from support.rows import random_prompt, settled

#: Most seconds that any request may take.
PATIENCE: Final = 120.0


class Structure(NamedTuple):
    """A constraint, and how to tell whether a text keeps it.

    Args:
        asked: vLLM's structured outputs.
        whole: whether a finished text is of it.
        begun: whether a text that was cut short can become one.
    """

    asked: dict[str, Any]
    whole: Callable[[str], bool]
    begun: Callable[[str], bool]


def _choice(*words: str) -> Structure:
    return Structure(
        {"choice": list(words)}, lambda text: text in words, lambda text: any(word.startswith(text) for word in words)
    )


def _is_answer(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return set(found) == {"a", "b"} and type(found["a"]) is int and found["b"] in {"x", "y"}


STRUCTURES: Final = (
    _choice("yes", "no", "perhaps"),
    _choice("positive", "negative"),
    Structure(
        {"regex": "[ab]{3,8}c"},
        lambda text: re.fullmatch("[ab]{3,8}c", text) is not None,
        lambda text: re.fullmatch("[ab]{0,8}c?", text) is not None,
    ),
    Structure(
        {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        },
        _is_answer,
        lambda text: re.match(r'\s*(\{|$)\s*("|$)', text) is not None,
    ),
)
#: What may stand beside a structure.
BESIDE: Final[tuple[dict[str, Any], ...]] = (
    {},
    {},
    {},
    {"min_tokens": 2},
    {"min_tokens": 15},
    {"stop": ["zz"]},
    {"logprobs": 3},
    {"presence_penalty": 1.5},
)


async def structured_outputs(
    model: SteerModel, *, rng: random.Random, count: int, together: int = 48
) -> dict[str, int]:
    """Ask for structured outputs and for free ones, mixed; a text outside of its structure is an AssertionError.

    Args:
        model: the engine.
        rng: draws what is asked.
        count: how many requests.
        together: how many of them at once.

    Returns:
        How many texts were whole, cut short by `max_tokens`, or free; how many requests were cancelled.
    """
    counts: Counter[str] = Counter()

    async def ask() -> None:
        structure = rng.choice((None, *STRUCTURES, *STRUCTURES))
        params = _params(rng) | ({} if structure is None else {"structured_outputs": structure.asked})
        arguments: dict[str, Any] = {}
        if rng.random() < 0.5:
            direction = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
            arguments["steering"] = Add(direction, layer=rng.randrange(4), scale=rng.choice((1, 30, 1000)))
        if rng.random() < 0.6:
            arguments["capture"] = CaptureSpec(tokens=rng.choice(("all", "last_prompt")))
        await asyncio.sleep(rng.random() * 0.5)
        task = asyncio.create_task(model.run(_prompt(rng), params, **arguments))
        if rng.random() < 0.1:
            asyncio.get_running_loop().call_later(rng.random(), task.cancel)
        await asyncio.wait([task])
        if task.cancelled():
            counts["cancelled"] += 1
            return
        for sample in task.result().output.outputs:
            counts[_judged(structure, sample, params)] += 1

    for start in range(0, count, together):
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            for _ in range(min(together, count - start)):
                group.create_task(ask())
    assert await settled(model) == (0, 0, 0)
    return dict(counts)


def _judged(structure: Structure | None, sample: Any, params: dict[str, Any]) -> str:
    if structure is None:
        return "free"
    # Text is held back while it may be the beginning of a stop string, or lies within a character.
    whole = sample.finish_reason == "stop"
    assert (structure.whole if whole else structure.begun)(sample.text), (sample.text, sample.finish_reason, params)
    return "whole" if whole else "cut short"


def _prompt(rng: random.Random) -> list[int]:
    """Random bytes, which may end within a character; few enough prompts that they meet in the prefix cache."""
    return random_prompt(rng.choice((1, 5, 31, 64, 65, 120)), rng.randrange(8))


def _params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": rng.choice((15, 60, 100)), **rng.choice(BESIDE)}
    if rng.random() < 0.5:
        return {**params, "temperature": 0.0}
    return {**params, "temperature": 1.0, "n": rng.choice((1, 1, 3)), "seed": rng.choice((None, rng.randrange(99)))}
