"""Faults, injected for real: who is met by one is told at once, of what it was, and nothing is held or left."""

from __future__ import annotations

import asyncio
import shutil

import pytest
import torch
from conftest import opened
from faults import injected
from support.faults import FAULTS
from support.faults.base import LONG, SHORT, kill, processes
from support.faults.cancelled import everywhere
from support.faults.deaths import CROWDED, deaths, killed_in_a_row, survived
from support.lora import LORA_ENGINE, write_adapter
from support.rows import TINY_ENGINE, random_prompt
from vllm.lora.request import LoRARequest

from steercap.errors import EngineDied, InvalidRequest
from steercap.testing import tiny_checkpoint

pytestmark = pytest.mark.spawned
TINY = tiny_checkpoint("qwen3")
#: Those that tests below inject in this process.
HERE = {"core_killed", "core_killed_restart", "cancelled"}


@pytest.mark.slow
async def test_a_killed_engine_core_is_told_to_all_at_once() -> None:
    """Who runs, who waits for memory, whose rows wait, who asks afterwards: EngineDied, with the signal, within seconds."""
    async with opened(TINY, spawned=True, **TINY_ENGINE, **CROWDED) as model:
        outcomes = await deaths(model, "EngineCore")
    assert len(outcomes) == 6


@pytest.mark.slow
async def test_a_killed_engine_core_is_started_again(tiny_reference) -> None:
    """With restart=True all are answered, rows are those of transformers, and what cannot go on says why."""
    async with opened(TINY, spawned=True, restart=True, **TINY_ENGINE) as model:
        outcomes = await survived(model, "EngineCore", tiny_reference)
    assert len(outcomes) == 7


@pytest.mark.slow
async def test_files_that_have_changed_are_not_used_by_the_next_engine(tmp_path) -> None:
    """An adapter's: its requests are refused, and its rows lost, beside another that goes on. A tokenizer's: no engine."""
    path = shutil.copytree(TINY, tmp_path / "tiny")
    folders = [write_adapter(tmp_path / name, path, seed=seed) for seed, name in enumerate(("changed", "kept"))]
    changed, kept = (LoRARequest(one.name, number, str(one)) for number, one in enumerate(folders, 1))
    prompt = random_prompt(9, 1)
    async with opened(path, spawned=True, restart=True, **TINY_ENGINE, **LORA_ENGINE) as model:
        before = [
            await model.generate(prompt, SHORT, capture_layers=[2], lora_request=one) for one in (changed, kept, None)
        ]
        assert len({handle.output_token_ids for _, handle in before}) == 3
        running = asyncio.create_task(model.generate(prompt, LONG, lora_request=changed))
        await asyncio.sleep(0.1)
        assert not running.done()
        kill(processes(model, "EngineCore")[0])
        write_adapter(folders[0], path, seed=9)
        refused = "the LoRA adapter 'changed' .* have changed since it was loaded"
        with pytest.raises(InvalidRequest, match=refused):
            await running
        with pytest.raises(InvalidRequest, match=refused):
            await model.generate(prompt, SHORT, lora_request=changed)
        with pytest.raises(EngineDied, match=f"its rows cannot be recomputed: .*{refused}"):
            await before[0][1].fetch()
        for (text, handle), adapter in zip(before[1:], (kept, None), strict=True):
            again, fresh = await model.generate(prompt, SHORT, capture_layers=[2], lora_request=adapter)
            assert again == text
            await model.fetch_captures_batch([handle, fresh])
            assert (handle.receipt.recomputed, fresh.receipt.recomputed) == (True, False)
            torch.testing.assert_close(handle.captures[2], fresh.captures[2], rtol=1e-5, atol=1e-5)
        kill(processes(model, "EngineCore")[0])
        tokenizer = path / "tokenizer.json"
        tokenizer.write_text(tokenizer.read_text() + "\n")
        with pytest.raises(EngineDied, match=r"the files of .* have changed since it was started"):
            await model.generate(prompt, SHORT)


@pytest.mark.slow
async def test_a_task_that_is_cancelled_at_any_await_leaves_nothing(tiny) -> None:
    """Of each kind of call, at every place where it or a task of its waits."""
    places = await everywhere(tiny)
    assert all(count > 5 for count in places.values()), places


@pytest.mark.extended
@pytest.mark.usefixtures("two_workers")
async def test_a_killed_worker_is_told_to_all_at_once() -> None:
    """vLLM waits for the other worker first, for up to 10 s; nobody here does."""
    async with opened(TINY, spawned=True, **TINY_ENGINE, **CROWDED, tensor_parallel_size=2) as model:
        await deaths(model, "Worker")


@pytest.mark.extended
async def test_an_engine_survives_ten_kills(tiny_reference) -> None:
    """Core and worker in turn, each in the middle of a batch: all are answered, every row is right."""
    async with opened(TINY, spawned=True, restart=True, **TINY_ENGINE) as model:
        took = await killed_in_a_row(model, 10, tiny_reference)
    assert len(took) == 10


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in HERE])
def test_what_must_come_of_a_fault_comes(name) -> None:
    """In a process of its own, which ends and leaves nothing."""
    if reason := FAULTS[name].missing():
        pytest.skip(reason)
    row = injected(name, FAULTS[name])
    assert not row.wrong, row.wrong
    assert row.left == "nothing"
    assert row.outcomes
