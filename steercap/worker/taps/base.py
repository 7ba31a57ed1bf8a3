"""What the taps of a process are told and what they report, on any device.

Configurations and vectors are put in when the client sends them; a step's tables are opened before the forward pass and
closed after it. Some time later the step is completed: it is known how every token was labelled, edited and copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from msgspec import structs

from steercap.core.messages import TableBytes
from steercap.core.program import Configuration
from steercap.core.rows import Ints
from steercap.core.schema import PointSchema
from steercap.worker.accumulators import Accumulators, Updates
from steercap.worker.arena import Arena
from steercap.worker.batch import BatchRows
from steercap.worker.layouts import Layout, Layouts
from steercap.worker.programs import Programs
from steercap.worker.step import Step, Witness


@dataclass(frozen=True)
class TapSizes:
    """How large the tables are; fixed before the model is traced.

    Args:
        slots: configurations held at once.
        bank_rows: rows of the vector bank.
        entries: most rank-one edits of a point.
        tokens: most tokens of a pass, padding included.
        arena_bytes: device memory for the rows of passes that are being copied away; None for twice what the largest
            pass can need, unless that is much of the device. Nothing on CPU, where rows need no copy.
        accumulators: reductions that can run along with their requests at once, each in an accumulator.
        lag: how many positions vLLM may compute past the end of a sequence, rejected drafts among them.
        held: the most rows of a request at once that may turn out not to be of its sequence.
    """

    slots: int
    bank_rows: int
    entries: int
    tokens: int
    arena_bytes: int | None = None
    accumulators: int = 0
    lag: int = 0
    held: int = 1


@dataclass(frozen=True)
class Kind:
    """What the rows of some points of a rank are.

    Args:
        schema: of all of them.
        first: where the rank's part of a row begins in it, in elements.
    """

    schema: PointSchema
    first: int

    @property
    def width(self) -> int:
        """Elements of the rank's part of a row."""
        return self.schema.shard_width


@dataclass(frozen=True)
class Installed:
    """The points of a rank at which taps were put in.

    Args:
        points: indices among the engine's armed points, ascending; the index in this tuple is the number that the tap
            of a point carries.
        schemas: of these points.
        kept: which of them this rank keeps rows of: what is whole on every rank is kept by the first.
        shard: which shard of what is split this rank has.
    """

    points: tuple[int, ...]
    schemas: tuple[PointSchema, ...]
    kept: tuple[bool, ...]
    shard: int = 0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of its rows, each once, in the order of the points; `changes_kv` is left out."""
        return tuple(dict.fromkeys(self.kind_of(schema) for schema in self.schemas))

    def kind_of(self, schema: PointSchema) -> Kind:
        """What rows of such a point are here."""
        first = self.shard * schema.shard_width if schema.shards > 1 else 0
        return Kind(structs.replace(schema, changes_kv=True), first)

    @property
    def captures(self) -> bool:
        """Whether this rank keeps rows of any point."""
        return any(self.kept)

    @property
    def bank_width(self) -> int:
        """Elements of a row of the widest point, on all ranks together: a vector of any of them fits."""
        return max((schema.width for schema in self.schemas), default=1)


class Taps(ABC):
    """The tables behind the taps of one rank.

    Args:
        installed: this rank's points.
        sizes: how large the tables are.
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
        """Put rows into `arena` from now on."""
        self.arena = arena

    @property
    @abstractmethod
    def table_bytes(self) -> TableBytes:
        """What the tables take beside the arena."""

    @abstractmethod
    def configure(self, slot: int, configuration: Configuration, bank_rows: Sequence[Sequence[int]]) -> None:
        """Write a configuration into a slot; `bank_rows` are those of each of its blobs."""

    @abstractmethod
    def put(self, bank_rows: Sequence[int], vectors: Float[torch.Tensor, "rows width"]) -> None:
        """Write vectors into the bank; they may be narrower than its rows."""

    @abstractmethod
    def open(self, step: Step, batch: BatchRows, updates: Updates | None) -> str | None:
        """Fill the tables for the pass that is about to run.

        Args:
            step: its tracked tokens.
            batch: all of it.
            updates: what it does to the reductions that run along, None if nothing.

        Returns:
            Why its rows cannot be kept (its edits are made all the same), or None.
        """

    @abstractmethod
    def close(self, failure: str | None) -> None:
        """The pass that was opened has been run, or failed: every tap is idle until the next one."""

    @abstractmethod
    def spill(self, accumulator: int, layout: Layout, lines: Ints) -> Any:
        """Copy a reduction, and the rows it holds apart, to the arena, as the passes closed so far leave them.

        Args:
            accumulator: which.
            layout: of its rows.
            lines: first lines of records: the first for the reduced rows, the last ones for what each slot holds.

        Returns:
            The event behind the copy.
        """

    @abstractmethod
    def finish(self, updates: Updates, divisors: Ints, layouts: Sequence[Layout], lines: Ints) -> Any:
        """Carry out updates of held rows alone, divide, and copy the reductions to the arena.

        Args:
            updates: one per reduction.
            divisors: what each is divided by.
            layouts: of the rows of each.
            lines: first line of each in the arena, for float32 rows.

        Returns:
            The event behind the copy.
        """

    @abstractmethod
    def wait_for(self, event: Any) -> None:
        """Wait until what `spill` or `finish` copies is in the arena."""

    @property
    @abstractmethod
    def pending(self) -> Sequence[Step]:
        """Steps that were closed and are not completed yet, in their order."""

    @property
    def blocking(self) -> Step | None:
        """A step that must be completed before another can be opened."""
        return None

    @abstractmethod
    def completed(self, through: Step | None = None) -> Iterator[tuple[Step, Witness]]:
        """Steps whose passes have run and whose rows are in the arena, in their order; each once.

        Args:
            through: wait until this one is among them.
        """

    @abstractmethod
    def on_tap(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: Int[torch.Tensor, " 1"],
        kind: int,
    ) -> None:
        """Copy and edit the rows wanted at `point`; called by the operator, once per point and pass.

        Args:
            hidden, residual, point: as for `kernels.tap.tap`.
            kind: which of `installed.kinds` the point's rows are of.
        """
