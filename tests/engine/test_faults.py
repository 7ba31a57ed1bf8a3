"""Faults, injected for real: who is met by one is told at once, of what it was, and nothing is held or left."""

from __future__ import annotations

import pytest
from conftest import opened
from faults import injected
from support.faults import FAULTS
from support.faults.cancelled import everywhere
from support.faults.deaths import CROWDED, deaths, killed_in_a_row, survived
from support.rows import TINY_ENGINE

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
