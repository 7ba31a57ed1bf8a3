"""Biases of logits, compared with transformers' own decoding and a LogitsProcessor of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from steercap.core.tokens import selected
from steercap.requests.call_types import Generation
from steercap.steering.edits.add import Add
from steercap.steering.spec import LogitBias, SteeringSpec, spec_of
from steercap.testing.reference import Reference
from support.rows import GREEDY, random_prompt
from support.specs import edit, vector

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Of the checkpoints of `steercap.testing`.
VOCABULARY: Final = 512
WIDTH: Final = 128
#: Prompts repeat themselves, so that there is something to draft from.
PROMPT: Final = 24
TOKENS: Final = 16
#: Log probabilities in nats, float32 against float32.
BOUND: Final = 1e-4
#: Most log probabilities that vLLM gives by default.
SHOWN: Final = 20


def varied(seed: int) -> torch.Tensor:
    """A bias of every token, float32 [vocabulary]."""
    return vector(VOCABULARY, seed=seed) * 2


def every_scope() -> Sequence[SteeringSpec | LogitBias | Any | None]:
    """Biases in every scope, dense and of few tokens, beside each other, beside edits and beside nothing."""
    return (
        None,
        LogitBias(dict.fromkeys(range(40, 90), 4.0)),
        LogitBias(varied(1), tokens="generated"),
        LogitBias(varied(2), tokens="last_prompt"),
        LogitBias(varied(3), tokens="prompt"),
        LogitBias(varied(4), tokens=slice(-2, None, 3)),
        LogitBias(varied(5), tokens=[-1, 25, 26]),
        LogitBias(varied(6), tokens=[position % 2 == 0 for position in range(PROMPT + TOKENS - 1)]),
        LogitBias({7: 1e4}),  # whose text is token 7, again and again
        SteeringSpec([LogitBias(varied(7)), LogitBias({3: 6.0, 4: 2.5}, tokens="generated"), LogitBias({3: -1.0})]),
        SteeringSpec([Add(vector(WIDTH, seed=8), 3.0, layer=1), LogitBias(varied(9), tokens=slice(26, 32))]),
        SteeringSpec(
            [
                LogitBias(varied(10), tokens=["last_prompt", slice(30, None)]),
                SteeringSpec([edit("cap", WIDTH, layers="all"), edit("add", WIDTH, layer=2)], preserve_norm=True),
            ]
        ),
        edit("add", WIDTH, layer=0),
    )


def positions_biased(bias: LogitBias, prompt_len: int, tokens: int) -> int:
    """How many positions with logits a bias holds."""
    limit = prompt_len + tokens - 1
    return int(selected(bias.selection.ranges(prompt_len, limit), limit)[prompt_len - 1 :].sum())


async def biases_agree(model: SteerModel, reference: Reference) -> float:
    """Biases of every scope in one batch, from a fresh cache and again.

    Tokens, log probabilities of the likeliest and of the sampled token, and receipts.

    Args:
        model: it serves a checkpoint of `steercap.testing`, in float32.
        reference: of the same.

    Returns:
        The largest difference of log probabilities, in nats.
    """
    specs = every_scope()
    prompts = [random_prompt(6, 50 + number) * (PROMPT // 6) for number in range(len(specs))]
    params = {"max_tokens": TOKENS, "logprobs": SHOWN, **GREEDY}
    wanted = [
        reference.greedy(prompt, TOKENS, None if given is None else spec_of(given))
        for prompt, given in zip(prompts, specs, strict=True)
    ]
    worst = 0.0
    for _ in range(2):
        raws: Any = await asyncio.gather(
            *(model.run(prompt, params, steering=given) for prompt, given in zip(prompts, specs, strict=True))
        )
        for given, raw, (tokens, logprobs) in zip(specs, raws, wanted, strict=True):
            worst = np.maximum(worst, _difference(given, raw, tokens, logprobs))
    assert worst <= BOUND, worst
    return worst


def _difference(given: Any, raw: Generation, tokens: Sequence[int], logprobs: torch.Tensor) -> float:
    """The largest difference of log probabilities, of the same tokens."""
    (sample,) = raw.output.outputs
    assert list(sample.token_ids) == list(tokens), given
    for number, part in enumerate(spec_of(given).flat() if given is not None else ()):
        if isinstance(part, LogitBias):
            assert raw.steering is not None
            assert raw.steering[0].rows[number] == positions_biased(part, PROMPT, TOKENS), part
    said: Sequence[Mapping[int, Any]] = sample.logprobs or ()
    assert len(said) == TOKENS, given
    assert all(len(at) >= SHOWN for at in said), given
    differences = [
        abs(float(one.logprob) - float(row[token]))
        for at, row in zip(said, logprobs, strict=True)
        for token, one in at.items()
    ]
    return float(np.max(differences))
