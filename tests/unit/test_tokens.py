"""The selection language, against a plain reading of its rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steercap.core.rows import ranks, rows_selected
from steercap.core.tokens import TokenSelection, selected
from steercap.errors import EmptySelection, InvalidSelection

LENGTHS = st.tuples(st.integers(1, 30), st.integers(0, 20))
BOUND = st.none() | st.integers(-40, 60)
TERM = st.one_of(
    st.sampled_from(["all", "prompt", "generated", "last_prompt"]),
    st.integers(-30, 49),
    st.builds(slice, BOUND, BOUND, st.none() | st.integers(1, 5)),
)


def by_hand(term, prompt_len: int, limit: int) -> set[int]:
    """Positions of one term, from the sentences of the docstring."""
    every = set(range(limit))
    if term == "all":
        return every
    if term == "prompt":
        return {p for p in every if p < prompt_len}
    if term == "generated":
        return {p for p in every if p >= prompt_len}
    if term == "last_prompt":
        return {prompt_len - 1} & every
    if isinstance(term, int):
        return {term + prompt_len if term < 0 else term}
    start = 0 if term.start is None else term.start if term.start >= 0 else max(prompt_len + term.start, 0)
    stop = limit if term.stop is None else term.stop if term.stop >= 0 else max(prompt_len + term.stop, 0)
    return every & set(range(start, stop, term.step or 1))


@given(st.lists(TERM, min_size=1, max_size=4), LENGTHS)
def test_a_union_is_the_union_of_its_terms(terms, lengths) -> None:
    """Each term selects what its sentence says; a list selects what any of its terms does."""
    prompt_len, generated = lengths
    limit = prompt_len + generated
    expected = set().union(*(by_hand(term, prompt_len, limit) for term in terms))
    selection = TokenSelection.parse(terms)
    outside = any(isinstance(t, int) and not 0 <= (t + prompt_len if t < 0 else t) < limit for t in terms)
    if outside or not expected:
        with pytest.raises(InvalidSelection):
            selection.ranges(prompt_len, limit)
        return
    ranges = selection.ranges(prompt_len, limit)
    assert set(np.flatnonzero(selected(ranges, limit)).tolist()) == expected


@given(st.lists(TERM, min_size=1, max_size=4), LENGTHS, st.integers(0, 60))
def test_a_row_is_found_by_its_position(terms, lengths, total) -> None:
    """Ranks count the selected positions in order: the row of a position never depends on when it was computed."""
    prompt_len, generated = lengths
    limit = prompt_len + generated
    try:
        ranges = TokenSelection.parse(terms).ranges(prompt_len, limit)
    except InvalidSelection:
        return
    order = ranks(ranges, limit)
    chosen = np.flatnonzero(selected(ranges, limit))
    assert order[chosen].tolist() == list(range(len(chosen)))
    assert (np.delete(order, chosen) == -1).all()
    assert rows_selected(ranges, limit, total).tolist() == [p for p in chosen if p < total]


@pytest.mark.parametrize(
    "tokens", ["everything", True, None, 1.5, slice(0, 5, 0), slice(5, 0, -1), slice("a", None), [None]]
)
def test_what_means_nothing_is_refused(tokens) -> None:
    """Values of another type, unknown names and backward steps are errors, not guesses."""
    with pytest.raises(InvalidSelection):
        TokenSelection.parse(tokens)


def test_arrays_are_positions() -> None:
    """NumPy and torch integers are integers."""
    import torch

    for tokens in (np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), torch.tensor(2)]):
        assert TokenSelection.parse(tokens).terms == (1, 2)


def test_an_empty_union_is_refused() -> None:
    """`tokens=[]` selects nothing, and says so when the spec is made."""
    with pytest.raises(EmptySelection):
        TokenSelection.parse([])
