"""Interface of a rank's taps, for any device; each kind of device has modules for its tables and rows.

A tap copies and edits the rows at one point (a site of a layer) in each forward pass. Configurations and vectors are
written when the client sends them; a step's tables are opened before the pass and closed after it. Later the step is
completed: the label, edits and copies of every token are known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from msgspec import structs

from steercap.core.messages import TableBytes
from steercap.core.program import Configuration
from steercap.core.rows import Ints
from steercap.core.schema import PointSchema
from steercap.kernels.reference import add_norm
from steercap.worker.accumulators import Accumulators, Updates
from steercap.worker.arena import Arena, Layouts, RecordLayout
from steercap.worker.programs import Programs
from steercap.worker.step import BatchRows, Step, StepReport


@dataclass(frozen=True)
class TapSizes:
    """Sizes of the taps' tables, fixed before the model is traced.

    Args:
        slots: number of steering configurations in use at once.
        bank_rows: number of rows of the vector bank.
        entries: maximum rank-one edits of a point.
        tokens: maximum tokens of a pass, padding included.
        device_ring_bytes: device memory for the rows of passes that are being copied to the host; None for as much as
            passes need. Unused on CPU, where rows need no copy.
        accumulators: number of reductions that can run at once, each in an accumulator.
        lag: maximum positions that vLLM may compute past the end of a sequence, rejected drafts included.
        held: maximum rows of a request that are held out of its reduction until their tokens are final.
        graph_tokens: maximum tokens of a pass that runs a CUDA graph; 0 where none does.
        drafts: tokens drafted for a request after a pass, by a model that may share modules with this one.
    """

    slots: int
    bank_rows: int
    entries: int
    tokens: int
    device_ring_bytes: int | None = None
    accumulators: int = 0
    lag: int = 0
    held: int = 1
    graph_tokens: int = 0
    drafts: int = 0


@dataclass(frozen=True)
class RowKind:
    """Kind of rows that points of a rank have in common: their schema, and the rank's part of it.

    Args:
        schema: schema (row shape, dtype, shards) of all these points.
        first: offset of the rank's part of a row, in elements.
    """

    schema: PointSchema
    first: int

    @property
    def width(self) -> int:
        """Number of elements of the rank's part of a row."""
        return self.schema.shard_width


@dataclass(frozen=True)
class Installed:
    """Points of a rank that have taps.

    Args:
        points: indices among the engine's armed points, ascending; a tap carries the index of its point in this tuple.
        schemas: schemas of these points.
        kept: True for the points whose rows this rank keeps; rows that every rank holds whole are kept by the first.
        shard: index of this rank's shard of rows that are split.
        layers: layer of each point; () if unknown.
        at: tensor per point with its index, int32 [1]; a tap names its point by this tensor's address; () if unknown.
    """

    points: tuple[int, ...]
    schemas: tuple[PointSchema, ...]
    kept: tuple[bool, ...]
    shard: int = 0
    layers: tuple[int, ...] = ()
    at: tuple[torch.Tensor, ...] = field(default=(), compare=False)

    @property
    def kinds(self) -> tuple[RowKind, ...]:
        """Distinct kinds of the points' rows, in the order of the points; `changes_kv` is ignored."""
        return tuple(dict.fromkeys(self.kind_of(schema) for schema in self.schemas))

    def kind_of(self, schema: PointSchema) -> RowKind:
        """Return the kind of this rank's rows at points of a schema."""
        first = self.shard * schema.shard_width if schema.shards > 1 else 0
        return RowKind(structs.replace(schema, changes_kv=True), first)

    @property
    def captures(self) -> bool:
        """True if this rank keeps rows of any point."""
        return any(self.kept)

    @property
    def bank_width(self) -> int:
        """Width of a bank row: elements of the widest row over all ranks; other stages' vectors may be longer."""
        return max((schema.width for schema in self.schemas), default=1)


class Taps(ABC):
    """Taps of one rank: tables that say which rows of a pass to copy and edit, and the pending steps.

    Args:
        installed: result of `install_taps`.
        sizes: sizes of the tables.
    """

    def __init__(self, installed: Installed, sizes: TapSizes) -> None:
        self.installed = installed
        self.points = installed.points
        self.schemas = installed.schemas
        self.sizes = sizes
        self.programs = Programs(self.points, slots=sizes.slots, entries=sizes.entries)
        self.layouts = Layouts(self.points, self.schemas, installed.kept)
        self.accumulators = Accumulators(sizes.accumulators, sizes.lag, sizes.held)
        self.arena: Arena | None = None
        self.open_step: Step | None = None

    def use(self, arena: Arena) -> None:
        """Write captured rows to this arena from now on."""
        self.arena = arena

    @property
    @abstractmethod
    def table_bytes(self) -> TableBytes:
        """Sizes in bytes of the taps' tables and of device memory for rows, the arena not included."""

    @abstractmethod
    def configure(self, slot: int, configuration: Configuration, bank_rows: Sequence[Sequence[int]]) -> None:
        """Write a configuration into a slot; `bank_rows` are the bank rows of each of its blobs."""

    @abstractmethod
    def put(self, bank_rows: Sequence[int], vectors: Float[torch.Tensor, "rows width"]) -> None:
        """Write vectors into these rows of the bank; the vectors may be narrower than a bank row."""

    @abstractmethod
    def open(self, step: Step, batch: BatchRows, updates: Updates | None) -> str | None:
        """Fill the tables for the pass that is about to run.

        Args:
            step: work for the tracked tokens of the pass.
            batch: description of the whole pass.
            updates: updates of running reductions, None if there are none.

        Returns:
            The reason why the pass's rows cannot be captured, or None; edits are made in any case.
        """

    @abstractmethod
    def close(self, failure: str | None) -> None:
        """End the opened pass; `failure` says why it failed, if it did. All taps are idle until the next `open`."""

    def rest(self) -> None:  # noqa: B027 -- taps on a host are idle from `close` on
        """Make all taps idle, before a pass that `open` is not called for."""

    @abstractmethod
    def spill(self, accumulator: int, layout: RecordLayout, lines: Ints) -> Any:
        """Copy a running reduction and its held rows, after all passes closed so far, to the arena.

        Args:
            accumulator: index of the accumulator.
            layout: layout of the request's records.
            lines: first arena line of each record: the first for the reduction, the last ones for each slot's held row.

        Returns:
            The copy's event, for `wait_for`.
        """

    @abstractmethod
    def finish(self, updates: Updates, divisors: Ints, layouts: Sequence[RecordLayout], lines: Ints) -> Any:
        """Apply updates that add held rows only, divide, and copy the reductions to the arena.

        Args:
            updates: updates, one per reduction.
            divisors: divisor of each reduction.
            layouts: record layout of each reduction's request.
            lines: first arena line of each reduction, stored as float32.

        Returns:
            The copy's event, for `wait_for`.
        """

    @abstractmethod
    def wait_for(self, event: Any) -> None:
        """Block until a copy into the arena has ended; `event` is what `spill` or `finish` returned."""

    @property
    @abstractmethod
    def pending(self) -> Sequence[Step]:
        """Steps that were closed and are not completed yet, in the order of their passes."""

    @property
    def blocking(self) -> Step | None:
        """Step that must be completed before another can be opened; None if there is none."""
        return None

    @abstractmethod
    def completed(self, through: Step | None = None) -> Iterator[tuple[Sequence[Step], StepReport]]:
        """Yield steps whose passes have run and whose rows are in the arena, in order, each once, with their report.

        Consecutive steps may come together, with one report. Some may be held back until others can come with them, or
        until they are waited for.

        Args:
            through: step to wait for, which is then among those yielded; None to wait for none.
        """

    @abstractmethod
    def on_tap(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: Int[torch.Tensor, " 1"],
        kind: int,
    ) -> None:
        """Copy and edit the open step's rows at a point; called by the tap operator, once per point and pass.

        Args:
            hidden, residual, point: as for `kernels.tap.tap`.
            kind: index in `installed.kinds` of the kind of the point's rows.
        """

    def on_tap_norm(  # noqa: PLR0917 -- as the operator
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"],
        weight: Float[torch.Tensor, " width"],
        point: Int[torch.Tensor, " 1"],
        epsilon: float,
        kind: int,
    ) -> None:
        """Call `on_tap`, then add and RMS-norm all rows in place; see `kernels.tap.tap_norm`."""
        self.on_tap(hidden, residual, point, kind)
        add_norm(hidden, residual, weight, epsilon)
