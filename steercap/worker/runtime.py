"""What runs beside the model: it follows each step, fills the tables, keeps the rows, and answers the client.

Number 4 to 7 in the life of a request. A runner adapter drives it; it knows nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch

from steercap.core.messages import (
    Answer,
    Attach,
    Attached,
    Bystander,
    Call,
    Census,
    Collect,
    Collected,
    Counted,
    Failed,
    LineRange,
    Lines,
    Owner,
    Read,
    Unknown,
    decode_call,
    encode,
)
from steercap.core.plan import CapturePlan
from steercap.core.rows import BatchRows, page_shape
from steercap.errors import WorkerFailure
from steercap.worker.arena import Arena
from steercap.worker.outbox import Outbox
from steercap.worker.tables import StepTables


class Runtime:
    """One rank's capture.

    Args:
        points: indices of this rank's points among the engine's armed points, ascending; the position in this tuple
            is the number its tap carries.
        armed: how many points the whole engine arms.
        width: elements of a row.
        dtype: the model's dtype.
        captures: whether this rank keeps rows: rank 0 of its tensor-parallel group.
    """

    def __init__(self, points: Sequence[int], armed: int, width: int, dtype: torch.dtype, *, captures: bool) -> None:
        self.points: Final = tuple(points)
        self.width = width
        self.dtype = dtype
        self.captures = captures
        self.tables = StepTables(len(points))
        self._shape = page_shape(max(armed, 1), width * dtype.itemsize)
        self._arena: Arena | None = None
        self._outboxes: dict[Owner, Outbox] = {}
        self._by_request: dict[str, Outbox] = {}
        self._requests: dict[Owner, str] = {}
        self._in_step: list[Outbox] = []
        self._steps = 0
        self._rows_written = 0

    # The step, driven by the runner adapter

    def register(self, request_id: str, plan_bytes: bytes, sample: int) -> None:
        """A request with a plan is scheduled for the first time (or again, after preemption)."""
        if not self.captures or self._arena is None or request_id in self._by_request:
            return
        plan = CapturePlan.decode(plan_bytes)
        owner = Owner(plan.key, sample)
        if owner not in self._outboxes:
            self._outboxes[owner] = Outbox(owner, plan, self.points, self._arena)
        self._by_request[request_id] = self._outboxes[owner]
        self._requests[owner] = request_id

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests will not run again; their rows stay until the client gives them back."""
        for request_id in request_ids:
            self._by_request.pop(request_id, None)

    def begin_step(self, batch: BatchRows) -> None:
        """Fill the tables for the pass that is about to run."""
        self._steps += 1
        self._in_step, steps = [], []
        first_tokens = np.concatenate(([0], np.cumsum(batch.counts)))
        for index, request_id in enumerate(batch.request_ids):
            outbox = self._by_request.get(request_id)
            if outbox is None:
                continue
            first, stop, start = int(first_tokens[index]), int(first_tokens[index + 1]), int(batch.starts[index])
            if batch.positions[first] != start or batch.positions[stop - 1] != start + stop - first - 1:
                outbox.fail(f"the runner computes position {batch.positions[first]} where {start} was scheduled")
                continue
            rows = outbox.place(start, first, batch.token_ids[first:stop])
            if rows is not None:
                self._in_step.append(outbox)
                steps.append(rows)
        if steps:
            self.tables.fill(steps, int(first_tokens[-1]))

    def end_step(self, error: BaseException | None = None) -> None:
        """The pass has run, or failed: see that every tap fired once, and close the tables."""
        self.tables.clear()
        if not self._in_step:
            return
        reason = f"the forward pass failed: {error!r}" if error else self._misfires()
        for outbox in self._in_step:
            if reason:
                outbox.fail(reason)
        self._in_step = []

    def _misfires(self) -> str | None:
        if self.tables.misfit:
            return self.tables.misfit
        wrong = np.flatnonzero(self.tables.fired != 1)
        if len(wrong):
            return (
                f"taps of points {[self.points[tap] for tap in wrong]} fired {self.tables.fired[wrong]} times, not once"
            )
        return None

    # The client's calls

    def answer(self, frame: bytes) -> bytes:
        """Answer one frame; errors become a frame too, since raising would desynchronise vLLM's replies."""
        try:
            call = decode_call(frame)
            with torch.inference_mode():
                self._release(call.released)
                return encode(self._reply(call))
        except Exception as error:  # noqa: BLE001 -- the RPC boundary
            return encode(Failed(f"{type(error).__name__}: {error}"))

    def _reply(self, call: Call) -> Answer:
        if not self.captures:
            return Bystander()
        match call.question:
            case Attach(capture_bytes):
                return self._attach(capture_bytes)
            case Collect(wanted):
                return Collected(
                    tuple(
                        self._outboxes[item.owner].seal(item.total, item.first)
                        if item.owner in self._outboxes
                        else Unknown(item.owner)
                        for item in wanted
                    )
                )
            case Read(ranges):
                return Lines(self._read(ranges))
            case Census():
                return self._count()
        raise WorkerFailure(f"no answer to {call.question!r}")

    def _attach(self, capture_bytes: int) -> Attached:
        if self._arena is None:
            with torch.inference_mode(mode=False):  # or its lines could be written in inference mode alone
                self._arena = Arena(self._shape, self.width, self.dtype, capture_bytes)
            self.tables.use(self._arena.lines)
        arena = self._arena
        return Attached(
            points=self.points,
            width=self.width,
            dtype=str(self.dtype).removeprefix("torch."),
            page_lines=self._shape.lines,
            pages=arena.pages.total,
            path=arena.segment.path,
            nonce=arena.segment.nonce,
        )

    def _release(self, owners: Iterable[Owner]) -> None:
        for owner in owners:
            outbox = self._outboxes.pop(owner, None)
            if outbox is None:
                continue
            self._rows_written += outbox.writes
            outbox.free()
            self._by_request.pop(self._requests.pop(owner), None)

    def _read(self, ranges: Iterable[LineRange]) -> bytes:
        arena = self._attached()
        return b"".join(
            arena.lines[item.start : item.start + item.count].contiguous().view(torch.uint8).numpy().tobytes()
            for item in ranges
        )

    def _count(self) -> Counted:
        arena = self._attached()
        return Counted(
            requests=len(self._outboxes),
            pages_in_use=arena.pages.in_use,
            pages_touched=arena.pages.touched,
            pages=arena.pages.total,
            page_bytes=self._shape.page_bytes,
            rows_written=self._rows_written + sum(outbox.writes for outbox in self._outboxes.values()),
            steps=self._steps,
        )

    def _attached(self) -> Arena:
        if self._arena is None:
            raise WorkerFailure("the arena is not attached yet")
        return self._arena
