"""Product quantisation of rows on disk: codes and rows are faiss' own, and files hold them bit for bit."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
import torch

from steercap.captures import files
from steercap.captures.files import Header, Saved
from steercap.captures.quantisation import Codes, Quantiser
from steercap.core.spec import Point
from steercap.errors import InvalidFile, InvalidRequest, InvalidSpec, LayerOutOfRange

WIDTH, PARTS = 16, 4
POINT = Point(2, "resid_post")


def rows_of(seed: int, count: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(99)) * 5
    chosen = torch.randint(40, (count,), generator=generator)
    return centres[chosen] + torch.randn(count, WIDTH, generator=generator)


def saved(path, rows: torch.Tensor, model: str = "m", reduce=None, directions=()):
    """A file as `CaptureHandle.save` writes it, with rows at one layer."""
    header = Header(files.VERSION, model, path.stem, "", 4, (POINT,), (), reduce, len(rows), directions=directions)
    positions = torch.arange(len(rows))
    return files.write(Saved(header, {POINT: rows}, positions, positions + 100, (positions + 100).tolist(), [1]), path)


@pytest.fixture
def paths(tmp_path):
    return [saved(tmp_path / f"{seed}.safetensors", rows_of(seed)) for seed in range(4)]


def test_codes_and_their_error_are_those_of_faiss(paths) -> None:
    """The same rows, seed and sizes: the same codebooks, codes, rows and error."""
    quantiser = Quantiser.train(paths, -2, parts=PARTS, bits=6, seed=5)
    assert (quantiser.point, quantiser.model, quantiser.rows, quantiser.row_bytes) == (POINT, "m", 1200, 3)
    rows = torch.cat([rows_of(seed) for seed in range(4)])
    order = np.argsort(np.concatenate([x := np.random.default_rng(5).random(1200)]))
    assert len(x) == 1200
    known = faiss.ProductQuantizer(WIDTH, PARTS, 6)
    known.cp.seed, known.cp.min_points_per_centroid = 5, 1
    known.train(np.ascontiguousarray(rows.numpy()[order]))
    codes = quantiser.encode(rows)
    assert np.array_equal(codes.numpy(), known.compute_codes(rows.numpy()))
    decoded = quantiser.decode(codes)
    assert np.array_equal(decoded.numpy(), known.decode(codes.numpy()))
    error = float((decoded - rows).square().sum() / rows.square().sum())
    nearest = float(rows.sub(rows.mean(0)).square().sum() / rows.square().sum())
    assert error < nearest / 4  # 24 bits a row, of 512, beside the mean alone


def test_files_round_trip(paths, tmp_path) -> None:
    """Codebooks and codes, with the labels of their rows and where they come from."""
    quantiser = Quantiser.train(paths[:3], 2, parts=PARTS, bits=5)
    again = Quantiser.load(quantiser.save(tmp_path / "books.safetensors"))
    assert torch.equal(again.codebooks, quantiser.codebooks)
    assert (again.point, again.model, again.rows, again.digest) == (POINT, "m", 900, quantiser.digest)
    written = again.encode_file(paths[3], tmp_path / "codes.safetensors")
    loaded = Codes.load(tmp_path / "codes.safetensors")
    assert torch.equal(loaded.codes, quantiser.encode(rows_of(3)))
    assert torch.equal(loaded.codes, written.codes)
    assert (loaded.point, loaded.request_id, loaded.quantiser) == (POINT, "3", quantiser.digest)
    assert loaded.token_ids.tolist() == (loaded.positions + 100).tolist() == list(range(100, 400))
    assert torch.equal(again.decode(loaded), quantiser.decode(quantiser.encode(rows_of(3))))
    with pytest.raises(InvalidFile, match=r"holds codes, not quantiser; read it with Codes\.load"):
        Quantiser.load(tmp_path / "codes.safetensors")


@pytest.mark.parametrize("metric", ["distance", "inner"])
def test_search_is_by_what_codes_stand_for(paths, tmp_path, metric) -> None:
    """Against all decoded rows, one by one; rows of several files are numbered one after another."""
    quantiser = Quantiser.train(paths, 2, parts=PARTS)
    codes = [quantiser.encode_file(path, tmp_path / f"c{n}.safetensors") for n, path in enumerate(paths)]
    queries = rows_of(77, 9)
    values, numbers = quantiser.search(queries, codes, 5, metric=metric)
    decoded = torch.cat([quantiser.decode(one) for one in codes]).double()
    if metric == "inner":
        known = (queries.double() @ decoded.T).topk(5).values
    else:
        known = (queries.double()[:, None] - decoded).square().sum(2).topk(5, largest=False).values
    torch.testing.assert_close(values.double(), known, rtol=1e-5, atol=1e-3)
    assert numbers.shape == (9, 5)
    assert int(numbers.max()) < 1200


def test_codes_that_faiss_cannot_search_are_refused(paths, tmp_path, monkeypatch) -> None:
    """Kernels of some processors take no codebooks of two entries for parts of two elements."""
    quantiser = Quantiser.train(paths, 2, parts=PARTS)
    codes = quantiser.encode_file(paths[0], tmp_path / "codes.safetensors")

    def fails(*_given):
        raise RuntimeError("Error: 'ksub % 8 == 0' failed")

    monkeypatch.setattr(faiss.IndexPQ, "search", fails)
    with pytest.raises(InvalidRequest, match=r"faiss cannot search codes of Quantiser.*ksub % 8.*train with more bits"):
        quantiser.search(rows_of(3, 2), codes, 1)


def test_what_does_not_fit_is_refused(paths, tmp_path) -> None:
    """Sizes, too few rows, rows that are not finite, files of two models, and codes of other codebooks."""
    for parts, bits in ((5, 8), (0, 8), (4, 0), (4, 17)):
        with pytest.raises(InvalidSpec):
            Quantiser.train(paths, 2, parts=parts, bits=bits)
    with pytest.raises(InvalidRequest, match="1200 rows for codebooks of 2048 entries"):
        Quantiser.train(paths, 2, parts=4, bits=11)
    with pytest.raises(LayerOutOfRange):
        Quantiser.train(paths, 1, parts=4)
    bad = saved(tmp_path / "bad.safetensors", torch.full((300, WIDTH), torch.nan))
    with pytest.raises(InvalidRequest, match="NaN or infinity"):
        Quantiser.train([*paths, bad], 2, parts=4)
    foreign = saved(tmp_path / "foreign.safetensors", rows_of(1), model="n")
    with pytest.raises(InvalidSpec, match=r"models \['m', 'n'\]"):
        Quantiser.train([*paths, foreign], 2, parts=4)
    one, other = (Quantiser.train(paths, 2, parts=4, bits=4, seed=seed) for seed in (1, 2))
    with pytest.raises(InvalidRequest, match="for 'm'"):
        one.encode_file(foreign, tmp_path / "codes.safetensors")
    codes = one.encode_file(paths[0], tmp_path / "codes.safetensors")
    with pytest.raises(InvalidRequest, match="of other codebooks"):
        other.decode(codes)
    for k in (0, 301):
        with pytest.raises(InvalidRequest, match="from 1 to 300"):
            one.search(rows_of(1, 2), codes, k)
    with pytest.raises(InvalidRequest, match="32 wide"):
        one.encode(torch.zeros(1, 2, WIDTH))


def test_numbers_that_are_no_rows_of_a_point_are_refused(paths, tmp_path) -> None:
    """Projections as many as a row has elements, and reductions among rows, are not taken for rows."""
    names = tuple(f"d{number}" for number in range(WIDTH))
    projected = saved(tmp_path / "projected.safetensors", rows_of(1), directions=names)
    mean = saved(tmp_path / "mean.safetensors", rows_of(1, 1), reduce="mean")
    for given in ([projected], [*paths, projected]):
        with pytest.raises(InvalidSpec, match="projections on directions"):
            Quantiser.train(given, 2, parts=4, bits=4)
    with pytest.raises(InvalidSpec, match=r"reductions \['None', 'mean'\]"):
        Quantiser.train([*paths, mean], 2, parts=4, bits=4)
    books = Quantiser.train(paths, 2, parts=4, bits=4)
    with pytest.raises(InvalidSpec, match="projections on directions"):
        books.encode_file(projected, tmp_path / "codes.safetensors")
    assert len(books.encode_file(mean, tmp_path / "codes.safetensors").codes) == 1


def test_wrong_arguments_are_said(paths) -> None:
    """By their names; rows are tensors of floats, codes have a label each, and codebooks two entries at least."""
    for arguments, says in (
        ({"most_rows": 0}, "most_rows=0"),
        ({"most_rows": -1}, "most_rows=-1"),
        ({"most_rows": 2.5}, "most_rows=2.5"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1 << 40}, "seed="),
        ({"seed": "x"}, "seed='x'"),
        ({"layer": "all"}, "layer='all'"),
        ({"layer": [1, 2]}, r"layer=\[1, 2\]"),
    ):
        with pytest.raises(InvalidSpec, match=says):
            Quantiser.train(**{"files": paths, "layer": 2, "parts": 4, "bits": 4, **arguments})
    books = Quantiser.train(paths, 2, parts=4, bits=4)
    for rows in (rows_of(1)[0], rows_of(1).numpy()):
        with pytest.raises(InvalidRequest, match="give a tensor of floats"):
            books.encode(rows)
    codes, labels = books.encode(rows_of(1)), torch.arange(300)
    assert len(Codes(books.digest, POINT, codes[:1], labels, labels, "r").codes) == 1  # of a reduction
    with pytest.raises(InvalidSpec, match="a label of each row"):
        Codes(books.digest, POINT, codes[:3], labels, labels, "r")
    for entries in (0, 1, 3):
        with pytest.raises(InvalidSpec, match="codebooks of"):
            Quantiser(POINT, torch.zeros(4, entries, 4))


def test_a_draw_is_of_all_files_alike(paths) -> None:
    """Fewer rows than there are: some of each file, the same for the same seed."""
    one, again, other = (Quantiser.train(paths, 2, parts=4, bits=4, most_rows=200, seed=s) for s in (1, 1, 2))
    assert one.rows == 200
    assert one.digest == again.digest != other.digest
