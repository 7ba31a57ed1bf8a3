"""Copies between host and device while the model runs, and the ring buffer whose rows wait for them.

A pass over hundreds of requests has hundreds of rows to copy to as many addresses. Since CUDA 12.8 the driver accepts
such a list in one call, which PyTorch does not offer; before that the copies are queued one by one.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import torch

from steercap.core.rows import Ints
from steercap.errors import WorkerFailure
from steercap.kernels.triton_tap import stream_handle

_IN_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_COMPUTE: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_HOST: Final = 1  # CU_MEMORYTYPE_HOST
_DEVICE: Final = 2  # CU_MEMORYTYPE_DEVICE
#: Number of columns of the copies that `fetch_grids` takes.
GRID_COLUMNS: Final = 6
#: Maximum bytes of one copy of a grid, so that other copies can run in between.
GRID_BYTES: Final = 32 << 20


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("access_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class _Grid(ctypes.Structure):
    """Arguments of the CUDA driver's 2D copy, `CUDA_MEMCPY2D`."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_step", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_int),
        ("target", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_step", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
    )


class Transfers(Protocol):
    """Interface for copies between host and device beside a running model; events mark the copies' progress."""

    device: torch.device

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate pinned host memory, which the device can access directly; uninitialised."""

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Copy host values to the device asynchronously, before the next work on the model's stream."""

    def put(self, target: torch.Tensor, source: torch.Tensor, rows: int) -> None:
        """Copy the first `rows` rows of pinned memory to the device, before the next work on the model's stream.

        Args:
            target, source: contiguous tensors of one shape and dtype.
            rows: number of rows, one at least.
        """

    def now(self, again: Any = None) -> Any:
        """Record and return an event after all work on the model's stream so far; `again` is one to reuse, or None."""

    def fetch(self, after: Any, targets: Ints, sources: Ints, sizes: Ints, *, urgent: bool) -> Any:
        """Copy `sizes` bytes from addresses on the device to pinned addresses, once `after` was reached.

        Args:
            after: an event on the model's stream.
            targets, sources, sizes: int64 [copies] each.
            urgent: True if a caller waits for the copies; else the runner's own copies go first.

        Returns:
            The event after these copies.
        """

    def fetch_grids(self, after: Any, copies: Ints) -> Any:
        """Copy rows at regular distances to pinned memory, once `after` was reached; the runner's own copies go first.

        Args:
            after: an event on the model's stream.
            copies: int64 [copies, GRID_COLUMNS]: target, source, row bytes, rows, row strides of target and source.

        Returns:
            The event after these copies.
        """

    def current(self) -> Any:
        """Return the stream that work is queued on: the current one."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager in which work is queued on `stream`, as if it were the model's."""

    def done(self, event: Any) -> bool:
        """Return whether the device has reached an event."""

    def wait(self, event: Any) -> None:
        """Block until the device has reached an event."""

    def hold(self, event: Any) -> None:
        """Make the model's stream wait for an event."""


class CudaTransfers:
    """Transfers on a CUDA device: copies to the host on a separate stream, many in one call of the driver.

    A device has one engine for copies to the host. The runner's copies, the sampled tokens that its scheduler
    waits for, go first. `WorkerFailure` is raised if the driver refuses a copy.

    Args:
        device: the model's device.
        first: stream on which the runner copies to the host, if it has one.
    """

    def __init__(self, device: torch.device, first: torch.cuda.Stream | None = None) -> None:
        self.device = device
        self._first_stream = first
        self._stream = torch.cuda.Stream(device)
        self._model_stream = torch.cuda.current_stream(device)
        driver = ctypes.CDLL("libcuda.so.1")
        self._there: Any = driver.cuMemcpyHtoDAsync_v2
        self._there.argtypes = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        self._one: Any = driver.cuMemcpyDtoHAsync_v2
        self._grid: Any = driver.cuMemcpy2DAsync_v2
        # The call lost its `failIdx` argument with CUDA 13; the driver keeps the older one under the older name.
        self._batch: Any = getattr(driver, "cuMemcpyBatchAsync_v2", None)
        self._older = self._batch is None
        if self._older:
            self._batch = getattr(driver, "cuMemcpyBatchAsync", None)
        self._attributes = _Attributes(_IN_STREAM_ORDER, _Location(0, 0), _Location(0, 0), _BESIDE_COMPUTE)
        self._first = ctypes.c_size_t(0)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        return values.pin_memory().to(self.device, non_blocking=True)

    def put(self, target: torch.Tensor, source: torch.Tensor, rows: int) -> None:
        # By address: to take the views of a few rows takes longer than to queue the copy.
        size = rows * target.stride(0) * target.itemsize
        if status := self._there(target.data_ptr(), source.data_ptr(), size, self.current().cuda_stream):
            raise WorkerFailure(f"a copy of {size} bytes to the device failed (CUDA error {status})")

    def now(self, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event() if again is None else again
        event.record(self.current())
        return event

    def current(self) -> torch.cuda.Stream:
        """Return the current stream; the object is reused, since making a new one takes longer than queueing a copy."""
        if stream_handle(self._model_stream.device) != self._model_stream.cuda_stream:
            self._model_stream = torch.cuda.current_stream(self.device)
        return self._model_stream

    def fetch(
        self, after: torch.cuda.Event, targets: Ints, sources: Ints, sizes: Ints, *, urgent: bool
    ) -> torch.cuda.Event:
        self._stream.wait_event(after)
        if self._first_stream is not None and not urgent:
            self._stream.wait_stream(self._first_stream)
        handle = ctypes.c_void_p(self._stream.cuda_stream)
        if self._batch is None or not self._fetch_all(targets, sources, sizes, handle):
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                status = self._one(ctypes.c_void_p(target), ctypes.c_uint64(source), ctypes.c_size_t(size), handle)
                if status:
                    raise WorkerFailure(f"a copy of {size} bytes to host memory failed (CUDA error {status})")
        return self._event()

    def fetch_grids(self, after: torch.cuda.Event, copies: Ints) -> torch.cuda.Event:
        self._stream.wait_event(after)
        if self._first_stream is not None:
            self._stream.wait_stream(self._first_stream)
        handle = ctypes.c_void_p(self._stream.cuda_stream)
        for target, source, size, rows, target_step, source_step in copies.tolist():
            together = max(GRID_BYTES // size, 1)
            for first in range(0, rows, together):
                to, start, count = (
                    target + first * target_step,
                    source + first * source_step,
                    min(together, rows - first),
                )
                here, there = (_DEVICE, None, start, None, source_step), (_HOST, to, 0, None, target_step)
                grid = _Grid(0, 0, *here, 0, 0, *there, size, count)
                if status := self._grid(ctypes.byref(grid), handle):
                    raise WorkerFailure(f"a copy of {count} × {size} bytes to host memory failed (CUDA error {status})")
        return self._event()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _fetch_all(self, targets: Ints, sources: Ints, sizes: Ints, handle: ctypes.c_void_p) -> bool:
        """Queue copies, as for `fetch`, on the CUDA stream `handle` in one call; return False if it took none."""
        if not len(sizes):
            return True
        arrays = [np.ascontiguousarray(numbers, dtype=np.uint64) for numbers in (targets, sources, sizes)]
        pointers = [ctypes.c_void_p(numbers.ctypes.data) for numbers in arrays]
        count, one = ctypes.c_size_t(len(sizes)), ctypes.c_size_t(1)
        failed = [ctypes.byref(ctypes.c_size_t(0))] if self._older else []
        attributes, first = ctypes.byref(self._attributes), ctypes.byref(self._first)
        status = self._batch(*pointers, count, attributes, first, one, *failed, handle)
        if status:
            self._batch = None  # this driver, or this memory, does not support it: copy one by one
        return not status

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def hold(self, event: torch.cuda.Event) -> None:
        self.current().wait_event(event)


Holder = TypeVar("Holder")


class Ring(Generic[Holder]):
    """Allocator of a ring buffer of `size` places, in which holders keep consecutive places until they free them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._next = 0
        self._taken: deque[tuple[int, int, Holder]] = deque()  # first place, stop, and holder

    @property
    def in_use(self) -> int:
        """Number of places that holders keep."""
        return sum(stop - first for first, stop, _ in self._taken)

    def reserve(self, count: int) -> tuple[int, list[Holder]]:
        """Reserve `count` consecutive places, dropping the oldest holders until none is in the way.

        Returns:
            The first place, and the dropped holders, which must be waited for before the places are written.

        Raises:
            ValueError: `count` exceeds the size of the ring.
        """
        if count > self.size:
            raise ValueError(f"{count} places in a ring of {self.size}")
        waiting = []
        while (first := self.next(count)) is None:
            waiting.append(self._taken.popleft()[2])
        return first, waiting

    def next(self, count: int) -> int | None:
        """Reserve `count` consecutive places if no holder is in the way; return the first, else None."""
        first = self._next if self._next + count <= self.size else 0
        if count > self.size or self._overlaps(first, first + count):
            return None
        self._next = first + count
        return first

    def hold(self, first: int, count: int, holder: Holder) -> None:
        """Record that `holder` keeps places [first, first + count) until it is freed."""
        if count:
            self._taken.append((first, first + count, holder))

    def _overlaps(self, first: int, stop: int) -> bool:
        """Return whether any holder keeps a place in [first, stop)."""
        return any(start < stop and first < end for start, end, _ in self._taken)

    def free(self, holder: Holder) -> None:
        """Free all places of a holder, if it is the oldest; else do nothing."""
        while self._taken and self._taken[0][2] is holder:
            self._taken.popleft()
