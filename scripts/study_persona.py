"""Persona vectors of SmolLM2 on a CPU, from nothing to a report, as JSON lines: `python scripts/study_persona.py --out out/persona`.

The second run reads the same answers without their system prompts: what is lost there was the prompt, not the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import msgspec

from steercap import Progress, SteerModel
from steercap.lab.demo import smollm2
from steercap.lab.personas import PersonaSettings, run_persona

#: Traits of tone, which a model of 135 million parameters may show. In a trial of 24 answers each, chosen on no other
#: data, the score told prompts apart with an AUC of 0.81, 0.83 and 0.88 (evil 0.83, hallucinating 0.75, humorous 0.72,
#: optimistic 0.60; apathetic, anxious and sycophantic below 0.5).
TRAITS = ("formal", "poetic", "impolite")


async def main(out: Path, traits: tuple[str, ...]) -> None:
    begun = time.monotonic()
    async with SteerModel(smollm2(), preset="cpu") as model:
        print(json.dumps({"start_s": round(time.monotonic() - begun, 1)}), flush=True)
        settings = PersonaSettings.small(*traits)
        for reading in (settings, msgspec.structs.replace(settings, read_system=False)):
            times: dict[str, list[float]] = {}

            def tell(report: Progress, times: dict[str, list[float]] = times) -> None:
                times.setdefault(report.stage, []).append(time.monotonic())

            since = time.monotonic()
            result = await run_persona(model, reading, out, progress=tell)
            told = {
                "read_system": reading.read_system,
                "seconds": round(time.monotonic() - since, 1),
                "stages_s": {stage: round(at[-1] - at[0], 1) for stage, at in times.items()},
                "outcomes": msgspec.to_builtins(result.outcomes),
                "auc": {
                    name: [round(value, 3) for value in auc.values()]
                    for name, auc in result.directions.provenance.auc.items()
                },
            }
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--traits", nargs="+", default=TRAITS)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.out, tuple(arguments.traits)))
