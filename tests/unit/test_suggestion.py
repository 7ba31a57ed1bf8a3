"""Which layer to begin with, and what chance gives: counted over all orders of few texts."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu

from steercap.errors import UnknownName
from steercap.lab.directions import Suggestion, chance_band, suggested_layer
from steercap.lab.directions.methods import middle_of_best, runs_of
from steercap.steering import DirectionSet, LayerVectors, Provenance


def test_the_chance_band_is_counted() -> None:
    """All orders of few texts: 95 of 100 lie inside, and fewer would in any narrower band of AUCs there are."""
    for positive, negative in ((1, 1), (2, 2), (3, 3), (4, 4), (3, 6), (5, 5)):
        total = positive + negative
        found = [
            sum(sum(other < one for other in range(total) if other not in chosen) for one in chosen)
            for chosen in map(set, combinations(range(total), positive))
        ]
        low, high = (round(bound * positive * negative) for bound in chance_band(positive, negative))
        inside = sum(low <= u <= high for u in found) / len(found)
        assert low + high == positive * negative
        assert inside >= 0.95
        assert low == high or sum(u <= low for u in found) / len(found) > 0.025
    assert chance_band(2, 2) == (0.0, 1.0)
    assert chance_band(51, 50) == pytest.approx(chance_band(50, 50), abs=0.01)  # counted, and normal


@pytest.mark.parametrize(("positive", "negative"), [(2, 23), (3, 14), (6, 6), (16, 4)])
@pytest.mark.parametrize("best_of", [1, 30])
def test_the_chance_band_has_the_ends_of_the_exact_test(positive, negative, best_of) -> None:
    """Each end is the outermost AUC, to the bit, whose tail of Mann and Whitney's U is more than its share."""
    pairs = positive * negative
    low, high = chance_band(positive, negative, best_of=best_of)
    tails = []
    for u in range(pairs + 1):  # U of texts that lie above u others in all
        above = [negative] * (u // negative) + [u % negative] * (u < pairs) + [0] * positive
        scores = [2 * count for count in above[:positive]]
        found = mannwhitneyu(scores, range(1, 2 * negative, 2), alternative="less", method="exact")
        assert found.statistic == u
        tails.append(found.pvalue)
    first = next(u for u, tail in enumerate(tails) if tail > 0.025 / best_of)
    assert (low, high) == (first / pairs, (pairs - first) / pairs)


def test_one_text_beside_many_has_a_band_of_chance() -> None:
    """Its AUC is any of the places between the others, each equally likely; no band is wider than all AUCs."""
    assert chance_band(1, 9999) == chance_band(9999, 1) == (250 / 9999, 9749 / 9999)
    assert chance_band(1, 10**6) == (0.0, 1.0)


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_the_best_of_meaningless_layers_is_chance(shared) -> None:
    """Of draws of 30 layers, independent or alike, that know nothing of 8 and 8 texts, 95 of 100 at least."""
    draw = np.random.default_rng(0)
    scores = np.sqrt(shared) * draw.normal(size=(2000, 1, 16)) + np.sqrt(1 - shared) * draw.normal(size=(2000, 30, 16))
    ranks = scores.argsort(-1).argsort(-1) + 1
    auc = (ranks[..., :8].sum(-1) - 36) / 64
    vectors = LayerVectors({layer: torch.ones(4) for layer in range(30)})
    beyond = 0
    for each in auc:
        known = Provenance(auc={"a": dict(enumerate(each.tolist()))}, held_out={"a": (8, 8)})
        beyond += not suggested_layer(DirectionSet({"a": vectors}, known), "a").is_chance
    assert beyond / len(auc) < 0.05


@pytest.mark.parametrize(
    ("values", "layer"),
    [
        (dict.fromkeys(range(30), 1.0), 15),
        ({0: 1.0, 1: 0.5, 2: 1.0, 3: 1.0, 4: 1.0, 5: 0.9}, 3),
        ({4: 0.8, 8: 0.8, 12: 0.7, 16: 0.8}, 8),
        ({0: 1.0, 1: 0.5, 2: 0.5, 3: 1.0, 4: 0.5, 5: 0.5, 6: 0.5}, 3),
        ({7: 0.4}, 7),
    ],
)
def test_the_suggested_layer_is_the_middle_of_the_longest_run(values, layer) -> None:
    """Of neighbours in the order of the layers there are; of runs of one length the one nearest the middle."""
    assert middle_of_best(values) == layer


def test_a_suggestion_says_why_and_what_chance_gives() -> None:
    """Ties are counted; where chance reaches the AUC too, that is said; without texts held out there is none."""
    vectors = LayerVectors({layer: torch.ones(4) for layer in range(6)})

    def of(auc, held_out) -> Suggestion | None:
        return suggested_layer(DirectionSet({"a": vectors}, Provenance(auc={"a": auc}, held_out={"a": held_out})), "a")

    weak = of(dict.fromkeys(range(6), 1.0), (2, 2))
    assert (weak.layer, weak.tied, weak.is_chance) == (3, tuple(range(6)), True)
    assert "6 of 6 layers tie" in weak.reason
    assert "reach that by chance too" in weak.reason
    strong = of({**dict.fromkeys(range(6), 0.8), 2: 0.95}, (20, 20))
    assert (strong.layer, strong.tied, strong.is_chance) == (2, (2,), False)
    assert "is the highest" in strong.reason
    assert of({}, (0, 0)) is None
    with pytest.raises(UnknownName, match="no direction 'joi'; did you mean 'joy'"):
        suggested_layer(DirectionSet({"joy": vectors}), "joi")


def test_layers_in_few_words() -> None:
    """Runs of three and more by their ends."""
    assert runs_of([0, 1, 2, 3, 7, 9, 10]) == "0 to 3, 7, 9, 10"
