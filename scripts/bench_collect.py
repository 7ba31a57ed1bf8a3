"""What `collect` costs beside plain vLLM that reads the same documents.

    python scripts/bench_collect.py --shape qwen3-8b --documents 400 --length 1024 --rounds 2 --json out/collect.json
    python scripts/bench_collect.py --shape smollm2 --documents 64 --length 512       # on CPU
    python scripts/bench_collect.py --shape tiny --documents 400 --length 64          # where the client is the bottleneck

Plain vLLM and steercap live side by side with the same engine arguments (see bench_gpu.py); weights are random but for
smollm2. A round runs every mode once with plain vLLM (`max_tokens=1`, all documents at once) in between; a mode's figure
is the ratio of its tokens a second to the mean of those of the plain runs right before and after it. "control" is plain
vLLM once more, measured like a mode: what the machine cannot tell. The first round warms up and is not counted.

All runs of a round have the same random documents, token ids, new in each round, so nothing comes from the prefix cache;
with `--length 64-2048` lengths are drawn from that range, evenly on a logarithmic scale. The clock of plain vLLM stops
with its last output, that of `collect` when the data set is complete on disk, every file synced; the folder is removed
afterwards, not timed. After each run the totals are checked: every token read, a row for each, bytes as they must be.

"CPU" is the share of one core that this process used, so that one sees how near to its end the client is.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_capture import plain_outputs, sampling
from gpu_engines import NotReal, engines, say
from gpu_shapes import SHAPES, folder_of
from rich.console import Console
from rich.table import Table

PLAIN, CONTROL = "plain", "control"
#: What `collect` is asked for, by mode; layer -1 stands for the one in the middle.
MODES: dict[str, dict[str, Any]] = {
    CONTROL: {},
    "one": {"layers": [-1]},
    "all-rp8": {"layers": "all", "codec": "rp8", "codec_k": 512},
    "all-full8": {"layers": "all", "codec": "full8"},
    "all-raw": {"layers": "all"},
    "one-sample": {"layers": [-1], "one_in": 8},
}


@dataclass
class Run:
    """One run.

    Args:
        mode: its name.
        seconds: from the call to its end.
        tokens: read.
        cpu: seconds of the processor that this process used meanwhile.
        bytes: on disk.
    """

    mode: str
    seconds: float
    tokens: int
    cpu: float
    bytes: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def documents(count: int, length: str, seed: str, vocabulary: int) -> list[list[int]]:
    """Random documents, of one length or of lengths from a range."""
    drawn = random.Random(seed)
    low, _, high = length.partition("-")
    span = math.log(int(low)), math.log(int(high or low))
    lengths = [round(math.exp(drawn.uniform(*span))) for _ in range(count)]
    return [[drawn.randrange(3, vocabulary) for _ in range(one)] for one in lengths]


async def run_plain(llm: Any, name: str, tokens: list[list[int]]) -> Run:
    """vLLM alone, each document a prompt of its own."""
    given = [{"prompt_token_ids": one} for one in tokens]
    start, cpu = time.perf_counter(), time.process_time()
    outputs = await plain_outputs(llm, given, {**sampling(1), "detokenize": False})
    run = Run(name, time.perf_counter() - start, sum(map(len, tokens)), time.process_time() - cpu)
    if cached := sum(output.num_cached_tokens or 0 for output in outputs):
        raise NotReal(f"{name}: {cached} tokens came from the prefix cache")
    return run


async def run_collect(model: Any, name: str, tokens: list[list[int]], args: argparse.Namespace) -> Run:
    """steercap, to a data set that is complete."""
    from steercap.lab.datasets.collecting import OneIn, collect

    asked = dict(MODES[name])
    if asked["layers"] == [-1]:
        asked["layers"] = [model.num_layers // 2]
    if k := asked.pop("one_in", None):
        asked["tokens"] = OneIn(k)
    if "codec_k" in asked:
        asked["codec_k"] = min(asked["codec_k"], model.hidden_size)
    folder = Path(tempfile.mkdtemp(prefix="steercap-bench-", dir=args.folder))
    try:
        start, cpu = time.perf_counter(), time.process_time()
        found = await collect(
            model, tokens, folder, **asked, shard_bytes=args.shard_mib << 20, statistics_every=args.statistics_every
        )
        run = Run(name, time.perf_counter() - start, found.totals.tokens, time.process_time() - cpu, found.totals.bytes)
        wanted = sum(map(len, tokens))
        if found.totals.documents != len(tokens) or (k is None and (run.tokens, found.totals.rows) != (wanted,) * 2):
            raise NotReal(f"{name}: {found.totals}, of {len(tokens)} documents of {wanted} tokens")
    finally:
        shutil.rmtree(folder)
    return run


async def one_round(plain: Any, model: Any, tokens: list[list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every mode once, with plain vLLM between them."""
    before, found = await run_plain(plain, PLAIN, tokens), []
    say(f"  {PLAIN:12s} {before.rate:10,.0f} tokens/s")
    for name in args.modes:
        os.sync()  # what the last run left to the disk is not this one's to wait for
        own = await (run_plain(plain, name, tokens) if name == CONTROL else run_collect(model, name, tokens, args))
        after = await run_plain(plain, PLAIN, tokens)
        base = statistics.mean((before.rate, after.rate))
        say(
            f"  {name:12s} {own.rate:10,.0f} tokens/s  {own.rate / base:7.1%} of plain, "
            f"{own.bytes / own.seconds / 1e6:,.0f} MB/s, CPU {own.cpu / own.seconds:.0%}"
        )
        found.append({**asdict(own), "plain": base, "ratio": own.rate / base})
        before = after
    return found


def table_of(rounds: Sequence[Sequence[dict[str, Any]]], title: str) -> Table:
    """The medians of all rounds."""
    table = Table(title=title, title_justify="left")
    table.add_column("mode")
    for column in ("of plain", "least..greatest", "tokens/s", "plain", "MB/s to disk", "bytes a token", "CPU"):
        table.add_column(column, justify="right")
    for runs in zip(*rounds, strict=True):
        middle = statistics.median
        ratios = [run["ratio"] for run in runs]
        size = middle(run["bytes"] / run["seconds"] for run in runs) / 1e6
        table.add_row(
            runs[0]["mode"],
            f"{middle(ratios):.1%}",
            f"{min(ratios):.1%}..{max(ratios):.1%}",
            f"{middle(run['tokens'] / run['seconds'] for run in runs):,.0f}",
            f"{middle(run['plain'] for run in runs):,.0f}",
            f"{size:,.0f}" if size else "",
            f"{middle(run['bytes'] / run['tokens'] for run in runs):,.0f}" if size else "",
            f"{middle(run['cpu'] / run['seconds'] for run in runs):.0%}",
        )
    return table


def disk_speed(folder: str | None) -> float:
    """Bytes a second that one thread writes and syncs."""
    data = os.urandom(64 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(8):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return 8 * len(data) / (time.perf_counter() - start)


def arguments_of(args: argparse.Namespace) -> tuple[str, dict[str, Any], dict[str, Any], int]:
    """The model's folder, arguments of both engines, steercap's own, and the vocabulary."""
    own: dict[str, Any] = {} if args.capture_gib is None else {"capture_bytes": int(args.capture_gib * 2**30)}
    if args.shape == "smollm2":
        from steercap.lab.demo import smollm2

        cpu = {"dtype": args.dtype or "float32", "enforce_eager": True, "max_model_len": 2048}
        return str(smollm2()), {**cpu, "kv_cache_memory_bytes": 512 << 20, **args.engine_args}, own, 49_000
    shape = SHAPES[args.shape]
    common = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": int(args.kv_tokens * shape.kv_bytes),
    }
    if args.shape.startswith("tiny"):
        common |= {"enforce_eager": True}
    else:
        common |= {"gpu_memory_utilization": args.gpu_memory_utilization}
    return str(folder_of(args.shape)), {**common, **args.engine_args}, own, shape.vocab_size - 2


async def main(args: argparse.Namespace) -> None:
    """Start both engines, measure, print the table."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    folder, common, own, vocabulary = arguments_of(args)
    say(f"{args.shape}: {common}, steercap: {own}; the disk writes {disk_speed(args.folder) / 1e6:,.0f} MB/s")
    rounds: list[list[dict[str, Any]]] = []
    began = time.monotonic()
    async with engines(folder, own, [common], common, in_turn=args.in_turn) as ((plain,), model, _):
        gc.collect()
        gc.freeze()  # what imports and engines hold is not to be gone through again and again
        for number in range(args.rounds + 1):  # the first warms up
            took = time.monotonic() - began
            if number > 1 and took + took / number > args.seconds:
                say(f"round {number} left out: {args.seconds:.0f} s are over")
                break
            count = args.documents if number else args.warm_documents or args.documents
            tokens = documents(count, args.length, f"{number} {args.length}", vocabulary)
            say(f"round {number} of {args.rounds}" if number else "warm-up")
            found = await one_round(plain, model, tokens, args)
            if number:
                rounds.append(found)
            if args.json is not None:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps({"argv": sys.argv, "engine_args": common, "rounds": rounds}, indent=1))
    if rounds:
        title = f"{args.shape}, {args.documents} documents of {args.length} tokens, {len(rounds)} rounds"
        Console(width=120).print(table_of(rounds, title))


def modes_in(text: str) -> list[str]:
    """Modes separated by commas."""
    found = [one.strip() for one in text.split(",")]
    if unknown := set(found) - MODES.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; known: {', '.join(MODES)}")
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=[*SHAPES, "smollm2"], default="qwen3-8b")
    add("--modes", type=modes_in, default="control,one,all-rp8")
    add("--documents", type=int, default=400)
    add("--length", default="1024", help="tokens of a document, or a range such as 64-2048")
    add("--rounds", type=int, default=2, help="after the warm-up")
    add("--warm-documents", type=int, default=None, help="of the warm-up; as many as of a round by default")
    add("--seconds", type=float, default=float("inf"), help="no round begins that would end later than this")
    add("--folder", default=None, help="where data sets are written; the temporary folder by default")
    add("--shard-mib", type=int, default=256)
    add("--statistics-every", type=int, default=None)
    add("--capture-gib", type=float, default=None, help="capture_bytes; steercap's default if left out")
    add("--kv-tokens", type=int, default=100_000, help="that the KV cache of each engine holds")
    add("--gpu-memory-utilization", type=float, default=0.42, help="share of each engine")
    add("--dtype", default=None, help="of smollm2")
    add("--in-turn", action="store_true", help="start the engines one after the other")
    add("--engine-args", type=json.loads, default={}, help='JSON, such as {"max_num_batched_tokens": 16384}')
    add("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(arguments()))
    gc.collect()  # vLLM's engines call what is gone when the interpreter ends
