"""The same names without await."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import Leftovers

from steercap import errors
from steercap.sync import SteerModel
from steercap.testing import tiny_checkpoint
from steercap.testing.rows import GREEDY, TINY_ENGINE, parity, random_prompt


def test_sync_gives_what_async_gives(tiny_reference) -> None:
    """Texts and rows, one and many; closing leaves no thread and no process."""
    before = Leftovers()
    model = SteerModel(tiny_checkpoint("qwen3"), **TINY_ENGINE)
    with pytest.raises(errors.ModelClosed, match="never started"):
        model.generate("x")
    with model:
        text, handle = model.generate(random_prompt(9, 1), {"max_tokens": 4, **GREEDY}, capture_layers="all")
        with handle:
            assert handle.text == text
            assert parity(handle._handle, tiny_reference)["resid_post generated"].cosine > 0.99999
        texts, handles = model.generate([random_prompt(9, 1)] * 3, {"max_tokens": 4, **GREEDY}, capture_layers=[1])
        model.fetch_captures_batch(handles)
        assert len(texts) == 3
        assert all(torch.equal(other.captures[1], handles[0].captures[1]) for other in handles[1:])
        assert model.stats().handles_held == 0
        assert model.num_layers == 4
        chunks = list(model.stream(random_prompt(9, 1), {"max_tokens": 4, **GREEDY}, capture_layers=[1]))
        assert "".join(chunk.text for chunk in chunks) == text
        assert torch.equal(torch.cat([chunk.positions for chunk in chunks]), torch.arange(12))
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
