"""steercap beside plain vLLM and interp-engine: seconds until the caller holds texts and, where captured, tensors of all rows.

    for library in plain steercap interp-engine interp-engine-hooked; do
        python scripts/bench_beside.py $library --json out/beside.jsonl
    done
    python scripts/bench_beside.py steercap --one-request [--profile]   # one short request, in turns with plain vLLM
    python scripts/bench_beside.py steercap --shape tiny --workloads 1x16+4 --rounds 1      # a trial, also on CPU

One library a process and one engine at a time, with the same engine arguments, random weights and new random prompts
for each run; the first run of a mode warms up and is not counted. Modes: generate; capture-all and capture-one (layer);
capture-held, of all layers, readable by this process but not copied into tensors; steer-one (layer). interp-engine
(`pip install interp-engine einops accelerate`) has static taps, which CUDA graphs keep, or hooks, without graphs.
A mode that fails, or takes longer than 100 s, is a line with its error.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import math
import os
import pstats
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from bench_capture import plain_outputs, prompts, sampling
from bench_gpu import listed
from bench_server import with_tokenizer
from gpu_engines import engines
from gpu_rounds import Workload
from gpu_shapes import SHAPES

WORKLOADS: Final = "1x512+1,1x512+128,8x512+128,64x128+200"
ENGINE: Final[Mapping[str, Any]] = {
    "load_format": "dummy",
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.6,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}
#: Seconds after which a run counts as failed.
PATIENCE: Final = 100.0

#: Runs prompts to so many generated tokens each; gives the rows that the caller holds of all of them.
Call: TypeAlias = Callable[[list[list[int]], int], Awaitable[int]]


# What each library is asked for


def plain_calls(llm: Any) -> dict[str, Call]:
    """The calls of vLLM's AsyncLLM."""

    async def generate(tokens: list[list[int]], generated: int) -> int:
        outputs = await plain_outputs(llm, [{"prompt_token_ids": one} for one in tokens], sampling(generated))
        assert all(len(output.outputs[0].token_ids) == generated for output in outputs)
        return 0

    return {"generate": generate}


def steercap_calls(model: Any) -> dict[str, Call]:
    """The calls of a SteerModel."""
    from steercap import CaptureSpec

    middle, spec = [model.num_layers // 2], middle_spec(model)

    async def generate(tokens: list[list[int]], generated: int) -> int:
        await model.generate(tokens, sampling(generated))
        return 0

    async def steer(tokens: list[list[int]], generated: int) -> int:
        await model.generate(tokens, sampling(generated), steering=spec)
        return 0

    def capture(layers: Any, *, fetch: bool = True) -> Call:
        async def run(tokens: list[list[int]], generated: int) -> int:
            _, handles = await model.generate(tokens, sampling(generated), capture=CaptureSpec(layers=layers))
            if fetch:
                await model.fetch_captures_batch(handles)
            rows = sum(len(rows) for handle in handles if fetch for rows in handle.captures.values())
            for handle in handles:
                handle.release()
            return rows

        return run

    return {
        "generate": generate,
        "capture-all": capture("all"),
        "capture-one": capture(middle),
        "capture-held": capture("all", fetch=False),
        "steer-one": steer,
    }


def middle_spec(model: Any) -> Any:
    """A vector at the middle layer, too small to change much."""
    import torch

    from steercap import Add, SteeringSpec

    vector = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(0)) * 1e-3
    return SteeringSpec([Add(vector, layer=model.num_layers // 2)])


def interp_engine_calls(model: Any, layers: int, width: int) -> dict[str, Call]:
    """The calls of interp-engine's VLLMModel."""
    import torch
    from interp_engine import Address
    from interp_engine.steer_specs import AddSpec, LayerSteeringSpec, SteeringSpec
    from vllm import SamplingParams

    points = [Address("resid_post", layer) for layer in range(layers)]
    vector = (torch.randn(width, generator=torch.Generator().manual_seed(0)) * 1e-3).tolist()
    operations = [AddSpec(vector=vector, scale=1.0)]
    spec = SteeringSpec(layers={layers // 2: LayerSteeringSpec(operations=operations)}, point="resid_post")

    async def captured(prompt: list[int], generated: int, some: Sequence[Any]) -> int:
        if generated == 1:
            rows = await model.capture(prompt, some)
        else:
            _, rows = await model.capture_generation(prompt, some, max_tokens=generated)
        return sum(len(tensor) for tensor in rows.values())

    def capture(some: Sequence[Any]) -> Call:
        async def run(tokens: list[list[int]], generated: int) -> int:
            return sum(await asyncio.gather(*(captured(prompt, generated, some) for prompt in tokens)))

        return run

    def generate(**options: Any) -> Call:
        async def run(tokens: list[list[int]], generated: int) -> int:
            params = SamplingParams(**sampling(generated))
            await asyncio.gather(*(model.generate_steered(prompt, params, **options) for prompt in tokens))
            return 0

        return run

    return {
        "generate": generate(),
        "capture-all": capture(points),
        "capture-one": capture([points[layers // 2]]),
        "steer-one": generate(steering_spec=spec),
    }


# Engines


@asynccontextmanager
async def plain(shape: str) -> AsyncIterator[dict[str, Call]]:
    """Plain vLLM."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(with_tokenizer(shape)), **ENGINE))
    try:
        yield plain_calls(llm)
    finally:
        llm.shutdown()


@asynccontextmanager
async def steercap(shape: str) -> AsyncIterator[dict[str, Call]]:
    """A SteerModel."""
    from steercap import SteerModel

    async with SteerModel(str(with_tokenizer(shape)), **ENGINE) as model:
        yield steercap_calls(model)


@asynccontextmanager
async def interp_engine(shape: str) -> AsyncIterator[dict[str, Call]]:
    """interp-engine with taps that CUDA graphs keep."""
    from interp_engine import Address

    layers = SHAPES[shape].num_hidden_layers
    points = [Address("resid_post", layer) for layer in range(layers)]
    static = {"static_points": points, "static_writes": [points[layers // 2]], "enforce_eager": False}
    async with _interp_engine(shape, static) as calls:
        yield calls


@asynccontextmanager
async def interp_engine_hooked(shape: str) -> AsyncIterator[dict[str, Call]]:
    """interp-engine with hooks."""
    async with _interp_engine(shape, {}) as calls:
        yield calls


@asynccontextmanager
async def _interp_engine(shape: str, options: dict[str, Any]) -> AsyncIterator[dict[str, Call]]:
    from interp_engine.vllm_backend import VLLMModel

    own = ("max_model_len", "gpu_memory_utilization")
    options |= {name: ENGINE[name] for name in own}
    others = {name: value for name, value in ENGINE.items() if name not in own}
    model = VLLMModel(str(with_tokenizer(shape)), dtype="auto", extra_vllm_kwargs=others, **options)
    await model.warmup()
    try:
        yield interp_engine_calls(model, SHAPES[shape].num_hidden_layers, SHAPES[shape].hidden_size)
    finally:
        await model.shutdown()


LIBRARIES: Final = {
    "plain": plain,
    "steercap": steercap,
    "interp-engine": interp_engine,
    "interp-engine-hooked": interp_engine_hooked,
}


# Measuring


async def measure(
    calls: Mapping[str, Call], workloads: Sequence[Workload], rounds: int, vocabulary: int, layers: int
) -> AsyncIterator[dict[str, Any]]:
    """Time every mode on every workload; yields a record of each.

    Args:
        calls: of the modes.
        workloads: what is run.
        rounds: runs that are counted.
        vocabulary: tokens that prompts are drawn of.
        layers: of the model, of which captures must have a row of each token.
    """
    kept = {"capture-all": layers, "capture-one": 1}
    for mode, call in calls.items():
        for load in workloads:
            seconds, rows = [], 0
            wanted = sum(load.rows) * kept.get(mode, 0)
            try:
                for _ in range(rounds + 1):
                    tokens = prompts(load.requests, load.prompt, time.monotonic_ns(), vocabulary)
                    start = time.perf_counter()
                    async with asyncio.timeout(PATIENCE):
                        rows = await call(tokens, load.generated)
                    seconds.append(time.perf_counter() - start)
                    assert rows == wanted, f"{rows} rows, not {wanted}"
            except Exception as error:  # noqa: BLE001 -- what a library cannot do is a result
                yield {"mode": mode, "workload": str(load), "error": f"{type(error).__name__}: {str(error)[:300]}"}
                continue
            yield {
                "mode": mode,
                "workload": str(load),
                "seconds": statistics.median(seconds[1:]),
                "all": seconds,
                "rows": rows,
            }


async def one_request(llm: Any, model: Any, length: int, repeats: int, vocabulary: int) -> dict[str, list[float]]:
    """Time one request of `length` tokens and one generated, in turns with vLLM's own call on either engine.

    A short request waits for Python in the engine's process, which may have got a slower core than the other engine's:
    by 2 ms and more, either way, from start to start. So the same call without steercap is timed on steercap's own
    engine too: idle and steered requests, and captures, are compared with that.

    Args:
        llm: plain vLLM's AsyncLLM.
        model: a SteerModel.
        length: tokens of each prompt, which was not sent before.
        repeats: requests of each kind, behind three that warm up.
        vocabulary: tokens that prompts are drawn of.

    Returns:
        Medians in ms for each kind: the call; fetching, NaN where nothing is fetched; and by how much both take longer
        than vLLM's own calls right before and after, of plain vLLM and of steercap's engine.
    """
    from steercap import CaptureSpec

    middle = CaptureSpec(layers=[model.num_layers // 2])
    kinds: dict[str, tuple[dict[str, Any], bool]] = {
        "idle": ({}, False),
        "steered": ({"steering": middle_spec(model)}, False),
        "one layer, readable": ({"capture": middle}, False),
        "one layer": ({"capture": middle}, True),
        "all layers, readable": ({"capture": CaptureSpec(layers="all")}, False),
        "all layers": ({"capture": CaptureSpec(layers="all")}, True),
    }
    controls = {"plain": plain_calls(llm)["generate"], "steercap's engine": plain_calls(model.engine)["generate"]}

    async def plain() -> list[float]:
        seconds = []
        for control in controls.values():
            start = time.perf_counter()
            await control([random_prompt(length, vocabulary)], 1)
            seconds.append(time.perf_counter() - start)
        return seconds

    found: dict[str, list[list[float]]] = {name: [] for name in [*controls, *kinds]}
    for _ in range(repeats + 3):
        before = await plain()
        for name, (asked, fetched) in kinds.items():
            call, fetch = await _parts(model, random_prompt(length, vocabulary), asked, fetched=fetched)
            after = await plain()
            whole = call + fetch if fetched else call
            found[name].append([call, fetch, *(whole - (a + b) / 2 for a, b in zip(before, after, strict=True))])
            for control, took in zip(controls, after, strict=True):
                found[control].append(
                    [took, math.nan, *(took - (a + b) / 2 for a, b in zip(before, after, strict=True))]
                )
            before = after
    return {
        name: [1e3 * statistics.median(part) for part in zip(*runs[3:], strict=True)] for name, runs in found.items()
    }


async def _parts(model: Any, prompt: list[int], asked: dict[str, Any], *, fetched: bool) -> tuple[float, float]:
    """Seconds of the call, and of fetching what it captured, NaN if it is not `fetched`."""
    start = time.perf_counter()
    result = await model.generate([prompt], sampling(1), **asked)
    called = time.perf_counter()
    handles = result[1] if "capture" in asked else []
    if fetched:
        await model.fetch_captures_batch(handles)
    ended = time.perf_counter()
    for handle in handles:
        handle.release()
    return called - start, ended - called if fetched else math.nan


def random_prompt(length: int, vocabulary: int) -> list[int]:
    """A prompt that was not sent before."""
    return prompts(1, length, time.monotonic_ns(), vocabulary)[0]


async def profile(model: Any, length: int, repeats: int, vocabulary: int) -> None:
    """Print what the client spends on one request at a time."""
    from steercap import CaptureSpec

    middle = [model.num_layers // 2]
    for name, asked in (
        ("one layer", {"capture": CaptureSpec(layers=middle)}),
        ("steered", {"steering": middle_spec(model)}),
    ):
        profiler = cProfile.Profile()
        with profiler:
            for _ in range(repeats):
                await _parts(model, random_prompt(length, vocabulary), asked, fetched="capture" in asked)
        print(name)
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(60)


# The command line


async def parts_of_one_request(args: argparse.Namespace) -> None:
    """Print how long one request takes beside plain vLLM, both in one process."""
    vocabulary, folder = SHAPES[args.shape].vocab_size - 2, str(with_tokenizer(args.shape))
    length = args.workloads[0].prompt
    memory = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 << 30}
    async with engines(folder, {}, [{**ENGINE, **memory}], {**ENGINE, **memory}, in_turn=True) as ((llm,), model, _):
        for name, parts in (await one_request(llm, model, length, args.repeats, vocabulary)).items():
            over = f"over plain vLLM {parts[2]:+6.2f}, over vLLM's call of the same engine {parts[3]:+6.2f} ms"
            print(f"{name:22s} call {parts[0]:6.2f}  fetch {parts[1]:6.2f}  {over}", flush=True)
            write(args.json, {"library": "steercap", "one request": name, "ms": parts})
        if args.profile:
            await profile(model, length, args.repeats, vocabulary)


async def main(args: argparse.Namespace) -> None:
    """Start one library's engine and measure it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.one_request:
        await parts_of_one_request(args)
        return
    shape, start = SHAPES[args.shape], time.perf_counter()
    async with LIBRARIES[args.library](args.shape) as calls:
        write(args.json, {"library": args.library, "start_s": time.perf_counter() - start})
        some = {mode: call for mode, call in calls.items() if mode in (args.modes or calls)}
        vocabulary, layers = shape.vocab_size - 2, shape.num_hidden_layers
        async for record in measure(some, args.workloads, args.rounds, vocabulary, layers):
            print(line_of(record), flush=True)
            write(args.json, {"library": args.library, **record})


def line_of(record: Mapping[str, Any]) -> str:
    """A record as it is printed."""
    said = record["error"] if "error" in record else f"{record['seconds']:9.4f} s"
    return f"{record['mode']:14s} {record['workload']:12s} {said}"


def write(path: Path | None, record: Mapping[str, Any]) -> None:
    """Add a line to a file."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("library", choices=LIBRARIES)
    add("--shape", choices=SHAPES, default="qwen3-4b")
    add("--workloads", type=listed(Workload.parse), default=WORKLOADS)
    add("--modes", type=listed(str), default=[], help="all that the library has, if left out")
    add("--rounds", type=int, default=5)
    add(
        "--one-request",
        action="store_true",
        help="one request instead, in turns with plain vLLM, its length the first workload's",
    )
    add("--repeats", type=int, default=30, help="requests of each kind, with --one-request")
    add("--profile", action="store_true", help="and what the client spends on them")
    add("--json", type=Path, default=None, help="lines are added to it")
    args = parser.parse_args(words)
    if args.one_request and args.library != "steercap":
        parser.error("--one-request is of steercap alone")
    return args


if __name__ == "__main__":
    asyncio.run(main(arguments()))
