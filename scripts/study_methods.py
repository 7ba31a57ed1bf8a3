"""Trained vectors beside differences of means, a system prompt and controls: which shows a trait, at what cost?

    python scripts/study_methods.py --vectors FOLDER [--out out/study_methods] [--traits poetic,formal,optimistic]

SmolLM2-135M-Instruct in float32 on CPU. FOLDER holds, for each trait, TRAIT.safetensors, a trained SteeringSpec, and
TRAIT.difference.safetensors, the difference of means of the same answers; what is missing is left out, and may come later:
the folder of the study takes further methods. The questions below are of no trait's own; nothing was made from them or
chosen with them. The score is that of the classifier "minilm", which knows the trait's example sentences, none of these questions,
and no text of this model. Stopped half-way it goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

QUESTIONS = (
    "What is a river?",
    "How should I spend a free Sunday?",
    "Why do we have holidays?",
    "What happens when the power goes out?",
    "How do clocks work?",
    "What is it like to move house?",
    "Should I keep a diary?",
    "What do you think about growing vegetables on a balcony?",
    "How will our town change in ten years?",
    "Why do people like old photographs?",
    "What can I do on a rainy evening?",
    "What should I know about dogs?",
)
TRAITS = ("poetic", "formal", "optimistic")
#: Factors on each vector: a trained one was trained for 1, and the others ask what more of it does; a difference of means has no such dose.
TRAINED, DIFFERENCE, DRAWN = (1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0), (2.0, 4.0)
LAYER = 14
#: Methods are compared where plain prose is this many times as surprising as without steering.
DEARER = 1.5
SAMPLING = {"max_tokens": 40, "temperature": 0.0}


def methods_of(trait: Any, folder: Path) -> list[Any]:
    """What is compared for one trait, of what is there."""
    from steercap import SteeringSpec
    from steercap.lab.studies.evaluation import Method
    from steercap.steering import DirectionSet

    found = [Method(name="prompt", system=trait.positive[0])]
    if (path := folder / f"{trait.name}.difference.safetensors").exists():
        vectors = DirectionSet.load(path)[trait.name]
        one = Method(name="difference", steering=vectors, layers=[LAYER], doses=DIFFERENCE, tokens="all")
        found += [one, *(dataclasses.replace(control, doses=DRAWN) for control in one.random(2))]
    if (path := folder / f"{trait.name}.safetensors").exists():
        found.insert(1, Method(name="trained", steering=SteeringSpec.load(path), doses=TRAINED))
    return found


async def run(out: Path, folder: Path, names: list[str], *, draw: bool) -> dict[str, Any]:
    """The results by trait; all in one folder, which has the answers without steering once."""
    from steercap import Progress, SteerModel
    from steercap.lab.demo import smollm2
    from steercap.lab.measures.score import Score
    from steercap.lab.personas import shipped_traits
    from steercap.lab.studies.evaluation import Choices, Evaluation, Passages, evaluate, read_results

    found, begun = {}, time.monotonic()

    def tell(at: Progress) -> None:
        if at.done % 50 == 0 or at.done == at.total:
            print(f"{time.monotonic() - begun:6.0f} s  {at}", flush=True)

    asked = {
        name: Evaluation(
            methods=methods_of(shipped_traits()[name], folder), questions=QUESTIONS, sampling_params=SAMPLING
        )
        for name in names
    }
    tasks = [Passages(first=6), Choices(first=12)]
    measures: dict[str, list[Any]] = {
        name: [Score(name), "perplexity", "repetition", "refusal", "length"] for name in names
    }
    if draw:
        return {name: read_results(asked[name], out=out, measures=measures[name], tasks=tasks) for name in names}
    async with SteerModel(smollm2(), preset="cpu", max_model_len=512, use_tqdm_on_load=False) as model:
        for name in names:
            found[name] = await evaluate(
                model, asked[name], out=out, measures=measures[name], tasks=tasks, progress=tell
            )
    return found


def report(results: dict[str, Any], out: Path) -> None:
    """Every dose; every method where it costs the same; differences there, adjusted for all of all traits."""
    from steercap.lab.studies.evaluation import corrected
    from steercap.lab.studies.evaluation.tables import compared_markdown, matched_markdown

    compared = []
    for name, one in results.items():
        one.save_summary(out / f"{name}.parquet")
        at = cost_of(one)
        print(f"\n## {name}\n\n{one.markdown()}\n\nWhere neutral perplexity is {at:.1f}, {DEARER} times the plain:\n")
        print(matched_markdown(one.matched(at=at), one.columns))
        for against in ("difference", "prompt"):
            compared += one.compare_matched(name, against=against, at=at)
    print(f"\n## Differences there\n\n{compared_markdown(corrected(compared))}")


def cost_of(results: Any) -> float:
    """The neutral perplexity at which methods are compared."""
    return DEARER * float(next(line.means["neutral"].value for line in results.summary() if line.method == "none"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/study_methods"))
    parser.add_argument("--traits", default=",".join(TRAITS))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    parser.add_argument("--draw", action="store_true", help="of what is there, without an engine")
    arguments = parser.parse_args()
    names = arguments.traits.split(",")
    results = asyncio.run(run(arguments.out, arguments.vectors, names, draw=arguments.draw))
    report(results, arguments.out)

    from steercap.lab.studies.evaluation.plots import plot_methods

    columns = {name: [name, "perplexity", "choices", "repetition"] for name in names}
    at = {name: cost_of(one) for name, one in results.items()}
    print(plot_methods(results, arguments.out / "methods.png", columns=columns, by="neutral", at=at))


if __name__ == "__main__":
    main()
