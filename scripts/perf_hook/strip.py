"""CUDA graphs without the taps that a pass does not need: copies of captured graphs with these nodes taken out.

The graph as it was captured does what any pass asks; a copy is the same without kernels that would have done nothing.
See `sitecustomize`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

#: What the name of a tap's kernel contains.
TAP: Final = b"_tap_kernel"
#: The argument of that kernel that is the address of its point: hidden, residual, point.
POINT: Final = 2
NONE: Final = frozenset[int]()
_KERNEL: Final = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_KNOWN: Final = (0, 1)  # success, and CUDA_ERROR_INVALID_VALUE, of an edge that is there already


class _Params(ctypes.Structure):
    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Edge(ctypes.Structure):
    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


@functools.cache
def driver() -> ctypes.CDLL:
    """CUDA's driver."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *args: Any) -> None:
    """Call the driver.

    Raises:
        RuntimeError: the call failed.
    """
    if status := getattr(driver(), name)(*args):
        raise RuntimeError(f"{name}: CUDA error {status}")


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _nodes(graph: ctypes.c_void_p) -> list[ctypes.c_void_p]:
    count = ctypes.c_size_t()
    call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    return [ctypes.c_void_p(node) for node in nodes]


def _point_of(node: ctypes.c_void_p) -> int | None:
    """The address of the point of a tap's node, None of any other node."""
    kind, params, name = ctypes.c_int(), _Params(), ctypes.c_char_p()
    call("cuGraphNodeGetType", node, ctypes.byref(kind))
    if kind.value != _KERNEL or driver().cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params)):
        return None
    if params.func:
        unnamed = driver().cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(params.func))
    else:
        unnamed = driver().cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(params.kernel))
    if unnamed or name.value is None or TAP not in name.value:
        return None
    address: int = ctypes.cast(params.params[POINT], ctypes.POINTER(ctypes.c_uint64))[0]
    return address


def _neighbours(node: ctypes.c_void_p, which: str) -> list[ctypes.c_void_p]:
    count = ctypes.c_size_t()
    call(which, node, None, None, ctypes.byref(count))
    found, edges = (ctypes.c_void_p * count.value)(), (_Edge * count.value)()
    if count.value:
        call(which, node, found, edges, ctypes.byref(count))
    return [ctypes.c_void_p(one) for one in found]


def _connect(graph: ctypes.c_void_p, first: ctypes.c_void_p, second: ctypes.c_void_p) -> None:
    add = getattr(driver(), "cuGraphAddDependencies_v2", None) or driver().cuGraphAddDependencies
    status = add(graph, ctypes.byref(first), ctypes.byref(second), ctypes.byref(_Edge()), ctypes.c_size_t(1))
    if status not in _KNOWN:
        raise RuntimeError(f"cuGraphAddDependencies: CUDA error {status}")


def without(graph: int, drop: Callable[[int], bool]) -> tuple[ctypes.c_void_p, int]:
    """A graph that can be launched, without some taps.

    Args:
        graph: the handle of a captured graph.
        drop: says of the address of a tap's point whether the tap is taken out.

    Returns:
        The handle of the instantiated copy; how many taps were taken out.

    Raises:
        RuntimeError: a call of the driver failed.
    """
    copied, found, taken = ctypes.c_void_p(), ctypes.c_void_p(), 0
    call("cuGraphClone", ctypes.byref(copied), ctypes.c_void_p(graph))
    for node in _nodes(copied):
        point = _point_of(node)
        if point is None or not drop(point):
            continue
        before = _neighbours(node, "cuGraphNodeGetDependencies_v2")
        after = _neighbours(node, "cuGraphNodeGetDependentNodes_v2")
        call("cuGraphDestroyNode", node)
        for first in before:
            for second in after:
                _connect(copied, first, second)
        taken += 1
    call("cuGraphInstantiateWithFlags", ctypes.byref(found), copied, ctypes.c_ulonglong(0))
    call("cuGraphUpload", found, _stream())
    call("cuGraphDestroy", copied)
    return found, taken


def launch(graph: ctypes.c_void_p) -> None:
    """Launch what `without` gave, on the current stream."""
    call("cuGraphLaunch", graph, _stream())


class Stripper:
    """Which taps the next pass needs.

    Args:
        need: whether passes that need some taps are stripped of the others.
    """

    def __init__(self, *, need: bool) -> None:
        self.addresses: dict[int, int] = {}  # of the tensor of each point, by the point's number
        self.replays = self.copies = self.taken = 0
        self.seconds = 0.0
        self._need = need
        self._known: tuple[Any, frozenset[int] | None] = (None, None)

    def learn(self, model: Any) -> None:
        """Find the points of a model with taps."""
        for owner in model.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if name.startswith("steercap_") and buffer.numel() == 1:
                    self.addresses[int(buffer)] = buffer.data_ptr()

    def wanted(self) -> frozenset[int] | None:
        """Addresses of the points whose taps the running pass needs; None for all, so that the whole graph is replayed."""
        taps = bound_taps()
        if taps is None:
            return None
        if taps.open_step is None:
            return NONE
        if not self._need or taps.open_step.replaced:
            return None
        if self._known[0] is not taps.open_step.series:
            points = points_needed(taps)
            addresses = frozenset(self.addresses[point] for point in points if point in self.addresses)
            self._known = taps.open_step.series, addresses if len(addresses) == len(points) else None
        return self._known[1]

    def count(self, taken: int, seconds: float) -> None:
        """A copy of a graph was made."""
        self.copies, self.taken, self.seconds = self.copies + 1, self.taken + taken, self.seconds + seconds

    def replayed(self) -> None:
        """A copy was replayed; say so now and then."""
        self.replays += 1
        if self.replays >= 64 and not self.replays & (self.replays - 1):
            made = f"{self.copies} copies made in {self.seconds:.2f} s, {self.taken} taps out of them"
            print(f"stripped graphs: {self.replays} replays, {made}", file=sys.stderr, flush=True)


def points_needed(taps: Any) -> list[int]:
    """Numbers of the points at which the open step copies or edits a row."""
    step, needed = taps.open_step, np.zeros(len(taps.points), dtype=np.bool_)
    for layout in np.unique(step.layouts[step.kept]):
        needed |= taps.layouts.offsets[layout] >= 0
    for slot in np.unique(step.slots[step.changed]):
        needed |= taps.programs.counts[slot] > 0
    found: list[int] = np.flatnonzero(needed).tolist()
    return found


def bound_taps() -> Any:
    """The taps of this process; None where there is no steercap."""
    tap = sys.modules.get("steercap.kernels.tap")
    return None if tap is None else tap._bound  # noqa: SLF001 -- nobody else needs to ask


@functools.cache
def stripper() -> Stripper:
    """The stripper of this process."""
    return Stripper(need=os.environ.get("PERF_STRIP") == "need")


class StrippedGraph(torch.cuda.CUDAGraph):
    """A captured graph, and its copies without some taps."""

    def __new__(cls, *_given: Any, **_options: Any) -> StrippedGraph:
        return super().__new__(cls, True)

    def __init__(self, *_given: Any, **_options: Any) -> None:
        super().__init__(True)  # type: ignore[call-arg]  # pybind's, which keeps the graph
        self._copies: dict[frozenset[int], ctypes.c_void_p] = {}

    def capture_end(self) -> None:
        super().capture_end()
        super().instantiate()

    def replay(self) -> None:
        wanted = None if torch.cuda.is_current_stream_capturing() else stripper().wanted()
        if wanted is None:
            super().replay()
            return
        if wanted not in self._copies:
            start = time.perf_counter()
            self._copies[wanted], taken = without(self.raw_cuda_graph(), lambda point: point not in wanted)
            stripper().count(taken, time.perf_counter() - start)
        launch(self._copies[wanted])
        stripper().replayed()


@contextmanager
def _stripped_graphs() -> Iterator[None]:
    plain = torch.cuda.CUDAGraph
    torch.cuda.CUDAGraph = StrippedGraph  # type: ignore[misc]
    try:
        yield
    finally:
        torch.cuda.CUDAGraph = plain  # type: ignore[misc]


def patch_cudagraph_utils(module: Any) -> None:
    """Have a model with taps capture graphs that can be stripped."""
    manager = module.ModelCudaGraphManager
    capture = manager.capture

    @functools.wraps(capture)
    def captured(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        if bound_taps() is None:
            return capture(self, model, *args, **options)
        stripper().learn(model)
        with _stripped_graphs():
            return capture(self, model, *args, **options)

    manager.capture = captured
