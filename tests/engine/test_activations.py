"""`activations` gives every row of a corpus once, shuffled by its seed, and leaves nothing behind when it ends."""

from __future__ import annotations

import asyncio

import pytest
import torch
from support.rows import random_prompt

from steercap import errors
from steercap.lab.datasets import ActivationDataset
from steercap.lab.datasets.collecting import activations, collect

DOCUMENTS = [random_prompt(length, seed) for seed, length in enumerate([30, 75, 0, 1, 40, 12, 33] * 3)]
POINT = "resid_post[1]"


def lines(batches) -> list[tuple[int, ...]]:
    return [line for batch in batches for line in zip(*(column.tolist() for column in batch[1:]), strict=True)]


async def taken(stream) -> list:
    async with stream:
        return [batch async for batch in stream]


@pytest.fixture(scope="module")
async def folder(tiny, tmp_path_factory):
    """The same corpus on disk."""
    path = tmp_path_factory.mktemp("activations")
    await collect(tiny, DOCUMENTS, path, layers=[1, 3], context=32, documents_per_shard=4, statistics_every=1)
    return path


async def test_a_stream_gives_what_a_data_set_holds(tiny, folder) -> None:
    """Each token once, each row under its label; the same batches again from the same seed, others from another."""
    data = ActivationDataset(folder, at=POINT, labels=True)
    stored = dict(zip(lines([data[:]]), data[:].rows, strict=True))
    ask = {"layers": 1, "context": 32, "batch_size": 50, "buffer": 130, "labels": True}
    first, second, third = [await taken(activations(tiny, DOCUMENTS, **ask, seed=seed)) for seed in (4, 4, 5)]
    assert sorted(lines(first)) == sorted(stored)
    assert lines(first) == lines(second) != lines(third)
    assert lines(first) != sorted(lines(first))
    assert [len(batch.rows) for batch in first[:-1]] == [50] * (len(first) - 1)
    for line, row in zip(lines(first), torch.cat([batch.rows for batch in first]), strict=True):
        assert torch.allclose(row, stored[line], atol=1e-4)
    short = await taken(activations(tiny, DOCUMENTS, **ask, drop_last=True))
    assert [len(batch.rows) for batch in short] == [50] * (len(stored) // 50)


async def test_a_stream_joins_and_normalises_as_a_data_set_does(tiny, folder) -> None:
    """With statistics that are given; by default those of the first rows, which it says."""
    data = ActivationDataset(folder, normalise="standard")
    given = {name: data.statistics(name) for name in data.points}
    ask = {"layers": [1, 3], "context": 32, "batch_size": 64, "buffer": 1 << 12, "normalise": "standard"}
    both = await taken(activations(tiny, DOCUMENTS, **ask, statistics=given, join="concatenate", labels=True))
    found = dict(zip(lines(both), torch.cat([batch.rows for batch in both]), strict=True))
    stored = ActivationDataset(folder, normalise="standard", labels=True)[:]
    wanted = torch.cat([stored.rows[name] for name in data.points], dim=1)
    for line, row in zip(lines([stored]), wanted, strict=True):
        assert torch.allclose(found.pop(line), row, atol=1e-2)
    assert not found
    stream = activations(tiny, DOCUMENTS, **ask, join="mix")
    with pytest.raises(errors.InvalidRequest, match="take a batch before you ask for it"):
        _ = stream.normalisations
    async with stream:
        batches = [batch async for batch in stream]
        assert torch.allclose(torch.cat(batches).var(unbiased=False), torch.tensor(1.0), atol=1e-3)
        assert sum(map(len, batches)) == 2 * len(data) == stream.rows
        assert stream.tokens == len(data)
        mine, stored = stream.normalisations[POINT], data.normalisations[POINT]
        assert torch.allclose(mine.mean, stored.mean, atol=1e-4)
    coded = await taken(activations(tiny, DOCUMENTS, layers=1, codec="full8", batch_size=64))
    assert sum(map(len, coded)) == sum(map(len, DOCUMENTS))
    assert coded[0].dtype == torch.float32


@pytest.mark.parametrize("join", ["dict", "mix"])
async def test_the_order_does_not_depend_on_when_rows_come(tiny, join) -> None:
    """With one window at once blocks end elsewhere; the batches are the same."""
    ask = {"layers": [1, 3], "context": 32, "batch_size": 50, "buffer": 130, "labels": True, "join": join, "seed": 2}
    found = [await taken(activations(tiny, DOCUMENTS, **ask, concurrency=most)) for most in (None, 1, 3)]
    ordered = [
        [(line, point) for one in batches for line, point in zip(lines([one]), one.point.tolist(), strict=True)]
        for batches in found
    ]
    assert ordered[0] == ordered[1] == ordered[2]


async def test_closing_a_stream_ends_what_runs(tiny) -> None:
    """In the middle of an endless corpus: no request runs on, no row is held, and the model answers."""

    def endless():
        while True:
            yield from DOCUMENTS

    before = (await tiny.stats()).capture_bytes_claimed
    async with activations(tiny, endless(), layers="all", batch_size=32, buffer=64) as stream:
        async for batch in stream:
            assert len(batch[POINT]) == 32
            if stream.rows > 300:
                break
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    async with asyncio.timeout(20):
        while (stats := await tiny.stats()).handles_held or stats.capture_bytes_claimed > before:
            await asyncio.sleep(0.05)
    assert (await tiny.read(random_prompt(9, 1), capture_layers=[1])) is not None


async def test_a_slow_reader_slows_the_engine_down(tiny) -> None:
    """What is read ahead is bounded by the buffer and by what is under way, however long nobody reads."""
    seen = 0

    def counted():
        nonlocal seen
        while True:
            seen += 1
            yield random_prompt(20, seen)

    async with activations(tiny, counted(), layers=1, batch_size=16, buffer=64, concurrency=4) as stream:
        await anext(stream)
        previous = -1
        while previous != seen:
            previous = seen
            await asyncio.sleep(0.7)
        assert seen * 20 < 64 * 1.25 + 20 * (4 + 4 + 64 * 6)  # buffer, windows under way and fetched, batches fed
        await anext(stream)


async def test_a_stream_whose_task_somebody_cancels_does_not_seem_to_end(tiny) -> None:
    """Such as who cancels all tasks there are: what is missing is told of."""
    async with activations(tiny, DOCUMENTS * 50, layers=1, batch_size=16, buffer=16) as stream:
        await anext(stream)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if "_produce" in repr(task.get_coro()):
                task.cancel()
        with pytest.raises(RuntimeError, match="cancelled by somebody else"):
            await taken(stream)


async def test_what_is_wrong_with_a_corpus_ends_the_stream(tiny) -> None:
    """The error says which document it was; arguments are refused at once."""
    with pytest.raises(errors.InvalidRequest, match=r"document 21: 3\.5"):
        await taken(activations(tiny, [*DOCUMENTS, 3.5], layers=1, batch_size=16, buffer=16))
    for wrong in ({"buffer": 8}, {"join": "sum"}, {"normalise": "max"}, {"seed": -1}):
        with pytest.raises(errors.InvalidSetting):
            activations(tiny, DOCUMENTS, **{"layers": 1, "batch_size": 16, "buffer": 16, **wrong})
    with pytest.raises(errors.InvalidRequest, match=r"names 'z\[0\]', which is not read"):
        activations(tiny, DOCUMENTS, layers=1, statistics={"z[0]": None})
