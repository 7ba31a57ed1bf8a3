"""Plain requests to `steercap serve` and to `vllm serve`, 64 at a time: what an idle steercap costs a server.

    python scripts/bench_server.py --shape qwen3-8b --rounds 4 --json out/server.json
    python scripts/bench_server.py --shape tiny --workload 8x16+16 --requests 32 --rounds 2 --cpu   # a trial

Both servers run side by side on one machine, the same checkpoint under the same flags, vLLM's defaults on. Weights are
random (`--load-format dummy`); a tokenizer that knows every id is written beside config.json, so that texts are
detokenised as anybody's are. Prompts are random ids, new in each round, and every run has a cache salt of its own: no
prompt is answered from the prefix cache. Each client asks again as soon as it has its answer.

A round runs, for whole answers and for streams, vLLM, steercap, vLLM, vLLM once more as "control", vLLM, in an order that
turns. A figure is the ratio of requests a second to the mean of the runs of vLLM right before and right after; control
is what this machine cannot tell. Every answer must be 200 and have all its tokens. The first round warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from bench_capture import prompts
from bench_gpu import BLOCK, machine
from gpu_rounds import BASE, CONTROL, Workload, ratios, sequence
from gpu_shapes import SHAPES, Shape, folder_of
from served import Served, free_port, served, steercap_command, vllm_command

OURS = "steercap"
NAME = "bench"
KINDS = {"answers": False, "streams": True}
#: What is told of a run, beside its mode: the name of the figure, and how it is written.
FIGURES = {
    "per_s": "{:.2f} requests/s",
    "tokens_per_s": "{:,.0f} tokens/s",
    "first_ms": "first token {:.1f} ms",
    "median_ms": "median {:.0f} ms",
    "p99_ms": "p99 {:.0f} ms",
}


@dataclass(frozen=True)
class Asked:
    """One request of a run: when it was sent, when its first token and its end came, in seconds of one clock."""

    sent: float
    first: float
    ended: float


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


# Servers


def with_tokenizer(name: str) -> Path:
    """The folder of a shape with a tokenizer of as many tokens as the model has, made on the first call."""
    from steercap.lab.demo import cached

    return cached(f"{folder_of(name).name}-tokenizer", partial(_write, folder_of(name), SHAPES[name].vocab_size))


def _write(shape: Path, count: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(_texts(count))}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    (folder / "config.json").write_text((shape / "config.json").read_text())


def _texts(count: int) -> Iterator[str]:
    """Every byte, then words of two letters and more."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ("".join(word) for length in itertools.count(2) for word in itertools.product(letters, repeat=length))
    return itertools.islice(itertools.chain(sorted(ByteLevel.alphabet()), words), count)


def flags_of(args: argparse.Namespace, shape: Shape) -> list[str]:
    """Flags of both servers."""
    load = args.workload
    blocks = load.requests * -(-(load.prompt + load.generated) // BLOCK)
    room = int(1.15 * (blocks * BLOCK + 4096) * shape.kv_bytes) if args.kv_gib is None else int(args.kv_gib * 2**30)
    found = ["--load-format", "dummy", "--served-model-name", NAME, "--max-model-len", str(args.max_model_len)]
    found += ["--kv-cache-memory-bytes", str(room), "--max-num-seqs", str(max(256, load.requests))]
    found += ["--enforce-eager"] if args.cpu else ["--gpu-memory-utilization", str(args.gpu_memory_utilization)]
    return [*found, *args.flags]


async def up(stack: AsyncExitStack, args: argparse.Namespace, shape: Shape) -> dict[str, Served]:
    """Both servers, started one after the other: each looks at how much GPU memory is free."""
    model, flags, found = str(with_tokenizer(args.shape)), flags_of(args, shape), {}
    for name, command in ((BASE, vllm_command), (OURS, steercap_command)):
        port, began = free_port(), time.monotonic()
        words = command(model, port, flags=flags)
        found[name] = await stack.enter_async_context(served(words, port, args.log / f"{name}.log", start=args.start))
        say(f"{name} is up after {time.monotonic() - began:.0f} s: {' '.join(words)}")
    return found


# Runs


async def ask(http: aiohttp.ClientSession, body: dict[str, Any], generated: int) -> Asked:
    """One request.

    Raises:
        AssertionError: it fails, or tokens are missing.
    """
    sent = time.perf_counter()
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        first, parts = 0.0, []
        async for part in answer.content.iter_any():
            first = first or time.perf_counter()
            parts.append(part)
    ended, content = time.perf_counter(), b"".join(parts)
    if body["stream"]:  # the last event before the end mark has the usage
        content = content.removesuffix(b"data: [DONE]\n\n").rpartition(b"data: ")[2]
    counted = json.loads(content)["usage"]["completion_tokens"]
    assert counted == generated, f"{counted} tokens, not {generated}"
    return Asked(sent, first, ended)


async def measured(server: Served, args: argparse.Namespace, tokens: Sequence[list[int]], *, stream: bool) -> Any:
    """All requests, as many at a time as the workload says, and what they took."""
    load, salt, waiting = args.workload, str(time.monotonic_ns()), iter(tokens)
    fixed = {"model": NAME, "max_tokens": load.generated, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
    fixed |= {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    found: list[Asked] = []

    async def client(http: aiohttp.ClientSession) -> None:
        found.extend([await ask(http, fixed | {"prompt": prompt}, load.generated) for prompt in waiting])

    connector, limit = aiohttp.TCPConnector(limit=load.requests), aiohttp.ClientTimeout(total=args.patience)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=limit) as http:
        await ask(http, fixed | {"prompt": tokens[0][:8], "max_tokens": 2}, 2)  # wakes the server
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(load.requests):
                group.create_task(client(http))
    return figures(found, time.perf_counter() - began, load, stream=stream)


def figures(found: Sequence[Asked], seconds: float, load: Workload, *, stream: bool) -> dict[str, float]:
    """What is kept of one run; times of requests in milliseconds."""
    took = sorted(one.ended - one.sent for one in found)
    kept = {
        "seconds": seconds,
        "per_s": len(found) / seconds,
        "tokens_per_s": len(found) * load.generated / seconds,
        "median_ms": 1e3 * statistics.median(took),
        "p99_ms": 1e3 * took[min(len(took) - 1, int(0.99 * len(took)))],
    }
    if stream:
        kept["first_ms"] = 1e3 * statistics.median(one.first - one.sent for one in found)
    return kept


async def all_rounds(servers: dict[str, Served], args: argparse.Namespace, shape: Shape, report: Any) -> None:
    """Warm up, then measure; what is known is written after each run of a kind."""
    for number in range(args.rounds + 1):  # the first warms up
        order = sequence([OURS, CONTROL], number - 1, 1) if number else [BASE, OURS]
        for kind in args.kinds:
            tokens = prompts(args.requests, args.workload.prompt, f"{number} {kind}", shape.vocab_size - 2)
            runs = []
            for name in order:
                run = await measured(servers[OURS if name == OURS else BASE], args, tokens, stream=KINDS[kind])
                runs.append({"mode": name, **run})
                said = ", ".join(form.format(run[key]) for key, form in FIGURES.items() if key in run)
                say(f"  {'warm-up' if not number else f'round {number}'} {kind:8s} {name:9s} {said}")
            if number:
                report["rounds"].setdefault(kind, []).append(runs)
                write(args.json, report)


def shares(passes: Sequence[Sequence[dict[str, Any]]], mode: str) -> list[float]:
    """Requests a second of a mode over those of vLLM around it, round by round."""
    compared = [pair for runs in passes for pair in ratios([(run["mode"], run["seconds"]) for run in runs])]
    return [1 / ratio for name, ratio in compared if name == mode]


def summary(rounds: dict[str, list[list[dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """Of each kind and mode: shares of vLLM's requests a second, and medians of the figures."""
    found: dict[str, dict[str, Any]] = {}
    for kind, passes in rounds.items():
        for mode in (BASE, CONTROL, OURS):
            of_mode = [run for runs in passes for run in runs if run["mode"] == mode]
            kept = {name: statistics.median(run[name] for run in of_mode) for name in FIGURES if name in of_mode[0]}
            found.setdefault(kind, {})[mode] = {"shares": shares(passes, mode), **kept}
    return found


def write(path: Path | None, report: dict[str, Any]) -> None:
    """Write all of it, in one move."""
    report["summary"] = summary(report["rounds"])
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(report, indent=1, default=str))
        scratch.replace(path)


def printed(report: dict[str, Any]) -> None:
    """The table of a run."""
    for kind, modes in report["summary"].items():
        for mode, values in modes.items():
            told = ", ".join(form.format(values[key]) for key, form in FIGURES.items() if key in values)
            if values["shares"]:
                middle, low, high = (100 * (of(values["shares"]) - 1) for of in (statistics.median, min, max))
                told = f"{middle:+.2f} % ({low:+.2f} to {high:+.2f}) of vLLM's requests/s; {told}"
            print(f"{kind:8s} {mode:9s} {told}")


async def main(args: argparse.Namespace) -> None:
    """Start both servers, measure, print."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    args.log.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[args.shape]
    report = {"argv": sys.argv, "machine": machine(), "flags": flags_of(args, shape), "rounds": {}}
    async with AsyncExitStack() as stack:
        servers = await up(stack, args, shape)
        await all_rounds(servers, args, shape, report)
    printed(report)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-8b")
    add(
        "--workload",
        type=Workload.parse,
        default="64x128+200",
        help="clients at once, tokens in and out of each request",
    )
    add("--requests", type=int, default=256, help="of one run, all clients together")
    add("--kinds", type=lambda text: text.split(","), default=",".join(KINDS), help="answers, streams or both")
    add("--rounds", type=int, default=4, help="after the warm-up")
    add("--gpu-memory-utilization", type=float, default=0.42, help="share of each server")
    add("--kv-gib", type=float, default=None, help="KV cache of each server; enough for the workload if left out")
    add("--max-model-len", type=int, default=4096)
    add("--cpu", action="store_true", help="eager, and no share of GPU memory")
    add("--start", type=float, default=400.0, help="seconds that the start of a server may take")
    add("--patience", type=float, default=300.0, help="seconds that a request may take")
    add("--log", type=Path, default=Path("/tmp/bench-server"), help="folder of the servers' logs")
    add("--json", type=Path, default=None)
    add("flags", nargs="*", help="further flags of both servers, behind --")
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"--kinds {unknown}: give {', '.join(KINDS)}")
    return args


if __name__ == "__main__":
    asyncio.run(main(arguments()))
