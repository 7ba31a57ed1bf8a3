"""A run from traits to vectors that kills itself: `python persona_run.py FOLDER STAGE DONE`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from steercap import Progress, SteerModel
from steercap.lab.demo import smollm2
from steercap.lab.personas import PersonaSettings, run_persona

#: One trait, four questions, eight tokens, every answer kept: forty requests. What is kept says nothing of the trait.
SETTINGS = PersonaSettings(
    traits=("poetic",),
    samples=1,
    n_questions=4,
    max_tokens=8,
    concurrency=12,
    threshold_high=0.0,
    threshold_low=100.0,
    min_kept=2,
)


async def main(folder: str, stage: str, done: int) -> None:
    def kill(report: Progress) -> None:
        if report.stage == stage and report.done >= done:
            os.kill(os.getpid(), signal.SIGKILL)

    async with SteerModel(smollm2(), preset="cpu") as model:
        await run_persona(model, SETTINGS, folder, progress=kill)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
