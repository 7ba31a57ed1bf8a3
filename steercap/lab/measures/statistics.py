"""Statistics over few clusters: bootstrap intervals, paired differences, multiple comparisons.

A cluster is a question with all its answers, which are dependent: so clusters are resampled, each by its mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steercap.core.extras import extra
from steercap.errors import InvalidSpec

Floats: TypeAlias = npt.NDArray[np.float64]

#: Confidence level of all intervals.
LEVEL: Final = 0.95
#: Number of bootstrap draws: the ends of a 95 % interval vary by some 2 % of its width between seeds.
DRAWS: Final = 4000
#: Number n of clusters up to which a test tries all 2^n sign vectors, 65,536; for more, as many are drawn.
EXACT: Final = 16


class Estimate(msgspec.Struct, frozen=True):
    """Mean over clusters, with its confidence interval.

    Args:
        value: mean of the clusters' means, for factors the geometric one; NaN without any measured cluster.
        low, high: ends of the interval; NaN for fewer than two clusters.
        clusters: number of clusters with a value.
    """

    value: float
    low: float
    high: float
    clusters: int


class Difference(msgspec.Struct, frozen=True):
    """Mean paired difference between two sets of values of the same clusters, with interval and test.

    Args:
        value: mean of the clusters' differences; for factors the geometric mean of their ratios.
        low, high: ends of the interval; NaN for fewer than two clusters.
        p: two-sided p of the sign-flip test: probability of a mean difference as far from 0 if the sign of each cluster
            were random; NaN for fewer than two clusters, or if a difference is infinite.
        clusters: number of clusters with a value in both sets.
    """

    value: float
    low: float
    high: float
    p: float
    clusters: int


def clusters_of(items: Sequence[Any]) -> list[int]:
    """Return for each item, such as a question, the index of the first that equals it: equal ones are one cluster."""
    first: dict[str, int] = {}
    return [first.setdefault(repr(item), at) for at, item in enumerate(items)]


def cluster_means(values: Sequence[Sequence[float]], *, log: bool = False) -> Floats:
    """Return the mean of each cluster: float64 [clusters], NaN for a cluster without values.

    Args:
        values: values of each cluster; NaN is ignored.
        log: True for factors: return the mean of their logarithms.
    """
    found = np.full(len(values), np.nan)
    for place, own in enumerate(values):
        known = np.asarray(own, dtype=np.float64)
        known = known[~np.isnan(known)]
        if len(known):
            found[place] = (np.log(known) if log else known).mean()
    return found


def estimate(means: Floats, *, seed: int = 0, log: bool = False) -> Estimate:
    """Return the mean of clusters with a bootstrap confidence interval.

    Clusters are drawn with replacement. Percentiles of the draws are too narrow where clusters are few, by
    sqrt((n - 1) / n) and by t against the normal; so they are taken further out, at
    Phi(-sqrt(n / (n - 1)) t(alpha / 2, n - 1)). Source: Hesterberg (2015), What Teachers Should Know About the
    Bootstrap, arXiv:1411.5279, section 5.3, expanded percentiles.

    Args:
        means: cluster means, float64 [clusters], as returned by `cluster_means`; NaN is ignored.
        seed: seed of the draws.
        log: True if `means` are logarithms; value and ends are then exponentiated.
    """
    known = np.asarray(means, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return Estimate(math.nan, math.nan, math.nan, 0)
    low, high = interval(known, seed) if len(known) > 1 else (math.nan, math.nan)
    found = (float(known.mean()), low, high)
    value, low, high = map(math.exp, found) if log else found
    return Estimate(value, low, high, len(known))


def interval(known: Floats, seed: int) -> tuple[float, float]:
    """Return the ends of the bootstrap interval of the mean, by expanded percentiles; see `estimate`.

    Args:
        known: cluster means, float64 [clusters], two at least.
        seed: seed of the draws.
    """
    with extra("evaluation"):
        from scipy.special import ndtr, stdtrit

    count = len(known)
    drawn = np.random.default_rng(seed).integers(count, size=(DRAWS, count))
    tail = float(ndtr(math.sqrt(count / (count - 1)) * stdtrit(count - 1, (1 - LEVEL) / 2)))
    low, high = np.quantile(known[drawn].mean(1), [tail, 1 - tail])
    return float(low), float(high)


def difference(ours: Floats, theirs: Floats, *, log: bool = False) -> Difference:
    """Estimate the mean difference `ours` - `theirs` between two sets of values of the same clusters.

    Args:
        ours, theirs: cluster means, float64 [clusters], in the same order; a cluster with NaN in either is ignored. All
            is NaN if one is infinite in both.
        log: as for `estimate`.

    Raises:
        InvalidSpec: the numbers of clusters differ.
    """
    if len(ours) != len(theirs):
        raise InvalidSpec(
            f"{len(ours)} clusters against {len(theirs)}; a paired difference needs the same clusters in both"
        )
    with np.errstate(invalid="ignore"):
        apart = (ours - theirs)[~(np.isnan(ours) | np.isnan(theirs))]
    if np.isnan(apart).any():
        return Difference(math.nan, math.nan, math.nan, math.nan, len(apart))
    found = estimate(apart, log=log)
    return Difference(found.value, found.low, found.high, sign_flip(apart), found.clusters)


def sign_flip(apart: Floats) -> float:
    """Return the two-sided p-value of the mean of clusters' differences, float64 [clusters], by the sign-flip test.

    With n clusters no p is below 2 / 2^n: 0.0005 with 12, 0.06 with 5. Source: Fisher (1935), The Design of
    Experiments, section 21. For more than `EXACT` clusters, signs are drawn with a fixed seed. NaN for fewer than two.
    """
    count = len(apart)
    if count < 2 or not np.isfinite(apart).all():
        return math.nan
    if count <= EXACT:
        signs = 1 - 2.0 * ((np.arange(1 << count)[:, None] >> np.arange(count)) & 1)
        beyond, of = _as_far(signs @ apart, apart), 1 << count
    else:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(1 << EXACT, count))
        beyond, of = _as_far(signs @ apart, apart) + 1, (1 << EXACT) + 1  # what was found is one of the draws
    return beyond / of


def holm(p: Sequence[float]) -> Floats:
    """Return p-values adjusted by Holm's method, which bounds the probability of any false discovery: float64 [p].

    Source: Holm (1979), A Simple Sequentially Rejective Multiple Test Procedure.

    Args:
        p: p-value of each comparison; NaN is ignored and stays.
    """
    return _adjusted(p, lambda ranked: np.maximum.accumulate(ranked * np.arange(len(ranked), 0, -1)))


def benjamini_hochberg(p: Sequence[float]) -> Floats:
    """Return p-values adjusted by Benjamini and Hochberg's method, which bounds the false discovery rate: float64 [p].

    Source: Benjamini and Hochberg (1995), Controlling the False Discovery Rate.

    Args:
        p: p-value of each comparison; NaN is ignored and stays.
    """

    def raised(ranked: Floats) -> Floats:
        steps = ranked * len(ranked) / np.arange(1, len(ranked) + 1)
        return np.minimum.accumulate(steps[::-1])[::-1]

    return _adjusted(p, raised)


def slope(rows: Floats) -> Floats:
    """Return the least-squares slope of each row over the column index: float64 [clusters]; NaN for under two values.

    Args:
        rows: values, float64 [clusters, columns], NaN for a missing one.
    """
    at = np.where(np.isnan(rows), np.nan, np.arange(rows.shape[1], dtype=np.float64))
    enough = (~np.isnan(rows)).sum(1) > 1
    found = np.full(len(rows), np.nan)
    known, places = rows[enough], at[enough]
    apart = places - np.nanmean(places, 1, keepdims=True)
    found[enough] = np.nansum(apart * known, 1) / np.nansum(apart * apart, 1)
    return found


def _as_far(sums: Floats, apart: Floats) -> int:
    found = abs(apart.sum())
    return int((np.abs(sums) >= found - 1e-9 * np.abs(apart).sum()).sum())  # equal sums differ by rounding


def _adjusted(p: Sequence[float], step: Callable[[Floats], Floats]) -> Floats:
    given = np.asarray(p, dtype=np.float64)
    known = np.flatnonzero(~np.isnan(given))
    order = known[np.argsort(given[known], kind="stable")]
    found = np.full(len(given), np.nan)
    found[order] = np.minimum(step(given[order]), 1.0)
    return found
