"""What training reads of a data set is every row that was meant, once an epoch, whatever the workers and ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from shards import POINTS, definition_of, folder_of, shard_of
from torch.utils.data import DataLoader

from steercap import SAE
from steercap.core.schema import RAW, Coding, PointSchema
from steercap.core.spec import Point
from steercap.errors import (
    InvalidFile,
    InvalidRequest,
    InvalidSelection,
    InvalidSetting,
    InvalidSpec,
    LayerOutOfRange,
)
from steercap.kernels.codecs.coded import CodedRows
from steercap.lab.datasets import ActivationDataset, DatasetFolder
from steercap.lab.datasets.batches import ActivationBatches, Blocks, Epoch, Order
from steercap.lab.datasets.rows import ShuffleBuffer
from steercap.lab.datasets.shards import name_of

POST, Z = Point(1, "resid_post"), Point(2, "z")
SAME = {Point(layer, "resid_post"): PointSchema((6,), "float32") for layer in (1, 3)}
SHARDS, LAST = 12, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Twelve shards of two points, 233 rows or so."""
    path = tmp_path_factory.mktemp("data")
    folder_of(path, definition_of(), SHARDS, LAST)
    return str(path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> str:
    """Two points of one shape."""
    path = tmp_path_factory.mktemp("pair")
    folder_of(path, definition_of(points=SAME), SHARDS, LAST)
    return str(path)


def truth(point: Point, coding: Coding = RAW, points=POINTS) -> torch.Tensor:
    """All rows of a point, decoded, as the shards were made of."""
    definition = definition_of(coding, points=points)
    found = [shard_of(definition, n, LAST if n == SHARDS - 1 else None).rows[point] for n in range(SHARDS)]
    return torch.cat([rows.decoded() if isinstance(rows, CodedRows) else rows for rows in found])


def labels() -> np.ndarray:
    """Document, window, position and token of all rows."""
    found = [shard_of(definition_of(), n, LAST if n == SHARDS - 1 else None).index for n in range(SHARDS)]
    return np.concatenate([np.stack([i.document, i.window, i.position, i.token], axis=1) for i in found])


def told(batch) -> list[tuple[int, ...]]:
    """The labels of a batch, and the points."""
    return list(zip(*(column.tolist() for column in batch[1:]), strict=True))


@pytest.mark.parametrize("coding", [RAW, Coding("full8"), Coding("topk8", 3), Coding("rp8", 8, 5)], ids=str)
def test_rows_are_those_that_were_written(coding, tmp_path) -> None:
    """By number, by slice, by several numbers in any order; decoded, in the dtype that is asked for."""
    folder_of(tmp_path, definition_of(coding), SHARDS, LAST)
    data = ActivationDataset(tmp_path, dtype=None)
    for point in POINTS:
        rows, name = truth(point, coding), str(point)
        assert len(data) == len(rows)
        assert torch.equal(data[:][name], rows)
        assert torch.equal(data[-1][name], rows[-1])
        assert torch.equal(data[17:3:-5][name], rows[torch.arange(17, 3, -5)])
        assert torch.equal(data[[99, 0, 99, -1]][name], rows[[99, 0, 99, -1]])
        single = ActivationDataset(tmp_path, at=name, dtype=torch.float64)
        assert torch.equal(single[5], rows[5].double())
        assert data[:][name].dtype == rows.dtype


def test_labels_are_those_of_the_rows(folder) -> None:
    """Document, window, position and token, of one row and of many."""
    data = ActivationDataset(folder, at=POST, labels=True, dtype=None)
    found = data[[40, 3, 40]]
    assert torch.equal(found.rows, truth(POST)[[40, 3, 40]])
    assert told(found) == [(*labels()[n].tolist(), 0) for n in (40, 3, 40)]
    assert int(data[3].token) == labels()[3, 3]
    assert data[3].token.shape == ()


def test_points_are_chosen_as_they_are_captured(folder, pair) -> None:
    """By layers and sites, by names; what was not collected is named with what was."""
    assert ActivationDataset(folder).points == ("resid_post[1]", "z[2]")
    assert ActivationDataset(folder, layers=2).points == ActivationDataset(folder, sites="z").points == ("z[2]",)
    assert ActivationDataset(folder, at="blocks.2.attn.hook_z").points == ("z[2]",)
    assert ActivationDataset(pair, layers=[3, 1]).points == ("resid_post[1]", "resid_post[3]")
    with pytest.raises(LayerOutOfRange, match=r"layers=2, sites='resid_post': .*collected: resid_post\[1\], z\[2\]"):
        ActivationDataset(folder, layers=2, sites="resid_post")
    with pytest.raises(LayerOutOfRange, match="it was not collected"):
        ActivationDataset(folder, at="resid_post[7]")
    with pytest.raises(InvalidSpec, match="the data set does not say how many layers"):
        ActivationDataset(folder, layers=-1)
    with pytest.raises(InvalidSpec, match="at= already names the points"):
        ActivationDataset(folder, layers=1, at="z[2]")


def test_points_are_joined_or_mixed(folder, pair) -> None:
    """Side by side in one row; or each by itself, labelled with its point, so that there are twice as many."""
    both = ActivationDataset(folder, join="concatenate")
    assert both.width == 24
    assert torch.equal(both[7:9], torch.cat([truth(p)[7:9].flatten(1).float() for p in POINTS], dim=1))
    mixed = ActivationDataset(pair, join="mix", labels=True)
    rows = [truth(point, points=SAME) for point in SAME]
    assert len(mixed) == 2 * len(rows[0])
    found = mixed[np.arange(len(mixed))[::-1]]
    for place, number in enumerate(range(len(mixed) - 1, -1, -1)):
        assert torch.equal(found.rows[place], rows[number % 2][number // 2])
        assert told(found)[place] == (*labels()[number // 2].tolist(), number % 2)
    seen = [label for batch in mixed.batches(32, buffer=64) for label in told(batch)]
    assert sorted(seen) == sorted((*line.tolist(), point) for line in labels() for point in (0, 1))
    with pytest.raises(
        InvalidRequest, match=r"join='mix' needs points of one shape, and these are resid_post\[1\] of \(16,\)"
    ):
        ActivationDataset(folder, join="mix")


def even(index) -> np.ndarray:
    """Rows of documents with an even number."""
    return index.document % 2 == 0


@pytest.mark.parametrize(
    ("chosen", "meant"),
    [
        ({"positions": slice(1, None)}, lambda line: line[2] >= 1),
        ({"positions": range(1, 7, 2)}, lambda line: 1 <= line[2] < 7 and line[2] % 2 == 1),
        ({"without_tokens": [100, 305]}, lambda line: line[3] not in {100, 305}),
        ({"keep": even, "positions": slice(0, 2)}, lambda line: line[0] % 2 == 0 and line[2] < 2),
    ],
)
@pytest.mark.slow
def test_tokens_are_left_out(folder, chosen, meant) -> None:
    """By position, by token, by a function of the index; the rest is numbered anew."""
    data = ActivationDataset(folder, at=POST, labels=True, dtype=None, **chosen)
    wanted = [number for number, line in enumerate(labels().tolist()) if meant(line)]
    assert 0 < len(data) == len(wanted) < len(labels())
    assert torch.equal(data[:].rows, truth(POST)[wanted])
    assert [line[:4] for line in told(data[:])] == [tuple(labels()[n].tolist()) for n in wanted]
    batches = [line[:4] for batch in data.batches(7, buffer=20) for line in told(batch)]
    assert sorted(batches) == sorted(tuple(labels()[n].tolist()) for n in wanted)


def test_no_tokens_are_left_out_by_an_empty_list(folder) -> None:
    """Nor do positions beyond all matter, however great."""
    whole = ActivationDataset(folder, at=POST)
    assert len(ActivationDataset(folder, at=POST, without_tokens=[])) == len(whole)
    assert len(ActivationDataset(folder, at=POST, positions=slice(0, 1 << 40))) == len(whole)
    assert len(ActivationDataset(folder, at=POST, positions=slice(1 << 40, None))) == 0
    with pytest.raises(IndexError):
        whole[np.array([(1 << 64) - 1], dtype=np.uint64)]


def test_tokens_that_mean_nothing_are_refused(folder) -> None:
    """Positions from the end, tokens that are none, a function that gives something else."""
    for wrong in (
        {"positions": slice(-1, None)},
        {"positions": 3},
        {"without_tokens": "bos"},
        {"keep": len},
        {"keep": np.ones(9, bool)},
    ):
        with pytest.raises(InvalidSelection):
            ActivationDataset(folder, **wrong)


def test_rows_are_normalised_by_what_is_stored(folder) -> None:
    """Their mean, their variances, their mean norm: of all rows together, and back again."""
    rows = truth(Z).flatten(1).double()
    for kind, wanted in (
        ("mean", rows - rows.mean(0)),
        ("standard", (rows - rows.mean(0)) / rows.std(0, unbiased=False)),
        ("norm", rows * 8**0.5 / rows.norm(dim=1).mean()),
    ):
        data = ActivationDataset(folder, at=Z, normalise=kind)
        found = data[:]
        assert found.shape == (len(rows), 2, 4)
        assert torch.allclose(found.flatten(1).double(), wanted, atol=1e-5)
        back = data.normalisations["z[2]"].undone(found.flatten(1))
        assert torch.allclose(back.double(), rows, atol=1e-5)
    assert torch.allclose(ActivationDataset(folder, at=Z).statistics().mean, rows.mean(0), atol=1e-6)
    with pytest.raises(InvalidSetting, match="normalise='zscore'; use one of 'none', 'mean'"):
        ActivationDataset(folder, normalise="zscore")


# Batches


def test_batches_come_shuffled_once_an_epoch_in_another_order_each(folder) -> None:
    """The same seed gives the same, another seed another; unshuffled they come in order."""
    data = ActivationDataset(folder, at=POST, labels=True)
    count = len(data)

    def epochs(**what) -> list[list[tuple[int, ...]]]:
        batches = [told(batch) for batch in data.batches(10, buffer=64, **what)]
        per = -(-count // 10)
        return [[line for batch in batches[n : n + per] for line in batch] for n in range(0, len(batches), per)]

    three = epochs(epochs=3, seed=5)
    whole = [(*line.tolist(), 0) for line in labels()]
    assert all(sorted(epoch) == sorted(whole) for epoch in three)
    assert len({str(epoch) for epoch in three}) == 3
    assert epochs(epochs=3, seed=5) == three
    assert epochs(seed=6) != epochs(seed=5) == three[:1]
    assert epochs(shuffle=False) == [whole]
    assert len(data.batches(10, drop_last=True)) == count // 10
    assert {len(batch.rows) for batch in data.batches(10, drop_last=True)} == {10}


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.slow
def test_workers_change_nothing(context, folder) -> None:
    """A DataLoader gives what the batches give, in their order, forked or spawned."""
    data = ActivationDataset(folder, at=POST, labels=True, positions=slice(1, None))
    batches = data.batches(16, buffer=50, seed=3, epochs=2)
    wanted = [told(batch) for batch in batches]
    loader = DataLoader(
        batches, batch_size=None, num_workers=3 if context == "fork" else 1, multiprocessing_context=context
    )
    assert [told(batch) for batch in loader] == wanted
    assert len(loader) == len(wanted)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 1300), min_size=1, max_size=5),
    st.integers(1, 300),
    st.integers(1, 2500),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_ranks_share_all_rows(shards, batch_size, buffer, world, drop, whole) -> None:  # noqa: PLR0917 -- drawn
    """No row twice, none lost; with drop_last each rank has as many batches, and less than a round is left out."""
    edges = np.concatenate([[0], np.cumsum(shards)])
    blocks = Blocks.of(edges, whole=whole)
    assert blocks.rows == edges[-1]
    order = Order(batch_size, True, buffer, 7, 1, drop, 0, world)
    total = order.batches(blocks.rows)
    if not total:
        return
    epoch = Epoch(blocks, order, 0)
    found = [epoch.batch(number).tolist() for number in range(total)]
    rows = [row for batch in found for row in batch]
    assert len(set(rows)) == len(rows)
    if drop:
        assert total % world == 0
        assert {len(batch) for batch in found} == {batch_size}
        assert edges[-1] - len(rows) < batch_size * world
    else:
        assert sorted(rows) == list(range(edges[-1]))
    backwards = Epoch(blocks, order, 0)
    assert [backwards.batch(number).tolist() for number in reversed(range(total))] == found[::-1]


def test_ranks_take_turns(folder) -> None:
    """Together they give what one gives."""
    data = ActivationDataset(folder, at=POST, labels=True)
    alone = [told(batch) for batch in data.batches(9, seed=1)]
    shared = [[told(batch) for batch in data.batches(9, seed=1, rank=rank, world_size=3)] for rank in range(3)]
    assert [shared[n % 3][n // 3] for n in range(len(alone))] == alone
    for wrong in ({"rank": 3, "world_size": 3}, {"rank": 0}, {"buffer": 0}, {"epochs": 0}, {"seed": -1}):
        with pytest.raises(InvalidSetting):
            data.batches(9, **wrong)


def test_a_run_goes_on_where_it_was(folder) -> None:
    """From the state of any moment, or behind so many batches; of other batches it is refused."""
    data = ActivationDataset(folder, at=POST, labels=True)
    wanted = [told(batch) for batch in data.batches(10, epochs=2)]
    batches = data.batches(10, epochs=2)
    walk = iter(batches)
    for _ in range(len(wanted) // 2 + 3):
        next(walk)
    state = pickle.loads(pickle.dumps(batches.state_dict()))
    again = data.batches(10, epochs=2)
    again.load_state_dict(state)
    assert [told(batch) for batch in again] == wanted[len(wanted) // 2 + 3 :]
    assert [told(batch) for batch in again] == wanted  # once is enough
    again.skip(7)
    assert [told(batch) for batch in again] == wanted[7:]
    assert len(again) == len(wanted) - 7
    with pytest.raises(InvalidSetting, match="state of other batches"):
        data.batches(10, epochs=3).load_state_dict(state)


def test_a_state_is_of_its_rows_alone(folder, tmp_path) -> None:
    """As many rows of another corpus, or chosen otherwise, are others; states that older versions saved say nothing of it."""
    other = DatasetFolder.begin(tmp_path, definition_of())
    for number in range(SHARDS):
        shard = shard_of(definition_of(), number, LAST if number == SHARDS - 1 else None)
        other.write(dataclasses.replace(shard, documents_sha256="1" * 64))
    other.complete()
    data = ActivationDataset(folder, at=POST, without_tokens=[1, 2])
    state = json.loads(json.dumps(data.batches(10).state_dict()))
    for rows in (ActivationDataset(tmp_path, at=POST, without_tokens=[1, 2]), ActivationDataset(folder, at=POST)):
        assert len(rows) == len(data)
        with pytest.raises(InvalidSetting, match="batches of other rows"):
            rows.batches(10).load_state_dict(state)
    halves = [
        ActivationDataset(folder, at=POST, keep=keep)
        for keep in (
            lambda index: np.arange(len(index)) < 2,
            lambda index: np.arange(len(index)) >= len(index) - 2,
            lambda index: ~(np.arange(len(index)) > 1),
        )
    ]
    assert len({len(half) for half in halves}) == 1
    keeping = json.loads(json.dumps(halves[0].batches(10).state_dict()))
    with pytest.raises(InvalidSetting, match=r"of other rows.* and keep="):
        halves[1].batches(10).load_state_dict(keeping)
    halves[2].batches(10).load_state_dict(keeping)
    ActivationDataset(folder, at=POST, without_tokens=(2, 1)).batches(10).load_state_dict(state)
    del state["data"]
    ActivationDataset(folder, at=POST).batches(10).load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, "float32"])
def test_rows_have_a_floating_point_dtype(dtype, folder) -> None:
    """Rows would be cut to whole numbers."""
    with pytest.raises(InvalidSetting, match="give a floating-point dtype, or None"):
        ActivationDataset(folder, dtype=dtype)


def test_a_state_says_how_much_is_left_and_is_of_as_many_workers(folder) -> None:
    """What comes is what `len` says; other workers, which would each leave out as much, and what is no state are refused."""
    data = ActivationDataset(folder, at=POST, labels=True)
    wanted = [told(batch) for batch in data.batches(np.int64(10), seed=np.int64(0), epochs=2)]
    batches = data.batches(np.int64(10), seed=np.int64(0), epochs=2)
    walk = iter(batches)
    for _ in range(3):
        next(walk)
    state = json.loads(json.dumps(batches.state_dict()))
    again = data.batches(10, epochs=2)
    again.load_state_dict(state)
    assert len(again) == len(wanted) - 3
    with pytest.raises(InvalidSetting, match="one of 1 workers, and now there are 2"):
        list(DataLoader(again, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    assert [told(batch) for batch in again] == wanted[3:]
    whole = Blocks.of(np.array([0, len(data)]), whole=True)
    with pytest.raises(InvalidSetting, match="in other blocks"):  # they come in another order
        ActivationBatches(data, whole, batches.order).load_state_dict(state)
    for wrong in (None, {}, {"order": state["order"]}, state | {"given": -1}, state | {"skipped": "1"}):
        with pytest.raises(InvalidSetting):
            data.batches(10, epochs=2).load_state_dict(wrong)
    for wrong in (-1, 1.5, None):
        with pytest.raises(InvalidSetting, match="batches="):
            data.batches(10, shuffle=False).skip(wrong)


def test_a_buffer_shuffles_across_the_data() -> None:
    """A window holds blocks from all over, and no batch is a run of neighbours."""
    epoch = Epoch(Blocks.of(np.arange(0, 100_001, 5_000), whole=False), Order(256, True, 8192, 0, 1, False), 0)
    window = epoch.window(0)
    assert 8192 <= len(window) <= 8192 + 512
    assert len(np.unique(window // 5_000)) > 8
    assert np.mean(np.abs(np.diff(epoch.batch(0))) == 1) < 0.02


@pytest.mark.slow
def test_a_map_style_loader_takes_it(folder) -> None:
    """Indices of torch's own sampler, whole batches read at once, points by name."""
    data = ActivationDataset(folder)
    loader = DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    found = torch.cat([batch["resid_post[1]"] for batch in loader])
    assert torch.equal(found.sort(dim=0).values, truth(POST).float().sort(dim=0).values)
    with pytest.raises(IndexError, match=f"row {len(data)} is outside this data set of {len(data)} rows"):
        data[len(data)]
    with pytest.raises(IndexError, match="rows are indexed by an integer, a slice or"):
        data["first"]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50)), max_size=12), st.integers(0, 3))
def test_a_shuffle_buffer_gives_out_what_it_was_given(capacity, turns, seed) -> None:
    """Every row once, each with its own columns; the same draws from the same seed."""
    runs = []
    for _ in range(2):
        buffer, given_rows, drawn = ShuffleBuffer(capacity, seed), 0, []
        for offered, wanted in turns:
            rows = torch.arange(given_rows, given_rows + offered)
            taken = buffer.add({"a": rows, "b": (2 * rows)[:, None]})
            assert len(buffer) <= capacity
            assert taken == offered or buffer.full
            given_rows += taken
            drawn.append(buffer.draw(wanted))
        drawn.append(buffer.draw(capacity))
        found = torch.cat([one["a"] for one in drawn if "a" in one] or [torch.empty(0)])
        assert sorted(found.tolist()) == list(range(given_rows))
        assert all(torch.equal(one["b"][:, 0], 2 * one["a"]) for one in drawn if "a" in one)
        runs.append(found.tolist())
    assert runs[0] == runs[1]


# Folders that are not whole


def test_what_is_not_complete_is_refused_unless_asked_for(tmp_path) -> None:
    """Then it is read as far as it is there, normalised by the statistics of its shards."""
    definition = definition_of()
    folder = DatasetFolder.begin(tmp_path, definition)
    for number in (0, 2):
        folder.write(shard_of(definition, number))
    with pytest.raises(InvalidFile, match=r"is not complete: it has 2 shards and no dataset\.json; .*partial=True"):
        ActivationDataset(tmp_path)
    data = ActivationDataset(tmp_path, at=POST, partial=True, normalise="mean")
    assert len(data) == sum(len(shard_of(definition, number).index) for number in (0, 2))
    assert data[:].mean(0).abs().max() < 1e-5


def test_a_data_set_without_shards_has_no_rows_to_normalise_by(tmp_path) -> None:
    """Complete or begun: it is empty, and whoever needs statistics of rows is told that there are none."""
    for name, complete in (("begun", False), ("whole", True)):
        where = folder_of(tmp_path / name, definition_of(), 0, complete=complete).storage
        data = ActivationDataset(str(where), at=POST, partial=True)
        assert (len(data), int(data.statistics().count)) == (0, 0)
        with pytest.raises(InvalidRequest, match="needs statistics, and they cover no rows"):
            ActivationDataset(str(where), normalise="mean", partial=True)


@pytest.mark.parametrize("end", [".safetensors", ".parquet"])
def test_a_truncated_or_missing_file_is_named(end, tmp_path) -> None:
    """When the data set is opened, and when a file changes after that, before it is mapped."""
    folder_of(tmp_path, definition_of())
    path = tmp_path / name_of(1, end)
    whole = path.read_bytes()
    data = ActivationDataset(tmp_path, labels=True)
    path.write_bytes(whole[:-7])
    with pytest.raises(InvalidFile, match=rf"000001{end} has {len(whole) - 7:,} bytes"):
        ActivationDataset(tmp_path)
    with pytest.raises(InvalidFile, match=rf"000001{end}"):
        data[:]
    path.unlink()
    with pytest.raises(InvalidFile, match=rf"000001{end} is missing"):
        ActivationDataset(tmp_path)
    with pytest.raises(InvalidFile, match=rf"000001{end} cannot be read"):
        data[:]


def exchange(folder: Path, first: str, other: str) -> None:
    (folder / first).rename(folder / "third")
    (folder / other).rename(folder / first)
    (folder / "third").rename(folder / other)


@pytest.mark.parametrize("end", [".safetensors", ".parquet", ".statistics.safetensors"])
def test_files_of_another_shard_are_not_read_as_a_shards_own(end, tmp_path) -> None:
    """Of equal sizes, as those of windows of one length are, and under the right name."""
    folder_of(tmp_path, definition_of(documents=9), 8, 9, complete=False)
    sizes = {name: (tmp_path / name).stat().st_size for name in (name_of(number, end) for number in range(8))}
    first, other = next(pair for pair in itertools.combinations(sizes, 2) if sizes[pair[0]] == sizes[pair[1]])
    exchange(tmp_path, first, other)
    with pytest.raises(InvalidFile, match=rf"00000\d{end} (has SHA-256|holds the rows of another)"):
        ActivationDataset(tmp_path, at=POST, labels=True, normalise="mean", partial=True)[:]
    exchange(tmp_path, first, other)
    assert len(ActivationDataset(tmp_path, at=POST, labels=True, normalise="mean", partial=True)[:].rows) == 8 * 45


def test_a_bit_of_an_index_is_noticed_when_it_is_read(tmp_path) -> None:
    """Whatever Arrow makes of it: labels, and the choice of tokens."""
    folder_of(tmp_path, definition_of())
    path = tmp_path / name_of(1, ".parquet")
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 19):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(InvalidFile, match=r"000001\.parquet has SHA-256"):
            ActivationDataset(tmp_path, labels=True)[:]
        with pytest.raises(InvalidFile, match=r"000001\.parquet has SHA-256"):
            ActivationDataset(tmp_path, without_tokens=1)


def test_statistics_of_another_data_set_normalise_nothing(tmp_path) -> None:
    """Of another definition, or of another corpus collected by an equal one."""
    folder_of(tmp_path / "own", definition_of())
    folder_of(tmp_path / "corpus", definition_of(), 4)
    folder_of(tmp_path / "definition", definition_of(documents=3), last=1)
    for other in ("corpus", "definition"):
        shutil.copy(tmp_path / other / "statistics.safetensors", tmp_path / "own")
        with pytest.raises(InvalidFile, match=r"statistics\.safetensors holds the statistics of another data set"):
            ActivationDataset(tmp_path / "own", normalise="mean")


def test_rows_behind_a_url_are_those_of_a_folder(folder, tmp_path, monkeypatch) -> None:
    """They are fetched shard by shard, and nothing of them stays on this disk."""
    url = f"memory://{tmp_path.name}"
    scratch = tmp_path / "scratch"  # others write to the machine's
    scratch.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(scratch))
        folder_of(url, definition_of(), SHARDS, LAST)
        near, far = ActivationDataset(folder, at=POST), ActivationDataset(url, at=POST)
        assert torch.equal(near[:], far[:])
        seen = torch.cat(list(far.batches(16, buffer=40, seed=2)))
        assert torch.equal(seen.sort(dim=0).values, near[:].sort(dim=0).values)
        assert list(scratch.iterdir()) == []
    loader = DataLoader(far.batches(16, seed=2), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(torch.cat(list(loader)), torch.cat(list(far.batches(16, seed=2))))


def test_shards_behind_a_url_are_fetched_once_an_epoch(tmp_path, monkeypatch) -> None:
    """However small they are, and however many a window holds."""
    url = f"memory://{tmp_path.name}"
    folder_of(url, definition_of(), SHARDS, LAST)
    data = ActivationDataset(url, at=POST)
    fetched = []
    opened = data._opened
    monkeypatch.setattr(data, "_opened", lambda number: fetched.append(number) or opened(number))
    data._prepare()
    assert sum(map(len, data.batches(8, buffer=60))) == len(data)
    assert sorted(fetched) == list(range(SHARDS))


def test_what_is_read_can_be_changed(folder) -> None:
    """Rows are copies: what a training does to them is in no later batch, and not in the file."""
    data = ActivationDataset(folder, at=POST, dtype=None)
    data[:].zero_()
    assert torch.equal(data[:], truth(POST))


def test_an_sae_of_normalised_rows_reads_the_models_rows(folder, tmp_path) -> None:
    """With the normalisation folded into its weights, as docs/dictionary.md says: the same features, the same rows."""
    data = ActivationDataset(folder, at=POST, normalise="standard")
    mean, scale = data.normalisations["resid_post[1]"].mean, data.normalisations["resid_post[1]"].scale
    drawn = torch.Generator().manual_seed(0)
    W_dec, b_enc, b_dec = (torch.randn(*shape, generator=drawn) * 0.3 for shape in ((40, 16), (40,), (16,)))  # noqa: N806
    save_file(
        {
            "W_enc": (scale[:, None] * W_dec.T).contiguous(),
            "W_dec": W_dec / scale,
            "b_enc": b_enc,
            "b_dec": mean + b_dec / scale,
        },
        tmp_path / "sae_weights.safetensors",
    )
    said = {"architecture": "standard", "d_in": 16, "d_sae": 40, "apply_b_dec_to_input": True}
    (tmp_path / "cfg.json").write_text(json.dumps({**said, "metadata": {"hook_name": "blocks.1.hook_resid_post"}}))
    sae = SAE.load(tmp_path)
    codes = ((data[:] - b_dec) @ W_dec.T + b_enc).relu()
    rows = truth(POST).float()
    assert torch.allclose(sae.encode(rows), codes, atol=1e-4)
    back = data.normalisations["resid_post[1]"].undone(codes @ W_dec + b_dec)
    assert torch.allclose(sae.decode(sae.encode(rows)), back, atol=1e-3)
