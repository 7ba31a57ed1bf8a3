"""Features that workers read, beside a forward of the SAE in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.spec import CaptureSpec
from steercap.errors import CaptureIncomplete
from steercap.model import SteerModel
from steercap.saes.encoder import Features
from steercap.saes.sae import SAE
from steercap.testing.saes import RandomSAE
from support.rows import GREEDY, random_prompt


def check_features(found: Features, dense: npt.NDArray[np.float64], slack: npt.NDArray[np.float64]) -> float:
    """Check the features of rows against a forward of the SAE.

    Args:
        found: as a handle gives them.
        dense: activations of all features, [rows, d_sae].
        slack: how far an activation may be off, [rows, 1].

    Returns:
        The greatest difference of an activation that is kept.

    Raises:
        CaptureIncomplete: an activation differs, one that is greater than what was left out is missing, they do not
            descend, or the counts are not those of the rows.
    """
    here = found.ids.numpy() >= 0
    rows, places = np.nonzero(here)
    values = found.values.numpy().astype(np.float64)
    apart = np.abs(values[rows, places] - dense[rows, found.ids.numpy()[rows, places]])
    # A feature at its threshold is active in one and not in the other: its value is then the threshold's.
    flipped = dense[rows, found.ids.numpy()[rows, places]] == 0
    wrong = ~(apart <= slack[rows, 0]) & ~flipped
    kept = np.zeros_like(dense, dtype=bool)
    kept[rows, found.ids.numpy()[rows, places]] = True
    missing = np.where(kept, 0, dense).max(axis=1)
    rest = found.rest.numpy()
    counts = np.abs((dense > 0).sum(axis=1) - found.active.numpy())
    problems = {
        "an activation differs": wrong.any(),
        "too many features are at their thresholds": flipped.mean() > 1e-3 if len(flipped) else False,
        "a greater one is missing": (missing > rest + slack[:, 0])[rest > 0].any(),
        "they do not descend": (np.diff(values, axis=1) > 0).any(),
        "what was left out is greater than what was kept": (rest > values[:, -1]).any(),
        "the counts differ": (counts > 1).any() or (counts > 0).mean() > 0.05,
    }
    if said := next((problem for problem, holds in problems.items() if holds), None):
        raise CaptureIncomplete(f"features of {len(dense)} rows: {said}")
    return float(apart[~flipped].max()) if (~flipped).any() else 0.0


async def features_agree(
    model: SteerModel, own: RandomSAE, sae: SAE, *, requests: int = 8, k: int = 24, apart: float = 1.0
) -> float:
    """How far features of many requests in one batch are off NumPy's, made of the rows that come without `sae=`.

    Args:
        model: an open model with the point that the SAE reads.
        own: the SAE in NumPy.
        sae: the same, as it was loaded.
        requests: how many.
        k: features of a token.
        apart: how much further off than the rounding of one sum; more than 1 where two runs of one prompt differ too.

    Raises:
        AssertionError: a feature is on in one and off in the other, or a value differs by more than rounding explains.
    """
    prompts = [random_prompt(9 + 23 * number, number) for number in range(requests)]
    params = {"max_tokens": 7, **GREEDY}
    layer, site = sae.input
    both = []
    for spec in (CaptureSpec(sae=sae, sae_k=k), CaptureSpec(layers=layer, sites=site)):
        _, handles = await model.generate(prompts, params, capture=spec)
        await model.fetch_captures_batch(handles)
        both.append(handles)
    greatest = 0.0
    for read, whole in zip(*both, strict=True):
        assert read.output_token_ids == whole.output_token_ids, "two runs sampled other tokens"
        rows = whole.captures[layer, site]
        found = read.features[layer, site]
        assert found.ids.shape == (len(rows), k)
        assert torch.equal(read.positions, whole.positions)
        greatest = max(greatest, check_features(found, own.encode(rows), apart * own.slack(rows)))
        assert torch.equal(read.captures[layer, site], found.dense())
    return greatest
