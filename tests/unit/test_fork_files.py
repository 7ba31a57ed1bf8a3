"""Files of RhizoNymph's fork of vLLM, written here by NumPy as its documentation says, and read by steercap."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steercap import CaptureSpec, Point
from steercap.architectures.sites import SITES
from steercap.captures.fork_files import STORED, ForkCaptures
from steercap.core.names import FORK_HOOKS
from steercap.errors import InvalidFile, UnknownName

#: Rows in bytes of each dtype: what is written, and what torch makes of it.
KINDS: dict[str, Any] = {
    "float32": lambda draw, shape: draw.standard_normal(shape).astype("<f4"),
    "float16": lambda draw, shape: draw.standard_normal(shape).astype("<f2"),
    "bfloat16": lambda draw, shape: (draw.standard_normal(shape).astype("<f4").view("<u4") >> 16).astype("<u2"),
    "int8": lambda draw, shape: draw.integers(-99, 99, shape).astype("<i1"),
}


def as_torch(stored: np.ndarray, dtype: str) -> torch.Tensor:
    """A bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        return torch.from_numpy((stored.astype("<u4") << 16).view("<f4").copy()).to(torch.bfloat16)
    return torch.from_numpy(stored.copy())


class Written:
    """A request with random chunks of random hooks, and what a reader must find of each."""

    def __init__(self, seed: int) -> None:
        draw, pick = np.random.default_rng(seed), random.Random(seed)
        self.chunks: list[tuple[dict[str, Any], bytes]] = []
        self.expected: dict[tuple[int, str], tuple[list[int], torch.Tensor]] = {}
        for layer, hook in {
            (pick.randrange(9), pick.choice(["post_mlp", "pre_attn", "mlp_out", "odd_one"])) for _ in range(5)
        }:
            dtype, row = pick.choice([*KINDS]), pick.choice([[6], [2, 3]])
            last: dict[int, torch.Tensor] = {}
            for _ in range(pick.randrange(1, 4)):
                many = pick.randrange(1, 5)
                stored = KINDS[dtype](draw, (many, 6))
                positions = [pick.randrange(7) for _ in range(many)]
                for at, one in zip(positions, as_torch(stored, dtype), strict=True):
                    last[at] = one.reshape(row)
                self.chunks.append(
                    (
                        {"layer": layer, "hook": hook, "shape": [many, 6], "dtype": dtype, "positions": positions}
                        | ({"row_shape": row} if len(row) > 1 else {}),
                        stored.tobytes(),
                    )
                )
            self.expected[layer, hook] = sorted(last), torch.stack([last[at] for at in sorted(last)])
        # Chunks of a layer and hook keep their order; those of others come between.
        order = {key: [one for one in self.chunks if (one[0]["layer"], one[0]["hook"]) == key] for key in self.expected}
        keys = [(one["layer"], one["hook"]) for one, _ in self.chunks]
        pick.shuffle(keys)
        self.chunks = [order[key].pop(0) for key in keys]

    def check(self, found: Any) -> None:
        assert list(found) == sorted(self.expected)
        for key, (positions, rows) in self.expected.items():
            one = found[key]
            assert one.positions.tolist() == positions
            assert (one.rows.dtype, torch.equal(one.rows, rows)) == (rows.dtype, True)
            count = sum(chunk["shape"][0] for chunk, _ in self.chunks if (chunk["layer"], chunk["hook"]) == key)
            assert one.repeated == count - len(rows)
            site = {"post_mlp": "resid_post", "pre_attn": "resid_pre", "mlp_out": "mlp_out"}.get(key[1])
            assert one.point == (site and Point(key[0], site))


def save(path: Path, document: dict[str, Any], content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.with_suffix(".json").write_text(json.dumps(document))


def pack(path: Path, chunks: list[tuple[dict[str, Any], bytes]], **document: Any) -> None:
    """One file of chunks; entries are listed in another order than they lie, and bytes of nobody lie between them."""
    entries, content = [], b""
    for entry, stored in chunks:
        content += b"?" * 3
        entries.append(entry | {"offset": len(content), "nbytes": len(stored)})
        content += stored
    save(path, {"layout": "packed", "dtype": "float64", "entries": entries[::-1], **document}, content)


def in_shards(folder: Path, requests: dict[str, Written], seed: int) -> None:
    """Chunks of all requests by turns, over shards whose numbers are not the order of their names."""
    left = {name: [*one.chunks] for name, one in requests.items()}
    pick, shards = random.Random(seed), list[list[Any]]()
    while any(left.values()):
        name = pick.choice([name for name, chunks in left.items() if chunks])
        entry, stored = left[name].pop(0)
        if not shards or pick.random() < 0.3:
            shards.append([])
        shards[-1].append((entry | {"request_id": name}, stored))
    for seq, chunks in enumerate(shards):
        pack(folder / f"shard-{99 - seq:03}-000000.bin", chunks, seq=seq)


def apart(folder: Path, request: Written) -> None:
    """One file of each layer and hook; half of the descriptions have fields that nobody asks for."""
    for layer, hook in request.expected:
        mine = [one for one in request.chunks if (one[0]["layer"], one[0]["hook"]) == (layer, hook)]
        document = mine[0][0] | {
            "shape": [sum(entry["shape"][0] for entry, _ in mine), 6],
            "positions": [at for entry, _ in mine for at in entry["positions"]],
        }
        more = {"request_id": folder.name, "tag": "tag", "steps": {"decode": 3}} if layer % 2 else {}
        save(folder / f"{layer}_{hook}.bin", document | more, b"".join(stored for _, stored in mine))


def test_shards_without_a_number_of_their_own_are_in_the_order_of_their_names(tmp_path) -> None:
    """Of a repeated position the last counts, and shard-2 was written before shard-10."""
    for number in (10, 2):
        entry = {"layer": 0, "hook": "post_mlp", "shape": [1, 1], "positions": [0], "request_id": "r"}
        pack(tmp_path / f"shard-{number}.bin", [(entry, np.array([number], "<f8").tobytes())])
    (rows,) = ForkCaptures.load(tmp_path).read("r").values()
    assert rows.rows.tolist() == [[10.0]]


@pytest.mark.parametrize("seed", range(6))
def test_each_layout_is_read_as_it_was_written(tmp_path, seed) -> None:
    requests = {name: Written(seed * 10 + number) for number, name in enumerate(["a", "b", "c"])}
    for name, one in requests.items():
        pack(tmp_path / "packed" / "tag" / name / "packed.bin", one.chunks, request_id=name)
        apart(tmp_path / "apart" / "tag" / name, one)
    in_shards(tmp_path / "sharded" / "tag", requests, seed)
    for layout in ("apart", "packed", "sharded"):
        found = ForkCaptures.load(tmp_path / layout)
        assert (sorted(found.requests), found.without_index) == (["a", "b", "c"], ())
        for name, one in requests.items():
            one.check(found.read(name))
    stages = {(layer, hook): layer % 2 for layer, hook in requests["a"].expected}
    for stage in (0, 1):
        mine = [one for one in requests["a"].chunks if stages[one[0]["layer"], one[0]["hook"]] == stage]
        pack(tmp_path / "stages" / "a" / f"packed-pp{stage:02}.bin", mine, request_id="a")
    requests["a"].check(ForkCaptures.load(tmp_path / "stages").read("a"))


ROWS = np.arange(12, dtype="<f4").reshape(4, 3)
ONE: dict[str, Any] = {"layer": 3, "hook": "post_mlp", "shape": [4, 3], "dtype": "float32"}


def test_fields_may_lack(tmp_path) -> None:
    """Without positions all rows are there; without a dtype it has to be said, and is refused where it cannot be."""
    content = ROWS.tobytes()
    save(tmp_path / "r" / "3_post_mlp.bin", {name: ONE[name] for name in ("layer", "hook", "shape")}, content)
    with pytest.raises(InvalidFile, match="names no dtype; give dtype="):
        ForkCaptures.load(tmp_path)
    with pytest.raises(InvalidFile, match=r"has 48 bytes, and \[4, 3\] of bfloat16 takes 24"):
        ForkCaptures.load(tmp_path, dtype="bfloat16")
    with pytest.raises(UnknownName, match="dtype='float31'; did you mean 'float32'"):
        ForkCaptures.load(tmp_path, dtype="float31")
    for path in (tmp_path, tmp_path / "r", tmp_path / "r" / "3_post_mlp.bin", tmp_path / "r" / "3_post_mlp.json"):
        (one,) = ForkCaptures.load(path, dtype="float32").read("r").values()
        assert (one.positions, one.repeated, one.point) == (None, 0, Point(3, "resid_post"))
        assert torch.equal(one.rows, torch.arange(12.0).reshape(4, 3))
    with pytest.raises(UnknownName, match="request='q'; known: 'r'"):
        ForkCaptures.load(tmp_path, dtype="float32").read("q")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": [5, 3]}, r"has 48 bytes, and \[5, 3\] of float32 takes 60"),
        ({"shape": [3, 3]}, "takes 36"),
        ({"shape": [-4, -3]}, ">= 0"),
        ({"shape": [12]}, "length 2"),
        ({"layer": -1}, ">= 0"),
        ({"positions": [0, 1, 2, 1 << 63]}, "int"),
        ({"layer": "3"}, "int"),
        ({"dtype": "float33"}, "has dtype 'float33'; did you mean 'float32'"),
        ({"row_shape": [2, 2]}, r"row_shape \[2, 2\], and rows of 3"),
        ({"positions": [0, 1]}, "2 positions for 4 rows"),
        ({"positions": [0, 1, 2, -1]}, ">= 0"),
        ({"hook": None}, "hook"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path, change, says) -> None:
    save(tmp_path / "r" / "3_post_mlp.bin", ONE | change, ROWS.tobytes())
    with pytest.raises(InvalidFile, match=says):
        ForkCaptures.load(tmp_path)


@pytest.mark.parametrize("shape", [[0, 3], [4, 0], [0, 0]])
def test_no_rows_are_no_rows(tmp_path, shape) -> None:
    save(tmp_path / "r" / "3_post_mlp.bin", ONE | {"shape": shape, "positions": [*range(shape[0])]}, b"")
    (one,) = ForkCaptures.load(tmp_path).read("r").values()
    assert [*one.rows.shape] == shape


def test_short_files_are_refused(tmp_path) -> None:
    entries = [(ONE, ROWS.tobytes()), (ONE | {"hook": "pre_attn"}, ROWS.tobytes())]
    pack(tmp_path / "packed.bin", entries, request_id="r")
    found = ForkCaptures.load(tmp_path)
    content = (tmp_path / "packed.bin").read_bytes()
    (tmp_path / "packed.bin").write_bytes(content[:-1])
    with pytest.raises(InvalidFile, match="has become shorter"):
        found.read("r")
    with pytest.raises(InvalidFile, match=r"ends at byte 102, and packed\.bin has 101; it is cut off"):
        ForkCaptures.load(tmp_path)
    (tmp_path / "packed.bin").unlink()
    with pytest.raises(InvalidFile, match=r"packed\.bin is missing"):
        ForkCaptures.load(tmp_path)
    (tmp_path / "packed.json").write_text("{")
    (tmp_path / "packed.bin").touch()
    with pytest.raises(InvalidFile, match=r"packed\.json"):
        ForkCaptures.load(tmp_path)


def test_what_is_not_one_request_is_refused(tmp_path) -> None:
    """Two runs of one request, chunks of other widths, entries of nobody; what has no description is listed."""
    with pytest.raises(InvalidFile, match="has no LAYER_HOOK"):
        ForkCaptures.load(tmp_path)
    pack(tmp_path / "shard-000-000000.bin", [(ONE, ROWS.tobytes())])
    with pytest.raises(InvalidFile, match="without request_id"):
        ForkCaptures.load(tmp_path)
    mine = ONE | {"request_id": "r"}
    pack(tmp_path / "shard-000-000000.bin", [(mine, ROWS.tobytes()), (mine | {"shape": [3, 4]}, ROWS.tobytes())])
    (tmp_path / "shard-000-000001.bin").touch()
    found = ForkCaptures.load(tmp_path)
    assert found.without_index == (tmp_path / "shard-000-000001.bin",)
    with pytest.raises(InvalidFile, match="differ in width or dtype"):
        found.read("r")
    save(tmp_path / "r" / "3_post_mlp.bin", mine, ROWS.tobytes())
    with pytest.raises(InvalidFile, match=r"request 'r' is in .*give the folder of one of them"):
        ForkCaptures.load(tmp_path)


def test_hooks_are_names_of_sites() -> None:
    """In requests too; in a model of several streams those of its single ones are not taken for the residual stream."""
    spec = CaptureSpec(at=["post_block[5]", "pre_attn[2]", "mlp_in[0]"])
    assert spec == CaptureSpec(at=["resid_post[5]", "resid_pre[2]", "mlp_in[0]"])
    assert CaptureSpec(sites=["post_attn"]) == CaptureSpec(sites=["resid_mid"])
    assert set(FORK_HOOKS.values()) <= set(SITES)
    assert len(STORED) == 10


def test_single_streams_beside_several_have_no_site(tmp_path) -> None:
    for hook in ("pre_attn", "mhc_attn_res_mix"):
        save(tmp_path / "r" / f"3_{hook}.bin", ONE | {"hook": hook}, ROWS.tobytes())
    found = ForkCaptures.load(tmp_path).read("r")
    assert [one.point for one in found.values()] == [Point(3, "mhc_attn_res_mix"), None]
