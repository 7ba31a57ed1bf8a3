"""A rank without an engine, and if need be without a device: what `bench_host.py` times."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch

from steercap import Add, SteeringSpec
from steercap.core.messages import (
    Attach,
    Call,
    CapturedRows,
    Collect,
    Configure,
    Configured,
    GetSteeringRecord,
    Owner,
    Placed,
    Vectors,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import SteeringPlan
from steercap.core.receipt import check_edits
from steercap.core.rows import Ints
from steercap.core.schema import LINE_BYTES, RAW, PointSchema
from steercap.core.slots import Slots
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.kernels import triton_accumulate, triton_tap
from steercap.kernels.codecs import record_of
from steercap.steering.lowering import Lowered, lower, scopes_of
from steercap.worker.runtime import Runtime
from steercap.worker.step import BatchRows, Step
from steercap.worker.taps import Installed, TapSizes
from steercap.worker.taps.cuda import CudaTaps
from steercap.worker.taps.transfers import Transfers

POINTS: Final = 36
#: Elements of a row: few, since the host does not look at rows, and the arena must hold all of them.
WIDTH: Final = 64
PROMPT: Final = 16
#: Mode: is every row captured, is every row steered.
MODES: Final = {"idle": (False, False), "steer": (False, True), "capture": (True, False), "both": (True, True)}
_CLOSE: Final = inspect.signature(triton_tap.launch_close)


class NoDevice:
    """Transfers, and a closing kernel, of a device that takes no time: they do nothing but count what was asked for."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.uploads = 0
        self.sizes: list[Ints] = []  # bytes of each copy, of each call
        self._launched = self._ran = 0
        self._closing: Any = None

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def put(self, target: torch.Tensor, source: torch.Tensor, rows: int) -> None:
        del target, source, rows
        self.uploads += 1

    def now(self, _again: object = None) -> int:
        return self._launched

    def fetch(self, after: int, targets: Ints, sources: Ints, sizes: Ints, *, urgent: bool) -> int:
        del targets, sources, urgent
        self.sizes.append(sizes)
        return after

    def fetch_grids(self, after: int, copies: Ints) -> int:
        self.sizes.append(copies[:, 2] * copies[:, 3])
        return after

    def current(self) -> int:
        return 0

    def using(self, stream: int) -> AbstractContextManager[None]:
        del stream
        return nullcontext()

    def done(self, event: int) -> bool:
        return event <= self._ran

    def wait(self, event: int) -> None:
        assert self.done(event), "a pass is waited for that was not run"

    def hold(self, event: int) -> None:
        self.wait(event)

    @property
    def copied(self) -> int:
        """Bytes of all copies."""
        return int(sum(sizes.sum() for sizes in self.sizes))

    def close(self, *given: Any, **options: Any) -> None:
        """Stand for the launch of the closing kernel."""
        self._launched += 1
        self._closing = given, options

    def accumulate(self, *given: Any) -> None:
        """Stand for the launch that compiles the kernel of reductions, of which there are none here."""

    def run(self, step: Step | None) -> None:
        """Write that every tracked token of the pass was read, edited and copied as it should be."""
        if step is not None:
            given, options = self._closing
            said = _CLOSE.bind(*given, **options).arguments
            rows = said["reports"].numpy()[said["first"] :][: len(step)]
            rows[:] = np.stack([np.full(len(step), 7), step.positions, step.edits, step.copies], axis=1)
        self._ran = self._launched


class Rank:
    """The runtime of one rank, driven as a model runner drives it.

    Args:
        tokens: most tokens of a pass.
        transfers: of a device that runs the taps, or a NoDevice.
    """

    def __init__(self, tokens: int, transfers: Transfers | NoDevice) -> None:
        schema = PointSchema((WIDTH,), "bfloat16", changes_kv=True)
        installed = Installed(tuple(range(POINTS)), (schema,) * POINTS, (True,) * POINTS)
        sizes = TapSizes(slots=256, bank_rows=4096, entries=4, tokens=tokens, device_ring_bytes=64 << 20)
        self.transfers, device = transfers, transfers.device
        self.runtime = Runtime(
            CudaTaps(installed, sizes, transfers), [f"resid_post[{point}]" for point in range(POINTS)], device
        )
        self.record_bytes = record_of([schema] * POINTS).lines * LINE_BYTES
        self.ready = lowered(schema)
        self.hidden = torch.zeros(tokens, WIDTH, dtype=torch.bfloat16, device=device)
        self._ids = torch.arange(tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._points = [torch.tensor([point], dtype=torch.int32, device=device) for point in range(POINTS)]
        self._graphs: dict[int, Any] = {}

    def ask(self, question: Any, released: Sequence[Owner] = ()) -> Any:
        """Ask the worker as a client does."""
        return decode_answer(self.runtime.answer(encode(Call(tuple(released), question))))

    def attach(self, rows: int) -> None:
        """Make an arena for `rows` records."""
        self.ask(Attach(3 * rows * self.record_bytes + (64 << 20)))

    def register(self, names: Sequence[str], limit: int, mode: str) -> tuple[list[Plan], list[float]]:
        """Register requests of `limit` inputs each.

        Returns:
            Their plans; seconds that each took.
        """
        captures, steers = MODES[mode]
        steering = self._steering(limit) if steers else None
        plans = [
            Plan(name, PROMPT, limit, capture=everything() if captures else None, steering=steering) for name in names
        ]
        took = []
        for plan in plans if captures or steers else ():
            data = plan.encode()
            start = time.perf_counter()
            self.runtime.register(plan.key, data, 0)
            took.append(time.perf_counter() - start)
        return plans, took

    def _steering(self, limit: int) -> SteeringPlan:
        ready = self.ready
        grant = Slots(256, 4096).claim(ready.configuration, ready.digest)
        assert grant is not None
        blobs = zip(ready.configuration.blobs, grant.bank_rows, strict=True)
        vectors = tuple(Vectors(blob.digest, places, ready.vectors[blob.digest]) for blob, places in blobs)
        placed = (Placed(grant.slot, grant.configuration, grant.bank_rows),)
        assert self.ask(Configure(vectors, placed)) == Configured(())
        return SteeringPlan(grant.slot, grant.digest, b"", *scopes_of(ready, PROMPT, limit))

    def run(
        self, names: Sequence[str], starts: Ints, counts: Ints, watch: AbstractContextManager[Any] | None = None
    ) -> tuple[float, float]:
        """Run one pass; returns the seconds before it and after it, which `watch` watches."""
        watch = watch or nullcontext()
        batch = BatchRows(list(names), starts, counts, int(counts.sum()), self._ids, self._positions)
        self._prepare(batch)
        with watch:
            start = time.perf_counter()
            self.runtime.begin_step(batch)
            begun = time.perf_counter()
        step = self.runtime.taps.open_step
        self._compute(int(counts.sum()))
        with watch:
            launched = time.perf_counter()
            self.runtime.end_step()
            end = time.perf_counter()
        if isinstance(self.transfers, NoDevice):
            self.transfers.run(step)
        return begun - start, end - launched

    def _prepare(self, batch: BatchRows) -> None:
        """Have the device ready for a pass, and the tokens' positions there."""
        if isinstance(self.transfers, NoDevice):
            return
        along = [np.arange(start, start + count) for start, count in zip(batch.starts, batch.counts, strict=True)]
        positions = torch.from_numpy(np.concatenate(along))
        self._positions[: len(positions)].copy_(positions)
        if self.transfers.device.type == "cuda":
            self._graph(len(positions))
            torch.cuda.synchronize()

    def _compute(self, tokens: int) -> None:
        """Call the taps, in a CUDA graph where there is CUDA."""
        if isinstance(self.transfers, NoDevice):
            return
        if self.transfers.device.type == "cuda":
            self._graph(tokens).replay()
        else:
            self._call_taps(tokens)

    def _call_taps(self, tokens: int) -> None:
        for point in self._points:
            self.runtime.taps.on_tap(self.hidden[:tokens], None, point, 0)

    def _graph(self, tokens: int) -> Any:
        if tokens not in self._graphs:
            self._call_taps(tokens)  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._call_taps(tokens)
            self._graphs[tokens] = graph
        return self._graphs[tokens]

    def check(self, plans: Sequence[Plan], total: int) -> list[CapturedRows]:
        """Check that the worker did what was timed; returns where captured rows are.

        Raises:
            AssertionError: it does not have a row of each of `total` tokens of each request, or did not copy it.
            SteeringNotApplied: an edit is missing.
        """
        self.runtime.end_requests([plan.key for plan in plans])
        wanted = tuple(Wanted(Owner(plan.key, 0), total) for plan in plans)
        if plans[0].steering is not None:
            records = self.ask(GetSteeringRecord(wanted, (True,) * len(wanted))).records
            for plan, record in zip(plans, records, strict=True):
                check_edits(plan.key, plan, self.ready.configuration, total, [[record]])
        if plans[0].capture is None:
            return []
        shares: list[CapturedRows] = list(self.ask(Collect(wanted)).shares)
        for captured_rows in shares:
            assert isinstance(captured_rows, CapturedRows), f"the worker does not know a request: {captured_rows}"
            assert captured_rows.failure is None, captured_rows.failure
            assert np.array_equal(np.frombuffer(captured_rows.positions, dtype=np.int64), np.arange(total)), (
                captured_rows.owner
            )
        return shares


def everything() -> CapturePlan:
    """Every row of every point."""
    return CapturePlan(tuple(range(POINTS)), (Range(0, None),), None, RAW)


def lowered(schema: PointSchema) -> Lowered:
    """A vector at every layer."""
    armed = {Point(layer, "resid_post"): layer for layer in range(POINTS)}
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
    spec = SteeringSpec([Add(vector, 1e-6, layers="all")])
    return lower(spec, armed=armed, schemas=dict.fromkeys(armed, schema), num_layers=POINTS, edits_per_point=4)


@contextmanager
def opened(tokens: int, transfers: Transfers | None = None) -> Iterator[Rank]:
    """A rank; without transfers to a device, no kernel is launched while the block runs."""
    if transfers is not None:
        yield Rank(tokens, transfers)
        return
    nothing = NoDevice()
    with (
        patch.object(triton_tap, "launch_close", nothing.close),
        patch.object(triton_accumulate, "launch_accumulate", nothing.accumulate),
    ):
        yield Rank(tokens, nothing)
