"""Pickled files read without running them, against torch's and NumPy's own values, and hostile ones."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steercap.errors import InvalidFile
from steercap.files.pickled import PickledArray, StandIn, read_pickled

#: Ways in which people's versions of torch have written files.
WAYS: dict[str, dict[str, Any]] = {
    "zip": {},
    "legacy": {"_use_new_zipfile_serialization": False},
    "protocol 4": {"pickle_protocol": 4},
    "protocol 5": {"pickle_protocol": 5},
}


class Ours:
    """Object of a class that a reader must not import."""

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self.rows_, self.text = rows, "told"


class Sets:
    """Object whose `__setstate__` leaves a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Ours, (1,), {"state": 2}


class Calls:
    """Object whose unpickling calls a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def zipped(data: bytes, path: Path, **storages: bytes) -> Path:
    """Write a zip archive of torch.save's form around a pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data)
        for name, content in storages.items():
            archive.writestr(f"a/data/{name}", content)
    return path


def refused(data: bytes, path: Path, told: str, **storages: bytes) -> None:
    """Check that a pickle is refused for a reason."""
    with pytest.raises(InvalidFile, match=told):
        read_pickled(zipped(data, path / "a.pt", **storages))


class TestValues:
    @pytest.mark.parametrize("way", WAYS)
    def test_tensors_arrays_and_plain_values(self, way: str, tmp_path: Path) -> None:
        """All that torch and NumPy give is given, in each form of file; other objects are stand-ins with a state."""
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(4, 3))
        tensors = {
            dtype: torch.arange(6).to(dtype).reshape(2, 3) for dtype in (torch.float16, torch.bfloat16, torch.int64)
        }
        arrays = [
            rows,
            rows.astype(">f4"),
            np.asfortranarray(rows),
            np.array(3.5),
            np.zeros((0, 2)),
            np.array(["a", "bcd"]),
        ]
        shared = torch.arange(10.0)
        plain = {"a": [1, -(2**70), 2.5, True, None, b"\xff\0", "é"], 3: (1, (2,), (), {"set": {1, 2}})}
        found = {
            "tensors": list(tensors.values()),
            "views": [shared[2:8:2], shared.reshape(2, 5).T, torch.empty(0, 4), torch.tensor(7.0)],
            "arrays": arrays,
            "scalars": [np.float64(1.5), np.int32(-3), np.bool_(True)],
            "plain": plain,
            "ordered": collections.OrderedDict(x=1, y=2),
            "ours": Ours(rows),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "same": plain,
        }
        torch.save(found, tmp_path / "a.pt", **WAYS[way])
        read = read_pickled(tmp_path / "a.pt")
        assert list(read) == list(found)
        for mine, theirs in zip(read["tensors"] + read["views"], found["tensors"] + found["views"], strict=True):  # type: ignore[operator]
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(read["arrays"], arrays, strict=True):
            assert isinstance(mine, PickledArray)
            np.testing.assert_array_equal(mine.numpy(), theirs)
            assert mine.numpy().dtype.isnative
        assert read["scalars"] == found["scalars"]
        assert read["plain"] == plain
        assert read["same"] is read["plain"]
        assert read["ordered"] == {"x": 1, "y": 2}
        assert torch.equal(read["parameter"], torch.ones(2))
        ours = read["ours"]
        assert isinstance(ours, StandIn)
        assert ours.name.endswith("test_pickled.Ours")
        np.testing.assert_array_equal(ours.state["rows_"].numpy(), rows)

    def test_arrays_of_objects_are_kept_shut(self, tmp_path: Path) -> None:
        """An array of objects does not stop the rest, and has no numbers."""
        torch.save({"objects": np.array([{}, 1], dtype=object), "n": 1}, tmp_path / "a.pt")
        read = read_pickled(tmp_path / "a.pt")
        assert read["n"] == 1
        with pytest.raises(ValueError, match="something other than numbers"):
            read["objects"].numpy()


class TestHostile:
    @pytest.mark.parametrize("way", WAYS)
    def test_calls_are_not_made(self, way: str, tmp_path: Path) -> None:
        """os.system, eval, exec and open become stand-ins, and nothing happens."""
        trace = tmp_path / "trace"
        calls = [
            Calls(os.system, f"touch {trace}"),
            Calls(eval, f"open({str(trace)!r}, 'w')"),
            Calls(exec, f"open({str(trace)!r}, 'w')"),
            Calls(open, str(trace), "w"),
            Calls(getattr, "x", "upper"),
            Sets(),
        ]
        torch.save({"calls": calls}, tmp_path / "a.pt", **WAYS[way])
        found = read_pickled(tmp_path / "a.pt")["calls"]
        assert all(isinstance(one, StandIn) for one in found)
        assert found[0].name in {"posix.system", "os.system"}
        assert found[0].args == (f"touch {trace}",)
        assert found[-1].state == {"state": 2}
        assert not trace.exists()

    def test_nested_calls_are_not_made(self, tmp_path: Path) -> None:
        """What a stand-in returns is not called either, nor what has the name of a function that is known."""
        chain = b"cbuiltins\ngetattr\n(cos\nsystem\nVx\ntR(Vtouch x\ntR."
        refused(chain, tmp_path, "the pickle calls <stand-in for builtins.getattr>")
        assert isinstance(read_pickled(zipped(b"cnumpy\ndtype.__reduce__\n(tR.", tmp_path / "b.pt")), StandIn)
        # the state of a function, by which its defaults or code would be changed
        refused(b"ctorch._utils\n_rebuild_tensor_v2\n}V__code__\nI1\nsb.", tmp_path, "opcode BUILD")

    @pytest.mark.parametrize(
        ("data", "told"),
        [
            (b"]q\x00h\x00s.", "index out of range"),  # SETITEM on nothing
            (b"h\x07.", "7"),  # a memo that was never put
            (b"]r\xff\xff\xff\xff.", "."),
            (b"(lp0\n0.", "takes more|values to unpack|LIST"),
            (b"}I1\nI2\n.", "too many values"),
            (b".", "not enough values"),
            (b"]", "pickle exhausted"),
            (b"\x82\x01.", "EXT1"),
            (b"(cos\nsystem\no.", "OBJ"),
            (b"(ios\nsystem\n.", "INST"),
            (b"Pstorage\n.", "PERSID"),
            (b"I1\nI2\nR.", "the pickle calls 1"),
            (b"]I1\nb.", "opcode BUILD"),
            (b"I1\n]a.", "the pickle adds items to"),
            (b"}]K\x01s.", "cannot be a key"),
            (b"(((tttK\x01\x85", "exhausted|takes more"),
            (b"\x8d\xff\xff\xff\xff\xff\xff\x00\x00abc.", "expected"),  # text of 2**48 bytes
            (b"\x8e\xff\xff\xff\xff\xff\xff\x00\x00abc.", "expected"),  # bytes
            (b"\x96\xff\xff\xff\xff\xff\xff\x00\x00abc.", "expected"),  # a bytearray
            (b"\x8b\xff\xff\xff\x7fabc.", "expected|not enough"),  # a whole number of 2 GiB
            (b"c_codecs\nencode\n(Vx\nVrot13\ntR.", "rot13"),
            (b"c_codecs\nencode\n(Vx\ntR.", "encoding"),
            (b"(VstorageI1\ntQ.", "."),
        ],
    )
    def test_damaged_and_hostile_opcodes(self, data: bytes, told: str, tmp_path: Path) -> None:
        """Opcodes that would run code, allocate without bound or corrupt the stack are refused with the reason."""
        if data == b"]r\xff\xff\xff\xff.":  # a memo of 4 billion places: one place is enough
            assert read_pickled(zipped(data, tmp_path / "a.pt")) == []
        else:
            refused(data, tmp_path, told)

    def test_keys_that_hash_for_ever_are_refused(self, tmp_path: Path) -> None:
        """A tuple of tuples of tuples, whose hash takes 2**60 steps, is no key and no member of a set."""
        bomb = b")" + b"2\x86" * 60
        assert pickle.loads(b")" + b"2\x86" * 2 + b".") == (((), ()), ((), ()))
        refused(b"}" + bomb + b"K\x01s.", tmp_path, "opcode DUP|as a key")
        nested = b")" + b"".join(b"q%c0h%ch%c\x86" % (n, n, n) for n in range(60))
        refused(b"}" + nested + b"K\x01s.", tmp_path, "cannot be a key")
        refused(b"\x8f(" + nested + b"\x90.", tmp_path, "cannot be a key")

    @pytest.mark.parametrize(
        "use",
        [
            b"%bVx\n\x93.",  # as a module
            b"Vx\n%b\x93.",  # as a name
            b"(Vstorage\n%bV0\nVcpu\nI1\ntQ.",
            b"(Vstorage\nctorch\nFloatStorage\n%bVcpu\nI1\ntQ.",
            b"c__builtin__\nset\n%b\x85\x85R.",
            b"c_codecs\nencode\n(%bVlatin1\ntR.",
            b"%bI1\nb.",
            b"%bI1\na.",
        ],
    )
    def test_values_that_print_or_hash_for_ever_are_refused(self, use: bytes, tmp_path: Path) -> None:
        """A list of lists of lists, of 2**60 items to print, and a tuple of that kind to hash, stop nothing."""
        for start, pair in ((b")", b"h%ch%c\x86"), (b"]", b"(h%ch%ce")):
            parts = [b"q%c" % n + (b"]" if pair.startswith(b"(") else b"") + pair % (n, n) for n in range(60)]
            refused(use.replace(b"%b", start + b"".join(parts)), tmp_path, ".")

    def test_growth_is_bounded(self, tmp_path: Path) -> None:
        """Small files that would become large are refused before memory is allocated."""
        text = b"X" + struct.pack("<I", 100_000) + b"x" * 100_000 + b"q\x000"
        encode = b"c_codecs\nencode\nq\x010Vlatin1\nq\x020"
        many = text + encode + b"](" + b"h\x01h\x00h\x02\x86R" * 20_000 + b"e."
        refused(many, tmp_path, "much larger in memory")

    def tensor(self, size: str, stride: str, offset: int = 0, numel: int = 4) -> bytes:
        """Return the pickle of a tensor of a storage of four floats."""
        storage = f"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI{numel}\nt".encode()
        return (
            b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"Q" + f"I{offset}\n{size}{stride}I00\n}}tR.".encode()
        )

    def test_tensors_stay_in_their_storage(self, tmp_path: Path) -> None:
        """Sizes, strides and storages that reach beyond what is there, or that expand it, are refused."""
        data = struct.pack("<4f", 1, 2, 3, 4)
        read = read_pickled(zipped(self.tensor("(I4\nt", "(I1\nt"), tmp_path / "b.pt", **{"0": data}))
        assert read.tolist() == [1, 2, 3, 4]
        for pickled, told in [
            (self.tensor("(I5\nt", "(I1\nt"), "out of bounds"),
            (self.tensor("(I2\nt", "(I1\nt", offset=3), "out of bounds"),
            (self.tensor("(I2\nt", "(I-1\nt"), "arguments that torch never writes"),
            (self.tensor("(I2\nt", "(I1\nt", offset=-1), "arguments that torch never writes"),
            (self.tensor("(I4\nI1\nt", "(I1\nt"), "mismatch in length|same"),
            (self.tensor("(I1099511627776\nt", "(I0\nt"), "much larger"),
            (self.tensor("(I4\nt", "(I1\nt", numel=5), "has only 16 bytes"),
            (self.tensor("(I4\nt", "(I1\nt", numel=2**50), "not supported|has only"),
        ]:
            refused(pickled, tmp_path, told, **{"0": data})
        refused(self.tensor("(I4\nt", "(I1\nt"), tmp_path, "data/0")

    def test_archives_that_torch_does_not_write(self, tmp_path: Path) -> None:
        """Compressed entries, several pickles, big-endian numbers and no pickle are refused."""
        path = tmp_path / "a.pt"
        for entries, told in [
            ({"a/data.pkl": b"." * 10**7}, "compressed"),
            ({"a/data.pkl": b"N.", "b/data.pkl": b"N."}, "too many values"),
            ({"a/other": b""}, "not enough values"),
        ]:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content in entries.items():
                    archive.writestr(name, content)
            with pytest.raises(InvalidFile, match=told):
                read_pickled(path)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", b"N.")
            archive.writestr("a/byteorder", b"big")
        with pytest.raises(InvalidFile, match="big-endian"):
            read_pickled(path)

    def test_arrays_that_do_not_fit(self, tmp_path: Path) -> None:
        """An array whose shape, dtype and bytes disagree has no numbers."""
        buffer = io.BytesIO()
        pickle.dump(np.arange(4, dtype="<f4"), buffer, protocol=2)
        good = buffer.getvalue()
        assert read_pickled(zipped(good, tmp_path / "b.pt")).numpy().tolist() == [0, 1, 2, 3]
        for old, new in [(b"K\x04\x85", b"K\x05\x85"), (b"f4", b"O8"), (b"f4", b"V4"), (b"f4", b"f8")]:
            assert old in good
            found = read_pickled(zipped(good.replace(old, new), tmp_path / "a.pt"))
            with pytest.raises(ValueError, match="an array"):
                found.numpy()

    @pytest.mark.parametrize("way", WAYS)
    def test_any_damage_is_refused_or_harmless(self, way: str, tmp_path: Path) -> None:
        """Files that are cut, or of which bytes are changed at random, raise InvalidFile or nothing."""
        path = tmp_path / "a.pt"
        torch.save({"rows": torch.ones(3), "array": np.ones(2), "ours": Ours(np.ones(1))}, path, **WAYS[way])
        whole, rng = path.read_bytes(), np.random.default_rng(0)
        for _ in range(200):
            data = bytearray(whole)
            for place in rng.integers(0, len(data), 3):
                data[place] = rng.integers(0, 256)
            path.write_bytes(data if rng.random() < 0.7 else data[: rng.integers(1, len(data))])
            try:
                read_pickled(path)
            except InvalidFile as error:
                assert str(path) in str(error)
