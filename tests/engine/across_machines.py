"""Tests of one engine whose workers Ray starts on other machines than the client's; `test_machines.py` runs each."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import opened
from support.agreement import projections_agree, workers_agree
from support.rows import ALL_SITES, GREEDY, TINY_ENGINE, random_prompt, settled
from support.sketching import sketches_agree

from steercap import SteerModel, errors
from steercap.testing import Reference, tiny_checkpoint
from steercap.worker.memory import WireReader

ACROSS: dict[str, Any] = {**TINY_ENGINE, "distributed_executor_backend": "ray"}
#: Seconds in which Ray ends a worker whose engine is gone, and vLLM sees that a worker is: it looks every 5 s.
PATIENCE = 30.0


def workers() -> list[psutil.Process]:
    """vLLM's workers on every machine, seen from the one that they all are."""
    running = psutil.process_iter(["cmdline"])
    return [process for process in running if "ray::RayWorkerProc" in " ".join(process.info["cmdline"] or [])]


def none_left() -> bool:
    """Whether all workers end, within `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while found := workers():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        del found
    return True


def apart_from_here(model: SteerModel) -> bool:
    """Whether no worker is among this process's own, and every row comes by wire."""
    namespaces = [Path(f"/proc/{one.pid}/ns/pid").readlink() for one in workers()]
    assert len(namespaces) == 2
    assert Path("/proc/self/ns/pid").readlink() not in namespaces
    return all(isinstance(rank.reader, WireReader) for rank in model.serving.engine._all_ranks)


async def lose_a_worker(model: SteerModel) -> None:
    """Kill a worker while a request runs, to its end."""
    async for _ in model.stream(random_prompt(20, 1), {"max_tokens": 200, **GREEDY}):
        for worker in workers()[:1]:
            worker.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
async def test_rows_and_edits_are_those_of_transformers(layout, record_property) -> None:
    """What `test_parallel.py` shows of two workers here, of two workers on other machines. No edit or row is lost, rows
    come by wire because nothing else can be, and when a worker dies the request that runs says so.
    """
    reference = Reference(tiny_checkpoint("qwen3"))
    async with opened(tiny_checkpoint("qwen3"), sites=ALL_SITES, **ACROSS, **{layout: 2}) as model:
        assert apart_from_here(model)
        _, handles = await workers_agree(model, reference)
        await projections_agree(model)
        await sketches_agree(model)
        del handles
        assert await settled(model) == (0, 0, 0)
        began = time.monotonic()
        with pytest.raises(errors.EngineFailure):
            await lose_a_worker(model)
        record_property("seconds until it is said", f"{time.monotonic() - began:.1f}")
        assert time.monotonic() - began < PATIENCE
    assert none_left()


async def test_memory_that_is_not_shared_is_said() -> None:
    """Whoever asks for shared memory is told that there is none, and nothing is left on the other machines."""
    with pytest.raises(errors.MemoryNotShared):
        async with opened(tiny_checkpoint("qwen3"), transport="shared", **ACROSS, tensor_parallel_size=2):
            pass
    assert none_left()


async def test_a_worker_elsewhere_refuses_in_its_own_words() -> None:
    """What a worker cannot do is the error that it raised, not that of Ray, nor of the engine that ended with it."""
    path = "model.layers.1.self_attn.q_proj.output"
    with pytest.raises(errors.UnsupportedModel, match=r"^model\.layers\.1\.\S+ is not in this model: no 'q_proj'"):
        await SteerModel(str(tiny_checkpoint("qwen3")), sites=[path], **ACROSS, tensor_parallel_size=2).start()
    assert none_left()
