"""What steering costs: plain vLLM, steercap idle, one layer, all layers; and 1, 8, 64 different specs in one batch.

    python scripts/bench_steering.py [--repeats 7] [--eager] [--json out.json]

Three engines serve SmolLM2-135M in turn, so that the machine's mood hits all alike: plain vLLM, steercap, and steercap
with 8 slots only, where 64 specs must wait for each other. Each repetition runs every variant once, in random order.
Times are wall time until the texts are there, receipts checked. Percentages are the median of the ratios to plain vLLM
in the same repetition; spread is half the distance between the quartiles. Every steered request is steered at every
token; prefix caching is off, so that nothing is spared.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench_capture import ENGINE_ARGS, arguments, plain_run, prompts, sampling, spread

WORKLOADS = {"1x(32+48)": (1, 32, 48), "64x(32+16)": (64, 32, 16), "8x(256+1)": (8, 256, 1)}
WIDTH, LAYERS, SLOTS = 576, 30, 8


def specs(operation: str, layers: Any, different: int) -> list[Any]:
    """Specs with vectors of their own, too weak to end a sentence early."""
    import torch

    from steercap import Add, Cap, LowRank, SteeringSpec

    def one(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        v = torch.randn(WIDTH, generator=generator)
        match operation:
            case "add":
                return SteeringSpec([Add(v, 0.01, layers=layers)])
            case "cap":
                return SteeringSpec([Cap(v, low=-5.0, high=5.0, layers=layers)])
            case "rank 8":
                read, write = (torch.randn(8, WIDTH, generator=generator) * 1e-3 for _ in range(2))
                return SteeringSpec([LowRank(read, write, layers=layers)])
        raise ValueError(operation)

    return [one(seed) for seed in range(different)]


def variants(count: int) -> dict[str, list[Any] | None]:
    """The specs of each variant for a workload of `count` requests; None is no steering."""
    found: dict[str, list[Any] | None] = {
        "idle": None,
        "add, one layer": specs("add", [15], 1),
        "add, all layers, K=1": specs("add", "all", 1),
        "cap, all layers, K=1": specs("cap", "all", 1),
        "rank 8, all layers, K=1": specs("rank 8", "all", 1),
    }
    found |= {f"add, all layers, K={k}": specs("add", "all", k) for k in (8, 64) if k <= count}
    found |= {f"cap, all layers, K={k}": specs("cap", "all", k) for k in (8, 64) if k <= count}
    return found


async def steered_run(model: Any, tokens: list[list[int]], generated: int, chosen: list[Any] | None) -> float:
    """Wall seconds; every request's receipt is compared with what its spec demands, inside."""
    steering = None if chosen is None else [chosen[place % len(chosen)] for place in range(len(tokens))]
    start = time.perf_counter()
    await model.generate(tokens, sampling(generated), steering=steering)
    return time.perf_counter() - start


async def compare(
    plain: Any, model: Any, narrow: Any, repeats: int, count: int, length: int, generated: int
) -> dict[str, list[float]]:
    """Wall times of every variant on one workload, in turn."""
    asked = variants(count)
    runs: dict[str, Callable[[list[list[int]]], Any]] = {
        "plain vLLM": lambda tokens: plain_run(plain, tokens, generated)
    }
    for name, chosen in asked.items():
        runs[name] = partial(steered_run, model, generated=generated, chosen=chosen)
    if count >= 64:
        wide = asked["add, all layers, K=64"]
        runs[f"add, all layers, K=64, {SLOTS} slots"] = lambda tokens: steered_run(narrow, tokens, generated, wide)
    walls: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):  # the first warms up
        tokens = prompts(count, length, repeat)
        order = list(runs)
        random.Random(repeat).shuffle(order)
        for name in order:
            wall = await runs[name](tokens)
            if repeat:
                walls[name].append(wall)
    return walls


def show(name: str, walls: dict[str, list[float]]) -> None:
    """Print one workload."""
    print(f"\n{name}")
    for variant, values in walls.items():
        ratio = statistics.median(value / plain for value, plain in zip(values, walls["plain vLLM"], strict=True))
        print(f"  {variant:32s} {statistics.median(values):7.3f} s ±{spread(values):.3f}  {100 * (ratio - 1):+6.2f} %")
    print(end="", flush=True)


def kernel_times() -> dict[str, float]:
    """Microseconds of one point for 64 tokens of 1, 8 and 64 slots: the reference kernel by itself."""
    import numpy as np
    import torch

    from steercap.core.schema import PointSchema
    from steercap.core.spec import Point
    from steercap.steering.lowering import lower
    from steercap.worker.step import BatchRows, Step
    from steercap.worker.taps import Installed, TapSizes
    from steercap.worker.taps.host import HostTaps

    found = {}
    point, schema = Point(0, "resid_post"), PointSchema((WIDTH,), "float32")
    for different in (1, 8, 64):
        taps = HostTaps(Installed((0,), (schema,), (False,)), TapSizes(slots=64, bank_rows=64, entries=16, tokens=64))
        for slot, spec in enumerate(specs("cap", [0], different)):
            ready = lower(spec, armed={point: 0}, schemas={point: schema}, num_layers=1, edits_per_point=16)
            (data,) = ready.vectors.values()
            taps.put([slot], torch.frombuffer(bytearray(data), dtype=torch.float32)[None])
            taps.configure(slot, ready.configuration, [[slot]])
        tokens, none = np.arange(64), np.full(64, -1)
        slots, masks = tokens // (64 // different), np.ones(64, dtype=np.int32)
        edits = taps.programs.checksums(slots, masks)
        step = Step.of(
            taps.layouts, requests=slots, tokens=tokens, positions=tokens, firsts=tokens, lines=none, accumulators=none,
            layouts=none, slots=slots, masks=masks, edits=edits,
        )  # fmt: skip
        ids = torch.from_numpy(tokens)
        hidden, residual, place = torch.randn(64, WIDTH), torch.randn(64, WIDTH), torch.zeros(1, dtype=torch.int32)
        with torch.inference_mode():
            taps.open(step, BatchRows(["all"], tokens[:1], tokens[-1:] + 1, len(tokens), ids, ids), None)
            best = float("inf")
            for _ in range(7):
                start = time.perf_counter()
                for _ in range(300):
                    taps.on_tap(hidden, residual, place, 0)
                best = min(best, (time.perf_counter() - start) / 300)
        found[f"K={different}"] = best * 1e6
    return found


async def main(repeats: int, *, eager: bool, out: Path | None) -> None:
    """Run everything and print the tables."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from steercap import SteerModel
    from steercap.lab.demo import smollm2

    results: dict[str, Any] = {"eager": eager, "repeats": repeats, "kernel": kernel_times()}
    print(
        "one point, 64 tokens, cap:", {name: f"{time:.0f} µs" for name, time in results["kernel"].items()}, flush=True
    )
    path = str(smollm2())
    arguments = {**ENGINE_ARGS, "enforce_eager": eager}
    plain = AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, **arguments))
    try:
        async with (
            SteerModel(path, **arguments) as model,
            SteerModel(path, steering_slots=SLOTS, **arguments) as narrow,
        ):
            for name, shape in WORKLOADS.items():
                results[name] = await compare(plain, model, narrow, repeats, *shape)
                show(name, results[name])
    finally:
        plain.shutdown()
    if out:
        out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    args = arguments(__doc__, repeats=7)
    asyncio.run(main(args.repeats, eager=args.eager, out=args.json))
