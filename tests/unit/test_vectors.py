"""The algebra of vectors by layer: what holds in exact arithmetic holds to float32, and what means nothing is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steercap.errors import InvalidSpec, InvalidVector
from steercap.steering import LayerVectors

WIDTH = 16


def some(seed: int, layers=(1, 3), **labels: str) -> LayerVectors:
    generator = torch.Generator().manual_seed(seed)
    labels = {"model": "tiny", **labels}
    return LayerVectors({layer: torch.randn(WIDTH, generator=generator) for layer in layers}, **labels)


def close(found: LayerVectors, known: dict[int, torch.Tensor]) -> None:
    assert list(found) == sorted(known)
    for layer, vector in known.items():
        torch.testing.assert_close(found[layer], vector.float(), rtol=1e-6, atol=1e-6)


@given(st.integers(0, 99), st.floats(-1e3, 1e3), st.floats(0.01, 1e3))
def test_sums_and_multiples_are_those_of_each_layer(seed, scale, divisor) -> None:
    """`a + s * b`, `a - b / d` and `-a`; the labels that still hold are kept, the name is not."""
    a, b = some(seed, name="a"), some(seed + 1, name="b")
    close(a + scale * b, {layer: a[layer].double() + scale * b[layer].double() for layer in a})
    close(a - b / divisor, {layer: a[layer].double() - b[layer].double() / divisor for layer in a})
    close(-a, {layer: -a[layer] for layer in a})
    assert ((a + b).name, (a + b).model, (a + b).site) == ("", "tiny", "resid_post")
    assert (a * 2).named("twice") == (a + a).named("twice")


@given(st.integers(0, 99), st.integers(1, 4))
def test_what_is_taken_away_is_gone(seed, count) -> None:
    """`without` leaves nothing along any of the others, dependent ones included, and takes nothing else."""
    a, others = some(seed), [some(seed + 1 + number) for number in range(count)]
    left = a.without(*others, others[0] * 3)
    for other in others:
        assert all(abs(dot) < 1e-5 for dot in left.dot(other).values())
    again = left.without(*others)
    close(again, dict(left))
    assert set(others[0].without(*others).norms().values()) == {0.0}  # not what rounding left of it
    close(a.without(), dict(a))
    close(a.without(*others[:-1], others[-1] * 1e7), dict(a.without(*others)))  # a long one hides no short one


def test_lengths_and_cosines() -> None:
    """Of the vectors themselves, layer by layer."""
    a = LayerVectors({0: [3.0, 4.0], 2: [0.0, 2.0]}, name="a")
    b = LayerVectors({0: [4.0, -3.0], 2: [0.0, -1.0]})
    assert a.norms() == {0: 5.0, 2: 2.0}
    assert a.dot(b) == {0: 0.0, 2: -2.0}
    assert a.cosine(b) == pytest.approx({0: 0.0, 2: -1.0})
    assert a.unit().norms() == pytest.approx({0: 1.0, 2: 1.0})
    assert a.unit().name == "a"
    assert a.cosine(a * 1e-20) == pytest.approx({0: 1.0, 2: 1.0})


@pytest.mark.parametrize(
    "other",
    [
        some(1, model="other"),
        some(1, site="attn_out"),
        some(1, layers=(1,)),
        LayerVectors({1: [1.0], 3: [1.0]}, model="tiny"),
    ],
)
def test_what_does_not_belong_together_is_refused(other) -> None:
    """Another model, another site, other layers, another width: each by name."""
    for combine in (
        LayerVectors.__add__,
        LayerVectors.__sub__,
        LayerVectors.dot,
        LayerVectors.cosine,
        LayerVectors.without,
    ):
        with pytest.raises(InvalidSpec, match=r"differ in (model|site|width)|has layers"):
            combine(some(0), other)


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_no_vector_becomes_infinite(scale) -> None:
    """Nor by a scale, nor by its size."""
    with pytest.raises(InvalidSpec, match="cannot be scaled"):
        some(0) * scale
    with pytest.raises(InvalidSpec, match="cannot be scaled"):
        some(0) / 0
    with pytest.raises(InvalidVector, match="NaN or inf"):
        some(0) * 1e300
    with pytest.raises(InvalidVector, match=r"layers \[1, 3\] are zero"):
        (some(0) * 0).unit()
    for nonsense in ("2", None, True, some(1)):
        with pytest.raises(InvalidSpec, match="scaled by a number"):
            some(0) * nonsense
    with pytest.raises(InvalidSpec, match="other LayerVectors"):
        some(0) + 1
