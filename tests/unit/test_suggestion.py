"""Which layer to begin with, and what chance gives: counted over all orders of few texts."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

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


def test_layers_in_few_words() -> None:
    """Runs of three and more by their ends."""
    assert runs_of([0, 1, 2, 3, 7, 9, 10]) == "0 to 3, 7, 9, 10"
