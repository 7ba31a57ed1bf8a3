"""What a tap costs in front of an add and an RMSNorm, and what one kernel for all three costs; graphs without taps.

    python scripts/bench_fused.py --json out/fused.json      # a minute on one GPU, no engine

A graph of 36 × (a product with weights of its own, up to 512 tokens; X). X is: the add and norm that inductor makes of vLLM's RMSNorm; the
same with a tap in front; one kernel that does both (`kernels.tap.tap_norm`). "stripped": the graph with idle
taps, their nodes taken out as `perf_hook/strip.py` does it. "between graphs": what a pass costs the device beside its
graph, the upload of its table and the closing kernel. Numbers are µs a layer over the graph without taps; of the last, µs a pass.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import triton
from bench_tap import POINTS, cuda_taps, opened
from perf_hook import strip

from steercap.kernels import triton_tap
from steercap.worker.taps.cuda import CudaTaps

WIDTH: Final = 4096
#: Columns of the product in front: as wide as an MLP of Qwen3-8B.
COLUMNS: Final = 12_288
EPS: Final = 1e-6
#: Modes of `bench_tap`.
MODES: Final = ("idle", "copy", "add", "copy and add", "rank 8")
#: Tokens of a pass from which on a product takes so long that the rest cannot be seen beside it.
MANY: Final = 512


def add_norm(hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's RMSNorm with a residual, as it is in PyTorch: the norm of the sum, and the sum."""
    row = hidden.float() + residual.float()
    summed = row.to(hidden.dtype)
    row = row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + EPS)
    return row.to(hidden.dtype) * weight, summed


class Layers:
    """Rows of one layer, and what runs on them in each of the graphs.

    Args:
        tokens: how many rows.
        width: elements of a row.
        columns: of the product in front of each tap; 0 for none.
        device: where they are.
    """

    def __init__(self, tokens: int, width: int, columns: int, device: torch.device) -> None:
        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.bfloat16, device=device)

        generator = torch.Generator(device).manual_seed(0)
        self.weights = [drawn(columns, width) * 0.01 for _ in range(POINTS if columns else 0)]
        self.wide, self.scale = drawn(tokens, columns), drawn(width)
        self.hidden, self.residual = drawn(tokens, width), drawn(tokens, width)
        self.points = [torch.tensor([point], dtype=torch.int32, device=device) for point in range(POINTS)]
        self.norm = torch.compile(add_norm, dynamic=False) if device.type == "cuda" else add_norm

    def multiply(self, number: int) -> None:
        """Run the product in front of a tap."""
        if self.weights:
            torch.mm(self.wide, self.weights[number], out=self.hidden)

    def plain(self) -> None:
        """No taps."""
        for number in range(POINTS):
            self.multiply(number)
            self.norm(self.hidden, self.residual, self.scale)

    def tapped(self, taps: CudaTaps) -> None:
        """A tap, then add and norm."""
        for number, point in enumerate(self.points):
            self.multiply(number)
            taps.on_tap(self.hidden, self.residual, point, 0)
            self.norm(self.hidden, self.residual, self.scale)

    def fused(self, taps: CudaTaps) -> None:
        """All three in one kernel."""
        for number, point in enumerate(self.points):
            self.multiply(number)
            taps.on_tap_norm(self.hidden, self.residual, self.scale, point, EPS, 0)


def captured(run: Callable[[], Any], *, keep: bool = False) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `run` launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=keep)
        with torch.cuda.graph(graph, stream=stream):
            run()
        if keep:
            graph.instantiate()
    torch.cuda.synchronize()
    return graph


def timed(run: Callable[[], Any]) -> float:
    """Microseconds, the median of many."""
    time: float = triton.testing.do_bench(run, warmup=30, rep=150, return_mode="median")
    return 1000 * time


def taps_of(tokens: int, mode: str) -> CudaTaps:
    """The taps of a worker on the device, open for a pass of so many tokens."""
    from steercap.worker.taps.transfers import CudaTransfers

    device = torch.device("cuda")
    taps = cuda_taps(WIDTH, tokens, CudaTransfers(device))
    opened(taps, tokens, mode, device)
    torch.cuda.synchronize()
    return taps


def between_graphs(layers: Layers, taps: CudaTaps) -> float:
    """Microseconds of what a pass has beside its graph: the upload of its table, and the closing kernel."""
    graph, tokens = captured(partial(layers.tapped, taps)), len(layers.hidden)
    ids = torch.arange(tokens, device="cuda")
    table = taps._tokens[:tokens]  # noqa: SLF001 -- what is uploaded and closed before and after each pass
    upload = table.cpu().pin_memory()
    others = (taps._checksums, taps._reports)  # noqa: SLF001

    def whole() -> None:
        table.copy_(upload, non_blocking=True)
        graph.replay()
        triton_tap.launch_close(table, *others, ids, ids, 0, tokens)

    return timed(whole) - timed(graph.replay)


def stripped(layers: Layers, taps: CudaTaps) -> float:
    """Microseconds of the graph with idle taps, without them."""
    graph = captured(partial(layers.tapped, taps), keep=True)
    without, taken = strip.without(graph.raw_cuda_graph(), lambda _: True)
    assert taken == POINTS, f"{taken} taps were taken out, not {POINTS}"
    return timed(partial(strip.launch, without))


def error_of(layers: Layers, taps: CudaTaps) -> float:
    """How far the fused kernel, with an Add, is from PyTorch: of the greatest element.

    Args:
        layers: the rows, which are drawn anew.
        taps: open in mode "add".
    """
    layers.hidden.normal_()
    layers.residual.normal_()
    row = layers.hidden.float() + layers.residual.float()
    taps.on_tap_norm(layers.hidden, layers.residual, layers.scale, layers.points[-1], EPS, 0)
    entry = taps._entries[0, POINTS - 1, 0]  # noqa: SLF001 -- what the kernel reads
    length = taps._responses[0, POINTS - 1, 0, 2]  # noqa: SLF001
    vector = taps._bank[entry[triton_tap.WRITE].long()] * length  # noqa: SLF001
    row += vector
    want, _ = add_norm(row, torch.zeros_like(row), layers.scale.float())
    return ((layers.hidden.float() - want).abs().max() / want.abs().max()).item()


def costs(tokens: int) -> dict[str, float]:
    """Microseconds a layer over the graph without taps; of "plain", and of what is between graphs, of themselves."""
    layers = Layers(tokens, WIDTH, COLUMNS if tokens <= MANY else 0, torch.device("cuda"))
    with torch.inference_mode():
        plain = captured(layers.plain)
        before, found = timed(plain.replay), dict[str, float]()
        for mode in MODES:
            # An Add of the tap makes the residual zero, and one kernel adds up: what is in the rows costs the same.
            taps = taps_of(tokens, mode)
            runs = {"tap": partial(layers.tapped, taps), "fused": partial(layers.fused, taps)}
            found |= {f"{name} {mode}": timed(captured(run).replay) - before for name, run in runs.items()}
        found["stripped"] = stripped(layers, taps_of(tokens, "idle")) - before
        found = {name: time / POINTS for name, time in found.items()}
        found["between graphs"] = between_graphs(layers, taps_of(tokens, "copy"))
        found |= {"plain": before / POINTS, "plain, at the end": timed(plain.replay) / POINTS}
        found["error of fused"] = error_of(layers, taps_of(tokens, "add"))
    return found


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[1, 64, 256, 4096]
    )
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args(words)


def main() -> None:
    """The command line."""
    args = arguments()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    found = {tokens: costs(tokens) for tokens in args.tokens}
    for tokens, said in found.items():
        print(f"{tokens} tokens:")
        for name, value in said.items():
            print(f"  {name:20s} {value:+.2e}" if "error" in name else f"  {name:20s} {value:+8.2f} µs")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
