"""Workers without a model: the runtime of one rank, over every kind of taps that this machine can run.

"host" are the taps of a CPU worker. "cuda" are those of a GPU worker, where there is one; elsewhere the same code, its
kernels run by Triton's interpreter over host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from steercap.core.rows import Ints
from steercap.worker.batch import BatchRows
from steercap.worker.runtime import Runtime
from steercap.worker.taps.base import Taps, TapSizes
from steercap.worker.taps.cuda import CudaTaps
from steercap.worker.taps.host import HostTaps
from steercap.worker.taps.transfers import CudaTransfers

CUDA = torch.cuda.is_available()  # if not, conftest.py has Triton interpret kernels

KINDS = ("host", "cuda")
#: Where the taps of the device compute on this machine.
DEVICE = torch.device("cuda" if CUDA else "cpu")


class LateTransfers:
    """A device that is host memory, and whose copies are made when somebody waits for them: the latest they can be."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.queued: list[tuple[object, Ints, Ints, Ints]] = []

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def there(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def now(self) -> object:
        return object()

    def fetch(self, _after: object, targets: Ints, sources: Ints, sizes: Ints, *, urgent: bool) -> object:
        del urgent
        mark = object()
        self.queued.append((mark, targets, sources, sizes))
        return mark

    def done(self, mark: object) -> bool:
        return all(mark is not queued for queued, *_ in self.queued)

    def wait(self, mark: object) -> None:
        while not self.done(mark):
            _, targets, sources, sizes = self.queued.pop(0)
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                ctypes.memmove(target, source, size)

    def hold(self, mark: object) -> None:
        self.wait(mark)


def some_taps(  # noqa: PLR0917 -- as for `Taps`
    kind: str, points: Sequence[int], width: int, sizes: TapSizes, dtype: torch.dtype, captures: bool
) -> Taps:
    if kind == "host":
        return HostTaps(points, width, sizes)
    transfers = CudaTransfers(DEVICE) if CUDA else LateTransfers()
    return CudaTaps(points, width, sizes, dtype, transfers, captures=captures)


def some_runtime(
    kind: str = "host",
    points: int = 3,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
    *,
    captures: bool = True,
    slots: int = 4,
    bank_rows: int = 64,
    entries: int = 8,
    tokens: int = 1024,
    arena_bytes: int | None = 1 << 20,
    local: Sequence[int] | None = None,
    tallies: int = 8,
    lag: int = 1,
    held: int = 1,
) -> Runtime:
    """One rank of `points` points, those of `local` on it, or all."""
    sizes = TapSizes(slots, bank_rows, entries, tokens, arena_bytes, tallies, lag, held)
    taps = some_taps(kind, range(points) if local is None else local, width, sizes, dtype, captures=captures)
    return Runtime(taps, [f"resid_post[{point}]" for point in range(points)], dtype, device_of(kind), captures=captures)


def device_of(kind: str) -> torch.device:
    return DEVICE if kind == "cuda" else torch.device("cpu")


def batch(  # noqa: PLR0917 -- as for `BatchRows`
    kind: str, names: Sequence[str], starts: Any, counts: Any, token_ids: Any, positions: Any
) -> BatchRows:
    device = device_of(kind)
    return BatchRows(
        list(names),
        np.asarray(starts, dtype=np.int64),
        np.asarray(counts, dtype=np.int64),
        torch.as_tensor(np.asarray(token_ids), device=device),
        torch.as_tensor(np.asarray(positions), device=device),
    )


def tap(runtime: Runtime, hidden: torch.Tensor, residual: torch.Tensor | None, point: int) -> None:
    """Call a tap as the operator does."""
    runtime.taps.on_tap(hidden, residual, torch.tensor([point], dtype=torch.int32, device=hidden.device))
