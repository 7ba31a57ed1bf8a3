"""What one tap costs inside a CUDA graph: idle, copying, editing; for some widths and numbers of tokens.

    python scripts/bench_tap.py --json out/tap.json

A graph of 36 small kernels is replayed without taps, and with a tap behind each; the difference, over 36, is the cost of a
tap where it stands: launch, reads, writes. With `--gemm` they are products with weights that come from memory, as in a
model. Tables are those of a worker (`worker.taps.cuda`), the arena too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from rich.console import Console
from rich.table import Table

from steercap import Add, LowRank, SteeringSpec
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.kernels import triton_tap
from steercap.steering.lowering import lower
from steercap.worker.arena import Form
from steercap.worker.step import BatchRows, Step
from steercap.worker.taps import Installed, TapSizes
from steercap.worker.taps.cuda import CudaTaps
from steercap.worker.taps.transfers import CudaTransfers, Transfers

POINTS = 36
#: Mode: are rows copied, how many specs, which operation.
MODES: dict[str, tuple[bool, int, str]] = {
    "idle": (False, 0, ""),
    "copy": (True, 0, ""),
    "add": (False, 1, "add"),
    "add, each its own": (False, 256, "add"),
    "copy and add": (True, 1, "add"),
    "rank 8": (False, 1, "low rank"),
}


def replayed(run: Callable[[], Any]) -> float:
    """Microseconds of one replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        time: float = triton.testing.do_bench(graph.replay, warmup=20, rep=80, return_mode="median")
    return time * 1000


def spec_of(operation: str, width: int, seed: int) -> SteeringSpec:
    """A spec at every layer."""
    generator = torch.Generator().manual_seed(seed)
    if operation == "add":
        return SteeringSpec([Add(torch.randn(width, generator=generator), 0.01, layers="all")])
    read, write = torch.randn(2, 8, width, generator=generator) * 0.01
    return SteeringSpec([LowRank(read, write, layers="all")])


def cuda_taps(width: int, tokens: int, transfers: Transfers, device_ring_bytes: int | None = None) -> CudaTaps:
    """The taps of a worker whose passes have so many tokens."""
    sizes = TapSizes(
        slots=256, bank_rows=4096, entries=16, tokens=max(tokens, 256), device_ring_bytes=device_ring_bytes
    )
    schema = PointSchema((width,), "bfloat16")
    installed = Installed(tuple(range(POINTS)), (schema,) * POINTS, (True,) * POINTS)
    return CudaTaps(installed, sizes, transfers)


def opened(taps: CudaTaps, tokens: int, mode: str, device: torch.device) -> None:
    """Have the taps open for a pass in which every token is copied, edited or both."""
    copies, specs, operation = MODES[mode]
    slots = min(specs, tokens)
    schema = taps.schemas[0]
    width = schema.width
    armed = {Point(layer, "resid_post"): layer for layer in range(POINTS)}
    schemas = dict.fromkeys(armed, schema)
    row = 0
    for slot in range(slots):
        ready = lower(
            spec_of(operation, width, slot), armed=armed, schemas=schemas, num_layers=POINTS, edits_per_point=16
        )
        places = []
        for blob in ready.configuration.blobs:
            values = torch.frombuffer(bytearray(ready.vectors[blob.digest]), dtype=torch.float32).view(-1, width)
            places.append(list(range(row, row + len(values))))
            taps.put(places[-1], values)
            row += len(values)
        taps.configure(slot, ready.configuration, places)
    every = np.arange(tokens)
    layout = taps.layouts.acquire(range(POINTS), Form())
    assert layout is not None
    chosen = every % slots if slots else np.full(tokens, -1)
    masks = np.full(tokens, 1 if slots else 0, dtype=np.int32)
    lines = every * layout.raw.lines if copies else np.full(tokens, -1)
    layouts = np.full(tokens, layout.number if copies else -1)
    nowhere = np.full(tokens, -1)
    step = Step.of(
        taps.layouts,
        requests=every,
        tokens=every,
        positions=every,
        firsts=every,
        lines=lines,
        accumulators=nowhere,
        layouts=layouts,
        slots=chosen,
        masks=masks,
        edits=every,
    )
    ids = torch.arange(tokens, device=device)
    if mode != "idle":
        failure = taps.open(step, BatchRows(["all"], every[:1], np.array([tokens]), tokens, ids, ids), None)
        assert failure is None, failure


def cost(width: int, tokens: int, mode: str, *, weights: Sequence[torch.Tensor] = ()) -> float:
    """Microseconds of one tap, behind a product with weights of its own if there are any, else a small kernel."""
    device = torch.device("cuda")
    taps = cuda_taps(width, tokens, CudaTransfers(device))
    opened(taps, tokens, mode, device)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
    residual = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
    points = [torch.tensor([point], dtype=torch.int32, device=device) for point in range(POINTS)]
    other = torch.zeros_like(hidden)
    wide = torch.randn(tokens, weights[0].shape[0], dtype=torch.bfloat16, device=device) if weights else hidden

    def before(number: int) -> None:
        if weights:
            torch.mm(wide, weights[number], out=hidden)
        else:
            torch.add(hidden, 0.0, out=other)

    def plain() -> None:
        for number in range(POINTS):
            before(number)

    def tapped() -> None:
        for number, point in enumerate(points):
            before(number)
            taps.on_tap(hidden, residual, point, 0)

    return (replayed(tapped) - replayed(plain)) / POINTS


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="*", default=[4096])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 64, 256, 8192])
    parser.add_argument("--warp-elements", type=int, nargs="*", default=[0], help="0: what the kernel chooses")
    parser.add_argument("--gemm", type=int, default=0, help="columns of a product in front of each tap")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    found: dict[str, float] = {}
    table = Table(title="µs a tap", title_justify="left")
    table.add_column("width, elements a warp, tokens")
    for mode in MODES:
        table.add_column(mode, justify="right")
    for width, elements, tokens in product(args.widths, args.warp_elements, args.tokens):
        if elements:
            triton_tap.WARP_ELEMENTS = elements  # type: ignore[misc]
        name = f"{width}, {elements}, {tokens}"
        weights = [
            torch.randn(args.gemm, width, dtype=torch.bfloat16, device="cuda")
            for _ in range(POINTS if args.gemm else 0)
        ]
        times = {mode: cost(width, tokens, mode, weights=weights) for mode in MODES}
        found |= {f"{name}: {mode}": time for mode, time in times.items()}
        table.add_row(name, *(f"{time:.2f}" for time in times.values()))
    Console(width=140).print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
