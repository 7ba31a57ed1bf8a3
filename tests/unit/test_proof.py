"""The equations of the proof at start, on rows that are made up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steercap import Point
from steercap.requests.proof import STREAM, closes, edited, equations, worst

ROWS, WIDTH, LAYERS = 4, 16, 3


def pass_of(seed: int, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> dict[Point, torch.Tensor]:
    """Rows of a stream that grows as it should."""
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator)

    stream, rows = drawn(), {}
    for layer in range(LAYERS):
        added = [drawn(), drawn()]
        after = stream + factor * (added[0] + added[1])
        rows |= {Point(layer, site): one for site, one in zip(STREAM, (stream, *added, after), strict=True)}
        stream = after
    return {point: one.to(dtype) for point, one in rows.items()}


@given(st.integers(0, 1000), st.sampled_from([1.0, 0.22]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_stream_that_grows_by_what_blocks_add_is_proved(seed, factor, dtype) -> None:
    claims = list(equations(pass_of(seed, factor, dtype), factor))
    assert len(claims) == 2 * LAYERS - 1
    assert worst(claims) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("site", STREAM)
def test_a_row_that_is_something_else_is_seen(site, dtype) -> None:
    """A scale, a row of another token, a partial sum: each breaks an equation."""
    for change in (lambda row: 1.2 * row, lambda row: row.roll(1, 0), lambda row: row - row.mean()):
        rows = pass_of(3, 1.0, dtype)
        rows[Point(1, site)] = change(rows[Point(1, site)].float()).to(dtype)
        wrong = worst(equations(rows, 1.0))
        assert wrong is not None
        assert "1" in wrong.name


def test_a_forgotten_factor_is_seen() -> None:
    rows = pass_of(5, 0.22)
    assert worst(equations(rows, 0.22)) is None
    assert "attn_out + mlp_out" in worst(equations(rows, 1.0)).name


def test_an_edit_moves_both_equations_by_what_it_added() -> None:
    """The row of a point is the edited one: what comes after it follows, what comes before does not."""
    vector = torch.randn(ROWS, WIDTH)
    rows = pass_of(7)
    after = Point(1, "resid_post")
    rows[after] = rows[after] + vector
    assert worst(equations(rows, 1.0, (after, vector))) is not None  # the next layer did not begin with it
    for site in STREAM:
        following = Point(2, site)
        if site in {"resid_pre", "resid_post"}:
            rows[following] = rows[following] + vector
    assert worst(equations(rows, 1.0, (after, vector))) is None
    assert worst(equations(rows, 1.0)) is not None


def test_what_is_not_armed_is_not_claimed() -> None:
    rows = {point: one for point, one in pass_of(1).items() if point.site == "resid_post"}
    assert list(equations(rows, 1.0)) == []


def test_an_edit_that_is_not_exact_is_seen() -> None:
    clean, vector = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    point = Point(0, "z")
    assert edited(point, clean, clean + vector, vector, torch.float32).holds
    assert not edited(point, clean, clean + 1.01 * vector, vector, torch.float32).holds
    assert not edited(point, clean, clean, vector, torch.float32).holds
    assert not edited(point, clean, clean * float("nan"), vector, torch.float32).holds


def lens(reported: list[float], logits: torch.Tensor, tokens: list[int], dtype: torch.dtype = torch.float32):
    edges = logits.aminmax()
    return closes(
        "here",
        reported,
        logits[tokens].tolist(),
        most=float(edges.max),
        spread=float(logits.std()),
        size=float(logits.abs().max()),
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lens_closes_up_to_a_constant_and_no_further(dtype) -> None:
    """Log probabilities are logits less a number. Another order, or a token that should have been reported, is seen."""
    logits = 3 * torch.randn(500)
    tokens = logits.topk(20).indices.tolist()
    said = logits.log_softmax(0)[tokens].tolist()
    assert lens(said, logits, tokens, dtype).holds
    assert lens([0.0] * 20, torch.zeros(500), tokens, dtype).holds  # of weights that are all zero, nothing can be said
    other = 0.8 * logits + 0.6 * 3 * torch.randn(500)
    assert not lens(said, other, tokens, dtype).holds
    hidden = logits.clone()
    hidden[int(logits.argmin())] = logits.max() + 3.0
    assert not lens(said, hidden, tokens, dtype).holds
    assert not lens([float("nan")] * 20, logits, tokens, dtype).holds
