"""What every encoding promises, and `full8`'s bound, element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import CUDA, DEVICE

from steercap.core.records import LINE_BYTES
from steercap.core.schema import PointSchema
from steercap.encodings import ENCODINGS, check_codec
from steercap.encodings.base import Alike
from steercap.errors import UnknownName

DTYPES = ("float32", "bfloat16", "float16")
DIRECTIONS = 3


def rows_like(schema: PointSchema, count: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(count, schema.shard_width, generator=torch.Generator().manual_seed(seed))
    return drawn.to(getattr(torch, schema.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16,), (5,), (4, 6)])
@pytest.mark.parametrize("name", list(ENCODINGS))
def test_an_encoding_is_as_large_as_it_says_and_comes_back_in_shape(name, shape, dtype) -> None:
    """Of whole rows and of shards: as many bytes as `row_bytes`, and rows of the schema's shape, or numbers."""
    for shards in (1, shape[0] if name != "projected" else 1):
        schema = PointSchema(shape, dtype, shards)
        numbers = DIRECTIONS if name == "projected" else 0
        directions = torch.randn(DIRECTIONS, schema.shard_width) if numbers else None
        stored = ENCODINGS[name].encode(rows_like(schema, 7), schema, directions)
        assert stored.dtype == torch.uint8
        assert stored.shape == (7, ENCODINGS[name].row_bytes(schema, numbers))
        decoded = ENCODINGS[name].decode(stored.contiguous(), schema, numbers)
        assert decoded.shape == ((7, numbers) if numbers else (7, *schema.shard_shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_gives_back_every_bit(dtype) -> None:
    """Any bit pattern, NaN and -0 among them."""
    schema = PointSchema((5, 3), dtype)
    size = schema.width * getattr(torch, dtype).itemsize
    stored = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (200, size), dtype=np.uint8))
    rows = ENCODINGS["raw"].decode(stored, schema, 0)
    assert torch.equal(ENCODINGS["raw"].encode(rows.flatten(1), schema, None), stored)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduced_rows_are_exact_in_float32(dtype) -> None:
    """A float32 holds whatever a row of any dtype does."""
    schema = PointSchema((12,), dtype)
    rows = rows_like(schema, 7)
    decoded = ENCODINGS["reduced"].decode(ENCODINGS["reduced"].encode(rows, schema, None), schema, 0)
    assert torch.equal(decoded, rows.float())


def test_shards_join_to_whole_rows_and_products_add_up() -> None:
    """Heads one behind the other; of projections the sum."""
    whole, parts = PointSchema((4, 6), "float32"), PointSchema((4, 6), "float32", shards=2)
    rows, directions = rows_like(whole, 7), torch.randn(DIRECTIONS, whole.width)
    halves, of_halves = rows.chunk(2, dim=1), directions.chunk(2, dim=1)
    for name in ("raw", "reduced"):
        encoding = ENCODINGS[name]
        shards = [encoding.decode(encoding.encode(half, parts, None), parts, 0) for half in halves]
        assert torch.equal(encoding.joined(shards), rows.view(7, 4, 6))
    encoding = ENCODINGS["projected"]
    shards = [
        encoding.decode(encoding.encode(half, parts, own.contiguous()), parts, DIRECTIONS)
        for half, own in zip(halves, of_halves, strict=True)
    ]
    torch.testing.assert_close(encoding.joined(shards), rows @ directions.T, rtol=1e-5, atol=1e-5)


def test_only_codecs_can_be_named() -> None:
    """What follows from reduce= and project= is not a codec; the error lists those that are."""
    for name in ("full8", "raw"):
        check_codec(name)
    for name in ("projected", "reduced", "zip"):
        with pytest.raises(UnknownName, match=f"unknown codec '{name}'; known: 'full8', 'raw'$"):
            check_codec(name)


# full8

FULL8 = ENCODINGS["full8"]


def full8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows come back as, and the scale of each."""
    schema = PointSchema((rows.shape[1],), str(rows.dtype).removeprefix("torch."))
    stored = FULL8.encode(rows, schema, None)
    return FULL8.decode(stored, schema, 0), stored[:, :4].flatten().clone().view(torch.float32)[:, None]


def hold_to_bound(rows: torch.Tensor) -> None:
    """An element is off by half a step at most, and one float32 ulp of its row's magnitude."""
    decoded, scale = full8(rows)
    assert decoded.dtype == torch.float32
    exact = rows.double()
    with np.errstate(over="ignore"):  # of the greatest float32 it is taken as infinite
        ulp = np.spacing(rows.float().abs().amax(1, keepdim=True).numpy())
    ulp = np.where(np.isfinite(ulp), ulp, np.float32(2.0**104))
    error = (decoded.double() - exact).abs()
    most = scale.double() / 2 + torch.from_numpy(ulp).double()
    assert (error <= most).all(), f"{(error / most).max().item()} of the bound"
    spread = (exact.amax(1) - exact.amin(1))[:, None]
    tiny = 2.0**-149  # a scale is a float32, and may be denormal
    assert (scale.double() <= spread / 255 * (1 + 1e-6) + tiny).all()


ROWS = {
    "constant": lambda rows: rows[:, :1].expand_as(rows).contiguous(),
    "one-sided": lambda rows: rows.abs() + 100.0,
    "far from zero": lambda rows: rows * 1e-4 - 1000.0,
    "mixed": lambda rows: rows,
    "one outlier": lambda rows: torch.where(torch.arange(rows.shape[1]) == 3, 3000.0, rows),
    "zero": torch.zeros_like,
    "huge": lambda rows: rows.clamp(-3, 3) * 1e38,
    "small": lambda rows: rows * 1e-36,
    "denormal": lambda rows: rows * 1e-42,
    "least": lambda rows: rows.sign() * 2.0**-149,
}


@pytest.mark.parametrize("width", [1, 5, 64, 1000])
@pytest.mark.parametrize("which", list(ROWS))
def test_full8_is_off_by_half_a_step_at_most(which, width) -> None:
    """Rows of every kind and size, float32."""
    hold_to_bound(ROWS[which](torch.randn(300, max(width, 4), generator=torch.Generator().manual_seed(0)))[:, :width])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["constant", "one-sided", "mixed", "one outlier", "zero"])
def test_full8_holds_its_bound_for_16_bits(which, dtype) -> None:
    """As for float32, after the model's own rounding; denormal float16 too."""
    rows = ROWS[which](torch.randn(300, 64, generator=torch.Generator().manual_seed(1)))
    hold_to_bound(rows.to(dtype))
    hold_to_bound((rows * 1e-6).to(dtype))


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(FLOATS, min_size=1, max_size=9))
@settings(max_examples=500, deadline=None)
def test_full8_holds_its_bound_for_any_row(values) -> None:
    """Hypothesis looks for the rows that nobody thought of."""
    hold_to_bound(torch.tensor([values]))


@pytest.mark.parametrize(
    "bad", [[torch.nan], [torch.inf], [-torch.inf], [torch.inf, -torch.inf], [torch.nan, torch.inf]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_full8_of_what_is_not_finite_is_nan(bad, dtype) -> None:
    """No element of such a row looks like a number, and its neighbours keep their bound."""
    rows = torch.randn(3, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    hold_to_bound(rows)
    rows[1, : len(bad)] = torch.tensor(bad).to(dtype)
    decoded, _ = full8(rows)
    assert decoded[1].isnan().all()
    assert decoded[[0, 2]].isfinite().all()
    rows[1] = bad[0]
    assert full8(rows)[0][1].isnan().all()


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")  # interpreter
@pytest.mark.parametrize("width", [5, 24, 100])
@pytest.mark.parametrize("dtype", ["float32", "float16", *(["bfloat16"] if CUDA else [])])
@pytest.mark.parametrize("which", [*ROWS, "nan", "inf"])
def test_the_device_stores_what_the_host_does(which, dtype, width) -> None:
    """The same heads and codes, but for elements in the middle of two codes, and not a byte beside them."""
    if dtype != "float32" and which in {"huge", "small", "denormal", "least"}:
        pytest.skip("16 bits do not hold such rows")
    schema, count, points = PointSchema((width,), dtype), 4, 2
    drawn = torch.randn(count * points, width, generator=torch.Generator().manual_seed(3))
    rows = ROWS.get(which, ROWS["mixed"])(drawn).to(getattr(torch, dtype))
    if which in {"nan", "inf"}:
        rows[2, 3] = float(which)
        rows[5, 1] = -float(which)
    raw, stored = ENCODINGS["raw"].record([schema] * points), FULL8.record([schema] * points)
    ring = torch.full((count * (raw.lines + stored.lines), LINE_BYTES), 77, dtype=torch.uint8)
    flat = ring.view(-1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(4))
    records = torch.stack([torch.arange(count) * raw.lines, count * raw.lines + order * stored.lines], dim=1)
    for number, (source, _) in enumerate(records.tolist()):
        for point, (offset, size) in enumerate(zip(raw.offsets, raw.sizes, strict=True)):
            start = source * LINE_BYTES + offset
            flat[start : start + size] = rows[number * points + point].view(torch.uint8)
    expected = ring.clone()
    known = FULL8.encode(rows, schema, None)
    stretches = []
    for number, (_, target) in enumerate(records.tolist()):
        for point, (offset, size) in enumerate(zip(stored.offsets, stored.sizes, strict=True)):
            start = target * LINE_BYTES + offset
            stretches.append(slice(start, start + size))
            expected.view(-1)[stretches[-1]] = known[number * points + point]
    at = torch.tensor([[line // LINE_BYTES, byte] for line, byte in zip(raw.offsets, stored.offsets, strict=True)])
    there = ring.to(DEVICE)
    alike = Alike(schema, at.to(DEVICE), None)
    FULL8.launch(there, records.to(DEVICE), alike, torch.zeros(1, width, device=DEVICE))
    found = there.cpu()
    for row, stretch in zip(rows.double(), stretches, strict=True):
        mine, theirs = found.view(-1)[stretch], expected.view(-1)[stretch]
        if not row.isfinite().all():
            assert FULL8.decode(mine[None].contiguous(), schema, 0).isnan().all()
        else:
            assert torch.equal(mine[:8], theirs[:8])
            scale, zero = theirs[:8].clone().view(torch.float32).double().tolist()
            code = (row - zero) / scale if scale else torch.zeros_like(row)
            apart = (mine[8:].int() - theirs[8:].int()).abs()
            middle = (code - code.floor() - 0.5).abs() < 1e-3
            assert (apart <= middle.int()).all()
        found.view(-1)[stretch] = expected.view(-1)[stretch]
    assert torch.equal(found, expected)
