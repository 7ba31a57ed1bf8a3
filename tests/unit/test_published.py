"""Rows as others publish them: read and written by the formula of the field, written out here with NumPy."""

from __future__ import annotations

import json
import shutil
import warnings
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from full_disk import files_of_at_most
from handles import a_handle

from steercap import CaptureHandle, Point
from steercap.captures import npz
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.published import PublishedRows, published_files, save_published
from steercap.captures.rows import Captures, Found
from steercap.core.receipt import Receipt
from steercap.core.schema import Coding, PointSchema
from steercap.errors import InvalidFile, InvalidSpec
from steercap.kernels.codecs.coded import CodedRows, encoded


def write(path, rows, *, clamped=False, axis=1, meta=None):
    """Write rows as another program does, float32 throughout; `clamped` cuts zero off at 0 and 255."""
    least, most = rows.min(axis=axis, keepdims=True), rows.max(axis=axis, keepdims=True)
    scale = np.where(most > least, (most - least) / 255, 1)
    zero = -least / scale
    zero = np.clip(np.round(zero), 0, 255) if clamped else zero
    q = np.clip(np.round(rows / scale + zero), 0, 255).astype(np.uint8)
    scale, zero = (one.astype(np.float32).ravel() for one in (scale, zero))
    meta = meta or {"mode": "full8", "dim": rows.shape[1]}
    np.savez(path, q=q, scale=scale, zero=zero, meta=np.array(json.dumps(meta)))
    return path


def draws(seed):
    """Rows of one sign, of both, of one number, far from 0, tiny and huge."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((12, 40))
    rows[0] = np.abs(rows[0]) + 3
    rows[1] = -np.abs(rows[1]) - 3
    rows[2] = 7.5
    rows[3] = 0
    rows[4] += 1000
    rows[5] *= 1e-30
    rows[6] *= 1e30
    rows[7] = np.maximum(rows[7], 0)
    rows[8] = np.minimum(rows[8], 0)
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_others_come_back_within_half_a_step(seed, tmp_path) -> None:
    rows = draws(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = PublishedRows.load(write(tmp_path / "a.npz", rows))
    step = (rows.max(1) - rows.min(1)) / 255
    error = np.abs(found.decoded().double().numpy() - rows).max(1)
    assert (error <= step / 2 + 1e-6 * np.abs(rows).max(1)).all()
    assert (found.mode, found.dim) == ("full8", 40)


@pytest.mark.parametrize("seed", range(5))
def test_a_clamped_zero_is_warned_of(seed, tmp_path) -> None:
    """It ruins the rows of one sign alone, by more than their spread, and those are the ones counted."""
    rows = draws(seed)
    with pytest.warns(UserWarning, match="of 12 rows are saturated: zero was cut off at 0 or 255"):
        found = PublishedRows.load(write(tmp_path / "a.npz", rows, clamped=True))
    off = np.abs(found.decoded().double().numpy() - rows).max(1)
    ruined = off > 2 * (rows.max(1) - rows.min(1)) / 255 + 1e-6 * np.abs(rows).max(1)
    assert ruined[[0, 1, 4]].all()
    assert found.saturated().tolist() == (ruined & (np.arange(12) != 2)).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_what_is_written_never_has_a_clamped_zero(seed, tmp_path) -> None:
    """Read back with NumPy and the formula alone: within half a step, rows of one sign too."""
    rows = torch.from_numpy(draws(seed)).float()
    for given in (rows, encoded(rows, Coding("full8"))):
        path = PublishedRows.of(given).save(tmp_path / "a.npz")
        with np.load(path, allow_pickle=False) as arrays:
            assert sorted(arrays) == ["meta", "q", "scale", "zero"]
            assert {one: (arrays[one].dtype, arrays[one].shape) for one in ("scale", "zero")} == dict.fromkeys(
                ("scale", "zero"), (np.dtype("float32"), (12,))
            )
            assert json.loads(str(arrays["meta"])) == {"mode": "full8", "dim": 40}
            q, scale, zero = (arrays[one].astype(np.float64) for one in ("q", "scale", "zero"))
        assert zero[0] < 0
        assert zero[1] > 255
        known = rows.double().numpy()
        off = np.abs((q - zero[:, None]) * scale[:, None] - known).max(1)
        assert (off <= (known.max(1) - known.min(1)) / 510 + 1e-6 * np.abs(known).max(1)).all()
        again = PublishedRows.load(path)
        assert torch.equal(again.decoded(), PublishedRows.of(given).decoded())


def test_scales_of_each_element_are_told_by_their_length(tmp_path) -> None:
    rows = draws(0)[:, :30]
    path = write(tmp_path / "a.npz", rows, axis=0)
    found = PublishedRows.load(path)
    assert found.scale.shape == (1, 30)
    assert (
        np.abs(found.decoded().double().numpy() - rows)
        <= (rows.max(0) - rows.min(0)) / 510 + 1e-6 * np.abs(rows).max(0)
    ).all()
    square = np.random.default_rng(0).standard_normal((8, 8))
    for axis in (0, 1):
        path = write(tmp_path / "b.npz", square, axis=axis)
        with pytest.raises(InvalidFile, match="which fits 8 tokens and 8 elements; give per_element="):
            PublishedRows.load(path)
        found = PublishedRows.load(path, per_element=axis == 0)
        assert np.abs(found.decoded().double().numpy() - square).max() < 0.02
    with pytest.raises(InvalidFile, match=r"scale is \(30,\), but per_element=False"):
        PublishedRows.load(write(tmp_path / "a.npz", rows, axis=0), per_element=False)


def test_elements_of_one_sign_whose_zero_was_clamped_are_warned_of(tmp_path) -> None:
    rows = np.random.default_rng(0).standard_normal((50, 30))
    rows[:, 3] = np.abs(rows[:, 3]) + 4
    with pytest.warns(UserWarning, match="of 50 rows are saturated"):
        found = PublishedRows.load(write(tmp_path / "a.npz", rows, axis=0, clamped=True))
    assert found.saturated().tolist() == (found.q[:, 3] == 255).tolist()


def test_a_folder_has_a_file_for_each_layer_and_rank(tmp_path) -> None:
    handle = a_handle(dtype=torch.float32)
    paths = save_published(handle, tmp_path, seq=3)
    assert [path.name for path in paths] == ["seq3_layer0_rank0.npz", "seq3_layer1_rank0.npz"]
    for seq in (10, 2):
        save_published(handle, tmp_path, seq=seq)
    handle.save_npz(tmp_path / "other.npz")
    with pytest.warns(UserWarning, match=r"1 files of other names are left out, other\.npz"):
        found = published_files(tmp_path)
    assert [(one.seq, one.layer, one.rank) for one in found] == [
        (seq, layer, 0) for seq in (2, 3, 10) for layer in (0, 1)
    ]
    for one in found:
        rows = handle.captures[one.layer].double()
        step = (rows.amax(1) - rows.amin(1)) / 510
        assert ((PublishedRows.load(one.path).decoded() - rows).abs().amax(1) <= step + 1e-6 * rows.abs().amax(1)).all()
    (tmp_path / "other.npz").unlink()
    (tmp_path / "seq10_layer1_rank0.npz").rename(tmp_path / "seq10_layer1_rank1.npz")
    with pytest.raises(InvalidFile, match=r"has no seq2_layer0_rank1\.npz; other layers have this rank"):
        published_files(tmp_path)
    with pytest.raises(InvalidFile, match="has no file seqS_layerL_rankR"):
        published_files(tmp_path / "nowhere")


@pytest.mark.parametrize("kept", ["shards", "joined"])
def test_ranks_have_files_of_their_own(kept, tmp_path) -> None:
    """Shards that were not gathered, and codes of two ranks: side by side they are the whole rows."""
    parts = [torch.randn(3, 2, 20).bfloat16() for _ in range(2)]
    rows = tuple(parts) if kept == "shards" else joined(parts)
    paths = save_published(one_point(rows), tmp_path)
    assert [path.name for path in paths] == [f"seq0_layer1_rank{rank}.npz" for rank in (0, 1)]
    for path, part in zip(paths, parts, strict=True):
        known = part.flatten(1).double()
        step = (known.amax(1) - known.amin(1)) / 510
        assert ((PublishedRows.load(path).decoded() - known).abs().amax(1) <= step * 1.001 + 1e-6).all()
    paths = save_published(one_point(parts[0]), tmp_path)  # of one rank: nothing is left of the two
    assert [one.path for one in published_files(tmp_path)] == paths
    shutil.copy(paths[0], tmp_path / "seq00_layer1_rank0.npz")
    with pytest.raises(InvalidFile, match="have the same sequence, layer and rank; keep one"):
        published_files(tmp_path)


def test_a_capture_that_cannot_be_written_whole_leaves_the_one_before(tmp_path) -> None:
    """No layer of it, which would be read beside the others as if they were of one capture, and no file is lost."""
    points, labels = (Point(0, "z"), Point(1, "z")), np.arange(3)
    rows = Captures({points[0]: torch.randn(3, 4), points[1]: torch.randn(3, 40_000)}, 4)
    handle = CaptureHandle(
        request_id="r",
        model="m",
        text="",
        prompt_token_ids=(0, 1, 2),
        output_token_ids=(8,),
        points=points,
        num_layers=4,
        lifecycle=Lifecycle("r", found=Found(rows, Receipt(points, labels, labels, 6, None))),
    )
    save_published(handle, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with files_of_at_most(20_000), pytest.raises(OSError, match="large"):
        save_published(handle, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(before) == 2


def joined(parts) -> CodedRows:
    shards = [encoded(part, Coding("full8")) for part in parts]
    schema = PointSchema((4, 20), "bfloat16", shards=2)
    return CodedRows.joined([replace(one, schema=schema, shard=rank) for rank, one in enumerate(shards)])


def one_point(rows) -> CaptureHandle:
    point, count = Point(1, "z"), 3
    receipt = Receipt((point,), np.arange(count), np.arange(count), count, None)
    return CaptureHandle(
        request_id="r",
        model="m",
        text="",
        prompt_token_ids=tuple(range(count)),
        output_token_ids=(8,),
        points=(point,),
        num_layers=4,
        lifecycle=Lifecycle("r", found=Found(Captures({point: rows}, 4), receipt)),
    )


def test_neither_form_is_taken_for_the_other(tmp_path) -> None:
    handle = a_handle()
    ours, theirs = handle.save_npz(tmp_path / "ours.npz"), write(tmp_path / "theirs.npz", draws(0))
    with pytest.raises(
        InvalidFile, match=r"is a file of save_npz, whose names differ; read it by steercap\.captures\.npz\.read"
    ):
        PublishedRows.load(ours)
    with pytest.raises(InvalidFile, match=r"read by steercap\.captures\.published\.PublishedRows\.load"):
        npz.read(theirs)


ROWS = {"q": np.zeros((3, 5), np.uint8), "scale": np.ones(3, np.float32), "zero": np.zeros(3, np.float32)}
META = np.array('{"mode": "full8", "dim": 5}')


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({}, "has no q, scale, zero, meta"),
        ({**ROWS}, "has no meta; it has q, scale, zero"),
        ({**ROWS, "meta": np.array("[")}, "has content that is not valid"),
        ({**ROWS, "meta": np.array('{"mode": "full8"}')}, "missing required field `dim`"),
        ({**ROWS, "meta": np.array(3)}, "meta is .* of int64; it must be a JSON text"),
        ({**ROWS, "meta": np.array({"mode": 1}, dtype=object)}, "is of object, but must be numbers or text"),
        ({**ROWS, "meta": META, "q": np.zeros((3, 5), np.int8)}, r"q is \(3, 5\) of int8; it must be uint8"),
        (
            {**ROWS, "meta": META, "scale": np.ones(4, np.float32)},
            r"scale is \(4,\) of float32; it must be finite floats, \[3\] or \[5\]",
        ),
        ({**ROWS, "meta": META, "zero": np.full(3, np.nan, np.float32)}, "zero is .* it must be finite"),
        ({**ROWS, "meta": META, "zero": np.zeros(5, np.float32)}, "scale is .* and zero .*; they must be alike"),
        ({**ROWS, "meta": META, "scale": np.ones(3, np.int32)}, "scale is .* of int32"),
    ],
)
def test_files_that_do_not_fit_are_refused(arrays, says, tmp_path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InvalidFile, match=says):
        PublishedRows.load(tmp_path / "a.npz")


def test_damaged_files_are_refused(tmp_path) -> None:
    path = write(tmp_path / "a.npz", draws(0))
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(InvalidFile, match=r"a\.npz"):
            PublishedRows.load(path)
    with zipfile.ZipFile(path, "w") as archive:  # an array that says to be larger than it is
        header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 9), }"
        archive.writestr("q.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(InvalidFile, match="declares 899,999,999,991 bytes and has 0"):
        PublishedRows.load(path)
    with pytest.raises(InvalidFile, match="no such file"):
        PublishedRows.load(tmp_path / "b.npz")


def test_rows_that_have_no_such_form_are_refused(tmp_path) -> None:
    rows = torch.randn(4, 200)
    for coding in (Coding("int4"), Coding("rp8", 64), Coding("topk8", 8)):
        with pytest.raises(InvalidSpec, match="the published form has raw rows or codec='full8'"):
            PublishedRows.of(encoded(rows, coding))
    for given in ([1.0], torch.zeros(5), torch.zeros(2, 5, dtype=torch.int64)):
        with pytest.raises(InvalidSpec, match="give floats"):
            PublishedRows.of(given)
    with pytest.raises(InvalidSpec, match="these rows hold NaN or infinity"):
        PublishedRows.of(torch.full((2, 5), torch.nan))
    handle = a_handle(sites=("resid_post", "z"))
    with pytest.raises(
        InvalidSpec, match=r"has rows of \['resid_post', 'z'\]; file names in this form do not tell the site"
    ):
        save_published(handle, tmp_path)
    handle = a_handle()
    with pytest.raises(InvalidSpec, match="seq=-1; give a whole number, 0 or more"):
        save_published(handle, tmp_path, seq=-1)
    assert not list(tmp_path.iterdir())
