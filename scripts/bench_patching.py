"""How long a grid of activation patching takes in one call, and one run after the other; and whether effects are those of hooks.

    python scripts/bench_patching.py [--layers 24] [--pairs 8] [--alone 200] [--check 2] [--json out.json]

SmolLM2 in float32 on CPU, on pairs of 16 tokens from the task of indirect objects: each layer, 2 sites, each position. Runs
one after the other are a sample of the same runs, evenly spread over the grid, scaled to all of them. Of `--check` pairs
every value is compared with transformers, where hooks put the same rows in place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import beside_tests  # noqa: F401 -- support is there
import numpy as np

SITES = ("resid_pre", "attn_out")
NAMES = (("Mary", "John"), ("Anna", "Mark"), ("Sarah", "Tom"), ("Kate", "Paul"), ("Alice", "Bob"), ("Emma", "David"))
THINGS = ("drink", "book", "ring", "letter")


def pairs(tokenizer: Any, count: int, length: int) -> list[tuple[list[int], list[int], tuple[str, str]]]:
    """Clean prompt, corrupted prompt, and the two answers, of pairs of so many tokens."""
    found = []
    for thing in THINGS:
        for one, other in (pair[::step] for pair in NAMES for step in (1, -1)):
            text = "Then, when {} and {} went to the shop, {} gave a {} to"
            clean, corrupted = (tokenizer.encode(text.format(one, other, giver, thing)) for giver in (other, one))
            if len(clean) == len(corrupted) == length:
                found.append((clean, corrupted, (f" {one}", f" {other}")))
    assert len(found) >= count, f"{len(found)} pairs of {length} tokens"
    return found[:count]


async def measure(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What the table says, of SmolLM2 with both sites armed."""
    from steercap.lab.mechanism.patching import Grid, LogitDifference, patch

    chosen = pairs(model.tokenizer, options.pairs, options.tokens)
    clean, corrupted, answers = map(list, zip(*chosen, strict=True))
    metric, grid = LogitDifference(answers), Grid(layers=range(options.layers), sites=SITES)
    one, first = LogitDifference(answers[:1]), (model, clean[:1], corrupted[:1])
    await patch(*first, Grid(layers=[0], sites=SITES), metric=one)  # warms up
    start = time.perf_counter()
    effects = await patch(model, clean, corrupted, grid, metric=metric, concurrency=options.concurrency)
    together = time.perf_counter() - start
    stats = await model.stats()
    layers = range(0, options.layers, max(options.layers * options.tokens * len(SITES) // options.alone, 1))
    few = Grid(layers=layers, sites=SITES)
    start = time.perf_counter()
    alone = await patch(*first, few, metric=one, concurrency=1)
    each = (time.perf_counter() - start) / len(alone)
    worst, most = compared(model.tokenizer, effects, chosen[: options.check]) if options.check else (None, None)
    again = [effects.where(pair=0, layer=one.layer, site=one.site, position=one.position) for one in alone.records]
    apart = np.max([abs(one.value - same.records[0].value) for one, same in zip(alone.records, again, strict=True)])
    return {
        "runs": len(effects),
        "in one call, s": together,
        "runs a second": len(effects) / together,
        "alone, runs": len(alone),
        "alone, s a run": each,
        "alone, scaled to all, s": each * len(effects),
        "alone against together, worst value": apart,
        "against hooks, worst value": worst,
        "against hooks, greatest difference that a patch made": most,
        "vector bytes sent": stats.vector_bytes_sent,
        "steps": stats.steps,
    }


def compared(tokenizer: Any, effects: Any, chosen: list[Any]) -> tuple[float, float]:
    """The greatest difference of any value from transformers with hooks, and the greatest that a patch made."""
    from support.patching import Hooked

    from steercap.lab.demo import smollm2
    from steercap.lab.mechanism.patching.metrics import token_id

    hooked, worst, most = Hooked(smollm2()), 0.0, 0.0
    for pair, (clean, corrupted, answers) in enumerate(chosen):
        right, wrong = (token_id(tokenizer, answer) for answer in answers)
        own = effects.where(pair=pair)
        places = list(dict.fromkeys((one.layer, one.site) for one in own.records))
        rows = hooked.run(clean, keep=places).rows
        for place in places:
            found = own.where(layer=place[0], site=place[1]).records
            each = [(None, [one.position]) for one in found]
            expected = hooked.patched(corrupted, place, rows[place][0], each).difference(right, wrong)
            worst = np.max([worst, *(abs(one.value - value) for one, value in zip(found, expected, strict=True))])
            most = max(most, *(abs(one.difference) for one in found))
    return worst, most


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("layers", 24),
        ("pairs", 8),
        ("tokens", 16),
        ("alone", 200),
        ("check", 2),
        ("concurrency", 256),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    async def run() -> dict[str, Any]:
        from steercap import SteerModel
        from steercap.lab.demo import smollm2

        async with SteerModel(smollm2(), preset="cpu", sites=SITES) as model:
            return await measure(model, options)

    found = asyncio.run(run())
    for name, value in found.items():
        print(f"{name:55s} {value:.6g}" if isinstance(value, float) else f"{name:55s} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
