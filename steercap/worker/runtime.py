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
    Equip,
    Failed,
    LineRange,
    Lines,
    Owner,
    Read,
    Settle,
    Unknown,
    decode_call,
    encode,
)
from steercap.core.plan import Plan
from steercap.core.rows import BatchRows, page_shape
from steercap.errors import WorkerFailure
from steercap.worker.arena import Arena
from steercap.worker.edits import EditTables, StepEdits
from steercap.worker.outbox import Outbox
from steercap.worker.steering import Steering
from steercap.worker.tables import StepRows, StepTables


class Runtime:
    """One rank's captures and edits.

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
        self.tables = StepTables(len(points), width)
        self._shape = page_shape(max(armed, 1), width * dtype.itemsize)
        self._arena: Arena | None = None
        self._steering: Steering | None = None
        self._outboxes: dict[Owner, Outbox] = {}
        self._by_request: dict[str, Outbox] = {}
        self._requests: dict[Owner, str] = {}
        self._in_step: list[Outbox] = []
        self._steps = 0
        self._rows_written = 0

    # The step, driven by the runner adapter

    def register(self, request_id: str, plan_bytes: bytes, sample: int) -> None:
        """A request with a plan is scheduled for the first time (or again, after preemption)."""
        plan = Plan.decode(plan_bytes)
        owner = Owner(plan.key, sample)
        if plan.steering is not None and self._steering is not None:
            self._steering.register(request_id, owner, plan, plan.steering)
        if plan.capture is None or self._arena is None or request_id in self._by_request:
            return
        if owner not in self._outboxes:
            self._outboxes[owner] = Outbox(owner, plan, plan.capture, self.points, self._arena)
        self._by_request[request_id] = self._outboxes[owner]
        self._requests[owner] = request_id

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests will not run again; their rows stay until the client gives them back."""
        gone = tuple(request_ids)
        for request_id in gone:
            self._by_request.pop(request_id, None)
        if self._steering is not None:
            self._steering.forget(gone)

    def begin_step(self, batch: BatchRows) -> None:
        """Fill the tables for the pass that is about to run."""
        self._steps += 1
        self._in_step = []
        copies: list[StepRows] = []
        edits: list[StepEdits] = []
        first_tokens = np.concatenate(([0], np.cumsum(batch.counts)))
        for index, request_id in enumerate(batch.request_ids):
            outbox, steering = self._by_request.get(request_id), self._steering_of(request_id)
            if outbox is None and steering is None:
                continue
            first, stop, start = int(first_tokens[index]), int(first_tokens[index + 1]), int(batch.starts[index])
            if batch.positions[first] != start or batch.positions[stop - 1] != start + stop - first - 1:
                reason = f"the runner computes position {batch.positions[first]} where {start} was scheduled"
                self._fail(outbox, steering, request_id, reason)
                continue
            if outbox and (rows := outbox.place(start, first, batch.token_ids[first:stop])):
                self._in_step.append(outbox)
                copies.append(rows)
            if steering and (changes := steering.place(request_id, start, first, stop - first)):
                edits.append(changes)
        if copies or edits:
            self.tables.fill(copies, edits, int(first_tokens[-1]))

    def _steering_of(self, request_id: str) -> Steering | None:
        return self._steering if self._steering and self._steering.steers(request_id) else None

    @staticmethod
    def _fail(outbox: Outbox | None, steering: Steering | None, request_id: str, reason: str) -> None:
        if outbox:
            outbox.fail(reason)
        if steering:
            steering.fail_request(request_id, reason)

    def end_step(self, error: BaseException | None = None) -> None:
        """The pass has run, or failed: see that every tap fired once and every edit was made, and close the tables."""
        if not self.tables.open:
            return
        applied = self.tables.clear()
        reason = f"the forward pass failed: {error!r}" if error else self._misfires()
        for outbox in self._in_step:
            if reason:
                outbox.fail(reason)
        self._in_step = []
        if self._steering is not None:
            self._steering.end_step(applied, reason)

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

    def _reply(self, call: Call) -> Answer:  # noqa: PLR0911 -- one answer a question
        match call.question:
            case Attach():
                return self._attach(call.question)
            case Equip():
                return self._equipment().equip(call.question)
            case Settle():
                return self._equipment().settle(call.question)
            case _ if not self.captures:
                return Bystander()
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

    def _attach(self, asked: Attach) -> Answer:
        bank_rows = asked.vector_bytes // (self.width * torch.float32.itemsize)
        with torch.inference_mode(mode=False):  # or its lines could be written in inference mode alone
            if self._steering is None:
                tables = EditTables(
                    self.points, self.width, slots=asked.slots, rows=bank_rows, entries=asked.edits_per_point
                )
                self._steering = Steering(self.points, tables, witness=self.captures)
            if self.captures and self._arena is None:
                self._arena = Arena(self._shape, self.width, self.dtype, asked.capture_bytes)
        self.tables.use(self._arena.lines if self._arena else None, self._steering.tables)
        if self._arena is None:
            return Bystander()
        return Attached(
            points=self.points,
            width=self.width,
            dtype=str(self.dtype).removeprefix("torch."),
            page_lines=self._shape.lines,
            pages=self._arena.pages.total,
            bank_rows=bank_rows,
            path=self._arena.segment.path,
            nonce=self._arena.segment.nonce,
        )

    def _release(self, owners: Sequence[Owner]) -> None:
        if self._steering is not None:
            self._steering.release(owners)
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
            steered=self._equipment().held,
            pages_in_use=arena.pages.in_use,
            pages_touched=arena.pages.touched,
            pages=arena.pages.total,
            page_bytes=self._shape.page_bytes,
            rows_written=self._rows_written + sum(outbox.writes for outbox in self._outboxes.values()),
            steps=self._steps,
        )

    def _equipment(self) -> Steering:
        if self._steering is None:
            raise WorkerFailure("the tables are not attached yet")
        return self._steering

    def _attached(self) -> Arena:
        if self._arena is None:
            raise WorkerFailure("the arena is not attached yet")
        return self._arena
