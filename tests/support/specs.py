"""Edits for tests: every operation, with vectors that no other seed gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from steercap.steering.edits import Edit
from steercap.steering.edits.add import Add, AddIf, LowRank, SAEFeature
from steercap.steering.edits.replace import Ablate, Cap, Replace, SetProjection
from steercap.steering.spec import SteeringSpec

OPERATIONS = ("add", "add_if", "ablate", "cap", "set_projection", "sae_feature", "low_rank", "replace")
#: Spellings beyond the plain one.
VARIANTS = ("relative", "relative_if", "decoder_bias", "preserve_norm", "replace_elements")


def vector(*shape: int, seed: int) -> torch.Tensor:
    """A standard normal tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def edit(operation: str, width: int, *, seed: int = 0, **scope: Any) -> Edit:  # noqa: PLR0912 -- a case each
    """One edit by name, strong enough to be seen in every row it touches."""
    first, second, third = (vector(width, seed=1000 * seed + part) for part in range(3))
    match operation:
        case "add":
            return Add(first, 2.0, **scope)
        case "relative":
            return Add(first, 0.5, relative=True, **scope)
        case "add_if":
            return AddIf(first, second, threshold=0.1, scale=2.0, bias=0.05, **scope)
        case "relative_if":
            return AddIf(first, second, scale=0.5, relative=True, **scope)
        case "ablate":
            return Ablate(first, **scope)
        case "cap":
            return Cap(first, low=-0.05, high=0.02, **scope)
        case "set_projection":
            return SetProjection(first, 3.0, **scope)
        case "sae_feature":
            return SAEFeature(first / width**0.5, second, 1.5, bias=0.1, **scope)
        case "decoder_bias":
            return SAEFeature(first / width**0.5, second, 1.5, decoder_bias=third, **scope)
        case "jumprelu":
            return SAEFeature(first / width**0.5, second, 1.5, bias=0.1, threshold=0.5, **scope)
        case "low_rank":
            read, write = (vector(3, width, seed=1000 * seed + part) / width**0.5 for part in (3, 4))
            return LowRank(read, write, bias=vector(3, seed=1000 * seed + 5), **scope)
        case "replace" | "replace_elements":
            scope.pop("tokens", None)
            if operation == "replace_elements":
                scope["elements"] = slice(width // 4, width // 2)
            positions = [[0, -1], [-1], [0]][seed % 3]
            return Replace(vector(len(positions), width, seed=1000 * seed + 6), positions, **scope)
    raise AssertionError(operation)


def spec(name: str, width: int, *, seed: int = 0, **scope: Any) -> SteeringSpec:
    """A spec of one operation, or of one of the variants."""
    if name == "preserve_norm":
        return SteeringSpec([edit("add", width, seed=seed, **scope)], preserve_norm=True)
    return SteeringSpec([edit(name, width, seed=seed, **scope)])


def random_spec(rng: random.Random, width: int, layers: int, sites: Sequence[str], prompt_len: int) -> SteeringSpec:
    """One to five edits of one to three kinds, so that often several are of one kind, anywhere, on any tokens."""
    tokens: tuple[Any, ...] = (
        "all",
        "prompt",
        "generated",
        "last_prompt",
        slice(prompt_len // 2, prompt_len + 4),
        [0, -1],
        slice(None, None, 3),
    )
    known = [name for name in (*OPERATIONS, *VARIANTS[:3]) if name != "replace" or prompt_len > 1]
    kinds = rng.sample(known, rng.randint(1, 3))
    edits = [
        edit(
            rng.choice(kinds),
            width,
            seed=rng.randrange(1 << 20),
            layers=sorted(rng.sample(range(layers), rng.randint(1, layers))),
            site=rng.choice(list(sites)),
            tokens=rng.choice(tokens),
        )
        for _ in range(rng.randint(1, 5))
    ]
    return SteeringSpec(edits, preserve_norm=rng.random() < 0.3)
