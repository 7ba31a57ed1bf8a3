"""Taps on CPU: PyTorch operations on host tensors that write captured rows directly into the shared arena.

A step is completed as soon as its pass has run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from steercap.core.messages import TableBytes
from steercap.core.program import NONE, Configuration
from steercap.core.rows import Ints
from steercap.core.schema import RAW
from steercap.kernels.codecs import ENCODINGS
from steercap.worker.accumulators import Updates
from steercap.worker.arena import Arena, RecordLayout
from steercap.worker.programs import HostEdits
from steercap.worker.reduce import write_reduced
from steercap.worker.step import BatchRows, Step, StepReport
from steercap.worker.taps import Installed, Taps, TapSizes
from steercap.worker.taps.host_rows import Copies, HostAccumulators, Keeping, KeepingEncoded, KeepingReduced


class HostTaps(Taps):
    """Taps of a rank that computes on CPU."""

    def __init__(self, installed: Installed, sizes: TapSizes) -> None:
        super().__init__(installed, sizes)
        self._kinds = [installed.kind_of(schema) for schema in self.schemas]
        # Zeroed pages are not resident until they are written.
        self._bank = torch.zeros((max(sizes.bank_rows, 1), installed.bank_width), dtype=torch.float32)
        self._edits = HostEdits(self.programs)
        self._sums = HostAccumulators(self.schemas, 0, 1)
        self._keeping: tuple[list[Keeping], list[Keeping]] = ([], [])  # for rows before their edits, and after
        self._fired: Ints = np.zeros(len(self.points), dtype=np.int64)
        self._misfit: str | None = None
        self._nonfinite: list[tuple[int, torch.Tensor]] = []  # points, and batch indices of their non-finite rows
        self._num_tokens = 0
        self._labels: tuple[Ints, Ints] = (self._fired[:0], self._fired[:0])
        self._done: list[tuple[Step, StepReport]] = []

    def use(self, arena: Arena) -> None:
        super().use(arena)
        self._sums = HostAccumulators(self.schemas, self.accumulators.total, self.accumulators.held)

    @property
    def table_bytes(self) -> TableBytes:
        return TableBytes(bank=self._bank.nbytes, accumulators=self._sums.nbytes)

    def configure(self, slot: int, configuration: Configuration, bank_rows: Sequence[Sequence[int]]) -> None:
        self.programs.configure(slot, configuration, bank_rows)

    def put(self, bank_rows: Sequence[int], vectors: Float[torch.Tensor, "rows width"]) -> None:
        width = min(vectors.shape[1], self._bank.shape[1])  # no point of this rank is wider
        self._bank[torch.tensor(bank_rows), :width] = vectors[:, :width]

    def open(self, step: Step, batch: BatchRows, updates: Updates | None) -> str | None:
        self._fired[:] = 0
        self._misfit = None
        self._nonfinite = []
        self._num_tokens = batch.num_tokens
        tokens = torch.from_numpy(step.tokens)
        self._labels = _host(batch.token_ids, tokens), _host(batch.positions, tokens)
        step.settle(self._labels[1])
        self._keeping = ([], [])
        if self.arena is not None:
            if updates is not None:
                self._sums.begin(updates)
            before = self.layouts.before[step.layouts]
            kept = [list(self._keepers(step, step.kept & chosen, updates, self.arena)) for chosen in (before, ~before)]
            self._keeping = (kept[0], kept[1])
        self._edits.fill(step)
        self.open_step = step
        return None

    def _keepers(self, step: Step, chosen: np.ndarray, updates: Updates | None, arena: Arena) -> Iterator[Keeping]:
        """Yield the objects that store the rows of the chosen tokens, bool [tracked]: raw, encoded, or reduced."""
        drained, encoded = chosen & step.drained, self.layouts.encoded[step.layouts]
        whole = np.flatnonzero(drained & ~encoded)
        if len(whole):
            yield Copies(step, whole, self.layouts, arena, self.schemas)
        others = np.flatnonzero(drained & encoded)
        for number in np.unique(step.layouts[others]).tolist():
            own = others[step.layouts[others] == number]
            layout = self.layouts[number]
            yield KeepingEncoded(step, own, layout, arena, self.schemas, self._kinds, self.programs, self._bank)
        if updates is not None:
            yield KeepingReduced(step, updates, chosen, self.layouts, self._sums)

    def close(self, failure: str | None) -> None:
        step, self.open_step = self.open_step, None
        self._keeping = ([], [])  # frees SAEs that nothing else refers to
        if step is not None:
            failure = failure or self._misfit or self._misfires()
            self._done.append((step, self._report(step, failure)))

    def _report(self, step: Step, failure: str | None) -> StepReport:
        nonfinite: Ints = np.full(len(step), NONE, dtype=np.int64)
        for point, tokens in reversed(self._nonfinite):  # the first point is written last
            nonfinite[np.searchsorted(step.tokens, tokens.numpy())] = point
        edits, overflowed = self._edits.made(step)
        return StepReport(*self._labels, edits, step.copies, overflowed, nonfinite, failure)

    def spill(self, accumulator: int, layout: RecordLayout, lines: Ints) -> Any:
        assert self.arena is not None
        self._put_sums(accumulator, 1, layout, int(lines[0]))
        raw, slots = ENCODINGS["raw"], self.accumulators.held
        for slot, line in enumerate(lines[-slots:].tolist()):
            for local, offset in zip(layout.locals, layout.raw.offsets, strict=True):
                row = self._sums.held[local][accumulator * slots + slot]
                self.arena.write(line, raw.encode(row[None], self.schemas[local], RAW, None)[0], offset)

    def finish(self, updates: Updates, divisors: Ints, layouts: Sequence[RecordLayout], lines: Ints) -> Any:
        self._sums.begin(updates)
        ends = zip(updates.accumulators.tolist(), divisors.tolist(), layouts, lines.tolist(), strict=True)
        for accumulator, divisor, layout, line in ends:
            self._put_sums(accumulator, divisor, layout, line)

    def _put_sums(self, accumulator: int, divisor: int, layout: RecordLayout, line: int) -> None:
        assert self.arena is not None
        schemas = [self.schemas[local] for local in layout.locals]
        write_reduced(
            self.arena, line, schemas, [self._sums.sums[local][accumulator] / divisor for local in layout.locals]
        )

    def wait_for(self, event: Any) -> None:
        """Return at once: `spill` and `finish` have copied before they return."""

    @property
    def pending(self) -> Sequence[Step]:
        return [step for step, _ in self._done]

    def completed(self, through: Step | None = None) -> Iterator[tuple[Sequence[Step], StepReport]]:  # noqa: ARG002 -- all have run
        while self._done:
            step, report = self._done.pop(0)
            yield [step], report

    def on_tap(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: Int[torch.Tensor, " 1"],
        kind: int,  # noqa: ARG002 -- the point says it
    ) -> None:
        if self.open_step is None:
            return
        at = int(point)
        self._fired[at] += 1
        rows = self._kinds[at]
        if hidden.dim() != 2 or len(hidden) < self._num_tokens or hidden.shape[-1] != rows.width:
            self._misfit = (
                f"tap {at} saw a tensor of shape {tuple(hidden.shape)}; expected {self._num_tokens} tokens × "
                f"{rows.width}"
            )
            return
        self._keep(0, hidden, residual, at)
        if self._edits.wanted(at, hidden.dtype):
            self._edits.apply(hidden, residual, at, self._bank[:, rows.first : rows.first + rows.width])
        self._keep(1, hidden, residual, at)

    def _keep(self, when: int, hidden: torch.Tensor, residual: torch.Tensor | None, point: int) -> None:
        """Store the rows of one point that are captured before its edits (`when` 0), or after them (1)."""
        for keeping in self._keeping[when]:
            self._nonfinite += [(point, tokens) for tokens in keeping.take(hidden, residual, point)]

    def _misfires(self) -> str | None:
        wrong = np.flatnonzero(self._fired != 1)
        if len(wrong):
            return f"taps of points {[self.points[tap] for tap in wrong]} fired {self._fired[wrong]} times, not once"
        return None


def _host(values: torch.Tensor, tokens: torch.Tensor) -> Ints:
    found: Ints = values[tokens].to(torch.int64).numpy()
    return found
