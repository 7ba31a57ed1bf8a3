"""Taps on CUDA: tables at fixed addresses, filled once per step; rows are copied to the host while the model runs.

All tables of the taps are on the device before vLLM traces or captures the model, and their addresses never change;
where no pass is expected every token's entry is -1, so dummy runs, warm-up and graph capture find idle taps. A pass
consists of one copy to the device on the model's stream, the forward pass, and one kernel that writes each token's
report and makes the tables idle again. Within a series that kernel writes the next pass's tables instead, and nothing
is copied. Rows wait in a ring buffer on the device while another stream copies them into the pinned arena that the
client maps; those of a large pass leave it layer by layer while the pass runs (`taps.large`). The model's stream never
waits for the host, and for a copy only when the ring is full; the host then waits for a pass with drafts, whose rows'
lines come with its report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int

from steercap.core.messages import TableBytes
from steercap.core.program import MAX_REPLACEMENTS, NONE, Configuration
from steercap.core.rows import Ints
from steercap.core.schema import LINE_BYTES
from steercap.kernels import triton_tap as kernel
from steercap.kernels.bits import LINE, REPLACED, TOKEN_COLUMNS, split_checksum
from steercap.kernels.codecs import record_of
from steercap.worker.accumulators import Updates
from steercap.worker.arena import LAYOUTS, RecordLayout
from steercap.worker.programs import ENTRY_NUMBERS
from steercap.worker.step import BatchRows, Step, StepReport
from steercap.worker.taps import Installed, RowKind, Taps, TapSizes
from steercap.worker.taps.cuda_rows import (
    DeviceAccumulators,
    DeviceEncoder,
    overlap,
    pieces,
    ring,
    ring_bytes,
    runs,
    typed,
)
from steercap.worker.taps.large import LargePass, LayerRows, RowMemory
from steercap.worker.taps.passes import Bundle, Pass, Pattern
from steercap.worker.taps.transfers import GRID_COLUMNS, Ring, Transfers

#: Maximum number of passes that are running or being copied to the host.
AHEAD: Final = 64
#: Share of the ring that one pass, or one part of a large pass, may use.
PART: Final = 1 / 8
#: Failure of a large pass whose taps ran again after their rows had left, or did not identify their point.
LOST: Final = (
    "taps of this model did not run layer by layer; rows cannot leave the device while a large pass runs, so later "
    "passes must fit in device memory whole"
)
#: Maximum number of vector writes that wait to be copied to the device.
VECTORS: Final = 256
#: Maximum passes, and tokens unless one pass has more, whose reports are read together; and the number of pending
#: passes from which on they are read without a call of the client.
TOGETHER, TOKENS_TOGETHER, WAITING = 16, 16_384, 24
#: Number of passes, and bytes of rows, from which on copies to the host are queued.
BUNDLE: Final = 8
BUNDLE_BYTES: Final = 8 << 20
#: Share of the ring that rows of up to BUNDLE passes may occupy while their copies wait for a pass without prompts.
POSTPONED: Final = 1 / 8
#: Maximum bytes of one copy, so that other copies can run in between.
PIECE_BYTES: Final = 32 << 20
#: Maximum bytes queued for copying beside a pass: a constant, plus this share of the bytes that the pass's own tokens
#: can need. So rows of a large pass do not delay the small passes after it, and leave before the ring is full.
BESIDE_BYTES: Final = 64 << 20
BESIDE_SHARE: Final = 1.25


class CudaTaps(Taps):
    """Taps of a rank that computes on CUDA.

    Args:
        installed, sizes: see `Taps`.
        transfers: copies between host and device.
    """

    def __init__(self, installed: Installed, sizes: TapSizes, transfers: Transfers) -> None:
        super().__init__(installed, sizes)
        self._transfers = transfers
        self._kinds = installed.kinds
        device, count = transfers.device, max(len(self.points), 1)
        kept = [schema for schema, keeps in zip(self.schemas, installed.kept, strict=True) if keeps]
        record = record_of(kept).lines
        self._record_bytes = record * LINE_BYTES
        #: First point of each layer, then the number of points; and each point's index by the address of its `at`.
        self._layers = [*np.unique(installed.layers, return_index=True)[1].tolist(), len(installed.points)]
        self._addresses = {at.data_ptr(): number for number, at in enumerate(installed.at)}
        lines = 1
        if installed.captures:
            layers = self._layers if self._addresses else ()
            lines = max(ring_bytes(installed, sizes, layers, device) // LINE_BYTES, 1)

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._tokens = table(sizes.tokens, TOKEN_COLUMNS) - 1
        self._counts = table(sizes.slots, count)
        self._entries = table(sizes.slots, count, sizes.entries, kernel.ENTRY_COLUMNS)
        self._responses = table(sizes.slots, count, sizes.entries, kernel.RESPONSE_COLUMNS, dtype=torch.float32)
        self._bank = table(max(sizes.bank_rows, 1), installed.bank_width, dtype=torch.float32)
        self._layouts = table(LAYOUTS, count) - 1
        self._replacements = table(sizes.tokens * MAX_REPLACEMENTS)
        self._checksums = table(sizes.tokens, 2, dtype=torch.int64)
        head = record if self._addresses else 0
        self._rows = ring(head + lines, device)
        self._launchers = [self._launcher(kind) for kind in self._kinds]
        self._sums = DeviceAccumulators(installed, self.accumulators, self._layouts, transfers, AHEAD)
        self._encoder = DeviceEncoder(
            installed, self.programs, self._bank, transfers, sizes.tokens if installed.captures else 1, AHEAD
        )
        # In host memory, to which the device writes: the reports are few, and a copy would cost the host more.
        self._reports = transfers.pinned((AHEAD * sizes.tokens, kernel.REPORT_COLUMNS), torch.int64)
        self._said = self._reports.numpy().reshape(AHEAD, sizes.tokens, kernel.REPORT_COLUMNS)
        self._uploads = [transfers.pinned(self._tokens.shape, torch.int32) for _ in range(AHEAD)]
        self._tables: list[npt.NDArray[np.int32]] = [upload.numpy() for upload in self._uploads]
        self._pattern: Pattern | None = None
        self._lines: Ring[Pass | LayerRows] = Ring(lines)
        # Of a small ring at most a quarter waits: the next passes need the rest.
        self._bundle_lines = min(BUNDLE_BYTES // LINE_BYTES, lines // 4)
        self._passed: deque[Pass] = deque()
        self._waiting: list[Pass] = []  # with rows that no bundle has yet
        self._waiting_lines = 0
        self._bundles: deque[Bundle] = deque()  # that are not wholly queued
        self._open: Pass | None = None
        self._closed: list[Any] = [None] * AHEAD  # events, by the number of their pass
        self._number = 0
        #: Last pass if its tables were left on the device for the next one, and the ring line of that one's rows.
        self._stays: tuple[Pass, int] | None = None
        self._filled = 0  # tokens whose entries on the device may not be idle
        self._dirty: set[int] = set()
        self._vectors: list[tuple[Sequence[int], torch.Tensor]] = []
        nothing = table(1)  # compile the kernels that no dummy run of the model would compile
        works = self._encoder, self._sums, transfers
        self._memory = RowMemory(self._rows, head, self._lines, self._tokens, nothing, *works, self._leave)
        kernel.launch_close(self._tokens, self._checksums, self._reports, nothing, nothing.long(), 0, 1)
        self._sums.launch(self._rows, 1)

    @property
    def table_bytes(self) -> TableBytes:
        pinned = self._reports.nbytes + sum(upload.nbytes for upload in self._uploads)
        return TableBytes(
            ring=self._rows.nbytes if self.installed.captures else 0,
            ring_in_use=self._lines.in_use * LINE_BYTES,
            bank=self._bank.nbytes,
            accumulators=self._sums.nbytes,
            pinned=pinned + self._sums.pinned_bytes + self._encoder.pinned_bytes,
        )

    def configure(self, slot: int, configuration: Configuration, bank_rows: Sequence[Sequence[int]]) -> None:
        self.programs.configure(slot, configuration, bank_rows)
        self._dirty.add(slot)

    def put(self, bank_rows: Sequence[int], vectors: Float[torch.Tensor, "rows width"]) -> None:
        self._vectors.append((bank_rows, vectors))
        if len(self._vectors) > VECTORS:
            self._write_tables()

    def open(self, step: Step, batch: BatchRows, updates: Updates | None) -> str | None:
        self._write_tables()
        self._number += 1  # `blocking` ensures that the last pass to use these buffers is completed
        read, number = (batch.token_ids, batch.positions), self._number % AHEAD
        if self._stays is not None:
            (before, line), self._stays = self._stays, None
            if step.series is before.step.series and step.ahead == before.step.ahead + 1 and updates is None:
                self._open, self.open_step = Pass(step, before.pattern, *read, number, line), step
                return None
        pattern, failure = self._pattern_of(step, batch), None
        prompts = int(batch.counts.max()) > 1 + self.sizes.drafts
        opened = Pass(step, pattern, *read, number, 0, prompts=prompts)
        large = self._large(step, pattern, updates, batch)
        if large is not None and large.lines <= self._lines.size:
            opened.large = large
            self._copy_away()  # rows of requests that are gone may still be on their way to these pages
            self._upload(step, pattern, np.full(len(step), NONE, dtype=np.int64))
        else:
            if pattern.lines > self._lines.size:
                failure = self._too_many(pattern.lines if large is None else large.lines)
                opened.step, updates = step.keeping_nothing(), None
                opened.pattern = self._pattern_of(opened.step, batch)
            self._place(opened, updates)
        self._open, self.open_step = opened, opened.step
        return failure

    def _large(self, step: Step, pattern: Pattern, updates: Updates | None, batch: BatchRows) -> LargePass | None:
        """Return the plan of a pass that runs no CUDA graph and needs much of the ring; None for any other pass."""
        most = int(self._lines.size * PART)
        if not self._addresses or pattern.lines <= most or len(pattern.table) <= self.sizes.graph_tokens:
            return None
        if step.bounds is not None:  # its rows are on their way before its report is there
            step.settle(batch.positions.cpu().numpy()[step.tokens])
        arena = None if self.arena is None else self.arena.lines
        return LargePass(self._memory, step, pattern, updates, self.layouts, self._layers, most, arena)

    def _place(self, opened: Pass, updates: Updates | None) -> None:
        """Reserve places in the ring for the rows of a pass, and fill the tables."""
        step, pattern = opened.step, opened.pattern
        if pattern.lines:
            line, busy = self._lines.reserve(pattern.lines)
            opened.line = line
            for done in busy:
                self._leave(done)
        first = self._memory.head + opened.line
        opened.sources = sources = pattern.sources(first)
        self._upload(step, pattern, sources)
        if updates is not None:
            opened.updates = len(updates)
            self._sums.upload(self._number, step, updates, sources, step.raw_lines)
        if pattern.encodes:
            encoded = pattern.encoded
            targets, of = pattern.targets(first, step.strides), step.layouts[encoded]
            layouts = [self.layouts[number] for number in np.unique(of).tolist()]
            records = np.stack([sources[encoded], targets], axis=1)
            opened.encoded = self._encoder.upload(self._number, layouts, of, records)
            sources[encoded] = targets

    def _leave(self, done: Pass | LayerRows) -> None:
        """Make the model's stream wait until the rows of a pass, or of a part of one, are copied to the host."""
        if isinstance(done, Pass):
            self._copy_away(through=done)
        self._transfers.hold(done.copied)

    def _pattern_of(self, step: Step, batch: BatchRows) -> Pattern:
        if self._pattern is None or self._pattern.series is not step.series:
            self._pattern = Pattern.of(step, batch.num_tokens)
        return self._pattern

    def close(self, failure: str | None) -> None:
        done, self._open, self.open_step = self._open, None, None
        if done is None:
            return
        done.failure = failure = failure or done.failure
        drains = self.arena is not None and done.pattern.drains and done.large is None
        if drains:
            self._lines.hold(done.line, done.pattern.lines, done)
        num_tokens, read = len(done.pattern.table), (done.token_ids, done.positions)
        first, moved = done.number * self.sizes.tokens, self._moved(done)
        kernel.launch_close(self._tokens, self._checksums, self._reports, *read, first, num_tokens, moved)
        self._filled = 0 if moved is None else num_tokens
        if done.updates:
            self._sums.launch(self._rows, done.updates)
        self._encoder.launch(self._rows, done.encoded)
        if done.large is not None:
            done.large.leave()
            if done.large.lost:
                self._addresses, done.failure = {}, failure or LOST
        done.closed = self._closed[done.number] = self._transfers.now(self._closed[done.number])
        # Rows of earlier passes only: this pass's own would delay its sampled tokens, which the runner copies next.
        full = len(self._waiting) >= BUNDLE or self._waiting_lines >= self._bundle_lines
        # After a pass with prompts the device waits for the host; after a graph the host has time.
        later = done.prompts and len(self._waiting) < BUNDLE and self._waiting_lines < self._lines.size * POSTPONED
        if self._bundles or (full and not later):
            self._bundle(wait=False)
            self._queue(BESIDE_BYTES + int(BESIDE_SHARE * num_tokens * self._record_bytes))
        if done.large is not None:
            # After its report too, which comes behind the copies of the parts.
            done.copied = self._transfers.fetch_grids(done.closed, np.empty((0, GRID_COLUMNS), dtype=np.int64))
        elif drains:
            self._waiting.append(done)
            self._waiting_lines += done.pattern.lines
        else:
            done.copied = done.closed
        self._passed.append(done)

    def rest(self) -> None:
        self._stays = None
        if self._filled:
            self._tokens[: self._filled].fill_(NONE)
            self._filled = 0

    def _moved(self, done: Pass) -> int | None:
        """Keep the tables of a pass for the next one, if its series is likely to go on.

        Returns:
            Distance in ring lines from the pass's rows to the next pass's; None if the tables are to be idle.
        """
        step, pattern = done.step, done.pattern
        own = step.replaced or done.updates or pattern.encodes or done.large  # more than these tables
        goes_on = step.ahead and not (own or done.failure or self.sizes.drafts)
        line = self._lines.next(pattern.lines) if goes_on else None
        if line is None:
            return None
        self._stays = done, line
        return line - done.line

    def _settle(self, done: Pass, *, wait: bool) -> bool:
        """Correct the positions of a pass by its report; False if the report is not there yet and `wait` is False."""
        if done.step.bounds is not None:
            if not (wait or self._transfers.done(done.closed)):
                return False
            self._transfers.wait(done.closed)
            _, positions, *_ = self._said[done.number, : len(done.step)].T
            done.step.settle(positions)
        return True

    def _bundle(self, through: Pass | None = None, *, wait: bool = True) -> None:
        """Bundle the copies of waiting passes up to `through`, or of all; without `wait`, of those with known lines."""
        count = len(self._waiting) if through is None else self._waiting.index(through) + 1
        count = next((at for at in range(count) if not self._settle(self._waiting[at], wait=wait)), count)
        passes, self._waiting = self._waiting[:count], self._waiting[count:]
        self._waiting_lines = sum(done.pattern.lines for done in self._waiting)
        if not passes:
            return
        targets, sources, sizes = self._pieces(passes)
        if overlap(targets, sizes):  # rows computed again, or another request's page; copies of a call have no order
            self._bundles += [Bundle([one], self._pieces([one])) for one in passes]
        else:
            self._bundles.append(Bundle(passes, (targets, sources, sizes)))

    def _copy_away(self, through: Pass | None = None) -> None:
        """Queue the copies of all closed passes, or of those up to `through`."""
        if through is None or through in self._waiting:
            self._bundle(through)
        self._queue(through=through)

    def _queue(self, most: float = inf, *, through: Pass | None = None) -> None:
        """Queue copies of bundles, in their order.

        Args:
            most: maximum bytes to queue.
            through: last pass to copy, urgently, since a caller waits for it; None for no such pass.
        """
        while self._bundles and (through is None or through.copied is None):
            bundle = self._bundles[0]
            targets, sources, sizes = (numbers[bundle.queued :] for numbers in bundle.copies)
            count = int(np.searchsorted(np.cumsum(sizes), most, side="right"))
            if len(sizes) and not count:
                return
            now = targets[:count], sources[:count], sizes[:count]
            event = self._transfers.fetch(bundle.passes[-1].closed, *now, urgent=through is not None)
            most -= int(sizes[:count].sum())
            bundle.queued += count
            if count < len(sizes):
                return
            for done in bundle.passes:
                done.copied = event
            self._bundles.popleft()

    def spill(self, accumulator: int, layout: RecordLayout, lines: Ints) -> Any:
        assert self.arena is not None
        self._copy_away()  # rows of other requests may still be on their way to these pages
        return self._sums.spill(accumulator, layout, lines, self.arena.lines)

    def finish(self, updates: Updates, divisors: Ints, layouts: Sequence[RecordLayout], lines: Ints) -> Any:
        assert self.arena is not None
        self._copy_away()
        return self._sums.finish(self._rows, updates, divisors, layouts, lines, self.arena.lines)

    def wait_for(self, event: Any) -> None:
        self._transfers.wait(event)

    @property
    def pending(self) -> Sequence[Step]:
        return [done.step for done in self._passed]

    @property
    def blocking(self) -> Step | None:
        return self._passed[0].step if len(self._passed) >= AHEAD - 1 else None

    def completed(self, through: Step | None = None) -> Iterator[tuple[Sequence[Step], StepReport]]:
        while self._passed and (through is not None or len(self._passed) >= WAITING):
            passes = self._together(through)
            last = passes[-1]
            if through is not None:
                self._copy_away(through=last)
                self._transfers.wait(last.copied)
            elif last.copied is None or not self._transfers.done(last.copied):
                return
            steps = [done.step for done in passes]
            for done in passes:
                self._settle(done, wait=True)
            said = np.concatenate([self._said[done.number, : len(done.step)] for done in passes])
            for done in passes:
                self._passed.popleft()
                for held in (done,) if done.large is None else done.large.leaving:
                    self._lines.free(held)
            if last.step is through:
                through = None
            token_ids, positions, *checksums = said.T
            (edits, overflowed), (copies, nonfinite) = map(split_checksum, checksums)
            yield steps, StepReport(token_ids, positions, edits, copies, overflowed, nonfinite, last.failure)

    def _together(self, through: Step | None) -> Sequence[Pass]:
        """Return the oldest passes whose reports are read together, none after `through`; a failed pass comes alone.

        All of them have rows being copied, or none: the event of the last follows those of the others.
        """
        found, tokens = [self._passed[0]], len(self._passed[0].step)
        for done in islice(self._passed, 1, TOGETHER):
            tokens += len(done.step)
            alike = done.pattern.drains == found[0].pattern.drains and (done.large is None) == (found[0].large is None)
            alike = alike and not (done.failure or found[0].failure)
            if found[-1].step is through or not alike or tokens > TOKENS_TOGETHER:
                break
            found.append(done)
        return found

    def _launcher(self, kind: RowKind) -> kernel.TapLauncher:
        bank, ring = self._bank[:, kind.first : kind.first + kind.width], typed(self._rows, kind.schema)
        programs = self._counts, self._entries, self._responses
        return kernel.TapLauncher(
            self._tokens, *programs, bank, self._replacements, ring, self._layouts, self._checksums
        )

    def on_tap(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: Int[torch.Tensor, " 1"],
        kind: int,
    ) -> None:
        self._check(hidden, residual, kind)
        self._before(point)
        self._launchers[kind].launch(hidden, residual, point, idle=self.open_step is None)

    def on_tap_norm(  # noqa: PLR0917 -- as the operator
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"],
        weight: Float[torch.Tensor, " width"],
        point: Int[torch.Tensor, " 1"],
        epsilon: float,
        kind: int,
    ) -> None:
        self._check(hidden, residual, kind)
        if residual.stride(-1) != 1 or weight.stride(-1) != 1 or len(weight) != hidden.shape[-1]:
            raise ValueError(f"a tap saw a residual of strides {residual.stride()}, weights of {weight.stride()}")
        self._before(point)
        self._launchers[kind].launch_norm(hidden, residual, weight, point, epsilon, idle=self.open_step is None)

    def _before(self, point: torch.Tensor) -> None:
        """Make room in the ring for the rows of a point whose tap runs next, in a large pass."""
        if self._open is not None and self._open.large is not None:
            self._open.large.before(self._addresses.get(point.data_ptr(), NONE))

    def _check(self, hidden: torch.Tensor, residual: torch.Tensor | None, kind: int) -> None:
        """Check that a tap's tensors have the width of its `kind` (see `Tap`), contiguous rows, and not too many.

        Too few rows, such as those of the prompts in a batch alone, are other tokens' rows: the open pass fails.

        Raises:
            ValueError: they do not.
        """
        width = self._kinds[kind].width
        if hidden.shape[-1] != width or hidden.stride(-1) != 1 or len(hidden) > len(self._tokens):
            raise ValueError(f"a tap saw {tuple(hidden.shape)}, rows are {width} wide, {len(self._tokens)} at most")
        if residual is not None and residual.shape != hidden.shape:
            raise ValueError(f"a tap saw {tuple(hidden.shape)} and a residual of {tuple(residual.shape)}")
        if self._open is not None and len(hidden) < (tokens := len(self._open.pattern.table)):
            self._open.failure = (
                f"a tap saw a tensor of shape {tuple(hidden.shape)}; expected {tokens} tokens × {width}"
            )

    def _too_many(self, lines: int) -> str:
        """Return the error message for a pass whose rows do not fit the ring."""
        return (
            f"one pass keeps {lines * LINE_BYTES:,} bytes of rows, and the device holds "
            f"{self._lines.size * LINE_BYTES:,}; raise SteerModel(..., device_ring_bytes=), lower "
            "max_num_batched_tokens=, or capture fewer points"
        )

    def _upload(self, step: Step, pattern: Pattern, sources: Ints) -> None:
        """Copy the taps' tables of a pass to the device in one copy; `sources` are the ring lines, int64 [tracked]."""
        number, count = self._number % AHEAD, len(pattern.table)
        table = self._tables[number]
        table[:count] = pattern.table
        if pattern.raw_lines:
            table[pattern.places, LINE] = sources
        if step.replaced:
            self._replace(step, table)
        if count < self._filled:
            self.rest()
        self._transfers.put(self._tokens, self._uploads[number], count)
        self._filled = count

    def _replace(self, step: Step, table: npt.NDArray[np.int32]) -> None:
        """Copy the bank rows of replacements to the device; write the index of each token's first one to `table`."""
        rows = list(step.replaced.values())
        ends = np.cumsum([len(row) for row in rows])
        table[step.tokens[list(step.replaced)], REPLACED] = ends - [len(row) for row in rows]
        flat = self._to_device(np.concatenate(rows).astype(np.int32))
        self._replacements[: len(flat)].copy_(flat)

    def _write_tables(self) -> None:
        """Copy the vectors, configurations and layouts written since the last pass to the device."""
        for bank_rows, vectors in self._vectors:
            width = min(vectors.shape[1], self._bank.shape[1])  # no point of this rank is wider
            rows = self._transfers.to_device(vectors[:, :width].contiguous())
            self._bank[:, :width].index_copy_(0, self._to_device(np.array(bank_rows)), rows)
        self._vectors = []
        if self._dirty:
            slots = np.array(sorted(self._dirty))
            self._dirty = set()
            numbers = np.stack([self.programs.columns[name][slots] for name in ENTRY_NUMBERS], -1)
            padding = kernel.ENTRY_COLUMNS - len(ENTRY_NUMBERS)
            entries = np.pad(numbers, [(0, 0)] * 3 + [(0, padding)])
            there = self._to_device(slots)
            for to, what in (
                (self._entries, entries),
                (self._responses, self.programs.responses[slots]),
                (self._counts, self.programs.counts[slots]),
            ):
                to.index_copy_(0, there, self._to_device(what))
        if self.layouts.fresh:
            numbers = np.array(list(self.layouts.fresh))
            self.layouts.fresh.clear()
            self._layouts.index_copy_(0, self._to_device(numbers), self._to_device(self.layouts.offsets[numbers]))

    def _to_device(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return self._transfers.to_device(torch.from_numpy(np.ascontiguousarray(values)))

    def _pieces(self, passes: Sequence[Pass]) -> tuple[Ints, Ints, Ints]:
        """Return the copies of passes' rows to the arena: target addresses, source addresses, sizes in bytes."""
        assert self.arena is not None
        records = Step.records([one.step for one in passes])
        head, pattern = self._memory.head, passes[0].pattern
        if all(one.sources is None and one.pattern is pattern for one in passes):
            sources = pattern.sources(np.array([[head + one.line] for one in passes])).ravel()
        else:
            sources = np.concatenate(
                [one.pattern.sources(head + one.line) if one.sources is None else one.sources for one in passes]
            )
        drained = records[0] != NONE
        if not drained.all():
            records, sources = records[:, drained], sources[drained]
        to, start, lines = runs(records[0], sources, records[1])
        targets, sources = self.arena.lines.data_ptr() + to * LINE_BYTES, self._rows.data_ptr() + start * LINE_BYTES
        return pieces(targets, sources, lines * LINE_BYTES, PIECE_BYTES)
