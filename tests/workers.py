"""Workers without a model: the runtime of one rank, over every kind of taps that this machine can run.

"host" are the taps of a CPU worker. "cuda" are those of a GPU worker, where there is one; elsewhere the same code, its
kernels run by Triton's interpreter over host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from steercap.core.messages import CapturedRows
from steercap.core.rows import Ints
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.kernels.codecs.coded import CodedRows
from steercap.worker.assembly import Assembly
from steercap.worker.memory import Readable
from steercap.worker.runtime import Runtime
from steercap.worker.step import BatchRows
from steercap.worker.taps import Installed, Taps, TapSizes
from steercap.worker.taps.cuda import CudaTaps
from steercap.worker.taps.host import HostTaps
from steercap.worker.taps.transfers import CudaTransfers

CUDA = torch.cuda.is_available()  # if not, conftest.py has Triton interpret kernels

KINDS = ("host", "cuda")
#: Where the taps of the device compute on this machine.
DEVICE = torch.device("cuda" if CUDA else "cpu")


def assemble(
    captured_rows: CapturedRows, schemas: Sequence[PointSchema], source: Readable, shard: int = 0
) -> list[torch.Tensor | CodedRows]:
    """The rows of every point at once, on this thread, as `Assembly.rows` returns them."""
    assembly = Assembly(captured_rows, schemas, source, shard)
    for part in assembly.parts:
        assembly.fill(part)
    return assembly.rows()


class LateTransfers:
    """A device that is host memory, and whose copies are made when somebody waits for them: the latest they can be."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.queued: list[tuple[object, Ints, Ints, Ints]] = []
        self.stream: object = "the model's"

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def put(self, target: torch.Tensor, source: torch.Tensor, rows: int) -> None:
        assert all(one.is_contiguous() for one in (target, source))
        assert (target.shape, target.dtype) == (source.shape, source.dtype)
        assert 0 < rows <= len(target)
        target[:rows].copy_(source[:rows])

    def now(self, _again: object = None) -> object:
        nothing = np.empty(0, dtype=np.int64)
        return self.fetch(None, nothing, nothing, nothing, urgent=False)

    def fetch(self, _after: object, targets: Ints, sources: Ints, sizes: Ints, *, urgent: bool) -> object:
        del urgent
        event = object()
        self.queued.append((event, targets, sources, sizes))
        return event

    def fetch_grids(self, _after: object, copies: Ints) -> object:
        found: list[tuple[int, int, int]] = []
        for target, source, size, rows, target_step, source_step in copies.tolist():
            found += [(target + row * target_step, source + row * source_step, size) for row in range(rows)]
        return self.fetch(None, *np.array(found, dtype=np.int64).reshape(-1, 3).T, urgent=False)

    def current(self) -> object:
        return self.stream

    @contextmanager
    def using(self, stream: object) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def done(self, event: object) -> bool:
        return all(event is not queued for queued, *_ in self.queued)

    def wait(self, event: object) -> None:
        while not self.done(event):
            _, *copies = self.queued.pop(0)
            for target, source, size in reversed(np.stack(copies, axis=1).tolist()):  # those of a call have no order
                ctypes.memmove(target, source, size)

    def hold(self, event: object) -> None:
        self.wait(event)


def some_taps(kind: str, installed: Installed, sizes: TapSizes) -> Taps:
    if kind == "host":
        return HostTaps(installed, sizes)
    return CudaTaps(installed, sizes, CudaTransfers(DEVICE) if CUDA else LateTransfers())


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
    device_ring_bytes: int | None = 1 << 20,
    local: Sequence[int] | None = None,
    accumulators: int = 8,
    lag: int = 1,
    held: int = 1,
    schemas: Sequence[PointSchema] | None = None,
    shard: int = 0,
    layers: Sequence[int] = (),
    graph_tokens: int = 0,
) -> Runtime:
    """One rank of `points` points, those of `local` on it, or all; alike, or of `schemas`.

    With `layers` it knows the layer of each, so that rows of large passes leave while the pass runs.
    """
    sizes = TapSizes(slots, bank_rows, entries, tokens, device_ring_bytes, accumulators, lag, held, graph_tokens)
    own = tuple(range(points) if local is None else local)
    if schemas is None:
        schemas = schemas_of(len(own), width, dtype)
    kept = tuple(captures and (shard == 0 or schema.shards > 1) for schema in schemas)
    at = tuple(torch.tensor([number], dtype=torch.int32, device=device_of(kind)) for number in range(len(layers)))
    taps = some_taps(kind, Installed(own, tuple(schemas), kept, shard, tuple(layers), at), sizes)
    return Runtime(taps, [f"resid_post[{point}]" for point in range(points)], device_of(kind))


def schemas_of(points: int, width: int, dtype: torch.dtype = torch.float32) -> list[PointSchema]:
    """Points of a residual stream."""
    return [PointSchema((width,), str(dtype).removeprefix("torch."))] * points


def known_schemas(armed: Mapping[Point, int], width: int, layers: int) -> dict[Point, PointSchema]:
    """What points of a residual stream are, by their names."""
    return {
        point: PointSchema((width,), "float32", changes_kv=point.layer < layers - 1 or point.site == "resid_pre")
        for point in armed
    }


def rows_of(runtime: Runtime, captured_rows: CapturedRows) -> list[torch.Tensor]:
    """What a client on this machine makes of captured rows: the rows of every point, decoded."""
    return [rows if isinstance(rows, torch.Tensor) else rows.decoded() for rows in kept_of(runtime, captured_rows)]


def kept_of(runtime: Runtime, captured_rows: CapturedRows) -> list[torch.Tensor | CodedRows]:
    """The same, in a lossy codec as it keeps them."""
    assert captured_rows.failure is None
    assert runtime._arena is not None
    schemas = runtime.taps.layouts.schemas(captured_rows.points)
    source = Readable(runtime._arena.lines, captured_rows.lines)
    return assemble(captured_rows, schemas, source, runtime.taps.installed.shard)


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
        int(np.sum(counts)),
        torch.as_tensor(np.asarray(token_ids), device=device),
        torch.as_tensor(np.asarray(positions), device=device),
    )


def tap(runtime: Runtime, hidden: torch.Tensor, residual: torch.Tensor | None, point: int) -> None:
    """Call a tap as the operator does."""
    installed = runtime.taps.installed
    kind = installed.kinds.index(installed.kind_of(installed.schemas[point]))
    runtime.taps.on_tap(hidden, residual, number_of(runtime, point), kind)


def tap_norm(  # noqa: PLR0917 -- as the operator
    runtime: Runtime, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, point: int, epsilon: float
) -> None:
    """Call a tap with the norm behind it, as the operator does."""
    installed = runtime.taps.installed
    kind = installed.kinds.index(installed.kind_of(installed.schemas[point]))
    runtime.taps.on_tap_norm(hidden, residual, weight, number_of(runtime, point), epsilon, kind)


def number_of(runtime: Runtime, point: int) -> torch.Tensor:
    """The number of a point as its tap holds it."""
    if at := runtime.taps.installed.at:
        return at[point]
    return torch.tensor([point], dtype=torch.int32, device=runtime.device)
