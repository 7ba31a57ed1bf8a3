"""What steercap does on the host around a pass: microseconds before it and after it, without an engine.

    python scripts/bench_pass.py --requests 64,256
    python scripts/bench_pass.py --requests 64 --modes steer --profile
    python scripts/bench_pass.py --requests 4 --passes 20                       # a trial, also on CPU

Drives the runtime of a rank of 36 points as a runner does: requests of one new token a pass, the taps in a CUDA graph.
vLLM's runner prepares a pass while the device computes the one before, so that this time is hidden as long as the whole
of the host's work takes less than the device's; here every pass is waited for, outside of what is timed. In the end the
worker must have every row and every edit: a plan that it does not follow would cost nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from contextlib import nullcontext
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from steercap import Add, SteeringSpec
from steercap.core.coding import RAW
from steercap.core.messages import (
    Attach,
    Call,
    Collect,
    Configure,
    Configured,
    Owner,
    Parcel,
    Placed,
    Settle,
    Vectors,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import SteeringPlan
from steercap.core.receipt import check_edits
from steercap.core.schema import PointSchema
from steercap.core.slots import Slots
from steercap.core.spec import Point
from steercap.steering.lowering import Lowered, lower, scopes_of
from steercap.worker.batch import BatchRows
from steercap.worker.runtime import Runtime
from steercap.worker.taps.base import Installed, Taps, TapSizes
from steercap.worker.taps.host import HostTaps

POINTS: Final = 36
WIDTH: Final = 4096
PROMPT: Final = 1
#: Mode: is every row captured, is every row steered.
MODES: Final = {"idle": (False, False), "steer": (False, True), "capture": (True, False), "both": (True, True)}


def lowered() -> Lowered:
    """A vector at every layer."""
    schema = PointSchema((WIDTH,), "bfloat16", changes_kv=True)
    armed = {Point(layer, "resid_post"): layer for layer in range(POINTS)}
    spec = SteeringSpec([Add(torch.randn(WIDTH, generator=torch.Generator().manual_seed(0)), 1e-6, layers="all")])
    return lower(spec, armed=armed, schemas=dict.fromkeys(armed, schema), num_layers=POINTS, edits_per_point=4)


def runtime_of(device: torch.device, tokens: int) -> Runtime:
    """The runtime of a rank, as in a worker."""
    schema = PointSchema((WIDTH,), "bfloat16", changes_kv=True)
    installed = Installed(tuple(range(POINTS)), (schema,) * POINTS, (True,) * POINTS)
    sizes = TapSizes(slots=256, bank_rows=4096, entries=4, tokens=tokens, arena_bytes=None)
    taps: Taps
    if device.type == "cuda":
        from steercap.worker.taps.cuda import CudaTaps
        from steercap.worker.taps.transfers import CudaTransfers

        taps = CudaTaps(installed, sizes, CudaTransfers(device, torch.cuda.Stream(device)))
    else:
        taps = HostTaps(installed, sizes)
    return Runtime(taps, [f"resid_post[{point}]" for point in range(POINTS)], device)


def ask(runtime: Runtime, question: Any) -> Any:
    """What the worker answers."""
    return decode_answer(runtime.answer(encode(Call((), question))))


def registered(
    runtime: Runtime, ready: Lowered, names: list[str], passes: int, *, captures: bool, steers: bool
) -> list[Plan]:
    """Have the requests known, as the scheduler's first output of them does."""
    slots = Slots(256, 4096)
    grant = slots.claim(ready.configuration, ready.digest)
    assert grant is not None
    blobs = zip(ready.configuration.blobs, grant.bank_rows, strict=True)
    vectors = tuple(Vectors(blob.digest, places, ready.vectors[blob.digest]) for blob, places in blobs)
    placed = (Placed(grant.slot, grant.configuration, grant.bank_rows),)
    assert ask(runtime, Configure(vectors, placed)) == Configured(())
    scopes, replaced = scopes_of(ready, PROMPT, passes)
    capture = CapturePlan(tuple(range(POINTS)), scopes[0], None, RAW) if captures else None
    steering = SteeringPlan(grant.slot, grant.digest, b"", scopes, replaced) if steers else None
    plans = [Plan(name, PROMPT, passes, capture=capture, steering=steering) for name in names]
    if captures or steers:
        for plan in plans:
            runtime.register(plan.key, plan.encode(), 0)
    return plans


def check(runtime: Runtime, ready: Lowered, plans: list[Plan], passes: int) -> None:
    """Check that the worker did what was timed.

    Raises:
        AssertionError: it does not have a row of each pass of each request.
        SteeringNotApplied: an edit is missing.
    """
    runtime.forget([plan.key for plan in plans])
    wanted = tuple(Wanted(Owner(plan.key, 0), passes) for plan in plans)
    if plans[0].steering is not None:
        records = ask(runtime, Settle(wanted, (True,) * len(wanted))).records
        for plan, record in zip(plans, records, strict=True):
            check_edits(plan.key, plan, ready.configuration, passes, [[record]])
    if plans[0].capture is not None:
        for parcel in ask(runtime, Collect(wanted)).parcels:
            assert isinstance(parcel, Parcel), f"the worker does not know a request: {parcel}"
            assert parcel.failure is None, parcel.failure
            assert np.array_equal(np.frombuffer(parcel.positions, dtype=np.int64), np.arange(passes)), parcel.owner


def measured(mode: str, requests: int, passes: int, profiler: cProfile.Profile | None) -> tuple[float, float]:
    """Median microseconds before a pass, and after it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runtime = runtime_of(device, 1024)
    row_bytes = POINTS * WIDTH * 2
    ask(runtime, Attach(int(1.3 * requests * passes * row_bytes) + (1 << 20)))
    names, ready = [f"r{number}" for number in range(requests)], lowered()
    captures, steers = MODES[mode]
    plans = registered(runtime, ready, names, passes, captures=captures, steers=steers)
    hidden = torch.randn(requests, WIDTH, dtype=torch.bfloat16, device=device)
    points = [torch.tensor([point], dtype=torch.int32, device=device) for point in range(POINTS)]
    ids = torch.arange(1024, device=device, dtype=torch.int32)
    positions = torch.zeros(1024, device=device, dtype=torch.int64)

    def taps() -> None:
        for point in points:
            runtime.taps.on_tap(hidden, None, point, 0)

    replay = taps
    if device.type == "cuda":
        taps()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            taps()
        replay = graph.replay
    counts = np.ones(requests, dtype=np.int64)
    before, after = [], []
    for number in range(passes):
        positions.fill_(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        watch = nullcontext() if profiler is None or number <= passes // 4 else profiler
        with watch:
            start = time.perf_counter()
            runtime.begin_step(BatchRows(names, np.full(requests, number, dtype=np.int64), counts, ids, positions))
            ready_at = time.perf_counter()
        replay()
        with watch:
            launched = time.perf_counter()
            runtime.end_step()
            end = time.perf_counter()
        before.append(ready_at - start)
        after.append(end - launched)
    check(runtime, ready, plans, passes)
    return statistics.median(before) * 1e6, statistics.median(after) * 1e6


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="64,256", help="how many at once, separated by commas")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--passes", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    table = Table(title=f"host, µs a pass, {POINTS} points")
    for column in ("requests", "mode", "before", "after"):
        table.add_column(column)
    for requests in map(int, args.requests.split(",")):
        for mode in args.modes.split(","):
            profiler = cProfile.Profile() if args.profile else None
            before, after = measured(mode, requests, args.passes, profiler)
            table.add_row(f"{requests}", mode, f"{before:.0f}", f"{after:.0f}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if profiler is not None:
                print(mode, requests)
                pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
