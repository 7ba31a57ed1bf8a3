"""A data set on disk is what was written, for our own reader and for other tools, or an error that names the file."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hashlib
import json
import mmap
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file
from shards import MODEL, POINTS, definition_of, folder_of, shard_of

from steercap.cli.folders import inspected_dataset
from steercap.core.schema import RAW, Coding, PointSchema
from steercap.core.spec import CaptureSpec, Point
from steercap.errors import InvalidFile, InvalidRequest, InvalidSetting, RunDiffers
from steercap.files.tensors import encoded
from steercap.kernels.codecs.coded import CodedRows, end_of, parts_of
from steercap.lab.datasets import ActivationDataset, DatasetFolder, Index, Shard, define, storage_of, verify
from steercap.lab.datasets.collecting.collection import sound_shards
from steercap.lab.datasets.collecting.reading import CollectArguments
from steercap.lab.datasets.definition import PointFormat
from steercap.lab.datasets.shards import name_of
from steercap.lab.datasets.statistics import SMALL, drawn, no_rows, statistics_of
from steercap.lab.datasets.storage import CHUNK, Direct, FileReceipt, LocalFolder

CODINGS = [
    RAW,
    Coding("full8"),
    Coding("fp8"),
    Coding("int4"),
    Coding("topk8", 3),
    Coding("rp8", 8, 5),
    Coding("calibrated8"),
]


ASKED = CollectArguments(capture=CaptureSpec())


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_a_shard_comes_back_bit_for_bit(coding, tmp_path) -> None:
    """Rows or codes, labels and constants, read by safetensors and pyarrow alone."""
    definition = definition_of(coding)
    folder_of(tmp_path, definition)
    assert verify(tmp_path).rows == sum(len(shard_of(definition, n, 2 if n == 2 else 4).index) for n in range(3))
    for number in range(3):
        shard = shard_of(definition, number, 2 if number == 2 else 4)
        tensors = load_file(tmp_path / name_of(number, ".safetensors"))
        wanted = {
            f"{part}{end_of(point)}": tensor
            for point, rows in shard.rows.items()
            for part, tensor in {**parts_of(rows), **(rows.constants if isinstance(rows, CodedRows) else {})}.items()
        }
        assert tensors.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
        table = pq.read_table(tmp_path / name_of(number, ".parquet")).to_pydict()
        assert table["document"] == shard.index.document.tolist()
        assert table["position"] == shard.index.position.tolist()
        assert table["token"] == shard.index.token.tolist()
        assert table["offset"] == list(range(len(shard.index)))


def test_other_tools_open_it_without_steercap(tmp_path) -> None:
    """points.parquet names each tensor; NumPy, pyarrow and safetensors find the row of a token with it."""
    folder_of(tmp_path, definition_of(Coding("full8")))
    script = f"""
import sys, json
import pyarrow.parquet as pq
from safetensors.numpy import load_file
points = pq.read_table({str(tmp_path / "points.parquet")!r}).to_pylist()
names = {{one["tensor"] for one in points}}
tensors = load_file({str(tmp_path / "shards/000001.safetensors")!r})
assert names == set(tensors), names
index = pq.read_table({str(tmp_path / "shards/000001.parquet")!r}, filters=[("document", "=", 6)]).to_pylist()
one = {{point["part"]: tensors[point["tensor"]] for point in points if point["site"] == "z"}}
row = index[0]["offset"]
print(json.dumps((one["zero"][row] + one["scale"][row] * one["q"][row].astype("float32")).tolist()))
assert "steercap" not in sys.modules and "torch" not in sys.modules
"""
    said = json.loads(subprocess.check_output([sys.executable, "-c", script], text=True))
    shard = shard_of(definition_of(Coding("full8")), 1)
    row = int(np.argmax(shard.index.document == 6))
    assert torch.allclose(torch.tensor(said).view(2, 4), shard.rows[Point(2, "z")].decoded()[row])


def test_pieces_write_what_the_whole_writes_by_whatever_thread(tmp_path) -> None:
    """Rows that came in pieces, shards in any order and twice: the files are the same, byte for byte."""
    definition = definition_of(Coding("full8"), every=3)
    folder_of(tmp_path / "a", definition)
    folder = DatasetFolder.begin(tmp_path / "b", definition)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda n: folder.write(shard_of(definition, n, 2 if n == 2 else 4, pieces=3)), [2, 0, 1, 0]))
    folder.complete()
    assert everything(tmp_path / "a") == everything(tmp_path / "b")


def test_a_view_of_one_element_is_written() -> None:
    """torch calls it contiguous whatever its stride."""
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.arange(6, dtype=dtype).view(2, 3)[1:, 1:2]
        strided = one.as_strided((1, 1), (3, 2), one.storage_offset())
        assert load(b"".join(encoded({"a": [strided]}, {})))["a"].tolist() == [[4]]


@given(st.lists(st.one_of(st.integers(0, 9 << 20), st.integers(0, 99)), max_size=6), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_a_file_is_its_chunks_one_after_another(sizes, seed) -> None:
    """Small and large ones, across the parts in which they are written."""
    drawn = np.random.default_rng(seed)
    chunks = [drawn.bytes(size) for size in sizes]
    wanted = b"".join(chunks)
    for disk in (None, "/dev/shm"):
        with tempfile.TemporaryDirectory(dir=disk) as folder:
            receipt = LocalFolder(folder).write("a", chunks)
            assert (Path(folder) / "a").read_bytes() == wanted
            assert receipt == FileReceipt(len(wanted), hashlib.sha256(wanted).hexdigest())


def is_cached(path: Path, at: int) -> bool:
    """Whether a page of a file is in memory; a read that may not wait would fetch it, and find it if the disk is fast."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        resident, first = ctypes.c_ubyte(), ctypes.c_char.from_buffer(pages)
        address = ctypes.c_void_p(ctypes.addressof(first) + at)
        del first
        assert not ctypes.CDLL(None).mincore(address, ctypes.c_size_t(1), ctypes.byref(resident))
    return bool(resident.value & 1)


def test_a_file_does_not_fill_the_page_cache(tmp_path) -> None:
    """Its parts cannot be read without the disk; the end, which is no whole page, can."""
    try:
        control = os.open(tmp_path / "control", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        os.write(control, mmap.mmap(-1, CHUNK))
        os.close(control)
        if is_cached(tmp_path / "control", 0):
            pytest.skip("the file system takes O_DIRECT, and keeps what was written in memory, as a tmpfs does")
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        pytest.skip("the file system knows no O_DIRECT")
    LocalFolder(tmp_path).write("a", [bytes(2 * CHUNK), b"end"])
    assert [is_cached(tmp_path / "a", at) for at in (0, CHUNK, 2 * CHUNK)] == [False, False, True]


def test_what_cannot_pass_the_page_cache_goes_through_it(tmp_path) -> None:
    """Memory at an odd address, which no disk takes."""
    data = np.random.default_rng(0).integers(0, 255, 4 * 4096 + 1, dtype=np.uint8)
    with (tmp_path / "a").open("wb", buffering=0) as raw:
        file = Direct(raw)
        assert file.write(data[1:8193].data) == file.write(data[8193:].data) == 8192
    assert (tmp_path / "a").read_bytes() == data[1:].tobytes()


def test_safetensors_reads_what_was_written_in_pieces() -> None:
    """Of tensors of several dtypes, an empty one, and one in pieces."""
    tensors = {
        "b": torch.arange(6, dtype=torch.int32).view(3, 2),
        "a": torch.randn(5, 3),
        "c": torch.randn(4, 3).bfloat16(),
        "d": torch.empty(0, 7),
        "e": torch.tensor([True, False, True]),
    }
    ours = b"".join(encoded({name: list(tensor.split(2)) or [tensor] for name, tensor in tensors.items()}, {"x": "y"}))
    found = load(ours)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert (8 + int.from_bytes(ours[:8], "little")) % 8 == 0


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_url_holds_what_a_folder_holds(scheme, tmp_path) -> None:
    """An object store and another file system, through fsspec: the same files, and the same checks."""
    url = f"memory://{tmp_path.name}" if scheme == "memory" else f"file://{tmp_path}/url"
    definition = definition_of()
    folder_of(tmp_path / "local", definition)
    folder = folder_of(url, definition)
    for name, content in everything(tmp_path / "local").items():
        assert folder.storage.read(name) == content
    assert verify(url) == verify(tmp_path / "local")
    folder.storage.write("shards/000001.parquet", [b"torn"])
    with pytest.raises(InvalidFile, match=rf"{scheme}://.*000001\.parquet has 4 bytes, and its receipt says"):
        verify(url)


# What is wrong with a folder


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_what_is_broken_off_leaves_the_file_that_was_there(scheme, tmp_path) -> None:
    """Behind a URL as in a folder: the one before, or none."""

    def broken() -> Iterator[bytes]:
        yield bytes(8 << 20)
        raise KeyboardInterrupt

    storage = storage_of(f"{scheme}://{tmp_path}/broken")
    storage.write("shards/a", [b"whole"])
    for name in ("shards/a", "shards/b"):
        with pytest.raises(KeyboardInterrupt):
            storage.write(name, broken())
    assert storage.sizes("shards") == {"a": 5}
    assert storage.read("shards/a") == b"whole"


def test_a_shard_that_is_written_again_does_not_count_half_way(tmp_path, monkeypatch) -> None:
    """An actor of Ray's that is repeated, and killed between two files: rows and labels would be of two runs."""
    definition = definition_of()
    folder = folder_of(tmp_path, definition)
    write = LocalFolder.write

    def killed(self, name, chunks):
        if name.endswith(".parquet"):
            raise KeyboardInterrupt
        return write(self, name, chunks)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.write(shard_of(definition, 1))
    known, _, mended = asyncio.run(sound_shards(folder, ASKED))
    assert ([*known], mended) == ([0, 2], 0)


def test_a_folder_is_listed_while_files_are_renamed(tmp_path) -> None:
    """Every shard that is there is seen, whatever is written beside it; here and behind a URL."""
    folder_of(tmp_path, definition_of())
    stop = threading.Event()

    def renaming() -> None:
        while not stop.is_set():
            for number in range(20):
                (tmp_path / "shards" / f".a{number}").write_bytes(b"")
                (tmp_path / "shards" / f".a{number}").rename(tmp_path / "shards" / f".b{number}")

    busy = threading.Thread(target=renaming)
    busy.start()
    try:
        for storage in (LocalFolder(tmp_path), storage_of(f"file://{tmp_path}")):
            for _ in range(300):
                assert {f"{number:06}.json" for number in range(3)} <= storage.sizes("shards").keys()
    finally:
        stop.set()
        busy.join()
    assert storage.sizes("nowhere") == LocalFolder(tmp_path).sizes("nowhere") == {}


@pytest.mark.slow
def test_what_a_killed_writer_left_behind_a_url_is_removed(tmp_path) -> None:
    """Before the definition, and beside shards: the folder is no other's for it, and begins."""
    script = f"""
import os
from steercap.lab.datasets import storage_of
storage = storage_of("file://{tmp_path}")
storage._system.mv = lambda *_: os._exit(9)
storage.write(os.environ["NAME"], [b"half"])
"""
    for name in ("definition.json", "shards/000000.safetensors"):
        subprocess.run([sys.executable, "-c", script], env={**os.environ, "NAME": name}, check=False)
    assert len(left := [*tmp_path.rglob(".*.scratch")]) == 2, left
    folder = DatasetFolder.begin(f"file://{tmp_path}", definition_of())
    assert not [*tmp_path.rglob(".*.scratch")]
    folder.write(shard_of(definition_of(), 0))
    assert [*folder.sound()] == [0]


def test_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path) -> None:
    """Neither safetensors nor pyarrow could open what would be written there."""
    with pytest.raises(InvalidRequest, match=r"'.*\\udcff' has a name that is not UTF-8"):
        storage_of(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))


@pytest.mark.parametrize("name", ["shard_bytes", "documents_per_shard", "statistics_every"])
def test_numbers_are_whole_before_anything_is_begun(name) -> None:
    """NumPy's are as good as Python's."""
    for wrong in (1.5, -1, "8"):
        with pytest.raises(InvalidSetting, match=f"{name}=.*; give a whole number"):
            CollectArguments(capture=CaptureSpec(), **{name: wrong})
    found = getattr(CollectArguments(capture=CaptureSpec(), **{name: np.int64(8)}), name)
    assert (type(found), found) == (int, 8)


def test_a_shard_without_a_receipt_is_not_there(tmp_path) -> None:
    """Its files are debris: they are not listed, nothing can be completed with them, and they are replaced."""
    definition = definition_of()
    folder = folder_of(tmp_path, definition, complete=False)
    (tmp_path / name_of(1, ".json")).unlink()
    (tmp_path / name_of(1, ".safetensors")).write_bytes(b"half")
    assert list(folder.sound()) == [0, 2]
    with pytest.raises(InvalidRequest, match="lacks shard 1; collect it"):
        folder.complete()
    folder.write(shard_of(definition, 1))
    folder.complete()
    folder_of(tmp_path / "again", definition)
    assert {n: c for n, c in everything(tmp_path).items() if not n.startswith("again")} == everything(
        tmp_path / "again"
    )


@pytest.mark.parametrize("end", [".safetensors", ".parquet", ".statistics.safetensors"])
def test_a_torn_missing_or_changed_file_is_named(end, tmp_path) -> None:
    """By its size always, by its SHA-256 on request; the shard is known, and can be discarded and written again."""
    definition = definition_of()
    folder = folder_of(tmp_path, definition)
    path = tmp_path / name_of(1, end)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(InvalidFile, match=rf"000001{end} has {len(whole) - 1:,} bytes"):
        folder.sound()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert set(folder.sound()) == {0, 1, 2}
    with pytest.raises(InvalidFile, match=rf"000001{end} has SHA-256"):
        verify(tmp_path)
    path.unlink()
    with pytest.raises(InvalidFile, match=rf"000001{end} is missing"):
        verify(tmp_path, content=False)
    assert list(folder.wrong(folder.receipts().values())) == [1]
    folder.discard(1)
    assert set(folder.sound()) == {0, 2}
    assert folder.totals() is None
    folder.write(shard_of(definition, 1))
    folder.complete()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("name", ["statistics.safetensors", "points.parquet"])
@pytest.mark.slow
def test_what_follows_from_the_shards_is_verified_too(name, tmp_path) -> None:
    """No receipt names these two: a bit, another file or none is found."""
    folder_of(tmp_path, definition_of())
    file = tmp_path / name
    whole = file.read_bytes()
    assert verify(tmp_path) is not None
    every = name == "points.parquet"  # of which Arrow does not notice each
    places = range(len(whole)) if every else range(len(whole) // 2, len(whole), len(whole) // 7)
    changed = [whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :] for place in places]
    for content in (*changed, whole[:-9], b"", b"PAR1"):
        file.write_bytes(content)
        with pytest.raises(InvalidFile, match=name):
            verify(tmp_path)
    for content in (whole[:-9], b"", b"PAR1"):
        file.write_bytes(content)
        assert inspected_dataset(tmp_path, verify=True)[0]["wrong"].keys() == {"whole"}
    file.unlink()
    with pytest.raises(InvalidFile, match=name):
        verify(tmp_path)


def test_a_receipt_that_says_other_things_is_noticed(tmp_path) -> None:
    """Which documents a shard is of follows from no file of its: the totals know."""
    folder_of(tmp_path, definition_of())
    file = tmp_path / "shards" / "000000.json"
    receipt = json.loads(file.read_bytes())
    digest = receipt["documents_sha256"]
    folder = DatasetFolder.open(tmp_path)
    assert not folder.altered(folder.receipts().values())
    for change in (
        {"documents_sha256": "0" * 64},
        {"documents_sha256": "`" + digest[1:]},
        {"first": receipt["first"] + 1},
    ):
        file.write_text(json.dumps(receipt | change))
        with pytest.raises(InvalidFile, match=r"dataset\.json"):
            verify(tmp_path)
        assert folder.altered(folder.receipts().values()), "and `collect` looks at everything"
    (tmp_path / "shards" / "000001.json").unlink()
    assert not folder.altered(folder.receipts().values()), "to remove one is how a shard is collected again"


def take_shard(folder: Path, other: Path, number: int) -> None:
    """Put the files of a shard of another data set, or of nothing, in the place of a folder's own."""
    for path in folder.glob(f"shards/{number:06}*"):
        path.unlink()
    for path in other.glob(f"shards/{number:06}*"):
        shutil.copy(path, folder / "shards" / path.name)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("foreign", [True, False])
def test_a_shard_that_is_lost_or_of_another_corpus_is_noticed(foreign, every, tmp_path) -> None:
    """Its files are equal to its receipt: the totals know, for the reader, `verify` and `inspect`, with statistics or not."""
    definition = definition_of(every=every)
    folder_of(tmp_path / "a", definition)
    other = DatasetFolder.begin(tmp_path / "b", definition)
    for number, documents in enumerate((4, 4, 2)):
        shard = shard_of(definition, number, documents)
        other.write(replace(shard, documents_sha256="1" * 64, rows={p: rows + 1 for p, rows in shard.rows.items()}))
    other.complete()
    assert inspected_dataset(tmp_path / "a", verify=True)[0]["complete"] == "yes"
    take_shard(tmp_path / "a", tmp_path / "b" if foreign else tmp_path / "none", 1)
    for read in (ActivationDataset, verify, partial(verify, content=False)):
        with pytest.raises(InvalidFile, match=r"dataset\.json is of 3 shards"):
            read(tmp_path / "a")
    for read_all in (False, True):
        found, _ = inspected_dataset(tmp_path / "a", verify=read_all)
        assert found["wrong"].keys() == {"whole"}
        assert found["complete"].startswith("no;")
        assert "dataset.json is of 3 shards" in found["files"]


@pytest.mark.parametrize("name", ["definition.json", "dataset.json", "shards/000001.json"])
def test_a_document_that_is_damaged_or_newer_is_named(name, tmp_path) -> None:
    """Bytes that are no UTF-8, fields that this version does not know, files without a size or a hash."""
    folder_of(tmp_path, definition_of())
    file = tmp_path / name
    whole = json.loads(file.read_bytes())
    for content, why in (
        (file.read_bytes().replace(b"version", b"ver\xe2ion"), "cannot be read"),
        (json.dumps(whole | {"version": 2, "more": 1}).encode(), "of format version 2"),
    ):
        file.write_bytes(content)
        with pytest.raises(InvalidFile, match=f"{file.name} .*{why}"):
            ActivationDataset(tmp_path)
    if "files" in whole:
        first = whole["files"][".safetensors"]
        wrong = [{}, {**whole["files"], ".safetensors": first | {"sha256": "zz"}}, {".parquet": first}]
        for changed in (*({"files": files} for files in wrong), {"rows": -1}, {"stop": 0}):
            file.write_text(json.dumps(whole | changed))
            with pytest.raises(InvalidFile, match=f"{file.name} cannot be read"):
                verify(tmp_path, content=False)


def test_a_full_disk_leaves_no_shard(tmp_path) -> None:
    """The error is the system's, and neither a receipt nor a scratch file stays behind."""
    definition = definition_of()
    folder = DatasetFolder.begin(tmp_path, definition)
    script = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from shards import definition_of, shard_of
from steercap.lab.datasets import DatasetFolder
folder = DatasetFolder.begin({str(tmp_path)!r}, definition_of())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
try:
    folder.write(shard_of(definition_of(), 0))
except OSError as error:
    print(error.errno)
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "27"  # EFBIG
    assert folder.receipts() == {}
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


def test_another_data_set_is_refused_with_what_differs(tmp_path) -> None:
    """Of another model, of other points or codecs, asked otherwise; and a folder of something else."""
    folder_of(tmp_path, definition_of(), complete=False)
    with pytest.raises(RunDiffers, match=r"another data set of activations: points was .* as raw.* is .* as full8"):
        DatasetFolder.begin(tmp_path, definition_of(Coding("full8")))
    asked = msgspec.structs.replace(definition_of(), asked={"context": 16}, model={**MODEL, "weights": "1"})
    with pytest.raises(RunDiffers, match=r"model\.weights was .*; context was 8, is 16"):
        DatasetFolder.begin(tmp_path, asked)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(RunDiffers, match=r"holds 'thesis\.tex', so it is not a data set"):
        DatasetFolder.begin(tmp_path / "other", definition_of())
    with pytest.raises(InvalidFile, match=r"definition\.json cannot be read"):
        DatasetFolder.open(tmp_path / "other")


def test_a_newer_version_is_refused(tmp_path) -> None:
    """Of the definition, of a receipt, of the totals: the message says which version it is."""
    folder = folder_of(tmp_path, definition_of())
    for name in ("dataset.json", "shards/000001.json", "definition.json"):
        path = tmp_path / name
        path.write_text(path.read_text().replace('"version": 1', '"version": 2', 1))
        with pytest.raises(InvalidFile, match=rf"{name} is of format version 2; this steercap reads version 1"):
            verify(tmp_path)
    with pytest.raises(InvalidFile, match="version 2"):
        folder.receipts()
    (tmp_path / "definition.json").write_text('{"kind": "captures", "version": 1}')
    with pytest.raises(InvalidFile, match="is not the definition of a data set of activations"):
        verify(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b"{}", b"[[", b'{"version": 1}'])
def test_a_receipt_that_is_damaged_is_told_from_one_of_another(damage, tmp_path) -> None:
    """To collect, its shard is not there; who reads is refused, and so is whoever collects, by another's receipt."""
    folder = folder_of(tmp_path, definition_of())
    files = everything(tmp_path)
    one, other = tmp_path / "shards/000001.json", tmp_path / "shards/000002.json"
    one.write_bytes(damage)
    with pytest.raises(InvalidFile, match=r"000001\.json cannot be read: .*; copy it again, or collect it again"):
        verify(tmp_path)
    with pytest.raises(InvalidFile, match=r"000001\.json cannot be read"):
        ActivationDataset(tmp_path)
    newer = files["shards/000002.json"].replace(b'"version": 1', b'"version": 2')
    for foreign, why in ((newer, "is of format version 2"), (files["shards/000000.json"], "is the receipt of another")):
        other.write_bytes(foreign)
        with pytest.raises(InvalidFile, match=rf"000002\.json .*{why}"):
            asyncio.run(sound_shards(folder, ASKED))
        assert one.read_bytes() == damage, "nothing is taken away before all is known"
        assert folder.totals() is not None
    other.write_bytes(files["shards/000002.json"])
    known, there, mended = asyncio.run(sound_shards(folder, ASKED))
    assert ([*known], there, mended) == ([0, 2], 3, 1)
    assert (one.exists(), folder.totals()) == (False, None)
    folder.write(shard_of(definition_of(), 1))
    folder.complete()
    assert everything(tmp_path) == files


def test_a_damaged_file_that_no_shard_has_is_refused(tmp_path) -> None:
    """It is not removed: nobody here wrote it."""
    folder = folder_of(tmp_path, definition_of())
    for name in ("notes.json", "1.json", "-00001.json"):
        (tmp_path / "shards" / name).write_text("{")
        with pytest.raises(InvalidFile, match=f"{name} is the receipt of no shard; remove it"):
            asyncio.run(sound_shards(folder, ASKED))
        (tmp_path / "shards" / name).unlink()


def test_totals_are_removed_once_before_any_receipt_is_written(tmp_path) -> None:
    """By whichever thread comes first, and again where a data set that was complete grows; others ask for nothing."""
    definition = definition_of()
    folder_of(tmp_path, definition, shards=1, last=4)
    done: list[tuple[str, str]] = []
    past = threading.Event()

    class Watched(LocalFolder):
        def remove(self, name: str) -> None:
            past.wait(0.2)  # whoever could go past, does
            super().remove(name)
            done.append(("remove", name))

        def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> FileReceipt:
            past.set()
            done.append(("write", name))
            return super().write(name, chunks)

    folder = DatasetFolder.begin(Watched(tmp_path), definition)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: folder.write(shard_of(definition, number)), [1, 2, 3, 4]))
    assert done[0] == ("remove", "dataset.json")
    assert done.count(("remove", "dataset.json")) == 1
    folder.complete()
    again = pickle.loads(pickle.dumps(DatasetFolder.open(tmp_path)))
    assert again.totals() == folder.totals()
    done.clear()
    folder.write(shard_of(definition, 5))
    folder.discard(5)
    assert (done[0], done.count(("remove", "dataset.json"))) == (("remove", "dataset.json"), 1)
    assert folder.totals() is None


def test_a_receipt_of_another_data_set_is_refused(tmp_path) -> None:
    """Shards that were copied in from a folder with other settings."""
    folder_of(tmp_path / "a", definition_of())
    folder_of(tmp_path / "b", definition_of(documents=4, every=2))
    (tmp_path / "a/shards/000001.json").write_bytes((tmp_path / "b/shards/000001.json").read_bytes())
    with pytest.raises(InvalidFile, match=r"000001\.json is the receipt of another data set"):
        verify(tmp_path / "a")


def test_rows_that_do_not_fit_are_not_written(tmp_path) -> None:
    """Of another dtype or codec, of documents of other shards, out of order, or fewer than labels."""
    definition = definition_of()
    folder = DatasetFolder.begin(tmp_path, definition)
    good = shard_of(definition, 1)

    def changed(**what) -> Shard:
        return Shard(**{**{name: getattr(good, name) for name in good.__dataclass_fields__}, **what})

    point = Point(1, "resid_post")
    with pytest.raises(InvalidRequest, match=r"resid_post\[1\] came as raw.*float32.*says raw.*bfloat16"):
        folder.write(changed(rows={**good.rows, point: good.rows[point].float()}))
    with pytest.raises(InvalidRequest, match="came as full8"):
        folder.write(changed(rows=shard_of(definition_of(Coding("full8")), 1).rows))
    with pytest.raises(InvalidRequest, match="documents that are not its own"):
        folder.write(changed(number=2))
    with pytest.raises(InvalidRequest, match="row 1 of shard 1 is out of order"):
        folder.write(changed(index=good.index[::-1]))
    with pytest.raises(InvalidRequest, match="the definition has"):
        folder.write(changed(rows={point: good.rows[point]}))
    with pytest.raises(InvalidRequest, match=r"rows of resid_post\[1\], and"):
        changed(rows={**good.rows, point: good.rows[point][1:]})
    with pytest.raises(InvalidRequest, match="shard 1 of 5 documents"):
        folder.write(changed(documents=5))
    assert folder.receipts() == {}
    with pytest.raises(InvalidSetting, match="cannot be kept as full9"):
        define(MODEL, POINTS, coding=Coding("full9"), documents_per_shard=1)


def test_a_shard_of_documents_without_rows_is_a_shard(tmp_path) -> None:
    """A token sample may keep nothing of them."""
    definition = definition_of()
    folder = DatasetFolder.begin(tmp_path, definition)
    empty = {known.point: known.whole(known.nothing(), {}) for known in definition.points}
    folder.write(Shard(0, 4, "0" * 64, 20, Index(*[np.zeros(0)] * 4), empty))
    folder.write(Shard(1, 4, "0" * 64, 20, Index(*[np.zeros(0)] * 4), {point: [] for point in empty}))
    folder.write(shard_of(definition, 2))
    assert folder.complete().rows == len(shard_of(definition, 2).index)
    assert int(folder.statistics(Point(2, "z")).count) == len(shard_of(definition, 2).index)


# Statistics


def test_statistics_are_those_of_all_rows(tmp_path) -> None:
    """Merged over shards, against float64 over the rows put together."""
    definition = definition_of()
    folder = folder_of(tmp_path, definition)
    shards = [shard_of(definition, number, 2 if number == 2 else 4) for number in range(3)]
    for known in definition.points:
        rows = torch.cat([shard.rows[known.point] for shard in shards]).double().flatten(1)
        found = folder.statistics(known.point)
        norms = rows.norm(dim=1)
        assert int(found.count) == len(rows)
        assert (found.mean - rows.mean(0)).abs().max() <= 2**-23 * (rows - rows.mean(0)).abs().max()
        assert torch.allclose(found.variance, rows.var(0, unbiased=False), rtol=1e-6)
        assert torch.allclose(found.norm_mean, norms.mean(), rtol=1e-9)
        assert (float(found.norm_min), float(found.norm_max)) == (float(norms.min()), float(norms.max()))
        for share in (0.05, 0.5, 0.95):
            exact = float(norms.sort().values[max(0, int(np.ceil(share * len(norms))) - 1)])
            assert exact <= found.norm_quantile(share) * (1 + 1e-12) <= exact * 2**0.126


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 3))
def test_statistics_do_not_depend_on_how_rows_came(lengths, every, far) -> None:
    """In pieces or whole, far from the origin or near, of one row in k: the same bits, and right."""
    rows = torch.randn(sum(lengths), 3, generator=torch.Generator().manual_seed(len(lengths))) + 10.0**far
    numbers = drawn(len(rows), every, 7)
    found = statistics_of(rows.split(lengths), 3, numbers)
    assert all(torch.equal(getattr(found, n), getattr(statistics_of([rows], 3, numbers), n)) for n in vars(found))
    chosen = rows.double() if numbers is None else rows[numbers].double()
    assert int(found.count) == len(chosen)
    assert bool(len(chosen)) == bool(len(rows))
    if len(chosen):
        apart = (chosen - chosen.mean(0)).abs().max()
        # Each deviation is rounded to float32, once before and once after its square.
        assert (found.mean - chosen.mean(0)).abs().max() <= 2**-23 * apart
        assert torch.allclose(found.variance, chosen.var(0, unbiased=False), rtol=1e-5)


def test_rows_that_are_looked_at_are_of_all_positions_alike() -> None:
    """Of windows of 512 tokens, one point or ten: first tokens, which are like no other, are one in 512."""
    for every in (8, 80):
        firsts, rows = 0, 0
        for shard in range(20):
            chosen = drawn(512 * 100, every, shard)
            rows, firsts = rows + len(chosen), firsts + int((chosen % 512 == 0).sum())
            assert abs(len(chosen) - 51_200 / every) < 5 * (51_200 / every) ** 0.5
        assert abs(firsts - rows / 512) < 5 * (rows / 512) ** 0.5
    assert drawn(9, 10**6, 0) != drawn(9, 10**6, 1), "one at least, and not the same in each shard"
    assert len({tuple(drawn(9, 10**6, seed)) for seed in range(50)}) > 5


def test_statistics_of_few_rows_are_warned_of(tmp_path) -> None:
    """A standard deviation of ten rows is no plausible scale."""
    folder_of(tmp_path / "few", definition_of(every=5))
    with pytest.warns(UserWarning, match=r"uses statistics of \d+ rows of .*; collect with statistics_every=1"):
        ActivationDataset(tmp_path / "few", at=[Point(2, "z")], normalise="standard")
    # By itself: the checks of shapes that tests run with are frames between.
    script = """if True:
        import sys
        from steercap.lab.datasets import ActivationDataset
        ActivationDataset(sys.argv[1], at="z[2]", normalise="standard")
    """
    said = subprocess.run([sys.executable, "-c", script, tmp_path / "few"], check=True, capture_output=True, text=True)
    assert "<string>:4: UserWarning: normalise='standard' uses statistics of" in said.stderr
    ActivationDataset(tmp_path / "few", at=[Point(2, "z")])
    folder_of(tmp_path / "all", definition_of(every=1))
    ActivationDataset(tmp_path / "all", at=[Point(2, "z")], normalise="standard")


def test_statistics_count_zeros_small_elements_and_rows_that_are_not_finite() -> None:
    """A row with NaN counts as that, and nowhere else."""
    rows = torch.ones(8, 100)
    rows[0, :10] = 0
    rows[1, :20] = SMALL / 2
    rows[2, 5] = torch.nan
    rows[3, 5] = torch.inf
    found = statistics_of([rows], 100)
    assert (int(found.count), int(found.nonfinite)) == (6, 2)
    assert float(found.zeros) == pytest.approx(10 / 600)
    assert float(found.small) == pytest.approx(30 / 600)
    assert found.mean.isfinite().all()
    assert int(statistics_of([rows[2:4]], 100).nonfinite) == 2
    assert no_rows(3).merged(no_rows(3)).variance.tolist() == [0, 0, 0]


@pytest.mark.parametrize("size", [1e-44, 1, 1e20, 3e38])
def test_statistics_hold_over_the_whole_range_of_float32(size) -> None:
    """Of rows that are finite, means, variances and norms are too; nothing is small because it is near the least number."""
    rows = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * size
    rows[:100] = rows[:100].sign() * size
    found, exact = statistics_of([rows], 64), rows.double()
    assert torch.allclose(found.mean, exact.mean(dim=0), rtol=1e-4, atol=1e-5 * size)
    if size >= 1:  # squares of less round to 0
        assert torch.allclose(found.variance, exact.var(dim=0, correction=0), rtol=1e-4)
    limits = SMALL * exact.square().mean(dim=1, keepdim=True).sqrt()
    assert float(found.small) == pytest.approx(float((exact.abs() < limits).double().mean()), abs=1e-3)
    assert found.norm_quantile(1) == pytest.approx(float(exact.norm(dim=1).max()))


def test_statistics_can_be_left_out(tmp_path) -> None:
    """Then there is no file of them, and whoever asks is told."""
    folder = folder_of(tmp_path, definition_of(every=0))
    assert not list(tmp_path.rglob("*statistics*"))
    with pytest.raises(InvalidRequest, match="collected without statistics"):
        folder.statistics(Point(2, "z"))


def test_rows_that_are_split_over_ranks_keep_their_axis() -> None:
    """Codes of a point that two tensor-parallel ranks had are [rows, 2, ...], as captures keep them."""
    known = PointFormat(0, "z", PointSchema((4, 8), "bfloat16", shards=2), Coding("full8"))
    assert known.tensors["q"][0][:1] == (2,)
    assert known.shape == (4, 8)
