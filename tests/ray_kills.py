"""A collection on two of Ray's actors, whose processes are killed at random moments: `python ray_kills.py FOLDER KILLS SEED`.

Each kill is SIGKILL to the process of an actor, at any moment of its life: while it starts, runs, writes, or starts
again. `test_many.py` compares the data set with that of one engine in one process, bit for bit.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from support.faults.actor_killed import actors
from support.faults.base import COLLECTED
from support.rows import TINY_ENGINE

from steercap import Progress, SteerModel
from steercap.lab.datasets.collecting import RayActors, collect
from steercap.lab.datasets.collecting.collection import Collected
from steercap.testing import tiny_checkpoint

ACTORS: dict[str, Any] = {"num_cpus": 1, "max_task_retries": -1}
#: Of Ray where it starts here: little memory, no pages; it counts cores and does not bind them.
RAY: dict[str, Any] = {"address": "local", "num_cpus": 4, "object_store_memory": 80 << 20, "include_dashboard": False}
#: Of every engine: sums in the same order, and cores that others use too.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def corpus(documents: int = 960) -> list[str]:
    """Texts of all lengths."""
    rng = random.Random(7)
    return ["".join(rng.choices("abcdefgh ", k=rng.randrange(1, 240))) for _ in range(documents)]


def corpus_of(kills: int) -> list[str]:
    """Texts enough for so many kills; without any, more than a source gives at a time."""
    return corpus(960 if kills else 96)


def a_model() -> SteerModel:
    """The model that every machine opens."""
    return SteerModel(str(tiny_checkpoint("qwen3")), **TINY_ENGINE)


async def killed(folder: Path, kills: int, seed: int) -> None:
    """Kill an actor a random moment after each time that shards have come, whether it is the one that made them or is
    starting again.
    """
    rng, before = random.Random(seed), 0
    for number in range(kills):
        while not (found := actors()) or shards(folder) <= before:
            await asyncio.sleep(0.05)
        await asyncio.sleep(rng.uniform(0, 1))
        before, victim = shards(folder), rng.choice(found)
        with suppress(psutil.NoSuchProcess):
            victim.kill()
        print(f"kill {number + 1} of {kills}: actor {victim.pid} of {len(found)}, {before} shards", flush=True)


def shards(folder: Path) -> int:
    """How many there are."""
    return len(list(folder.glob("shards/*.json")))


def said(progress: Progress) -> None:
    """Say how far it is."""
    print(progress, flush=True)


async def on_ray(folder: Path, texts: list[str], kills: int, seed: int) -> Collected:
    """Collect by two actors, with kills; by one without."""
    killing = asyncio.create_task(killed(folder, kills, seed))
    try:
        return await collect(
            a_model(), texts, folder, ray=RayActors(2 if kills else 1, **ACTORS), progress=said, **COLLECTED
        )
    finally:
        assert killing.done() or not kills, "the corpus ended before the last kill"
        killing.cancel()


def main() -> None:
    """Collect into the folder."""
    import ray

    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ |= {**ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_AUTH_MODE"] = "disabled"  # or a token stays in the user's home
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 -- its name; or they stand behind whatever else runs on the machine
    ray.init(log_to_driver=False, **RAY)
    began = time.monotonic()
    done = asyncio.run(on_ray(folder, corpus_of(kills), kills, seed))
    print(done, f"{time.monotonic() - began:.0f} s", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
