"""Runtime of one rank: it follows each pass, fills the taps' tables, stores captured rows, and answers the client.

A runner adapter drives it; it knows nothing of vLLM.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
import torch

from steercap.architectures.decoder import Unembedding, unembedded
from steercap.core.attention import AttentionRule
from steercap.core.messages import (
    Answer,
    Attach,
    Attached,
    Call,
    CapturedRows,
    Choose,
    CloseSAE,
    CloseSketch,
    Collect,
    Collected,
    CommitSketch,
    Configure,
    Counted,
    Engage,
    Engaged,
    Failed,
    GetStats,
    GetSteeringRecord,
    Joining,
    LineRange,
    Lines,
    Listen,
    Listening,
    Loaded,
    NotCapturing,
    OpenSAE,
    OpenSketch,
    Owner,
    PrepareSketch,
    Project,
    Read,
    ReadSketch,
    Unembed,
    Unknown,
    Wanted,
    decode_call,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import NONE
from steercap.core.rows import Ints, page_shape
from steercap.core.schema import LINE_BYTES, RAW
from steercap.errors import InvalidFrame, SteercapError, WorkerFailure
from steercap.kernels.bits import edited_most
from steercap.kernels.codecs import dtype_of, record_of
from steercap.worker.arena import Arena, Reads
from steercap.worker.biasing import Biasing
from steercap.worker.bounds import check_plan, check_vectors
from steercap.worker.buffers import AttentionBuffer, ChunkedBuffer, advance
from steercap.worker.capture_buffer import ArenaBuffer, CaptureBuffer
from steercap.worker.channel import Listener
from steercap.worker.install import Choosing, Projecting, chosen, projected
from steercap.worker.memory import WIRE_BYTES
from steercap.worker.reducing_buffer import ReducingBuffer, finish
from steercap.worker.request_table import RequestTable, Tracked
from steercap.worker.saes import SAEs
from steercap.worker.sketching import Sketches
from steercap.worker.steering import Steering
from steercap.worker.step import BatchRows, Step, StepReport
from steercap.worker.taps import Taps

_LOG: Final = logging.getLogger(__name__)
#: Maximum number of tokens of a sequence, if the runner gives no limit.
LONGEST: Final = 1 << 22


class Runtime:
    """Captures and edits of one rank: called by the runner adapter around each pass, and by the client.

    Args:
        taps: taps of this rank, with their tables.
        armed: names of all points that the engine arms.
        device: the model's device.
        loaded: description of the layers loaded on this rank.
        unembed: function from final rows to logits; None where this rank has no unembedding.
        project: function that applies a block's last projection or norm; None if not available.
        choose: function that chooses experts from router logits; None if not available.
        attention: attention rules of the layers whose queries and keys are armed, by layer.
        samples: True on the last pipeline stage, where logits are computed.
        longest: maximum tokens of a sequence.
        ahead: maximum number of positions by which a request is scheduled ahead of the device; see `BatchRows`.
    """

    def __init__(
        self,
        taps: Taps,
        armed: Sequence[str],
        device: torch.device,
        *,
        loaded: Loaded = Loaded(),  # noqa: B008 -- it cannot change
        unembed: Unembedding | None = None,
        project: Projecting | None = None,
        choose: Choosing | None = None,
        attention: Mapping[int, AttentionRule] = MappingProxyType({}),
        samples: bool = True,
        longest: int = LONGEST,
        ahead: int = 0,
    ) -> None:
        self.taps = taps
        self.ahead: Final = ahead
        self._longest = longest
        self._loaded = loaded
        self._unembed = unembed
        self._project = project
        self._choose = choose
        self._attention = dict(attention)
        self._names = tuple(armed[point] for point in taps.points)
        self.device = device
        self.captures = taps.installed.captures
        schemas = [one for one, keeps in zip(taps.schemas, taps.installed.kept, strict=True) if keeps]
        self._shape = page_shape(max(record_of(schemas).lines, 1))
        self._arena: Arena | None = None
        # Ranks of a tensor-parallel group edit the same rows, or parts of them: the first counts them.
        self._steering = Steering(taps, primary=taps.installed.shard == 0, samples=samples)
        #: Logit biases, which runner adapters add before tokens are sampled.
        self.biasing = Biasing(device)
        self._request_table = RequestTable(taps.programs, taps.layouts)
        self._kept: dict[Owner, Tracked] = {}  # requests whose rows are held
        self._sketches = Sketches(taps.layouts, device)
        self._saes = SAEs(taps.layouts, device)
        self._samples = samples
        self._steps = 0
        self._rows_written = 0
        self._failure: str | None = None  # of the pass that was begun last
        #: Lock held during a runner's step and during each answer; the channel answers on threads of its own.
        self.turn: Final = threading.Lock()
        self._listener: Listener | None = None

    # The step, driven by the runner adapter

    def register(self, request_id: str, plan_bytes: bytes, sample: int) -> None:
        """Start following a request, once, by its encoded `Plan`; `sample` is the number of the sample among its n.

        Nothing is raised: errors are logged, and the client finds neither rows nor a record of edits.
        """
        if request_id in self._request_table:
            return
        try:
            plan = Plan.decode(plan_bytes)
        except InvalidFrame as error:  # to raise would end the engine for all; this client is told of no rows
            _LOG.error("steercap neither captures nor steers a request: %s", error)
            return
        owner = Owner(plan.key, sample)
        known = owner in self._kept or self._steering.record(owner) is not None
        try:
            check_plan(plan, self._longest)
            self._enter(request_id, owner, plan)
        except Exception as error:  # noqa: BLE001 -- for the same reason
            _LOG.exception("steercap neither captures nor steers a request")
            self.end_requests([request_id])
            if not known:
                self._release([owner])
            if plan.steering is not None:
                self._steering.taint(plan.steering, f"its plan cannot be followed: {error}")

    def _enter(self, request_id: str, owner: Owner, plan: Plan) -> None:
        """Create the capture buffer and the steering state of a request, and add it to the request table."""
        capture_buffer = steered = held = None
        if plan.steering is not None:
            steered = self._steering.register(owner, plan, plan.steering)
        if plan.capture is not None and self._arena is not None and owner not in self._kept:
            vectors = plan.capture.vectors
            slot = None if vectors is None else self._steering.slot(vectors.slot, vectors.configuration)
            if slot is not None:
                check_vectors(slot.configuration, plan.capture.coding)
            capture_buffer = self._buffer_for(owner, plan, plan.capture, self._arena)
            if vectors is not None:
                held = None if slot is None else (vectors.slot, slot)
                if slot is None:
                    capture_buffer.fail(f"slot {vectors.slot} does not hold the vectors that this request's rows need")
        if capture_buffer is None and steered is None:
            return
        tracked = Tracked(owner, capture_buffer, steered, held)
        if capture_buffer is not None:
            self._kept[owner] = tracked
        self._request_table.enter(request_id, tracked)
        if steered is not None and steered.biases:
            self.biasing.enter(request_id, steered)

    def end_requests(self, request_ids: Collection[str]) -> None:
        """Stop following requests that have ended; their captured rows stay until the client releases them."""
        self._request_table.leave(request_ids)
        self.biasing.leave(request_ids)

    def begin_step(self, batch: BatchRows) -> None:
        """Fill the taps' tables for the pass that is about to run, and start the pass's logit biases."""
        self._steps += 1
        if (blocking := self.taps.blocking) is not None:
            self._take_completed(blocking)
        if self.biasing:  # biases go by position, before the pass's report
            batch = batch.settled()
        if self._samples:
            self.biasing.begin(batch)
        step, self._failure = self._request_table.make_step(batch), batch.failure
        if step is None:
            self.taps.rest()
            return
        updates, crowded = self.taps.accumulators.update(step)
        if len(crowded):
            self._fail(crowded, "too many of its newest rows may be of draft tokens that are not in its sequence")
        if reason := self.taps.open(step, batch, updates):
            self._fail(step.requests[step.kept], reason)

    def _fail(self, indices: Ints, reason: str) -> None:
        """Mark the captured rows of requests as invalid; `indices` are those in the request table."""
        for index in np.unique(indices).tolist():
            if (capture_buffer := self._request_table.at(index).capture_buffer) is not None:
                capture_buffer.fail(reason)

    def end_step(self, error: BaseException | None = None) -> None:
        """Close the tables after a pass was launched, or failed with `error`; process the passes completed by now."""
        if self.taps.open_step is not None:
            self.taps.close(f"the forward pass failed: {error!r}" if error else self._failure)
        self._take_completed()

    def _take_completed(self, through: Step | None = None) -> None:
        """Process the passes known to be completed; if `through` is given, wait for all passes up to that one."""
        for steps, report in self.taps.completed(through):
            self._verify(steps, report)
            self._request_table.complete(len(steps))

    def _verify(self, steps: Sequence[Step], report: StepReport) -> None:
        """Process the report of finished passes: label rows with the token ids read, and note rows that are not finite.

        Requests whose positions, edits or copies differ from a step, or whose edited rows overflowed, fail; all of
        the passes do if the report itself is a failure. Nothing is raised.
        """
        whole = Step.compared(steps)
        wrong = (report.positions != whole.positions) | (report.edits != whole.edits) | (report.copies != whole.copies)
        if (overflowed := report.overflowed != NONE).any():
            wrong |= overflowed & self._request_table.within(whole)
        if report.failure:
            wrong[:] = True
        if wrong.any():
            first = 0
            for step in steps:
                own = slice(first, first + len(step))
                self._refuse(step, report.of(own), wrong[own])
                first += len(step)
        for token in np.flatnonzero(report.nonfinite != NONE).tolist():
            if (capture_buffer := self._request_table.at(int(whole.requests[token])).capture_buffer) is not None:
                point, position = int(report.nonfinite[token]), int(whole.positions[token])
                if reason := self._impossible(point, position):
                    capture_buffer.fail(reason)
                else:
                    capture_buffer.found_nonfinite(position, self.taps.points[point])
        self._request_table.record_token_ids(whole, report.token_ids)

    def _refuse(self, step: Step, report: StepReport, wrong: np.ndarray) -> None:
        """Fail the requests of the tokens in `wrong`, bool [tracked], whose report differs from the step."""
        for index in np.unique(step.requests[wrong]).tolist():
            tracked = self._request_table.at(index)
            own = np.flatnonzero(wrong & (step.requests == index))
            count = int((step.requests == index).sum())
            reason = report.failure or self._difference(step, report, own, count)
            if tracked.capture_buffer is not None:
                tracked.capture_buffer.fail(reason)
            if tracked.steered is not None:
                self._steering.fail(tracked.steered, reason)

    def _difference(self, step: Step, report: StepReport, own: Ints, count: int) -> str:
        """Describe how the report on the tokens `own`, of a request with `count` tokens, differs from the step."""
        first = own[0]
        if report.positions[first] != step.positions[first]:
            return f"the runner computes position {report.positions[first]} where {step.positions[first]} was scheduled"
        if (report.copies[own] != step.copies[own]).any():
            return f"{len(own)} of {count} tokens of a pass were not copied exactly once at each point"
        if (report.edits[own] != step.edits[own]).any():
            return f"{len(own)} of {count} tokens of a pass did not get their edits"
        point = int(report.overflowed[first])
        if reason := self._impossible(point, int(step.positions[first])):
            return reason
        schema = self.taps.schemas[point]
        return (
            f"the edited row of position {step.positions[first]} overflows at {self._names[point]}: an element is NaN, "
            f"infinite or beyond {edited_most(dtype_of(schema)):.3g}, the most that an edit may leave in "
            f"{schema.dtype}; use a smaller scale"
        )

    def _impossible(self, point: int, position: int) -> str | None:
        """Describe a reported point that this rank does not have; None for one that it has."""
        count = len(self.taps.points)
        if 0 <= point < count:
            return None
        return f"its pass reported point {point} of {count} at position {position}, so its rows cannot be trusted"

    def _wait_for(self, wanted: Sequence[Wanted]) -> None:
        """Wait for the passes that computed the wanted tokens, but not for later ones."""
        for item in wanted:
            if (tracked := self._request_table.find(item.owner)) is not None:
                self._request_table.flush(tracked)
        totals, pending = self._request_table.totals(wanted), reversed(self.taps.pending)
        self._take_completed(next((step for step in pending if (step.lowest < totals[step.requests]).any()), None))

    # The client's calls

    def answer(self, frame: bytes) -> bytes:
        """Answer one frame of the client with another; an error becomes a `Failed` frame with its message.

        Raising would desynchronise vLLM's replies; tracebacks of unexpected errors go to this process's log.
        """
        try:
            call = decode_call(frame)
            with self.turn, torch.inference_mode():
                self._release(call.released)
                return encode(self._reply(call))
        except Exception as error:  # noqa: BLE001 -- the boundary of RPC and channel
            if not isinstance(error, SteercapError):
                _LOG.exception("steercap could not answer its client")
            return encode(Failed(f"{type(error).__name__}: {error}"))

    def _reply(self, call: Call) -> Answer:  # noqa: C901, PLR0911, PLR0912 -- one answer per question
        match call.question:
            case Configure():
                return self._steering.configure(call.question, self._request_table.slots())
            case GetSteeringRecord(wanted):
                self._wait_for(wanted)
                self.biasing.confirm(wanted)
                return self._steering.settle(call.question)
            case Engage(owners):
                return Engaged(tuple(map(self._engage, owners)))
            case Unembed():
                return unembedded(self._unembed, call.question, self.device)
            case Project():
                return projected(self._project, call.question, self.device)
            case Choose():
                return chosen(self._choose, call.question, self.device)
            case Listen():
                return Listening(self._listen())
            case _ if not self.captures:
                return NotCapturing()
            case Attach():
                return self._attach(call.question)
            case Collect(wanted):
                self._wait_for(wanted)
                boxes = ((self._kept.get(item.owner), item.total) for item in wanted)
                finish(
                    self.taps, {found.capture_buffer: total for found, total in boxes if found and found.capture_buffer}
                )
                if not self._summarised(wanted):
                    for item in wanted:  # a pass that is on its way may still have its tokens
                        self._look_again(self._kept.get(item.owner))
                    return Collected((), unfinished=True)
                return Collected(tuple(map(self._seal, wanted)))
            case PrepareSketch(joining):
                self._wait_for([one.wanted for one in joining])
                return Collected(tuple(map(self._prepare_sketch, joining)))
            case OpenSketch() | CommitSketch() | ReadSketch() | CloseSketch():
                return self._sketches.answer(call.question)
            case OpenSAE() | CloseSAE():
                return self._saes.answer(call.question)
            case Read(nonce, ranges):
                return Lines(self._read(ranges)) if nonce == self._attached().segment.nonce else NotCapturing()
            case GetStats():
                return self._count()
        raise WorkerFailure(f"no answer to {call.question!r}")

    def _listen(self) -> str:
        """Open the channel unless it is open; return its address, "" if this machine refuses it."""
        if self._listener is None:
            try:
                self._listener = Listener(self.answer, self.device)
            except OSError as error:
                _LOG.warning("the client will use RPC only: %s", error)
                return ""
        return self._listener.address

    def _engage(self, owner: Owner) -> int | None:
        """Start edits of a request that were held back; return the first position that they reach, None if unknown."""
        steered = self._steering.record(owner)
        if steered is None:
            return None
        tracked = self._request_table.find(owner)
        if tracked is not None:
            self._request_table.flush(tracked)
        start = steered.engage()
        if tracked is not None:
            self._request_table.discard_prediction(tracked)
        return start

    def _buffer_for(self, owner: Owner, plan: Plan, capture: CapturePlan, arena: Arena) -> CaptureBuffer:
        if capture.accumulates:
            return ReducingBuffer(owner, plan, capture, self.taps.layouts, arena, self.taps)
        if capture.attention is not None:
            return AttentionBuffer(self._attention, owner, plan, capture, self.taps.layouts, arena)
        reads = self._saes.encoders(capture.points, capture.saes) if capture.saes else ()
        capture_buffer = self._kept_by(owner, plan, capture, arena, reads or ())
        if reads is None:
            capture_buffer.fail("the SAE that should read its rows is not loaded in this worker")
        return capture_buffer

    def _kept_by(self, owner: Owner, plan: Plan, capture: CapturePlan, arena: Arena, reads: Reads) -> ArenaBuffer:
        """Create a buffer whose rows stay in the arena, or, if the plan has a window, leave it in chunks.

        Raises:
            WorkerFailure: the rows should leave the arena, and there is no file for them or they are reduced.
        """
        if not capture.window:
            return ArenaBuffer(owner, plan, capture, self.taps.layouts, arena, reads)
        if arena.file is None or capture.reduce:
            raise WorkerFailure("rows of this request cannot leave memory while it runs")
        return ChunkedBuffer(owner, plan, capture, self.taps.layouts, arena, reads, arena.file, self._wait_for_all)

    def _wait_for_all(self) -> None:
        """Wait until the rows of all passes that were launched are in the arena."""
        pending = self.taps.pending
        self._take_completed(pending[-1] if pending else None)

    def _summarised(self, wanted: Sequence[Wanted]) -> bool:
        """Compute a part of the wanted attention summaries; return True once all are written."""
        found = ((self._kept.get(item.owner), item.total) for item in wanted)
        boxes = ((one.capture_buffer, total) for one, total in found if one is not None)
        return advance({box: total for box, total in boxes if isinstance(box, AttentionBuffer)}, self.device)

    def _seal(self, item: Wanted) -> CapturedRows | Unknown:
        tracked = self._kept.get(item.owner)
        if tracked is None or tracked.capture_buffer is None:
            return Unknown(item.owner)
        captured_rows = tracked.capture_buffer.seal(item.total, item.first)
        self._look_again(tracked)
        return captured_rows

    def _look_again(self, tracked: Tracked | None) -> None:
        """Discard the prediction of a request's next tokens if its buffer captures no more."""
        if tracked is not None and tracked.capture_buffer is not None and tracked.capture_buffer.layout == NONE:
            self._request_table.discard_prediction(tracked)

    def _prepare_sketch(self, joining: Joining) -> CapturedRows | Unknown:
        captured_rows = self._seal(joining.wanted)
        if isinstance(captured_rows, Unknown) or captured_rows.failure or captured_rows.nonfinite:
            return captured_rows  # and the client refuses it
        rows = self._kept[joining.wanted.owner].capture_buffer
        if not isinstance(rows, ArenaBuffer) or rows.capture.sent != RAW:
            refused: str | None = "its rows are not kept unchanged, as a sketch needs"
        else:
            refused = self._sketches.prepare(joining, rows)
        return msgspec.structs.replace(captured_rows, failure=refused)

    def _attach(self, message: Attach) -> Answer:
        if self._arena is None:
            with torch.inference_mode(mode=False):  # or its lines could be written in inference mode alone
                self._arena = Arena(self._shape, message.capture_bytes, self.device)
                if message.spill_folder:
                    self._arena.add_file(Path(message.spill_folder), message.spill_bytes)
                self.taps.use(self._arena)
        points = self.taps.layouts.points(self.taps.points)
        return Attached(
            points=tuple(points),
            schemas=tuple(self.taps.layouts.schemas(points)),
            shard=self.taps.installed.shard,
            page_lines=self._shape.lines,
            pages=self._arena.pages.total,
            bank_rows=self.taps.sizes.bank_rows,
            bank_width=self.taps.installed.bank_width,
            reductions=self.taps.accumulators.total,
            held=self.taps.accumulators.held,
            path=self._arena.segment.path,
            nonce=self._arena.segment.nonce,
            loaded=self._loaded,
            attention=self._attention,
            file="" if self._arena.file is None else self._arena.file.path,
            file_lines=0 if self._arena.file is None else self._arena.file.lines,
        )

    def _release(self, owners: Sequence[Owner]) -> None:
        self._steering.release(owners)
        self._sketches.forget(owners)
        for owner in owners:
            tracked = self._kept.pop(owner, None)
            capture_buffer = None if tracked is None else tracked.capture_buffer
            if tracked is None or capture_buffer is None:
                continue
            self._request_table.stop_keeping(tracked)
            self._rows_written += capture_buffer.writes
            capture_buffer.free()

    def _read(self, ranges: Sequence[LineRange]) -> bytes:
        arena, lines = self._attached(), sum(item.count for item in ranges)
        if lines * LINE_BYTES > WIRE_BYTES:
            raise WorkerFailure(f"{lines:,} lines are asked for, more than fit in a frame")
        return b"".join(arena.stored(item.start, item.count).numpy().tobytes() for item in ranges)

    def _count(self) -> Counted:
        arena = self._attached()
        for tracked in self._request_table:
            self._request_table.flush(tracked)
        return Counted(
            requests=len(self._kept),
            steered=self._steering.held,
            pages_in_use=arena.pages.in_use,
            pages_touched=arena.pages.touched,
            pages=arena.pages.total,
            page_bytes=self._shape.page_bytes,
            rows_written=self._rows_written
            + sum(
                tracked.capture_buffer.writes for tracked in self._kept.values() if tracked.capture_buffer is not None
            ),
            steps=self._steps,
            sketches=len(self._sketches),
            sketch_bytes=self._sketches.nbytes,
            saes=len(self._saes),
            sae_bytes=self._saes.nbytes,
            tables=self.taps.table_bytes,
            arena_pinned=arena.pinned,
        )

    def _attached(self) -> Arena:
        if self._arena is None:
            raise WorkerFailure("the arena is not attached yet")
        return self._arena
