"""Runs of captures: what a manifest lists is there as it was, and nothing else counts, whenever a writer was killed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from cli_calls import call
from handles import a_handle
from safetensors import safe_open
from safetensors.torch import save_file

import steercap.sync
from steercap import CaptureHandle, CaptureRun, Manifest, save_run, stack
from steercap.captures import files, npz
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.manifest import JOURNAL, TensorLayout, layout_of, versions
from steercap.captures.npz import FORMULAS
from steercap.captures.rows import Captures, Found
from steercap.captures.saving import forget_run
from steercap.core.receipt import Receipt, SteeringReceipt
from steercap.core.schema import Coding, PointSchema
from steercap.core.spec import Point
from steercap.errors import CaptureNotFetched, CaptureReleased, InvalidFile, InvalidRequest, InvalidSpec, RunDiffers
from steercap.files.base import sweep
from steercap.kernels.codecs import ENCODINGS, Codec
from steercap.kernels.codecs.coded import CodedRows
from steercap.lab.mechanism.views import heatmap_of_layers
from steercap.steering import DirectionSet, LayerVectors

TESTS = Path(__file__).parents[1]


def sharded(shards=2, *, reduce=None, directions=()) -> CaptureHandle:
    """A handle of a split point that was not gathered, beside one that each rank has as a whole."""
    points = (Point(1, "resid_post"), Point(1, "z"))
    rows = 1 if reduce else 3
    kept = {
        points[0]: torch.randn(rows, 4).bfloat16(),
        points[1]: tuple(torch.randn(rows, 2, 3).bfloat16() for _ in range(shards)),
    }
    receipt = Receipt(points, np.array([0, 2, 3]), np.array([5, 7, 8]), 3, reduce, SteeringReceipt((2,), 3, 0, "ab"))
    return CaptureHandle(
        request_id="s",
        model="m",
        text="ä",
        prompt_token_ids=(5, 6, 7),
        output_token_ids=(8, 9),
        points=points,
        num_layers=4,
        lifecycle=Lifecycle("s", found=Found(Captures(kept, 4), receipt)),
        directions=directions,
    )


def same(one: CaptureHandle, other: CaptureHandle) -> bool:
    """Whether two handles hold the same bits, in the same shards."""
    assert one.points == other.points
    for point in one.points:
        pairs = zip(one.captures.shards(*point), other.captures.shards(*point), strict=True)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    labels = [(h.text, h.positions.tolist(), h.token_ids.tolist(), h.receipt.steering) for h in (one, other)]
    return labels[0] == labels[1]


# One file


def test_shards_are_saved_and_read_bit_for_bit(tmp_path) -> None:
    """What `gather=False` left as the ranks had it stays so; what is asked for as a whole is refused after as before."""
    handle = sharded()
    again = CaptureHandle.load(handle.save(tmp_path / "a.safetensors"))
    assert same(handle, again)
    assert len(again.captures.shards(1, "z")) == 2
    with pytest.raises(InvalidSpec, match="2 shards"):
        again.captures[1, "z"]


def test_a_file_that_lacks_what_its_header_names_is_refused(tmp_path) -> None:
    """A shard too few is not fewer heads."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = sharded().save(tmp_path / "a.safetensors")
    with safe_open(path, framework="pt") as file:
        tensors, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    for name in ("rows.z.1.shard1", "rows.resid_post.1", "positions", "output_token_ids"):
        save_file({key: value for key, value in tensors.items() if key != name}, path, header)
        with pytest.raises(InvalidFile, match=rf"lacks an entry that its header names: '{name}'"):
            CaptureHandle.load(path)


def opened_up(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors of a file, and its header."""
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["steercap"])  # noqa: SIM118


@pytest.mark.parametrize("reduce", [None, "mean"])
@pytest.mark.parametrize("make", [a_handle, sharded])
def test_a_file_of_rows_that_are_not_those_of_its_labels_is_refused(make, reduce, tmp_path) -> None:
    """Rows or labels too few, too many, in another order, or of another kind: no row gets another token's label."""
    path = make(reduce=reduce).save(tmp_path / "a.safetensors")
    tensors, header = opened_up(path)
    harms = {
        "a row too few": lambda tensor: tensor[1:],
        "rows twice": lambda tensor: torch.cat([tensor, tensor]),
        "one axis": lambda tensor: tensor.flatten(),
        "no axis": lambda tensor: tensor.flatten()[0],
        "whole numbers": lambda tensor: tensor.int(),
        "the other way round": lambda tensor: tensor.flip(0),
        "others": lambda tensor: -tensor - 1,
    }
    of_labels = {"one axis", "the other way round", "others"}
    for name, tensor in tensors.items():
        for what, harm in harms.items():
            harmed = harm(tensor)
            rows = name.startswith("rows.") and what in of_labels - {"one axis"}  # other numbers may be rows too
            behind = (
                name == "output_token_ids" and what != "whole numbers" and harmed.dim()
            )  # of which the last is not read
            if (
                rows
                or behind
                or (harmed.shape == tensor.shape and harmed.equal(tensor) and harmed.dtype == tensor.dtype)
            ):
                continue
            save_file(tensors | {name: harmed.contiguous()}, path, {"steercap": json.dumps(header)})
            with pytest.raises(InvalidFile, match=r"a\.safetensors"):
                CaptureHandle.load(path)
    for change in ({"reduce": None if reduce else "mean"}, {"directions": ["joy"]}):
        save_file(tensors, path, {"steercap": json.dumps(header | change)})
        with pytest.raises(InvalidFile, match="rows of floats"):
            CaptureHandle.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"points": []},
        {"points": [[1, "neurons"]] * 2},
        {"num_layers": 1},
        {"reduce": "median"},
        {"shards": [-1]},
        {"coding": ["topk8", 0, 0]},
        {"coding": ["topk8", 1 << 40, 0]},
        {"coding": ["rp8", -16, 0]},
        {"coding": ["rp8", 16, 1 << 70]},
        {"coding": ["full8", 16, 0]},
        *({"schemas": [[shape, "bfloat16", shards, True, True, "all"]]} for shape, shards in
          [([], 1), ([0], 1), ([138], 0), ([138], -1), ([138], 4), ([10**30], 1)]),
    ],
)  # fmt: skip
def test_a_header_that_no_capture_has_is_refused(change, tmp_path) -> None:
    """Whatever it makes of the arithmetic of codecs."""
    path = coded("topk8").save(tmp_path / "a.safetensors")
    tensors, header = opened_up(path)
    save_file(tensors, path, {"steercap": json.dumps(header | change)})
    with pytest.raises(InvalidFile, match=r"a\.safetensors"):
        CaptureHandle.load(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_npz_holds_rows_by_point_without_pickle(dtype, tmp_path) -> None:
    """As they are; bfloat16, which NumPy lacks, as the float32 numbers that it stands for, and `about` says so."""
    handle = a_handle(dtype=dtype)
    with np.load(handle.save_npz(tmp_path / "a.npz"), allow_pickle=False) as found:
        assert {name for name in found if "." in name} == {"resid_post.0", "resid_post.1"}
        for point, rows in handle.captures.items():
            array = found[f"resid_post.{point.layer}"]
            assert array.dtype == (np.float32 if dtype == torch.bfloat16 else np.dtype(str(dtype)[6:]))
            assert torch.equal(torch.from_numpy(array).to(dtype), rows)
        assert found["positions"].tolist() == handle.positions.tolist()
        assert found["token_ids"].tolist() == handle.token_ids.tolist()
        assert found["prompt_token_ids"].tolist() == list(handle.prompt_token_ids)
        assert found["output_token_ids"].tolist() == list(handle.output_token_ids)
        about = json.loads(str(found["about"]))
    assert about["points"]["resid_post.1"] == {
        "codec": "raw",
        "parameters": {},
        "formula": FORMULAS["raw"],
        "dtypes": {"rows": str(dtype)[6:]},
        "shards": 0,
        "row": [2],
        "ranks": 1,
        "family": "",
    }
    assert (about["model"], about["request"]) == ("m", "r")


def test_npz_of_shards_has_each(tmp_path) -> None:
    """By the rank; and the file is named for what it is."""
    handle = sharded()
    with np.load(handle.save_npz(tmp_path / "a.npz")) as found:
        for number, shard in enumerate(handle.captures.shards(1, "z")):
            assert torch.equal(torch.from_numpy(found[f"z.1.shard{number}"]).bfloat16(), shard)
        assert json.loads(str(found["about"]))["points"]["z.1"]["shards"] == 2
    with pytest.raises(InvalidFile, match=r"this call writes \.npz"):
        handle.save_npz(tmp_path / "a.safetensors")


def test_what_a_killed_writer_of_tensors_leaves_is_swept(tmp_path) -> None:
    """Also under the names that safetensors has of its own; files are as readable as any other."""
    code = "import sys, torch; sys.path.insert(0, sys.argv[2]); from handles import a_handle; import os\n"
    code += "def hook(event, arguments):\n    if event == 'os.rename': os._exit(9)\n"
    code += "sys.addaudithook(hook); a_handle().save(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.safetensors"), str(TESTS)], check=False)
    assert done.returncode == 9
    assert list(tmp_path.iterdir())
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []
    path = a_handle().save(tmp_path / "a.safetensors")
    (tmp_path / "b").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "b").stat().st_mode)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.safetensors", "b"]


def coded(name: str, ranks: int = 1, seed: int = 0) -> CaptureHandle:
    """A handle of rows in a codec, joined of so many ranks."""
    return coded_rows(name, torch.randn(5, 138), torch.bfloat16, ranks, seed)


def coded_rows(name: str, rows: torch.Tensor, dtype: torch.dtype, ranks: int = 1, seed: int = 0) -> CaptureHandle:
    codec, (count, width) = ENCODINGS[name], rows.shape
    assert isinstance(codec, Codec)
    coding = Coding(name, 16 if codec.default_k else 0, seed if codec.seeded else 0)
    schema, point = PointSchema((width,), str(dtype).removeprefix("torch."), shards=ranks), Point(1, "neurons")
    rows = rows.to(dtype)
    constants = {constant: 1 + torch.rand(width) for constant in codec.constants}
    vectors = torch.stack(list(constants.values())) if constants else codec.matrix(width, coding)
    shards = []
    for rank, part in enumerate(rows.chunk(ranks, dim=1)):
        own, shard = None if vectors is None else vectors.chunk(ranks, dim=1)[rank], rank if ranks > 1 else None
        stored = codec.encode(part.contiguous(), schema, coding, own)
        shards.append(CodedRows(coding, schema, codec.parts(stored, schema, coding), shard, constants))
    kept = CodedRows.joined(shards)
    receipt = Receipt((point,), np.arange(count), np.arange(count), count, None)
    return CaptureHandle(
        request_id="c",
        model="m",
        text="",
        prompt_token_ids=tuple(range(count)),
        output_token_ids=(8,),
        points=(point,),
        num_layers=4,
        lifecycle=Lifecycle("c", found=Found(Captures({point: kept}, 4), receipt)),
    )


CODECS = [name for name, encoding in ENCODINGS.items() if isinstance(encoding, Codec) and name != "attention"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CODECS)
def test_an_npz_of_codes_is_decoded_by_what_it_says_alone(name, ranks, tmp_path) -> None:
    """With NumPy and the formula, bit for bit or, of full8, within one unit in the last place; of joined ranks too."""
    handle = coded(name, ranks, seed=7)
    with np.load(handle.save_npz(tmp_path / "a.npz"), allow_pickle=False) as found:
        about = json.loads(str(found["about"]))["points"]["neurons.1"]
        parts = {part: found[f"neurons.1.{part}"] for part in about["dtypes"]}
    assert (about["ranks"], about["row"], about["shards"]) == (ranks, [138], 0)
    assert about["formula"].startswith(FORMULAS[name])
    assert ("ranks" in about["formula"]) == (ranks > 1)
    centre, reach = parts.pop("centre", 0.0), parts.pop("reach", 1.0)
    by_rank = [{part: one[:, rank] for part, one in parts.items()} for rank in range(ranks)] if ranks > 1 else [parts]
    rows = [decoded_by_hand(name, one, about["row"][0] // ranks) for one in by_rank]
    whole = sum(rows) if about["family"] else np.concatenate(rows, axis=1)
    whole = (whole * np.float64(reach) + np.float64(centre)).astype(np.float32) if name == "calibrated8" else whole
    assert about["family"] == ("rademacher-philox4x64" if name.startswith("rp") else "")
    # full8's published formula rounds in another order: ties of the last rounding may fall to the other side
    np.testing.assert_array_max_ulp(whole, handle.captures[1].numpy(), maxulp=int(name == "full8"))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("name", "ranks"), [(name, ranks) for name in CODECS for ranks in (1, 2) if (name, ranks) != ("features", 2)]
)  # SAEs read whole rows
def test_an_npz_of_either_version_is_read_by_its_own_formula(name, ranks, version, tmp_path) -> None:
    """Bit for bit what the handle decodes to: version 1 had the codec's own names, `zero + scale * q`, in full8 too."""
    handle = coded(name, ranks, seed=7)
    path = handle.save_npz(tmp_path / "a.npz")
    if version == 1:
        with np.load(path) as found:
            arrays = {one: found[one] for one in found}
        (rows,) = handle.coded.values()
        arrays = {one: array for one, array in arrays.items() if not one.startswith("neurons.")}
        parts = {**rows.parts, **rows.constants}
        arrays |= {f"neurons.1.{one}": (part.float() if name == "fp8" else part).numpy() for one, part in parts.items()}
        about = json.loads(str(arrays["about"]))
        about["version"] = 1
        about["points"]["neurons.1"]["dtypes"] = {one: str(part.dtype)[6:] for one, part in parts.items()}
        np.savez(path, **(arrays | {"about": np.array(json.dumps(about))}))
    assert set(npz.read(path)) == {"neurons.1"}
    assert torch.equal(npz.read(path)["neurons.1"], handle.captures[1])


def test_an_npz_of_rows_is_read_as_they_were(tmp_path) -> None:
    for handle in (a_handle(dtype=torch.bfloat16), a_handle(dtype=torch.float16), sharded()):
        found = npz.read(handle.save_npz(tmp_path / "a.npz"))
        assert set(found) == {f"{point.site}.{point.layer}" for point in handle.points}
        for point in handle.points:
            known = torch.cat(list(handle.captures.shards(*point)), dim=1)
            assert torch.equal(found[f"{point.site}.{point.layer}"], known)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 3}, "is of version 3; this reads versions 1 to 2"),
        ({"points": {"neurons.1": {"codec": "rp9"}}}, "has content that is not valid"),
        ({"points": 3}, "has content that is not valid"),
    ],
)
def test_an_npz_of_another_version_or_form_is_refused(change, says, tmp_path) -> None:
    path = coded("full8").save_npz(tmp_path / "a.npz")
    with np.load(path) as found:
        arrays = {one: found[one] for one in found}
    about = json.loads(str(arrays["about"])) | change
    np.savez(path, **(arrays | {"about": np.array(json.dumps(about))}))
    with pytest.raises(InvalidFile, match=says):
        npz.read(path)
    np.savez(path, **{one: array for one, array in arrays.items() if one != "neurons.1.scale"})
    with pytest.raises(InvalidFile, match=r"there is no 'neurons\.1\.scale'"):
        npz.read(path)
    np.savez(path, **{one: array for one, array in arrays.items() if one != "about"})
    with pytest.raises(InvalidFile, match="has no 'about', so it is not a file"):
        npz.read(path)


def decoded_by_hand(name: str, parts: dict[str, np.ndarray], width: int) -> np.ndarray:
    if name == "features":
        rows, (at, kept) = np.zeros((len(parts["q"]), width), dtype=np.float32), np.nonzero(parts["indices"] >= 0)
        rows[at, parts["indices"][at, kept]] = parts["q"][at, kept]
        return rows
    if name == "full8":
        return ((parts["q"] - parts["zero"][:, None]) * parts["scale"][:, None]).astype(np.float32)
    q, scale = parts["q"].astype(np.float64), parts.get("step", parts.get("scale")).astype(np.float64)
    if name == "int4":
        q = np.stack([parts["q"] % 16, parts["q"] // 16], axis=2).reshape(len(q), -1)[:, :width].astype(np.float64)
    if name == "calibrated8":  # rounded once, when it is scaled
        return parts["least"].astype(np.float64)[:, None] + scale[:, None] * q
    if name in {"int4", "rp8", "rp16"}:
        scale = scale.repeat(128, axis=1)[:, : q.shape[1]]
        least = parts["least"].astype(np.float64).repeat(128, axis=1)[:, : q.shape[1]] if name == "int4" else 0.0
        return (least + scale * q).astype(np.float32)
    least = parts["least"].astype(np.float64)[:, None] if "least" in parts else 0.0
    values = (least + scale[:, None] * q).astype(np.float32)
    if name != "topk8":
        return values
    rows = np.zeros((len(q), width), dtype=np.float32)
    np.put_along_axis(rows, parts["indices"].astype(np.int64), values, axis=1)
    return rows


@pytest.mark.parametrize("name", CODECS)
def test_a_damaged_file_of_codes_is_refused(name, tmp_path) -> None:
    """A part that is missing, cut, or of another dtype; a codec that does not exist."""
    path = coded(name).save(tmp_path / "a.safetensors")
    with safe_open(path, "pt") as file:
        known, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for part in [key for key in tensors if key.endswith(".neurons.1")]:
        rest = {key: tensor for key, tensor in tensors.items() if key != part}
        for harmed in ({}, {part: tensors[part][1:]}, {part: tensors[part].view(torch.uint8).int()}):
            save_file(rest | harmed, path, known)
            with pytest.raises(InvalidFile):
                CaptureHandle.load(path)
    for bad in (138, -1) if "indices.neurons.1" in tensors else ():  # beyond the row; the same element twice
        indices = tensors["indices.neurons.1"].int()
        indices[2, 5] = indices[2, 4] if bad < 0 else bad
        save_file(tensors | {"indices.neurons.1": indices.to(tensors["indices.neurons.1"].dtype)}, path, known)
        with pytest.raises(InvalidFile, match="must differ" if name == "features" else "must ascend"):
            CaptureHandle.load(path)
    for constant in [key for key in tensors if key.startswith(("centre", "reach"))]:
        save_file(tensors | {constant: torch.full((138,), torch.inf)}, path, known)
        with pytest.raises(InvalidFile, match="holds NaN or infinity"):
            CaptureHandle.load(path)
    for other in ("zstd", "reduced", "raw"):
        header = json.loads(known["steercap"])
        header["coding"][0] = other
        save_file(tensors, path, {"steercap": json.dumps(header)})
        with pytest.raises(InvalidFile):
            CaptureHandle.load(path)


def test_projections_are_not_taken_for_rows() -> None:
    """Of the same width as rows: by a lens, a heat map, a stack; and by what asks for elements."""
    one, other, raw = (
        coded("rp8", seed=1),
        coded("rp8", seed=2),
        a_handle(layers=(1,), prompt=(0, 1, 2, 3, 4), output=(8,)),
    )
    with pytest.raises(InvalidSpec, match="do not keep the elements of rows; capture"):
        one.captures.elements(1)
    assert torch.equal(coded("full8").captures.elements(1)[:, :0], torch.zeros(5, 0))
    directions = DirectionSet({"v": LayerVectors({1: torch.randn(16)}, site="neurons")})
    with pytest.raises(InvalidSpec, match="do not keep the elements of rows; capture"):
        heatmap_of_layers(one, directions["v"], None)
    with pytest.raises(InvalidRequest, match="differ in their width and dtype"):
        stack([one, other], "last_prompt")
    same = coded("rp8", seed=1)
    found = stack([one, same], "last_prompt")
    assert torch.equal(found[:, 0], torch.stack([one.captures[1][-1], same.captures[1][-1]]))
    with pytest.raises(InvalidRequest, match="stack:"):
        stack([one, raw], "last_prompt")


@pytest.mark.parametrize("name", CODECS)
def test_coded_rows_are_kept_as_they_are(name, tmp_path) -> None:
    """Codes and scales in the file, the manifest and the .npz, bit for bit, with the codec and its parameters."""
    handle = coded(name)
    parts = handle.coded[1].parts
    manifest = save_run(tmp_path / "run", [handle])
    (again,) = manifest.handles()
    assert again.coded[1].coding == handle.coded[1].coding
    assert {part: (tensor.dtype, tensor.tolist()) for part, tensor in again.coded[1].parts.items()} == {
        part: (tensor.dtype, tensor.tolist()) for part, tensor in parts.items()
    }
    point = manifest.document.layouts[0].points[0]
    seeded = ENCODINGS[name].seeded
    assert point.parameters == ({"k": 16} if ENCODINGS[name].default_k else {}) | ({"seed": 0} if seeded else {})
    assert {part: layout.shape for part, layout in point.tensors.items()} == {
        part: tuple(tensor.shape[1:]) for part, tensor in parts.items()
    }
    constants = handle.coded[1].constants
    assert point.constants == dict.fromkeys(constants, TensorLayout("float32", (138,)))
    assert {one: tensor.tolist() for one, tensor in again.coded[1].constants.items()} == {
        one: tensor.tolist() for one, tensor in constants.items()
    }
    assert torch.equal(again.captures[1], handle.captures[1])
    with np.load(handle.save_npz(tmp_path / "a.npz"), allow_pickle=False) as found:
        about = json.loads(str(found["about"]))["points"]["neurons.1"]
        for part, tensor in parts.items():
            known = {"scale": "step", "zero": "least"}.get(part, part) if "zero" in parts and name != "full8" else part
            if (part, name) != ("zero", "full8"):
                assert torch.equal(torch.from_numpy(found[f"neurons.1.{known}"]).double(), tensor.double())
    assert about["codec"] == name


@pytest.mark.parametrize("seed", range(20))
def test_an_npz_of_eight_bits_is_read_by_the_published_formula(seed, tmp_path) -> None:
    """`(q - zero) * scale` is the decoded row: of any size and spread, of one sign, of equal elements, of NaN."""
    generator = torch.Generator().manual_seed(seed)
    sizes, spreads = 10.0 ** torch.randint(-6, 7, (2, 9, 1), generator=generator)
    rows = sizes * torch.randn(9, 1, generator=generator).sign() + spreads * torch.randn(9, 40, generator=generator)
    rows[6], rows[7], rows[8] = 0.0, sizes[7], torch.nan
    handle = coded_rows("full8", rows, torch.float32)
    with np.load(handle.save_npz(tmp_path / "a.npz"), allow_pickle=False) as found:
        q, scale, zero = (found[f"neurons.1.{part}"] for part in ("q", "scale", "zero"))
        assert json.loads(str(found["about"]))["version"] == 2
    assert q.dtype == np.uint8
    known = handle.captures[1].numpy()
    np.testing.assert_array_max_ulp(((q - zero[:, None]) * scale[:, None]).astype(np.float32)[:8], known[:8], maxulp=1)
    assert np.isnan((q - zero[:, None]) * scale[:, None])[8].all()
    assert np.isnan(known[8]).all()


def test_every_codec_has_a_formula() -> None:
    """For those who read an .npz without us."""
    assert set(FORMULAS) == {"raw", "attention", *CODECS}


# A run


@pytest.mark.parametrize("name", CODECS)
def test_features_are_a_summary_and_codes_of_rows_are_rows(name) -> None:
    """`returned` says whether a layout keeps rows, or numbers computed of them."""
    assert layout_of(coded(name).as_saved()).returned == ("summary" if name == "features" else "gathered")


def told(text: str) -> CaptureHandle:
    handle = a_handle()
    handle.text = text
    return handle


def test_a_run_lists_what_was_saved_and_gives_it_back(tmp_path) -> None:
    """Requests, tokens, layouts, how rows were returned, what wrote them; and rows bit for bit, from another manifest."""
    handles = [a_handle(output=()), [sharded(), a_handle(layers=(2,), reduce="mean")], None, sharded(reduce="sum")]
    given = [handles[0], *handles[1], handles[3]]
    manifest = save_run(tmp_path / "run", handles)
    assert Manifest.load(tmp_path / "run") == manifest
    assert all(same(one, other) for one, other in zip(given, manifest.handles(), strict=True))
    assert [request.file for request in manifest.requests] == [f"{number:06}.safetensors" for number in range(4)]
    assert [manifest.layout_of(one).returned for one in manifest.requests] == [
        "gathered",
        "sharded",
        "summary",
        "summary",
    ]
    assert [one.rows for one in manifest.requests] == [3, 3, 1, 1]
    assert [one.positions for one in manifest.requests] == [((0, 3),), ((0, 1), (2, 4)), ((0, 4),), ((0, 1), (2, 4))]
    assert [one.steering for one in manifest.requests] == [None, "ab", None, "ab"]
    assert [(one.prompt_tokens, one.output_tokens) for one in manifest.requests] == [(3, 0), (3, 2), (3, 2), (3, 2)]
    assert len({one.prompt_sha256 for one in manifest.requests}) == 1
    assert len({one.text_sha256 for one in manifest.requests}) == 2
    split = manifest.layout_of(manifest.requests[1])
    assert [(point.site, point.shards) for point in split.points] == [("resid_post", 0), ("z", 2)]
    assert split.points[1].tensors["rows"].shape == (2, 3)
    assert split.points[1].tensors["rows"].dtype == "bfloat16"
    assert split.row_bytes == 2 * (4 + 2 * 6)
    assert split.versions == versions()
    assert split.versions.torch == version("torch")


def test_a_run_says_whose_adapter_each_request_had(tmp_path) -> None:
    """Rows of the model and of its adapters look alike."""
    manifest = save_run(tmp_path, [a_handle(), a_handle(adapter="mine")])
    assert [one.adapter for one in manifest.requests] == [one.adapter for one in manifest.handles()] == ["", "mine"]
    assert [one.adapter for one in Manifest.load(tmp_path).requests] == ["", "mine"]


def test_captures_that_were_asked_alike_have_one_layout(tmp_path) -> None:
    """So that an entry is short: what is said of 30 points is said once."""
    manifest = save_run(tmp_path, [a_handle(layers=range(4)) for _ in range(5)] + [a_handle(layers=(1,))] * 2)
    assert len(manifest.document.layouts) == 2
    assert [request.layout for request in manifest.requests] == [0] * 5 + [1] * 2
    save_run(tmp_path, [a_handle(layers=(1,))])
    assert [request.layout for request in Manifest.load(tmp_path).requests] == [0] * 5 + [1] * 3


def test_an_entry_costs_the_same_however_many_there_are(tmp_path) -> None:
    """One line of the journal; the manifest is not written anew before the run is closed."""
    with CaptureRun(tmp_path, model="m") as run:
        sizes = [0]
        for _ in range(6):
            run.add(a_handle())
            sizes.append((tmp_path / JOURNAL).stat().st_size)
        assert json.loads((tmp_path / "manifest.json").read_text())["requests"] == []
        assert len(Manifest.load(tmp_path).requests) == len(run.manifest.requests) == 6
    lines = {after - before for before, after in pairwise(sizes[1:])}
    assert len(lines) == 1
    assert max(lines) < 500
    assert not (tmp_path / JOURNAL).exists()
    assert len(Manifest.load(tmp_path).requests) == 6


def test_a_run_goes_on_with_its_own_model_and_question_alone(tmp_path) -> None:
    """Another model, or the same asked otherwise, is refused, and nothing has changed."""
    with CaptureRun(tmp_path, model="m", asked={"seed": 1, "layers": (1, 2)}) as run:
        run.add(a_handle())
    for changed in ({"model": "other"}, {"asked": {"seed": 2, "layers": (1, 2)}}, {"asked": {"seed": 1}}):
        with pytest.raises(RunDiffers, match=r"another run of captures: (model was 'm'|seed was|layers was)"):
            CaptureRun(tmp_path, **{"model": "m", "asked": {"seed": 1, "layers": (1, 2)}, **changed})
    with pytest.raises(InvalidRequest, match=r"of 'other', and .* of 'm'"), CaptureRun(tmp_path, model="m") as run:
        run.add(a_handle(model="other"))
    for asked in ({"seed": 1, "layers": [1, 2]}, None):
        with CaptureRun(tmp_path, model="m", asked=asked) as run:
            run.add(a_handle())
    assert len(Manifest.load(tmp_path).requests) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", *(f"00000{n}.safetensors" for n in range(3))}


def test_one_process_writes_at_a_time(tmp_path) -> None:
    """The second is refused; a reader is not."""
    with CaptureRun(tmp_path, model="m") as run:
        run.add(a_handle())
        with pytest.raises(InvalidRequest, match="another process writes"):
            CaptureRun(tmp_path, model="m")
        assert len(Manifest.load(tmp_path).requests) == 1
        with pytest.raises(InvalidRequest, match="another process writes"):
            forget_run(tmp_path)
        run.add(a_handle())
    assert len(save_run(tmp_path, a_handle()).requests) == 3
    run.close()
    with pytest.raises(InvalidRequest, match="this run is closed"):
        run.add(a_handle())
    assert len(run.manifest.requests) == 2
    assert len(Manifest.load(tmp_path).requests) == 3
    forget_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_record_goes_and_what_is_not_ours_stays(tmp_path) -> None:
    """Halves of records are removed when a run goes on; other files are not, and captures without a manifest neither."""
    save_run(tmp_path, [a_handle()])
    half, other = tmp_path / "000001.safetensors", tmp_path / "praise.safetensors"
    half.write_bytes(b"half")
    other.write_bytes(b"directions")
    assert len(Manifest.load(tmp_path).requests) == 1
    assert len(save_run(tmp_path, [a_handle()]).requests) == 2
    assert len([*Manifest.load(tmp_path).handles()]) == 2
    assert other.read_bytes() == b"directions"
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(InvalidRequest, match="captures that no manifest lists, such as 000000"):
        save_run(tmp_path, [a_handle()])
    assert half.exists()
    assert not (tmp_path / "manifest.json").exists()


def test_a_listed_file_that_is_lost_or_of_another_run_is_added_again(tmp_path) -> None:
    """Whether it is there is known by its size, and whose it is by its header, as a folder that is resumed compares them."""
    names = [f"{number}.safetensors" for number in "abcd"]
    for folder, text in (("own", "kept"), ("other", "t777")):
        with CaptureRun(tmp_path / folder, model="m") as run:
            for name in names:
                run.add(told(text), name)
    own = tmp_path / "own"
    (own / names[1]).write_bytes((own / names[1]).read_bytes()[:-8])
    (tmp_path / "other" / names[2]).rename(own / names[2])
    (own / names[3]).unlink()
    manifest = Manifest.load(own)
    found = {request.file: manifest.header_of(request) for request in manifest.requests}
    assert found[names[0]].text == "kept"
    assert [name for name, header in found.items() if header is None] == names[1:]
    with CaptureRun(own, model="m") as run:
        first = run.add(told("new"))
        run.discard(names[1:])
        assert list(run.requests) == [first.file, names[0]]
        run.add(told("kept"), names[2])
        assert Manifest.load(own) == run.manifest  # as another process sees it
    assert [request.file for request in Manifest.load(own).requests] == [first.file, names[0], names[2]]
    assert {handle.text for handle in Manifest.load(own).handles()} == {"kept", "new"}
    assert sorted(path.name for path in own.glob("*.safetensors")) == [first.file, names[0], names[2]]


def test_what_is_not_listed_is_not_discarded(tmp_path) -> None:
    """Nor is anything outside of the folder; a closed run discards nothing."""
    precious, notes = tmp_path / "precious.txt", tmp_path / "run" / "notes.txt"
    precious.write_text("mine")
    with CaptureRun(notes.parent, model="m") as run:
        notes.write_text("mine")
        for name in ("a.safetensors", "b.safetensors"):
            run.add(a_handle(), name)
        for names in (["../precious.txt"], ["a.safetensors", "notes.txt"], "a.safetensors", [str(precious)]):
            with pytest.raises(InvalidRequest, match=r"lists no .*; give names of `requests`"):
                run.discard(names)
        assert [*run.requests] == ["a.safetensors", "b.safetensors"]
        run.discard(name for name in ["b.safetensors"])
    assert sorted(path.name for path in notes.parent.glob("*s")) == ["a.safetensors"]
    assert precious.read_text() == notes.read_text() == "mine"
    with pytest.raises(InvalidRequest, match="this run is closed"):
        run.discard(["a.safetensors"])


@pytest.mark.parametrize("writes", [1, 2])
def test_a_capture_cut_off_is_added_again_after_a_kill_while_it_is_discarded(writes, tmp_path, monkeypatch) -> None:
    """Before the entries are gone, and after."""
    names = ["a.safetensors", "b.safetensors"]
    with CaptureRun(tmp_path, model="m") as run:
        for name in names:
            run.add(a_handle(), name)
        cut = tmp_path / names[0]
        cut.write_bytes(cut.read_bytes()[:9])
        kills = iter([False] * (writes - 1) + [True])
        monkeypatch.setattr(run._journal, "begin", lambda _: next(kills) and sys.exit("killed"))
        with pytest.raises(SystemExit):
            run.discard(names)
        assert (tmp_path / names[1]).exists()
    with CaptureRun(tmp_path, model="m") as run:
        assert [*run.requests] == (names if writes == 1 else [])
        run.discard([*run.requests])
        for name in names:
            run.add(a_handle(), name)
    assert len([*Manifest.load(tmp_path).handles()]) == 2


def test_a_file_that_is_no_capture_is_not_written_over(tmp_path) -> None:
    """Nor removed when the call fails; a capture that a killed process wrote and did not list is written again."""
    other = LayerVectors({1: torch.ones(2)}).save(tmp_path / "vectors.safetensors")
    before = other.read_bytes()
    a_handle().save(tmp_path / "a.safetensors")
    a_handle(model="another").save(tmp_path / "b.safetensors")
    with CaptureRun(tmp_path, model="m") as run:
        for name in ("vectors.safetensors", "b.safetensors"):
            with pytest.raises(InvalidRequest, match=f"{name} is there, and is no capture of 'm'"):
                run.add(a_handle(), name)
        run.add(a_handle(), "a.safetensors")
    assert other.read_bytes() == before


def test_a_file_that_is_not_listed_outlives_an_add_that_fails(tmp_path, monkeypatch) -> None:
    """It was saved by hand, and nothing of the failed request was written in its place."""
    mine = a_handle().save(tmp_path / "mine.safetensors")
    before = mine.read_bytes()
    released = a_handle()
    released.release()
    with CaptureRun(tmp_path, model="m") as run:
        for handle, error in ((a_handle(model="other"), InvalidRequest), (released, CaptureReleased)):
            with pytest.raises(error):
                run.add(handle, name=mine.name)
            assert mine.read_bytes() == before

        def fails(*_given):
            raise OSError(28, "no space")

        monkeypatch.setattr(files, "write", fails)
        with pytest.raises(OSError, match="no space"):
            run.add(a_handle(), name=mine.name)
    assert mine.read_bytes() == before


def test_a_listed_name_is_not_written_over(tmp_path) -> None:
    """Nor is anything written outside of the folder, or under a name of another kind."""
    with CaptureRun(tmp_path, model="m") as run:
        run.add(a_handle(), "a.safetensors")
        nul, surrogate = "a\0.safetensors", "\udcff.safetensors"
        for name in ("a.safetensors", "b/a.safetensors", "../a.safetensors", nul, surrogate, "", tmp_path / "b", 7):
            with pytest.raises(InvalidRequest, match=r"already listed in .*, or is not a valid file name"):
                run.add(a_handle(), name)
        with pytest.raises(InvalidFile, match=r"writes \.safetensors"):
            run.add(a_handle(), "b.npz")
    assert [request.file for request in Manifest.load(tmp_path).requests] == ["a.safetensors"]


def test_numbers_pass_over_names_that_were_given(tmp_path) -> None:
    """One that was given may be like ours, and may hold anything that a file's name can."""
    given = ["000001.safetensors", "a\nb ä.safetensors"]
    with CaptureRun(tmp_path, model="m") as run:
        assert run.add(a_handle(), given[0]).file == given[0]
        assert [run.add(a_handle()).file for _ in range(2)] == ["000002.safetensors", "000003.safetensors"]
        run.add(a_handle(), given[1])
        assert run.add(a_handle()).file == "000004.safetensors"
    assert len([*Manifest.load(tmp_path).handles()]) == 5


def test_a_link_in_the_place_of_the_journal_is_not_followed(tmp_path) -> None:
    """A folder that came from elsewhere empties no file of ours."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    folder = tmp_path / "run"
    save_run(folder, [a_handle()])
    (folder / JOURNAL).symlink_to(mine)
    for use in (lambda: CaptureRun(folder, model="m"), lambda: forget_run(folder)):
        with pytest.raises(OSError, match="symbolic links"):
            use()
    assert mine.read_text() == "mine"


def test_what_cannot_be_listed_is_not_there(tmp_path, monkeypatch) -> None:
    """A full disk at the journal, or an interrupt, leaves neither half, and the run goes on."""
    with CaptureRun(tmp_path, model="m") as run:
        run.add(a_handle())
        write = os.write
        for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):

            def fails(file, data, error=error):
                write(file, bytes(data)[:20])  # a part of the line is written
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(os, "write", fails)
                with pytest.raises(type(error)):
                    run.add(a_handle(layers=(3,)))
            assert len(Manifest.load(tmp_path).requests) == 1
            assert len([*tmp_path.glob("*.safetensors")]) == 1
        run.add(a_handle(layers=(3,)))
    assert [handle.points[0].layer for handle in Manifest.load(tmp_path).handles()] == [0, 3]
    with pytest.raises(InvalidRequest, match="no handles"):
        save_run(tmp_path, [])


def test_an_unfetched_handle_is_not_saved(tmp_path) -> None:
    """Those before it are."""
    unfetched = a_handle()
    unfetched.lifecycle.found = None
    with pytest.raises(CaptureNotFetched):
        save_run(tmp_path, [a_handle(), unfetched])
    assert len(Manifest.load(tmp_path).requests) == 1


def test_handles_of_sync_are_saved_alike(tmp_path) -> None:
    """In lists as they came."""
    handle = steercap.sync.CaptureHandle(a_handle(), None)
    assert len(steercap.sync.save_run(tmp_path, [[handle], handle]).requests) == 2
    assert handle.save_npz(tmp_path / "a.npz").exists()


# Reading


def unsealed(folder: Path, count=3) -> bytes:
    """A run that a killed process left; gives its journal."""
    with CaptureRun(folder, model="m") as run:
        for number in range(count):
            run.add(a_handle(layers=(number,)))
        manifest, journal = (folder / "manifest.json").read_bytes(), (folder / JOURNAL).read_bytes()
    (folder / "manifest.json").write_bytes(manifest)
    (folder / JOURNAL).write_bytes(journal)
    return journal


def test_a_journal_counts_up_to_its_last_whole_line(tmp_path) -> None:
    """Cut off at any byte, each request is listed or not, and the run goes on to be whole."""
    journal = unsealed(tmp_path)
    requests = journal.count(b'{"request"')
    assert requests == 3
    for size in range(len(journal) + 1):
        (tmp_path / JOURNAL).write_bytes(journal[:size])
        assert len(Manifest.load(tmp_path).requests) == journal[:size].count(b"null}}\n")
    (tmp_path / JOURNAL).write_bytes(journal[:-5])
    assert len(save_run(tmp_path, a_handle(layers=(2,))).requests) == 3
    assert [handle.points[0].layer for handle in Manifest.load(tmp_path).handles()] == [0, 1, 2]


def test_a_journal_without_its_manifest_is_not_for_another_run(tmp_path) -> None:
    """Whatever it lists; also for whoever is killed before the new manifest is there, or just after."""
    journal = unsealed(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / JOURNAL).write_bytes(journal)
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_RENAME, str(tmp_path)],
        check=False,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )
    assert done.returncode == 9
    assert Manifest.load(tmp_path).requests == ()
    assert len(save_run(tmp_path, a_handle()).requests) == 1


#: A writer that ends just after its manifest is there.
KILLED_AT_RENAME = """
import os, sys
from pathlib import Path
from steercap import CaptureRun
replace = Path.replace
def ends(path, target):
    replace(path, target)
    os._exit(9)
Path.replace = ends
CaptureRun(sys.argv[1], model="m")
"""


def test_a_journal_that_was_sealed_is_passed_over(tmp_path) -> None:
    """A process may be killed between the two; then another goes on."""
    journal = unsealed(tmp_path)
    save_run(tmp_path, a_handle())
    (tmp_path / JOURNAL).write_bytes(journal)
    assert len(Manifest.load(tmp_path).requests) == 4
    assert len(save_run(tmp_path, a_handle()).requests) == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:-9], "truncated|malformed"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version 2; this steercap reads 1"),
        (lambda text: text.replace('"model": "m"', '"model": 1'), "Expected `str`"),
        (lambda text: text.replace('"model": "m"', '"model": "m", "more": 1'), "unknown field `more`"),
        (lambda text: text.replace('"kind": "captures"', '"kind": "sweep"'), "sweep"),
        (lambda text: text.replace('"layout": 0', '"layout": 7'), "its layout is missing"),
        (lambda text: text.replace("000000.safetensors", "../x.safetensors"), "is not a file name"),
        (lambda text: text.replace("000000.safetensors", ".."), "is not a file name"),
        (lambda text: text.replace("000000.safetensors", "a\\u0000"), "is not a file name"),
        (lambda text: text.replace("000000.safetensors", "000001.safetensors"), "lists a file twice"),
        (lambda text: text.replace('"gathered"', '"joined"'), "joined"),
        (lambda text: text.replace('"float32"', '"nn"'), "unknown dtype 'nn'"),
    ],
)
def test_a_manifest_that_is_not_as_we_write_it_is_refused(change, says, tmp_path) -> None:
    """By readers and by a run that would go on, which leaves it as it is."""
    save_run(tmp_path, [a_handle(), a_handle()])
    path = tmp_path / "manifest.json"
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    for use in (Manifest.load, lambda folder: CaptureRun(folder, model="m")):
        with pytest.raises(InvalidFile, match=says):
            use(tmp_path)
    assert path.read_text() == changed
    with pytest.raises(InvalidFile, match=r"manifest\.json"):
        Manifest.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda journal: journal.replace(b'{"after":0}', b'{"before":0}'), "in line 1"),
        (lambda journal: journal.replace(b'"layer":1', b'"layer":"one"'), "in line 4"),
        (lambda journal: journal.replace(b'{"after":0}', b'{"after":4}'), "continues after 4 entries, but 0"),
        (lambda journal: journal.replace(b'"layout":0', b'"layout":9'), "its layout is missing"),
    ],
)
def test_a_journal_that_is_not_as_we_write_it_is_refused(change, says, tmp_path) -> None:
    """A whole line is never passed over."""
    journal = unsealed(tmp_path)
    assert change(journal) != journal
    (tmp_path / JOURNAL).write_bytes(change(journal))
    with pytest.raises(InvalidFile, match=says):
        Manifest.load(tmp_path)


def test_a_file_that_was_changed_is_not_handed_over(tmp_path) -> None:
    """A bit of a row, another length, or gone: the others are."""
    save_run(tmp_path, [a_handle(), a_handle(layers=(2,))])
    path = tmp_path / "000001.safetensors"
    data = path.read_bytes()
    manifest = Manifest.load(tmp_path)
    for changed, says in (
        (data[:-1] + bytes([data[-1] ^ 1]), "has SHA-256"),
        (data[:-1], "bytes, and its"),
        (None, "No such"),
    ):
        path.unlink() if changed is None else path.write_bytes(changed)
        handles = manifest.handles()
        assert next(handles).points[0].layer == 0
        with pytest.raises(InvalidFile, match=rf"000001\.safetensors .*{says}"):
            next(handles)
    assert [bool(manifest.wrong(request, content=False)) for request in manifest.requests] == [False, True]


# Kills


@pytest.mark.slow
def test_a_kill_leaves_each_request_as_a_whole_or_not_at_all(tmp_path) -> None:
    """Real processes, SIGKILL before each operation on a file in turn, twice in a row, and at random moments."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    for how in (["each"], ["random", "7", "40"]):
        command = [sys.executable, str(TESTS / "run_kills.py"), str(tmp_path / "run"), *how]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert not done.returncode, done.stderr[-3000:]
        found = json.loads(done.stdout)
        assert found["kills"] >= 40
        assert found["journals left"] > 0
        assert how != ["each"] or found["halves of records"] >= 10


# The command


def test_inspect_says_what_a_run_holds_and_what_is_wrong(tmp_path) -> None:
    """By size, with --verify by content; exit code 1 where a file is not as listed."""
    folder = tmp_path / "run"
    save_run(folder, [a_handle(), sharded()])
    done = call("inspect", folder, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert found["kind"] == "run of captures"
    assert found["requests"] == 2
    assert (found["returned"], found["codec"], found["wrong"], found["unlisted"]) == (
        "gathered, sharded",
        "raw",
        {},
        [],
    )
    assert found["layers"] == "resid_post: 0, 1; z: 1"
    assert found["manifest"] == json.loads(msgspec.json.encode(Manifest.load(folder).document))
    (folder / "000002.safetensors").write_bytes(b"half")
    path = folder / "000001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    shown = call("inspect", folder)
    assert shown.exit_code == 0
    assert "000002.safetensors" in shown.stdout
    done = call("inspect", folder, "--verify", "--json")
    assert done.exit_code == 1
    assert list(json.loads(done.stdout)["wrong"]) == ["000001.safetensors"]
    path.unlink()
    assert call("inspect", folder).exit_code == 1
    (folder / "manifest.json").unlink()
    done = call("inspect", folder, "--verify")
    assert done.exit_code == 1
    assert "has no manifest.json and is not a data set" in done.stderr
