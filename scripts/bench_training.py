"""What it costs to train K traits at once, against K times one: seconds a step, on SmolLM2 or any checkpoint.

    python scripts/bench_training.py                       # 1, 8 and 32 traits, on CPU with two threads
    python scripts/bench_training.py --model Qwen/Qwen3-8B --dtype bfloat16 --device cuda --traits 1,8,32,128

A step is one pass forward and back of all traits' examples, and a step of each trait's optimiser. Sizes take turns, so
that a machine that others use is as busy for one as for the other; medians are shown, and the quartiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from steercap.lab.demo import smollm2
from steercap.lab.training import OBJECTIVES, HookedModel, TrainableAdd, TrainingSettings
from steercap.lab.training.batches import Picked, collated, generator
from steercap.lab.training.examples import ExampleTokens
from steercap.lab.training.loop import TraitInTraining
from steercap.lab.training.settings import Penalties
from steercap.lab.training.steered import SteeredTraits
from steercap.lab.training.trainable import TrainableSpec


@dataclass
class Bench:
    """Traits that are trained together.

    Args:
        model: the frozen model.
        count: how many.
        args: of the command line.
    """

    model: HookedModel
    count: int
    args: argparse.Namespace

    def __post_init__(self) -> None:
        settings = TrainingSettings(batch_size=self.args.batch_size)
        layers = len(self.model.layers)
        specs = [self._spec(number, layers) for number in range(self.count)]
        self.traits = [TraitInTraining(str(number), spec, [], [], settings) for number, spec in enumerate(specs)]
        self.module = SteeredTraits(self.model, specs, OBJECTIVES["likelihood"], Penalties(), 1.0)
        found = [
            (Picked(t, 0, None), (self._tokens(t, e),)) for t in range(self.count) for e in range(self.args.batch_size)
        ]
        self.batch = collated(found, self.module.selections, self.model.device)

    def step(self) -> float:
        """Seconds of a step."""
        started = time.perf_counter()
        for trait in self.traits:
            trait.spec.zero_grad()
        loss, _ = self.module(self.batch, self.args.batch_size)
        loss.backward()
        for trait in self.traits:
            trait.step()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _spec(self, number: int, layers: int) -> TrainableSpec:
        start = TrainableAdd(layers=[layers // 2]).spec(self.model.width, layers, generator("bench", number))
        spec: TrainableSpec = TrainableSpec(start).to(self.model.device)
        return spec

    def _tokens(self, trait: int, example: int) -> ExampleTokens:
        drawn = random.Random(1000 * trait + example)
        known = min(5000, self.model.model.config.get_text_config().vocab_size)
        ids = tuple(drawn.randrange(3, known) for _ in range(self.args.tokens))
        return ExampleTokens(ids, self.args.tokens // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--traits", default="1,8,32")
    parser.add_argument("--batch-size", type=int, default=1, help="examples of each trait in a step")
    parser.add_argument("--tokens", type=int, default=32, help="of an example, half of them the prompt's")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = HookedModel(args.model or smollm2(), getattr(torch, args.dtype), device=args.device)
    benches = [Bench(model, int(count), args) for count in args.traits.split(",")]
    for bench in benches:
        bench.step()
    seconds: dict[int, list[float]] = {bench.count: [] for bench in benches}
    for _ in range(args.repeats):
        for bench in random.sample(benches, len(benches)):
            seconds[bench.count].append(bench.step())
    report(seconds, benches[0].count, args)


def report(seconds: dict[int, list[float]], first: int, args: Any) -> None:
    """Print a table in Markdown."""
    print(
        f"{args.batch_size} x {args.tokens} tokens a trait, {args.repeats} repeats, {args.device}, {args.threads} threads\n"
    )
    print("| traits at once | seconds a step (quartiles) | a trait's share | of one alone |")
    print("|---|---|---|---|")
    alone = statistics.median(seconds[first]) / first
    for count, found in seconds.items():
        median = statistics.median(found)
        low, _, high = statistics.quantiles(found, n=4) if len(found) > 1 else (median, median, median)
        share = median / count
        print(f"| {count} | {median:.3f} ({low:.3f}..{high:.3f}) | {share:.3f} | {100 * share / alone:.0f} % |")


if __name__ == "__main__":
    main()
