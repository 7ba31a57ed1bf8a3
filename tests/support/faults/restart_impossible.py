"""The engine is killed, and cannot be started again."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from steercap.errors import EngineDied
from steercap.testing import tiny_checkpoint
from support.faults.base import LONG, Fault, Outcome, kill, processes, prompts, told
from support.faults.deaths import KILLED
from support.rows import TINY_ENGINE


async def inject(folder: Path) -> list[Outcome]:
    """Kill the engine of a model whose checkpoint is gone by then."""
    from steercap.model import SteerModel

    path = shutil.copytree(tiny_checkpoint("qwen3"), folder / "model")
    async with SteerModel(path, restart=True, **TINY_ENGINE) as model:
        shutil.rmtree(path)
        kill(processes(model, "EngineCore")[0])
        began = time.monotonic() + 12  # what the tries wait for
        first = await told("generate", model.generate(prompts(2), LONG), began, EngineDied, *KILLED, "failed 3 times")
        after = await told(
            "generate, afterwards", model.generate([3, 4]), time.monotonic(), EngineDied, "failed 3 times"
        )
    return [first, after]


MEMBER = Fault(
    title="the engine core killed, with `restart=True`, and the checkpoint gone",
    how="SIGKILL after the folder of the model was removed",
    must="three tries, then `EngineDied` with both causes, at once for whoever asks afterwards",
    inject=inject,
)
