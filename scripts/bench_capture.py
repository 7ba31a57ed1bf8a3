"""What capture costs: plain vLLM, steercap idle, one layer, all layers, in codecs; and batch fetch against one by one.

    python scripts/bench_capture.py [--repeats 7] [--eager] [--json out.json]

Three engines, plain vLLM twice and steercap, serve SmolLM2-135M in turn in one process group, so that the machine's
mood hits all alike; each repetition runs every variant once, in random order. The second plain engine is the control:
what it differs by from the first is what this machine cannot tell. Times are wall time until the texts are there;
captures are then fetched, timed apart. Percentages are the median of the ratios to the mean of both plain engines
in the same repetition; spread is half the distance between the quartiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORKLOADS = {"1x(32+48)": (1, 32, 48), "16x(64+16)": (16, 64, 16), "8x(256+1)": (8, 256, 1)}
#: What is captured, by the name of the variant; None for nothing.
CAPTURES: dict[str, dict[str, Any] | None] = {
    "idle": None,
    "one layer": {"layers": [15]},
    "all layers": {},
    "all, full8": {"codec": "full8"},
    "all, int4": {"codec": "int4"},
    "all, rp8": {"codec": "rp8", "codec_k": 128},
}
VARIANTS = ("plain vLLM", "plain again", *CAPTURES)
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 256 << 20,
    "enable_prefix_caching": False,
}


def prompts(count: int, length: int, seed: int | str, vocabulary: int = 40_000) -> list[list[int]]:
    """Random prompts, the same for every variant of one repetition."""
    rng = random.Random(seed)
    return [[rng.randrange(100, vocabulary) for _ in range(length)] for _ in range(count)]


async def plain_outputs(llm: Any, given: Sequence[Mapping[str, Any]], sampled: Mapping[str, Any]) -> list[Any]:
    """What plain vLLM gives, driven as steercap drives it: all prompts at once, each asked for its end alone."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    async def one(index: int, prompt: Mapping[str, Any]) -> Any:
        params = SamplingParams(**sampled, output_kind=RequestOutputKind.FINAL_ONLY)
        (rendered,) = await llm.renderer.render_cmpl_async([prompt])
        return [output async for output in llm.generate(rendered, params, f"{time.monotonic_ns()}-{index}")][-1]

    return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(given)))


async def plain_run(llm: Any, tokens: list[list[int]], generated: int) -> float:
    """Wall seconds of plain vLLM."""
    start = time.perf_counter()
    await plain_outputs(llm, [{"prompt_token_ids": prompt} for prompt in tokens], sampling(generated))
    return time.perf_counter() - start


def sampling(generated: int) -> dict[str, Any]:
    """Greedy, to the last token."""
    return {"max_tokens": generated, "temperature": 0.0, "ignore_eos": True}


async def steer_run(
    model: Any, tokens: list[list[int]], generated: int, asked: dict[str, Any] | None
) -> tuple[float, float, int]:
    """Wall seconds of generating, of fetching everything, and bytes fetched."""
    from steercap import CaptureSpec

    spec = None if asked is None else CaptureSpec(**asked)
    start = time.perf_counter()
    result = await model.generate(tokens, sampling(generated), capture=spec)
    wall = time.perf_counter() - start
    if spec is None:
        return wall, 0.0, 0
    start = time.perf_counter()
    await model.fetch_captures_batch(result[1])
    fetch = time.perf_counter() - start
    return wall, fetch, sum(handle.captures.whole(point).nbytes for handle in result[1] for point in handle.points)


async def fetch_styles(model: Any, repeats: int) -> dict[str, float]:
    """Seconds to fetch 64 handles of one layer: in one batch, and one by one."""
    times: dict[str, list[float]] = {"batch": [], "one by one": []}
    for repeat in range(repeats):
        for style in times:
            _, handles = await model.generate(prompts(64, 32, repeat), sampling(1), capture_layers=[15])
            start = time.perf_counter()
            if style == "batch":
                await model.fetch_captures_batch(handles)
            else:
                for handle in handles:
                    await handle.fetch()
            times[style].append(time.perf_counter() - start)
    return {style: statistics.median(found) for style, found in times.items()}


def idle_tap_cost(calls: int = 20_000) -> float:
    """Seconds that one idle tap adds to the call of a module: hook, operator, and the look at empty tables."""
    import torch
    from torch import nn

    from steercap.architectures.sites.base import Tap, output_tap
    from steercap.core.schema import PointSchema
    from steercap.kernels.tap import bind
    from steercap.worker.taps import Installed, TapSizes
    from steercap.worker.taps.host import HostTaps

    class Layer(nn.Module):
        def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return hidden, residual

    def per_call(module: nn.Module) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(calls):
                module(hidden, residual)
            best = min(best, (time.perf_counter() - start) / calls)
        return best

    installed = Installed((0,), (PointSchema((576,), "float32"),), (True,))
    bind(HostTaps(installed, TapSizes(slots=1, bank_rows=1, entries=1, tokens=16)))
    hidden, residual = torch.randn(16, 576), torch.randn(16, 576)
    tapped = Layer()
    tap = Tap(torch.zeros(1, dtype=torch.int32), 0)
    output_tap(tapped, "", "resid_post", tap, stream=1)
    with torch.inference_mode():
        return per_call(tapped) - per_call(Layer())


def spread(values: list[float]) -> float:
    """Half the distance between the quartiles."""
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


async def main(repeats: int, *, eager: bool, out: Path | None) -> None:
    """Run everything and print the tables."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from steercap import SteerModel
    from steercap.lab.demo import smollm2

    print(f"one idle tap: {idle_tap_cost() * 1e6:.1f} µs; 30 in a step: {30e3 * idle_tap_cost():.2f} ms", flush=True)
    path = str(smollm2())
    arguments = {**ENGINE_ARGS, "enforce_eager": eager}
    plain = {
        name: AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, **arguments))
        for name in ("plain vLLM", "plain again")
    }
    results: dict[str, Any] = {"eager": eager, "repeats": repeats}
    try:
        async with SteerModel(path, **arguments) as model:
            for name, (count, length, generated) in WORKLOADS.items():
                results[name] = await compare(plain, model, repeats, count, length, generated)
                show(name, results[name])
            results["fetch of 64 handles"] = await fetch_styles(model, repeats)
            print(
                "fetch of 64 handles, one layer:",
                {k: f"{v * 1e3:.1f} ms" for k, v in results["fetch of 64 handles"].items()},
            )
    finally:
        while plain:
            plain.popitem()[1].shutdown()
    if out:
        out.write_text(json.dumps(results, indent=2))


async def compare(
    plain: dict[str, Any], model: Any, repeats: int, count: int, length: int, generated: int
) -> dict[str, Any]:
    """Times of every variant on one workload, in turn."""
    walls: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    fetches: dict[str, list[float]] = {name: [] for name, asked in CAPTURES.items() if asked is not None}
    moved = 0
    for repeat in range(repeats + 1):  # the first warms up
        tokens = prompts(count, length, repeat)
        order = list(VARIANTS)
        random.Random(repeat).shuffle(order)
        for variant in order:
            if variant in plain:
                wall, fetch = await plain_run(plain[variant], tokens, generated), 0.0
            else:
                wall, fetch, moved_now = await steer_run(model, tokens, generated, CAPTURES[variant])
                moved = max(moved, moved_now)
            if repeat:
                walls[variant].append(wall)
                if variant in fetches:
                    fetches[variant].append(fetch)
    return {"wall": walls, "fetch": fetches, "bytes, all layers": moved}


def show(name: str, found: dict[str, Any]) -> None:
    """Print one workload: median, spread, and the median of the paired ratios to both plain engines."""
    both = zip(found["wall"]["plain vLLM"], found["wall"]["plain again"], strict=True)
    base = [statistics.mean(pair) for pair in both]
    print(f"\n{name}")
    for variant, values in found["wall"].items():
        ratio = statistics.median(value / plain for value, plain in zip(values, base, strict=True))
        fetch = (
            f", fetch {statistics.median(found['fetch'][variant]) * 1e3:7.1f} ms" if variant in found["fetch"] else ""
        )
        print(
            f"  {variant:11s} {statistics.median(values):7.3f} s ±{spread(values):.3f}  {100 * (ratio - 1):+6.2f} %{fetch}"
        )
    seconds = statistics.median(found["fetch"]["all layers"])
    print(
        f"  all layers: {found['bytes, all layers'] / 1e6:.0f} MB at {found['bytes, all layers'] / seconds / 1e9:.2f} GB/s",
        flush=True,
    )


def arguments(description: str | None, repeats: int) -> argparse.Namespace:
    """The command line of a bench."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--eager", action="store_true", help="enforce_eager, instead of vLLM's default")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments(__doc__, repeats=9)
    asyncio.run(main(args.repeats, eager=args.eager, out=args.json))
