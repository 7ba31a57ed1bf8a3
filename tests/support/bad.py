"""Requests that must be refused, each with the error and the words it must be refused with.

For an engine of 4 layers of width 128, with a context of 256 tokens and all sites armed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from steercap import errors
from steercap.core.spec import CaptureSpec
from steercap.steering.edits.add import Add
from steercap.steering.spec import SteeringSpec
from support.rows import GREEDY, random_prompt

PROMPT: Final = random_prompt(10, 1)
SIX: Final[dict[str, Any]] = {"max_tokens": 6, **GREEDY}


class Bad(NamedTuple):
    """A request that must be refused.

    Args:
        arguments: what it gives to `generate` beyond, or in place of, `PROMPT` and `SIX`.
        error: what it must raise.
        says: a pattern that its message must match.
    """

    arguments: Mapping[str, Any]
    error: type[errors.SteercapError]
    says: str


BAD_REQUESTS: Final = (
    Bad({"capture_layers": 4}, errors.LayerOutOfRange, "layer 4 is outside this model of 4 layers; use 0 to 3"),
    Bad({"capture_layers": [0, -5]}, errors.LayerOutOfRange, "layer -5"),
    Bad({"capture_layers": []}, errors.InvalidSpec, "selects none of the 4 layers"),
    Bad({"capture_layers": "some"}, errors.InvalidSpec, "'some' is not a layer"),
    Bad({"capture_layers": True}, errors.InvalidSpec, "True is not a layer"),
    Bad({"capture_layers": [True, False]}, errors.InvalidSpec, "mask of 2 truth values, and this model has 4 layers"),
    Bad({"capture": CaptureSpec(tokens=[True] * 9)}, errors.InvalidSelection, "mask of 9 .* can have 10, .* or 15,"),
    Bad({"steering": Add(torch.ones(128), layer=1, tokens=torch.arange(4) > 1)}, errors.InvalidSelection, "mask of 4"),
    Bad({"capture_layers": 1, "capture": CaptureSpec()}, errors.InvalidSpec, "not both"),
    Bad({"capture": CaptureSpec(sites="resid_late")}, errors.UnknownName, "known: 'attn_in', 'attn_out', 'embed'"),
    Bad({"capture": CaptureSpec(tokens=[99])}, errors.InvalidSelection, "position 99 is outside the sequence"),
    Bad({"capture": CaptureSpec(tokens=-11)}, errors.InvalidSelection, "positions -10 to 14"),
    Bad({"capture": CaptureSpec(tokens=slice(4, 4))}, errors.EmptySelection, "selects none of the 15 positions"),
    Bad(
        {"capture": CaptureSpec(codec="zip")},
        errors.UnknownName,
        "unknown codec 'zip'; known: 'fp8', 'full8', 'int4', 'raw'",
    ),
    Bad({"capture": [CaptureSpec()] * 2}, errors.InvalidRequest, "2 entries for 1 prompts"),
    Bad({"sampling_params": {"max_tokens": -3}}, errors.InvalidRequest, "max_tokens"),
    Bad({"sampling_params": {"max_tokenz": 3}}, errors.InvalidRequest, "max_tokenz"),
    Bad({"sampling_params": {"extra_args": {"steercap": b""}}}, errors.InvalidRequest, "belongs to steercap"),
    Bad({"capture": {"layers": [1]}}, errors.InvalidSpec, "give a CaptureSpec"),
    Bad({"prompts": [None]}, errors.InvalidPrompt, "None cannot be a prompt"),
    Bad({"prompts": []}, errors.InvalidPrompt, "is empty; give at least one prompt"),
    Bad({"prompts": [PROMPT, []]}, errors.InvalidPrompt, "cannot be a prompt|holds no token"),
    Bad({"prompts": ""}, errors.InvalidPrompt, "''"),
    Bad({"prompts": 3}, errors.InvalidPrompt, "prompts=3"),
    Bad({"prompts": random_prompt(256, 1)}, errors.InvalidPrompt, "256"),
    Bad({"prompts": random_prompt(900, 1)}, errors.InvalidPrompt, "256"),
    Bad({"prompts": {"prompt_token_ids": [1_000_000]}}, errors.InvalidRequest, "1000000"),
    Bad({"steering": Add(torch.ones(64), layer=1)}, errors.InvalidVector, "width 64"),
    Bad({"steering": Add(torch.ones(128), layer=1, tokens=99)}, errors.InvalidRequest, "99"),
    Bad({"steering": SteeringSpec([Add(torch.ones(128), layer=1)] * 17)}, errors.TooManyEdits, "edits_per_point"),
    Bad({"steering": {"layer": 1}}, errors.InvalidSpec, "give a SteeringSpec"),
    Bad({"steering": [None, None]}, errors.InvalidRequest, "2 entries for 1 prompts"),
    Bad(
        {
            "steering": Add(torch.ones(128), layer=1, tokens="generated"),
            "sampling_params": {"max_tokens": 1},
        },
        errors.InvalidRequest,
        "selects none",
    ),
)
