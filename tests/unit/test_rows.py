"""Pages, allocation and labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steercap.core.receipt import check_labels, check_points
from steercap.core.rows import PageAllocator, PageShape, RecordLines, latest_per_position, page_shape
from steercap.core.spec import Point
from steercap.errors import CaptureIncomplete, InvalidSpec


@given(st.integers(1, 400), st.sampled_from([1, 4, 36, 128, 1024]), st.integers(0, 5000), st.data())
def test_pages_hold_whole_records(points, row_lines, rows, data) -> None:
    """A page has room for two records of all points at least, and `pages` for every row."""
    shape = page_shape(points * row_lines)
    wanted = data.draw(st.integers(1, points)) * row_lines
    assert shape.lines >= 2 * points * row_lines
    assert shape.records(wanted) * wanted <= shape.lines
    assert (shape.pages(rows, wanted) - 1) * shape.records(wanted) < rows or rows == 0
    assert shape.pages(rows, wanted) * shape.records(wanted) >= rows


@given(st.lists(st.integers(-4, 1200), max_size=80))
def test_an_allocator_gives_each_page_once_and_the_lowest_first(steps) -> None:
    """Negative steps allocate so many; others return one of what is held."""
    allocator, held = PageAllocator(600), []
    for step in steps:
        if step < 0:
            count = (1, 3, 200, 600)[-step - 1]
            pages = allocator.allocate(count)
            assert pages.tolist() == sorted(set(range(600)) - {page for part in held for page in part})[:count]
            held += [pages.tolist()] if len(pages) else []
        elif held:
            part = held.pop(step % len(held))
            allocator.free(np.array(part[::-1]))
        assert allocator.in_use == sum(map(len, held))
        assert allocator.touched >= max((page + 1 for part in held for page in part), default=0)


def test_an_idle_allocator_forgets_what_it_touched() -> None:
    """Only when nothing is in use, so that no page in use is ever trimmed."""
    allocator = PageAllocator(10)
    pages = allocator.allocate(6)
    allocator.free(pages[1:])
    assert (allocator.forget_untouched(2), allocator.touched) == (6, 6)
    allocator.free(pages[:1])
    assert (allocator.forget_untouched(2), allocator.touched, allocator.in_use) == (6, 2, 0)
    assert allocator.allocate(4).tolist() == [0, 1, 2, 3]


@given(
    st.sets(st.integers(0, 40), min_size=1, max_size=24),
    st.integers(1, 24),
    st.integers(1, 12),
    st.data(),
)
def test_records_fill_each_block_of_pages_and_nothing_else(pages, page_lines, record, data) -> None:
    """Held against a walk along the pages; as many rows as claim them have room, and those that are kept stay."""
    page = PageShape(max(page_lines, record))
    owned, walked = sorted(pages), []
    line = owned[0] * page.lines
    while line < (owned[-1] + 1) * page.lines:
        last = line + record - 1
        if all(number in pages for number in range(line // page.lines, last // page.lines + 1)):
            walked.append(line)
            line += record
        else:  # on to the next block
            line = next((n * page.lines for n in owned if n * page.lines > line and n - 1 not in pages), 10**6)
    places = RecordLines(np.array(owned), page, record)
    assert places.lines(np.arange(places.rows)).tolist() == walked
    for row, first in enumerate(walked):
        end, origin = places.block(row)
        assert origin + row * record == first
        assert row < end <= places.rows
        assert places.lines(np.arange(row, end)).tolist() == list(range(first, first + (end - row) * record, record))

    # Whoever claims pages for so many rows, wherever these lie, has room for them, and needs no more at the end.
    claimed = len(owned) * page.records(record)
    assert page.pages(claimed, record) == len(owned)
    assert places.rows >= claimed

    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, places.rows + 2)] * 2)))
    found = [line for one in places.ranges(range(start, stop)) for line in range(one.start, one.start + one.count)]
    assert found == [line + n for line in walked[start:stop] for n in range(record)]
    blocks = sum(number - 1 not in pages for number in owned)
    assert len(list(places.ranges(range(start, stop)))) <= blocks

    rows = data.draw(st.integers(0, places.rows))
    reached = {(line + n) // page.lines for line in walked[:rows] for n in range(record)}
    kept = places.pages_of(rows)
    assert reached == set(owned[:kept])
    assert kept <= page.pages(rows, record)
    fewer = places.keep(kept)
    assert fewer.lines(np.arange(rows)).tolist() == walked[:rows]
    assert fewer.rows >= rows


TOKENS = [10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("positions", "token_ids", "says"),
    [
        ([0, 1, 3], [10, 11, 13], None),
        ([0, 1], [10, 11], "3 rows expected, the worker has 2"),
        ([0, -1, 3], [10, -1, 13], "1 of 3 rows were never computed, the first at position 1"),
        ([0, 2, 3], [10, 12, 13], "never computed"),
        ([0, 1, 3], [10, 11, 14], "position 3 was computed for token 14, but the sequence has token 13"),
    ],
)
def test_labels_must_be_those_of_the_sequence(positions, token_ids, says) -> None:
    """A missing row, a row of another position and a row of another token are CaptureIncomplete, with the place."""
    arguments = ("r", np.array([0, 1, 3]), TOKENS, np.array(positions), np.array(token_ids))
    if says is None:
        check_labels(*arguments)
        return
    with pytest.raises(CaptureIncomplete, match=says):
        check_labels(*arguments)


def test_every_point_must_have_come() -> None:
    """A point that no worker captured is named."""
    with pytest.raises(CaptureIncomplete, match=r"no worker captured mlp_out\[3\]"):
        check_points("r", [Point(2, "resid_post"), Point(3, "mlp_out")], [Point(2, "resid_post")])


@given(st.lists(st.integers(0, 9), max_size=30))
def test_of_rows_of_a_position_the_latest_is_kept(positions) -> None:
    """One of each position, in their order, and none was written later."""
    kept = latest_per_position(np.array(positions, dtype=np.int64)).tolist()
    assert [positions[row] for row in kept] == sorted(set(positions))
    assert all(positions[row] not in positions[row + 1 :] for row in kept)


@pytest.mark.parametrize("positions", [np.zeros(2), np.zeros((2, 2), dtype=np.int64), np.array([True])])
def test_positions_are_one_whole_number_a_row(positions) -> None:
    """Numbers of another kind, or two axes, are an error."""
    with pytest.raises(InvalidSpec, match="give one whole number per row"):
        latest_per_position(positions)
