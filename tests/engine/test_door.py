"""Facts that an open model gives to functions on top of it, which do not read its engine's configuration."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import sys
from pathlib import Path

import pytest
from support.rows import TINY_ENGINE
from transformers import AutoConfig

import steercap
from steercap import Add, CaptureSpec, SteerModel
from steercap.errors import InvalidSpec, LayerOutOfRange, UnknownName, WrongEventLoop


async def test_a_model_says_its_context_and_how_its_answers_end(tiny: SteerModel) -> None:
    """The limit that it was started with, and the checkpoint's generation_config.json, which transformers wrote."""
    assert tiny.max_model_len == TINY_ENGINE["max_model_len"]
    written = json.loads((Path(tiny.model) / "generation_config.json").read_text())
    said = dict(tiny.generation_config)
    assert {name: said.get(name) for name in written if name != "transformers_version"} == {
        name: value for name, value in written.items() if name != "transformers_version"
    }
    assert tiny.checkpoint == (tiny.model, None)


async def test_its_identity_is_of_strings_and_of_its_weights(tiny: SteerModel) -> None:
    """Another checkpoint, dtype or cache is another; the names are those that folders hold."""
    found = tiny.identity()
    assert sorted(found) == sorted(
        [
            *("name", "revision", "dtype", "quantization", "weights", "tensors", "generation", "chat_template"),
            *("tokenizer", "kv_cache_dtype"),
        ]
    )
    assert all(isinstance(value, str) for value in found.values())
    assert (found["dtype"], found["revision"], found["kv_cache_dtype"]) == ("float32", "", "auto")
    assert len(found["weights"]) == len(hashlib.sha256().hexdigest())
    assert found == tiny.identity()


async def test_a_capture_is_checked_before_it_runs(tiny: SteerModel) -> None:
    """Its points are named in order, as a capture has them; what does not fit is the error that a call would raise."""
    spec = CaptureSpec(layers=[-1, 0], sites=["resid_post", "mlp_out"], tokens="last_prompt")
    points = tiny.check_capture(spec)
    last = AutoConfig.from_pretrained(tiny.model).num_hidden_layers - 1
    assert {(point.layer, point.site) for point in points} == {
        (layer, site) for layer in (0, last) for site in ("resid_post", "mlp_out")
    }
    _, handle = await tiny.generate("a b", {"max_tokens": 1}, capture=spec)
    await handle.fetch()
    assert points == tuple(handle.captures)
    for wrong, error in (
        (CaptureSpec(layers=last + 1), LayerOutOfRange),
        (CaptureSpec(layers=[True] * (last + 3)), InvalidSpec),
        (CaptureSpec(sites="resid_pots"), UnknownName),
    ):
        with pytest.raises(error) as checked:
            tiny.check_capture(wrong)
        with pytest.raises(error) as called:
            await tiny.generate("a b", {"max_tokens": 1}, capture=wrong)
        assert str(checked.value) == str(called.value)


async def test_a_capture_is_checked_in_the_loop_that_compiles_specs(tiny: SteerModel) -> None:
    """Another thread, with a loop or without one, would do it beside the requests of the model's own."""

    async def elsewhere() -> None:
        tiny.check_capture(CaptureSpec(layers=0))

    for check in (lambda: asyncio.run(elsewhere()), lambda: tiny.check_capture(CaptureSpec(layers=0))):
        with pytest.raises(WrongEventLoop):
            await asyncio.to_thread(check)


#: Frames of steercap between the call and vLLM's `AsyncLLM.generate`, in the task of the call and that of the request.
FRAMES = 6


@pytest.mark.parametrize("asked", [{}, {"capture_layers": [1], "steering": Add([1.0] * 128, layer=1)}])
async def test_a_request_takes_a_short_path_to_vllm(tiny: SteerModel, monkeypatch, asked) -> None:
    """Every frame is in each traceback that a user reads, and is passed by each request."""
    llm, frames = tiny.engine, []
    original = llm.generate

    def generate(*args, **kwargs):
        frame, waiting = sys._getframe(1), caller.get_coro()
        while frame is not None:
            frames.append(frame.f_code)
            frame = frame.f_back
        while inspect.iscoroutine(waiting):
            frames.append(waiting.cr_code)
            waiting = waiting.cr_await
        return original(*args, **kwargs)

    monkeypatch.setattr(llm, "generate", generate)
    caller = asyncio.create_task(tiny.generate("hi", {"max_tokens": 1}, **asked))
    await caller
    package = str(Path(steercap.__file__).parent)
    ours = [code.co_qualname for code in frames if code.co_filename.startswith(package)]
    assert "Calls._values" in ours
    assert len(ours) <= FRAMES, ours
