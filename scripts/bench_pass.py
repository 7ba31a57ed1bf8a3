"""What steercap does on the host around a pass: microseconds before it and after it, without an engine.

    python scripts/bench_pass.py --requests 64,256
    python scripts/bench_pass.py --requests 64 --modes steer --profile

Drives the runtime of a rank of 36 points as a runner does: requests of one new token a pass, the taps in a CUDA graph.
vLLM's runner prepares a pass while the device computes the one before, so that this time is hidden as long as the whole
of the host's work takes less than the device's; here every pass is waited for, outside of what is timed.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from typing import Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from steercap import Add, SteeringSpec
from steercap.core.messages import Attach, Call, Configure, Configured, Placed, Vectors, decode_answer, encode
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import SteeringPlan
from steercap.core.schema import PointSchema
from steercap.core.slots import Slots
from steercap.core.spec import Point
from steercap.steering.lowering import Lowered, lower, scopes_of
from steercap.worker.batch import BatchRows
from steercap.worker.runtime import Runtime
from steercap.worker.taps.base import Installed, TapSizes
from steercap.worker.taps.cuda import CudaTaps
from steercap.worker.taps.transfers import CudaTransfers

POINTS: Final = 36
WIDTH: Final = 4096
PROMPT: Final = 16
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
    taps = CudaTaps(installed, sizes, CudaTransfers(device, torch.cuda.Stream(device)))
    return Runtime(taps, [f"resid_post[{point}]" for point in range(POINTS)], device)


def registered(runtime: Runtime, names: list[str], passes: int, *, captures: bool, steers: bool) -> None:
    """Have the requests known, as the scheduler's first output of them does."""
    ready, slots = lowered(), Slots(256, 4096)
    grant = slots.claim(ready.configuration, ready.digest)
    assert grant is not None
    blobs = zip(ready.configuration.blobs, grant.bank_rows, strict=True)
    vectors = tuple(Vectors(blob.digest, places, ready.vectors[blob.digest]) for blob, places in blobs)
    placed = (Placed(grant.slot, grant.configuration, grant.bank_rows),)
    assert decode_answer(runtime.answer(encode(Call((), Configure(vectors, placed))))) == Configured(())
    limit = PROMPT + passes
    scopes, replaced = scopes_of(ready, PROMPT, limit)
    capture = CapturePlan(tuple(range(POINTS)), scopes[0], None, "raw")
    steering = SteeringPlan(grant.slot, grant.digest, b"", scopes, replaced)
    for name in names:
        plan = Plan(name, PROMPT, limit, capture=capture if captures else None, steering=steering if steers else None)
        if captures or steers:
            runtime.register(name, plan.encode(), 0)


def measured(mode: str, requests: int, passes: int, profiler: cProfile.Profile | None) -> tuple[float, float]:
    """Median microseconds before a pass, and after it."""
    device = torch.device("cuda")
    runtime = runtime_of(device, 1024)
    row_bytes = POINTS * WIDTH * 2
    runtime.answer(encode(Call((), Attach(int(1.3 * requests * (PROMPT + passes) * row_bytes)))))
    names = [f"r{number}" for number in range(requests)]
    captures, steers = MODES[mode]
    registered(runtime, names, passes, captures=captures, steers=steers)
    hidden = torch.randn(requests, WIDTH, dtype=torch.bfloat16, device=device)
    points = [torch.tensor([point], dtype=torch.int32, device=device) for point in range(POINTS)]
    ids = torch.arange(1024, device=device, dtype=torch.int32)
    positions = torch.zeros(1024, device=device, dtype=torch.int64)

    def taps() -> None:
        for point in points:
            runtime.taps.on_tap(hidden, None, point, 0)

    taps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taps()
    counts = np.ones(requests, dtype=np.int64)
    before, after = [], []
    for number in range(PROMPT, PROMPT + passes):
        positions.fill_(number)
        torch.cuda.synchronize()
        watched = profiler is not None and number > PROMPT + passes // 4
        if watched:
            profiler.enable()
        start = time.perf_counter()
        runtime.begin_step(BatchRows(names, np.full(requests, number, dtype=np.int64), counts, ids, positions))
        ready = time.perf_counter()
        if watched:
            profiler.disable()
        graph.replay()
        launched = time.perf_counter()
        if watched:
            profiler.enable()
        runtime.end_step()
        end = time.perf_counter()
        if watched:
            profiler.disable()
        before.append(ready - start)
        after.append(end - launched)
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
            torch.cuda.empty_cache()
            if profiler is not None:
                print(mode, requests)
                pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
