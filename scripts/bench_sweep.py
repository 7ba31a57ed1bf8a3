"""How long 200 ways of steering take as one batch, and one after the other.

    python scripts/bench_sweep.py [--specs 200] [--tokens 16] [--json out.json]

SmolLM2 in float32 on CPU answers one prompt under each spec: a vector of its own added at one layer, strong enough to change
texts. Both ways run the same requests on the same engine, after a few that warm up; prefix caching is off, so that nothing is
spared. The tokens are compared: a batch must not change what a request says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

PROMPT = "The old man opened the door and"
LAYER, LENGTH = 14, 60.0


def specs(count: int, width: int) -> list[Any]:
    import torch

    from steercap import Add, SteeringSpec

    found = []
    for seed in range(count):
        drawn = torch.randn(width, generator=torch.Generator().manual_seed(seed))
        found.append(SteeringSpec([Add(LENGTH * drawn / drawn.norm(), layer=LAYER)]))
    return found


def tokens_of(raws: list[Any]) -> list[list[int]]:
    return [list(raw.output.outputs[0].token_ids) for raw in raws]


async def measure(model: Any, count: int, tokens: int) -> dict[str, Any]:
    """What is printed, of a model without prefix caching."""
    params = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    every = specs(count, model.hidden_size)
    warm = specs(count + 8, model.hidden_size)[count:]
    await model.generate([PROMPT] * len(warm), params, steering=warm)

    start = time.perf_counter()
    together = await model.run([PROMPT] * count, params, steering=every)
    batch = time.perf_counter() - start

    start = time.perf_counter()
    alone = [await model.run(PROMPT, params, steering=spec) for spec in every]
    serial = time.perf_counter() - start
    clean = await model.run(PROMPT, params, steering=None)
    equal = sum(a == b for a, b in zip(tokens_of(together), tokens_of(alone), strict=True))
    changed = sum(said != tokens_of([clean])[0] for said in tokens_of(together))
    return {
        "specs": count,
        "tokens": tokens,
        "one batch, s": round(batch, 2),
        "one after the other, s": round(serial, 2),
        "times faster": round(serial / batch, 2),
        "same tokens": equal,
        "other than without steering": changed,
        "different texts": len({tuple(said) for said in tokens_of(together)}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    arguments = parser.parse_args()

    async def run() -> dict[str, Any]:
        from steercap import SteerModel
        from steercap.lab.demo import smollm2

        async with SteerModel(smollm2(), preset="cpu", enable_prefix_caching=False, use_tqdm_on_load=False) as model:
            return await measure(model, arguments.specs, arguments.tokens)

    found = json.dumps(asyncio.run(run()), indent=1)
    print(found)
    if arguments.json:
        arguments.json.write_text(found)


if __name__ == "__main__":
    main()
