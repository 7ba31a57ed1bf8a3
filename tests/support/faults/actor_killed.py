"""Actors of Ray's are killed while they collect."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from steercap.core.extras import extra
from steercap.errors import CollectionStopped
from steercap.lab.datasets.collecting import RayActors, collect
from steercap.testing import tiny_checkpoint
from support.faults.base import BOUND, COLLECTED, Fault, Outcome, opened, prompts, said
from support.folders import digests
from support.rows import TINY_ENGINE

if TYPE_CHECKING:
    import psutil

#: Engines of two actors share the cores, whichever they are.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def missing() -> str:
    """It needs Ray."""
    return "" if importlib.util.find_spec("ray") else "Ray is not installed"


async def inject(folder: Path) -> list[Outcome]:
    """Kill one of two actors as often as shards come; then one that may not be started again."""
    with extra("ray"):
        import ray

    corpus = prompts(160, 30)
    async with opened() as model:
        await collect(model, corpus, folder / "alone", **COLLECTED)
    os.environ |= {**_ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    try:
        return [await _again(corpus, folder), await _for_good(corpus, folder / "once")]
    finally:
        ray.shutdown()


async def _again(corpus: list[list[int]], folder: Path) -> Outcome:
    collecting = asyncio.create_task(_collected(corpus, folder / "ray", RayActors(2, max_task_retries=-1)))
    moments = (1, 4, 7)
    for shards in moments:
        await _killed(folder / "ray", shards, collecting)
    await collecting
    assert digests(folder / "ray") == digests(folder / "alone")
    return Outcome(
        f"collect, of whose actors {len(moments)} were killed", "started again; the data set of one engine, bit for bit"
    )


async def _for_good(corpus: list[list[int]], folder: Path) -> Outcome:
    collecting = asyncio.create_task(_collected(corpus, folder, RayActors(1, max_restarts=0, max_task_retries=0)))
    began = await _killed(folder, 1, collecting)
    try:
        await collecting
    except CollectionStopped as error:
        took = time.monotonic() - began
        assert took < 2 * BOUND, f"told after {took:.1f} s"
        return Outcome("collect with `max_restarts=0`", said(error), took)
    raise AssertionError("it went on without its actor")


async def _collected(corpus: list[list[int]], folder: Path, spread: RayActors) -> None:
    from steercap.model import SteerModel

    model = SteerModel(str(tiny_checkpoint("qwen3")), **TINY_ENGINE)
    await collect(model, corpus, folder, ray=spread, **COLLECTED)


async def _killed(folder: Path, shards: int, collecting: asyncio.Task[None]) -> float:
    """Kill an actor once there are so many shards; returns when that was."""
    with extra("cpu", "cuda"):
        import psutil

    while len([*folder.glob("shards/*.json")]) < shards:
        assert not collecting.done(), "the corpus ended before the kill"
        await asyncio.sleep(0.02)
    while True:
        for process in actors():
            with suppress(psutil.NoSuchProcess):
                process.kill()
                return time.monotonic()
        await asyncio.sleep(0.02)


def actors() -> list[psutil.Process]:
    """The processes of actors that collect for this one; others may collect on this machine."""
    with extra("cpu", "cuda"):
        import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "ray::CollectingActor" in " ".join(process.cmdline()):
                found.append(process)
    return found


MEMBER = Fault(
    title="an actor of Ray's killed",
    how="SIGKILL to one of two actors each time shards have come; then to the only one, which Ray may not start again",
    must="Ray starts it again, and the data set is that of one engine, bit for bit; where it may not, "
    "`CollectionStopped` that says what to do",
    inject=inject,
    missing=missing,
)
