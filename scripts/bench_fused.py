"""What a tap costs in front of an add and an RMSNorm, and what one kernel for all three would cost; graphs without taps.

    python scripts/bench_fused.py --json out/fused.json      # a minute on one GPU, no engine

A graph of 36 × (a product with weights of its own, X). X is: the add and norm that inductor makes of vLLM's RMSNorm; the
same with a tap in front; one kernel that does both, with the tap's tables (edits: one Add). "stripped": the graph with idle
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
import triton.language as tl
from bench_tap import POINTS, cuda_taps, opened
from perf_hook import strip

from steercap.kernels import triton_tap
from steercap.worker.taps.cuda import CudaTaps
from steercap.worker.taps.cuda_rows import typed

WIDTH: Final = 4096
#: Columns of the product in front: as wide as an MLP of Qwen3-8B.
COLUMNS: Final = 12_288
EPS: Final = 1e-6
#: Modes of `bench_tap`, of which the fused kernel knows the edits.
MODES: Final = ("idle", "copy", "add", "copy and add")
_TOKEN_COLUMNS = tl.constexpr(triton_tap.TOKEN_COLUMNS)
_ENTRY_COLUMNS = tl.constexpr(triton_tap.ENTRY_COLUMNS)
_SLOT, _MASK = tl.constexpr(triton_tap.SLOT), tl.constexpr(triton_tap.MASK)
_LINE, _LAYOUT = tl.constexpr(triton_tap.LINE), tl.constexpr(triton_tap.LAYOUT)
_SCOPE, _WRITE = tl.constexpr(triton_tap.SCOPE), tl.constexpr(triton_tap.WRITE)
_STAY = tl.constexpr("evict_last")


@triton.jit(do_not_specialize=["num_tokens"])
def _fused_kernel(  # noqa: ANN202
    hidden, residual, weight, normed, summed, point, tokens, counts, entries, responses, bank, arena, layouts, checksums,  # noqa: ANN001
    num_points, num_entries, num_tokens, eps,  # noqa: ANN001, ARG001
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr, BANK: tl.constexpr, EARLY: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Add, tap (copy, one Add) and norm one row; all that tables and weights say is read before the row is there."""
    token = tl.program_id(0)
    asked = tokens + token * _TOKEN_COLUMNS
    slot = tl.load(asked + _SLOT, eviction_policy=_STAY)
    scopes = tl.load(asked + _MASK, eviction_policy=_STAY)
    line = tl.load(asked + _LINE, eviction_policy=_STAY)
    layout = tl.load(asked + _LAYOUT, eviction_policy=_STAY)
    at = tl.load(point, eviction_policy=_STAY)
    offset = tl.load(layouts + layout * num_points + at, mask=line >= 0, other=-1, eviction_policy=_STAY)
    count = tl.load(counts + slot * num_points + at, mask=slot >= 0, other=0, eviction_policy=_STAY)
    program = (tl.maximum(slot, 0) * num_points + at).to(tl.int64) * num_entries
    scope = tl.load(entries + program * _ENTRY_COLUMNS + _SCOPE, eviction_policy=_STAY)
    written = tl.load(entries + program * _ENTRY_COLUMNS + _WRITE, eviction_policy=_STAY)
    length = tl.load(responses + program * 8 + 2, eviction_policy=_STAY)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    scale = tl.load(weight + columns, mask=inside, other=0.0, eviction_policy=_STAY).to(tl.float32)
    write = tl.load(
        bank + written.to(tl.int64) * BANK + columns, mask=columns < tl.where(count > 0, WIDTH, 0), other=0.0
    )
    if EARLY:
        tl.extra.cuda.gdc_wait()
    there = token.to(tl.int64) * WIDTH + columns
    row = tl.load(hidden + there, mask=inside, other=0.0).to(tl.float32)
    row += tl.load(residual + there, mask=inside, other=0.0).to(tl.float32)
    if count > 0:
        active = (scopes >> scope) & 1
        row = row + active.to(tl.float32) * length * write
        tl.atomic_add(checksums + token * 2, active.to(tl.int64) * (at + 1).to(tl.int64), sem="relaxed")
    rounded = row.to(summed.dtype.element_ty)
    tl.store(summed + there, rounded, mask=inside)
    if offset >= 0:
        tl.store(arena + (line + offset).to(tl.int64) * LINE + columns, rounded, mask=inside)
        tl.atomic_add(checksums + token * 2 + 1, (at + 1).to(tl.int64), sem="relaxed")
    rstd = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    unit = (row * rstd).to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + there, (unit * scale).to(normed.dtype.element_ty), mask=inside)


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
        self.normed, self.summed = torch.empty_like(self.hidden), torch.empty_like(self.hidden)
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
            self.launch_fused(taps, point)

    def launch_fused(self, taps: CudaTaps, point: torch.Tensor) -> None:
        """Add, tap and norm at one point, into `normed` and `summed`."""
        (tokens, width), early = self.hidden.shape, self.hidden.is_cuda
        tables = (taps._tokens, taps._counts, taps._entries, taps._responses)  # noqa: SLF001 -- those of the tap's kernel
        layouts, checksums = taps._layouts, taps._checksums  # noqa: SLF001
        bank, ring = taps._bank[:, :width], typed(taps._rows, taps.schemas[0])  # noqa: SLF001
        _fused_kernel[(tokens,)](
            self.hidden, self.residual, self.scale, self.normed, self.summed, point, *tables, bank, ring, layouts, checksums,
            layouts.shape[1], tables[2].shape[2], tokens, EPS,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), LINE=ring.shape[1], BANK=bank.stride(0), EARLY=early,
            num_warps=8, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip


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
        layers: the rows; the residual stream is drawn anew.
        taps: open in mode "add".
    """
    layers.residual.normal_()
    layers.launch_fused(taps, layers.points[-1])
    entry = taps._entries[0, POINTS - 1, 0]  # noqa: SLF001 -- what the kernel reads
    length = taps._responses[0, POINTS - 1, 0, 2]  # noqa: SLF001
    vector = taps._bank[entry[triton_tap.WRITE].long()] * length  # noqa: SLF001
    row = layers.hidden.float() + layers.residual.float() + vector
    want, _ = add_norm(row, torch.zeros_like(row), layers.scale.float())
    return ((layers.normed.float() - want).abs().max() / want.abs().max()).item()


def costs(tokens: int) -> dict[str, float]:
    """Microseconds a layer over the graph without taps; of "plain", and of what is between graphs, of themselves."""
    layers = Layers(tokens, WIDTH, COLUMNS, torch.device("cuda"))
    with torch.inference_mode():
        plain = captured(layers.plain)
        before, found = timed(plain.replay), dict[str, float]()
        for mode in MODES:
            # An Add of the tap makes the residual zero: each is timed on rows of its own, which costs the same.
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
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[1, 64, 256])
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
