"""The same names without await."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import Leftovers
from support.rows import GREEDY, TINY_ENGINE, parity, random_prompt
from torch.utils.data import DataLoader

from steercap import Add, CaptureSpec, errors, stack
from steercap.lab.studies.sweeps import Sweep
from steercap.sync import SteerModel, activations, extract, mean_rows, run_sweep
from steercap.testing import tiny_checkpoint

DOCUMENTS = [random_prompt(length, seed) for seed, length in enumerate([30, 75, 0, 1, 40, 12, 33])]


def labels(batches) -> list[tuple[int, ...]]:
    """Document, window, position, token and point of rows, as they came."""
    return [line for batch in batches for line in zip(*(column.tolist() for column in batch[1:]), strict=True)]


def reading_without_await(model) -> None:
    """A stream of activations is an iterator, a data set for torch, and closed by the end of a loop."""
    ask = {"layers": 1, "context": 32, "batch_size": 50, "buffer": 130, "labels": True}
    with activations(model, DOCUMENTS, **ask) as stream:
        first = list(stream)
    assert len(labels(first)) == sum(map(len, DOCUMENTS)) == stream.rows == stream.tokens
    assert labels(DataLoader(activations(model, DOCUMENTS, **ask), batch_size=None)) == labels(first)
    broken = activations(model, DOCUMENTS, **ask)
    for _ in broken:
        break
    for ended in (stream, broken):
        with pytest.raises(errors.InvalidRequest, match="read once"):
            iter(DataLoader(ended, batch_size=None)).__next__()
    workers = DataLoader(activations(model, DOCUMENTS, **ask), None, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(errors.InvalidRequest, match="num_workers=0"):
        iter(workers)
    assert model.stats().handles_held == 0


def test_sync_gives_what_async_gives(tiny_reference, tmp_path) -> None:
    """Texts and rows, one and many; closing leaves no thread and no process."""
    before = Leftovers()
    model = SteerModel(tiny_checkpoint("qwen3"), preset="cpu", **TINY_ENGINE)
    with pytest.raises(errors.ModelClosed, match="never started"):
        model.generate("x")
    with model:
        assert [str(point) for point in model.check_capture(CaptureSpec(layers=[2, 0]))] == [
            "resid_post[0]",
            "resid_post[2]",
        ]
        text, handle = model.generate(random_prompt(9, 1), {"max_tokens": 4, **GREEDY}, capture_layers="all")
        with handle:
            assert handle.text == text
            assert parity(handle.awaited, tiny_reference)["resid_post generated"].cosine > 0.99999
        texts, handles = model.generate([random_prompt(9, 1)] * 3, {"max_tokens": 4, **GREEDY}, capture_layers=[1])
        model.fetch_captures_batch(handles)
        assert len(texts) == 3
        for other in handles[1:]:
            torch.testing.assert_close(other.captures[1], handles[0].captures[1], rtol=1e-4, atol=1e-4)
        assert model.stats().handles_held == 0
        assert model.num_layers == 4
        chunks = list(model.stream(random_prompt(9, 1), {"max_tokens": 4, **GREEDY}, capture_layers=[1]))
        assert "".join(chunk.text for chunk in chunks) == text
        assert torch.equal(torch.cat([chunk.positions for chunk in chunks]), torch.arange(12))
        (read,) = model.read([random_prompt(9, 1)])
        assert read.fetch().captures[1].shape == (9, 128)
        torch.testing.assert_close(stack([read])[0, 1], handles[0].captures[1][8], rtol=1e-4, atol=1e-4)
        found = extract(model, ["good", "glad"], ["bad", "sad"], name="joy", layers=[1], tokens="all")
        with model.steered(Add(found["joy"][1], layer=1, scale=40.0)):
            means = mean_rows(model, [random_prompt(9, 1)], layers=[1], tokens="all").values  # says steering=None
            steered = model.read(random_prompt(9, 1), capture_layers=[1])
        assert torch.allclose(means[0, 0], read.captures[1].mean(0), atol=1e-5)
        assert not torch.allclose(steered.fetch().captures[1], read.captures[1], atol=1e-3)
        with model.sketch("moments", layers=[1]) as sketch:
            assert model.read(random_prompt(9, 1)) is None
            assert (sketch.requests, sketch.rows, sketch.points) == (1, 9, read.points[1:2])
            assert torch.allclose(sketch.mean(1).float(), read.captures[1].mean(0), atol=1e-5)
            assert torch.equal(sketch.fetch().covariance(1), sketch.covariance(1))
            assert torch.equal(sketch.variance(1), sketch.covariance(1).diagonal())
            assert list(sketch.principal_directions(1, 2)) == ["pc1", "pc2"]
        with pytest.raises(errors.SketchClosed):
            sketch.fetch()
        assert model.stats().sketches == 0
        reading_without_await(model)
        sweep = Sweep(
            vectors=found,
            layers=[1],
            scales=[1],
            prompts=["a", "b"],
            random=0,
            negated=False,
            sampling_params={"max_tokens": 2},
        )
        assert len(run_sweep(model, sweep, out=tmp_path / "sweep").records) == 4
        with pytest.raises(errors.CaptureNotFetched, match=r"fetched; `handle\.fetch\(\)`"):
            _ = model.read("x").captures
        _, unread = model.generate(random_prompt(9, 1), {"max_tokens": 4, **GREEDY}, capture_layers=[1])
    model.close()
    with pytest.raises(errors.ModelClosed, match="is closed"):
        model.stats()
    with pytest.raises(errors.ModelClosed):
        unread.fetch()
    unread.release()
    assert handles[0].fetch().captures[1].shape == (12, 128)
    assert not before.new()
    assert not [thread for thread in set(threading.enumerate()) - before.threads if "steercap" in thread.name]
