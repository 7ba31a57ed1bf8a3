"""What steercap costs the host: microseconds around a pass, of a batch that changes, of answers and messages; without an engine.

    python scripts/bench_host.py passes --requests 1,64,256                  # before and after a pass of one token each
    python scripts/bench_host.py passes --requests 64 --modes capture --profile
    python scripts/bench_host.py churn --requests 64,256 --every 0,8,3,1     # a request leaves and one comes every few passes
    python scripts/bench_host.py settle --requests 1,64,256                  # answers that are given between two passes
    python scripts/bench_host.py client                                      # what a client encodes for each request
    python scripts/bench_host.py stages --requests 64                        # which part of a pass takes how long

Drives the runtime of a rank of 36 points as a model runner does, on the path of CUDA. Launches, copies and events do
nothing, so that what is timed is Python and NumPy alone, and what the closing kernel would write is written outside of
what is timed; `passes --device cuda` has a GPU do all of it, its taps in a CUDA graph. vLLM's runner prepares a pass
while the device computes the one before, so that this time is hidden as long as all of the host's work takes less.

Between two passes other code runs and reads memory, as vLLM's scheduler and runner do: steercap's code is then out of
the processor's caches, and takes four times as long as in a loop of its own.

In the end the worker must have every row and every edit, and have asked for a copy of every byte: a plan that it does
not follow would cost nothing. Times of passes are the median, and in brackets the tenth percentile, of means of 16.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import inspect
import json
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from host_rank import MODES, PROMPT, NoDevice, Rank, everything, opened
from rich.console import Console
from rich.table import Table

from steercap.core.messages import (
    Call,
    Collect,
    GetSteeringRecord,
    Owner,
    Read,
    Wanted,
    decode_answer,
    decode_call,
    encode,
)
from steercap.core.plan import Plan
from steercap.worker.accumulators import Accumulators
from steercap.worker.biasing import Biasing
from steercap.worker.request_table import RequestTable, SteadyDecode
from steercap.worker.runtime import Runtime
from steercap.worker.taps import cuda
from steercap.worker.taps.cuda import CudaTaps
from steercap.worker.taps.transfers import Transfers

#: Passes whose times are averaged: one of many does what the others left.
BLOCK: Final = 16
#: What is timed by `stages`, the callers before what they call; their times contain it.
STAGES: Final[Sequence[tuple[Any, str]]] = (
    (Runtime, "begin_step"),
    (Biasing, "begin"),
    (RequestTable, "make_step"),
    (RequestTable, "_find_all"),
    (SteadyDecode, "next"),
    (RequestTable, "_step_of"),
    (Accumulators, "update"),
    (CudaTaps, "open"),
    (CudaTaps, "_upload"),
    (Runtime, "end_step"),
    (CudaTaps, "close"),
    (CudaTaps, "_pieces"),
    (cuda, "runs"),
    (cuda, "pieces"),
    (CudaTaps, "_copy_away"),
    (Runtime, "_take_completed"),
    (Runtime, "_verify"),
    (RequestTable, "record_token_ids"),
    (RequestTable, "complete"),
)

#: One line of a table.
Row: TypeAlias = dict[str, str | float]


def on_device(device: str) -> Transfers | None:
    """Transfers to a device, None for none."""
    if device == "none":
        return None
    from steercap.worker.taps.transfers import CudaTransfers

    where = torch.device(device)
    return CudaTransfers(where, torch.cuda.Stream(where))  # Figures


def names_of(count: int) -> list[str]:
    """Ids of requests, as long as vLLM's are."""
    return [f"r{number:05d}-abcdef012345" for number in range(count)]


class Elsewhere:
    """What else a process does between two passes."""

    def __init__(self) -> None:
        self._memory = np.zeros(6 << 20, dtype=np.uint8)
        self._square = torch.ones(64, 64)
        self._text = json.dumps([{"number": number, "list": [number] * 5} for number in range(60)])

    def work(self) -> None:
        """Read as much memory as a processor's core caches, and run some code of Python, NumPy and PyTorch."""
        self._memory[::64] += 1
        text = json.dumps(json.loads(self._text), indent=1, sort_keys=True)
        sorted(text.split("\n"), key=len)
        order = np.argsort(np.concatenate([np.arange(64), np.arange(32)]) % 7)
        torch.softmax(self._square @ self._square, -1).topk(3)
        torch.cat([self._square[order[:32] % 64], self._square]).fill_(0)


def blocks(seconds: Sequence[float]) -> list[float]:
    """Means of blocks of passes, µs, without the first block where there are more: it warms up."""
    whole = [seconds[at : at + BLOCK] for at in range(BLOCK, len(seconds) - BLOCK + 1, BLOCK)]
    return [1e6 * statistics.mean(block) for block in whole or [seconds]]


def tenth(values: Sequence[float]) -> float:
    """The tenth percentile."""
    return sorted(values)[len(values) // 10]


def spread(name: str, seconds: Sequence[float]) -> Row:
    """Median and tenth percentile, µs."""
    means = blocks(seconds)
    return {name: statistics.median(means), f"{name} p10": tenth(means)}


def steady(
    rank: Rank, names: Sequence[str], passes: int, profiler: cProfile.Profile | None = None
) -> list[tuple[float, float]]:
    """Run the prompts of all requests in one pass, then `passes` of one token each; returns the times of these."""
    rank.run(names, np.zeros(len(names), dtype=np.int64), np.full(len(names), PROMPT))
    one, elsewhere, times = np.ones(len(names), dtype=np.int64), Elsewhere(), []
    for number in range(passes):
        elsewhere.work()
        times.append(rank.run(names, one * (PROMPT + number), one, profiler if number > passes // 4 else None))
    return times


def measure_passes(
    mode: str, requests: int, passes: int, profiler: cProfile.Profile | None = None, transfers: Transfers | None = None
) -> Row:
    """Time steady passes."""
    names, total = names_of(requests), PROMPT + passes
    with opened(requests * PROMPT, transfers) as rank:
        rank.attach(requests * total)
        plans, took = rank.register(names, total, mode)
        before, after = zip(*steady(rank, names, passes, profiler), strict=True)
        shares = rank.check(plans, total)
        row: Row = {"requests": requests, "mode": mode, **spread("before", before), **spread("after", after)}
        row["register"] = 1e6 * statistics.median(took) if took else 0.0
        if isinstance(rank.transfers, NoDevice):
            assert rank.transfers.copied == len(shares) * total * rank.record_bytes, "bytes of rows were not copied"
            row |= {"uploads": rank.transfers.uploads, "calls": len(rank.transfers.sizes)}
            row["copies"] = sum(map(len, rank.transfers.sizes))
    return row


def measure_churn(requests: int, every: int, passes: int) -> Row:
    """Time passes of a batch of captured requests, of which the oldest leaves and a new one comes each `every` passes."""
    limit = PROMPT + passes + 1
    changes = len(range(every, passes, every)) if every else 0
    names = names_of(requests + changes)
    waiting, live = iter(names[requests:]), dict.fromkeys(names[:requests], 0)
    with opened(requests * PROMPT) as rank:
        rank.attach(requests * limit)
        rank.register(list(live), limit, "capture")
        times, took = [], []
        for number in range(passes):
            gone = []
            if number and every and number % every == 0:
                start = time.perf_counter()
                gone = [next(iter(live))]
                live.pop(gone[0])
                rank.runtime.end_requests(gone)
                live |= {plan.key: 0 for plan in rank.register([next(waiting)], limit, "capture")[0]}
                took.append(time.perf_counter() - start)
            starts = np.array(list(live.values()))
            counts = np.where(starts == 0, PROMPT, 1)
            times.append(rank.run(list(live), starts, counts))
            rank.ask(Read(b"", ()), [Owner(name, 0) for name in gone])  # their rows are given back
            live = dict(zip(live, (starts + counts).tolist(), strict=True))
        for name, total in live.items():
            rank.check([Plan(name, PROMPT, limit, capture=everything())], total)
    before, after = zip(*times[1:], strict=True)
    row: Row = {"requests": requests, "passes a change": every}
    row |= {**spread("before", before), **spread("after", after)}
    return row | {"a change": 1e6 * statistics.median(took) if took else 0.0}


def measure_settle(question: str, requests: int, passes: int, repeats: int = 15) -> Row:
    """Time the answer to "settle" or "collect" on the thread that launches passes."""
    names, total = names_of(requests), PROMPT + passes
    with opened(requests * PROMPT) as rank:
        rank.attach(requests * total)
        plans, _ = rank.register(names, total + 4, "steer" if question == "settle" else "capture")
        steady(rank, names, passes)
        wanted = tuple(Wanted(Owner(name, 0), total) for name in names)
        asked = GetSteeringRecord(wanted, (False,) * requests) if question == "settle" else Collect(wanted)
        frame = encode(Call((), asked))
        took = [timed(partial(rank.runtime.answer, frame)) for _ in range(repeats)]
        answer = rank.runtime.answer(frame)
        decoded = timed(partial(decode_answer, answer))
        rank.check(plans, total)
    seconds = sorted(took)[repeats // 5]
    row: Row = {"question": question, "requests": requests, "answer": 1e6 * seconds}
    return row | {"a request": 1e6 * seconds / requests, "bytes": len(answer), "decoded": 1e6 * decoded}


def measure_client(requests: Sequence[int], repeats: int) -> list[Row]:
    """Time what a client encodes for a request, and what vLLM does with it on its way."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    plan = Plan("steercap-abc-1", 128, 327, capture=everything())
    data = plan.encode()
    params = SamplingParams(
        max_tokens=200,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"steercap": data},
    )
    fields = inspect.signature(EngineCoreRequest).parameters
    given = {name: None for name, one in fields.items() if one.default is inspect.Parameter.empty}
    known = {"request_id": plan.key, "prompt_token_ids": list(range(128)), "arrival_time": time.time()}
    request = EngineCoreRequest(**{**given, **known, "sampling_params": params})
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
    parts = [bytearray(part) for part in encoder.encode(request)]
    rows = [
        repeated("plan, encoded", plan.encode, repeats, len(data)),
        repeated("plan, decoded", partial(Plan.decode, data), repeats, len(data)),
        repeated("sampling parameters, deep copy", partial(copy.deepcopy, params), repeats),
        repeated("sampling parameters, clone", params.clone, repeats),
        repeated("vLLM's request, encoded", partial(encoder.encode, request), repeats, sum(map(len, parts))),
        repeated("vLLM's request, decoded", partial(decoder.decode, parts), repeats, sum(map(len, parts))),
    ]
    for count in requests:
        wanted = tuple(Wanted(Owner(f"steercap-abc-{number}", 0), 327) for number in range(count))
        call = Call((), GetSteeringRecord(wanted, (True,) * count))
        frame = encode(call)
        rows.append(repeated(f"settle of {count}, encoded", partial(encode, call), repeats, len(frame)))
        rows.append(repeated(f"settle of {count}, decoded", partial(decode_call, frame), repeats, len(frame)))
    return rows


def repeated(name: str, run: Callable[[], Any], repeats: int, size: int = 0) -> Row:
    """Time something quick, many times."""
    for _ in range(max(1, repeats // 20)):
        run()
    took = [1e6 * timed(run) for _ in range(repeats)]
    return {"what": name, "median": statistics.median(took), "p10": tenth(took), "bytes": size}


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_stages(mode: str, requests: int, passes: int) -> list[Row]:
    """Time each part of steady passes."""
    spent: dict[str, list[int]] = defaultdict(list)
    with ExitStack() as stack:
        for owner, name in STAGES:
            label = f"{owner.__name__.rpartition('.')[2]}.{name}"
            watched = _watched(getattr(owner, name), spent[label])
            stack.enter_context(patch.object(owner, name, watched))
        measure_passes(mode, requests, passes)
    rows: list[Row] = []
    for label, took in spent.items():
        if later := [nanoseconds / 1e3 for nanoseconds in took[len(took) // 10 :]]:
            row: Row = {"requests": requests, "mode": mode, "stage": label, "calls": len(took)}
            rows.append(row | {"median": statistics.median(later), "p10": tenth(later)})
    return rows


def _watched(function: Callable[..., Any], took: list[int]) -> Callable[..., Any]:
    @wraps(function)
    def watched(*given: Any, **options: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return function(*given, **options)
        finally:
            took.append(time.perf_counter_ns() - start)

    return watched


# The command line


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Args:
        measure: gives the rows of its table.
        title: of the table.
        passes: that it runs by default.
    """

    measure: Callable[[argparse.Namespace], list[Row]]
    title: str
    passes: int


def passes(args: argparse.Namespace) -> list[Row]:
    """Run the subcommand of this name."""
    rows = []
    for requests in args.requests:
        for mode in args.modes:
            profiler = cProfile.Profile() if args.profile else None
            rows.append(measure_passes(mode, requests, args.passes, profiler, on_device(args.device)))
            if profiler is not None:
                print(mode, requests)
                pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    return rows


def churn(args: argparse.Namespace) -> list[Row]:
    """Run the subcommand of this name."""
    return [measure_churn(requests, every, args.passes) for requests in args.requests for every in args.every]


def settle(args: argparse.Namespace) -> list[Row]:
    """Run the subcommand of this name."""
    questions = ("settle", "collect")
    return [measure_settle(question, requests, args.passes) for requests in args.requests for question in questions]


def client(args: argparse.Namespace) -> list[Row]:
    """Run the subcommand of this name."""
    return measure_client(args.requests, args.passes)


def stages(args: argparse.Namespace) -> list[Row]:
    """Run the subcommand of this name."""
    modes = [mode for mode in args.modes if mode != "idle"]
    return [row for requests in args.requests for mode in modes for row in measure_stages(mode, requests, args.passes)]


COMMANDS: Final = {
    "passes": Command(passes, "µs before and after a pass", 300),
    "churn": Command(churn, "µs before and after a pass of a batch that changes", 300),
    "settle": Command(settle, "µs of an answer in the worker, and to decode it in the client", 200),
    "client": Command(client, "µs of messages", 400),
    "stages": Command(stages, "µs of each part of a pass", 1200),
}


def show(title: str, rows: Sequence[Row]) -> None:
    """Print a table; a tenth percentile goes in brackets behind its median."""
    table = Table(title=title, title_justify="left")
    columns = [name for name in rows[0] if not name.endswith(" p10")]
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        cells = []
        for name in columns:
            low = row.get(f"{name} p10")
            cells.append(_text(row[name]) + (f" ({_text(low)})" if low is not None else ""))
        table.add_row(*cells)
    Console(width=120).print(table)


def _text(value: str | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""

    def listed(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.title)
        one.add_argument("--requests", type=listed, default=[1, 64, 256], help="at once, separated by commas")
        one.add_argument("--passes", type=int, default=command.passes, help="of a client: calls")
        one.add_argument("--json", type=Path, default=None)
        if name in ("passes", "stages"):
            one.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    commands.choices["passes"].add_argument("--profile", action="store_true", help="print where the time goes")
    commands.choices["passes"].add_argument("--device", choices=["none", "cuda"], default="none")
    commands.choices["churn"].add_argument("--every", type=listed, default=[0, 8, 3, 1], help="passes; 0: never")
    args = parser.parse_args(words)
    for mode in set(getattr(args, "modes", ())) - set(MODES):
        parser.error(f"no mode {mode!r}; modes: {', '.join(MODES)}")
    return args


def main() -> None:
    """The command line."""
    args = arguments()
    torch.set_num_threads(1)
    rows = COMMANDS[args.command].measure(args)
    show(COMMANDS[args.command].title, rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
