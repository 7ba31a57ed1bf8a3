"""From records to tensors: whatever the points are, however their rows are stored, wherever the pages lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import assemble

from steercap.core.messages import CapturedRows, LineRange, Owner
from steercap.core.rows import page_shape
from steercap.core.schema import LINE_BYTES, REDUCED, Coding, PointSchema, record_shape
from steercap.kernels.codecs import ENCODINGS, Codec, record_of
from steercap.kernels.codecs.coded import CodedRows
from steercap.worker import assembly
from steercap.worker.memory import Readable

DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])


@st.composite
def schemas(draw) -> PointSchema:
    """Narrow and wide rows, odd and even, one axis or two, whole or split."""
    shards = draw(st.sampled_from([1, 1, 2, 3]))
    first = shards * draw(st.sampled_from([1, 2, 5, 8, 31, 64, 257, 300, 513]))
    rest = draw(st.sampled_from([(), (), (3,), (4, 2)]))
    return PointSchema((first, *rest), draw(DTYPES), shards)


def bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of rows: `contiguous` keeps the strides of axes of length 1, which are no strides of bytes."""
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@given(st.lists(st.integers(1, 5000), max_size=8), st.sampled_from([4, 8, LINE_BYTES]))
def test_rows_of_a_record_lie_one_behind_the_other(sizes, align) -> None:
    """Each at a multiple of what it asks for, none over another, and no line more than they need."""
    shape = record_shape(sizes, align)
    ends = [0, *(offset + size for offset, size in zip(shape.offsets, shape.sizes, strict=True))]
    assert shape.sizes == tuple(sizes)
    for offset, end in zip(shape.offsets, ends, strict=False):
        assert offset % align == 0
        assert 0 <= offset - end < align
    assert shape.lines == -(-(-(-ends[-1] // align) * align) // LINE_BYTES)


@given(
    st.lists(schemas(), min_size=1, max_size=5),
    st.sampled_from(list(ENCODINGS)),
    st.integers(0, 40),
    st.integers(1, 7),
    st.lists(st.integers(1, 9), min_size=1, max_size=10),
    st.sampled_from([100, 5000, assembly.PART_BYTES]),
    st.sampled_from([1, assembly.MANY_RUNS]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_records_come_back_bit_for_bit(  # noqa: PLR0917 -- hypothesis gives them by their places
    points, name, rows, numbers, pages, part_bytes, many_runs, seed
) -> None:
    """Any points, encoding and split into ranges: every row is decoded from just the bytes that were stored of it."""
    encoding, rng = ENCODINGS[name], np.random.default_rng(seed)
    k = numbers if name == "projected" or encoding.default_k else 0
    coding = Coding(name, k)
    shape = encoding.record(points, coding)
    # Records in ranges of these sizes, in an order of their own, with lines of others between them.
    counts, left = [], rows
    for page in pages:
        counts.append(min(page, left))
        left -= counts[-1]
    counts.append(left)
    starts, first = {}, int(rng.integers(0, 4))
    for place in rng.permutation(len(counts)).tolist():
        starts[place] = first
        first += counts[place] * shape.lines + int(rng.integers(0, 4))
    arena = torch.from_numpy(rng.integers(0, 256, (first + 1, LINE_BYTES), dtype=np.uint8))
    ranges = tuple(LineRange(starts[place], count * shape.lines) for place, count in enumerate(counts) if count)
    stored = [torch.empty((rows, size), dtype=torch.uint8) for size in shape.sizes]
    for own in stored:
        own.numpy()[:] = rng.integers(0, 256, own.shape)
    lines = [item.start + at for item in ranges for at in range(0, item.count, shape.lines)]
    for record, line in enumerate(lines):
        for offset, own in zip(shape.offsets, stored, strict=True):
            start = line * LINE_BYTES + offset
            arena.view(-1)[start : start + own.shape[1]] = own[record]
    labels = np.arange(rows).tobytes()
    captured_rows = CapturedRows(
        Owner("r", 0), coding, tuple(range(len(points))), ranges, rows, labels, labels, rows, None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "PART_BYTES", part_bytes)
        patch.setattr(assembly, "MANY_RUNS", many_runs)
        found = assemble(captured_rows, points, Readable(arena, ranges))
    arena.zero_()  # what was handed over is in memory of its own
    for schema, own, got in zip(points, stored, found, strict=True):
        if isinstance(encoding, Codec):
            assert isinstance(got, CodedRows)
            parts = encoding.parts(own, schema, coding)
            assert parts.keys() == got.parts.keys()
            for part, known in parts.items():
                held = got.parts[part]
                assert (held.dtype, held.shape) == (known.dtype, known.shape)
                if rows:  # strides of nothing are no strides of bytes
                    assert torch.equal(bytes_of(held), bytes_of(known))
            continue
        assert isinstance(got, torch.Tensor)
        assert got.shape == ((rows, k) if k else (rows, *schema.shard_shape))
        known = encoding.decode(own, schema, coding)
        assert got.dtype == known.dtype
        assert got.data_ptr() % got.element_size() == 0
        assert torch.equal(bytes_of(got), bytes_of(known))
    assert assembly.stored_bytes(captured_rows, points) == rows * sum(shape.sizes)


@given(st.lists(schemas(), min_size=1, max_size=5), st.integers(1, 3000))
def test_a_page_holds_two_records_and_a_reduction(points, rows) -> None:
    """Whatever the points: two raw records at least, and the float32 row of a reduction over the first of them."""
    raw = record_of(points).lines
    shape = page_shape(raw)
    assert shape.records(raw) >= 2
    assert record_of(points, REDUCED).lines <= shape.lines
    assert shape.lines % raw == 0
    assert shape.pages(rows, raw) * shape.records(raw) >= rows
