"""Measures that compare rows decoded from a codec with raw rows: ranks of neurons, probes, directions, cosines, SAEs.

Everything is float64 on the CPU. Rows of a random projection are compared in the space of the projection: directions
and probes are projected too. A measure that is not possible for a codec's rows is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.schema import Coding
from steercap.core.spec import Point
from steercap.kernels.codecs.coded import encoded
from steercap.lab.datasets.rows import Normalisation
from steercap.lab.training.sae import SAETraining
from steercap.saes.sae import SAE

Floats: TypeAlias = npt.NDArray[np.float64]

#: Maximum rows whose pairs give the error of cosines; number of cross-validation folds, of texts, for a probe.
PAIRED: Final = 256
FOLDS: Final = 4
#: Ridge penalty of a probe, as a share of the mean squared norm of the centred mean rows of texts.
RIDGE: Final = 0.1
#: Share of the greatest variance below which a principal direction is only rounding error.
MINOR: Final = 1e-9
#: Greatest code of a signed 8-bit integer.
CODES: Final = 127
#: Number of features, active features, training steps, and rows per step of the SAE that a check trains.
FEATURES: Final = 512
ACTIVE: Final = 16
STEPS: Final = 300
BATCH: Final = 256


@dataclass(frozen=True, eq=False)
class CheckedRows:
    """Rows of one point, encoded by a codec and decoded.

    Args:
        rows: decoded rows, [rows, width], or [rows, k] if the codec projects them.
        bytes: bytes of an encoded row.
        matrix: matrix of the projection, [k, width]; None if the codec does not project rows.
    """

    rows: Floats
    bytes: int = 0
    matrix: Floats | None = None

    @staticmethod
    def of(raw: torch.Tensor, coding: Coding) -> CheckedRows:
        """Encode and decode raw rows, [rows, *shape of the point], by a codec, and flatten them to [rows, width]."""
        found = encoded(raw, coding)
        if isinstance(found, torch.Tensor):
            return CheckedRows(_floats(found.flatten(1)), found.nbytes // len(found))
        matrix = None if found.matrix is None else _floats(found.matrix)
        return CheckedRows(_floats(found.decoded().flatten(1)), found.nbytes // len(found), matrix)

    def into(self, vectors: Floats) -> Floats:
        """Return vectors, [n, width], in the space of the rows: projected to [n, k] if the rows are."""
        return vectors if self.matrix is None else vectors @ self.matrix.T


def _floats(tensor: torch.Tensor) -> Floats:
    return cast("Floats", tensor.double().numpy())


def correlation(ours: Floats, theirs: Floats) -> float:
    """Return Pearson's correlation of two arrays [n]; if one is constant, 1 if both are equal, else 0."""
    if np.array_equal(ours, theirs):
        return 1.0
    mine, other = ours - ours.mean(), theirs - theirs.mean()
    lengths = float(np.linalg.norm(mine) * np.linalg.norm(other))
    return float(mine @ other) / lengths if lengths > 0 else 0.0


def ranks(values: Floats) -> Floats:
    """Return the ranks of numbers, float64 [n], from 0 for the least; equal numbers share the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts + 1) / 2)[which]


def neuron_ranks(raw: CheckedRows, kept: CheckedRows) -> float | None:
    """Return Spearman's correlation of each element's mean absolute value, raw and kept; None for projected rows."""
    if kept.matrix is not None:
        return None
    return correlation(ranks(np.abs(raw.rows).mean(axis=0)), ranks(np.abs(kept.rows).mean(axis=0)))


def cosines_with(rows: CheckedRows, directions: Floats) -> Floats:
    """Return the cosines, [rows, directions], of rows and `directions`, [directions, width]; 0 for a row of zeros."""
    return _unit(rows.rows) @ _unit(rows.into(directions)).T


def _unit(rows: Floats) -> Floats:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return cast("Floats", rows / np.where(norms > 0, norms, 1))


def cosine_error(raw: CheckedRows, kept: CheckedRows, seed: int) -> float:
    """Return the root mean square error of the cosines of all pairs among at most `PAIRED` rows, drawn by `seed`."""
    count = len(raw.rows)
    drawn = np.random.default_rng(seed).permutation(count)[:PAIRED]
    ours, theirs = _unit(raw.rows[drawn]), _unit(kept.rows[drawn])
    apart = (ours @ ours.T - theirs @ theirs.T)[np.triu_indices(len(drawn), 1)]
    return float(np.sqrt(np.square(apart).mean()))


def rounding(raw: CheckedRows, kept: CheckedRows) -> tuple[float, float]:
    """Compare projections with their values before rounding, as kept, and rounded by a fixed step for each element.

    The fixed steps are from the first half of the rows, and are tried on the second half, where elements beyond 127
    steps are clipped. The kept projections, rounded by a step per group, are compared on all rows.

    Returns:
        The least cosine of a row with itself before rounding: as kept, and with the fixed steps.
    """
    assert kept.matrix is not None, "rows are projected"
    exact = raw.rows @ kept.matrix.T
    known, rest = np.array_split(exact, 2)
    step = np.abs(known).max(axis=0) / CODES
    step = np.where(step > 0, step, 1)
    frozen = np.rint(rest / step).clip(-CODES, CODES) * step
    return _least_cosine(exact, kept.rows), _least_cosine(rest, frozen)


def _least_cosine(ours: Floats, theirs: Floats) -> float:
    return float((_unit(ours) * _unit(theirs)).sum(axis=1).min())


def text_means(rows: Floats, texts: npt.NDArray[np.int64]) -> Floats:
    """Return the mean row of each text, [texts, width]; `texts` is the index of each row's text, ascending from 0."""
    starts = np.searchsorted(texts, np.arange(texts[-1] + 1))
    sums = np.add.reduceat(rows, starts, axis=0)
    return sums / np.bincount(texts)[:, None]


def concept_scores(rows: Floats, texts: npt.NDArray[np.int64], labels: Floats) -> tuple[Floats, Floats]:
    """Score rows by cross-validated probes: ridge regressions of labels on the mean rows of the other folds' texts.

    Args:
        rows: rows, [rows, width].
        texts: index of each row's text, ascending from 0.
        labels: one number for each text, [texts].

    Returns:
        Scores of the rows, [rows], and of the texts' mean rows, [texts].
    """
    centres = text_means(rows, texts)
    fold = np.empty(len(labels), dtype=np.int64)
    fold[np.argsort(labels, kind="stable")] = np.arange(len(labels)) % FOLDS
    scored, of_texts = np.empty(len(rows)), np.empty(len(labels))
    for number in range(FOLDS):
        held = fold == number
        centre, offset, weight = _ridge(centres[~held], labels[~held])
        of_texts[held] = (centres[held] - centre) @ weight + offset
        own = held[texts]
        scored[own] = (rows[own] - centre) @ weight + offset
    return scored, of_texts


def _ridge(rows: Floats, labels: Floats) -> tuple[Floats, float, Floats]:
    """Fit a ridge regression of labels [n] on rows [n, width]; return centre [width], offset and weights [width]."""
    centre, offset = rows.mean(axis=0), float(labels.mean())
    gram = (rows - centre) @ (rows - centre).T
    penalty = RIDGE * np.trace(gram) / len(gram)
    solved = np.linalg.solve(gram + max(penalty, 1e-30) * np.eye(len(gram)), labels - offset)
    return centre, offset, (rows - centre).T @ solved


def explained(sae: SAE, raw: Floats, kept: Floats) -> float:
    """Return the share of the raw rows' variance explained by an SAE given the kept rows; 0 if all are equal."""
    given = torch.from_numpy(kept).float()
    found = _floats(sae.decode(sae.encode(given), given))
    spread = float(np.square(raw - raw.mean(axis=0)).sum())
    return 1 - float(np.square(raw - found).sum()) / spread if spread > 0 else 0.0


def features_of(sae: SAE, rows: Floats, texts: npt.NDArray[np.int64]) -> Floats:
    """Return each text's mean feature activations, [texts, d_sae]; `texts` is each row's text index, ascending."""
    starts = [*np.searchsorted(texts, np.arange(texts[-1] + 1)), len(texts)]
    parts = (torch.from_numpy(rows[first:last]).float() for first, last in pairwise(starts))
    return np.stack([_floats(sae.encode(part)).mean(axis=0) for part in parts])


def trained_sae(rows: Floats, point: Point, seed: int) -> SAE:
    """Train a small top-k SAE on rows, [rows, width], of a point; deterministic for a seed on one machine.

    If all rows are equal, it is returned untrained.
    """
    whole = torch.from_numpy(rows).float()
    centre = whole.mean(dim=0)
    scale = torch.tensor([1 / (float((whole - centre).square().mean().sqrt()) or 1.0)])
    whole = (whole - centre) * scale
    how: dict[str, Any] = {
        "features": FEATURES,
        "k": ACTIVE,
        "lr": 1e-3,
        "normalisation": Normalisation(centre, scale),
        "seed": seed,
    }
    training, generator = SAETraining(point, rows.shape[1], **how), torch.Generator().manual_seed(seed)
    for _ in range(STEPS if bool((whole != whole[0]).any()) else 0):
        training.step(whole[torch.randint(len(whole), (min(BATCH, len(whole)),), generator=generator)])
    return training.sae()


def principal(rows: Floats, count: int) -> Mapping[str, Floats]:
    """Return the first principal directions of rows, at most `count`, by name, pc1 first: unit vectors, [width]."""
    centred = rows - rows.mean(axis=0)
    gram = centred @ centred.T if len(rows) < rows.shape[1] else centred.T @ centred
    values, vectors = np.linalg.eigh(gram)
    order = np.argsort(-values)[:count]
    best = vectors[:, order[values[order] > MINOR * values.max()]]
    along = best.T @ centred if len(rows) < rows.shape[1] else best.T
    return {f"pc{number}": one for number, one in enumerate(_unit(along), 1)}
