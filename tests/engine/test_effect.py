"""Does steering change what a real model says, and says about what it was steered to? SmolLM2-135M, float32."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.rows import GREEDY
from support.specs import vector

from steercap import Ablate, Add, CaptureSpec, SteeringSpec

SEA = [
    "The waves of the ocean broke on the beach, and the sailors watched the sea from their boat.",
    "Fish swim in the deep blue sea, far below the ships that sail on the ocean.",
    "A whale rose from the water beside the ship, and the fishermen on the shore cheered.",
    "The tide brought shells and seaweed to the sand, and gulls flew over the waves.",
    "The captain steered his ship across the ocean through the storm and the high waves.",
    "Dolphins jumped in the bay while the children played in the water on the beach.",
]
LAND = [
    "The papers on the desk fell on the floor, and the clerks watched the clock from their office.",
    "Cars drive on the wide grey road, far below the offices that stand in the city.",
    "A tractor turned on the field beside the barn, and the farmers on the hill cheered.",
    "The wind brought dust and leaves to the street, and pigeons flew over the roofs.",
    "The manager led his company across the country through the crisis and the high costs.",
    "Dogs ran in the garden while the children played in the kitchen of the house.",
]
OPENINGS = [
    "Once upon a time there was a",
    "My favourite memory is",
    "The book begins with",
    "Yesterday I saw",
    "She told me about",
    "He opened the door and",
    "In the morning we",
    "The old man said",
]
OF_THE_SEA = re.compile(
    r"\b(seas?|oceans?|waves?|beach(es)?|ships?|boats?|sail\w*|shore\w*|fish\w*|water\w*|tide\w*|whale\w*|dolphin\w*"
    r"|coast\w*|islands?|captain|sand\w*|swim\w*)\b",
    re.IGNORECASE,
)
LAYER, SCALE, RANDOM = 12, 2.0, 20
PARAMS: dict[str, Any] = {"max_tokens": 40, **GREEDY}


async def contrast(model) -> torch.Tensor:
    """Difference of the mean rows of two sets of texts; the first token, which every text's norm hangs on, left out."""
    capture = CaptureSpec(layers=LAYER, tokens=slice(1, None), reduce="mean")
    _, handles = await model.generate(SEA + LAND, {"max_tokens": 1}, capture=capture)
    await model.fetch_captures_batch(handles)
    means = torch.stack([handle.captures[LAYER][0] for handle in handles])
    return means[: len(SEA)].mean(0) - means[len(SEA) :].mean(0)


@pytest.mark.extended  # test_experiments shows the same of a trait, with random vectors beside it
async def test_a_contrast_vector_changes_what_the_model_says(smol, record_property) -> None:
    """Words of the sea in 8 continuations of 40 tokens: many with the vector, few without, with its reverse, and with
    each of 20 random vectors of its norm.
    """
    direction = await contrast(smol)
    noise = [vector(smol.hidden_size, seed=seed) for seed in range(RANDOM)]
    others = [random * direction.norm() / random.norm() for random in noise]
    specs = [
        None,
        *(SteeringSpec([Add(v, SCALE, layer=LAYER, tokens=slice(1, None))]) for v in (direction, -direction, *others)),
    ]
    texts = await smol.generate(OPENINGS * len(specs), PARAMS, steering=[spec for spec in specs for _ in OPENINGS])
    said = [texts[first : first + len(OPENINGS)] for first in range(0, len(texts), len(OPENINGS))]
    clean, steered, reverse, *random = [sum(len(OF_THE_SEA.findall(text)) for text in one) for one in said]
    record_property("words of the sea", f"clean {clean}, steered {steered}, reversed {reverse}, random {random}")
    record_property("steered text", said[1][0])
    assert all(text != plain for text, plain in zip(said[1], said[0], strict=True))
    assert steered >= 15
    assert max(clean, reverse, *random) <= steered // 3


async def test_ablation_leaves_nothing_of_a_direction(smol) -> None:
    """Ablated at every layer, the projection of every captured row of that site is zero to rounding."""
    direction = await contrast(smol)
    unit = direction / direction.norm()
    _, handles = await smol.generate(
        OPENINGS[:2], PARAMS, capture_layers="all", steering=[None, Ablate(direction, layers="all")]
    )
    await smol.fetch_captures_batch(handles)
    for layer in range(smol.num_layers):
        clean, ablated = (handle.captures[layer] for handle in handles)
        assert ((clean @ unit).abs() / clean.norm(dim=-1)).max() > 1e-2
        assert ((ablated @ unit).abs() / ablated.norm(dim=-1)).max() < 1e-6
