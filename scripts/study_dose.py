"""Does a dose of "optimistic" make answers more optimistic, and do random vectors of the same norm?

    python scripts/study_dose.py [--out out/study_dose]

SmolLM2-135M-Instruct in float32 on CPU. The direction is the difference of means between the trait's example sentences and
their opposites, given as answers. Layer and scales were chosen on six of the trait's own questions (`--choose` runs that sweep);
the questions below were written afterwards and used for nothing else. The score is that of the classifier "minilm", which knows the
trait's example sentences, none of these questions, and no text of this model; perplexity is that of the steered text without steering.
Stopped half-way it goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

QUESTIONS = (
    "My company is merging with another one. What will change?",
    "I am going to learn Spanish this year. Any thoughts?",
    "How will cities look when I am old?",
    "My son wants to become a musician. What should I think of that?",
    "I planted an apple tree yesterday. What comes next?",
    "Our football team has a new coach. How will the season go?",
    "I am seventy and want to travel alone. What do you say?",
    "What will become of our small village?",
    "My neighbour wants to start a newspaper. Will it work?",
    "I have to give a speech next week. How will it be?",
)
CHOSEN: dict[str, Any] = {"layers": (20,), "scales": (-3, -2, -1, 0, 1, 2, 3), "random": 20}
TRIED: dict[str, Any] = {"layers": (8, 12, 16, 20), "scales": (-6, -4, -2, 0, 2, 4, 6), "random": 0}


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


async def run(out: Path, *, choose: bool) -> dict[str, Any]:
    from steercap import SteerModel
    from steercap.lab.demo import smollm2
    from steercap.lab.directions import Exchange, extract
    from steercap.lab.measures.score import Score
    from steercap.lab.personas import shipped_traits
    from steercap.lab.studies.sweeps import Sweep, run_sweep

    trait = shipped_traits()["optimistic"]
    before = asked("What do you think?")
    questions = trait.questions[-6:] if choose else QUESTIONS
    async with SteerModel(smollm2(), preset="cpu", use_tqdm_on_load=False) as model:
        directions = await extract(
            model,
            [Exchange(before, text) for text in trait.examples.positive],
            [Exchange(before, text) for text in trait.examples.negative],
            name=trait.name,
            seed=1,
        )
        sweep = Sweep(
            vectors=directions,
            prompts=[asked(question) for question in questions],
            tokens="generated",
            sampling_params={"max_tokens": 32, "temperature": 0.0},
            **(TRIED if choose else CHOSEN),
        )
        results = await run_sweep(model, sweep, out=out, measures=[Score(trait), "perplexity", "repetition"])
    results.plot(out / "dose.png")
    return {
        f"layers {one.condition.layers}, scale {one.condition.scale:g}": {
            measure: described(next(e for e in results.effects(measure) if e.condition == one.condition))
            for measure in results.values
        }
        for one in results.effects(trait.name)
    }


def described(effect: Any) -> dict[str, Any]:
    return {
        "steered": round(effect.steered.value, 2),
        "standard error": round(effect.steered.error, 2),
        "plain": round(effect.plain.value, 2),
        "random": [round(f(effect.random), 2) for f in (min, max)] if effect.random else None,
        "outside, ranges": round(effect.outside, 2),
        "deviations": round(effect.deviations, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/study_dose"))
    parser.add_argument("--choose", action="store_true", help="the sweep that layer and scales were chosen with")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(run(arguments.out, choose=arguments.choose)), indent=1))


if __name__ == "__main__":
    main()
