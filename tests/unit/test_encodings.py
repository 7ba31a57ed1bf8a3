"""What every encoding promises, and the bounds of the codecs, element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import CUDA, DEVICE

from steercap.core.schema import LINE_BYTES, RAW, REDUCED, Coding, PointSchema
from steercap.errors import InvalidSpec, UnknownName
from steercap.kernels.bits import GROUP
from steercap.kernels.codecs import ENCODINGS, Codec, PointTables, codec_of, record_of
from steercap.kernels.codecs.coded import CodedRows
from steercap.kernels.codecs.random_projection import Matrices, signs

DTYPES = ("float32", "bfloat16", "float16")
DIRECTIONS = 3
#: Encodings of rows; that of summaries of attention is in test_attention.py.
OF_ROWS = [name for name in ENCODINGS if name != "attention"]
CODECS = [name for name in OF_ROWS if isinstance(ENCODINGS[name], Codec)]
ELEMENTWISE = [name for name in CODECS if not ENCODINGS[name].seeded]


def rows_like(schema: PointSchema, count: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(count, schema.shard_width, generator=torch.Generator().manual_seed(seed))
    return drawn.to(getattr(torch, schema.dtype))


def coding_of(name: str, k: int | None = None, seed: int = 0) -> Coding:
    """An encoding with k numbers a row, where it leaves that open."""
    if not ENCODINGS[name].is_codec:
        return Coding(name, {"projected": DIRECTIONS, "features": k or 4}.get(name, 0))
    return codec_of(name, k if ENCODINGS[name].default_k else None, seed if ENCODINGS[name].seeded else None)


def vectors_of(schema: PointSchema, coding: Coding) -> torch.Tensor | None:
    """The first shard's part of the vectors of an encoding that needs some."""
    if coding.encoding == "projected":
        return torch.randn(DIRECTIONS, schema.shard_width)
    if constants := constants_of(coding.encoding, schema.width):
        matrix: torch.Tensor | None = torch.stack(list(constants.values()))
    else:
        matrix = ENCODINGS[coding.encoding].matrix(schema.width, coding)
    return None if matrix is None else matrix[:, : schema.shard_width]


def constants_of(name: str, width: int) -> dict[str, torch.Tensor]:
    """What rows are coded by besides themselves, if the encoding asks for that: elements of sizes 1 to 128."""
    if name != "calibrated8":
        return {}
    drawn = torch.Generator().manual_seed(8)
    return {
        "centre": torch.randn(width, generator=drawn) * 10,
        "reach": 2.0 ** torch.randint(0, 8, (width,), generator=drawn),
    }


@pytest.mark.parametrize("rows", [7, 0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16,), (5,), (4, 6), (300,)])
@pytest.mark.parametrize("name", OF_ROWS)
def test_an_encoding_is_as_large_as_it_says_and_comes_back_in_shape(name, shape, dtype, rows) -> None:
    """Of whole rows and of shards: as many bytes as `row_bytes`, and rows of the schema's shape, or numbers."""
    for shards in (1, shape[0]):
        schema, coding = PointSchema(shape, dtype, shards), coding_of(name, k=4)
        encoding = ENCODINGS[name]
        stored = encoding.encode(rows_like(schema, rows), schema, coding, vectors_of(schema, coding))
        assert stored.dtype == torch.uint8
        assert stored.shape == (rows, encoding.row_bytes(schema, coding))
        if name == "calibrated8":
            shard, constants = 0 if shards > 1 else None, constants_of(name, schema.width)
            decoded = CodedRows(coding, schema, encoding.parts(stored, schema, coding), shard, constants).decoded()
        else:
            decoded = encoding.decode(stored.contiguous(), schema, coding)
        projected = name == "projected" or encoding.seeded
        assert decoded.shape == ((rows, coding.k) if projected else (rows, *schema.shard_shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_gives_back_every_bit(dtype) -> None:
    """Any bit pattern, NaN and -0 among them."""
    schema = PointSchema((5, 3), dtype)
    size = schema.width * getattr(torch, dtype).itemsize
    stored = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (200, size), dtype=np.uint8))
    rows = ENCODINGS["raw"].decode(stored, schema, RAW)
    assert torch.equal(ENCODINGS["raw"].encode(rows.flatten(1), schema, RAW, None), stored)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduced_rows_are_exact_in_float32(dtype) -> None:
    """A float32 holds whatever a row of any dtype does."""
    schema = PointSchema((12,), dtype)
    rows, encoding = rows_like(schema, 7), ENCODINGS["reduced"]
    assert torch.equal(encoding.decode(encoding.encode(rows, schema, REDUCED, None), schema, REDUCED), rows.float())


def test_shards_join_to_whole_rows_and_products_add_up() -> None:
    """Heads one behind the other; of projections the sum."""
    whole, parts = PointSchema((4, 6), "float32"), PointSchema((4, 6), "float32", shards=2)
    rows, directions = rows_like(whole, 7), torch.randn(DIRECTIONS, whole.width)
    halves, of_halves = rows.chunk(2, dim=1), directions.chunk(2, dim=1)
    for coding in (RAW, REDUCED):
        encoding = ENCODINGS[coding.encoding]
        shards = [encoding.decode(encoding.encode(half, parts, coding, None), parts, coding) for half in halves]
        assert torch.equal(encoding.joined(shards), rows.view(7, 4, 6))
    encoding, coding = ENCODINGS["projected"], coding_of("projected")
    shards = [
        encoding.decode(encoding.encode(half, parts, coding, own.contiguous()), parts, coding)
        for half, own in zip(halves, of_halves, strict=True)
    ]
    torch.testing.assert_close(encoding.joined(shards), rows @ directions.T, rtol=1e-5, atol=1e-5)


def test_only_codecs_can_be_named_and_with_their_own_parameters() -> None:
    """What follows from reduce= and project= is not a codec; the error lists those that are, and who has a parameter."""
    for name in {*CODECS, "raw"} - {"calibrated8", "features"}:
        assert codec_of(name).encoding == name
    for name in ("projected", "reduced", "calibrated8", "features", "attention", "zip"):
        with pytest.raises(
            UnknownName, match=f"unknown codec '{name}'; known: 'fp8', 'full8', 'int4', 'raw', 'rp16', "
        ):
            codec_of(name)
    assert codec_of("rp8", 100, 7) == Coding("rp8", 100, 7)
    assert codec_of("topk8").k == 64
    with pytest.raises(InvalidSpec, match="k=4 with codec='full8', which has no such parameter; rp16, rp8, topk8 have"):
        codec_of("full8", 4)
    with pytest.raises(InvalidSpec, match="seed=1 with codec='topk8', which has no such parameter; rp16, rp8 have"):
        codec_of("topk8", 4, 1)


# The bounds of codecs


def coded(name: str, rows: torch.Tensor, k: int = 4, seed: int = 0) -> CodedRows:
    """Rows in a codec, through their bytes."""
    schema = PointSchema((rows.shape[1],), str(rows.dtype).removeprefix("torch."))
    codec, coding = ENCODINGS[name], coding_of(name, min(k, rows.shape[1]), seed)
    assert isinstance(codec, Codec)
    stored = codec.encode(rows, schema, coding, vectors_of(schema, coding))
    constants = constants_of(name, schema.width)
    return CodedRows(coding, schema, codec.parts(stored, schema, coding), constants=constants)


@pytest.mark.parametrize("made", [torch.from_numpy, np.asarray])
def test_rows_are_indexed_by_bytes_as_by_other_numbers(made) -> None:
    """As NumPy's rows are; torch takes them for a mask."""
    rows = coded("full8", torch.randn(3, 16))
    found = rows[made(np.array([2, 0, 2, 1], dtype=np.uint8))].decoded()
    assert torch.equal(found, rows.decoded()[[2, 0, 2, 1]])
    assert torch.equal(rows[made(np.array([True, False, True]))].decoded(), rows.decoded()[[0, 2]])


def ulp_of(rows: torch.Tensor) -> torch.Tensor:
    """Of the greatest magnitude of each row, as float32: [rows, 1]."""
    with np.errstate(over="ignore"):  # of the greatest float32 it is taken as infinite
        ulp = np.spacing(rows.float().abs().amax(1, keepdim=True).numpy())
    return torch.from_numpy(np.where(np.isfinite(ulp), ulp, np.float32(2.0**104))).double()


def hold_to_bound(name: str, rows: torch.Tensor) -> None:
    """An element is off by its bound at most, which is no larger than the rows make it."""
    found = coded(name, rows)
    decoded = found.decoded()
    assert decoded.dtype == torch.float32
    exact = rows.double()
    error, bound = (decoded.double() - exact).abs(), found.error_bound()
    assert bound.shape == decoded.shape
    assert (error <= bound).all(), f"{(error / bound).max().item()} of the bound"
    spread = (exact.amax(1) - exact.amin(1))[:, None]
    size = exact.abs().amax(1)[:, None]
    tiny = 2.0**-149  # a scale is a float32, and may be denormal
    coding = 2.0**-21  # what a device rounds of a coded number, in float32
    largest = {
        "full8": spread / 510 * (1 + 510 * coding),
        "int4": spread / 30 * (1 + 30 * coding),
        "fp8": (exact.abs() / 14).clamp_min(size / 448 / 1024 * (1 + 2.0**-15)) + 224 * tiny,
        "topk8": torch.maximum(
            2 * size / 510 * (1 + 510 * coding),
            exact.abs().sort(1, descending=True).values[:, [min(3, rows.shape[1] - 1)]],
        ),
        "calibrated8": calibrated_bound(exact),
        "features": torch.cat([exact.abs().sort(1, descending=True).values, torch.zeros(len(rows), 4)], dim=1)[:, [4]],
    }[name]
    assert (bound <= largest * (1 + 1e-6) + ulp_of(rows) + tiny).all()


def calibrated_bound(exact: torch.Tensor) -> torch.Tensor:
    """By hand: half a step of each element's own, and what float32 rounds of what is coded."""
    centre, reach = (one.double() for one in constants_of("calibrated8", exact.shape[1]).values())
    coded_rows = (exact - centre) / reach
    spread = coded_rows.amax(1) - coded_rows.amin(1)
    size = coded_rows.abs().amax(1) + spread
    return reach * (spread / 510 + size * 2.0**-21)[:, None]


def middles(rows: torch.Tensor) -> torch.Tensor:
    """Numbers in the middle of two codes of 8 bits, as well as float32 can say it, between a least and a greatest one."""
    least, step = rows[:, :1].double(), rows[:, 1:2].double().abs() / 255
    found = least + step * (((rows * 1e4).abs() % 255).floor() + 0.5)
    found[:, 0], found[:, -1] = least[:, 0], (least + 255 * step)[:, 0]
    return found.float()


ROWS = {
    "constant": lambda rows: rows[:, :1].expand_as(rows).contiguous(),
    "one-sided": lambda rows: rows.abs() + 100.0,
    "far from zero": lambda rows: rows * 1e-4 - 1000.0,
    "far, spread 1": lambda rows: rows.clamp(-0.5, 0.5) + 1e4,
    "mixed": lambda rows: rows,
    "one outlier": lambda rows: torch.where(torch.arange(rows.shape[1]) == 3, 10000.0, rows),
    "zero": torch.zeros_like,
    "huge": lambda rows: rows.clamp(-3, 3) * 1e38,
    "small": lambda rows: rows * 1e-36,
    "denormal": lambda rows: rows * 1e-42,
    "least": lambda rows: rows.sign() * 2.0**-149,
    "ties": lambda rows: rows.sign(),
    "middles": middles,
}


@pytest.mark.parametrize("width", [1, 5, 64, 130, 1000])
@pytest.mark.parametrize("which", list(ROWS))
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_codec_is_off_by_its_bound_at_most(name, which, width) -> None:
    """Rows of every kind and size, float32."""
    drawn = torch.randn(300, max(width, 4), generator=torch.Generator().manual_seed(0))
    hold_to_bound(name, ROWS[which](drawn)[:, :width])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["constant", "one-sided", "mixed", "one outlier", "zero"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_codec_holds_its_bound_for_16_bits(name, which, dtype) -> None:
    """As for float32, after the model's own rounding; denormal float16 too."""
    rows = ROWS[which](torch.randn(300, 64, generator=torch.Generator().manual_seed(1)))
    hold_to_bound(name, rows.to(dtype))
    hold_to_bound(name, (rows * 1e-6).to(dtype))


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", ELEMENTWISE)
@given(values=st.lists(FLOATS, min_size=1, max_size=9))
@settings(max_examples=300, deadline=None)
def test_a_codec_holds_its_bound_for_any_row(name, values) -> None:
    """Hypothesis looks for the rows that nobody thought of."""
    hold_to_bound(name, torch.tensor([values]))


@pytest.mark.parametrize("which", [which for which in ROWS if which != "huge"])
@pytest.mark.parametrize("name", ["rp8", "rp16"])
def test_a_projection_is_off_by_half_a_step_at_most(name, which) -> None:
    """Of each group of numbers its own step, from the projection in float64, and the rounding of sums in float32."""
    rows = ROWS[which](torch.randn(200, 300, generator=torch.Generator().manual_seed(5)))
    found = coded(name, rows, k=200, seed=9)
    exact = rows.double() @ signs(200, 300, 9).double().T / math.sqrt(200)
    sums = rows.double().abs().sum(1, keepdim=True) * 300 * 2.0**-24 / math.sqrt(200)
    error = (found.decoded().double() - exact).abs()
    assert (error <= found.error_bound() + sums + 2.0**-149).all()
    steps = {"rp8": 127, "rp16": 32767}[name]
    size = torch.stack([exact[:, first : first + GROUP].abs().amax(1) for first in range(0, 200, GROUP)], dim=1)
    size = size.repeat_interleave(GROUP, dim=1)[:, :200]
    rounded = found.decoded().double().abs() * 2.0**-24
    assert (found.error_bound() <= (size + sums) / steps / 2 * (1 + 1e-6) + rounded + 2.0**-149).all()


def test_a_projection_that_overflows_has_no_scale() -> None:
    """Rows that are finite may have sums that are not: the numbers of those groups are NaN."""
    rows = torch.full((2, 16), 3e38)
    rows[1] = 1.0
    found = coded("rp8", rows, k=16)
    assert found.decoded()[0].isnan().all()
    assert found.decoded()[1].isfinite().all()


BAD = [[torch.nan], [torch.inf], [-torch.inf], [torch.inf, -torch.inf], [torch.nan, torch.inf]]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_never_looks_like_numbers(name, bad, dtype) -> None:
    """Such a row, or its group of `int4`, is NaN where it is not 0 for a row of few elements; its neighbours are as ever."""
    rows = torch.randn(3, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    rows[1, : len(bad)] = torch.tensor(bad).to(dtype)
    found = coded(name, rows)
    assert found.parts["rest" if name == "features" else "scale"][1].isnan().all()
    decoded = found.decoded()
    kept = decoded[1][found.parts["indices"][1].long()] if name == "topk8" else decoded[1]
    assert kept.isnan().all()
    assert decoded[[0, 2]].isfinite().all()
    if name in ELEMENTWISE:
        hold_to_bound(name, rows[[0, 2]])


def test_the_greatest_elements_are_kept_the_first_of_equal_ones() -> None:
    """As NumPy sorts them."""
    rows = torch.randint(-5, 6, (200, 40), generator=torch.Generator().manual_seed(3)).float()
    found = coded("topk8", rows, k=7)
    for row, indices, rest in zip(rows.numpy(), found.parts["indices"], found.parts["rest"], strict=True):
        order = np.argsort(-np.abs(row), kind="stable")[:7]
        assert sorted(order) == indices.tolist()
        assert rest == np.abs(row[order]).min()


# Scalar products of projections


def test_the_matrix_is_that_of_its_seed_and_grows_by_rows() -> None:
    """The signs written down here once; a larger k begins as a smaller one."""
    first = signs(4, 8, 1)
    assert first.tolist() == MATRIX
    assert torch.equal(signs(9, 8, 1)[:4], first)
    assert not torch.equal(signs(4, 8, 2), first)
    assert set(signs(64, 130, 5).unique().tolist()) == {-1.0, 1.0}


MATRIX = [
    [1, 1, 1, 1, 1, -1, 1, 1],
    [1, 1, 1, 1, -1, 1, -1, -1],
    [-1, 1, -1, -1, 1, 1, -1, -1],
    [-1, 1, -1, -1, -1, 1, -1, 1],
]


@pytest.mark.parametrize("name", ["rp8", "rp16"])
def test_scalar_products_are_estimated_without_bias_at_the_rate_of_their_k(name) -> None:
    """Over 400 seeds: the mean within 4.5 of its standard errors, the root of the mean square at most 1 / √k of the norms."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(6, 96, generator=generator) + 0.5
    rows[1] = rows[0] + 0.1 * rows[1]
    others = torch.randn(5, 96, generator=generator)
    seeds, k = 400, 32
    for estimate, exact in (
        (lambda seed: coded(name, rows, k, seed).inner(coded(name, others, k, seed)), rows @ others.T),
        (lambda seed: coded(name, rows, k, seed).inner(others), rows @ others.T),
        (lambda seed: coded(name, rows, k, seed).inner(), rows @ rows.T),
    ):
        found = torch.stack([estimate(seed) for seed in range(seeds)])
        off = found - exact.double()
        standard = off.std(dim=0) / math.sqrt(seeds)
        assert (off.mean(dim=0).abs() <= 4.5 * standard).all(), (off.mean(dim=0) / standard).abs().max()
        norms = (rows.norm(dim=1)[:, None] * (others if len(exact.T) == 5 else rows).norm(dim=1)).double()
        cosine = exact.double() / norms
        rms = off.square().mean(dim=0).sqrt() / norms
        assert (rms <= ((1 + cosine.square()) / k).sqrt() * 1.15).all(), rms.max() * math.sqrt(k)


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_are_encoded_alike_whatever_the_process_has_set(name) -> None:
    """Under autocast products would be of bfloat16: of directions, and of random signs."""
    schema, coding = PointSchema((256,), "float32"), coding_of(name, 8)
    rows, vectors = torch.randn(5, 256), vectors_of(schema, coding)
    plain = ENCODINGS[name].encode(rows, schema, coding, vectors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ENCODINGS[name].encode(rows, schema, coding, vectors), plain)


def test_one_row_in_a_codec_is_a_row() -> None:
    """By its number, of any library, as by a slice."""
    rows = torch.randn(4, 256)
    kept = coded("full8", rows)
    for one in (2, -2, np.int64(2), torch.tensor(2)):
        assert torch.equal(kept[one].decoded(), kept[2:3].decoded())
    assert len(list(kept)) == 4
    with pytest.raises(IndexError):
        kept[4]


def test_rows_of_other_matrices_are_not_compared() -> None:
    """Another k, seed, width, or none at all."""
    rows = torch.randn(3, 16)
    mine = coded("rp8", rows, 8, 1)
    assert mine.inner(coded("rp16", rows, 8, 1)).shape == (3, 3)
    for other in (
        coded("rp8", rows, 7, 1),
        coded("rp8", rows, 8, 2),
        coded("full8", rows),
        coded("rp8", rows[:, :9], 8, 1),
    ):
        with pytest.raises(InvalidSpec, match="cannot be compared"):
            mine.inner(other)
    with pytest.raises(InvalidSpec, match=r"vectors have 15 elements, .* rows are of 16 elements"):
        mine.inner(torch.zeros(2, 15))
    for wrong in ([1.0] * 16, np.ones(16), "v"):
        with pytest.raises(InvalidSpec, match="give CodedRows, or vectors as a tensor"):
            mine.inner(wrong)
    vector = torch.randn(16)
    assert torch.equal(mine.inner(vector), mine.inner(vector[None]))


def test_matrices_are_kept_as_long_as_there_is_room() -> None:
    """Those used last; one that is larger than all room is made each time and handed over all the same."""
    made: list[int] = []

    def matrix(number: int, size: int = 10) -> torch.Tensor:
        def make() -> torch.Tensor:
            made.append(number)
            return torch.full((size,), float(number))

        return kept.get(number, make)

    kept = Matrices(most_bytes=80)
    for number in (1, 2, 1, 3, 1, 2):  # 3 displaces 2, which was used before 1
        assert torch.equal(matrix(number), torch.full((10,), float(number)))
    assert made == [1, 2, 3, 2]
    assert len(matrix(9, size=1000)) == 1000
    assert matrix(1)[0] == 1
    assert made == [1, 2, 3, 2, 9, 1]


@pytest.mark.parametrize("name", CODECS)
def test_shards_in_a_codec_join(name) -> None:
    """Elements one behind the other, projections as sums; each shard by itself, and the bound of all."""
    whole, split = PointSchema((4, 80), "float32"), PointSchema((4, 80), "float32", shards=2)
    codec, coding = ENCODINGS[name], coding_of(name, 24, 3)
    assert isinstance(codec, Codec)
    rows, vectors, matrix = rows_like(whole, 7), vectors_of(whole, coding), codec.matrix(whole.width, coding)
    constants, shards = constants_of(name, whole.width), []
    for shard, half in enumerate(rows.chunk(2, dim=1)):
        part = None if vectors is None else vectors[:, shard * 160 : (shard + 1) * 160]
        stored = codec.encode(half.contiguous(), split, coding, part)
        shards.append(CodedRows(coding, split, codec.parts(stored, split, coding), shard, constants))
    joined = CodedRows.joined(shards)
    exact = rows.double() if matrix is None else rows.double() @ matrix.double().T * coding.k**-0.5
    off = (joined.decoded().flatten(1).double() - exact).abs()
    assert (off <= joined.error_bound().flatten(1) + 1e-5).all()
    assert len(joined) == 7
    expected = codec.joined([shard.decoded() for shard in shards])
    assert torch.equal(joined.decoded(), expected)


# The device

#: Rows of every kind in every dtype that holds them; Triton's interpreter has no bfloat16.
ON_DEVICE = [
    (which, dtype)
    for which in (*ROWS, "nan", "inf")
    for dtype in ("float32", "float16", *(["bfloat16"] if CUDA else []))
    if dtype == "float32" or which not in {"huge", "small", "denormal", "least"}
]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")  # interpreter
@pytest.mark.parametrize("width", [5, 24, 140])
@pytest.mark.parametrize(("which", "dtype"), ON_DEVICE)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.slow
def test_the_device_stores_what_the_host_does(name, which, dtype, width) -> None:
    """The same scales and codes, but for numbers in the middle of two codes, and not a byte beside them."""
    codec, schema, count, points = ENCODINGS[name], PointSchema((width,), dtype), 4, 2
    coding = coding_of(name, min(width, {"topk8": 6}.get(name, 133)), 11)
    assert isinstance(codec, Codec)
    drawn = torch.randn(count * points, width, generator=torch.Generator().manual_seed(3))
    rows = ROWS.get(which, ROWS["mixed"])(drawn).to(getattr(torch, dtype))
    if which in {"nan", "inf"}:
        rows[2, 3] = float(which)
        rows[5, 1] = -float(which)
    raw, stored = record_of([schema] * points), record_of([schema] * points, coding)
    ring = torch.full((count * (raw.lines + stored.lines), LINE_BYTES), 77, dtype=torch.uint8)
    flat = ring.view(-1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(4))
    records = torch.stack([torch.arange(count) * raw.lines, count * raw.lines + order * stored.lines], dim=1)
    for number, (source, _) in enumerate(records.tolist()):
        for point, (offset, size) in enumerate(zip(raw.offsets, raw.sizes, strict=True)):
            start = source * LINE_BYTES + offset
            flat[start : start + size] = rows[number * points + point].view(torch.uint8)
    expected = ring.clone()
    matrix, vectors = codec.matrix(width, coding), vectors_of(schema, coding)
    known = codec.encode(rows, schema, coding, vectors)
    stretches = []
    for number, (_, target) in enumerate(records.tolist()):
        for point, (offset, size) in enumerate(zip(stored.offsets, stored.sizes, strict=True)):
            start = target * LINE_BYTES + offset
            stretches.append(slice(start, start + size))
            expected.view(-1)[stretches[-1]] = known[number * points + point]
    at = torch.tensor([[line // LINE_BYTES, byte] for line, byte in zip(raw.offsets, stored.offsets, strict=True)])
    there = ring.to(DEVICE)
    bank = torch.zeros(3, width + 7)  # wider rows than these, and in another order
    constants = constants_of(name, width)
    for place, constant in zip((2, 0), constants.values(), strict=False):
        bank[place, :width] = constant
    tables = PointTables(schema, coding, at.to(DEVICE), torch.tensor([[2, 0]] * points).to(DEVICE))
    given = bank.to(DEVICE)[:, :width] if matrix is None else matrix.to(rows.dtype).to(DEVICE)
    codec.launch(there, records.to(DEVICE), tables, given)
    found = there.cpu()
    stored_there = torch.stack([found.view(-1)[one] for one in stretches])
    device, host = (
        CodedRows(coding, schema, codec.parts(stored, schema, coding), constants=constants)
        for stored in (stored_there, known)
    )
    agree(device, host, rows, matrix)
    for stretch in stretches:
        found.view(-1)[stretch] = expected.view(-1)[stretch]
    assert torch.equal(found, expected)


def agree(device: CodedRows, host: CodedRows, rows: torch.Tensor, matrix: torch.Tensor | None) -> None:
    """Two that stored the same rows: NaN where the other has it, and of numbers that are finite the same scales and codes.

    Codes may differ for a number in the middle of two; of projections both hold their bound, since either rounds sums in
    its own order.
    """
    assert device.parts.keys() == host.parts.keys()
    finite = rows.isfinite().all(dim=1)
    mine, theirs = device.decoded().double(), host.decoded().double()
    exact = rows.double()
    if matrix is not None:
        assert mine[~finite].isnan().all()
        assert theirs[~finite].isnan().all()
        exact = exact @ matrix.double().T * host.coding.k**-0.5
        summed = rows.double().abs().sum(1, keepdim=True) * rows.shape[1] * 2.0**-24
        for one in (device, host):
            held = one.parts["scale"].isfinite().all(dim=1)
            off = (one.decoded().double() - exact).abs() <= one.error_bound() + summed + 2.0**-149
            assert off[held].all()
            assert not (finite & ~held & (rows.abs().amax(1) < 1e30)).any()
        return
    assert torch.equal(mine.isnan(), theirs.isnan())
    if "active" in host.parts:  # of equal activations a device keeps others than the host does, in another order
        assert torch.equal(device.parts["active"], host.parts["active"])
        assert all(torch.equal(device.parts[name][finite], host.parts[name][finite]) for name in ("q", "rest"))
        kept = device.parts["indices"][finite].long()
        active = kept >= 0
        assert torch.equal(active, host.parts["indices"][finite] >= 0)
        assert all(len(row[row >= 0].unique()) == (row >= 0).sum() for row in kept)
        values = device.parts["q"][finite].double()
        assert torch.equal(exact[finite].gather(1, kept.clamp(min=0))[active], values[active])
        return
    for name in ("scale", "zero", "rest", "indices"):
        if name in host.parts:
            assert torch.equal(device.parts[name][finite], host.parts[name][finite]), name
    assert ((mine - exact).abs() <= device.error_bound())[finite].all()
    step = (2 * host.error_bound()).clamp_min(2.0**-149)
    apart = ((mine != theirs) & ~mine.isnan())[finite]
    middle = (((mine - exact).abs() - (theirs - exact).abs()).abs() / step)[finite] <= 2e-2
    assert (apart <= middle).all()
    assert ((mine - theirs).abs()[finite][apart] <= (step[finite] + ulp_of(rows[finite]))[apart]).all()
